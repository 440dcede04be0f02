"""Casts end with what they were switched on for, also without undo, and in no place while another block is open."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from casts import BF16, FP32, HALF, in_thread, o1_plan, product_dtype
from undo_snapshots import differences, namespace

import mpinit
from mpinit.functions import apply
from mpinit.torch_internals.forward_casts import ForwardCasts
from mpinit.torch_internals.native_autocast import CastsOff, disable_casts, is_on


class Owner:
    """What a session is to the casts."""


@pytest.fixture
def before() -> Iterator[dict[str, object]]:
    """What stood before the test, which comes back with the next session that is undone."""
    gc.collect()
    mpinit.undo(mpinit.initialize(torch.nn.Linear(1, 1), opt_level="O0", verbosity=0))  # takes what other tests dropped
    before = namespace()
    yield before
    apply(o1_plan())()
    assert differences(before, namespace()) == []


@pytest.mark.parametrize("scope", ["thread", "model"])
def test_casts_end_with_a_session_that_is_dropped(scope: str, before: dict[str, object]) -> None:
    model = mpinit.initialize(torch.nn.Linear(4, 4), opt_level="O1", cast_scope=scope, verbosity=0)
    model.itself = [model]
    assert model(torch.ones(1, 4)).dtype is (HALF if scope == "thread" else FP32)
    del model
    gc.collect()
    assert torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype is FP32
    assert not is_on() and torch.is_autocast_cache_enabled()


def test_the_casts_of_another_session_stay(before: dict[str, object]) -> None:
    undo, owner = apply(o1_plan(patch_torch_functions_type=BF16)), Owner()
    apply(o1_plan(), owner=owner)
    assert product_dtype() is HALF
    del owner
    assert product_dtype() is BF16
    undo()
    assert product_dtype() is FP32


@pytest.mark.parametrize("block", [lambda: ForwardCasts(BF16), CastsOff, disable_casts], ids=["forward", "off", "none"])
def test_dropped_inside_a_block_they_go_off_when_it_ends(
    before: dict[str, object], block: Callable[[], CastsOff]
) -> None:
    owner = Owner()
    apply(o1_plan(), owner=owner)
    with block():
        inside = product_dtype()
        del owner
        assert product_dtype() is inside
    assert product_dtype() is FP32


def test_dropped_inside_a_block_of_torch_they_go_off_with_the_next_forward(before: dict[str, object]) -> None:
    owner = Owner()
    apply(o1_plan(), owner=owner)
    with torch.autocast("cpu", BF16):
        del owner
        assert product_dtype() is BF16
    with ForwardCasts(HALF):
        pass
    assert product_dtype() is FP32


@pytest.mark.parametrize("ends", ["backward", "forward"])
def test_ended_in_another_thread_they_go_off_with_the_next_backward_or_forward(
    before: dict[str, object], ends: str
) -> None:
    owner = [Owner()]
    apply(o1_plan(), owner=owner[0])
    thread = threading.Thread(target=owner.clear)
    thread.start()
    thread.join()
    if ends == "backward":
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
    else:
        with ForwardCasts(BF16):
            assert product_dtype() is BF16
    assert product_dtype() is FP32


# -- the forward of a model that has none ------------------------------------------------------------------------------

NONE = ForwardCasts(None)


@pytest.mark.parametrize("scope", ["thread", "model"])
def test_a_forward_without_casts_runs_without_those_of_other_sessions(scope: str) -> None:
    undo, state = apply(o1_plan(cast_scope=scope)), namespace()
    own = ForwardCasts(HALF)
    assert NONE.run(product_dtype) is FP32
    with own:
        assert [product_dtype(), NONE.run(product_dtype), product_dtype()] == [HALF, FP32, HALF]
        # A model with casts inside of one without has its own.
        assert NONE.run(lambda: own.run(product_dtype)) is HALF
        assert copy.deepcopy(NONE).run(product_dtype) is FP32
    assert NONE.run(lambda: own.run(product_dtype)) is HALF
    with disable_casts():
        assert NONE.run(lambda: own.run(product_dtype)) is FP32
    assert differences(state, namespace()) == []
    undo()
    assert in_thread(lambda: NONE.run(product_dtype)) is FP32


@pytest.mark.parametrize("live", [True, False])
def test_a_block_of_the_users_around_a_forward_without_casts_counts(live: bool) -> None:
    undo = apply(o1_plan()) if live else None
    with torch.autocast("cpu", BF16):
        assert NONE.run(product_dtype) is BF16
        with ForwardCasts(HALF):
            assert [product_dtype(), NONE.run(product_dtype), product_dtype()] == [HALF, BF16, HALF]
            with torch.autocast("cpu", HALF):
                assert NONE.run(product_dtype) is HALF
            with torch.autocast("cpu", enabled=False):
                assert NONE.run(product_dtype) is FP32
    if undo is not None:
        undo()
