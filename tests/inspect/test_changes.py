"""``changes``: which numbers of 16-bit weights a step has changed, compared with copies of the whole model."""

from typing import Any

import pytest
import torch
from torch import nn

import mpinit

LEVELS: dict[str, dict[str, Any]] = {
    **{level: {"opt_level": level} for level in ("O0", "O1", "O3", "O5")},
    "O2": {"opt_level": "O2", "init_loss_scale": 256.0},
    "split": {"opt_level": "O5", "master_weights": "split"},
}


def made(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return model, optimizer


def backward(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    with mpinit.scale_loss(model(torch.ones(4, 8)).square().mean() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_that_gets_the_changes_has_the_bits_of_the_model(level: str) -> None:
    model, optimizer = made(level)
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    counts = []
    for _ in range(4):
        backward(model, optimizer)
        with mpinit.changes(optimizer) as changed:
            assert changed == []
            optimizer.step()
        optimizer.zero_grad()
        for change in changed:
            copy = copies[change.name].view(-1)
            assert change.values.dtype is copy.dtype and change.indices.dtype is torch.int64
            assert (copy[change.indices].view(-1) != change.values).all(), "nothing that stayed is sent"
            copy[change.indices] = change.values
        counts.append(sum(change.indices.numel() for change in changed))
        assert all(torch.equal(copies[name], p) for name, p in model.named_parameters())
    total = sum(p.numel() for p in model.parameters())
    assert 0 < sum(counts) <= 4 * total
    if level in ("O5", "split"):
        assert max(counts) < total / 2, "most steps are smaller than the distance of bfloat16 numbers"


def test_a_skipped_step_changes_nothing_and_signs_of_zero_count() -> None:
    model, optimizer = made("O2")
    backward(model, optimizer, float("inf"))
    with mpinit.changes(optimizer) as changed:
        optimizer.step()
    assert mpinit.step_was_skipped(optimizer) and changed == []
    with torch.no_grad():
        model[0].bias.zero_()
    with mpinit.changes(optimizer) as changed, torch.no_grad():
        model[0].bias[3] = -0.0
    assert [(each.name, each.indices.tolist()) for each in changed] == [("0.bias", [3])]


def test_writes_from_before_the_block_are_not_its_changes() -> None:
    model, optimizer = made("O5")
    master = next(mpinit.master_params(optimizer))
    with torch.no_grad():
        master[0, 0] = 3.0
    with mpinit.changes(optimizer) as changed:
        pass
    assert changed == [] and model[0].weight[0, 0] == 3.0
    with pytest.raises(RuntimeError, match="was not initialised"), mpinit.changes(torch.optim.SGD([master], lr=0.1)):
        pass


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
def test_wide_and_complex_weights_are_compared(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mpinit.initialize(model, optimizer, "O4")
    with mpinit.changes(optimizer) as changed:
        model.weight.grad = torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
        optimizer.step()
    assert [(each.indices.tolist(), each.values.tolist()) for each in changed] == [([1], [0.0])]


def test_empty_weights_do_not_change() -> None:
    model = nn.Module()
    model.weight, model.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mpinit.initialize(model, optimizer, "O5")
    with mpinit.changes(optimizer) as changed:
        model.weight.data[1] = 3.0
    assert [(each.name, each.indices.tolist()) for each in changed] == [("weight", [1])]


def test_parameters_that_are_added_inside_the_block_are_refused() -> None:
    _, optimizer = made("O5")
    late = nn.Linear(2, 2)
    words = r"was added to the optimizer inside .*add_param_group before the block"
    with pytest.raises(RuntimeError, match=words), mpinit.changes(optimizer):
        optimizer.add_param_group({"params": list(late.parameters())})
    with mpinit.changes(optimizer) as changed:
        optimizer.step()
    assert changed == []


@pytest.mark.parametrize("level", ["O2", "O5", "split"])
def test_block_that_begins_or_ends_inside_float32_weights_is_refused(level: str) -> None:
    model, optimizer = made(level)
    words = r"mpinit\.changes\(\) was called inside"
    with mpinit.float32_weights(model), pytest.raises(RuntimeError, match=words), mpinit.changes(optimizer):
        pass
    block = mpinit.float32_weights(model)
    with pytest.raises(RuntimeError, match=words), mpinit.changes(optimizer):
        block.__enter__()
    block.__exit__(None, None, None)
    with mpinit.changes(optimizer) as changed, mpinit.float32_weights(model):
        model[0].bias.data[1] = 5.0
    assert [(each.name, each.indices.tolist()) for each in changed] == [("0.bias", [1])]
