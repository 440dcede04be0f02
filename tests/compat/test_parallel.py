"""apex.parallel and apex.normalization over torch's own.

Below the public face: these modules are what scripts import as ``apex``.
"""

import pytest
import torch
from forked_runs import run_code
from torch import nn
from torch.nn import functional as F

from mpinit.compat.apex import normalization as norms
from mpinit.compat.apex import parallel


def test_converting_batchnorm_keeps_tensors_and_mode() -> None:
    norms = nn.BatchNorm2d(2, eps=1e-3, momentum=0.3), nn.Sequential(nn.BatchNorm2d(2))
    model = nn.Sequential(nn.Conv2d(1, 2, 1), *norms).eval()
    model[1].running_mean.fill_(0.5)
    weight, keys = model[1].weight, list(model.state_dict())
    converted = parallel.convert_syncbn_model(model, channel_last=True)
    assert converted is model
    assert isinstance(model[1], parallel.SyncBatchNorm)
    assert isinstance(model[2][0], torch.nn.SyncBatchNorm)
    assert model[1].weight is weight, "an optimizer made before goes on training it"
    assert (model[1].eps, model[1].momentum, model[1].training) == (1e-3, 0.3, False)
    assert list(model.state_dict()) == keys
    assert parallel.convert_syncbn_model(model)[1].weight is weight, "converting again changes nothing"
    expected = nn.functional.batch_norm(torch.ones(1, 2, 1, 1), model[1].running_mean, model[1].running_var, eps=1e-3)
    torch.testing.assert_close(model[1](torch.ones(1, 2, 1, 1)), expected)


def test_a_single_batchnorm_is_replaced() -> None:
    assert isinstance(parallel.convert_syncbn_model(nn.BatchNorm1d(3)), parallel.SyncBatchNorm)


def test_sync_batchnorm_adds_and_rectifies() -> None:
    module = parallel.SyncBatchNorm(2, fuse_relu=True).eval()
    found = module(torch.tensor([[-1.0, 1.0]]), z=torch.tensor([[0.5, 0.5]]))
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.5]]), rtol=1e-4, atol=1e-4)


def test_compat_imports_after_torchs_norm_was_replaced() -> None:
    """Import after a launcher has replaced torch's class by a subclass, with ``**kwargs`` or torch's arguments."""
    code = """
import torch

class Replaced(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, **kwargs):
        super().__init__(module, **kwargs)

torch.nn.parallel.DistributedDataParallel = Replaced
from mpinit.compat.apex.parallel import DistributedDataParallel
assert issubclass(DistributedDataParallel, Replaced)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
wrapped = DistributedDataParallel(torch.nn.BatchNorm1d(2), message_size=2**18, delay_allreduce=True)
assert not wrapped.broadcast_buffers and wrapped.find_unused_parameters and wrapped.bucket_bytes_cap == 2**20
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("kind", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_eps_of_0_is_not_replaced_by_the_default(kind: str) -> None:
    x = torch.randn(3, 4) * 1e-3
    reference = F.layer_norm(x, (4,), eps=0.0) if "Layer" in kind else F.rms_norm(x, (4,), eps=0.0)
    torch.testing.assert_close(getattr(norms, kind)(4, eps=0.0)(x), reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_fused_answers_in_inputs_dtype_and_mixed_in_weights(kind: str, dtype: torch.dtype) -> None:
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
def test_mixed_norms_without_weights_keep_the_inputs_dtype(kind: str) -> None:
    norm = getattr(norms, kind)(4, elementwise_affine=False)
    assert norm(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
