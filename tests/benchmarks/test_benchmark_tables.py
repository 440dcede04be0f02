"""Figures, intervals and controls of committed results, and the tables and pictures that are made of them."""

import json
import socket
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import charts, engines, estimate, stamps, states, tables  # noqa: E402
from benchmarks.comparisons import COMPARISONS  # noqa: E402
from benchmarks.estimate import Estimate  # noqa: E402
from benchmarks.results import Results, read  # noqa: E402
from benchmarks.suite import workloads  # noqa: E402

FOLDER = tables.machines()[0]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.name))
def test_page_has_the_numbers_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.replaced(text, FOLDER) == text, "run `make bench-tables`"
    assert "benchmarks" in text and text.count(": begin -->") >= 1


def test_pictures_are_as_new_as_their_results() -> None:
    made = charts.drawn_from(tables.load(FOLDER), FOLDER)
    assert made and set(FOLDER.glob("*.png")) == set(made)
    for path, results in made.items():
        assert stamps.read(path) == stamps.of_results(results), f"{path.name} is older than its data: make bench-tables"


def test_the_picture_of_fine_tuning_is_of_the_run_in_the_table() -> None:
    result = tables.FINETUNED.read_text(encoding="utf-8")
    assert stamps.read(tables.FINETUNED.with_suffix(".png")) == stamps.of_text(result)


def test_a_stamp_follows_every_number(tmp_path: Path) -> None:
    before, after = bert({"fp32": [1.0, 2.0]}), bert({"fp32": [1.0, 2.1]})
    assert stamps.of_results([before]) == stamps.of_results([bert({"fp32": [1.0, 2.0]})]) != stamps.of_results([after])
    before.write(tmp_path / "bert.json")
    again = read(tmp_path / "bert.json", before.workload)
    assert stamps.of_results([again]) == stamps.of_results([read(tmp_path / "bert.json", before.workload)])
    assert stamps.read(ROOT / "examples" / "results" / "digits.png") is None


def test_no_page_has_a_cell_without_a_number() -> None:
    for page in (*tables.PAGES, engines.PAGE):
        rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        assert not [row for row in rows if tables.NOT_MEASURABLE in row]


def test_every_block_is_shown_somewhere() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for name in tables.blocks({}, FOLDER):
        assert f"<!-- benchmarks {name}: begin -->" in shown


@pytest.mark.long
def test_pictures_are_committed_and_can_be_drawn_again(tmp_path: Path) -> None:
    drawn = charts.draw(tables.load(FOLDER), tmp_path)
    assert drawn
    for path in drawn:
        assert path.stat().st_size > 10_000
        assert (FOLDER / path.name).exists()


def test_no_number_is_shown_where_controls_do_not_hold() -> None:
    for results in tables.load(FOLDER).values():
        if results.workload.kind == "training" and not results.is_measurable():
            cells = {tables.relative(results, name, "fp32") for name in results.workload.contenders}
            assert cells <= {tables.NOT_MEASURABLE, "-"}


def test_comparisons_name_workloads_and_contenders_that_exist() -> None:
    rows = workloads("full")
    for comparison in COMPARISONS:
        assert {comparison.above, comparison.below} <= set(rows[comparison.workload].contenders), comparison
        assert comparison.estimate(Results(comparison.workload, rows[comparison.workload])) is None


LOSSES = json.loads((ROOT / "benchmarks/results/states-cpu.json").read_text())["losses"]


def test_the_page_has_the_table() -> None:
    page = tables.STATES.read_text(encoding="utf-8")
    assert tables.replaced_states(page) == page
    block = page.partition("<!-- states -->\n")[2].partition("\n<!-- end of states -->")[0]
    assert block.splitlines() == list(states.table(LOSSES))


def test_encoded_states_end_within_the_spread_of_the_seeds() -> None:
    for by_optimizer in LOSSES.values():
        for by_state in by_optimizer.values():
            float32 = by_state["float32"]
            for name in ("bfloat16", "int8"):
                away = abs(statistics.mean(by_state[name]) - statistics.mean(float32))
                assert len(by_state[name]) == 5 and away <= max(float32) - min(float32)


def test_benchmark_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    found = {"bert": bert({**STEADY, **control, "hand_bf16": [1.0] * 5})}
    for shown in (tables.pairs(found), tables.training(found, FOLDER, "bfloat16")):
        assert shown == "Left out, not measurable here (a control is not within [0.97, 1.03]): bert."
    assert charts.drawn_from(found, FOLDER) == {}


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


sys.path.insert(0, str(Path(__file__).parents[2]))


def test_the_guide_repeats_what_was_measured() -> None:
    result = json.loads(engines.RESULT.read_text(encoding="utf-8"))
    page = engines.PAGE.read_text(encoding="utf-8")
    assert engines.with_table(page, result) == page
    assert {(row["engine"], row["level"]) for row in result["rows"]} == {
        (engine, level) for engine, levels in engines.ENGINES.items() for level in levels
    }


@pytest.mark.long
def test_benchmark_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, result, threads = tmp_path / "engines.md", tmp_path / "engines.json", torch.get_num_threads()
    page.write_text(engines.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    tiny = {"RANKS": 1, "WIDTH": 32, "PARAMETERS": engines.LAYERS * 33 * 32, "PAGE": page, "RESULT": result}
    few = {"ENGINES": {"DDP": ("O2", "split"), "FSDP2": ("O2",)}}
    for name, value in (tiny | few).items():
        monkeypatch.setattr(engines, name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        engines.run(0, port)
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    assert [row["bytes"]["weights"] for row in rows] == [2.0, 2.0, 4.0], "FSDP2's weights are the masters"
    assert [row["bytes"]["optimizer states"] for row in rows] == [8.0] * 3
    assert '| DDP | O5, `"split"` |' in page.read_text(encoding="utf-8")
