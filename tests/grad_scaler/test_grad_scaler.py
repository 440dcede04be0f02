"""mpinit.GradScaler, and torch's own on float32 masters: torch's recipes with another constructor."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loops import backward, batches, close, gradients, mlp, momentum, mse, plain_sgd, poison, same
from session_device import device
from torch import nn
from torch.optim import AdamW

import mpinit

pytestmark = pytest.mark.device

BF16 = torch.bfloat16
DYNAMIC: dict[str, Any] = {"loss_scale": mpinit.DynamicLossScale(init=1024.0, growth_interval=3)}
SMALL: dict[str, Any] = {"loss_scale": mpinit.DynamicLossScale(init=8.0, growth_interval=3)}
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2-bfloat16": {"opt_level": "O2", "cast_model_type": BF16},
    "O2-split": {"opt_level": "O2", "cast_model_type": BF16, "master_weights": "split"},
    "O2-model": {"opt_level": "O2", "master_weights": "model"},
    "O3": {"opt_level": "O3", "cast_model_type": BF16},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


def clipping(models: Sequence[Any], optimizers: Sequence[Any], scaler: Any) -> None:
    for batch in batches(5):
        optimizers[0].zero_grad()
        scaler.scale(mse(models[0], batch)).backward()
        scaler.unscale_(optimizers[0])
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), max_norm=0.1)
        scaler.step(optimizers[0])
        scaler.update()


def accumulation(models: Sequence[Any], optimizers: Sequence[Any], scaler: Any) -> None:
    """Divided before scaling or after it; cleared to None or to 0."""
    for index, batch in enumerate(batches(8)):
        loss = mse(models[0], batch)
        (scaler.scale(loss / 4) if index < 4 else scaler.scale(loss) / 4).backward()
        if index % 4 == 3:
            scaler.step(optimizers[0])
            scaler.update()
            models[0].zero_grad(set_to_none=index > 4)


def penalty(models: Sequence[Any], optimizers: Sequence[Any], scaler: Any) -> None:
    for batch in batches(4):
        optimizers[0].zero_grad()
        loss = mse(models[0], batch)
        scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=models[0].parameters(), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        norm = sum(((g.float() * inverse).pow(2).sum() for g in scaled), torch.zeros(())).sqrt()
        scaler.scale(loss + 0.1 * norm).backward()
        scaler.step(optimizers[0])
        scaler.update()


def several(models: Sequence[Any], optimizers: Sequence[Any], scaler: Any) -> None:
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


def adversaries(models: Sequence[Any], optimizers: Sequence[Any], scaler: Any) -> None:
    """GAN style: one steps, then a loss that reaches its weights too; ``model.zero_grad()`` clears."""
    for x, y in batches(4):
        models[0].zero_grad()
        scaler.scale(nn.functional.mse_loss(models[0](x), y)).backward()
        scaler.step(optimizers[0])
        models[1].zero_grad()
        first, (second,) = scaler.scale((mse(models[1], (x, y)), [nn.functional.mse_loss(models[0](x), y)]))
        torch.autograd.backward([first, second])
        scaler.step(optimizers[1])
        scaler.update()


def skipping(models: Sequence[Any], optimizers: Sequence[Any], scaler: Any) -> None:
    """An overflow in one of two optimizers."""
    for index, (x, y) in enumerate(batches(6)):
        loss = mse(models[0], (x, y)) + mse(models[1], (x, y))
        scaler.scale(poison(loss, next(models[0].parameters())) if index == 2 else loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


Recipe = Callable[[Sequence[Any], Sequence[Any], Any], None]
RECIPES: list[Recipe] = [clipping, accumulation, penalty, several, adversaries, skipping]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)


def trained(recipe: Recipe, scaler_of: Any, make: Any = momentum, **given: Any) -> tuple[list[torch.Tensor], Any]:
    """The float32 weights that a recipe ends with, and the scaler's state."""
    models = [mlp(0), mlp(1)]
    optimizers = [make(model.parameters()) for model in models]
    if given:
        mpinit.initialize(models, optimizers, **DYNAMIC | given)
    scaler = scaler_of(optimizers)
    recipe(models, optimizers, scaler)
    state = scaler.state_dict()
    weights = [value.detach().clone() for model in models for value in model.state_dict().values()]
    if given:
        mpinit.undo(models)
    return weights, state


def torchs_own(_: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device().type, init_scale=1024.0, growth_interval=3)


