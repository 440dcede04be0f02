"""Differences between apex's amp and mpinit's: one list of scalers, and one overflow for all optimizers of a loss.

Below the public face: these modules are what scripts import as ``apex``.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import same
from models import Parts, sgd
from torch import nn

import mpinit
from mpinit.compat.apex import amp as face
from mpinit.compat.apex.amp import _amp_state

INF = float("inf")
LEVELS = ["O1", "O2"]


@pytest.fixture(autouse=True)
def _face_as_it_was() -> Iterator[None]:
    before = dict(vars(_amp_state))
    yield
    vars(_amp_state).update(before)


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def pair(level: str, amp: Any = face, **more: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [linear(0), linear(1)]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **more)
    return models, optimizers


def in_two_calls(level: str, amp: Any = face, **second: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [linear(0), linear(1)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer, more in zip(models, optimizers, ({}, second), strict=True):
        amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0} | more)
    return models, optimizers


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def moved(models: list[nn.Module], before: list[list[torch.Tensor]]) -> list[bool]:
    return [not all(map(torch.equal, values(m), old)) for m, old in zip(models, before, strict=True)]


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


def mean(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(X)
    return out.float().mean()


def iterate(loss: Any, optimizers: list[torch.optim.Optimizer], amp: Any = face, loss_id: int = 0) -> None:
    with amp.scale_loss(loss, optimizers, loss_id) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize(("verbosity", "lines"), [(False, 0), (True, 1), (0, 0), (1, 1)])
def test_verbosity_may_be_a_boolean(verbosity: Any, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    model = linear(0)
    with caplog.at_level(logging.INFO, "mpinit"):
        face.initialize(model, sgd(model), opt_level="O2", verbosity=verbosity)
    assert len(caplog.records) == lines
    assert face._amp_state.verbosity == int(verbosity)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_one_optimizer_skips_all_of_the_loss(level: str, bad: int) -> None:
    models, optimizers = pair(level)
    before = [values(model) for model in models]
    factor = [1.0, 1.0]
    factor[bad] = INF
    iterate(sum(f * mean(m) for f, m in zip(factor, models, strict=True)), optimizers)
    assert moved(models, before) == [False, False]
    assert [mpinit.step_counts(optimizer) for optimizer in optimizers] == [(0, 1), (0, 1)]
    assert mpinit.loss_scale(optimizers[0]) == 2.0**15, "the scale backs off once"
    for optimizer in optimizers:
        optimizer.zero_grad()
    iterate(sum(mean(model) for model in models), optimizers)
    assert moved(models, before) == [True, True], "and only once"


@pytest.mark.parametrize("level", LEVELS)
def test_overflow_of_an_earlier_loss_skips_its_own_optimizer(level: str) -> None:
    models, optimizers = pair(level)
    before = [values(model) for model in models]
    with face.scale_loss(INF * mean(models[0]), optimizers[0]) as scaled:
        scaled.backward()
    iterate(mean(models[0]) + mean(models[1]), optimizers)
    assert moved(models, before) == [False, True]


def test_each_optimizer_of_mpinit_decides_by_its_own_gradients() -> None:
    models, optimizers = pair("O2")
    before = [values(model) for model in models]
    iterate(INF * mean(models[0]) + mean(models[1]), optimizers, mpinit)
    assert moved(models, before) == [False, True]


def test_overflow_found_by_later_backward_pass_of_step_skips_all() -> None:
    models, optimizers = pair("O2")
    before = [values(model) for model in models]
    with face.scale_loss(mean(models[0]) + mean(models[1]), optimizers, delay_unscale=True) as scaled:
        scaled.backward()
    iterate(mean(models[0]) + INF * mean(models[1]), optimizers)
    assert moved(models, before) == [False, False]
    assert mpinit.loss_scale(optimizers[0]) == 2.0**15


def test_sparse_scalar_and_empty_gradients_take_part() -> None:
    def run(self: Any, index: torch.Tensor) -> Any:
        return self.table(index).sum() * self.number + self.empty.sum()

    for bad in (0, 1):
        odd = {"empty": nn.Parameter(torch.zeros(0)), "number": nn.Parameter(torch.tensor(2.0))}
        models: list[nn.Module] = [Parts(run, **odd, table=nn.Embedding(6, 4, sparse=True)), linear(1)]
        optimizers = [sgd(model) for model in models]
        face.initialize(models, optimizers, opt_level="O2", verbosity=0)
        before = [values(model) for model in models]
        index, factors = torch.tensor([1, 4, 1]), (INF, 1.0) if bad == 0 else (1.0, INF)
        iterate(factors[0] * models[0](index) + factors[1] * mean(models[1]), optimizers)
        assert moved(models, before) == [False, False]
        mpinit.undo(models)


def test_exception_in_block_is_users_and_spreads_no_overflow() -> None:
    models, optimizers = pair("O2")
    with (
        pytest.raises(KeyError, match="mine"),
        face.scale_loss(INF * mean(models[0]) + mean(models[1]), optimizers) as scaled,
    ):
        scaled.backward()
        raise KeyError("mine")
    after = [p.grad for p in mpinit.master_params(optimizers[1])]
    expected = torch.autograd.grad(mean(models[1]), list(models[1].parameters()))
    same(after, [gradient.float() for gradient in expected])
    with face.scale_loss(mean(models[0]) + mean(models[1]), optimizers) as scaled:
        scaled.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_a_later_initialize_gives_its_scalers_to_all_optimizers(level: str) -> None:
    (first, _), (one, two) = in_two_calls(level, num_losses=2)
    iterate(mean(first) * INF, [one], loss_id=1)
    assert [scaler.loss_scale() for scaler in face._amp_state.loss_scalers] == [2.0**16, 2.0**15]
    assert mpinit.loss_scale(two, 1) == mpinit.loss_scale(one, 1) == 2.0**15
    assert mpinit.step_was_skipped(one)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_one_loss_over_optimizers_of_two_initialize_calls(level: str, bad: int | None) -> None:
    apart, (one, two) = in_two_calls(level)
    together, optimizers = pair(level, mpinit)
    before = [values(model) for model in apart]
    factor = [INF if bad == index else 1.0 for index in range(2)]
    for models, own, amp in ((apart, [one, two], face), (together, optimizers, mpinit)):
        iterate(factor[0] * mean(models[0]) + factor[1] * mean(models[1]), own, amp)
    assert mpinit.loss_scale(one) == (2.0**16 if bad is None else 2.0**15), "one update, not one a session"
    assert mpinit.state_dict(one) == mpinit.state_dict(two) == mpinit.state_dict(optimizers[0])
    assert moved(apart, before) == [bad is None] * 2
    if bad is None:
        assert moved(apart, [values(model) for model in together]) == [False, False]


def test_a_second_initialize_that_is_refused_ends_no_session() -> None:
    model = linear(0)
    optimizer = sgd(model)
    face.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(ValueError, match="loss_scale"):
        face.initialize(model, sgd(model), opt_level="O2", loss_scale="dynamc")
    assert model.weight.dtype == torch.float16
    iterate(mean(model), [optimizer])


def test_a_model_without_an_optimizer_changes_no_scaler() -> None:
    model = linear(0)
    optimizer = sgd(model)
    face.initialize(model, optimizer, opt_level="O2", verbosity=0)
    face.initialize(linear(1), opt_level="O3", verbosity=0)
    assert mpinit.loss_scale(optimizer) == 2.0**16


def test_scalers_of_a_later_call_may_be_static() -> None:
    _, (one, _) = in_two_calls("O2", loss_scale=64.0)
    assert mpinit.loss_scale(one) == 64.0


def test_sessions_with_different_scalers_are_refused() -> None:
    (first, _), (one, two) = in_two_calls("O2", mpinit)
    with pytest.raises(ValueError, match="one loss cannot be scaled by"):
        face.scale_loss(mean(first), [one, two])
    with pytest.raises(RuntimeError, match="was not initialised"):
        face.scale_loss(mean(first), [one, sgd(linear(2))])


@pytest.mark.parametrize("state", [{"loss_scale": 1e300, "unskipped": 0}, {"loss_scale": 8.0, "unskipped": 2**40}, 3])
def test_a_bad_state_changes_no_scaler(state: Any) -> None:
    _, optimizers = pair("O2", num_losses=2)
    good = {"loss_scale": 8.0, "unskipped": 1}
    with pytest.raises(RuntimeError, match="loss_scaler1 "):
        face.load_state_dict({"loss_scaler0": good, "loss_scaler1": state})
    assert face.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 0}
    face.load_state_dict({"loss_scaler0": good})
    assert [scale["loss_scale"] for scale in face.state_dict().values()] == [8.0, 2.0**16]
    face.load_state_dict({f"loss_scaler{index}": good for index in range(3)})
    assert [scale["loss_scale"] for scale in face.state_dict().values()] == [8.0, 8.0]
    assert mpinit.loss_scale(optimizers[0]) == 8.0


def test_live_session_keeps_its_scalers_beside_a_disabled_model() -> None:
    model = linear(0)
    optimizer = sgd(model)
    face.initialize(model, optimizer, opt_level="O2", verbosity=0)
    face.initialize(linear(1), enabled=False)
    assert dict(face.state_dict()) == dict(mpinit.state_dict(optimizer))
    face.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 1}})
    assert mpinit.loss_scale(optimizer) == 32.0
    mpinit.undo(model)
    assert face.state_dict() == {}
    face.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 1}})
