"""Normalisations under apex's names: torch's numbers, and the dtypes that apex promises."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mpinit.compat.apex import normalization as norms

LOWER = (torch.float16, torch.bfloat16)


def test_layer_norm_is_torchs() -> None:
    x = torch.randn(3, 4)
    module = norms.FusedLayerNorm(4, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    assert torch.equal(module(x), F.layer_norm(x, (4,), module.weight, module.bias, 1e-3))
    assert norms.FusedLayerNorm(4, elementwise_affine=False).weight is None
    assert isinstance(module, torch.nn.LayerNorm)


def test_rms_norm_is_torchs() -> None:
    x = torch.randn(3, 4)
    module = norms.FusedRMSNorm(4, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    torch.testing.assert_close(module(x), x * module.weight / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt())


@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_fused_answers_in_the_inputs_dtype_and_mixed_in_the_weights(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).to(dtype).requires_grad_()
    fused, mixed = getattr(norms, f"Fused{kind}")(4), getattr(norms, f"MixedFused{kind}")(4)
    assert fused(x).dtype == dtype
    assert mixed(x).dtype == torch.float32
    assert mixed.to(dtype)(x).dtype == dtype
    torch.testing.assert_close(fused(x).float(), fused(x.float()), rtol=1e-2, atol=1e-2)
    fused(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert fused.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_mixed_norms_without_weights_are_refused(kind: str) -> None:
    with pytest.raises(RuntimeError, match=r"use Fused\w+\(elementwise_affine=False\)"):
        getattr(norms, kind)(4, elementwise_affine=False)
