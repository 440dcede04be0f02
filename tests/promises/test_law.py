"""The law of weights and masters as a state machine: 300 random runs in CI, 100,000 with ``make nightly``.

Hypothesis draws a set-up and a sequence of what training loops do; after every action everything that is visible is
what a float32 loop by hand has (``support/law.py``).

``LAW_RUNS`` sets the nightly number. ``LAW_KINDS`` plays only the kinds of action that its words begin.
"""

import contextlib
import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from law import SETUPS, Pick, Run, Setup
from law_actions import KINDS, WRITES
from session_device import device

import mpinit

pytestmark = pytest.mark.device

WANTED = tuple(os.environ.get("LAW_KINDS", "").replace(",", " ").split()) or ("",)
# Where reading waits for a device, what torch does not count is not noticed; numpy reads a CPU alone.
UNSEEN = () if device().type == "cpu" else ("write numpy", "write view", "write exchange")
CHOSEN = [kind for kind in KINDS if kind.startswith(WANTED) and kind not in UNSEEN]
OFTEN = [kind for kind in ("backward", "step") if kind in CHOSEN]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(CHOSEN + OFTEN * (len(CHOSEN) // 6)), st.integers(0, 2**24)), min_size=4, max_size=14
)


def play(setup: Setup, actions: list[tuple[str, int]]) -> None:
    """One run."""
    with warnings.catch_warnings():
        # Gradients set by hand are stepped, and there may be none: the warnings are right, and tested elsewhere.
        warnings.filterwarnings("ignore", message=".*did not come through mpinit.scale_loss.*")
        warnings.filterwarnings("ignore", message=".*none of its parameters has a gradient.*")
        run = Run(setup)
        try:
            for kind, number in actions:
                KINDS[kind](run, Pick(number))
                run.check(numbers=number % 3 == 0)
            run.check(numbers=True)
            run.undo()
        finally:
            with contextlib.suppress(ValueError):  # undone already
                mpinit.undo(run.model)


COMMON: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
RUNS = os.environ.get("LAW_RUNS")
PARTS = 16


@settings(max_examples=300 if device().type == "cpu" else 50, derandomize=True, **COMMON)
@given(st.sampled_from(SETUPS), ACTIONS)
def test_300_random_runs_keep_the_law(setup: Setup, actions: list[tuple[str, int]]) -> None:
    play(setup, actions)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_100000_random_runs_keep_the_law(part: int) -> None:
    """Run parts with seeds of their own, which workers run in parallel."""
    runs = given(st.sampled_from(SETUPS), ACTIONS)(play)
    runs = settings(max_examples=int(RUNS or 100_000) // PARTS, **COMMON)(runs)
    if RUNS is None:
        runs = seed(part)(runs)
    runs()


SPLIT: dict[str, Any] = {"half": torch.bfloat16, "masters": "split", "momentum": False, "optimizers": 2}
FULL = SPLIT | {"masters": True}
FLOAT16 = {"half": torch.float16}
ONCE: dict[str, tuple[Setup, list[tuple[str, int]]]] = {
    "a weight with two optimizers overflows": (
        Setup(loss_scale="dynamic", **SPLIT),
        [("backward", 0), ("group append", 1), ("overflow", 0), ("backward", 0)],
    ),
    "a 0 is written through numpy to a split weight whose data was used": (
        Setup(loss_scale="dynamic", **SPLIT | {"optimizers": 1}),
        [("backward", 0), ("hook before", 0), ("write numpy", 232)],
    ),
    "a weight is written back to what it was at the last step": (
        Setup(loss_scale="dynamic", **FULL),
        [("hook before", 0), ("write foreach", 8098776), ("hook before", 0)],
    ),
    "states are loaded before a weight without an optimizer overflows": (
        Setup(loss_scale="dynamic", **FLOAT16, masters=True, momentum=False, optimizers=1),
        [("save", 0), ("load", 0), ("overflow", 15), ("backward", 0)],
    ),
    "a weight is written to and back, and looked at in between or not": (
        Setup(loss_scale="dynamic", **FLOAT16, masters=True, momentum=False, optimizers=1),
        [("backward", 0), ("backward", 0), ("write vector", 1), ("write vector", 1), ("write vector", 3)],
    ),
    "states are loaded while masters are given out": (
        Setup(loss_scale="dynamic", **FULL),
        [("replace master_params", 13416950), ("save", 0), ("load", 152009), ("backward", 0)],
    ),
    "two optimizers give one master out": (
        Setup(loss_scale=8.0, **FULL),
        [("backward", 3906658), ("group append", 0), ("backward", 0)],
    ),
    "a GradScaler unscales for two optimizers of a weight": (
        Setup(loss_scale=8.0, **FULL),
        [("group append", 0), ("grad_scaler", 0)],
    ),
    "a weight whose master is given out joins another optimizer": (
        Setup(loss_scale=8.0, **FULL),
        [("write master", 8379586), ("write copy_", 1757870), ("group append", 0)],
    ),
    "gradients come unscaled after a skipped step": (
        Setup(loss_scale="dynamic", **FULL),
        [("grad_scaler overflow", 0), ("plain backward", 1098388), ("backward", 6477506), ("step", 0)],
    ),
    "a step is repeated after an overflow": (
        Setup(loss_scale="dynamic", **FULL),
        [("overflow", 0), ("step", 0), ("step", 0), ("backward", 0), ("step", 0)],
    ),
    "gradients that a step has used are widened when another block begins": (
        Setup(loss_scale=8.0, **SPLIT | {"optimizers": 1}),
        [("backward", 2000), ("group remove", 786), ("step", 7962757), ("raises before", 893), ("raises after", 292)],
    ),
    "a 0 is written to the data of a view after a weight was added to the groups": (
        Setup(loss_scale="dynamic", **SPLIT | {"optimizers": 1}),
        [("backward", 1), ("group add", 0), ("write view", 4370), ("step", 0)],
    ),
    "a hook of one optimizer's step writes to a weight of another": (
        Setup(loss_scale="dynamic", **FLOAT16, masters=True, momentum=False, optimizers=2),
        [("backward", 0), ("write master", 2), ("hook before", 12), ("write master", 2)],
    ),
    "a loss reaches a weight that has no optimizer": (
        Setup(loss_scale="dynamic", **FULL),
        [("backward", 7), ("backward", 15), ("backward", 3), ("step", 0)],
    ),
}


@pytest.mark.parametrize("name", [name for name, (_, run) in ONCE.items() if not {kind for kind, _ in run} & {*UNSEEN}])
def test_recorded_runs_keep_the_law(name: str) -> None:
    play(*ONCE[name])


@pytest.mark.parametrize("number", [4, 1], ids=["small", "large"])
@pytest.mark.parametrize("how", [how for how in WRITES if f"write {how}" not in UNSEEN])
@pytest.mark.parametrize("setup", [Setup(loss_scale=8.0, **each) for each in (FULL, FULL | FLOAT16, SPLIT)], ids=str)
def test_every_write_between_a_backward_pass_and_a_step_counts(setup: Setup, how: str, number: int) -> None:
    """Write to weight ``number`` between backward and step, without reading any number."""
    write = [("backward", 0), (f"write {how}", number), ("step", 0)]
    play(setup, [*write, *write])
