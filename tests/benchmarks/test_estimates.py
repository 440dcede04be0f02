"""What the benchmarks' figures mean: ratios within rounds, intervals over processes, and none without controls."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import estimate, tables  # noqa: E402
from benchmarks.estimate import Estimate  # noqa: E402
from benchmarks.results import Results, read  # noqa: E402
from benchmarks.suite import workloads  # noqa: E402

FACTS = {"parameters": 100, **{f"bytes_{kind}": 400 for kind in ("weights", "masters", "gradients", "states")}}
FACTS |= {"peak_bytes": 2000}


def bert(times: dict[str, list[float]]) -> Results:
    """The encoder, where each contender's processes took these times."""
    row = workloads("full")["bert"]
    results = Results("bert", replace(row, contenders=tuple(times)))
    results.common = {"machine": "some CPU", "cores": 2, "torch": "2.13", "date": "2026-01-01", "source": "x"}
    for name, processes in times.items():
        for number, seconds in enumerate(processes):
            answer = {"values": [2 * seconds, seconds], "loops": 1, "wall_s": seconds, "facts": FACTS}
            results.add(name, number, answer)
    return results


def test_the_interval_is_that_of_medians_of_processes_drawn_again() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert estimate.over_processes(values) == Estimate(3.0, 1.0, 100.0)
    # With more processes, one that was disturbed no longer reaches into the interval.
    assert estimate.over_processes([1.0] * 8 + [100.0]) == Estimate(1.0, 1.0, 1.0)
    assert estimate.over_processes([4.0]) == Estimate(4.0, 4.0, 4.0)


def test_every_turn_counts_and_processes_are_drawn_with_theirs() -> None:
    found = estimate.over_turns([[1.0, 1.0, 1.0], [1.0, 3.0], [3.0]])
    assert found == Estimate(1.0, 1.0, 3.0)
    assert estimate.over_turns([[1.0, 2.0], [3.0, 4.0]]) == Estimate(2.5, 1.5, 3.5)
    # As one draws by hand.
    draw, processes = random.Random(5), [[random.Random(n).gauss(1.0, 0.1) for _ in range(9)] for n in range(7)]
    drawn = [[turn for one in draw.choices(processes, k=7) for turn in one] for _ in range(2000)]
    medians, found = sorted(map(median, drawn)), estimate.over_turns(processes)
    assert found.median == median([turn for one in processes for turn in one])
    assert (found.low, found.high) == pytest.approx((medians[50], medians[-51]), abs=0.01)


def test_the_interval_covers_the_true_median_nearly_always() -> None:
    draw, covered = random.Random(3), 0
    for _ in range(60):
        found = estimate.over_processes([draw.gauss(1.0, 0.05) for _ in range(9)])
        covered += found.low <= 1.0 <= found.high
    assert 52 <= covered <= 60


def test_ratios_are_taken_turn_by_turn() -> None:
    # A machine that is ten times slower for a round, or for a turn of one, changes no ratio.
    ours = {0: [2.0, 20.0, 2.0], 1: [20.0, 30.0], 2: [2.0]}
    theirs = {0: [1.0, 10.0, 1.0, 1.0], 1: [10.0, 15.0], 2: [1.0], 3: [7.0]}
    assert estimate.ratio(ours, theirs) == Estimate(2.0, 2.0, 2.0)
    # One of three turns that was disturbed changes nothing either, and absolute times are those of the best turn.
    assert estimate.ratio({0: [2.0, 9.0, 2.0]}, {0: [1.0, 1.0, 1.0]}) == Estimate(2.0, 2.0, 2.0)
    assert estimate.seconds({0: [2.0, 9.0], 1: [2.0], 2: [3.0, 2.0]}) == Estimate(2.0, 2.0, 2.0)


STEADY = {"fp32": [1.0] * 5, "fp32_again": [1.01] * 5, "o0": [0.99] * 5, "o2_bf16": [0.5] * 5}


def test_a_figure_is_shown_where_the_controls_hold() -> None:
    results = bert(STEADY)
    assert results.is_measurable()
    assert tables.relative(results, "o2_bf16", "fp32") == "0.50 [0.50, 0.50]"
    assert tables.relative(results, "optimi", "fp32") == tables.relative(results, "o2_bf16", "optimi") == "-"


@pytest.mark.parametrize(
    "control",
    [
        {"fp32_again": [1.0, 1.0, 1.0, 1.0, 1.04]},
        {"o0": [0.96, 1.0, 1.0, 1.0, 1.0]},
        {"o0": [1.5] * 5},
        {"fp32_again": []},
        {"fp32_again": [1.0] * 4},
    ],
)
def test_no_figure_is_shown_where_a_control_does_not_hold_or_is_missing(control: dict[str, list[float]]) -> None:
    results = bert({**STEADY, **control})
    assert not results.is_measurable()
    assert tables.relative(results, "o2_bf16", "fp32") == "not measurable here"
    shown = tables.pairs({"bert": bert({**STEADY, **control, "hand_bf16": [1.0] * 5})})
    assert "not measurable here" in shown and "0.50" not in shown


def test_a_contender_that_fails_once_is_missing_with_its_reason() -> None:
    results = bert({**STEADY, "optimi": [0.7] * 4})
    results.add("optimi", 4, {"failed": "RuntimeError: a | b"})
    assert results.rounds("optimi") == {} and tables.relative(results, "optimi", "fp32") == "-"
    assert "RuntimeError: a / b" in tables.missing({"bert": results})


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = bert({**STEADY, "optimi": [0.7] * 4})
    results.missing["torchao"] = "unavailable: not installed"
    results.write(tmp_path / "bert.json")
    again = read(tmp_path / "bert.json", results.workload)
    assert again.missing == results.missing and again.common == results.common
    for name in results.runs:
        assert again.rounds(name) == {number: tuple(values) for number, values in results.rounds(name).items()}
        assert again.facts(name) == results.facts(name)
    assert again.ratio("o2_bf16", "fp32") == results.ratio("o2_bf16", "fp32")
