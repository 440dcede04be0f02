"""Random training loops against a reference in plain numpy: 200 in every run, 2,000 with ``pytest -m nightly``.

Hypothesis draws a set-up (level, dtype, masters, scaling, optimizer, losses) and a sequence of what training loops do:
backward passes with any mixture of delays, overflows and exceptions, clearing, clipping, outside writes to weights,
freezing, added groups, steps, schedulers, checkpoints loaded in place or into fresh objects. After every action
weights, masters, gradients, optimizer state, loss scales and counters are those of :mod:`reference_loop`, bit for bit;
Adam's update and a clipped norm are compared within a stated tolerance, and the reference goes on from there.

Both sizes are fixed: every run draws the same loops. To look for new ones, in any number, set ``RANDOM_LOOPS``:
``RANDOM_LOOPS=20000 pytest -m nightly tests/promises/test_random_loops.py``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from random_actions import ACTIONS, configs
from random_run import Run
from random_world import Config

import mpinit


def play(config: Config, actions: list[Any]) -> None:
    """One random loop."""
    with warnings.catch_warnings():
        # A group added with a gradient and stepped at once: the warning is right, and tested elsewhere.
        warnings.filterwarnings("ignore", message=".*did not come through mpinit.scale_loss.*")
        warnings.filterwarnings("ignore", message=".*none of its parameters has a gradient.*")  # all may be frozen
        run = Run(config)
        try:
            for action in actions:
                run.act(action)
            run.remember()
        finally:
            with contextlib.suppress(ValueError):  # a restart that failed half way
                mpinit.undo(run.real.model)


COMMON: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
MORE = os.environ.get("RANDOM_LOOPS")


@settings(max_examples=200, derandomize=True, **COMMON)
@given(configs(), ACTIONS)
def test_200_random_loops(config: Config, actions: list[Any]) -> None:
    play(config, actions)


@pytest.mark.nightly
@settings(max_examples=int(MORE or 2000), derandomize=MORE is None, **COMMON)
@given(configs(), ACTIONS)
def test_2000_random_loops(config: Config, actions: list[Any]) -> None:
    play(config, actions)
