"""Averages of initialised models are averages of the masters, however the loop writes them down."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from averaged_nets import KINDS, Net, masters_of, start, step
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

import mpinit

DECAY = 0.9
DECAYS = torch.tensor([DECAY, 1 - DECAY])
Update = Callable[[nn.Module, nn.Module], None]


def each(update: Callable[[Tensor, Tensor], object]) -> Update:
    def run(average: nn.Module, model: nn.Module) -> None:
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                update(ours, theirs)

    return run


def set_data(ours: Tensor, theirs: Tensor) -> None:
    ours.data = ours.data.lerp(theirs.data, 1 - DECAY)


def set_data_as_a_sum(ours: Tensor, theirs: Tensor) -> None:
    ours.data = ours.data * DECAY - (ours.data - theirs.data) * 0 + (theirs.data - ours.data * 0).float() * (1 - DECAY)


@torch.no_grad()
def state_values(average: nn.Module, model: nn.Module) -> None:
    """timm's ModelEmaV2, and V3 where buffers are averaged."""
    for ours, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        ours.copy_(ours * DECAY + (1 - DECAY) * theirs if ours.is_floating_point() else theirs)


@torch.no_grad()
def foreach_over_state(average: nn.Module, model: nn.Module) -> None:
    pairs = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
    ours, theirs = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
    torch._foreach_lerp_(list(ours), list(theirs), weight=1 - DECAY)


@torch.no_grad()
def foreach_over_parameters(average: nn.Module, model: nn.Module) -> None:
    """timm's ModelEmaV3 with exclude_buffers."""
    torch._foreach_lerp_(tuple(average.parameters()), tuple(model.parameters()), weight=1 - DECAY)
    for ours, theirs in zip(average.buffers(), model.buffers(), strict=True):
        ours.copy_(theirs)


@torch.no_grad()
def foreach_add(average: nn.Module, model: nn.Module) -> None:
    ours = list(average.parameters())
    torch._foreach_mul_(ours, DECAY)
    torch._foreach_add_(ours, list(model.parameters()), alpha=1 - DECAY)


def yolo(average: nn.Module, model: nn.Module) -> None:
    theirs = model.state_dict()
    for name, ours in average.state_dict().items():
        if ours.dtype.is_floating_point:
            ours *= DECAY
            ours += (1 - DECAY) * theirs[name].detach()


@torch.no_grad()
def state_of_ours_and_parameters_of_theirs(average: nn.Module, model: nn.Module) -> None:
    state = average.state_dict()
    for name, theirs in model.named_parameters():
        state[name].mul_(DECAY).add_(theirs.data, alpha=1 - DECAY)


def new_state(average: nn.Module, model: nn.Module) -> None:
    """README's recipe."""
    mean = average.state_dict()
    for name, value in model.state_dict().items():
        mean[name].lerp_(value, 1 - DECAY) if value.is_floating_point() else mean[name].copy_(value)
    average.load_state_dict(mean)


