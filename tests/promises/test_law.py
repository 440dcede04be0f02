"""The law of weights and masters as a state machine: 2,000 random runs in CI, 100,000 with ``pytest -m nightly``.

Hypothesis draws a set-up and a sequence of what may happen to gradients, weights, groups and checkpoints, from the
model's side and from the optimizer's. After every action everything that must be visible by then is what
:mod:`law_numbers` says, which keeps one float32 number and one gradient a weight.

``LAW_RUNS`` sets the nightly number. ``LAW_KINDS`` plays only the kinds of action that its words begin, and
``LAW_SETUPS`` only some of the set-ups: ``LAW_KINDS="step backward write:weight" LAW_SETUPS=split``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from law_gradients import GRADIENT_KINDS
from law_membership import OTHER_KINDS
from law_run import Kind, Pick, Run
from law_weights import WEIGHT_KINDS
from law_world import SETUPS, Setup, masters_of

import mpinit

KINDS: dict[str, Kind] = GRADIENT_KINDS | WEIGHT_KINDS | OTHER_KINDS

WANTED = tuple(os.environ.get("LAW_KINDS", "").split()) or ("",)
CHOSEN = [kind for kind in KINDS if kind.startswith(WANTED)]
OFTEN = [kind for kind in ("backward", "step") if kind in CHOSEN]
SETUPS_WANTED = [setup for setup in SETUPS if os.environ.get("LAW_SETUPS", "") in ("", masters_of(setup))]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(CHOSEN + OFTEN * (len(CHOSEN) // 8)), st.integers(0, 2**24)), min_size=4, max_size=14
)


def play(setup: Setup, actions: list[tuple[str, int]]) -> None:
    """One run."""
    with warnings.catch_warnings():
        # Gradients set by hand are stepped: the warning is right, and tested elsewhere.
        warnings.filterwarnings("ignore", message=".*did not come through mpinit.scale_loss.*")
        run = Run(setup)
        try:
            for kind, seed in actions:
                KINDS[kind](run, Pick(seed))
                run.check()
            run.save()
            run.undo()
        finally:
            with contextlib.suppress(ValueError):  # undone already
                mpinit.undo(run.model)


COMMON: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
RUNS = os.environ.get("LAW_RUNS")
PARTS = 16


@pytest.mark.long
@settings(max_examples=2000, derandomize=True, **COMMON)
@given(st.sampled_from(SETUPS_WANTED), ACTIONS)
def test_2000_random_runs_keep_the_law(setup: Setup, actions: list[tuple[str, int]]) -> None:
    play(setup, actions)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_100000_random_runs_keep_the_law(part: int) -> None:
    """In parts of seeds of their own, which workers take side by side."""
    runs = given(st.sampled_from(SETUPS_WANTED), ACTIONS)(play)
    runs = settings(max_examples=int(RUNS or 100_000) // PARTS, **COMMON)(runs)
    if RUNS is None:
        runs = seed(part)(runs)
    runs()


TWO_SPLIT: dict[str, Any] = {
    "level": "O2", "half": "bfloat16", "masters": "split", "momentum": False, "optimizers": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("scale", "actions"),
    [
        (1.0, [("backward", 0), ("backward", 0), ("gradient:replace:group", 0), ("backward", 3)]),
        ("dynamic", [("backward", 0), ("groups:put_all", 1), ("overflow", 0), ("backward", 0)]),
    ],
    ids=["replaced beside a pass", "overflow of a weight with two optimizers"],
)
def test_runs_that_once_broke_it(scale: Any, actions: list[tuple[str, int]]) -> None:
    play(Setup(loss_scale=scale, **TWO_SPLIT), actions)


def test_momentum_of_a_second_session_is_not_that_of_the_first() -> None:
    setup = Setup(level="O2", half="bfloat16", masters=False, loss_scale=1.0, momentum=True, optimizers=1)
    play(setup, [("joins_late", 0), ("undo", 0), ("backward", 0), ("hook:before:weight", 0), ("undo", 0)])


def test_masters_written_to_reach_weights_in_a_skipped_step_too() -> None:
    setup = Setup(level="O2", half="float16", masters=True, loss_scale="dynamic", momentum=False, optimizers=1)
    play(setup, [("backward", 0), ("overflow", 0), ("write:group:copy", 0), ("step", 0)])


def test_a_weight_that_steps_move_and_move_back_may_be_what_it_was_cast_from() -> None:
    setup = Setup(level="O2", half="bfloat16", masters=False, loss_scale="dynamic", momentum=False, optimizers=1)
    actions = [("groups:replace", 1), ("backward", 0), ("backward", 225), ("hook:before:weight", 0)]
    play(setup, [*actions, ("backward", 0), ("backward", 0), ("hook:before:weight", 0)])


def test_gradients_that_a_step_has_replaced_may_be_cleared() -> None:
    setup = Setup(level="O2", half="bfloat16", masters="split", loss_scale="dynamic", momentum=False, optimizers=1)
    play(setup, [("backward", 0), ("hook:before:weight", 0), ("gradient:none:weight", 0), ("backward", 0)])


def test_a_weight_that_joined_unseen_may_lose_low_bits_near_a_write() -> None:
    setup = Setup(level="O2", half="bfloat16", masters="split", loss_scale="dynamic", momentum=False, optimizers=1)
    play(setup, [("groups:put_all", 0), ("backward", 323), ("hook:after:weight", 139124), ("backward", 0)])
