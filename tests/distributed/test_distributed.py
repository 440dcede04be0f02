"""Several processes over gloo: torch's engines at every level. One launch runs all the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_launch
import pytest

NAMES = [name for checks in distributed_launch.CHECKS.values() for name in checks]
NIGHTLY = [name for checks in distributed_launch.NIGHTLY.values() for name in checks]


def launch(report: Path, *words: str) -> dict[str, str]:
    """What came of each check that has run, and why the others have not."""
    launched = subprocess.run(
        [sys.executable, distributed_launch.__file__, str(report), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(report.parent)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found: dict[str, str] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    missing = f"never ran; the launch ended with {launched.returncode}: {launched.stderr[-3000:]}"
    return dict.fromkeys(NAMES + NIGHTLY, missing) | found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return launch(tmp_path_factory.mktemp("distributed") / "outcomes.json")


@pytest.fixture(scope="module")
def outcomes_of_the_night(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return launch(tmp_path_factory.mktemp("distributed") / "outcomes.json", "nightly")


@pytest.mark.parametrize("name", NAMES)
def test_processes(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == "ok", outcomes[name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_processes_of_the_night(name: str, outcomes_of_the_night: dict[str, str]) -> None:
    assert outcomes_of_the_night[name] == "ok", outcomes_of_the_night[name]
