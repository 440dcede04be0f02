"""Lightning: the plug in a Trainer, and in Fabric.

Below the public face: the registry shows which session a framework has made.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from frameworks import ALL, LEVELS, same_bits
from lightning import Trainer
from lightning.fabric import Fabric
from lightning_runs import LARGE, MARKS, Module, clip_norm, fit, loader, trainer
from loops import Batch, backward, batches, mlp
from models import sgd
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import mpinit
from mpinit import registry
from mpinit.integrations.lightning import MixedPrecision, skip_scheduler_with_step

pytestmark = MARKS


def by_hand(
    module: Module, precision: dict[str, Any], data: list[Batch], clip: Callable[[Any], Any], every: int = 1
) -> tuple[float, tuple[int, int]]:
    optimizer = module.make(module.parameters(), **module.settings)
    mpinit.initialize(module, optimizer, **precision)
    scheduler = ExponentialLR(optimizer, 0.9)
    for number, (x, y) in enumerate(data, start=1):
        if number % every == 1 % every:
            optimizer.zero_grad()
        loss = mse_loss(module(x), y)
        module.seen.append(loss.item())
        backward(loss / every, optimizer)
        if number % every == 0:
            clip(optimizer)
            optimizer.step()
            mpinit.scheduler_step(scheduler)
    counts = mpinit.step_counts(optimizer)
    mpinit.undo(module)
    return scheduler.get_last_lr()[0], counts


def clip_as_fabric(optimizer: Any) -> None:
    """Clip as Fabric does, which asks no plugin: the norm of 16-bit gradients is 16-bit at O3."""
    nn.utils.clip_grad_norm_(mpinit.master_params(optimizer), 0.5)


def clip_value(optimizer: Any) -> None:
    nn.utils.clip_grad_value_(mpinit.master_params(optimizer), 0.02)


@pytest.mark.parametrize("clip", [clip_norm, clip_value])
def test_a_run_has_the_bits_of_a_loop_by_hand(level: dict[str, Any], clip: Callable[[Any], Any]) -> None:
    data, settings = batches(8), {"eps": 1e-3} if level["opt_level"] == "O3" else {}  # 1e-8 is 0 in float16
    ours, other = Module(**settings), Module(**settings)
    limit, algorithm = (0.5, "norm") if clip is clip_norm else (0.02, "value")
    clipping = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    run = fit(ours, level, data, accumulate_grad_batches=2, **clipping)
    rate, _ = by_hand(other, level, data, clip, every=2)
    assert ours.seen == other.seen
    assert same_bits(ours.state_dict(), other.state_dict())
    assert run.lr_scheduler_configs[0].scheduler.get_last_lr() == [rate]
    assert not registry.live() and {p.dtype for p in ours.parameters()} == {torch.float32}


def test_schedulers_pass_over_skipped_steps() -> None:
    data, precision = batches(12), {**LARGE}
    ours, other = Module(), Module()
    run = fit(ours, precision, data)
    rate, (good, skipped) = by_hand(other, precision, data, lambda optimizer: None)
    assert skipped > 2 and good > 2
    scheduler = run.lr_scheduler_configs[0].scheduler
    assert scheduler.get_last_lr() == [rate] and scheduler.last_epoch == good
    assert same_bits(ours.state_dict(), other.state_dict())
    assert type(scheduler) is ExponentialLR and "step" not in scheduler.state_dict()


class Epochs(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


def test_schedulers_of_epochs_do_not_ask_for_the_last_step() -> None:
    run = fit(
        Epochs(), {**LARGE, "loss_scale": mpinit.DynamicLossScale(init=2.0**40, max=2.0**40)}, batches(1), max_epochs=2
    )
    assert run.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.025]


class Pair(lightning.LightningModule):
    """Two optimizers stepped by hand, the second on two batches at once; losses of both reach both nets."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = mlp(0), nn.Linear(3, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.maker.parameters(), lr=1e-2), torch.optim.SGD(self.judge.parameters(), lr=0.1)

    def training_step(self, batch: Batch, number: int) -> None:
        self.turn(batch, number, *self.optimizers(), self.manual_backward)

    def turn(self, batch: Batch, number: int, first: Any, second: Any, backward: Callable[[Any], None]) -> None:
        made = self.maker(batch[0])
        first.zero_grad()
        backward(self.judge(made).square().mean() + mse_loss(made, batch[1]))
        first.step()
        if number % 2 == 0:
            second.zero_grad()
        backward((self.judge(batch[1]) - self.judge(made.detach())).mean() + self.judge(batch[1]).square().mean())
        if number % 2:
            second.step()


