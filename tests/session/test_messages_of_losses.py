"""What a user reads who gives ``scale_loss`` something else, forgets its ``with``, or scales the loss twice."""

import traceback
from typing import Any

import pytest
import torch
from models import dynamic
from torch import nn

import mpinit


def pair(level: str = "O2", **keywords: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, **keywords)
    return model, optimizer


def loss_of(model: nn.Module, rows: int = 1) -> torch.Tensor:
    return model(torch.ones(rows, 4)).square().mean()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_backward_without_with_is_answered_with_the_with(level: str) -> None:
    model, optimizer = pair(level)
    context = mpinit.scale_loss(loss_of(model), optimizer)
    with pytest.raises(
        AttributeError, match=r"write `with mpinit.scale_loss\(loss, optimizer\) as scaled_loss: scaled"
    ):
        context.backward()  # type: ignore[union-attr]
    assert not hasattr(context, "item") and not hasattr(context, "__array__")
    with pytest.raises(AttributeError, match="has no attribute '_private'"):
        context._private  # type: ignore[union-attr]  # noqa: B018
    with context as scaled_loss:  # the same context works
        scaled_loss.backward()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)


def shown(error: BaseException) -> str:
    """Return what Python prints of an error, notes included."""
    return "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_loss_of_several_numbers_is_named_with_its_shape(level: str) -> None:
    model, optimizer = pair(level, **dynamic(level, init=4.0))
    with (
        pytest.raises(RuntimeError, match="only for scalar outputs") as caught,
        mpinit.scale_loss(model(torch.ones(3, 4)), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert "has the shape (3, 2)" in shown(caught.value) and "loss.mean()" in shown(caught.value)
    # A gradient of one's own is no mistake.
    with mpinit.scale_loss(model(torch.ones(3, 4)), optimizer) as scaled_loss:
        scaled_loss.backward(torch.ones(3, 2))
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_loss_without_gradients_is_explained(level: str) -> None:
    model, optimizer = pair(level)
    with torch.no_grad():
        loss = loss_of(model)
    with (
        pytest.raises(RuntimeError, match="does not require grad") as caught,
        mpinit.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert "all parameters are frozen" in shown(caught.value) and "torch.no_grad()" in shown(caught.value)


def test_an_error_of_the_users_own_gets_no_note() -> None:
    model, optimizer = pair()
    with pytest.raises(RuntimeError) as caught, mpinit.scale_loss(loss_of(model), optimizer):
        raise RuntimeError("mine: does not require grad")
    assert not hasattr(caught.value, "__notes__")


def test_a_whole_checkpoint_is_answered_with_its_entry() -> None:
    model, optimizer = pair()
    for key in ("mpinit", "amp"):
        whole = {"model": model.state_dict(), key: mpinit.state_dict(optimizer)}
        with pytest.raises(ValueError, match=f"a whole checkpoint: the scalers' state is its entry '{key}'"):
            mpinit.load_state_dict(whole, optimizer)
        mpinit.load_state_dict(whole[key], optimizer)


def test_undo_twice_says_that_once_is_enough() -> None:
    model, optimizer = pair()
    mpinit.undo(model)
    with pytest.raises(ValueError, match=r"one undo\(\) reverts a whole initialize\(\) call"):
        mpinit.undo(optimizer)


class Descent:
    """An optimizer of a user's own, which is not derived from torch's."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1 * parameter.grad)


def test_optimizer_not_torchs_is_refused_with_way_that_trains() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    with pytest.raises(TypeError, match='derive it, or initialise the model alone, with master_weights="model"'):
        mpinit.initialize(model, Descent(model.parameters()), "O5")  # type: ignore[type-var]
    # What the message advises trains: float32 weights after 20 steps of 1e-4 of their size.
    before = model.weight.detach().clone()
    mpinit.initialize(model, opt_level="O5", master_weights="model")
    optimizer = Descent(model.parameters())
    for _ in range(20):
        (model(torch.ones(1, 4)).sum() * 1e-4).backward()
        optimizer.step()
        model.zero_grad()
    assert model.weight.dtype is torch.float32
    torch.testing.assert_close(model.weight.detach(), before - 20 * 0.1 * 1e-4, rtol=0, atol=1e-6)


def test_groups_replaced_by_hand_and_moves_to_meta_are_warned_of() -> None:
    model, optimizer = pair()
    optimizer.param_groups[0]["params"] = [p.detach().clone().requires_grad_() for p in model.parameters()]
    with mpinit.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) does nothing: .*no parameter of this optimizer"):
        optimizer.step()

    model, optimizer = pair()
    model.to("meta")
    with mpinit.scale_loss(model(torch.ones(1, 4, device="meta")).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    with (
        pytest.warns(UserWarning, match="4 parameters were put into the model after mpinit.initialize"),
        pytest.warns(UserWarning, match=r"optimizer.step\(\) does nothing: .*no parameter of this optimizer"),
    ):
        optimizer.step()
