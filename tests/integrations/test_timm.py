"""timm's own scaler and averages over a session, beside the same loop written with mpinit alone."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from frameworks import LEVELS, same_bits
from loops import backward
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3, NativeScaler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mpinit

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


def run(model: nn.Module, optimizer: Any, data: list[Any], every: int = 1, **clip: Any) -> None:
    """As timm's train.py does it."""
    scaler = NativeScaler("cpu")
    for number, (x, y) in enumerate(data, start=1):
        loss, last = cross_entropy(model(x), y) / every, number % every == 0
        scaler(loss, optimizer, parameters=list(model.parameters())[:-2], need_update=last, **clip)
        if last:
            optimizer.zero_grad()


def run_by_hand(model: nn.Module, optimizer: Any, data: list[Any], every: int = 1, clip: Clip | None = None) -> None:
    for number, (x, y) in enumerate(data, start=1):
        last = number % every == 0
        backward(cross_entropy(model(x), y) / every, optimizer, delay_unscale=not last)
        if last:
            if clip is not None:
                clip(list(model.parameters())[:-2])
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", CLIPS)
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O5", "O5, split"])
def test_timms_own_scaler_has_the_bits_of_a_loop_by_hand(name: str, mode: str) -> None:
    level = {"verbosity": 0, **LEVELS[name]}
    if name not in ("O0", "O1"):
        level["grad_dtype"] = torch.float32  # timm unscales and clips weight.grad before the step
    (own, optimizer), (other, bare), data = made({**level, "loss_scale": 1.0}), made(level), samples(4)
    limit, clip = CLIPS[mode]
    run(own, optimizer, data, every=2, clip_grad=limit, clip_mode=mode)
    run_by_hand(other, bare, data, every=2, clip=clip)
    assert same_bits(own.state_dict(), other.state_dict())
    untouched, left = made(level)
    run_by_hand(untouched, left, data, every=2)
    assert not same_bits(own.state_dict(), untouched.state_dict()), "nothing was clipped"


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
    average = AVERAGES[kind](model)
    inside = average.ema if kind == "the first" else average.module
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for x, y in samples(4):
        run_by_hand(model, optimizer, [(x, y)])
        with mpinit.float32_weights(model) if kind == "V3, parameters" else nullcontext():
            average.update(model)
        for key, value in model.state_dict().items():
            expected[key] += 0.1 * (value - expected[key])
    assert all(value.dtype is torch.float32 for value in expected.values())
    torch.testing.assert_close(dict(inside.state_dict()), expected, rtol=1e-6, atol=1e-7)
    plain, x = vit().eval(), samples(1)[0][0]
    plain.load_state_dict(expected)
    with mpinit.disable_casts():
        torch.testing.assert_close(inside(x), plain(x), rtol=1e-5, atol=1e-5)
