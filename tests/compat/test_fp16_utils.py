"""apex's helpers for loops with float32 masters that a script keeps by hand."""

import pytest
import torch
from torch import nn

from mpinit.compat.apex import fp16_utils
from mpinit.compat.apex.fp16_utils import (
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def test_a_half_network_keeps_batchnorm_in_float32() -> None:
    half = network_to_half(network())
    linear, norm = half[1][0], half[1][1]
    assert linear.weight.dtype == torch.float16 and norm.weight.dtype == norm.running_mean.dtype == torch.float32
    assert half(torch.randn(4, 6)).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_converting_casts_all_but_batchnorm(dtype: torch.dtype) -> None:
    model = network()
    model[1] = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False))
    model.register_buffer("table", torch.ones(2))
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    assert convert_network(model, dtype) is model
    assert model[0].weight.dtype == dtype and model.table.dtype == dtype and model.count.dtype == torch.int64
    assert model[1][0].running_mean.dtype == torch.float32
    assert model[1][1].running_mean.dtype == dtype, "apex keeps those with parameters"


@pytest.mark.parametrize("flat", [False, True])
def test_a_loop_over_masters_equals_one_by_hand(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).half()
    model[2].bias.requires_grad_(False)
    start = [p.detach().float().clone() for p in model.parameters() if p.requires_grad]
    weights, masters = prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 3)
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    velocity = [torch.zeros_like(value) for value in start]
    for index in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(index)).half()
        model.zero_grad()
        (model(x).float().square().mean() * 64).backward()
        model_grads_to_master_grads(weights, masters, flat_master=flat)
        with torch.no_grad():
            for master in masters:
                master.grad /= 64
        optimizer.step()
        master_params_to_model_params(weights, masters, flat_master=flat)
        for k, weight in enumerate(weights):
            velocity[k] = velocity[k] * 0.9 + weight.grad.float() / 64
            start[k] = start[k] - 0.1 * velocity[k]
            torch.testing.assert_close(weight.float(), start[k].half().float(), rtol=1e-3, atol=1e-6)


def test_a_weight_without_a_gradient_gives_none() -> None:
    weights, masters = prep_param_lists(nn.Linear(2, 2).half())
    weights[0].grad = torch.ones_like(weights[0])
    masters[1].grad = torch.ones_like(masters[1])
    model_grads_to_master_grads(weights, masters)
    assert torch.equal(masters[0].grad, torch.ones(2, 2)) and masters[1].grad is None


def test_flat_masters_of_several_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="parameters of one dtype"):
        prep_param_lists(network_to_half(network()), flat_master=True)


def test_a_float16_model_casts_its_inputs_and_keeps_batchnorm() -> None:
    model = fp16_utils.FP16Model(network())
    assert model(torch.randn(4, 6)).dtype == torch.float16
    assert model.network[1].weight.dtype == torch.float32


def test_gradients_are_clipped_as_by_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    assert fp16_utils.clip_grad_norm([weight], 1.0).item() == 4.0
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))


def test_numbers_of_tensors_and_lists() -> None:
    assert to_python_float(torch.tensor(2.0)) == to_python_float([2.0]) == 2.0