UPDATES: dict[str, Update] = {
    "lerp_ of data": each(lambda e, p: e.data.lerp_(p.data, 1 - DECAY)),
    "lerp_": each(lambda e, p: e.lerp_(p, 1 - DECAY)),
    "lerp_ of detached": each(lambda e, p: e.detach().lerp_(p.detach().to("cpu"), 1 - DECAY)),
    "mul_ add_": each(lambda e, p: e.mul_(DECAY).add_(p, alpha=1 - DECAY)),
    "mul_ add_ of data": each(lambda e, p: e.data.mul_(DECAY).add_(p.data, alpha=1 - DECAY)),
    "add_ of a difference": each(lambda e, p: e.add_(p - e, alpha=1 - DECAY)),
    "sub_ of a difference": each(lambda e, p: e.sub_((1 - DECAY) * (e - p))),
    "copy_ of lerp": each(lambda e, p: e.copy_(p.lerp(e, DECAY))),
    "data = lerp": each(set_data),
    "data = sum": each(set_data_as_a_sum),
    "views": each(lambda e, p: e.view(-1).lerp_(p.view(-1), 1 - DECAY)),
    "rows": each(lambda e, p: [a.lerp_(b, 1 - DECAY) for a, b in zip(e.split(1), p.split(1), strict=True)]),
    "stacked": each(lambda e, p: e.copy_(torch.einsum("s...,s->...", torch.stack([e, p]), DECAYS))),
    "state values": state_values,
    "foreach over state": foreach_over_state,
    "foreach over parameters": foreach_over_parameters,
    "foreach add": foreach_add,
    "yolo": yolo,
    "state and parameters": state_of_ours_and_parameters_of_theirs,
    "new state": new_state,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("update", UPDATES)
def test_a_moving_average_is_one_of_the_masters(update: str, kind: str) -> None:
    model, optimizer = start(kind)
    step(model, optimizer)
    average = copy.deepcopy(model)
    expected = masters_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            step(model, optimizer)
            UPDATES[update](average, model)
            for name, master in masters_of(model).items():
                # In float64: what is left between the two is the average's own rounding.
                expected[name] = expected[name].double() * DECAY + master.double() * (1 - DECAY)
    parameters = dict(average.named_parameters())
    for name, parameter in parameters.items():
        assert parameter.dtype is torch.float32
        torch.testing.assert_close(parameter.detach(), expected[name].float(), rtol=2e-6, atol=2e-7)
    again = average.state_dict()
    assert all(torch.equal(again[name], parameter) for name, parameter in parameters.items()), "nothing is lost"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("way", ["default", "ema", "ema one by one", "swa", "swa one by one"])
def test_torchs_averaged_model(way: str, use_buffers: bool, kind: str) -> None:
    arguments = {
        "default": {},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
        "ema one by one": {"avg_fn": get_ema_avg_fn(DECAY)},
        "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
        "swa one by one": {"avg_fn": get_swa_avg_fn()},
    }[way]
    if way.startswith(("swa", "default")) and use_buffers:
        pytest.skip("torch divides BatchNorm's integer counter")
    model, optimizer = start(kind)
    average = AveragedModel(model, use_buffers=use_buffers, **arguments)
    expected: dict[str, Tensor] = {}
    for count in range(5):
        step(model, optimizer)
        average.update_parameters(model)
        for name, master in masters_of(model).items():
            weight = 1 - DECAY if "ema" in way else 1 / (count + 1)
            expected[name] = master.double().lerp(expected.get(name, master).double(), 1 - weight if count else 0)
    for name, parameter in average.module.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].float(), rtol=2e-6, atol=2e-7)
    assert average.module.mean.dtype is torch.float32
    if not use_buffers:
        assert torch.equal(average.module.mean, model.mean.float())


def test_an_averaged_model_from_before_initialize() -> None:
    model = Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", verbosity=0)
    average.update_parameters(model)
    before = masters_of(model)
    step(model, optimizer)
    average.update_parameters(model)
    expected = before["first.weight"].lerp(masters_of(model)["first.weight"], 1 - DECAY)
    torch.testing.assert_close(average.module.first.weight.detach(), expected, rtol=2e-6, atol=2e-7)


def test_undo_takes_the_patch_of_averaged_model_along() -> None:
    before = vars(AveragedModel)["update_parameters"]
    (one, _), (other, _) = start("O2"), start("O5")
    assert vars(AveragedModel)["update_parameters"] is not before
    mpinit.undo(one)
    assert vars(AveragedModel)["update_parameters"] is not before
    mpinit.undo(other)
    assert vars(AveragedModel)["update_parameters"] is before


@pytest.mark.parametrize(
    "update",
    [
        lambda e, p: e.mul_(DECAY).add_((1 - DECAY) * p),
        lambda e, p: e.copy_(DECAY * e + (1 - DECAY) * p),
        lambda e, p: setattr(e, "data", DECAY * e.data + (1 - DECAY) * p.data),
    ],
)
def test_what_was_rounded_before_is_said(update: Callable[[Tensor, Tensor], object]) -> None:
    model, _ = start("O5")
    average = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"state_dict\(\) or mpinit.master_params") as caught:
        each(update)(average, model)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_goes_back_into_the_model(kind: str) -> None:
    model, optimizer = start(kind)
    average = copy.deepcopy(model)
    step(model, optimizer)
    model.load_state_dict(average.state_dict())
    assert torch.equal(masters_of(model)["first.weight"], average.first.weight)
    with torch.no_grad():
        for theirs, ours in zip(model.parameters(), average.parameters(), strict=True):
            theirs.copy_(ours * 2)
    torch.testing.assert_close(model.first.weight.float(), average.first.weight.detach() * 2, rtol=1e-2, atol=1e-6)
