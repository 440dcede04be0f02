"""gradient_release=True: what is refused, above all between backward() and step(), and passes that fail half way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_release import Net, assert_same, everything, kinds, loss_of, set_up, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpinit

# -- what is refused --------------------------------------------------------------------------------------------------


@kinds
def test_a_second_backward_changes_nothing(kind: str) -> None:
    model, optimizer = set_up(kind)
    loss_of(model).backward()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"second backward\(\) was called before optimizer.step"):
        loss_of(model, 1).backward()
    with (
        pytest.raises(RuntimeError, match=r"second backward\(\) was called"),
        mpinit.scale_loss(loss_of(model), optimizer),
    ):
        pass
    assert_same(everything(model, optimizer), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    train(model, optimizer, 1)
    mpinit.undo(model)


Call = Callable[[Any, Any], Any]
AFTER_BACKWARD: dict[str, tuple[Call, str]] = {
    "zero_grad": (lambda model, optimizer: optimizer.zero_grad(), r"zero_grad\(\) was called between"),
    "closure": (lambda model, optimizer: optimizer.step(lambda: 0.0), "inside of the step"),
    "clip": (lambda model, optimizer: mpinit.clip_grad_norm_(optimizer, 1.0), "no norm of all gradients"),
    "masters": (lambda model, optimizer: list(mpinit.master_params(optimizer)), "looks at all gradients"),
    "torch's clip": (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "no norm of all gradients"),
    "clip value": (lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0), "looks at all gradients"),
    "delay": (
        lambda model, optimizer: mpinit.scale_loss(torch.ones(()), optimizer, delay_unscale=True),
        "delay_unscale",
    ),
}


@pytest.mark.parametrize("what", AFTER_BACKWARD)
def test_refused_between_backward_and_step(what: str) -> None:
    call, message = AFTER_BACKWARD[what]
    model, optimizer = set_up()
    loss_of(model).backward()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        call(model, optimizer)
    assert_same(everything(model, optimizer), before)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)
    mpinit.undo(model)
    loss_of(model).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_an_option_changed_between_backward_and_step_is_refused() -> None:
    model, optimizer = set_up()
    loss_of(model).backward()
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"'lr' of a parameter group was changed from 0.01 to 0.5"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.01
    optimizer.step()
    mpinit.undo(model)


def test_gradients_of_gradients_are_refused() -> None:
    model, optimizer = set_up("O0")
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss_of(model).backward(create_graph=True)
    assert_same(everything(model, optimizer), before)
    mpinit.undo(model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_scale": "dynamic"}, "gradient_release=True contradicts loss_scale=dynamic"),
        ({"loss_scale": 128.0}, "gradient_release=True contradicts loss_scale=128.0"),
    ],
)
def test_contradicting_properties(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_up("full", **more)


def test_optimizers_that_look_across_parameters_or_share_them_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient_release=True steps a bucket.*LBFGS"):
        set_up("O0", lambda model: torch.optim.LBFGS(model.once.parameters()))
    model = Net()
    two = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.once.parameters(), lr=0.1)]
    with pytest.raises(ValueError, match="in the groups of two optimizers"):
        mpinit.initialize(model, two, "O5", gradient_release=True, verbosity=0)
    assert model.once.weight.dtype == torch.float32
    mpinit.initialize(model, two[0], "O5", gradient_release=True, verbosity=0)
    with pytest.raises(ValueError, match="in the groups of two optimizers"):
        mpinit.add_optimizers(two[1])
    mpinit.undo(model)


# -- what has failed half way -----------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("on purpose")


@kinds
def test_a_pass_that_fails_half_way_is_told_of(kind: str) -> None:
    model, optimizer = set_up(kind, split_bucket_bytes=8)
    train(model, optimizer, 1)
    once, twice = model.once.weight.detach().clone(), model.twice.weight.detach().clone()
    x = torch.randint(200, (4, 6))
    hidden = model.once(model.norm(Fails.apply(model.twice(model.embedding(x)))))
    with pytest.raises(ValueError, match="on purpose"):
        (hidden.float() ** 2).sum().backward()
    assert torch.equal(model.twice.weight, twice)
    for call in (optimizer.step, lambda: loss_of(model).backward()):
        with pytest.raises(RuntimeError, match="has failed after"):
            call()
    with pytest.warns(UserWarning, match="has failed after .* It stays half done"):
        optimizer.zero_grad()
    assert not torch.equal(model.once.weight, once)
    train(model, optimizer, 1)
    assert mpinit.step_counts(optimizer) == (2, 0)
    mpinit.undo(model)


def test_a_gradient_that_comes_again_is_told_of() -> None:
    model, optimizer = set_up("O0", lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randint(200, (4, 6))
    hidden = checkpoint(lambda inner: model.once(inner), model.embedding(x), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"a gradient came to 'once.* again after it was stepped"):
        model.once(model.twice(hidden)).sum().backward()
    with pytest.warns(UserWarning, match="It stays half done"):
        optimizer.zero_grad()
    mpinit.undo(model)


def test_a_session_that_is_dropped_leaves_torchs_clipping_alone() -> None:
    gc.collect()
    before = torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grad._clip_grads_with_norm_
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", gradient_release=True, verbosity=0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert torch.nn.utils.clip_grad_value_ is not before[0]
    del model, optimizer
    gc.collect()
    assert (torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grad._clip_grads_with_norm_) == before