@each_setting
@each_recipe
def test_recipes_end_near_float32_and_at_o0_on_its_bits(recipe: Recipe, setting: str) -> None:
    theirs, their_state = trained(recipe, torchs_own)
    ours, state = trained(recipe, mpinit.GradScaler, **SETTINGS[setting])
    assert state == their_state
    if setting == "O0":
        same(ours, theirs)
    close(ours, theirs, 0.01 if setting in ("O0", "O1", "O2") else 0.05)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name.startswith("O2")])
@each_recipe
def test_torchs_own_grad_scaler_has_the_same_bits(recipe: Recipe, setting: str, fused: bool) -> None:
    def make(parameters: Any) -> AdamW:
        return AdamW(parameters, lr=0.01, fused=fused)

    # torch's refuses float16 gradients, and unscales bfloat16 ones in bfloat16.
    given = SETTINGS[setting] | ({} if setting == "O2-model" else {"grad_dtype": torch.float32})
    theirs, their_state = trained(recipe, torchs_own, make, **given | {"loss_scale": 1.0})
    ours, state = trained(recipe, mpinit.GradScaler, make, **given)
    same(theirs, ours)
    assert their_state == state


def begin(setting: str = "O2", make: Any = plain_sgd, **more: Any) -> tuple[Any, Any, Any]:
    model = mlp()
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, **SMALL | SETTINGS[setting] | more)
    return model, optimizer, mpinit.GradScaler(optimizer)


def gradients_of(setting: str) -> list[torch.Tensor | None]:
    """The unscaled gradients of the first batch, through scale_loss."""
    model, optimizer, _ = begin(setting)
    backward(mse(model, batches(1)[0]), optimizer)
    return gradients(optimizer)


@each_setting
def test_gradients_are_scale_losss_and_scaled_until_unscaled(setting: str) -> None:
    expected = [g.float() for g in gradients_of(setting) if g is not None]
    model, optimizer, scaler = begin(setting)
    for times in (1, 2):
        scaler.scale(mse(model, batches(1)[0])).backward()
        same([p.grad.float() for p in model.parameters()], [g * 8 * times for g in expected])
    scaler.unscale_(optimizer)
    same([p.grad.float() for p in model.parameters()], [g * 2 for g in expected])


@each_setting
def test_calls_out_of_order(setting: str) -> None:
    model, optimizer, scaler = begin(setting)
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3.0)
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
            call()
    scaler.scale(mse(model, batches(1)[0]))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.update(8.0)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: None)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)


def test_setters_and_states_are_torchs() -> None:
    model, optimizer, scaler = begin()
    theirs = torch.amp.GradScaler(device().type, init_scale=8.0, growth_interval=3)
    assert scaler.state_dict() == theirs.state_dict()
    for each in (scaler, theirs):
        each.set_growth_factor(3.0)
        each.set_backoff_factor(0.25)
        each.set_growth_interval(5)
    assert scaler.state_dict() == theirs.state_dict()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 5)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == scaler.state_dict()
    saved = torch.amp.GradScaler(device().type, init_scale=2.0, growth_factor=4.0, growth_interval=7).state_dict()
    scaler.load_state_dict(saved)
    with pytest.raises(ValueError):
        scaler.load_state_dict(saved | {"scale": -1.0})
    for wrong_scale in (0.0, float("nan"), "x"):
        with pytest.raises(ValueError):
            scaler.update(wrong_scale)
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == saved
    scaler.update(torch.tensor([32.0]))
    assert scaler.get_scale() == 32.0 == mpinit.loss_scale(optimizer)


def test_scalers_of_two_losses() -> None:
    model, optimizer, first = begin(num_losses=2)
    second = mpinit.GradScaler(model, loss_id=1)
    second.scale(torch.ones(()))
    second.update(32.0)
    assert (first.get_scale(), second.get_scale()) == (8.0, 32.0)
    first.scale(mse(model, batches(1)[0])).backward()
    first.step(optimizer)
    with pytest.raises(ValueError, match="loss_id=2"):
        mpinit.GradScaler(optimizer, loss_id=2)


