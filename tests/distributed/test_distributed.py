"""Two processes over gloo: DistributedDataParallel and FSDP2 at every level. One launch runs all the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
from distributed_worker import CHECKS

WORKER = Path(distributed_worker.__file__)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    report = tmp_path_factory.mktemp("distributed") / "outcomes.json"
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER), str(report)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found: dict[str, str] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    missing = f"never ran; the launch ended with {launched.returncode}: {launched.stderr[-3000:]}"
    return dict.fromkeys(CHECKS, missing) | found


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == "ok", outcomes[name]
