"""initialize fails in any of its phases: it is undone, and nothing is different."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from models import CASES, train
from undo_snapshots import (
    KINDS,
    assert_same,
    assert_same_bits,
    namespace,
    rounds,
    set_up,
    structure_of_model,
    structure_of_optimizer,
    values,
)

import mpinit
from mpinit import registry, session
from mpinit.masters import full, split
from mpinit.model import casting, copies, forward, state_dict
from mpinit.optimizer import managed

# What raises, at which call of it, and when: before its work, or having done it.
PHASES: dict[str, tuple[Any, str, int, str]] = {
    "the forwards": (forward, "patch_forwards", 1, "before"),
    "a second forward": (forward, "_patch_forward", 2, "before"),
    "the end of a second forward": (forward, "_patch_forward", 2, "after"),
    "a second module's state hook": (copies, "put_on", 2, "before"),
    "the end of the state hooks": (state_dict.Float32State, "install", 1, "after"),
    "a second master": (full.FullMasters, "_make", 2, "before"),
    "the end of a second master": (full.FullMasters, "_make", 2, "after"),
    "a second split master": (split.SplitMasters, "_make", 2, "before"),
    "the optimizer's second method": (managed, "set_attribute", 2, "before"),
    "the optimizer's states": (session, "cast_states", 1, "before"),
    "the casts": (casting.TensorCasts, "apply", 1, "before"),
    "a second cast": (casting, "_replace_data", 2, "before"),
    "the end of a second cast": (casting, "_replace_data", 2, "after"),
    "the end of the casts": (casting.TensorCasts, "apply", 1, "after"),
    "a second weight": (full.FullMasters, "_cast", 2, "before"),
    "the end of a second weight": (full.FullMasters, "_cast", 2, "after"),
    "a second split weight": (split.SplitMasters, "_cast", 2, "before"),
    "the end of a second split weight": (split.SplitMasters, "_cast", 2, "after"),
    "the flat weights": (casting, "rebuild_flat_weights", 1, "before"),
    "the check of all steps": (session, "check_steps", 1, "before"),
    "the end of that check": (session, "check_steps", 1, "after"),
    "the last thing": (casting.TensorCasts, "settle", 1, "before"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["O1", "O2 and a float32 head", "O3", "O5 split"])
def test_a_failure_in_any_phase_leaves_no_trace(kind: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, call, when = PHASES[phase]
    model, optimizer = set_up("cnn", "adam")
    before = structure_of_model(model), structure_of_optimizer(optimizer), values(model, optimizer)
    original, calls = getattr(owner, name), itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if number == call and when == "before":
            raise ZeroDivisionError(phase)
        result = original(*args, **kwargs)
        if number == call:
            raise ZeroDivisionError(phase)
        return result

    torch_before = namespace()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        try:
            mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
            reached = False
            mpinit.undo(model)
        except ZeroDivisionError:
            reached = True
    assert reached or kind != ("O5 split" if "split" in phase else "O2 and a float32 head"), "the phase exists"
    assert_same(torch_before, namespace())
    assert_same(before[0], structure_of_model(model))
    assert_same(before[1], structure_of_optimizer(optimizer))
    rounded = rounds(kind, model) if not reached else lambda name: name.startswith("gradient") and kind != "O3"
    assert_same_bits(before[2], values(model, optimizer), rounded)
    assert registry.of(model) is None
    assert registry.of(optimizer) is None
    assert not registry.live()
    mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    train(model, optimizer, CASES["cnn"].batches(1), CASES["cnn"].loss)
