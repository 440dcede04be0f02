"""ForwardCasts and disable_casts: thread by thread, nested, recomputed; and how long weight casts live."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, StartCasts, in_thread
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpinit.torch_internals import native_autocast
from mpinit.torch_internals.forward_casts import ForwardCasts
from mpinit.torch_internals.native_autocast import CastsAs, CastsOff, device_types, disable_casts, is_on


def state() -> tuple[Any, ...]:
    """This thread's autocast state, the depth of open blocks included."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (is_on(), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), depth)


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(("present", "expected"), [(False, ("cpu",)), (True, ("cpu", "cuda"))])
def test_a_build_for_a_device_that_is_not_there_counts_as_one_without(
    present: bool, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch.autocast warns of the missing device, for someone who only ever uses the CPU."""
    monkeypatch.setattr(native_autocast, "_devices", ())
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert device_types() == expected


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_forward_casts_in_any_thread_and_everything_is_put_back(dtype: torch.dtype) -> None:
    forward = ForwardCasts(dtype)

    def run() -> Any:
        before = state()
        with forward:
            inside = (product_dtype(), torch.is_autocast_cache_enabled())
            with forward, ForwardCasts(BF16):
                nested = product_dtype()
            after_nested = product_dtype()
        with pytest.raises(KeyError), forward:
            raise KeyError
        return inside, nested, after_nested, before == state()

    assert run() == in_thread(run) == ((dtype, True), BF16, dtype, True)
    assert forward.run(lambda a, b: (a @ b).dtype, torch.ones(2, 2), b=torch.ones(2, 2)) is dtype


def test_one_object_serves_threads_at_the_same_time() -> None:
    forward = ForwardCasts(HALF)
    barrier = threading.Barrier(4, timeout=30)

    def run() -> list[Any]:
        seen = []
        for _ in range(20):
            barrier.wait()
            with forward:
                barrier.wait()
                seen.append(product_dtype())
            seen.append(is_on())
        return seen

    results: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: results.append(run())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[HALF, False] * 20] * 4


@pytest.mark.parametrize("scope", ["thread", "model"])
@pytest.mark.parametrize("where", ["here", "other thread"])
@pytest.mark.parametrize(
    "region", [disable_casts, lambda: torch.autocast("cpu", enabled=False)], ids=["disable_casts", "torch.autocast"]
)
def test_a_region_without_casts_around_a_forward_wins(
    region: Callable[[], Any], where: str, scope: str, start_casts: StartCasts
) -> None:
    start_casts(cast_scope=scope)
    forward = ForwardCasts(HALF)

    def run() -> list[torch.dtype]:
        with region():
            with forward:
                seen = [product_dtype()]
                with torch.autocast("cpu", dtype=BF16):
                    seen.append(product_dtype())
                seen.append(product_dtype())
            seen.append(product_dtype())
        with forward:
            seen.append(product_dtype())
            with region():
                with forward:
                    seen.append(product_dtype())
                seen.append(product_dtype())
            seen.append(product_dtype())
        return seen

    seen = run() if where == "here" else in_thread(run)
    assert seen == [FP32, BF16, FP32, FP32, HALF, FP32, FP32, HALF]


def test_the_forward_inside_a_user_autocast_region_uses_the_models_dtype() -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert product_dtype() is BF16
        with ForwardCasts(HALF):
            assert product_dtype() is HALF
        assert product_dtype() is BF16


@pytest.mark.parametrize("scope", ["thread", "model"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_a_whole_forward_recomputes_it_with_the_same_casts(
    scope: str, reentrant: bool, start_casts: StartCasts
) -> None:
    start_casts(cast_scope=scope)
    forward = ForwardCasts(HALF)
    seen = []

    def model(x: torch.Tensor) -> torch.Tensor:
        with forward:
            seen.append(product_dtype())
            y = x @ x
            return y.float()

    x = torch.rand(2, 2, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert seen == [HALF, HALF]
    seen.clear()
    with disable_casts():
        y = checkpoint(model, x, use_reentrant=reentrant)
    y.sum().backward()
    assert seen == [FP32, FP32]


def test_a_replica_thread_that_carries_the_callers_state_follows_it(start_casts: StartCasts) -> None:
    """As torch.nn.parallel.parallel_apply does: it opens an autocast block with the calling thread's flag."""
    forward = ForwardCasts(HALF)

    def replica(enabled: bool) -> torch.dtype:
        with torch.autocast("cpu", enabled=enabled), forward:
            return product_dtype()

    start_casts()
    here = is_on()
    assert here
    assert in_thread(lambda: replica(here)) is HALF
    with disable_casts():
        here = is_on()
    assert in_thread(lambda: replica(here)) is FP32


def test_casts_off_and_casts_as_put_back_what_was_there() -> None:
    with torch.autocast("cpu", dtype=HALF):
        with CastsOff():
            assert not is_on()
            with CastsAs({"cpu": True}):
                assert is_on()
            assert not is_on()
        assert is_on()
    with CastsOff():
        assert not is_on()
    assert not is_on()


def test_a_forward_in_a_closure_casts_although_casts_are_off_around_it() -> None:
    """optimizer.step() switches the flag off and a closure brings it back: model scope has it off in both."""
    with CastsOff(), CastsAs({"cpu": False}), ForwardCasts(HALF):
        assert product_dtype() is HALF


# -- weight casts ------------------------------------------------------------------------------------------------


def test_weight_casts_are_shared_within_a_forward_and_gone_after_it() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 4)
    forward = ForwardCasts(HALF)
    with forward:
        first, second = F.linear(x, weight), F.linear(x, weight)
        casts = {id(y.grad_fn.next_functions[-1][0].next_functions[0][0]) for y in (first, second)}  # type: ignore[union-attr]
        assert len(casts) == 1
    with torch.no_grad():
        weight.fill_(2.0)
    with forward:
        assert F.linear(x, weight)[0, 0].item() == 8.0


@pytest.mark.parametrize("evaluate", [torch.no_grad, torch.inference_mode])
def test_a_cast_made_without_grad_mode_is_not_used_with_it(evaluate: Callable[[], Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 4)
    forward = ForwardCasts(HALF)
    for nested in (True, False):
        weight.grad = None
        if nested:
            with forward:
                with evaluate():
                    F.linear(x, weight)
                y = F.linear(x, weight)
        else:
            with evaluate(), forward:
                F.linear(x, weight)
            with forward:
                y = F.linear(x, weight)
        y.sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype is FP32


def test_weights_cast_to_two_dtypes_in_nested_forwards() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 4)
    with ForwardCasts(HALF):
        assert F.linear(x, weight).dtype is HALF
        with ForwardCasts(BF16):
            assert F.linear(x, weight).dtype is BF16
        assert F.linear(x, weight).dtype is HALF


def test_in_a_surrounding_autocast_block_no_weight_cast_outlives_the_forward() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=HALF):
        with ForwardCasts(HALF):
            F.linear(x, weight)
        with torch.no_grad():
            weight.fill_(2.0)
        with ForwardCasts(HALF):
            assert F.linear(x, weight)[0, 0].item() == 8.0
