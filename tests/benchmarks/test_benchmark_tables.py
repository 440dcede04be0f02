"""The README's benchmark tables are what the committed results say."""

from __future__ import annotations

from pathlib import Path

from examples.benchmarks.readme_block import CONTENDERS, block, ratio, replaced
from examples.benchmarks.roster import ROSTER

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_what_the_results_say() -> None:
    assert replaced(README) == README
    assert block() in README


def test_every_row_of_the_tables_is_a_contender() -> None:
    assert set(CONTENDERS) <= set(ROSTER)


def test_a_ratio_is_the_median_over_rounds_of_ratios_within_them() -> None:
    ours, theirs = ({"turns_ms": [{"total": t} for t in turns]} for turns in ((2.0, 9.0, 8.0), (1.0, 3.0, 2.0)))
    assert ratio(ours, theirs) == "3.00"
    assert ratio(None, theirs) == "-"
