"""apex.parallel and apex.normalization over torch's own."""

import copy
import pickle

import pytest
import torch
from forked_runs import run_code
from torch import nn
from torch.nn import functional as F

import mpinit
from mpinit.compat.apex import normalization as norms
from mpinit.compat.apex import parallel
from mpinit.compat.apex.parallel import LARC


def larc_step(
    weights: list[torch.Tensor], grads: list[torch.Tensor], lr: float, decay: float, *, clip: bool
) -> list[torch.Tensor]:
    """One step of plain SGD under LARC, from the paper's equations."""
    after = []
    for w, g in zip(weights, grads, strict=True):
        rate = 0.02 * w.norm() / (g.norm() + decay * w.norm() + 1e-8)
        after.append(w - lr * min(float(rate) / lr, 1.0) * (g + decay * w) if clip else w - lr * rate * (g + decay * w))
    return after


@pytest.mark.parametrize("clip", [True, False])
def test_larc(clip: bool) -> None:
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    before = [p.detach().clone() for p in params]
    grads = [torch.randn(3, 2), torch.randn(4) * 1e-4]
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.01), clip=clip)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    optimizer.step()
    torch.testing.assert_close([p.detach() for p in params], larc_step(before, grads, 0.1, 0.01, clip=clip))
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


def test_larc_leaves_a_zero_gradient_and_a_zero_weight_alone() -> None:
    zero, still = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    optimizer = LARC(torch.optim.SGD([zero, still], lr=0.5, weight_decay=0.1))
    zero.grad, still.grad = torch.ones(2), torch.zeros(2)
    optimizer.step()
    assert torch.equal(zero.detach(), torch.full((2,), -0.5))
    assert torch.equal(still.detach(), torch.ones(2))


def test_larc_shares_everything_with_the_optimizer_inside() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer = LARC(inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    weight.grad = torch.ones(2)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert optimizer.step(lambda: torch.tensor(2.0)) == torch.tensor(2.0)
    scheduler.step()
    assert calls == [1]
    assert inner.param_groups[0]["lr"] == 0.05
    assert optimizer.state is inner.state
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.zero_grad()
    assert weight.grad is None
    other = LARC(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9))
    other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    other.load_state_dict(optimizer.state_dict())
    assert other.optim.param_groups[0]["lr"] == 0.05
    copied = pickle.loads(pickle.dumps(copy.deepcopy(inner)))
    assert LARC(copied).param_groups[0]["lr"] == 0.05
    assert LARC.LARC is LARC is parallel.LARC


@pytest.mark.parametrize("first", [True, False], ids=["initialised", "around what is initialised"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_larc_scales_what_an_initialised_optimizer_steps(level: str, first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    given = LARC(inner) if first else inner
    mpinit.initialize(model, given, opt_level=level, loss_scale=128.0, verbosity=0)
    optimizer = given if first else LARC(inner)
    with mpinit.scale_loss(model(torch.randn(2, 4)).float().square().mean(), given) as scaled:
        scaled.backward()
    grads = [p.grad.clone().float() for p in mpinit.master_params(given)]
    optimizer.step()
    after = [p.detach().clone() for p in mpinit.master_params(given)]
    torch.testing.assert_close(after, larc_step(before, grads, 0.1, 0.01, clip=True))


def test_converting_batchnorm_keeps_parameters_statistics_and_mode() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, eps=1e-3, momentum=0.3), nn.Sequential(nn.BatchNorm2d(2))
    )
    model.eval()
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
    x = torch.tensor([[-1.0, 1.0]])
    torch.testing.assert_close(
        module(x, z=torch.tensor([[0.5, 0.5]])), torch.tensor([[0.0, 1.5]]), rtol=1e-4, atol=1e-4
    )


def test_it_can_be_imported_where_torchs_own_was_replaced() -> None:
    """A launcher that puts a subclass with **kwargs in torch's place, and the same with torch's own arguments."""
    code = """
import torch

class Replaced(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, **kwargs):
        super().__init__(module, **kwargs)

torch.nn.parallel.DistributedDataParallel = Replaced
from mpinit.compat.apex.parallel import DistributedDataParallel, distributed
assert issubclass(DistributedDataParallel, Replaced)
print(distributed.buffers_option(Replaced))
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == parallel.distributed.buffers_option(nn.parallel.DistributedDataParallel)


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
