"""What the state machine of the law does to weights and masters, between steps and in hooks; also steps themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from law_numbers import Number
from law_run import Kind, Pick, Run
from law_world import SIZES

VALUES = (0.75, -1.5, 3.0)
# Which elements are written to: of the long weight those of one block, of two, or all.
PLACES: dict[str, tuple[slice, ...]] = {
    name: (slice(0, 1), slice(size - 1, size), slice(size // 2 - 1, size // 2 + 1), slice(0, size))
    for name, size in SIZES.items()
}


def _ready(run: Run, pick: Pick, side: str) -> Number | None:
    """A weight to be written to on this side; what was written on the other side is seen first."""
    number = run.number(pick.of(list(run.law.numbers)))
    if side == "group" and (not run.law.owners(number.name) or run.is_fresh(number.name)):
        return None
    if side == "group" and number.split and number.has_master:
        return None  # between steps there is no master to write to
    if number.stale == side:
        run.look()
    if side == "group":
        run.settle()
    return number


def _write_through(run: Run, pick: Pick, side: str, how: str) -> None:
    """Some elements get a value, by one of the ways there are."""
    number = _ready(run, pick, side)
    if number is None:
        return
    place, value = pick.of(PLACES[number.name]), pick.of(VALUES)
    parameter = run.side(number.name, side)
    held = number.weight if side == "weight" or not number.has_master else number.value
    new = held.copy()
    new[place] = value
    WRITES[how](parameter, place, value, new)
    _take_down(number, side, new)


def _take_down(number: Number, side: str, new: Any) -> None:
    if side == "weight" or not number.has_master:
        number.write(new)
    else:
        number.write_master(new)


@torch.no_grad()
def _copy(parameter: Any, place: slice, value: float, new: Any) -> None:
    parameter.copy_(_as(parameter, new))


@torch.no_grad()
def _element(parameter: Any, place: slice, value: float, new: Any) -> None:
    parameter[place] = value


def _data_copy(parameter: Any, place: slice, value: float, new: Any) -> None:
    parameter.data.copy_(_as(parameter, new))


def _data_element(parameter: Any, place: slice, value: float, new: Any) -> None:
    parameter.data[place].fill_(value)


def _data_assign(parameter: Any, place: slice, value: float, new: Any) -> None:
    parameter.data = _as(parameter, new)


def _numpy(parameter: Any, place: slice, value: float, new: Any) -> None:
    if parameter.dtype is torch.bfloat16:
        bits = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item()
        parameter.detach().view(torch.int16).numpy()[place] = bits
    else:
        parameter.detach().numpy()[place] = value


@torch.no_grad()
def _foreach(parameter: Any, place: slice, value: float, new: Any) -> None:
    torch._foreach_copy_([parameter], [_as(parameter, new)])


def _as(parameter: Any, new: Any) -> torch.Tensor:
    return torch.tensor(new, dtype=parameter.dtype).view_as(parameter)


WRITES: dict[str, Callable[[Any, slice, float, Any], None]] = {
    "copy": _copy,
    "element": _element,
    "data_copy": _data_copy,
    "data_element": _data_element,
    "data_assign": _data_assign,
    "numpy": _numpy,
    "foreach": _foreach,
}


def _halve(run: Run, pick: Pick, side: str) -> None:
    """Reads and writes: ``parameter.mul_(0.5)``."""
    number = _ready(run, pick, side)
    if number is not None:
        with torch.no_grad():
            run.side(number.name, side).mul_(0.5)
        held = number.weight if side == "weight" or not number.has_master else number.value
        _take_down(number, side, held * 0.5)


def _change_nothing(run: Run, pick: Pick, how: str) -> None:
    """Writes that change nothing, and reads."""
    number = _ready(run, pick, "weight")
    if number is None:
        return
    weight = run.world.weight(number.name)
    with torch.no_grad():
        if how == "mul_1":
            weight.mul_(1)
        elif how == "copy":
            weight.copy_(weight.clone())
        elif how == "data":
            weight.data.sum()
        elif how == "data_assign":
            weight.data = weight.data.clone()
        else:
            run.model.get_submodule(number.name).to(memory_format=torch.contiguous_format)
    if number.has_master:
        number.stale = "group"


def in_forward(run: Run, pick: Pick) -> None:
    """A forward hook writes to its module's weight: the forward at hand uses it."""
    number = _ready(run, pick, "weight")
    if number is None:
        return
    module, value = run.model.get_submodule(number.name), pick.of(VALUES)
    new = number.weight.copy()
    new[0] = value

    @torch.no_grad()
    def hook(module: Any, inputs: Any) -> None:
        module.weight[0] = value

    handle = module.register_forward_pre_hook(hook)
    number.write(new)
    try:
        run.forward()
    finally:
        handle.remove()
    number.stale = "group" if number.has_master else None


def shrink(run: Run, pick: Pick) -> None:
    """A second method of the optimizer's class writes to its parameters."""
    index = pick.of(range(len(run.optimizers)))
    numbers = [run.number(name) for name in run.law.members(index)]
    if run.setup.splits or run.fresh_entries:
        return
    run.look()
    run.settle()
    run.optimizers[index].shrink()
    for number in numbers:
        if number.has_master:
            number.write_master(number.value * 0.5)
        else:
            number.write(number.weight * 0.5)


# -- steps ------------------------------------------------------------------------------------------------------


def step(run: Run, pick: Pick) -> None:
    """One step."""
    run.step(pick.of(range(len(run.optimizers))))


def _step_with_hook(run: Run, pick: Pick, when: str, side: str) -> None:
    """A step whose hook writes to a weight or a master."""
    run.calm()
    run.look()
    run.forward()
    if side == "group":
        run.settle()
    index = pick.of(range(len(run.optimizers)))
    names = [name for name in run.law.members(index) if name in run.members()]
    if not names:
        return
    number = run.number(pick.of(names))
    if side == "group" and number.split and number.has_master:
        return
    parameter = run.world.weight(number.name) if side == "weight" else run.entry(number.name, index)
    place, value = pick.of(PLACES[number.name]), pick.of(VALUES)

    @torch.no_grad()
    def hook(*_: Any) -> None:
        parameter[place] = value

    def take_down() -> None:
        new = (number.weight if side == "weight" or not number.has_master else number.value).copy()
        new[place] = value
        _take_down(number, side, new)

    optimizer = run.optimizers[index]
    register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
    handle = register(hook)
    if when == "before":
        take_down()
    try:
        optimizer.step()
    finally:
        handle.remove()
    run.law.step(index)
    run.looked_at(index)
    if when == "after":
        take_down()
    run.settle()


WEIGHT_KINDS: dict[str, Kind] = {
    "step": step,
    "write:weight:in_forward": in_forward,
    "write:group:shrink": shrink,
}
for _side in ("weight", "group"):
    for _how in WRITES:
        WEIGHT_KINDS[f"write:{_side}:{_how}"] = lambda run, pick, s=_side, h=_how: _write_through(run, pick, s, h)
    WEIGHT_KINDS[f"write:{_side}:halve"] = lambda run, pick, s=_side: _halve(run, pick, s)
    for _when in ("before", "after"):
        WEIGHT_KINDS[f"hook:{_when}:{_side}"] = lambda run, pick, w=_when, s=_side: _step_with_hook(run, pick, w, s)
for _how in ("mul_1", "copy", "data", "data_assign", "memory_format"):
    WEIGHT_KINDS[f"nothing:{_how}"] = lambda run, pick, how=_how: _change_nothing(run, pick, how)
