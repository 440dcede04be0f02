"""While a model awaits its optimizers: what is said of it, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from late_optimizers import await_optimizers, with_masters
from loops import backward, batches, close, mlp, momentum, mse, poison, same, train
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_pre_hooks

import mpinit
from mpinit import registry


def test_describe_says_how_many_weights_wait() -> None:
    model = mlp()
    await_optimizers(model, "O5")
    assert "4 weights (83 bfloat16 parameters) wait for an optimizer" in mpinit.describe(model)
    mpinit.add_optimizers(SGD(model[0].parameters(), lr=0.1))
    assert "2 weights" in mpinit.describe(model)
    mpinit.add_optimizers([])
    assert "wait" not in mpinit.describe(model)


@pytest.mark.parametrize("box", [lambda *xs: xs[0], lambda *xs: list(xs), lambda *xs: tuple(xs)])
def test_what_is_given_comes_back(box: Callable[..., Any]) -> None:
    models = [mlp(), mlp()]
    mpinit.initialize(models, opt_level="O5", await_optimizers=True, verbosity=0)
    given = box(*(momentum(model.parameters()) for model in models))
    assert mpinit.add_optimizers(given) is given


def test_scale_loss_before_any_optimizer() -> None:
    model = mlp()
    await_optimizers(model, "O2-float16")
    loss = mse(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"awaits its optimizers: call mpinit\.add_optimizers"):
        mpinit.scale_loss(loss, [])
    with pytest.raises(RuntimeError, match=r"or to mpinit\.add_optimizers"):
        mpinit.scale_loss(loss, momentum(model.parameters()))


@with_masters
def test_a_step_of_an_optimizer_that_nobody_added(setting: str) -> None:
    model, other = mlp(), mlp(1)
    await_optimizers(model, setting)
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
    mpinit.undo(model)
    assert not _global_optimizer_pre_hooks


def test_an_optimizer_twice() -> None:
    model = mlp()
    await_optimizers(model, "O5")
    optimizer = momentum(model.parameters())
    with pytest.raises(ValueError, match="holds the same SGD twice"):
        mpinit.add_optimizers([optimizer, optimizer])
    mpinit.add_optimizers(optimizer)
    with pytest.raises(ValueError, match="SGD was initialised already"):
        mpinit.add_optimizers(optimizer)


def test_parameters_of_no_session_and_of_several() -> None:
    one, two, stranger = mlp(), mlp(), mlp()
    await_optimizers(one, "O5")
    await_optimizers(two, "O2-float16")
    with pytest.raises(RuntimeError, match="none of the parameters of this SGD belongs to an initialised model"):
        mpinit.add_optimizers(momentum(stranger.parameters()))
    with pytest.raises(RuntimeError, match="belong to several sessions"):
        mpinit.add_optimizers(momentum([*one.parameters(), *two.parameters()]))
    with pytest.raises(RuntimeError, match="which session is meant"):
        mpinit.add_optimizers([])
    first, second = mpinit.add_optimizers([momentum(one.parameters()), momentum(two.parameters())])
    assert registry.of(first) is registry.of(one) and registry.of(second) is registry.of(two)
    with pytest.raises(TypeError, match="optimizers must be"):
        mpinit.add_optimizers(one)
    with pytest.raises(TypeError, match="await_optimizers must be True or False"):
        mpinit.initialize(stranger, await_optimizers="yes")  # type: ignore[arg-type]


def test_disabled() -> None:
    model = mlp()
    await_optimizers(model, "O5", enabled=False)
    optimizer = mpinit.add_optimizers(momentum(model.parameters()))
    assert optimizer in registry.disabled
    train(model, optimizer, batches(1))
    mpinit.undo([model, optimizer])


def test_inside_of_scale_loss() -> None:
    model = mlp()
    await_optimizers(model, "O2-float16")
    first = mpinit.add_optimizers(momentum(model[0].parameters()))
    loss = mse(model, batches(1)[0])
    with (
        pytest.raises(RuntimeError, match=r"add_optimizers\(\) was called inside"),
        mpinit.scale_loss(loss, first),
    ):
        mpinit.add_optimizers(momentum(model[-1].parameters()))


@pytest.mark.parametrize("overflows", [False, True])
def test_a_gradient_of_another_loss_counts(overflows: bool) -> None:
    model, plain = mlp(), mlp()
    await_optimizers(model, "O2-float16")
    first, reference = mpinit.add_optimizers(momentum(model[0].parameters())), momentum(plain[-1].parameters())
    loss = mse(model, batches(1)[0])
    backward(poison(loss, model[-1].weight) if overflows else loss, first)
    second = mpinit.add_optimizers(momentum(model[-1].parameters()))
    second.step()
    if not overflows:
        mse(plain, batches(1)[0]).backward()
        reference.step()
    assert mpinit.step_was_skipped(second) == overflows
    close(model[-1].state_dict().values(), plain[-1].parameters())
