"""The timm plug against timm itself, beside the same loop written with mpinit alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from frameworks import LEVELS, same_bits
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3, NativeScaler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mpinit
from mpinit.integrations.timm import Scaler

Clip = Callable[[Iterable[Any]], Any]
CLIPS: dict[str, tuple[float, Clip]] = {
    "norm": (0.5, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)),
    "value": (0.01, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01)),
    "agc": (0.01, lambda parameters: timm.utils.adaptive_clip_grad(parameters, 0.01)),
}


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)


def made(level: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpinit.initialize(model, optimizer, **level)
    return model, optimizer


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


def run(scaler: Any, model: nn.Module, optimizer: Any, data: list[Any], every: int = 1, **clip: Any) -> None:
    """As timm's train.py does it."""
    for number, (x, y) in enumerate(data, start=1):
        loss, last = cross_entropy(model(x), y) / every, number % every == 0
        scaler(loss, optimizer, parameters=list(model.parameters())[:-2], need_update=last, **clip)
        if last:
            optimizer.zero_grad()


def run_by_hand(model: nn.Module, optimizer: Any, data: list[Any], every: int = 1, clip: Clip | None = None) -> None:
    for number, (x, y) in enumerate(data, start=1):
        last = number % every == 0
        with mpinit.scale_loss(cross_entropy(model(x), y) / every, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
        if last:
            if clip is not None:
                clip(list(mpinit.master_params(optimizer))[:-2])
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", CLIPS)
def test_a_run_has_the_bits_of_a_loop_by_hand(level: dict[str, Any], mode: str) -> None:
    (ours, optimizer), (other, bare), data = made(level), made(level), samples(4)
    limit, clip = CLIPS[mode]
    run(Scaler(optimizer), ours, optimizer, data, every=2, clip_grad=limit, clip_mode=mode)
    run_by_hand(other, bare, data, every=2, clip=clip)
    assert same_bits(ours.state_dict(), other.state_dict())
    untouched, left = made(level)
    run_by_hand(untouched, left, data, every=2)
    assert not same_bits(ours.state_dict(), untouched.state_dict()), "nothing was clipped"


def test_it_is_timms_own_in_float32() -> None:
    (ours, optimizer), (other, bare), data = made({"opt_level": "O0"}), made({"enabled": False}), samples(3)
    run(Scaler(optimizer), ours, optimizer, data, clip_grad=0.5)
    run(NativeScaler("cpu"), other, bare, data, clip_grad=0.5)
    assert all(torch.allclose(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_without_parameters_all_are_clipped() -> None:
    (ours, optimizer), (other, bare), data = made({"opt_level": "O2"}), made({"opt_level": "O2"}), samples(2)
    for x, y in data:
        Scaler(optimizer)(cross_entropy(ours(x), y), optimizer, clip_grad=0.1)
        with mpinit.scale_loss(cross_entropy(other(x), y), bare) as scaled_loss:
            scaled_loss.backward()
        mpinit.clip_grad_norm_(bare, 0.1)
        bare.step()
    assert same_bits(ours.state_dict(), other.state_dict())


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_graph_of_the_gradients_changes_nothing(level: dict[str, Any], create_graph: bool) -> None:
    (ours, optimizer), (other, bare), data = made(level), made(level), samples(2)
    run(Scaler(optimizer), ours, optimizer, data, create_graph=create_graph)
    run_by_hand(other, bare, data)
    assert same_bits(ours.state_dict(), other.state_dict())


LARGE = {"opt_level": "O2", "init_loss_scale": 2.0**22, "max_loss_scale": 2.0**40, "growth_interval": 2, "verbosity": 0}


def test_a_resumed_run_has_the_bits_of_one_that_was_not() -> None:
    data = samples(24)
    whole, optimizer = made(LARGE)
    scaler = Scaler(optimizer)
    run(scaler, whole, optimizer, data, every=2)
    assert min(mpinit.step_counts(optimizer)) > 2
    half, half_optimizer = made(LARGE)
    half_scaler = Scaler(half_optimizer)
    run(half_scaler, half, half_optimizer, data[:12], every=2)
    state = copy.deepcopy((half.state_dict(), half_optimizer.state_dict(), half_scaler.state_dict()))
    rest, rest_optimizer = made(LARGE)
    rest_scaler = Scaler(rest_optimizer)
    for owner, saved in zip((rest, rest_optimizer, rest_scaler), state, strict=True):
        owner.load_state_dict(saved)
    run(rest_scaler, rest, rest_optimizer, data[12:], every=2)
    assert same_bits(rest.state_dict(), whole.state_dict())
    assert rest_scaler.state_dict() == scaler.state_dict()


def test_the_state_is_that_of_timms_own() -> None:
    _, optimizer = made({"opt_level": "O2"})
    own, ours = NativeScaler("cpu"), Scaler(optimizer)
    assert ours.state_dict_key == own.state_dict_key
    assert ours.state_dict().keys() == own.state_dict().keys()
    own.load_state_dict({**ours.state_dict(), "scale": 512.0})
    ours.load_state_dict(own._scaler.state_dict() | {"scale": 256.0})
    assert mpinit.loss_scale(optimizer) == 256.0


def test_an_optimizer_that_was_not_initialised_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"mpinit\.initialize"):
        Scaler(torch.optim.SGD(nn.Linear(2, 2).parameters()))


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "V3": lambda model: ModelEmaV3(model, decay=0.9),
    "V3, one by one": lambda model: ModelEmaV3(model, decay=0.9, foreach=False),
    "V3, parameters": lambda model: ModelEmaV3(model, decay=0.9, exclude_buffers=True),
    "V3, warm-up": lambda model: ModelEmaV3(model, decay=0.9, use_warmup=True),
    "V2": lambda model: ModelEmaV2(model, decay=0.9),
    "the first": lambda model: ModelEma(model, decay=0.9),
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("name", ["O1", "O2", "O5", "O5, split"])
def test_averages_are_of_float32_masters(name: str, kind: str) -> None:
    model, optimizer = made({"verbosity": 0, **LEVELS[name]})
    average, scaler = AVERAGES[kind](model), Scaler(optimizer)
    inside = average.ema if kind == "the first" else average.module
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for x, y in samples(4):
        scaler(cross_entropy(model(x), y), optimizer)
        optimizer.zero_grad()
        with mpinit.float32_weights(model) if kind == "V3, parameters" else nullcontext():
            average.update(model)
        for key, value in model.state_dict().items():
            expected[key] += 0.1 * (value - expected[key])
    found = inside.state_dict()
    assert all(value.dtype is torch.float32 for value in found.values())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-7)
    plain, x = vit().eval(), samples(1)[0][0]
    plain.load_state_dict(expected)
    with mpinit.disable_casts():
        torch.testing.assert_close(inside(x), plain(x), rtol=1e-5, atol=1e-5)
