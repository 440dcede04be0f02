"""examples: each runs as a user would run it, in a process of its own, and says what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_minimal_example_is_minimal() -> None:
    assert len((ROOT / "examples" / "minimal.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_minimal_example_trains_and_resumes(level: str) -> None:
    first, resumed = run("examples/minimal.py", level).splitlines()
    start, end = (float(part.split()[0].strip(",")) for part in first.split("loss ", 1)[1].split(" -> "))
    assert first.startswith(level)
    assert end < start / 10
    assert float(resumed.removeprefix("resumed: loss ")) < start / 10


def test_the_demo_prints_its_table_and_writes_its_plot(tmp_path: Path) -> None:
    names = ["O0 fp32", "O1 bf16", "O2 fp16", "O2 bf16", "O3 bf16"]
    output = run("examples/digits.py", "--epochs", 2, "--width", 4, "--out", tmp_path, "--only", *names)
    rows = [line.split() for line in output.splitlines()]
    for name in names:
        assert any(" ".join(row[:2]) == name for row in rows), f"{name} is missing from the table"
    assert "points from O0" in output
    plot = tmp_path / "loss_and_scale.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 20_000
    assert (tmp_path / "table.txt").read_text(encoding="utf-8") in output


def test_the_demo_refuses_settings_it_does_not_have(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/digits.py", "--only", "O9 fp16", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "O9 fp16" in done.stderr
    assert "O2 bf16" in done.stderr, "the error lists what there is"