@pytest.mark.parametrize(
    ("given", "keywords", "said"),
    [
        (("cuda",), {}, r"mpinit.GradScaler\(optimizer\).*loss_scale='dynamic'"),
        ((), {"init_scale": 1024.0, "device": "cuda"}, r"loss_scale=mpinit.DynamicLossScale\(init=1024.0\)"),
        ((), {"growth_interval": 100}, r"loss_scale=mpinit.DynamicLossScale\(growth_interval=100\)"),
        ((), {}, r"belongs to an initialised optimizer"),
        ((), {"scale": 2.0}, "has no argument 'scale'; it has owners, loss_id and enabled"),
    ],
)
def test_torchs_constructor_arguments_are_answered(given: tuple[Any, ...], keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        mpinit.GradScaler(*given, **keywords)


def test_optimizers_of_no_session_or_another() -> None:
    _, optimizer, scaler = begin()
    model = mlp()
    other = plain_sgd(model.parameters())
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.GradScaler(other)
    with pytest.raises(ValueError, match="needs an initialised optimizer"):
        mpinit.GradScaler([])
    scaler.scale(torch.ones(()))
    mpinit.initialize(model, other, "O2")
    with pytest.raises(TypeError, match="is no optimizer of session"):
        scaler.step(other)
    with pytest.raises(ValueError, match="at once"):
        mpinit.GradScaler([optimizer, other])


@pytest.mark.parametrize("how", ["initialize", "enabled"])
def test_disabled(how: str) -> None:
    model = mlp()
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, "O5", enabled=how == "enabled")
    scaler = mpinit.GradScaler(optimizer, enabled=how != "enabled")
    loss = mse(model, batches(1)[0])
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})


def test_a_scaler_belongs_to_its_session() -> None:
    model, optimizer, scaler = begin()
    assert isinstance(scaler, torch.amp.GradScaler)
    scaler.scale(mse(model, batches(1)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    mpinit.undo(model)
    with pytest.raises(RuntimeError, match="was undone: make another"):
        scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match=r"save scaler\.state_dict"):
        pickle.dumps(scaler)
    with pytest.raises(TypeError, match=r"save scaler\.state_dict"):
        copy.deepcopy(scaler)


@pytest.mark.parametrize("setting", ["O1", "O2", "O2-split"])
def test_one_step_is_scaled_in_one_way(setting: str) -> None:
    """Refuse ``scale_loss`` while gradients of a GradScaler's loss are there, and the reverse."""
    model, optimizer, scaler = begin(setting)
    loss = mse(model, batches(1)[0])
    scaler.scale(loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"scaled by mpinit.GradScaler, and mpinit.scale_loss would"):
        backward(loss, optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(mse(model, batches(1)[0]), optimizer)
    with pytest.raises(RuntimeError, match=r"scaled by mpinit.scale_loss, and mpinit.GradScaler would"):
        scaler.scale(loss)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (2, 0)


@pytest.mark.parametrize("setting", ["O1", "O2"])
def test_step_that_torchs_scaler_skips_in_a_kernel_is_counted(setting: str) -> None:
    """Overflow in the second of three steps: the scheduler omits it."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    mpinit.initialize(model, optimizer, opt_level=setting, loss_scale=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    scaler = torch.amp.GradScaler(device().type, init_scale=64.0)
    for index, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        scaler.scale(mse(model, batch).float() * (float("inf") if index == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        mpinit.scheduler_step(scheduler)
    assert mpinit.step_counts(optimizer) == (2, 1)
    torch.testing.assert_close(scheduler.get_last_lr(), [1e-4])


@pytest.mark.parametrize("setting", ["O1", "O2"])
def test_optimizer_added_in_a_loop_finds_unscaled_gradients(setting: str) -> None:
    """Add the second optimizer after an iteration whose loss has reached its parameters."""
    runs = []
    for level in (setting, "O0"):
        model = mlp()
        first, second = plain_sgd(model[3].parameters()), plain_sgd(model[0].parameters())
        scale = {} if level == "O0" else {"loss_scale": mpinit.DynamicLossScale(init=256.0)}
        mpinit.initialize(model, first, opt_level=level, await_optimizers=True, **scale)
        scaler = mpinit.GradScaler(first)
        for index, batch in enumerate(batches(3)):
            first.zero_grad()
            if index == 1:
                mpinit.add_optimizers(second)
            scaler.scale(mse(model, batch)).backward()
            scaler.step(first)
            if index:
                scaler.step(second)
                second.zero_grad()
            scaler.update()
        runs.append([value.clone() for value in model.state_dict().values()])
        mpinit.undo(model)
    torch.testing.assert_close(*runs, rtol=0.02, atol=2e-3)
