"""What happens in a random training loop: the actions, and how hypothesis draws them and the set-ups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from random_world import Config
from reference_loop import BF16, F16, F32

DELAYS: dict[str, dict[str, bool]] = {
    "no": {},
    "unscale": {"delay_unscale": True},
    "check": {"delay_overflow_check": True},
}


class Backward(NamedTuple):
    """A backward pass; ``raises`` says where in the body of ``scale_loss`` an exception is thrown."""

    loss: int
    optimizers: int
    leaves: int
    factor: float
    seed: int
    poison: tuple[int, float] | None
    delay: str
    raises: str


class Clear(NamedTuple):
    """``zero_grad`` of an optimizer or the model, or a leaf's ``grad = None``."""

    how: str
    which: int
    to_none: bool


class Step(NamedTuple):
    """``optimizer.step()``, once or twice."""

    which: int
    times: int


class Clip(NamedTuple):
    """Clipping by value or norm."""

    which: int
    how: str
    limit: float


class Write(NamedTuple):
    """Somebody else at a weight."""

    leaf: int
    how: str
    value: float


class Freeze(NamedTuple):
    """``requires_grad`` switched off, or on again."""

    leaf: int


class Add(NamedTuple):
    """``add_param_group``, with a gradient from before or without."""

    leaf: int
    which: int
    gradient: bool


class Schedule(NamedTuple):
    """``scheduler_step``."""

    which: int


class Remember(NamedTuple):
    """``model.state_dict()``."""


class Reload(NamedTuple):
    """Loading what was remembered, into the same model."""


class Restart(NamedTuple):
    """Saving everything and loading it into fresh objects, before or after ``initialize``."""

    before: bool


POISONS = st.none() | st.none() | st.tuples(st.integers(0, 5), st.sampled_from([np.inf, -np.inf, np.nan]))
RAISES = st.sampled_from(["nowhere"] * 6 + ["before", "after"])
BACKWARD = st.builds(
    *(Backward, st.integers(0, 1), st.integers(1, 3), st.integers(1, 63), st.sampled_from([1.0, 0.5, 2.0])),
    *(st.integers(0, 7), POISONS, st.sampled_from(["no", "no", "unscale", "check"]), RAISES),
)
WHICH = st.integers(0, 1)
STEP = st.builds(Step, WHICH, st.sampled_from([1, 1, 1, 2]))
CLEAR = st.builds(Clear, st.sampled_from(["optimizer", "optimizer", "model", "leaf"]), st.integers(0, 5), st.booleans())
RARE = st.one_of(
    st.builds(Clip, WHICH, st.sampled_from(["value", "norm"]), st.sampled_from([0.5, 2.0])),
    st.builds(
        *(Write, st.integers(0, 5), st.sampled_from(["data", "assign", "element", "in place", "halve", "look"])),
        st.sampled_from([0.75, -1.5, 3.0]),
    ),
    st.builds(Freeze, st.integers(0, 5)),
    st.builds(Add, st.just(5), WHICH, st.booleans()),
    st.builds(Schedule, WHICH),
    st.builds(Remember),
    st.builds(Reload),
    st.builds(Restart, st.booleans()),
)
ACTIONS = st.lists(st.one_of(BACKWARD, STEP, RARE, BACKWARD, CLEAR, RARE), min_size=12, max_size=30)

LEVELS = [
    *(("O0", F32, True), ("O1", F16, True), ("O1", BF16, True), ("O2", F16, True), ("O2", BF16, True)),
    *(("O2", BF16, "split"), ("O2", BF16, "split"), ("O2", F16, False), ("O3", F16, True), ("O3", BF16, True)),
]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A set-up."""
    level, half, masters = draw(st.sampled_from(LEVELS))
    float32_steps = level in ("O0", "O1") or (level == "O2" and masters)
    return Config(
        level=level,
        half=half,
        masters=masters,
        loss_scale=draw(st.sampled_from(["dynamic", "dynamic", "dynamic", 1.0, 8.0])),
        rule=draw(st.sampled_from(["momentum", "sgd", "momentum", "adam"] if float32_steps else ["momentum", "sgd"])),
        kernel=draw(st.sampled_from(["plain", "foreach", "fused"] if float32_steps else ["plain", "foreach"])),
        losses=draw(st.integers(1, 2)),
        optimizers=draw(st.integers(1, 2)),
        first_scale=draw(st.sampled_from([8.0, 4096.0, 16384.0])),
        hysteresis=draw(st.integers(1, 2)),
        frozen=False,
    )
