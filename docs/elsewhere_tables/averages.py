"""Averages (EMA) of 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from . import TIMM, Row, Table, cell, import_timm

if TYPE_CHECKING:
    import torch

DIFFUSERS = "diffusers==0.42.1"
UPDATES, DECAY, STEPS, STEP = 2_000, 0.99, 8, 2.0**-10


def _model(dtype: torch.dtype) -> torch.nn.Module:
    import torch

    class OneWeight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.mul(x).sum()

    return OneWeight()


class Average:
    """An average of a model: what makes it, what updates it, and where its numbers are."""

    def __init__(self, made: Any, update: Callable[[], object], values: Callable[[], torch.Tensor]):
        self.made, self.update, self.values = made, update, values


def _of_torch(model: torch.nn.Module, decay: float, name: str) -> Average:
    from torch.optim import swa_utils

    function = getattr(swa_utils, f"get_ema_{name}")(decay)
    made = swa_utils.AveragedModel(model, **{name: function})
    return Average(made, lambda: made.update_parameters(model), lambda: made.module.weight)


def _of_timm(model: torch.nn.Module, decay: float, name: str, **settings: Any) -> Average:
    made = getattr(import_timm().utils, name)(model, decay=decay, **settings)
    return Average(made, lambda: made.update(model), lambda: made.module.weight)


def _of_diffusers(model: torch.nn.Module, decay: float, **settings: Any) -> Average:
    from diffusers.training_utils import EMAModel

    made = EMAModel(list(model.parameters()), decay=decay, min_decay=decay, **settings)
    return Average(made, lambda: made.step(model.parameters()), lambda: made.shadow_params[0])


def _of_ema_pytorch(model: torch.nn.Module, decay: float, **settings: Any) -> Average:
    from ema_pytorch import EMA

    made = EMA(model, beta=decay, min_value=decay, update_every=1, update_after_step=-1, **settings)
    return Average(made, made.update, lambda: made.ema_model.weight)


def _of_lightning(model: torch.nn.Module, decay: float) -> Average:
    import types

    from lightning.pytorch.callbacks import EMAWeightAveraging

    made = EMAWeightAveraging(decay=decay)
    module: Any = model
    module.device = "cpu"
    trainer: Any = types.SimpleNamespace(global_step=0)

    def update() -> None:
        trainer.global_step += 1
        made.on_train_batch_end(trainer, module, None, None, 0)

    made._average_model = __import__("torch").optim.swa_utils.AveragedModel(model, **made._kwargs)
    return Average(made, update, lambda: made._average_model.module.weight)


def _stop(make: Any, dtype: torch.dtype) -> str:
    """Average a weight that was 1 and is 2, and return where the average ends, with its dtype."""
    import torch

    model = _model(dtype)
    average = make(model, DECAY)
    average.update()  # some copy at their first update
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(UPDATES):
        average.update()
    values = average.values()
    return f"{values.float().mean().item():.2f} ({str(values.dtype).removeprefix('torch.')})"


def _share(make: Any, block: bool) -> str:
    """Average small steps of an O5 model, and return the part of the right movement that the average has."""
    import contextlib

    import torch

    import mpinit

    model = _model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    mpinit.initialize(model, optimizer, opt_level="O5")
    average, right, weight = make(model, 0.5), 1.0, 1.0
    inside = partial(mpinit.float32_weights, model) if block else contextlib.nullcontext
    with inside():
        average.update()
    for _ in range(STEPS // 2):
        optimizer.zero_grad()
        model(-torch.ones(16)).backward()
        optimizer.step()
        with inside():
            average.update()
        weight += STEP
        right += (weight - right) / 2
    return f"{(average.values().float().mean().item() - 1) / (right - 1):.0%}".replace("%", " %")


def _measure(make: Any) -> dict[str, str]:
    import torch

    return {
        "bfloat16": cell(lambda: _stop(make, torch.bfloat16)),
        "float16": cell(lambda: _stop(make, torch.float16)),
        "O5, outside": cell(lambda: _share(make, False)),
        "O5, in float32_weights": cell(lambda: _share(make, True)),
    }


def _row(packages: str, make: Any, *arguments: Any, **settings: Any) -> Row:
    def made(model: torch.nn.Module, decay: float) -> Average:
        average: Average = make(model, decay, *arguments, **settings)
        return average

    return Row(packages, partial(_measure, made))


_ROWS = {
    "AveragedModel, get_ema_multi_avg_fn": _row("", _of_torch, "multi_avg_fn"),
    "AveragedModel, get_ema_avg_fn": _row("", _of_torch, "avg_fn"),
    "ModelEmaV2 of timm": _row(TIMM, _of_timm, "ModelEmaV2"),
    "ModelEmaV3 of timm": _row(TIMM, _of_timm, "ModelEmaV3"),
    "ModelEmaV3 of timm, stochastic_rounding off": _row(TIMM, _of_timm, "ModelEmaV3", stochastic_rounding=False),
    "ModelEmaV3 of timm, exclude_buffers": _row(TIMM, _of_timm, "ModelEmaV3", exclude_buffers=True),
    "EMAModel of diffusers": _row(DIFFUSERS, _of_diffusers),
    "EMAModel of diffusers, foreach": _row(DIFFUSERS, _of_diffusers, foreach=True),
    "EMA of ema-pytorch": _row("ema-pytorch==0.8.3", _of_ema_pytorch),
    "EMA of ema-pytorch, use_foreach": _row("ema-pytorch==0.8.3", _of_ema_pytorch, use_foreach=True),
    "EMAWeightAveraging of Lightning": _row("lightning==2.6.6", _of_lightning),
}

_TEXT = f"""
- *bfloat16, float16*: a 16-bit weight is 1, then 2 for {UPDATES:,} updates of an average with a decay of {DECAY}. The
  right average is 2.00; its dtype is in brackets.
- *O5*: the masters of an O5 model move by 2⁻¹⁰ in each of {STEPS // 2} steps, and an average with a decay of 0.5 is
  updated after each. The cell has the part of the right movement that the average has, without and inside
  `mpinit.float32_weights(model)`. [Which tensor do I touch?](../how-to/which-tensor.md#ema) has the loop.

Lightning's callback is called here by hand. In a Trainer mpinit's plugin updates it inside the block.
"""

TABLES = (Table("Averages (EMA)", _TEXT, ("bfloat16", "float16", "O5, outside", "O5, in float32_weights"), _ROWS),)
