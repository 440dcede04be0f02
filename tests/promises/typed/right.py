"""Uses that a type checker accepts, and the types that come out of them."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import mpinit
from mpinit import amp


class Net(nn.Module):
    pass


def one_of_each(model: Net, optimizer: Adam, loss: torch.Tensor) -> None:
    assert_type(mpinit.initialize(model, optimizer, opt_level="O2"), tuple[Net, Adam])
    assert_type(amp.initialize(model, optimizer, "O5", master_weights="split"), tuple[Net, Adam])
    assert_type(mpinit.initialize(model, opt_level="O3", await_optimizers=True), Net)
    assert_type(mpinit.initialize(model, None, "O3", enabled=False), Net)
    assert_type(mpinit.add_optimizers(optimizer), Adam)
    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    with mpinit.scale_loss(loss, [optimizer], loss_id=1, delay_unscale=True) as scaled_loss:
        torch.autograd.backward(scaled_loss)
    assert_type(mpinit.loss_scale(optimizer), float)
    assert_type(mpinit.step_counts(optimizer), tuple[int, int])
    mpinit.undo(model)
    mpinit.undo([model, optimizer])


def several(models: list[Net], optimizers: tuple[Adam, SGD], one: Optimizer) -> None:
    assert_type(mpinit.initialize(models, optimizers), tuple[list[Net], tuple[Adam, SGD]])
    assert_type(mpinit.initialize((models[0], models[1]), one), tuple[tuple[Net, Net], Optimizer])
    assert_type(mpinit.initialize(models), list[Net])
    assert_type(mpinit.add_optimizers([one]), list[Optimizer])


def every_kind_of_value(model: Net, optimizer: Adam, arguments: Namespace, rest: dict[str, Any]) -> None:
    mpinit.initialize(model, optimizer, arguments.level, loss_scale=arguments.loss_scale)
    mpinit.initialize(model, optimizer, **rest)
    mpinit.initialize(model, optimizer, "O2", cast_model_type="bf16", keep_batchnorm_fp32=False, loss_scale=128.0)
    mpinit.initialize(model, optimizer, "O2", cast_model_type=torch.bfloat16, loss_scale="dynamic", num_losses=2)
    mpinit.initialize(model, optimizer, "O1", patch_torch_functions="model", config=Path("o1.toml"))
    mpinit.initialize(model, optimizer, "O5", optimizer_state="int8", config={"num_losses": 2})
    mpinit.initialize(
        model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=2**10, min=1), compute_fp32="head"
    )
    mpinit.initialize(models=model, optimizers=optimizer, compute_fp32="head", grad_dtype=torch.float32)
    mpinit.initialize(model, optimizer, "O2", keep_fp32=[nn.LayerNorm, "head", lambda name, module: "norm" in name])
    mpinit.initialize(model, optimizer, "O2", keep_inputs="targets", entry_points=["features"], max_loss_scale=8)
    mpinit.GradScaler(optimizer, loss_id=0, enabled=True)


class Arguments(Namespace):
    opt_level: str
    loss_scale: str | None
    keep_batchnorm_fp32: str | None


def strings_of_a_command_line(model: Net, optimizer: Adam, parser: ArgumentParser) -> None:
    arguments = parser.parse_args(namespace=Arguments())
    mpinit.initialize(
        model,
        optimizer,
        opt_level=arguments.opt_level,
        loss_scale=arguments.loss_scale,
        keep_batchnorm_fp32=arguments.keep_batchnorm_fp32,
    )
    mpinit.initialize(model, optimizer, "O2", loss_scale="128.0", keep_batchnorm_fp32="True")
    mpinit.initialize(model, optimizer, "O2", loss_scale="dynamic", cast_model_type="bf16")
