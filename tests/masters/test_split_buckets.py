"""The buckets that split masters are put together in: memory kept, given back, and never shared with a user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpinit
from mpinit import registry
from mpinit.masters import buckets as split_buckets


@pytest.mark.parametrize("kept", [0, 2**40])
def test_weights_that_move_between_steps_are_found_again(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a bucket's buffer stays laid out from step to step makes no difference, and is not trusted blindly."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
        x = torch.randn(2, 3, 4, 4)
        for index in range(6):
            if index == 2:
                model.to(memory_format=torch.channels_last)
            if index == 4:
                model[2].weight.data = model[2].weight.detach().clone()
            optimizer.zero_grad()
            with mpinit.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            if index == 3:
                model[0].bias.grad = None
            optimizer.step()
        mpinit.undo(model)
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained()
    monkeypatch.setattr(split_buckets, "_KEPT_BYTES", kept)
    assert all(map(torch.equal, trained(), expected))


def test_a_large_buffer_is_given_back_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for kept in (0, 2**40):
        monkeypatch.setattr(split_buckets, "_KEPT_BYTES", kept)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with mpinit.scale_loss(model(torch.ones(1, 64)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        store = registry.of(model).controller_of(optimizer).groups.store  # type: ignore[union-attr]
        held.append(len(store._buffers._buffers))  # type: ignore[attr-defined]
        mpinit.undo(model)
    assert held == [0, 1]


class KeepsGradients(torch.optim.Optimizer):
    """SGD on an extrapolated gradient, which keeps the last one as it came, uncopied."""

    steps_per_parameter = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                last = self.state[parameter].get("last", parameter.grad)
                parameter.add_(2 * parameter.grad - last, alpha=-0.1)
                self.state[parameter]["last"] = parameter.grad


@pytest.mark.parametrize("bucket_bytes", [64, 2**26])
def test_an_optimizer_may_hold_on_to_gradients(bucket_bytes: int) -> None:
    results = []
    for more in ({"master_weights": True}, {"master_weights": "split", "split_bucket_bytes": bucket_bytes}):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = KeepsGradients(model.parameters())
        mpinit.initialize(model, optimizer, "O5", verbosity=0, **more)
        for index in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(index))).square().mean()
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        results.append(model.state_dict())
        mpinit.undo(model)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-3, atol=1e-3)


def test_buffers_outgrown_are_given_back() -> None:
    sizes = (100, 150, 200, 250, 5000)
    model = nn.ParameterList(torch.zeros(size) for size in sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", split_bucket_bytes=1024, verbosity=0)
    for _ in range(2):
        with mpinit.scale_loss(sum(p.float().sum() for p in model), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    store: Any = registry.of(model).controller_of(optimizer).groups.store  # type: ignore[union-attr]
    held = {b._layout.buffer.data_ptr() for _, found in store._buckets.values() for b in found if b._layout is not None}
    assert held <= {buffer.data_ptr() for buffer in store._buffers._buffers.values()}
    mpinit.undo(model)


def convolution(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
    for _ in range(steps):
        with mpinit.scale_loss(model(torch.ones(2, 8, 4, 4)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
    return model, optimizer


def test_a_weight_laid_out_anew_before_a_step_keeps_its_low_bits() -> None:
    left = []
    for format in (torch.contiguous_format, torch.channels_last):
        model, optimizer = convolution(steps=1)
        model.to(memory_format=format)  # type: ignore[call-overload]
        optimizer.step()
        left.append({name: value.clone() for name, value in model.state_dict().items()})
    torch.testing.assert_close(left[0], left[1], rtol=0, atol=0)


def test_a_weight_laid_out_anew_and_written_to_keeps_the_low_bits_of_the_rest() -> None:
    model, _ = convolution(steps=0)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model.state_dict()["weight"].clone()
    with torch.no_grad():
        model.weight[0, 0, 0, 0] = 1.0
    changed = model.state_dict()["weight"] != before
    assert changed[0, 0, 0, 0] and changed.sum() <= 64


class HalvesGradients(KeepsGradients):
    """SGD that leaves other gradients than it has found."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / 2
                parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("side", ["weight", "group"])
@pytest.mark.parametrize("kind", [KeepsGradients, HalvesGradients])
def test_gradients_that_a_step_has_replaced_may_be_cleared_on_either_side(kind: Any, side: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = kind(model.parameters())
    mpinit.initialize(model, optimizer, "O2", cast_model_type="bfloat16", master_weights="split", verbosity=0)

    def backward() -> None:
        loss = model(torch.ones(2, 4)).float().sum()
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    backward()
    expected = model.weight.grad.clone()
    optimizer.step()
    parameter = model.weight if side == "weight" else optimizer.param_groups[0]["params"][0]
    parameter.grad = None
    backward()
    assert torch.equal(model.weight.grad, expected), "not added to what was cleared"
    assert optimizer.param_groups[0]["params"][0].grad is model.weight.grad
