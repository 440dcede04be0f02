"""Scales and clipping factors that 16 bits cannot hold: products are float32's, rounded once, on accelerators too.

Below the public face: a device without a kernel of torch is simulated where the package remembers which there are.
"""

import math

import pytest
import torch
from casts import BF16, FP32, HALF
from session_device import device, placed
from torch import nn

import mpinit
from mpinit.basics import products

pytestmark = pytest.mark.device

# Multiples of the distance between two numbers of the dtype, for the roundings of two backward passes.
TOLERANCE = {HALF: 2.0**-9, BF16: 2.0**-6}


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("scale", [2.0**17, 2.0**25, 1000.0])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_gradients_add_up_over_blocks_whatever_the_scale(dtype: torch.dtype, scale: float, skips: bool) -> None:
    """Use scales that 16 bits cannot hold: in float16 2**17 is inf and 2**-25 is 0; 1/1000 has 11 bits."""
    model = placed(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O3", cast_model_type=dtype, loss_scale=scale, skip_nonfinite=skips)
    x = placed(torch.rand(1, 8, generator=torch.Generator().manual_seed(0)) + 0.5)
    for times in (1, 2, 3):
        with mpinit.scale_loss(model(x).float().sum() * 1e-4, optimizer) as scaled:
            scaled.backward()
        assert model.weight.grad is not None
        expected = (1e-4 * times * x.to(dtype).float()).expand(4, 8)
        torch.testing.assert_close(model.weight.grad.float(), expected, rtol=TOLERANCE[dtype], atol=0.0)


@pytest.mark.parametrize("size", [(), (1,), (3, 5), (0,)])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_a_clipped_gradient_is_the_float32_product_rounded_once(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    weights = [nn.Parameter(placed(torch.ones(shape, dtype=dtype))) for shape in (size, (7,))]
    model = nn.ParameterList(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O3", cast_model_type=dtype, loss_scale=1.0)
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        weight.grad = placed(torch.rand(weight.shape, generator=generator) + 1).to(dtype)
    before = [weight.grad.float() for weight in weights if weight.grad is not None]
    norm = mpinit.clip_grad_norm_(optimizer, 1 / 3)
    factor = (1 / 3 / (norm + 1e-6)).clamp(max=1.0)
    for weight, gradient in zip(weights, before, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, (gradient * factor).to(dtype))


@pytest.mark.parametrize("missing", [(BF16,), (BF16, FP32)], ids=["bfloat16", "all"])
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_without_torchs_kernel_the_same_steps_are_skipped(
    bad: float | None, missing: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train as on a device that has no kernel to unscale and check gradients of some dtypes, as CUDA for bfloat16."""
    for dtype in missing:
        monkeypatch.setitem(products._has_kernel, (device().type, dtype), False)
    model = placed(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", loss_scale=mpinit.DynamicLossScale(init=8.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = placed(torch.rand(5, 4, generator=torch.Generator().manual_seed(0)))
    loss = model(x).float().square().mean()
    if bad is not None:
        loss = loss + model[0].bias[1].float() * bad
    with mpinit.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer) == (bad is not None)
    assert mpinit.loss_scale(optimizer) == (8.0 if bad is None else 4.0)
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(moved) if bad is None else not any(moved)
