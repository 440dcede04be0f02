"""The state of gradients: every phase with every event, and what a step does in each.

Below the public face: every cell of the table of states is tried, which no single loop reaches.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import backward, batches, masters, mlp, mse, poison, same, started
from session_device import device, no_waiting
from torch import nn
from torch.optim import SGD, AdamW

import mpinit
from mpinit import registry
from mpinit.optimizer.gradient_state import EMPTY, Phase

pytestmark = pytest.mark.device

BATCH, OTHER = batches(2)

E, S, U, D, K = (phase.name for phase in (Phase.EMPTY, Phase.SCALED, Phase.UNSCALED, Phase.USED, Phase.SKIPPED))


def test_a_state_is_frozen() -> None:
    with pytest.raises(AttributeError):
        EMPTY.phase = Phase.USED  # type: ignore[misc]


class World:
    """A model with its optimizer whose gradients are brought into a phase through the public functions."""

    def __init__(self) -> None:
        self.model, self.optimizer = started("O2")
        self.scaler = mpinit.GradScaler(self.optimizer)
        self.block: Any = None

    def loss(self, overflows: bool = False) -> torch.Tensor:
        loss = mse(self.model, BATCH)
        return poison(loss, self.model[0].weight) if overflows else loss

    def enter(self) -> None:
        block = mpinit.scale_loss(self.loss(), self.optimizer)
        block.__enter__().backward()
        self.block = block

    def exit(self) -> None:
        block, self.block = self.block, None
        block.__exit__(None, None, None)

    def scale(self) -> None:
        self.scaler.scale(self.loss()).backward()

    def unscale(self) -> None:
        self.scaler.scale(torch.zeros(()))
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.optimizer.step()

    def skip(self) -> None:
        backward(self.loss(overflows=True), self.optimizer)
        self.optimizer.step()
        assert mpinit.step_was_skipped(self.optimizer)

    def read(self) -> None:
        list(mpinit.master_params(self.optimizer))

    def clear(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.step()

    @property
    def phase(self) -> str:
        return registry.session_of(self.optimizer).managed.find(self.optimizer).gradients.state.phase.name


REACHED: dict[str, Callable[[World], None]] = {
    "EMPTY": lambda world: None,
    "in a block": World.enter,
    "by a GradScaler": World.scale,
    "UNSCALED": lambda world: backward(world.loss(), world.optimizer),
    "USED": lambda world: (backward(world.loss(), world.optimizer), world.optimizer.step()),  # type: ignore[return-value, dict-item]
    "SKIPPED": World.skip,
}
# What a user calls -> the phase after it or the message, for each of these in their order.
INSIDE, SCALER, NESTED = "inside `with mpinit.scale_loss", "still scaled, by a GradScaler", "inside another block"
CALLED: dict[str, tuple[Callable[[World], None], list[str]]] = {
    "scale_loss": (World.enter, [S, NESTED, SCALER, S, S, S]),
    "exit": (World.exit, ["", U, "", "", "", ""]),
    "GradScaler.scale": (World.scale, [S, INSIDE, S, S, S, S]),
    "GradScaler.unscale_": (World.unscale, [E, INSIDE, U, U, U, U]),
    "step": (World.step, [E, INSIDE, SCALER, D, D, K]),
    "skipped step": (World.skip, [K, NESTED, SCALER, K, K, K]),
    "master_params": (World.read, [E, INSIDE, SCALER, U, D, K]),
    "zero_grad": (World.clear, [E, INSIDE, E, E, E, E]),
}


@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize(("number", "reached"), list(enumerate(REACHED)))
def test_every_cell_that_a_user_can_reach(number: int, reached: str, called: str) -> None:
    call, outcomes = CALLED[called]
    world = World()
    REACHED[reached](world)
    assert world.phase == {"in a block": S, "by a GradScaler": S}.get(reached, reached)
    outcome = outcomes[number]
    if outcome in Phase.__members__:
        call(world)
        assert world.phase == outcome
    elif outcome:
        with pytest.raises(RuntimeError, match=outcome):
            call(world)
        # A block that was entered inside another drops the gradients, and nothing else does.
        assert world.phase == (E if outcome == NESTED else S)


# -- gradients that came after an overflow -----------------------------------------------------------------------------


def plain_by_hand(model: nn.Module, lr: float = 0.1) -> list[torch.Tensor]:
    """The float32 weights after one plain SGD step with the gradients that are there."""
    values = [value.detach().clone() for value in model.state_dict().values()]
    return [v - lr * p.grad.float() for v, p in zip(values, model.parameters(), strict=True)]  # type: ignore[union-attr]


def overflowed(level: str = "O2", **more: Any) -> tuple[nn.Sequential, Any]:
    model, optimizer = started(level, make=lambda p: SGD(p, lr=0.1), **more)
    backward(poison(mse(model, BATCH), model[0].weight), optimizer)
    return model, optimizer


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
@pytest.mark.parametrize("cleared_by", ["optimizer", "model", "hand"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plain_backward_after_clearing_an_overflow_is_stepped(level: str, cleared_by: str) -> None:
    model, optimizer = overflowed(level)
    if cleared_by == "hand":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        (model if cleared_by == "model" else optimizer).zero_grad()
    mse(model, OTHER).backward()
    expected = plain_by_hand(model)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)
    torch.testing.assert_close(masters(optimizer), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_new_gradients_that_are_not_finite_are_skipped(level: str) -> None:
    model, optimizer = overflowed(level)
    before = masters(optimizer)
    optimizer.zero_grad()
    (mse(model, OTHER) * float("nan")).backward()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 1)
    same(masters(optimizer), before)


def clip_in_place(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clear_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    mse(model, OTHER).backward()


def clear_some(model: nn.Module) -> None:
    next(model.parameters()).grad = None


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
@pytest.mark.parametrize("change", [clip_in_place, clear_in_place, clear_some])
def test_an_overflow_stays_while_a_checked_tensor_is_a_gradient(change: Callable[[nn.Module], None]) -> None:
    model, optimizer = overflowed()
    change(model)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 1)
    # A step was skipped for it: what is finite by now is used.
    clip_in_place(model)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 1)


def test_gradients_set_to_zero_have_no_overflow() -> None:
    _, optimizer = overflowed()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)


def test_replaced_gradients_are_new_and_checked() -> None:
    for factor, counts in ((float("nan"), (0, 1)), (0.5, (1, 0))):
        model, optimizer = overflowed()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter.grad, factor)  # type: ignore[arg-type]
        optimizer.step()
        assert mpinit.step_counts(optimizer) == counts


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
@pytest.mark.parametrize("fused", [False, True])
def test_a_static_scale_checks_plain_gradients_after_a_step(fused: bool) -> None:
    make = lambda p: AdamW(p, lr=0.01, fused=fused)  # noqa: E731
    model, optimizer = started("O2", make=make, loss_scale=8.0, skip_nonfinite=True)
    backward(mse(model, BATCH), optimizer)
    optimizer.step()
    before = masters(optimizer)
    optimizer.zero_grad()
    (mse(model, BATCH) * float("nan")).backward()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 1)
    same(masters(optimizer), before)


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
def test_new_gradients_are_known_without_waiting_for_a_device() -> None:
    model, optimizer = started("O2", make=lambda p: AdamW(p, lr=0.01, fused=True))
    backward(mse(model, BATCH), optimizer)
    optimizer.step()
    before = masters(optimizer)
    with no_waiting():
        optimizer.zero_grad()
        backward(mse(model, BATCH) * float("inf"), optimizer)
        optimizer.zero_grad()
        mse(model, OTHER).backward()
        optimizer.step()
    assert mpinit.step_counts(optimizer) == (2, 0)
    assert not any(map(torch.equal, masters(optimizer), before))


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
@pytest.mark.parametrize("step_between", [False, True])
def test_new_gradients_are_known_where_ranks_agree(step_between: bool) -> None:
    if device().type != "cpu":
        pytest.skip("a process group of the CPU's")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model, optimizer = overflowed(process_group=dist.group.WORLD)
        if step_between:
            optimizer.step()
        optimizer.zero_grad()
        mse(model, OTHER).backward()
        optimizer.step()
        assert mpinit.step_counts(optimizer) == (1, int(step_between))
    finally:
        dist.destroy_process_group()


# -- scaled gradients that no step may use -----------------------------------------------------------------------------


def test_a_query_before_the_backward_pass_of_a_grad_scaler_changes_nothing() -> None:
    model, optimizer = started()
    scaled = mpinit.GradScaler(optimizer).scale(mse(model, BATCH))
    list(mpinit.master_params(optimizer))
    scaled.backward()
    with pytest.raises(RuntimeError, match=SCALER):
        optimizer.step()


def test_gradients_that_no_loss_of_a_grad_scaler_reached_are_not_scaled_after_its_update() -> None:
    models = [mlp(0), mlp(1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    mpinit.initialize(models, optimizers, opt_level="O2", loss_scale=8.0)
    scaler = mpinit.GradScaler(optimizers)
    scaler.scale(mse(models[0], BATCH)).backward()
    scaler.step(optimizers[0])
    scaler.update()
    mse(models[1], BATCH).backward()
    with pytest.warns(UserWarning, match="did not come through"):
        optimizers[1].step()
    assert mpinit.step_counts(optimizers[1]) == (1, 0)


def test_a_grad_scaler_inside_a_block_is_refused() -> None:
    model, optimizer = started()
    scaler = mpinit.GradScaler(optimizer)
    scaler.scale(torch.zeros(()))
    with (
        pytest.raises(RuntimeError, match=r"unscale_\(\) of a GradScaler was called inside"),
        mpinit.scale_loss(mse(model, BATCH), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        scaler.unscale_(optimizer)


def test_abandoned_block_is_closed() -> None:
    model, optimizer = started()
    mpinit.scale_loss(mse(model, BATCH), optimizer).__enter__().backward()
    reference, by_itself = started()
    backward(mse(reference, BATCH), by_itself)
    optimizer.step()
    by_itself.step()
    same(masters(optimizer), masters(by_itself))


# -- where steps are not patched --------------------------------------------------------------------------------------


def test_queries_at_o0_change_nothing() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, opt_level="O0")
    before, step = set(vars(optimizer)), optimizer.step.__func__
    for _ in range(2):
        mse(model, BATCH).backward()
        same(list(mpinit.master_params(optimizer)), list(model.parameters()))
        mpinit.clip_grad_norm_(optimizer, 1.0)
        mpinit.describe(optimizer)
        mpinit.overflow_report(optimizer)
        mpinit.state_dict(optimizer)
        assert not mpinit.step_was_skipped(optimizer) and mpinit.loss_scale(optimizer) == 1.0
        scaler = mpinit.GradScaler(optimizer)
        scaler.scale(mse(model, BATCH)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert set(vars(optimizer)) == before and optimizer.step.__func__ is step
    assert mpinit.step_counts(optimizer) == (2, 0)