@pytest.mark.parametrize("name", [*(name for name in LEVELS if name != "O3"), "overflowing"])  # Adam in float16
def test_manual_optimisation_has_the_bits_of_a_loop_by_hand(name: str) -> None:
    precision = {"verbosity": 0, **(LARGE if name == "overflowing" else LEVELS[name])}
    ours, other, data = Pair(), Pair(), batches(16)
    run = fit(ours, precision, data)
    optimizers = list(other.configure_optimizers())
    mpinit.initialize(other, optimizers, **precision)
    for number, batch in enumerate(data):
        other.turn(batch, number, *optimizers, lambda loss: backward(loss, optimizers))
    if name == "overflowing":
        assert all(min(mpinit.step_counts(optimizer)) > 1 for optimizer in optimizers), "it goes on after an overflow"
        assert mpinit.state_dict(optimizers[0]) == run.precision_plugin.state_dict()
    mpinit.undo(other)
    assert same_bits(ours.state_dict(), other.state_dict())


class Functional(Module):
    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        made = self.net(batch[0]) @ torch.eye(3)
        self.seen.append(made.dtype)
        return mse_loss(made, batch[1])


@pytest.mark.parametrize(("name", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16), ("O5", torch.float32)])
def test_functions_cast_in_the_whole_training_step(name: str, dtype: torch.dtype) -> None:
    module = Functional()
    fit(module, {"opt_level": name}, batches(1))
    assert module.seen == [dtype]


