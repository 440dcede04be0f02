"""The benchmarks: ways train, the loop by hand is like mpinit, processes take turns, tables show the files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mpinit  # noqa: E402
from benchmarks import measure, tables  # noqa: E402
from benchmarks.cases import QUICK, Iterations, Steps, bytes_by_kind, make_task, workloads  # noqa: E402
from benchmarks.ways import EXTRAS, WAYS, Float32, build  # noqa: E402


@pytest.mark.parametrize("name", WAYS)
def test_every_way_trains(name: str) -> None:
    way = build(name, make_task(QUICK, "cpu"))
    inputs, target = way.task.batches[0]
    way.task.batches[:] = [(inputs, target)]
    before = way.loss(inputs, target).item()
    for _ in range(20):
        way.iterate()
    assert way.loss(inputs, target).item() < 0.9 * before


@pytest.mark.parametrize(("by_hand", "ours"), [("hand_bf16", "o5"), ("hand_fp16", "o2")])
@pytest.mark.parametrize("extra", ["", *(extra for extra in EXTRAS if "_" not in extra)])
def test_loop_by_hand_does_what_mpinit_does(by_hand: str, ours: str, extra: str) -> None:
    suffix = f"+{extra}" if extra else ""
    found = {}
    for name in (by_hand, ours):
        way = build(f"{name}{suffix}", make_task(QUICK, "cpu"))
        for _ in range(3):
            way.iterate()
        found[name] = [weight.detach().float() for weight in way.model.parameters()]
    torch.testing.assert_close(found[by_hand], found[ours], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "name", [name for name, row in workloads().items() if getattr(row.case, "func", None) is Iterations]
)
def test_names_of_a_workload_are_ways_and_extras(name: str) -> None:
    for way, _, extra in (each.partition("+") for each in workloads()[name].names):
        assert way in WAYS and extra in {"", *EXTRAS}


@pytest.mark.long
def test_a_run_writes_a_file_that_the_tables_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    measure.run(["launch_bf16", "memory", "import"], "cpu", rounds=2, quick=True, folder=tmp_path / "cpu")
    result = json.loads((tmp_path / "cpu/launch_bf16.json").read_text())
    assert {len(turns) for rounds in result["seconds"].values() for turns in rounds} == {2}
    assert "| O5 |" in tables.iterations("cpu", ["launch_bf16"]) and "mpinit O5" in tables.memory("cpu")
    assert "import mpinit" in tables.setting_up("cpu") and tables.loops("cpu") == ""


def test_a_step_moves_weights_a_missing_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Steps("split", "cpu", QUICK)
    before = [weight.detach().clone() for weight in case.way.model.parameters()]
    assert case.seconds(3) > 0
    assert not any(map(torch.equal, before, case.way.model.parameters()))
    (tmp_path / "cpu").mkdir()
    seconds = {"o5": [[0.5]], "o5_again": [[0.5]], "split": [[1.0]]}
    (tmp_path / "cpu/steps.json").write_text(json.dumps({"seconds": seconds, "workload": "steps"}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| O5, split | 1000.00 | 2.00 [2.00, 2.00] |" in tables.steps("cpu")
    assert "compile_steps(optimizer) | - | no compiler" in tables.steps("cpu")


def test_a_ratio_compares_turns_and_a_control_decides() -> None:
    hand = [[1.0, 2.0, 1.0]] * 3
    result: dict[str, Any] = {"seconds": {"hand_bf16+clip": hand, "hand_bf16_again+clip": [[1.0, 2.0, 1.1]] * 3}}
    result["seconds"]["o5+clip"] = [[2.0, 4.0, 3.0], [1.0, 2.0, 1.0], [3.0, 6.0, 3.0]]
    assert measure.ratio(result, "o5+clip", "hand_bf16+clip") == (2.0, 1.0, 3.0)
    assert measure.control_of(result) == ("hand_bf16_again+clip", "hand_bf16+clip") and measure.is_quiet(result)
    result["seconds"]["hand_bf16_again+clip"] = [[1.1, 2.2, 1.1]] * 3
    assert not measure.is_quiet(result)


def test_bytes_by_kind_are_what_arithmetic_says() -> None:
    way = Float32(make_task(QUICK, "cpu"))
    way.iterate()
    inputs, target = way.task.batches[0]
    way.backward(way.loss(inputs, target))
    numbers = sum(parameter.numel() for parameter in way.model.parameters())
    found = bytes_by_kind(way.task, way.model, way.optimizer)
    steps = 4 * len(way.optimizer.state)
    assert (found["weights"], found["gradients"], found["states"]) == (4 * numbers, 4 * numbers, 8 * numbers + steps)


@pytest.mark.parametrize(
    "page", [page for page in tables.PAGES if tables.MARKED.search(page.read_text("utf-8"))], ids=str
)
def test_tables_are_those_of_the_committed_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.replaced(text) == text, "run: make bench-tables"


def test_mpinit_is_undone() -> None:
    way = build("o5", make_task(QUICK, "cpu"))
    mpinit.undo(way.model)
    assert next(way.model.parameters()).dtype is torch.float32
