"""Loops with extras: each trains as its counterpart by hand does, and its figures are shown over that one's."""

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mpinit  # noqa: E402
from benchmarks import loops, tables  # noqa: E402
from benchmarks.__main__ import parse  # noqa: E402
from benchmarks.comparisons import COMPARISONS  # noqa: E402
from benchmarks.contenders import HandWritten  # noqa: E402
from benchmarks.protocol import STARTING_MINUTES  # noqa: E402
from benchmarks.results import Results  # noqa: E402
from benchmarks.suite import title_of, workloads  # noqa: E402
from benchmarks.tasks import TASKS  # noqa: E402
from benchmarks.with_mpinit import Mpinit  # noqa: E402

ROWS = {name: row for name, row in workloads("full").items() if row.target == "bench-loops"}
EXTRAS = [name for name in loops.EXTRAS if name != "checkpoint"]
PAIRS = [(level.by_hand, level.ours[0]) for level in loops.LEVELS.values()]


@contextmanager
def trained(task: str, name: str, repetitions: int = 4) -> Iterator[loops.LoopTraining]:
    """Train for a few repetitions; not all of them may overflow."""
    case = loops.LoopTraining(task, name, TASKS[task].sizes["quick"], "cpu")
    case.build()
    before = next(case.contender.model.parameters()).detach().clone()
    try:
        case.seconds(repetitions)
        assert not torch.equal(next(case.contender.model.parameters()), before)
        yield case
    finally:
        if isinstance(case.contender, Mpinit):
            mpinit.undo(case.contender.model)


def values(case: loops.LoopTraining) -> list[Tensor]:
    """Return float32 weights, and what the extra made."""
    contender = case.contender
    if isinstance(contender, HandWritten):
        return [*contender.stepped, *case.work.made]
    return [*contender.model.state_dict().values(), *case.work.made]


