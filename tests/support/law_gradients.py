"""What the state machine of the law does to gradients, on either side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from law_run import SIDES, Kind, Pick, Run
from law_world import SIZES, read
from random_world import DTYPES, Poison
from reference_loop import BF16, F16, F32, stored

import mpinit

VALUES = (0.5, -1.0, 2.0)


def pattern(name: str, first: float) -> Any:
    """Numbers that every type holds exactly, and sums of a few of them."""
    return first * (1 + np.arange(SIZES[name]) % 3)


def exact(values: Any) -> bool:
    """Whether every type holds a gradient as it is."""
    return bool((stored(values, BF16) == values).all() and (stored(values, F16) == values).all())


# -- backward passes --------------------------------------------------------------------------------------------


def scaled_pass(run: Run, gradients: dict[str, Any], optimizers: list[int], poisoned: str | None = None) -> None:
    """A real backward pass that gives these gradients."""
    outputs = run.forward()
    loss: Any = 0.0
    for name, values in gradients.items():
        loss = loss + (outputs[name].float() * torch.tensor(values, dtype=torch.float32)).sum()
    if poisoned is not None:
        loss = loss + Poison.apply(run.world.weight(poisoned), np.inf)  # type: ignore[no-untyped-call]
    real = [run.optimizers[index] for index in optimizers]
    with mpinit.scale_loss(loss, real if len(real) > 1 else real[0]) as scaled:
        scaled.backward()
    for index in optimizers:
        run.looked_at(index)


def _reached(run: Run, pick: Pick) -> tuple[dict[str, Any], list[int]] | None:
    members = run.members()
    if not members:
        return None
    chosen = pick.some(members)
    owners = sorted({owner for name in chosen for owner in run.law.owners(name)})
    gradients = {name: pattern(name, pick.of(VALUES)) for name in chosen}
    for name, fresh in gradients.items():
        before = run.number(name).gradient
        if before is not None and not exact(np.where(np.isfinite(before), before, 0.0) + fresh):
            run.clear_all()
    return gradients, owners


def _and_frozen(run: Run, gradients: dict[str, Any]) -> dict[str, Any]:
    # The loss does not know who is frozen.
    more = {name: pattern(name, 1.0) for name, number in run.law.numbers.items() if number.frozen}
    return gradients | more


def backward(run: Run, pick: Pick) -> None:
    """A backward pass under ``scale_loss``, for every optimizer that it reaches."""
    reached = _reached(run, pick)
    if reached is not None:
        scaled_pass(run, _and_frozen(run, reached[0]), reached[1])
        run.law.backward(*reached)


def overflow(run: Run, pick: Pick) -> None:
    """One with an inf in it."""
    reached = _reached(run, pick)
    if reached is None or run.setup.loss_scale != "dynamic":
        return
    gradients, owners = reached
    poisoned = pick.of(list(gradients))
    scaled_pass(run, gradients, owners, poisoned)
    gradients[poisoned][0] = np.inf
    run.law.backward(gradients, owners)


def stray(run: Run, pick: Pick) -> None:
    """A scaled loss reaches the weight of an optimizer that was not given: refused, or unscaled all the same."""
    run.calm()
    run.look()
    sole = [name for name in run.members() if len(run.law.owners(name)) == 1]
    mine = [name for name in sole if run.law.owners(name) == [0]]
    theirs = [name for name in sole if run.law.owners(name) == [1]]
    if not mine or not theirs:
        return
    run.clear_all()
    gradients = {pick.of(mine): 1.0, pick.of(theirs): 2.0}
    gradients = {name: pattern(name, first) for name, first in gradients.items()}
    try:
        scaled_pass(run, gradients, [0])
    except RuntimeError:
        _start_over(run)
        return
    run.law.backward(gradients, [0])
    _step_or_refuse(run, 1)


def joins_late(run: Run, pick: Pick) -> None:
    """A scaled loss reaches a weight that only then gets into the groups."""
    outside = [name for name, number in run.law.numbers.items() if not run.law.owners(name) and not number.frozen]
    members = [name for name in run.members() if run.law.owners(name) == [0]]
    if not outside or not members:
        return
    run.clear_all()
    name = pick.of(outside)
    gradients = {pick.of(members): 1.0, name: 2.0}
    gradients = {known: pattern(known, first) for known, first in gradients.items()}
    try:
        scaled_pass(run, gradients, [0])
        run.law.backward(gradients, [0])
        join(run, name, 0, pick.of((True, False)))
    except RuntimeError:
        _start_over(run)
        return
    _step_or_refuse(run, 0)


def join(run: Run, name: str, optimizer: int, added: bool) -> None:
    """A weight gets into an optimizer's groups."""
    real, weight = run.optimizers[optimizer], run.world.weight(name)
    if added:
        real.add_param_group({"params": [weight]})
        run.law.groups[optimizer].append([name])
    else:
        real.param_groups[0]["params"].append(weight)
        run.law.groups[optimizer][0].append(name)
    run.joined(name, optimizer)


