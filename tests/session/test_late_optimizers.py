"""Optimizers that come after initialize: bit for bit what initialize(model, optimizer) would have made.

Below the public face: the registry shows which session an optimizer has joined.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import adam, backward, batches, close, keywords, masters, mlp, momentum, mse, poison, same, states, train
from session_device import device
from torch import nn
from torch.optim import Adam
from torch.optim.optimizer import _global_optimizer_pre_hooks

import mpinit
from mpinit import registry

pytestmark = pytest.mark.device

BF16 = torch.bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": keywords("O1"),
    "O2-float16": keywords("O2"),
    "O2-bfloat16": keywords("O2", BF16),
    "O2-split": keywords("O2", BF16) | {"master_weights": "split"},
    "O3": keywords("O3", BF16),
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5-split": {"opt_level": "O5", "master_weights": "split"},
}
with_masters = pytest.mark.parametrize("setting", ["O2-float16", "O2-split", "O5"])


def initialise(model: nn.Module, optimizers: Any, setting: str, **more: Any) -> None:
    mpinit.initialize(model, optimizers, **SETTINGS[setting] | {"verbosity": 0} | more)


def waiting(setting: str, model: nn.Module | None = None, **more: Any) -> Any:
    """A model that awaits its optimizers."""
    model = model or mlp()
    initialise(model, None, setting, await_optimizers=True, **more)
    return model


def add_for(layer: nn.Module) -> Any:
    return mpinit.add_optimizers(momentum(layer.parameters()))


each_setting = pytest.mark.parametrize("setting", SETTINGS)


def both(setting: str, awaits: bool = True) -> tuple[nn.Module, Any, nn.Module]:
    """A model with its optimizer from the start, and one that waits for it."""
    usual, late = mlp(batchnorm=True), mlp(batchnorm=True)
    optimizer = adam(usual.parameters())
    initialise(usual, optimizer, setting)
    initialise(late, None, setting, await_optimizers=awaits)
    return usual, optimizer, late


def assert_equal(usual: nn.Module, usual_optimizer: Any, late: nn.Module, late_optimizer: Any) -> None:
    """Train on, and compare everything, also after undoing."""
    data = batches(3)
    assert str(train(usual, usual_optimizer, data)) == str(train(late, late_optimizer, data))
    same(usual.parameters(), late.parameters())
    same(usual.state_dict().values(), late.state_dict().values())
    same(states(usual_optimizer), states(late_optimizer))
    if not any(group.get("params", [None])[0] is None for group in usual_optimizer.param_groups):
        same(masters(usual_optimizer), masters(late_optimizer))
    mpinit.undo([usual, late])
    same(usual.parameters(), late.parameters())
    same(states(usual_optimizer), states(late_optimizer))
    assert vars(late_optimizer).keys() == vars(usual_optimizer).keys()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_late_optimizer_trains_as_one_from_the_start(setting: str) -> None:
    usual, optimizer, late = both(setting, awaits=True)
    if setting != "O3":  # where nothing but a weight that no optimizer changes has float32 values
        same(usual.state_dict().values(), late.state_dict().values())
    late_optimizer = mpinit.add_optimizers(adam(late.parameters()))
    same(masters(optimizer), masters(late_optimizer))
    assert_equal(usual, optimizer, late, late_optimizer)


@pytest.mark.parametrize("setting", ["O2-float16", "O3", "O5-split"])
@pytest.mark.parametrize("write", ["in place", "data", "load_state_dict", "forward", "compiled"])
def test_model_before_add_optimizers(setting: str, write: str) -> None:
    usual, optimizer, late = both(setting)
    for model in (usual, late):
        change(model, write)
    assert_equal(usual, optimizer, late, mpinit.add_optimizers(adam(late.parameters())))


def change(model: nn.Module, how: str) -> None:
    if how == "in place":
        with torch.no_grad():
            model[0].weight[0] *= 1.5  # type: ignore[index, operator]
    elif how == "data":
        model[0].weight.data[1] += 0.25  # type: ignore[index, union-attr]
    elif how == "load_state_dict":
        model.load_state_dict(mlp(seed=5, batchnorm=True).state_dict())
    elif how == "forward":
        mse(model, batches(1)[0])
    else:
        torch.compile(model, backend="eager")
        model.to(device()).train()


@pytest.mark.parametrize("setting", ["O0", "O3", "O5", "O5-split"])
def test_gradient_before_add_optimizers_is_used(setting: str) -> None:
    usual, optimizer, late = both(setting)
    for model in (usual, late):
        mse(model, batches(1)[0]).backward()
    late_optimizer = mpinit.add_optimizers(adam(late.parameters()))
    for each in (optimizer, late_optimizer):
        each.step()
    assert_equal(usual, optimizer, late, late_optimizer)


@with_masters
def test_an_optimizer_that_has_stepped_brings_its_state(setting: str) -> None:
    usual, late = mlp(), mlp()
    optimizer, late_optimizer = adam(usual.parameters()), adam(late.parameters())
    for model, each in ((usual, optimizer), (late, late_optimizer)):
        mse(model, batches(1)[0]).backward()
        each.step()
        each.zero_grad()
    initialise(usual, optimizer, setting)
    waiting(setting, late)
    assert mpinit.add_optimizers([late_optimizer]) == [late_optimizer]
    assert_equal(usual, optimizer, late, late_optimizer)


@each_setting
def test_a_second_optimizer_comes_after_steps_of_the_first(setting: str) -> None:
    """GAN code builds its optimizers one after another."""
    runs = []
    for is_late in (False, True):
        one, two = mlp(1), mlp(2)
        first, second = momentum(one.parameters()), adam(two.parameters())
        initialise([one, two], first if is_late else [first, second], setting, await_optimizers=is_late)  # type: ignore[arg-type]
        train(one, first, batches(2))
        if is_late:
            mpinit.add_optimizers(second)
        for batch in batches(2, seed=4):
            backward(mse(one, batch) + mse(two, batch), [first, second])
            for each in (first, second):
                each.step()
                each.zero_grad()
        runs.append([*masters(first), *masters(second), *one.parameters(), *two.parameters()])
    same(*runs)


def test_values_beyond_float16_are_refused() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1e6, 1.0001]])
    with pytest.raises(ValueError, match="would be infinite in float16"):
        waiting("O2-float16", model)
    assert model.weight.tolist() == [[1e6, torch.tensor(1.0001).item()]] and registry.of(model) is None


@with_masters
def test_undo_before_add_optimizers_restores_every_bit(setting: str) -> None:
    model, plain = waiting(setting), mlp()
    mse(model, batches(1)[0]).backward()
    mpinit.undo(model)
    same(model.parameters(), plain.parameters())
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert not _global_optimizer_pre_hooks


class Interrupted(Adam):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "load_state_dict":
            raise KeyboardInterrupt


@pytest.mark.parametrize("setting", ["O2-split", "O3", "O4", "O5"])
def test_failing_add_optimizers_changes_nothing(setting: str) -> None:
    model, twin = waiting(setting), mlp()
    initialise(twin, adam(twin.parameters()), setting)
    first, second = adam(model[0].parameters()), Interrupted(model[-1].parameters(), lr=0.01)
    before = [dict(vars(each)) for each in (first, second)]
    groups = [list(each.param_groups[0]["params"]) for each in (first, second)]
    with pytest.raises(KeyboardInterrupt):
        mpinit.add_optimizers([first, second])
    second.__class__ = Adam
    assert [dict(vars(each)) for each in (first, second)] == before
    same([p for group in groups for p in group], model.parameters())
    for each, group in zip((first, second), groups, strict=True):
        assert list(map(id, each.param_groups[0]["params"])) == list(map(id, group))
    assert registry.of(first) is None
    if setting != "O3":
        same(model.state_dict().values(), twin.state_dict().values())
    mpinit.add_optimizers([first, second])
    train(model, first, batches(1))


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_of_an_earlier_loss_are_used(overflows: bool) -> None:
    model, plain = waiting("O2-float16"), mlp()
    first, reference = add_for(model[0]), momentum(plain[-1].parameters())
    loss = mse(model, batches(1)[0])
    backward(poison(loss, model[-1].weight) if overflows else loss, first)
    second = add_for(model[-1])
    second.step()
    if not overflows:
        mse(plain, batches(1)[0]).backward()
        reference.step()
    assert mpinit.step_was_skipped(second) == overflows
    close(model[-1].state_dict().values(), plain[-1].parameters())


@pytest.mark.parametrize("box", [lambda *xs: xs[0], lambda *xs: list(xs), lambda *xs: tuple(xs)])
def test_add_optimizers_returns_its_arguments(box: Callable[..., Any]) -> None:
    models = [mlp(), mlp()]
    mpinit.initialize(models, opt_level="O5", await_optimizers=True)
    given = box(*(momentum(model.parameters()) for model in models))
    assert mpinit.add_optimizers(given) is given


@with_masters
def test_a_step_of_an_optimizer_that_was_never_added(setting: str) -> None:
    model, other = waiting(setting), mlp(1)
    optimizer, strange = momentum(model.parameters()), momentum(other.parameters())
    for each in (model, other):
        mse(each, batches(1)[0]).backward()
    strange.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*call mpinit\.add_optimizers\(optimizer\) before"):
        optimizer.step()
    same(before.values(), model.state_dict().values())
    model.zero_grad()
    mpinit.add_optimizers(optimizer)
    train(model, optimizer, batches(1))


def test_an_optimizer_twice() -> None:
    model = waiting("O5")
    optimizer = momentum(model.parameters())
    with pytest.raises(ValueError, match="contains the same SGD twice"):
        mpinit.add_optimizers([optimizer, optimizer])
    mpinit.add_optimizers(optimizer)
    with pytest.raises(ValueError, match="SGD was initialised already"):
        mpinit.add_optimizers(optimizer)


def test_parameters_of_no_session_and_of_several() -> None:
    one, two, stranger = waiting("O5"), waiting("O2-float16"), mlp()
    with pytest.raises(RuntimeError, match="none of the parameters of this SGD belongs to an initialised model"):
        mpinit.add_optimizers(momentum(stranger.parameters()))
    with pytest.raises(RuntimeError, match="belong to several sessions"):
        mpinit.add_optimizers(momentum([*one.parameters(), *two.parameters()]))
    first, second = mpinit.add_optimizers([momentum(one.parameters()), momentum(two.parameters())])
    assert registry.of(first) is registry.of(one) and registry.of(second) is registry.of(two)
    with pytest.raises(TypeError, match="optimizers must be"):
        mpinit.add_optimizers(one)
    with pytest.raises(TypeError, match="await_optimizers must be True or False"):
        mpinit.initialize(stranger, await_optimizers="yes")  # type: ignore[arg-type]


def test_disabled() -> None:
    model = waiting("O5", enabled=False)
    optimizer = mpinit.add_optimizers(momentum(model.parameters()))
    assert optimizer in registry.disabled
    train(model, optimizer, batches(1))


def test_inside_of_scale_loss() -> None:
    model = waiting("O2-float16")
    block = mpinit.scale_loss(mse(model, batches(1)[0]), add_for(model[0]))
    with pytest.raises(RuntimeError, match=r"add_optimizers\(\) was called inside"), block:
        add_for(model[-1])


def test_gradient_that_loss_of_another_has_left_is_unscaled() -> None:
    model, usual = waiting("O2-float16"), mlp()
    optimizer = momentum(usual.parameters())
    initialise(usual, optimizer, "O2-float16")
    first = add_for(model[0])
    backward(mse(model, batches(1)[0]), first)
    backward(mse(usual, batches(1)[0]), optimizer)
    second = add_for(model[-1])
    for each in (first, second, optimizer):
        each.step()
    same(model.state_dict().values(), usual.state_dict().values())