@pytest.mark.parametrize("task", loops.TASKS_OF_LOOPS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_loop_trains_as_the_one_by_hand_does(task: str, extra: str) -> None:
    counterpart = loops.EXTRAS[extra].counterpart or extra
    for by_hand, ours in PAIRS:
        with trained(task, f"{by_hand}+{counterpart}") as expected, trained(task, f"{ours}+{extra}") as case:
            sides = values(case), values(expected)
        assert len(sides[0]) == len(sides[1]) > 0
        for found, wanted in zip(*sides, strict=True):
            assert found.dtype is torch.float32
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("way", ["o2_split", "amp_fp16", "amp_bf16", "fp32"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_loop_trains_with_every_variant(way: str, extra: str) -> None:
    if not loops.LEVELS["o5"].measures(way, extra):
        pytest.skip("master_params() yields 16-bit weights with split masters")
    with trained("launch_adamw", f"{way}+{extra}") as case:
        assert math.isfinite(case.step())


def gradient_norm(name: str) -> float:
    """Return the norm of the gradients that a step uses."""
    case = loops.LoopTraining("bandwidth_adamw", name, {"tensors": 4, "side": 640}, "cpu")
    case.build()
    contender, found = case.contender, []

    def update() -> None:
        groups = contender.optimizer.param_groups
        found.append(torch.stack([p.grad.norm(dtype=torch.float32) for g in groups for p in g["params"]]).norm())

    contender.update = update  # type: ignore[method-assign]
    case.step()
    if isinstance(contender, Mpinit):
        mpinit.undo(contender.model)
    return float(found[0])


@pytest.mark.parametrize("way", [way for level in loops.LEVELS.values() for way in (level.by_hand, *level.ours)])
def test_clipping_changes_what_is_stepped(way: str) -> None:
    assert gradient_norm(f"{way}+none") > 1.1
    extras = ("clip_model",) if way.startswith("hand") else loops.CLIPPING
    assert [gradient_norm(f"{way}+{extra}") for extra in extras] == pytest.approx([1.0] * len(extras), rel=5e-3)


def test_iterations_and_backward_passes_are_counted() -> None:
    batches = {"none": 1, "accumulation": loops.ACCUMULATED, "checkpoint": 50, "checkpoint_10": 10}
    for extra, number in batches.items():
        with trained("launch_adamw", f"fp32+{extra}", 1) as case:
            assert case.batches_used == number


def test_gradients_are_zeroed_in_place_where_none_is_not_wanted() -> None:
    for way in ("hand_fp16", "hand_bf16", "o2_fp16", "o2_bf16", "o2_split", "fp32"):
        with trained("launch_adamw", f"{way}+zero_grad") as case:
            assert all(p.grad is not None and not p.grad.any() for p in case.contender.model.parameters())
        with trained("launch_adamw", f"{way}+none") as case:
            assert all(p.grad is None for p in case.contender.model.parameters())


def test_loops_are_a_target_of_their_own_within_half_an_hour() -> None:
    assert parse(["run"]).targets == ("bench",) and parse(["run", "--targets", "bench-loops"]).targets == [
        "bench-loops"
    ]
    assert STARTING_MINUTES + sum(row.minutes for row in ROWS.values()) < 30
    measured = {extra for row in loops.loop_rows().values() for extra in row.extras}
    split = {extra for extra in loops.EXTRAS if not loops.LEVELS["o5"].measures(loops.SPLIT, extra)}
    assert split == {"ema_masters"}
    assert measured == set(loops.EXTRAS)
    for name, row in loops.loop_rows().items():
        assert set(row.level.contenders(row.extras, has_network=False)) <= set(ROWS[name].contenders)
    assert title_of("o2_bf16+clip_model") == "mpinit O5 (O2), clip_grad_norm_(model.parameters())"


def measured(control: float) -> Results:
    """Return results of clipping at O5: by hand 1 s, mpinit's clipping twice that, any other way 1.02 s."""
    results = Results("loops_launch_o5_clip", ROWS["loops_launch_o5_clip"])
    results.common = {"machine": "a machine", "cores": 2, "torch": "2.13.0", "date": "2026-11-27"}
    special = {"fp32_again": control, "o2_split+clip_mpinit": 2.0}
    for contender, number in itertools.product(results.workload.contenders, range(5)):
        seconds = special.get(contender, 1.02 if contender.startswith("o2") else 1.0)
        results.add(contender, number, {"values": [seconds], "loops": 1, "wall_s": seconds, "facts": {}})
    return results


def test_figures_are_over_the_loop_by_hand_and_have_verdicts() -> None:
    text = tables.loops({"loops_launch_o5_clip": measured(1.0)})
    assert text.endswith("a machine, 2 cores, torch 2.13.0, one thread.")
    shown = text.splitlines()
    (ours,) = [line for line in shown if "mpinit.clip" in line]
    (model,) = [line for line in shown if "model.parameters()" in line]
    assert "| 1.02 [1.02, 1.02] | 2.00 [2.00, 2.00] | not met |" in ours
    assert "| launch | O5 | 1.00 [1.00, 1.00] | 1.02 [1.02, 1.02] | 1.02 [1.02, 1.02] | met |" in model
    goals = tables.pairs({"loops_launch_o5_clip": measured(1.0)})
    assert "O5 split, clipping: mpinit's / model.parameters() | loops_launch_o5_clip | 1.96" in goals
    assert goals.count("0.95 to 1.05") == 4 and goals.count("not met") == 2
    hidden = {"loops_launch_o5_clip": measured(1.1)}
    for text in (tables.loops(hidden), tables.pairs(hidden)):
        assert "1.02" not in text and tables.NOT_MEASURABLE in text
    assert tables.loops({}) == tables.NOT_THERE


def test_a_goal_with_a_least_figure_is_not_met_below_it() -> None:
    within = next(comparison for comparison in COMPARISONS if comparison.least)
    assert [within.is_met_by(figure) for figure in (0.94, 0.95, 1.05, 1.06)] == [False, True, True, False]
    assert replace(within, least=0.0).is_met_by(0.5) and within.goals == "0.95 to 1.05"
