"""O1's casts are switched off with their session, thread or owner, also after an exception or Ctrl-C.

Below the public face: casts are switched on without a model, and torch's flags are read.
"""

import copy
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, in_thread, listed_on_cpu_only, o1_plan, product_dtype
from interruptions import Where, interrupt, places
from undo_snapshots import differences, end_dropped_sessions, namespace

import mpinit
from mpinit.autocast import apply
from mpinit.autocast.forward_casts import ForwardCasts
from mpinit.autocast.installation import INSTALLATION
from mpinit.autocast.thread_flags import CastsAs, device_types, disable_casts, is_on


class Owner:
    """What a session is to the casts."""


@pytest.fixture
def before() -> Iterator[dict[str, object]]:
    """What stood before the test, which comes back with the next session that is undone."""
    end_dropped_sessions()
    before = namespace()
    yield before
    end_dropped_sessions()
    assert differences(before, namespace()) == []


@pytest.mark.parametrize("scope", [True, "model"])
def test_casts_end_with_a_session_that_is_dropped(scope: Any, before: dict[str, object]) -> None:
    model = mpinit.initialize(torch.nn.Linear(4, 4), opt_level="O1", patch_torch_functions=scope)
    model.itself = [model]
    assert model(torch.ones(1, 4)).dtype is (HALF if scope is True else FP32)
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


@pytest.mark.parametrize("block", [lambda: ForwardCasts(BF16), CastsAs, disable_casts], ids=["forward", "off", "none"])
def test_casts_of_a_session_dropped_in_a_block_end_after_it(
    before: dict[str, object], block: Callable[[], CastsAs]
) -> None:
    owner = Owner()
    apply(o1_plan(), owner=owner)
    with block():
        inside = product_dtype()
        del owner
        assert product_dtype() is inside
    assert product_dtype() is FP32


def test_casts_of_a_dropped_session_end_at_the_next_forward(before: dict[str, object]) -> None:
    owner = Owner()
    apply(o1_plan(), owner=owner)
    with torch.autocast("cpu", BF16):
        del owner
        assert product_dtype() is BF16
    with ForwardCasts(HALF):
        pass
    assert product_dtype() is FP32


def test_casts_of_a_dropped_model_end_at_the_next_initialize() -> None:
    model = torch.nn.Linear(2, 2)
    mpinit.initialize(model, opt_level="O1")
    with torch.autocast("cpu", BF16):
        del model
        assert product_dtype() is BF16
    mpinit.initialize(torch.nn.Linear(2, 2), opt_level="O2")
    assert product_dtype() is FP32


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_undo_in_autocast_block_is_refused_and_changes_nothing(level: str, enabled: bool) -> None:
    model = torch.nn.Linear(2, 2)
    mpinit.initialize(model, opt_level=level)
    dtype = product_dtype()
    with torch.autocast("cpu", BF16, enabled=enabled), pytest.raises(RuntimeError, match="Call it before or after"):
        mpinit.undo(model)
    assert product_dtype() is dtype
    assert model(torch.ones(1, 2)).dtype is dtype
    mpinit.undo(model)
    assert [product_dtype(), model(torch.ones(1, 2)).dtype] == [FP32, FP32]


def test_undo_in_block_of_initialize_ends_casts_with_block() -> None:
    model = torch.nn.Linear(2, 2)
    with torch.autocast("cpu", BF16):
        mpinit.initialize(model, opt_level="O1")
        assert product_dtype() is HALF
        mpinit.undo(model)
    assert product_dtype() is FP32


def test_undo_in_block_is_possible_with_casts_of_model_alone() -> None:
    model = torch.nn.Linear(2, 2)
    mpinit.initialize(model, opt_level="O1", patch_torch_functions="model")
    with torch.autocast("cpu", BF16):
        mpinit.undo(model)
        assert product_dtype() is BF16
    assert product_dtype() is FP32


@pytest.mark.parametrize("ends", ["backward", "forward"])
def test_casts_ended_in_another_thread_end_at_the_next_pass(before: dict[str, object], ends: str) -> None:
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


NONE = ForwardCasts(None)


@pytest.mark.parametrize("scope", [True, "model"])
def test_forward_without_casts_has_none_of_other_sessions(scope: Any) -> None:
    undo, state = apply(o1_plan(patch_torch_functions=scope)), namespace()
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
def test_users_block_around_a_forward_without_casts_counts(live: bool) -> None:
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


device_types()  # found out once in a process, by the first that asks
TRACED = ("autocast/", "basics/patching.py", "torch_internals/")


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


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
@pytest.mark.parametrize("scope", [True, "model"])
def test_loop_with_a_disabled_autocast_block_is_warned_once(level: str, scope: Any) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    expected = model(x)
    more = {} if level == "O5" else {"patch_torch_functions": scope}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, **more)
    outputs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            model(x)
        for _ in range(2):
            with torch.autocast("cpu", enabled=False):
                outputs.append(model(x).detach())
    assert torch.equal(outputs[0], expected) is (level != "O5")
    told = [str(each.message) for each in caught]
    assert len(told) == (0 if level == "O5" else 1)
    assert all("computes in float32. Remove the block" in text and "disable_casts()" in text for text in told)
    assert all(each.filename == __file__ for each in caught)


def test_casts_switched_off_on_purpose_are_no_reason_to_warn() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1")
    with mpinit.disable_casts():
        model(x)
    with torch.autocast("cpu", enabled=False):
        model(x)
    other = torch.nn.Linear(4, 4)
    mpinit.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), "O1")
    other(x)
    with torch.autocast("cpu", enabled=False):  # a part of a training is in float32
        other(x)


def test_the_warning_as_an_error_leaves_casts_as_they_were() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1")
    with torch.autocast("cpu", enabled=False):
        with pytest.raises(UserWarning, match="this forward runs inside"):
            model(x)
        assert product_dtype() is FP32
    assert product_dtype() is HALF
    mpinit.undo(model)
    assert product_dtype() is FP32 and torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_autocast_around_a_model_with_16_bit_weights_warns_once(level: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
    mpinit.initialize(model, opt_level=level, verbosity=0)
    with pytest.warns(UserWarning, match=r"inside of a torch\.autocast block.*Remove the block.*O4") as caught:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(1, 4))
    assert len(caught) == 1


def test_autocast_around_a_float32_model_does_not_warn() -> None:
    model = torch.nn.Linear(4, 4)
    mpinit.initialize(model, opt_level="O0", verbosity=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(1, 4)).dtype is torch.float32
