"""Float32 masters: made without losing a bit, stepped like a hand-written loop's, followed by their weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import (
    HALVES,
    as_by_hand,
    backward,
    batches,
    follow,
    gradients,
    keywords,
    masters,
    mlp,
    momentum,
    mse,
    same,
    start,
    train,
)
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, RMSprop

import mpinit

OPTIMIZERS: dict[str, Any] = {
    "sgd": momentum,
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "rmsprop single": lambda p: RMSprop(p, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_o2_equals_a_hand_written_loop_bit_for_bit(dtype: torch.dtype, name: str) -> None:
    as_by_hand(dtype, OPTIMIZERS[name])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mode", [True, "split"])
def test_masters_hold_every_bit_of_the_weights_that_came_in(dtype: torch.dtype, mode: Any) -> None:
    if mode == "split" and dtype == torch.float16:
        pytest.skip("refused by name, which tests of messages show")
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = list(model.parameters())
    start(model, "O2", dtype, master_weights=mode)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert {p.dtype for p in model.parameters()} == {dtype}
    state = model.state_dict()
    same(state.values(), before.values())
    mpinit.undo(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    same(model.state_dict().values(), before.values())


@pytest.mark.parametrize("came_in", HALVES, ids=str)
def test_16_bit_weights_coming_in_get_masters_of_their_values(came_in: torch.dtype) -> None:
    model = mlp().to(came_in)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = start(model, "O2", torch.float16)
    same(masters(optimizer), [p.float() for p in before])
    train(model, optimizer, batches(2))
    follow(model, optimizer)


def test_tiny_updates_add_up_in_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = start(model, "O2", torch.bfloat16, lambda p: torch.optim.SGD(p, lr=2.0**-12))
    for _ in range(32):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 1)).sum(), optimizer)
        optimizer.step()
    # A step of 2**-12 is lost on a bfloat16 weight of 1; 32 of them are not on its master.
    assert masters(optimizer)[0].item() == 1 - 32 * 2.0**-12
    assert model.weight.item() == 1 - 2.0**-7


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_clearing_clears_weights_and_masters(clear: str, set_to_none: bool) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model)
    backward(mse(model, batch), optimizer)
    first = gradients(optimizer)
    (optimizer if clear == "optimizer" else model).zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else bool((parameter.grad == 0).all())
    backward(mse(model, batch), optimizer)
    same(gradients(optimizer), first)


def test_weight_and_master_share_one_float32_gradient() -> None:
    model = mlp()
    optimizer = start(model)
    backward(mse(model, batches(1)[0]), optimizer)
    for weight, master in zip(model.parameters(), mpinit.master_params(optimizer), strict=True):
        assert weight.grad is master.grad is not None and weight.grad.dtype == torch.float32


def test_finite_weights_beyond_float16_are_clamped_with_one_warning_and_come_back() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = 1e6, float("inf")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight are beyond") as caught:
        start(model, "O2", torch.float16)
    assert len(caught) == 1
    assert model[0].weight[0, :2].tolist() == [65504.0, float("inf")]
    same(model.state_dict().values(), before)
    mpinit.undo(model)
    same(model.parameters(), before)


def growing(start: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """One weight that a step makes larger by 1000, in float16."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[start, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    mpinit.initialize(model, optimizer, "O2", init_loss_scale=2.0, verbosity=0)
    return model, optimizer


def grow(model: nn.Linear, optimizer: torch.optim.Optimizer, square: bool) -> None:
    """One step of :func:`growing`; an infinite weight makes gradients nan where the loss has a square in it."""
    optimizer.zero_grad()
    output = model(torch.tensor([[1.0, 0.0]]))
    loss = -output.sum() + (0.0 * output.square().sum() if square else 0.0)
    backward(loss, optimizer)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:finite values of weight")
def test_what_was_clamped_at_the_start_stays_clamped() -> None:
    model, optimizer = growing(1e5)
    for _ in range(3):
        grow(model, optimizer, square=False)
    assert model.weight.tolist() == [[65504.0, 1.0]]
    assert masters(optimizer)[0].tolist() == [[103000.0, 1.0]]
    mpinit.undo(model)
    assert model.weight.tolist() == [[103000.0, 1.0]]


def test_weights_that_grow_beyond_float16_are_noticed_at_the_skipped_step_and_clamped() -> None:
    model, optimizer = growing(64000.0)
    grow(model, optimizer, square=True)
    assert model.weight.tolist() == [[64992.0, 1.0]]
    grow(model, optimizer, square=True)
    with pytest.warns(UserWarning, match="weight grew beyond the largest float16"):
        grow(model, optimizer, square=True)
    assert mpinit.step_counts(optimizer) == (2, 1)
    for _ in range(2):
        grow(model, optimizer, square=True)
        assert model.weight.tolist() == [[65504.0, 1.0]]
    assert mpinit.step_counts(optimizer) == (4, 1)
    assert masters(optimizer)[0].tolist() == [[68000.0, 1.0]]
    mpinit.undo(model)


def test_loaded_numbers_beyond_float16_are_clamped() -> None:
    model, optimizer = growing(1.0)
    model.load_state_dict({"weight": torch.tensor([[1e5, 1.0]])})
    assert model.weight.tolist() == [[65504.0, 1.0]]
    grow(model, optimizer, square=True)
    assert model.weight.tolist() == [[65504.0, 1.0]]
    assert model.state_dict()["weight"].tolist() == [[101000.0, 1.0]]
    mpinit.undo(model)


# -- copies ---------------------------------------------------------------------------------------------------------


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _saved])
def test_a_copy_has_plain_parameters_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = mlp(), batches(1)[0]
    optimizer = start(model)
    train(model, optimizer, [batch])
    twin = copied(model)
    if copied is copy.deepcopy:
        assert all(map(torch.equal, twin.parameters(), masters(optimizer))), "in float32"
        torch.testing.assert_close(twin(batch[0]), model(batch[0]), rtol=0.02, atol=0.02)
    else:
        assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())
        torch.testing.assert_close(twin(batch[0]), model(batch[0]), rtol=0, atol=0)
    before = masters(optimizer)
    for parameter in twin.parameters():
        parameter.data.zero_()
    optimizer.zero_grad()
    optimizer.step()
    same(masters(optimizer), before)


def test_a_state_dict_is_of_the_masters_and_loads_anywhere() -> None:
    model = mlp()
    optimizer = start(model)
    train(model, optimizer, batches(3))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    same(loaded["model"].values(), masters(optimizer))
    plain = mlp(seed=3)
    plain.load_state_dict(loaded["model"])
    reference = momentum(plain.parameters())
    reference.load_state_dict(loaded["optimizer"])
    same(plain.parameters(), masters(optimizer))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_undo_gives_plain_float32_training_back(level: str) -> None:
    model = mlp()
    optimizer = start(model, level)
    train(model, optimizer, batches(3))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(optimizer)
    same(model.parameters(), values.values())
    assert [p for g in optimizer.param_groups for p in g["params"]] == list(model.parameters())
    mpinit.initialize(model, optimizer, **keywords(level))
    train(model, optimizer, batches(1))
    follow(model, optimizer)


def _state_dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    return {v.dtype for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_optimizer_state_stays_float32(level: str) -> None:
    model = mlp()
    optimizer = start(model, level, make=lambda p: Adam(p, lr=0.01))
    train(model, optimizer, batches(2))
    assert _state_dtypes(optimizer) == {torch.float32}