def _step_or_refuse(run: Run, optimizer: int) -> None:
    steps = run.law.steps[optimizer]
    try:
        run.step(optimizer)
    except RuntimeError:
        assert run.law.steps[optimizer] == steps
        _start_over(run)


def _start_over(run: Run) -> None:
    run.clear_all()
    # Whether the scale moves for a pass that was refused is left open.
    if run.setup.loss_scale == "dynamic":
        state = mpinit.state_dict(run.optimizers[0])["loss_scaler0"]
        run.law.scaler.scale, run.law.scaler.unskipped = state["loss_scale"], state["unskipped"]
        run.law.scaler.noted = None


# -- by hand ----------------------------------------------------------------------------------------------------


def _at(run: Run, pick: Pick, side: str) -> Any:
    """A weight whose gradient is to be changed on this side; the other side's changes are seen first."""
    run.calm()
    names = [name for name in run.members() if not run.is_fresh(name)]
    if not names:
        return None
    number = run.number(pick.of(names))
    if number.pending not in (None, side):
        run.look()
    return number


def _types(run: Run, name: str, side: str) -> list[str]:
    number = run.number(name)
    if side == "weight" and number.has_master:
        return [F32, number.weight_type, F16 if number.weight_type == BF16 else BF16]
    return [number.stepped_type]


def _replace(run: Run, pick: Pick, side: str) -> None:
    number = _at(run, pick, side)
    if number is None:
        return
    values, parameter = pattern(number.name, pick.of(VALUES)), run.side(number.name, side)
    dtype = DTYPES[pick.of(_types(run, number.name, side))]
    parameter.grad = torch.tensor(values, dtype=dtype).view_as(parameter)
    number.set_gradient(values, side)


def _drop(run: Run, pick: Pick, side: str) -> None:
    number = _at(run, pick, side)
    if number is not None:
        run.side(number.name, side).grad = None
        number.set_gradient(None, side)


def _edit(run: Run, pick: Pick, side: str) -> None:
    number = _at(run, pick, side)
    if number is None or number.gradient is None:
        return
    gradient, factor = run.side(number.name, side).grad, pick.of((-1.0, 2.0, 0.0))
    if gradient is None or not exact(number.gradient * factor):
        assert gradient is not None, f"{side} gradient of {number.name} is not there to be edited"
        return
    gradient.mul_(factor)
    number.set_gradient(number.gradient * factor, side)


LOOKS = ("step", "scale_loss", "master_params", "clip_grad_norm_")


def conflict(run: Run, pick: Pick) -> None:
    """Both sides changed, differently: every look refuses that and names the parameter."""
    number = _at(run, pick, "group")
    if number is None or not number.has_master:
        return
    run.look()
    owner = run.law.owners(number.name)[0]
    weight, entry = run.world.weight(number.name), run.entry(number.name, owner)
    values = pattern(number.name, 0.125)
    theirs = pick.of((values * 2, None))
    if (number.gradient is None and theirs is None) or _are_one_of(number.gradient, values, theirs):
        return
    weight.grad = torch.tensor(values, dtype=weight.dtype).view_as(weight)
    entry.grad = None if theirs is None else torch.tensor(theirs, dtype=entry.dtype).view_as(entry)
    how, optimizer = pick.of(LOOKS), run.optimizers[owner]
    with pytest.raises(RuntimeError, match=rf"\b{number.name}\.weight\b"):
        if how == "step":
            optimizer.step()
        elif how == "scale_loss":
            with mpinit.scale_loss(torch.ones(()), optimizer):
                pass
        elif how == "master_params":
            list(mpinit.master_params(optimizer))
        else:
            mpinit.clip_grad_norm_(optimizer, 1.0)
    for other in run.law.owners(number.name):
        run.entry(number.name, other).grad = None
    weight.grad = number.gradient = None
    run.look()


