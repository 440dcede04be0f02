"""torch's recipe page "Automatic Mixed Precision examples", run by swapping GradScaler's constructor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loops import HALVES, batches, close, mlp, mse, poison, same
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.optim import SGD

import mpinit

DYNAMIC: dict[str, Any] = {"loss_scale": "dynamic", "init_loss_scale": 1024.0, "growth_interval": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O0-dynamic": {"opt_level": "O0"} | DYNAMIC,
    "O1": {"opt_level": "O1"} | DYNAMIC,
    "O2": {"opt_level": "O2"} | DYNAMIC,
    "O2-static": {"opt_level": "O2", "loss_scale": 128.0},
    "O2-bfloat16": {"opt_level": "O2", "cast_model_type": HALVES[1]} | DYNAMIC,
    "O2-split": {"opt_level": "O2", "cast_model_type": HALVES[1], "master_weights": "split"} | DYNAMIC,
    "O3": {"opt_level": "O3", "cast_model_type": HALVES[1]},
    "O3-dynamic": {"opt_level": "O3", "cast_model_type": HALVES[1]} | DYNAMIC,
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5-split": {"opt_level": "O5", "master_weights": "split"},
}
Models = Sequence[Any]
Recipe = Callable[[Models, Sequence[Any], Any], None]


def usual(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    model, optimizer = models[0], optimizers[0]
    for batch in batches(5):
        optimizer.zero_grad()
        scaler.scale(mse(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


def clipping(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    model, optimizer = models[0], optimizers[0]
    for batch in batches(5):
        optimizer.zero_grad()
        scaler.scale(mse(model, batch)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()


def accumulation(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    model, optimizer = models[0], optimizers[0]
    for index, batch in enumerate(batches(8)):
        loss = mse(model, batch) / 4
        scaler.scale(loss).backward()
        if (index + 1) % 4 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()


def divided_after_scaling(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    model, optimizer = models[0], optimizers[0]
    for index, batch in enumerate(batches(8)):
        (scaler.scale(mse(model, batch)) / 4).backward()
        if (index + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)


def penalty(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    model, optimizer = models[0], optimizers[0]
    for batch in batches(4):
        optimizer.zero_grad()
        loss = mse(model, batch)
        scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=model.parameters(), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        norm = sum(((g.float() * inverse).pow(2).sum() for g in scaled), torch.zeros(())).sqrt()
        scaler.scale(loss + 0.1 * norm).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()


def several(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    """Two models, two losses that reach both, two optimizers, of which one unscales by hand."""
    for x, y in batches(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(x) for model in models]
        scaler.scale(nn.functional.mse_loss(outputs[0] + outputs[1], y)).backward(retain_graph=True)
        scaler.scale(nn.functional.mse_loss(outputs[0] - outputs[1], y)).backward()
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()


def adversaries(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    """GAN style: one steps, then a loss that reaches its weights too; ``model.zero_grad()`` clears."""
    for x, y in batches(4):
        models[0].zero_grad()
        scaler.scale(nn.functional.mse_loss(models[0](x), y)).backward()
        scaler.step(optimizers[0])
        models[1].zero_grad()
        scaler.scale(nn.functional.mse_loss(models[0](x) + models[1](x), y)).backward()
        scaler.step(optimizers[1])
        scaler.update()


def one_pass(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    """Several scaled tensors in one backward pass, nested as scale() takes them."""
    for x, y in batches(3):
        losses = [nn.functional.mse_loss(model(x), y) for model in models]
        first, (second,) = scaler.scale((losses[0], [losses[1]]))
        torch.autograd.backward([first, second])
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def without_clearing(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    """Gradients that were stepped stay, and the next backward pass adds to them."""
    model, optimizer = models[0], optimizers[0]
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    usual(models, optimizers, scaler)


def skipped(models: Models, optimizers: Sequence[Any], scaler: Any) -> None:
    model, optimizer = models[0], optimizers[0]
    for index, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        loss = mse(model, batch)
        if index == 2 and scaler.get_scale() != 1.0:
            loss = poison(loss, next(model.parameters()))
        elif index == 2:
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Product(torch.autograd.Function):
    """The recipe page's MyMM."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad.mm(b.t()), a.t().mm(grad)


