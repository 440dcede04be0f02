"""examples/distributed.py under torchrun: trained in one go, and with a worker killed on the way; the same bits."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import distributed_example
import pytest

PROPERTIES = (
    "O0", "O1:cast_scope=model", "O2", "O3:cast_model_type=bfloat16", "O4:cast_scope=model",
    "O5", "O5:master_weights=split", "O5:master_weights=model",
)  # fmt: skip
RUNS = (*(f"digits:{properties}" for properties in PROPERTIES), "text:O2", "stages:O2")
# torch's own processes find one another again after a crash, mostly; over gloo a restart may hang, and log nothing.
ATTEMPTS, SECONDS = 2, 150


def launch(folder: Path) -> str | None:
    """What the processes log, launcher included; None where they hang."""
    torchrun = [sys.executable, distributed_example.__file__, str(folder), "3"]
    with subprocess.Popen(
        [*torchrun, "--steps=4", "--save-every=2", "--batch=8", "--runs", *RUNS],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as launched:
        assert launched.stdout is not None
        log, since = "", time.monotonic()
        while time.monotonic() - since < SECONDS:
            ready, _, _ = select.select([launched.stdout], [], [], 1)
            more = os.read(launched.stdout.fileno(), 1 << 16).decode(errors="replace") if ready else None
            if more == "":
                assert launched.wait() == 0, log[-4000:]
                return log
            if more:
                log, since = log + more, time.monotonic()
        os.killpg(launched.pid, signal.SIGTERM)
    return None


@pytest.mark.long
def test_it_trains_and_after_a_killed_worker_ends_with_the_same_bits(tmp_path: Path) -> None:
    log = next(filter(None, (launch(tmp_path / str(attempt)) for attempt in range(ATTEMPTS))), None)
    if log is None:
        pytest.skip(f"torchrun's restart hung {ATTEMPTS} times")
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
import os, time, torch, mpinit
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = time.monotonic()
try:
    mpinit.initialize(model, optimizer, "O2", verbosity=0, loss_scale=128.0 * 2 ** torch.distributed.get_rank())
    torch.nn.parallel.DistributedDataParallel(model)
finally:
    print(f"after {time.monotonic() - start:.2f} s", flush=True)
"""


@pytest.mark.long
def test_keywords_that_differ_end_a_launch_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mixed.py"
    script.write_text(MIXED, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 1
    assert ended.stderr.count("loss_scale is 128.0 on rank 0 and 256.0 on rank 1") == 2, ended.stderr[-4000:]
    waited = [float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("after")]
    assert len(waited) == 2 and max(waited) < 15
