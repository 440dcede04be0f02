"""Between backward and step: gradients are unscaled, in float32, and may be clipped.

Below the public face: unscaling is called on gradients of any shape and device.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import HALVES, backward, batches, gradients, masters, mlp, mse, plain_sgd, poison, same, started
from session_device import placed
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import mpinit
from mpinit.distributed.sharding import dense_view
from mpinit.optimizer import gradients as unscaling

pytestmark = pytest.mark.device

LEVELS = ("O0", "O1", "O2", "O3")


WAYS: dict[str, Callable[..., Any]] = {
    "torch": lambda _, optimizer, *how: clip_grad_norm_(mpinit.master_params(optimizer), *how),
    "mpinit": lambda _, optimizer, *how: mpinit.clip_grad_norm_(optimizer, *how),
    "the model's parameters": lambda model, _, *how: clip_grad_norm_(model.parameters(), *how),
}
BY_VALUE = {"value": lambda _, optimizer, limit: clip_grad_value_(mpinit.master_params(optimizer), limit)}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_equals_float32s(level: str, way: str, norm_type: float) -> None:
    (model, optimizer), reference, data = started(level, make=plain_sgd), mlp(), batches(2)
    for batch in data:
        backward(mse(model, batch), optimizer)
        mse(reference, batch).backward()
    norm = WAYS[way](model, optimizer, 0.1, norm_type)
    expected = clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm.float(), expected, rtol=0.01, atol=0.0)
    clipped = [parameter.grad for parameter in reference.parameters()]
    exact = {"rtol": 0.0, "atol": 0.0} if level == "O0" else {"rtol": 0.02, "atol": 2e-4}
    torch.testing.assert_close([g.float() for g in gradients(optimizer) if g is not None], clipped, **exact)
    before = masters(optimizer)
    optimizer.step()
    moved = [(old - new).float() for old, new in zip(before, masters(optimizer), strict=True)]
    torch.testing.assert_close(moved, clipped, rtol=0.02, atol=5e-4)


KEPT_IN_16_BIT: dict[str, dict[str, Any]] = {
    "O3": {"opt_level": "O3"},
    "O3 in bfloat16": {"opt_level": "O3", "cast_model_type": torch.bfloat16},
    "split": {"opt_level": "O5", "master_weights": "split"},
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, 0.0, math.inf])
@pytest.mark.parametrize("kind", KEPT_IN_16_BIT)
def test_norm_of_16_bit_gradients_is_float32s(kind: str, norm_type: float, foreach: bool | None) -> None:
    """Clip gradients whose norm float16 cannot hold, and of which bfloat16 sums would lose most; small and large."""

    def network() -> nn.Module:
        return nn.Sequential(*mlp(), placed(nn.Linear(3, 6000)))

    model = network()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, **KEPT_IN_16_BIT[kind])
    reference = network()
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours.grad = (30000 + 20000 * torch.rand(ours.shape, generator=generator)).to(ours)
        theirs.grad = ours.grad.float()
    norm = mpinit.clip_grad_norm_(optimizer, 1.0, norm_type, foreach=foreach)
    expected = clip_grad_norm_(reference.parameters(), 1.0, norm_type)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)
    found = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, [p.grad for p in reference.parameters()], rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("way", WAYS | BY_VALUE)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_clipping_after_an_overflow_leaves_the_step_skipped(level: str, way: str) -> None:
    (model, optimizer), batch = started(level, loss_scale=mpinit.DynamicLossScale(init=4.0)), batches(1)[0]
    before = masters(optimizer)
    backward(poison(mse(model, batch), next(model.parameters())), optimizer)
    norm = (WAYS | BY_VALUE)[way](model, optimizer, 0.1)
    assert norm is None or not norm.isfinite()
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    same(masters(optimizer), before)
    if way in BY_VALUE:
        # What is left is finite, and counts with the next loss, as with torch.amp.GradScaler.
        backward(mse(model, batch), optimizer)
        optimizer.step()
        assert mpinit.step_counts(optimizer) == (1, 1)


def test_clip_passes_error_if_nonfinite() -> None:
    model, optimizer = started()
    backward(poison(mse(model, batches(1)[0]), next(model.parameters())), optimizer)
    with pytest.raises(RuntimeError, match="non-finite"):
        mpinit.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_hooks_see_and_change_the_gradient(level: str) -> None:
    (model, optimizer), reference, batch = started(level), mlp(), batches(1)[0]
    for net in (model, reference):
        net[0].weight.register_hook(lambda gradient: gradient * 2)
    calls: list[torch.Tensor] = []
    model[3].weight.register_post_accumulate_grad_hook(calls.append)
    backward(mse(model, batch), optimizer)
    mse(reference, batch).backward()
    assert len(calls) == 1 and calls[0] is model[3].weight
    found = [gradient.float() for gradient in gradients(optimizer) if gradient is not None]
    torch.testing.assert_close(found, [p.grad for p in reference.parameters()], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_the_scaled_loss_by_hand(level: str, dtype: torch.dtype) -> None:
    (model, optimizer), reference, batch = started(level, dtype), mlp(), batches(1)[0]
    wanted = torch.autograd.grad(mse(reference, batch), list(reference.parameters()))
    with mpinit.scale_loss(mse(model, batch), optimizer) as scaled:
        found = torch.autograd.grad(scaled, list(model.parameters()))
        unscaled = [gradient.float() / mpinit.loss_scale(optimizer) for gradient in found]
    torch.testing.assert_close(unscaled, list(wanted), rtol=0.05, atol=0.01)
    assert all(gradient is None for gradient in gradients(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_backward_may_name_its_inputs(level: str) -> None:
    model, optimizer = started(level)
    with mpinit.scale_loss(mse(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward(inputs=list(model[3].parameters()))
    assert [gradient is None for gradient in gradients(optimizer)] == [True, True, False, False]


INVERSE = torch.tensor(0.25)


def kinds() -> dict[str, torch.Tensor]:
    # The argument check_invariants=False says the same, but before 2.13 torch warned of unchecked invariants anyway.
    with torch.sparse.check_sparse_tensor_invariants(False):
        rows = torch.sparse_coo_tensor([[0, 2, 2]], torch.tensor([[4.0], [8.0], [12.0]]), (4, 1)).coalesce()
    return {
        "float32": torch.tensor([4.0, 8.0]),
        "float16": torch.tensor([4.0, 8.0], dtype=torch.float16),
        "bfloat16": torch.tensor([4.0, 8.0], dtype=torch.bfloat16),
        "float64": torch.tensor([4.0, 8.0], dtype=torch.float64),
        "float64 beyond float32": torch.tensor([4e300, 8.0], dtype=torch.float64),
        "complex": torch.tensor([4 + 8j, 1j]),
        "sparse": rows,
        "empty": torch.empty(0),
    }


@pytest.mark.parametrize("kind", kinds())
def test_unscaling_multiplies_and_finds_nothing_wrong(kind: str) -> None:
    gradient, expected = kinds()[kind], kinds()[kind] * 0.25
    found_inf = unscaling.multiply_and_check_([gradient], INVERSE)
    assert found_inf is not None and found_inf.dim() == 0 and found_inf.item() == 0
    torch.testing.assert_close(gradient.to_dense(), expected.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind != "empty"])
def test_inf_and_nan_are_found_wherever_they_are(kind: str, bad: float) -> None:
    everything = kinds()
    dense = dense_view(everything[kind])
    dense[(-1,) * dense.dim()] = bad
    found_inf = unscaling.multiply_and_check_(list(everything.values()), INVERSE)
    assert found_inf is not None and found_inf.item() == 1.0
    assert everything["float32"][0].item() == 1.0, "the others are unscaled all the same"
