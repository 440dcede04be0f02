"""A step in as many parts as the masters and the states are put together in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from ..basics.patching import Undo, UndoStack
from ..masters.two_copies import TwoCopies
from .parameter_groups import ParameterGroups

Closure = Callable[[], Any]


def in_parts(
    groups: ParameterGroups, rounds_itself: bool, copies: TwoCopies | None = None
) -> AbstractContextManager[Iterator[None]]:
    """Around an optimizer's steps: iterate over the inside, one step an iteration, on float32 masters and states.

    Args:
        groups: the optimizer's parameters.
        rounds_itself: the step inside rounds the masters into the weights.
        copies: those of its pairs that have gradients. Default: all of them.
    """
    masters = groups.store.stepping(groups.optimizer, copies or groups.copies, rounds_itself)
    return groups.store.states.stepping(masters, groups.optimizer, groups.holders)


def step_with_closure(groups: ParameterGroups, step: Callable[[Closure | None], Any], evaluate: Closure) -> Any:
    """Run an optimizer's step that evaluates a closure; in parts once, before the first."""
    if not groups.store.states.steps_in_parts:
        return groups.store.step_with_closure(groups.optimizer, groups.copies, step, evaluate)
    with torch.enable_grad():
        loss = evaluate()
    groups.copies.look_at_weights()
    with in_parts(groups, rounds_itself=False) as parts:
        for _ in parts:
            step(None)
    return loss


def show_states(groups: ParameterGroups) -> Undo:
    """Let state dicts hold ordinary tensors, and bring those that are loaded into the form between steps.

    The undo gives the optimizer its states back.
    """
    states = groups.store.states

    def put_in_form(optimizer: Optimizer) -> None:
        states.put_in_form(groups.optimizer, groups.holders())

    with UndoStack() as undos:
        undos.push(lambda: states.give_back(groups.holders()))
        for holder in groups.holders():
            # Wrappers that were never initialised as optimizers have no hooks.
            if hasattr(holder, "_optimizer_state_dict_post_hooks"):
                undos.push(holder.register_state_dict_post_hook(lambda _, state: states.shown(state)).remove)
                undos.push(holder.register_load_state_dict_post_hook(put_in_form).remove)
    return undos.unwind
