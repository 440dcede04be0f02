"""A write to a weight or its master is seen by the other, and what was not written to keeps its low bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from law_cases import GRADIENT, START, begin, each_mode, entry, full_masters, initialise, is_number, number, pull
from loops import plain_sgd
from torch import nn
from torch.optim import SGD, Optimizer

import mpinit

NEW = torch.tensor([[0.75, -1.5, 3.0]])
Write = Callable[[Any], Any]


def _numpy(parameter: torch.Tensor) -> None:
    if parameter.dtype is torch.bfloat16:
        parameter.detach().view(torch.int16).numpy()[:] = NEW.bfloat16().view(torch.int16).numpy()
    else:
        parameter.detach().numpy()[:] = NEW.numpy()


def _assign(parameter: torch.Tensor) -> None:
    parameter.data = NEW.to(parameter.dtype)


WRITES: dict[str, Write] = {
    "copy_": lambda parameter: parameter.copy_(NEW),
    "data.copy_": lambda parameter: parameter.data.copy_(NEW),
    "data =": _assign,
    "foreach": lambda parameter: torch._foreach_copy_([parameter], [NEW.to(parameter.dtype)]),
    "numpy": _numpy,
}
each_way = pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
CHANGES_NOTHING: dict[str, Write] = {
    "mul_(1)": lambda weight: weight.mul_(1),
    "copy_": lambda weight: weight.copy_(weight.clone()),
    "clamp_": lambda weight: weight.clamp_(-100, 100),
    "data": lambda weight: weight.data.sum(),
    "data.mul_(1)": lambda weight: weight.data.mul_(1),
    "foreach": lambda weight: torch._foreach_mul_([weight], 1.0),
}


@each_mode
@each_way
def test_a_write_to_a_weight_is_what_the_step_starts_from(dtype: torch.dtype, masters: Any, write: Write) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    with torch.no_grad():
        write(model.weight)
    optimizer.step()
    is_number(model, NEW - GRADIENT)


@each_mode
@each_way
def test_a_checkpoint_holds_a_write_to_a_weight(dtype: torch.dtype, masters: Any, write: Write) -> None:
    model, _ = begin(dtype, masters)
    with torch.no_grad():
        write(model.weight)
    is_number(model, NEW)


@full_masters
@each_way
@pytest.mark.parametrize("how", ["model", "function", "in place"])
def test_a_write_to_a_master_reaches_what_is_compiled(dtype: torch.dtype, masters: Any, write: Write, how: str) -> None:
    torch._dynamo.reset()
    model, optimizer = begin(dtype, masters)
    x = torch.ones(1, model.weight.shape[1])
    run: Any = model
    if how == "in place":
        model.compile(backend="eager")
    else:
        run = torch.compile(model if how == "model" else lambda x: model(x), backend="eager", fullgraph=True)
    run(x)
    with torch.no_grad():
        write(entry(optimizer))
    assert torch.equal(run(x), nn.functional.linear(x, NEW.to(dtype).float(), model.bias))
    mpinit.undo(model)
    assert torch._dynamo.eval_frame._callback_from_stance.__module__ == "torch._dynamo.eval_frame"
    assert not hasattr(torch._dynamo.eval_frame._callback_from_stance, "__wrapped__")


@full_masters
@each_way
@pytest.mark.parametrize("look", ["forward", "state_dict", "step"])
def test_a_write_to_a_master_reaches_its_weight(dtype: torch.dtype, masters: Any, write: Write, look: str) -> None:
    model, optimizer = begin(dtype, masters)
    with torch.no_grad():
        write(entry(optimizer))
    if look == "forward":
        assert torch.equal(model(torch.eye(3)).flatten(), NEW.flatten())
        assert torch.equal(model.weight, NEW.to(dtype))
    elif look == "step":
        optimizer.step()
        assert torch.equal(model.weight, NEW.to(dtype))
    is_number(model, NEW)


@each_mode
@pytest.mark.parametrize("write", CHANGES_NOTHING.values(), ids=list(CHANGES_NOTHING))
def test_a_write_that_changes_nothing_changes_nothing(dtype: torch.dtype, masters: Any, write: Write) -> None:
    model, optimizer = begin(dtype, masters)
    with torch.no_grad():
        write(model.weight)
    optimizer.step()
    is_number(model, START)


@each_mode
def test_an_embedding_that_renorms_nothing_changes_nothing(dtype: torch.dtype, masters: Any) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(4, 3, max_norm=100.0)
    before = model.weight.detach().clone()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    model(torch.tensor([0, 1, 2, 3]))
    optimizer.step()
    is_number(model, before)


@each_mode
def test_an_embedding_that_renorms_a_row_leaves_the_far_ones(dtype: torch.dtype, masters: Any) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(8, 128, max_norm=1000.0)
    with torch.no_grad():
        model.weight[0] *= 1000
    before = model.weight.detach().clone()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    model(torch.arange(8))
    after = number(model)
    torch.testing.assert_close(after[0].norm(), torch.tensor(1000.0), rtol=0.01, atol=0.0)
    assert torch.equal(after[2:], before[2:])


@each_mode
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_another_memory_format_changes_nothing(
    dtype: torch.dtype, masters: Any, memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(4, 8, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = plain_sgd(model.parameters())
    initialise(model, optimizer, dtype, masters)
    model.to(memory_format=memory_format)
    optimizer.step()
    is_number(model, before)


@each_mode
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_step_hook_writes_to_a_weight_stays(dtype: torch.dtype, masters: Any, when: str) -> None:
    model, optimizer = begin(dtype, masters)

    @torch.no_grad()
    def hook(*_: Any) -> None:
        model.weight[0, 1] = 3.0

    (optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook)(hook)
    pull(model, optimizer)
    optimizer.step()
    expected = START - GRADIENT
    expected[0, 1] = 3.0 - GRADIENT[0, 1] if when == "before" else 3.0
    after = number(model)
    assert after[0, 1] == expected[0, 1]
    # A split master's block may lose the low bits of the elements beside it.
    torch.testing.assert_close(after, expected, rtol=0.0, atol=2.0**-8 if masters == "split" else 0.0)


@full_masters
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_step_hook_writes_to_a_master_stays(dtype: torch.dtype, masters: Any, when: str) -> None:
    model, optimizer = begin(dtype, masters)

    @torch.no_grad()
    def hook(*_: Any) -> None:
        entry(optimizer).mul_(0.5)

    (optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook)(hook)
    pull(model, optimizer)
    optimizer.step()
    expected = START * 0.5 - GRADIENT if when == "before" else (START - GRADIENT) * 0.5
    model(GRADIENT)
    assert torch.equal(model.weight, expected.to(dtype))
    is_number(model, expected)


class ScheduleFree(SGD):
    """As schedule-free optimizers are: ``eval`` and ``train`` write to the parameters."""

    @torch.no_grad()
    def eval(self) -> None:
        """Half of what is trained."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.lerp_(torch.zeros_like(parameter), 0.5)

    @torch.no_grad()
    def train(self) -> None:
        """Back."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(2)


class KeepsItsOwnList(Optimizer):
    """An optimizer that steps a list of its own, made when it was built."""

    def __init__(self, parameters: Any) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Subtract the gradient."""
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to(parameter.dtype))