class Float32Product(torch.autograd.Function):
    """The recipe page's MyFloat32Func."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.types = a.dtype, b.dtype
        return a.float().mm(b.float())

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        first, second = ctx.types
        return grad.mm(b.float().t()).to(first), a.float().t().mm(grad).to(second)


class Custom(nn.Module):
    """A model of custom autograd functions."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Parameter(torch.randn(6, 8) / 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function.apply(x, self.first).to(self.last.weight.dtype))


ONE: list[Recipe] = [usual, clipping, accumulation, divided_after_scaling, penalty, without_clearing, skipped]
TWO: list[Recipe] = [several, adversaries, one_pass]


def begin(two: bool, make: Any = None) -> tuple[list[Any], list[Any]]:
    models = [make() if make else mlp(seed) for seed in range(2 if two else 1)]
    return models, [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def run_by_torch(recipe: Recipe, two: bool, make: Any = None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    models, optimizers = begin(two, make)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    recipe(models, optimizers, scaler)
    return [p.detach() for model in models for p in model.parameters()], scaler.state_dict()


def run_by_mpinit(recipe: Recipe, two: bool, setting: str, make: Any = None) -> tuple[list[torch.Tensor], Any]:
    models, optimizers = begin(two, make)
    mpinit.initialize(models, optimizers, **SETTINGS[setting], verbosity=0)
    scaler = mpinit.GradScaler(optimizers)
    recipe(models, optimizers, scaler)
    state = scaler.state_dict()
    weights = copy.deepcopy([value for model in models for value in model.state_dict().values()])
    mpinit.undo(models)
    return weights, state


@pytest.mark.parametrize("recipe", [*ONE, *TWO], ids=lambda recipe: recipe.__name__)
def test_the_same_bits_and_scales_as_torchs_own_in_float32(recipe: Recipe) -> None:
    theirs, their_state = run_by_torch(recipe, recipe in TWO)
    ours, state = run_by_mpinit(recipe, recipe in TWO, "O0-dynamic")
    same(ours, theirs)
    assert state == their_state


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("recipe", [*ONE, *TWO], ids=lambda recipe: recipe.__name__)
def test_every_level_ends_near_float32(recipe: Recipe, setting: str) -> None:
    if recipe is skipped and setting == "O2-static":
        pytest.skip("a static scale does not look for overflows")
    theirs, their_state = run_by_torch(recipe, recipe in TWO)
    ours, state = run_by_mpinit(recipe, recipe in TWO, setting)
    tolerance = 0.05 if setting.startswith(("O3", "O4", "O5", "O2-b", "O2-s")) else 0.01
    close(ours, theirs, tolerance)
    if "loss_scale" in SETTINGS[setting] and setting != "O2-static":
        assert state == their_state
    else:
        assert (state["scale"], state["_growth_tracker"]) == ({"O2-static": 128.0}.get(setting, 1.0), 0)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("function", [Product, Float32Product])
def test_custom_autograd_functions(function: Any, setting: str) -> None:
    def make() -> nn.Module:
        return Custom(function)

    theirs, _ = run_by_torch(clipping, False, make)
    ours, _ = run_by_mpinit(clipping, False, setting, make)
    close(ours, theirs, 0.03)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("recipe", ["usual", "accumulation", "skipped"])
def test_the_same_bits_as_through_scale_loss(recipe: str, setting: str) -> None:
    """Powers of two scale without a rounding: sums of scaled gradients are scaled sums."""
    if recipe == "skipped" and setting == "O2-static":
        pytest.skip("a static scale does not look for overflows")
    if recipe == "accumulation" and ("split" in setting or setting.startswith("O3")):
        pytest.skip("16-bit gradients of several passes are added up by autograd here")
    ours, _ = run_by_mpinit(globals()[recipe], False, setting)
    models, optimizers = begin(False)
    mpinit.initialize(models, optimizers, **SETTINGS[setting], verbosity=0)
    globals()[recipe](models, optimizers, ByScaleLoss(models[0], optimizers[0]))
    same(ours, models[0].state_dict().values())


class ByScaleLoss:
    """What the recipes ask of a scaler, done by scale_loss."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.optimizer = optimizer

    def get_scale(self) -> float:
        return mpinit.loss_scale(self.optimizer)

    def scale(self, loss: torch.Tensor) -> Any:
        owner = self

        class Scaled:
            def backward(self) -> None:
                with mpinit.scale_loss(loss, owner.optimizer, delay_unscale=True) as scaled_loss:
                    scaled_loss.backward()

        return Scaled()

    def unscale_(self, optimizer: Any) -> None:
        pass

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def update(self) -> None:
        pass
