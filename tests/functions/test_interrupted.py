"""Ctrl-C at any line of O1's set-up or undo: set-up leaves torch as it was, an undo called again completes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, in_thread, o1_plan
from interruptions import Where, interrupt, places
from undo_snapshots import differences, namespace

import mpinit
from mpinit.functions import apply
from mpinit.functions.installation import INSTALLATION
from mpinit.torch_internals.cpu_autocast_list import listed_on_cpu_only
from mpinit.torch_internals.native_autocast import device_types

device_types()  # found out once in a process, by the first that asks
TRACED = ("functions/", "basics/patching.py", "torch_internals/")


def state() -> dict[str, Any]:
    """What :func:`namespace` sees, and besides the CPU's own autocast list and TorchScript's table."""
    table = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    own_list = torch.tensor([1.0], dtype=HALF)
    with torch.autocast("cpu", BF16):
        try:
            torch.cat([own_list])
            cat = "follows CUDA"
        except RuntimeError:
            cat = "its own"
    return namespace() | {
        "autocast tag": (torch.compiler.config.cache_key_tag, len(table), cat, len(listed_on_cpu_only()))
    }


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture(params=["alone", "beside another"])
def live(request: pytest.FixtureRequest) -> Iterator[str]:
    """What is live beside the session under test; a function is registered in both cases."""
    mpinit.register_float_function(sys.modules[__name__], "scale")
    undo = apply(o1_plan(patch_torch_functions_type=BF16)) if request.param == "beside another" else None
    yield request.param
    if undo is not None:
        undo()


# The other session has the other policy: all wrappers are made anew when this one comes and when it goes.
PLAN = o1_plan(cast_policy="apex")


def check(live: str, before: dict[str, Any], where: Where) -> None:
    """Everything is as it was; a session beside the interrupted one has all its casts, by wrappers made anew."""
    now = state()
    if live == "beside another":
        before, now = flags(before), flags(now)
        x = torch.ones(2, 2, dtype=BF16)
        assert [(x @ x).dtype, x.exp().dtype, torch.nn.functional.gelu(x).dtype] == [BF16, FP32, BF16], where
        assert torch.cat([x.half(), x.half()]).dtype is HALF
        assert scale(x).dtype is FP32
    assert differences(before, now) == [], (where, before["autocast tag"], now["autocast tag"])


BOTH = pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["one", "both"])


@BOTH
def test_an_interrupted_setup_leaves_torch_as_it_was(live: str, both: bool) -> None:
    before, count, undos = state(), 0, []
    for where in places(lambda: undos.append(apply(PLAN)), *TRACED, both=both):
        while undos:
            undos.pop()()
        interrupt(where, lambda: apply(PLAN))
        check(live, before, where)
        count += 1
    assert count > 90
    in_thread(apply(PLAN))  # the lock was let go


def flags(seen: dict[str, Any]) -> dict[str, Any]:
    """Without the wrappers, which are made anew for those who stay."""
    return {key: value for key, value in seen.items() if key.startswith("autocast ")}


@BOTH
def test_an_interrupted_undo_completes_when_called_again(live: str, both: bool) -> None:
    before, count = state(), 0
    for where in places(apply(PLAN), *TRACED, both=both):
        undo = apply(PLAN)
        interrupt(where, undo)
        count += 1
        undo()
        undo()
        check(live, before, where)
    assert count > 30
    assert len(INSTALLATION._sessions) == (live == "beside another")
