"""A launch by torchrun whose ranks were given different keywords ends by itself, and every rank says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, time, torch, mpinit
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
level = ("O2", "O5")[int(os.environ["RANK"])]
start = time.monotonic()
try:
    mpinit.initialize(model, optimizer, opt_level=level, verbosity=0)
    torch.nn.parallel.DistributedDataParallel(model)
finally:
    print("took", time.monotonic() - start, flush=True)
"""


@pytest.mark.long
def test_mixed_levels_end_with_the_message_on_both_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mixed.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "--redirects=3", f"--log-dir={tmp_path}", str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    said = [path.read_text() for path in sorted(tmp_path.rglob("stderr.log"))]
    assert len(said) == 2
    assert all("opt_level is 'O2' on rank 0 and 'O5' on rank 1" in each for each in said), said
    took = [float(path.read_text().split("took")[1]) for path in tmp_path.rglob("stdout.log")]
    assert max(took) < 15, took
