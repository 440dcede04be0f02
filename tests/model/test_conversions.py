"""Converting or moving an initialised model is refused before anything changes, where a part would stay behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from averaged_nets import KINDS, start, step
from torch import nn

import mpinit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "convert",
    [
        nn.Module.float,
        lambda module: module.to(torch.float32),
        lambda module: module.to(device="cpu", dtype=torch.float64),
    ],
)
def test_converting_an_initialised_model_is_refused_before_anything_changes(
    convert: Callable[[nn.Module], Any], kind: str
) -> None:
    model, optimizer = start(kind)
    before = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for part in (model, model.first):
        with pytest.raises(RuntimeError, match=r"keep_fp32.*deepcopy.*mpinit.undo"):
            convert(part)
    assert before == {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    step(model, optimizer)
    mpinit.undo(model)
    convert(model)


def test_half_would_take_what_stays_float32_along() -> None:
    model, _ = start("O2")
    with pytest.raises(RuntimeError, match="Net belongs to a model"):
        model.half()
    model.first.half()
    model.to("cpu", memory_format=torch.channels_last)
    model.share_memory()
    assert model.norm.weight.dtype is torch.float32


@pytest.mark.parametrize("flag", ["swap_module_params_on_conversion", "overwrite_module_params_on_conversion"])
def test_moving_while_parameters_are_replaced_is_refused(flag: str) -> None:
    model, _ = start("O5")
    weight = model.first.weight
    getattr(torch.__future__, f"set_{flag}")(True)
    try:
        with pytest.raises(RuntimeError, match=f"set_{flag}.*set it to False"):
            model.to("cpu")
    finally:
        getattr(torch.__future__, f"set_{flag}")(False)
    assert model.first.weight is weight
