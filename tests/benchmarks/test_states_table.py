"""The table of final losses in the documentation is what the committed results say."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import states

ROOT = Path(__file__).parents[2]
LOSSES = json.loads((ROOT / "benchmarks/results/states-cpu.json").read_text())["losses"]


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/explanation/optimizer-states.md").read_text(encoding="utf-8")
    block = page.partition("<!-- states -->\n")[2].partition("\n<!-- end of states -->")[0]
    assert block.splitlines() == list(states.table(LOSSES))


def test_encoded_states_end_within_the_spread_of_the_seeds() -> None:
    for by_optimizer in LOSSES.values():
        for by_state in by_optimizer.values():
            float32 = by_state["float32"]
            for name in ("bfloat16", "int8"):
                away = abs(statistics.mean(by_state[name]) - statistics.mean(float32))
                assert len(by_state[name]) == 5 and away <= max(float32) - min(float32)


def test_it_measures_and_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, threads = tmp_path / "states.json", torch.get_num_threads()
    words = ["--tasks", "digits CNN", "--optimizers", "Adam", "--seeds", "2", "--steps", "2", "--json", str(written)]
    try:
        with torch.random.fork_rng():
            states.main(words)
    finally:
        torch.set_num_threads(threads)
    states.main(["--table", str(written)])
    losses = json.loads(written.read_text(encoding="utf-8"))["losses"]
    assert {name: len(each) for name, each in losses["digits CNN"]["Adam"].items()} == dict.fromkeys(states.STATES, 2)
    assert capsys.readouterr().out.splitlines() == list(states.table(losses))