class FullBatch(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("name", ["O1", "O2", "O5"])
def test_an_optimizer_that_evaluates_the_loss(name: str) -> None:
    ours, other, data = FullBatch(), FullBatch(), batches(3)
    scale = {} if name == "O5" else {"loss_scale": 128.0}  # closures need a fixed scale
    fit(ours, {"opt_level": name, **scale}, data)
    optimizer = other.configure_optimizers()
    mpinit.initialize(other, optimizer, name, **scale)
    for x, y in data:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(other(x), y)
            backward(loss, optimizer)
            return loss

        optimizer.step(closure)
    mpinit.undo(other)
    assert same_bits(ours.state_dict(), other.state_dict())


def moments(run: Trainer) -> list[Any]:
    return [optimizer.state_dict()["state"] for optimizer in run.optimizers]


@pytest.mark.parametrize("name", [*ALL, "overflowing"])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    data, precision = batches(5), {"verbosity": 0, **(LARGE if name == "overflowing" else ALL[name])}
    whole, half, rest = Module(), Module(), Module()
    there = fit(whole, precision, data, max_epochs=3)
    fit(half, precision, data, max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(rest, precision, data, ckpt=tmp_path / "half.ckpt", max_epochs=3)
    assert half.seen + rest.seen == whole.seen
    assert same_bits(rest.state_dict(), whole.state_dict())
    assert resumed.precision_plugin.state_dict() == there.precision_plugin.state_dict()
    for one, other in zip(moments(resumed), moments(there), strict=True):
        assert all(same_bits(one[index], other[index]) for index in other) and one.keys() == other.keys()


class Saving(Module):
    path: Path

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def test_checkpoint_made_in_the_run_is_the_one_made_after_it(tmp_path: Path) -> None:
    module = Saving()
    module.path = tmp_path / "during.ckpt"
    run = fit(module, {"opt_level": "O2"}, batches(3))
    run.save_checkpoint(tmp_path / "after.ckpt")
    during, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("during", "after"))
    assert same_bits(during["state_dict"], after["state_dict"])
    assert {value.dtype for value in during["state_dict"].values()} == {torch.float32, torch.int64}
    assert during["MixedPrecision"] == after["MixedPrecision"] == run.precision_plugin.state_dict() != {}
    assert same_bits(Module.load_from_checkpoint(module.path).state_dict(), module.state_dict())


def test_another_fit_goes_on_with_the_scale() -> None:
    module = Module()
    run = trainer(LARGE)
    run.fit(module, loader(batches(12)))
    scale = run.precision_plugin.state_dict()["loss_scaler0"]["loss_scale"]
    assert scale < LARGE["loss_scale"].init
    run.fit_loop.max_epochs = 2
    run.precision_plugin.convert_module(module)
    assert mpinit.loss_scale(module) == scale
    run.precision_plugin.teardown()
    assert not registry.live()


def test_checkpoint_of_lightnings_scaler_loads(tmp_path: Path) -> None:
    plugin = MixedPrecision("O2")
    plugin.convert_module(module := Module())
    plugin.load_state_dict(torch.amp.GradScaler("cpu", init_scale=256.0).state_dict() | {"scale": 256.0})
    assert mpinit.loss_scale(module) == 256.0


def test_evaluation_computes_in_the_level_and_changes_nothing() -> None:
    module, x = Module(), batches(1)[0][0]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    outputs = trainer({"opt_level": "O5"}).predict(module, loader([x]))
    assert same_bits(module.state_dict(), before) and not registry.live()
    mpinit.initialize(module.eval(), opt_level="O5")
    assert torch.equal(outputs[0], module(x)) and outputs[0].dtype is torch.float32


class Failing(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError


def test_a_run_that_fails_leaves_float32_weights() -> None:
    module = Failing()
    with pytest.raises(ZeroDivisionError):
        fit(module, {"opt_level": "O2"}, batches(1))
    assert not registry.live() and {p.dtype for p in module.parameters()} == {torch.float32}


def test_disabled_it_is_lightnings_own_float32() -> None:
    ours, other, data = Module(), Module(), batches(3)
    fit(ours, {"opt_level": "O2", "enabled": False}, data)
    run = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False)
    run.fit(other, loader(data))
    assert same_bits(ours.state_dict(), other.state_dict())


class ByHand(lightning.Callback):
    """What the weights mean, after every step and before every epoch."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
        self.steps.append(values_of(module))

    def on_train_epoch_start(self, _: Any, module: Any) -> None:
        self.epochs.append(values_of(module))


def values_of(module: nn.Module) -> dict[str, Any]:
    state = module.state_dict()
    return {name: state[name].clone() for name, _ in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("over", ["steps", "epochs"])
def test_averages_are_of_float32_masters_in_lightning(over: str, level: str) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    module, by_hand = Module(), ByHand()
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    average = EMAWeightAveraging(decay=0.9, use_buffers=False) if over == "steps" else swa
    precision = {"opt_level": level}
    trainer(precision, max_epochs=3, callbacks=[by_hand, average]).fit(module, loader(batches(24)))
    # After three epochs Lightning puts the average in, and goes through a fourth for the statistics of BatchNorm.
    state = module.state_dict() if over == "steps" else by_hand.steps[3 * 24]
    for name, _ in module.named_parameters():
        if over == "steps":
            expected = by_hand.steps[0][name]
            for values in by_hand.steps[1:]:
                expected = expected.lerp(values[name], 0.1)
        else:
            expected = sum(values[name] for values in by_hand.epochs[:3]) / 3
        assert state[name].dtype is torch.float32
        assert torch.allclose(state[name], expected, atol=1e-6), name


def fabric_of(**precision: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision(**{"verbosity": 0} | precision)])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    model = mlp(batchnorm=True)
    model, optimizer = fabric.setup(model, adamw(model))
    mpinit.add_optimizers(optimizer)
    return model, optimizer


def loop(fabric: Any, model: Any, optimizer: Any, data: list[Batch]) -> None:
    for number, (x, y) in enumerate(data):
        if number % 2 == 0:
            optimizer.zero_grad()
        fabric.backward(mse_loss(model(x), y))
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()


def test_fabric_has_the_bits_of_a_loop_by_hand(level: dict[str, Any]) -> None:
    fabric = fabric_of(**level)
    model, optimizer = set_up(fabric)
    data = batches(8)
    loop(fabric, model, optimizer, data)
    other = mlp(batchnorm=True)
    bare = adamw(other)
    mpinit.initialize(other, bare, **level)
    calls = {"backward": lambda loss: backward(loss, bare), "clip_gradients": lambda *_, **__: clip_as_fabric(bare)}
    loop(SimpleNamespace(**calls), other, bare, data)
    assert same_bits(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("precision", [{"opt_level": "O5"}, LARGE], ids=["O5", "overflowing"])
def test_fabric_resumes_to_the_bit(precision: dict[str, Any], tmp_path: Path) -> None:
    def fresh() -> tuple[Fabric, dict[str, Any]]:
        fabric = fabric_of(**precision)
        model, optimizer = set_up(fabric)
        return fabric, {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}

    data = batches(24)
    (whole, state), (half, saved), (rest, resumed) = fresh(), fresh(), fresh()
    loop(whole, state["model"], state["optimizer"], data)
    loop(half, saved["model"], saved["optimizer"], data[:12])
    half.save(tmp_path / "half.ckpt", saved)
    rest.load(tmp_path / "half.ckpt", resumed)
    loop(rest, resumed["model"], resumed["optimizer"], data[12:])
    assert same_bits(resumed["model"].state_dict(), state["model"].state_dict())
    assert resumed["precision"].state_dict() == state["precision"].state_dict()


def test_wrong_arguments_of_the_plugin_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="did you mean 'O2'"):
        MixedPrecision("o2")
    with pytest.raises(ValueError, match=r"MixedPrecision\(\) has no keyword 'keep_fp23'; did you mean 'keep_fp32'"):
        MixedPrecision("O2", keep_fp23=["head"])


def test_fabric_refuses_an_optimizer_that_was_not_added() -> None:
    for name in ("O2", "O5"):
        fabric = fabric_of(opt_level=name)
        model = mlp()
        model, optimizer = fabric.setup(model, sgd(model))
        fabric.backward(model(torch.ones(4, 6)).sum())
        with pytest.raises(RuntimeError, match=r"mpinit\.add_optimizers"):
            optimizer.step()


def test_a_loss_of_two_sessions_is_refused_where_it_is_scaled() -> None:
    fabric = fabric_of(opt_level="O2")
    (first, one), (second, other) = set_up(fabric), set_up(fabric)
    with pytest.raises(ValueError, match="one initialize call"):
        fabric.backward(first(torch.ones(4, 6)).sum() + second(torch.ones(4, 6)).sum())
    del one, other  # until here: an optimizer that is dropped needs no loss scale


def test_several_sessions_work_without_scaling() -> None:
    fabric, plain = fabric_of(opt_level="O5"), [mlp(batchnorm=True), mlp(batchnorm=True)]
    (first, one), (second, other), x = set_up(fabric), set_up(fabric), batches(1)[0][0]
    bare = [adamw(model) for model in plain]
    mpinit.initialize(plain, bare, opt_level="O5")
    for _ in range(3):
        fabric.backward((first(x) * second(x)).mean())
        (plain[0](x) * plain[1](x)).mean().backward()
        for optimizer in (one, other, *bare):
            optimizer.step()
            optimizer.zero_grad()
    assert same_bits(first.state_dict(), plain[0].state_dict())
    assert same_bits(second.state_dict(), plain[1].state_dict())


def test_fabric_keeps_initialised_models() -> None:
    models = [mlp(0), mlp(1)]
    optimizers = [sgd(model) for model in models]
    mpinit.initialize(models, optimizers, opt_level="O2")
    fabric = fabric_of()
    (first, one), (second, other) = (fabric.setup(*both) for both in zip(models, optimizers, strict=True))
    before = [p.clone() for model in models for p in model.parameters()]
    fabric.backward(first(torch.ones(4, 6)).mean() + second(torch.ones(4, 6)).mean())
    one.step()
    other.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, (p for m in models for p in m.parameters()), strict=True))


@pytest.mark.parametrize("kind", [ExponentialLR, ReduceLROnPlateau])
def test_scheduler_skips_after_skipped_step_and_keeps_its_class(kind: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = ExponentialLR(optimizer, 0.5) if kind is ExponentialLR else ReduceLROnPlateau(optimizer, "min", 0.5, 0)
    arguments = () if kind is ExponentialLR else (torch.inf,)
    state, skipped = set(scheduler.state_dict()), [True]
    undo = skip_scheduler_with_step(scheduler, lambda _: skipped[0])
    assert isinstance(scheduler, kind) and set(scheduler.state_dict()) == state
    optimizer.step()
    scheduler.step(*arguments)
    assert optimizer.param_groups[0]["lr"] == 1.0
    skipped[0] = False
    scheduler.step(*arguments)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert isinstance(copy.deepcopy(scheduler), kind)
    skipped[0] = True
    undo()
    undo()
    assert type(scheduler) is kind
    scheduler.step(*arguments)
    assert optimizer.param_groups[0]["lr"] == 0.25