def _are_one_of(gradient: Any, *others: Any) -> bool:
    return gradient is not None and any(other is not None and (gradient == other).all() for other in others)


# -- clearing and clipping --------------------------------------------------------------------------------------


def _zero_grad(run: Run, pick: Pick, to_none: bool) -> None:
    index = pick.of(range(len(run.optimizers)))
    if run.law.overflowed:
        run.clear_all()
    else:
        run.optimizers[index].zero_grad(set_to_none=to_none)
        run.law.clear(index, to_none)
        run.looked_at(index)


def _model_zero_grad(run: Run, pick: Pick, to_none: bool) -> None:
    run.calm()
    run.look()
    run.model.zero_grad(set_to_none=to_none)
    for number in run.law.numbers.values():
        if number.gradient is not None:
            number.set_gradient(None if to_none else np.zeros_like(number.gradient), "weight")


def _clip(run: Run, pick: Pick, how: str) -> None:
    """The norm of an optimizer's gradients is clipped; what is left is rounded to what every type holds."""
    run.calm()
    index = pick.of(range(len(run.optimizers)))
    if how in ("weights", "groups") or run.fresh_entries:
        run.look()
    names = [name for name in run.law.members(index) if not run.number(name).frozen]
    present = [name for name in names if run.number(name).gradient is not None]
    if not present:
        return
    before = {name: run.number(name).gradient for name in present}
    norm = np.sqrt(sum((gradient**2).sum() for gradient in before.values()))
    if norm == 0:
        return  # torch's own clipping of zeros in 16 bit divides 0 by 0
    limit, side = norm / 2, "group" if how == "groups" else "weight"
    optimizer = run.optimizers[index]
    parameters: dict[str, Iterable[Any]] = {
        "weights": [run.world.weight(name) for name in names],
        "groups": [parameter for group in optimizer.param_groups for parameter in group["params"]],
    }
    if how == "mpinit":
        returned = mpinit.clip_grad_norm_(optimizer, limit)
    else:
        given = mpinit.master_params(optimizer) if how == "master_params" else parameters[how]
        returned = torch.nn.utils.clip_grad_norm_(given, limit)
    np.testing.assert_allclose(returned.item(), norm, rtol=2.0**-6)
    run.looked_at(index)
    if how in ("mpinit", "master_params"):
        run.look()
    for name, gradient in before.items():
        real = (run.entry(name, index) if how == "groups" else run.world.weight(name)).grad
        assert real is not None, f"gradient of {name} was not there to be clipped"
        real.mul_(8).round_().div_(8)
        np.testing.assert_allclose(read(real), gradient / 2, rtol=2.0**-6, atol=2.0**-4)
        run.number(name).set_gradient(read(real), side)


GRADIENT_KINDS: dict[str, Kind] = {
    "backward": backward,
    "overflow": overflow,
    "stray": stray,
    "joins_late": joins_late,
    "gradient:conflict": conflict,
}
for _side in SIDES:
    GRADIENT_KINDS[f"gradient:replace:{_side}"] = lambda run, pick, side=_side: _replace(run, pick, side)
    GRADIENT_KINDS[f"gradient:none:{_side}"] = lambda run, pick, side=_side: _drop(run, pick, side)
    GRADIENT_KINDS[f"gradient:edit:{_side}"] = lambda run, pick, side=_side: _edit(run, pick, side)
for _none in (True, False):
    GRADIENT_KINDS[f"zero_grad:optimizer:{_none}"] = lambda run, pick, none=_none: _zero_grad(run, pick, none)
    GRADIENT_KINDS[f"zero_grad:model:{_none}"] = lambda run, pick, none=_none: _model_zero_grad(run, pick, none)
for _how in ("mpinit", "master_params", "weights", "groups"):
    GRADIENT_KINDS[f"clip:{_how}"] = lambda run, pick, how=_how: _clip(run, pick, how)
