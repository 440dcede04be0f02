"""Several processes over gloo: torch's engines at every level. One launch runs all the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import distributed_launch
import pytest

NAMES = [name for checks in distributed_launch.CHECKS.values() for name in checks]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    report = tmp_path_factory.mktemp("distributed") / "outcomes.json"
    launched = subprocess.run(
        [sys.executable, distributed_launch.__file__, str(report)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(report.parent)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found: dict[str, str] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    missing = f"never ran; the launch ended with {launched.returncode}: {launched.stderr[-3000:]}"
    return dict.fromkeys(NAMES, missing) | found


@pytest.mark.parametrize("name", NAMES)
def test_processes(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == "ok", outcomes[name]