@full_masters
def test_a_schedule_free_optimizers_eval_reaches_the_model(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters, lambda parameters: ScheduleFree(parameters, lr=1.0))
    pull(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.eval()
    assert torch.equal(model(torch.eye(3)).flatten(), ((START - GRADIENT) * 0.5).to(dtype).float().flatten())
    optimizer.train()
    pull(model, optimizer)
    optimizer.step()
    is_number(model, (START - GRADIENT) - GRADIENT)


@full_masters
def test_what_an_optimizers_own_list_holds_reaches_the_model(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters, KeepsItsOwnList)
    for _ in range(3):
        pull(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, number(model).to(dtype))
    torch.testing.assert_close(number(model), START - 3 * GRADIENT, rtol=0.0, atol=2.0**-5)


class TwoStep(SGD):
    """As SAM is: climbs, and comes back before it steps."""

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb."""
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad * (0.5 / norm))

    def second_step(self) -> None:
        """Come back and step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.step()


@full_masters
@pytest.mark.parametrize("overflow", [False, True])
def test_two_steps_move_by_the_second_gradient_or_not_at_all_where_the_first_overflowed(
    dtype: torch.dtype, masters: Any, overflow: bool
) -> None:
    model, optimizer = begin(dtype, masters, lambda parameters: TwoStep(parameters, lr=1.0))
    pull(model, optimizer, times=float("inf") if overflow else 1.0)
    optimizer.first_step()
    optimizer.zero_grad()
    pull(model, optimizer)
    optimizer.second_step()
    expected = START if overflow else START - GRADIENT
    model(GRADIENT)
    assert torch.equal(model.weight, expected.to(dtype))
    is_number(model, expected)
