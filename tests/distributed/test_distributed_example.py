"""examples/distributed.py under torchrun: trained in one go, and with a worker killed on the way; the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distributed_example
import pytest

PROPERTIES = (
    "O0", "O1:cast_scope=model", "O2", "O3:cast_model_type=bfloat16", "O4:cast_scope=model",
    "O5", "O5:master_weights=split", "O5:master_weights=model",
)  # fmt: skip
RUNS = (*(f"digits:{properties}" for properties in PROPERTIES), "text:O2", "stages:O2")
# Processes that torch 2.13 started again share a store with addresses of those before them, and may wait for one that
# is gone; with this each start has a store of its own.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(folder: Path) -> str:
    """What the processes log, launcher included."""
    torchrun = [sys.executable, distributed_example.__file__, str(folder), "3"]
    ran = subprocess.run(
        [*torchrun, "--steps=4", "--save-every=2", "--batch=8", "--runs", *RUNS],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | OWN_STORE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return ran.stdout


@pytest.mark.long
def test_it_trains_and_after_a_killed_worker_ends_with_the_same_bits(tmp_path: Path) -> None:
    log = launch(tmp_path)
    said = [line for line in log.splitlines() if line.startswith(("from step", "step", *RUNS))]
    starts = [line for line in said if line.startswith("from")]
    # In one go; until it is killed; what is over, and the other from its checkpoint on.
    assert starts == ["from step 0", "from step 0", "from step 4", "from step 2"]
    for line in (line for line in said if line.startswith("step")):
        losses = dict(part.split() for part in line.split(": ", 1)[1].split(", "))
        assert tuple(losses) == RUNS
        assert all(0 < float(loss) < 7 for loss in losses.values()), losses
    ends = [line for line in said if " ends as " in line]
    count = len(RUNS)
    assert len(ends) == 3 * count and len(set(ends)) == count
    assert ends[:count] == ends[count : 2 * count] == ends[2 * count :]
    assert len({line.split()[-1] for line in ends}) == count


MIXED = """
import pathlib, sys, time, torch, mpinit
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = time.monotonic()
try:
    mpinit.initialize(model, optimizer, "O2", verbosity=0, loss_scale=128.0 * 2**rank)
    torch.nn.parallel.DistributedDataParallel(model)
except Exception as error:
    folder = pathlib.Path(sys.argv[1])
    (folder / f"{rank}.part").write_text(f"{time.monotonic() - start} {error}")
    (folder / f"{rank}.part").rename(folder / f"{rank}.txt")
    # The launcher ends the other process as soon as this one has failed: that one's own error comes first.
    while not (folder / f"{1 - rank}.txt").exists() and time.monotonic() - start < 60:
        time.sleep(0.01)
    raise
"""


@pytest.mark.long
def test_keywords_that_differ_end_a_launch_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mixed.py"
    script.write_text(MIXED, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 1
    errors = [(tmp_path / f"{rank}.txt") for rank in range(2)]
    assert all(error.exists() for error in errors), ended.stderr[-4000:]
    for error in errors:
        waited, text = error.read_text(encoding="utf-8").split(" ", 1)
        assert "loss_scale is 128.0 on rank 0 and 256.0 on rank 1" in text
        assert float(waited) < 15
