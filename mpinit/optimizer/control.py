"""Optimizers: puts float32 masters into the parameter groups, and takes gradients through a backward pass.

The optimizer stays the object it was; what changes are entries of its parameter groups and a few of its methods.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..basics.gradients import add_, are_plain
from ..distributed.sharding import is_distributed, is_sharded
from ..masters.full import FullMasters
from ..plan import Masters, Plan
from ..scaling.scaler import LossScaler
from .state import move_state, stepped_unsoundly
from .unscaling import any_nonzero, unscale_, unscale_and_check_

Kept = list[torch.Tensor | None]


class OptimizerControl:
    """What mpinit keeps for one optimizer: its masters, and whether its gradients are sound.

    Args:
        optimizer: the optimizer, changed in place.
        plan: what to do.
        store: where its masters live.
        targets: the dtypes that parameters are about to be cast to.
    """

    def __init__(
        self, optimizer: Optimizer, plan: Plan, store: FullMasters, targets: Mapping[torch.Tensor, torch.dtype]
    ) -> None:
        self.optimizer = optimizer
        self.plan = plan
        self.store = store
        self.targets: Mapping[torch.Tensor, torch.dtype] = targets
        self.found_inf: torch.Tensor | None = None
        self.scalers: list[LossScaler] = []
        self.pending: list[LossScaler] = []
        self.saw_scale_loss = False
        # Gradients set aside while a scaled backward pass runs.
        self.aside: Kept | None = None
        self._plain: list[nn.Parameter] = []
        self._left_to_ranks: set[int] = set()
        self._waiting: list[nn.Parameter] = []
        self._groups_seen: list[tuple[dict[str, Any], int]] = []
        # Groups that must not be stepped by a fused kernel.
        self.unsound: list[dict[str, Any]] = []

    # -- parameter groups ---------------------------------------------------------------------------------------

    def put_masters(self) -> None:
        """Replace every trainable 16-bit parameter in the groups by its master, its state carried over."""
        for group in self.optimizer.param_groups:
            self._put_masters_in(group)
        self._look_at_groups()

    def _put_masters_in(self, group: dict[str, Any]) -> None:
        for index, parameter in enumerate(group["params"]):
            if self._wants_master(parameter):
                known = self.store.pair_of(parameter)
                master = known.master_param if known is not None else self.store.add(parameter)
                group["params"][index] = master
                move_state(self.optimizer, parameter, master, torch.float32)

    def _wants_master(self, parameter: torch.Tensor) -> bool:
        if self.plan.masters is Masters.NONE or not parameter.requires_grad:
            return False
        return is_lower_precision(self.targets.get(parameter, parameter.dtype))

    def restore_parameters(self) -> None:
        """Put the model's own parameters back into the groups, and give up the masters."""
        pairs = list(self.store.pairs)
        weight_of = {id(pair.master_param): pair.model_param for pair in pairs}
        for pair in reversed(pairs):
            self.store.remove(pair)
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                weight = weight_of.get(id(parameter))
                if weight is not None:
                    group["params"][index] = weight
                    move_state(self.optimizer, parameter, weight, weight.dtype)

    def refresh(self) -> None:
        """Notice changed groups, and parameters that have become trainable; cheap where nothing changed."""
        groups, seen = self.optimizer.param_groups, self._groups_seen
        same = len(groups) == len(seen) and all(
            group is known and len(group["params"]) == count for group, (known, count) in zip(groups, seen, strict=True)
        )
        if not same or any(parameter.requires_grad for parameter in self._waiting):
            self.put_masters()

    def take_in_new_group(self) -> None:
        """Put masters into the group that was just added.

        Raises:
            ValueError: it names a weight again whose master is in another group; the group is taken out again.
        """
        groups = self.optimizer.param_groups
        if any(self.store.pair_of(parameter) is not None for parameter in groups[-1]["params"]):
            groups.pop()
            raise ValueError("some parameters appear in more than one parameter group; the group was not added")
        self.put_masters()

    def _look_at_groups(self) -> None:
        groups = self.optimizer.param_groups
        self._groups_seen = [(group, len(group["params"])) for group in groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        self.unsound = stepped_unsoundly(self.optimizer, self.targets)
        present = {id(parameter) for parameter in parameters}
        for pair in list(self.store.pairs):
            if id(pair.master_param) not in present:
                self.store.release(pair)
        self._plain = [p for p in parameters if self.store.pair_of(p) is None]
        waits = self.plan.masters is not Masters.NONE
        # While initialize runs, the targets say what the weights are about to become.
        becomes = [(p, self.targets.get(p, p.dtype)) for p in self._plain if waits and not p.requires_grad]
        self._waiting = [parameter for parameter, dtype in becomes if is_lower_precision(dtype)]

    # -- a backward pass ----------------------------------------------------------------------------------------

    def check_no_block_is_open(self) -> None:
        """Raise a RuntimeError inside another block with a scaled loss of this optimizer."""
        if self.aside is not None:
            raise RuntimeError(
                "mpinit.scale_loss was entered inside another block for the same optimizer, whose gradients are still "
                "scaled: close the outer block first, or add the losses up and call backward() once"
            )

    def before_backward(self, scaler: LossScaler) -> Kept | None:
        """Take the gradients accumulated so far out of the way of a backward pass.

        Returns:
            Them, for :meth:`after_backward` or :meth:`abandon_backward`; None where autograd may add to them in place
            because nothing is going to be unscaled.
        """
        self.refresh()
        self.store.check_gradient_dtype()
        if scaler.is_identity and self.store.accumulates_natively:
            self.store.relink()
            return None
        kept: Kept = [*self.store.held_gradients(), *(parameter.grad for parameter in self._plain)]
        any_left = any(map(is_not, kept, repeat(None)))
        self._forget_old_overflow(kept, any_left)
        self._left_to_ranks.clear()
        if any_left:
            try:
                self._put_back([None] * len(kept))
                if is_distributed():
                    self._leave_to_ranks(kept, scaler)
            except BaseException:
                self._put_back(kept)
                raise
        self.aside = kept
        return kept

    @torch.no_grad()
    def _leave_to_ranks(self, kept: Kept, scaler: LossScaler) -> None:
        """Let autograd accumulate onto what is there, scaled again.

        DistributedDataParallel averages what a parameter holds after accumulation. What was set aside in the meantime
        would miss that where it comes from ``no_sync()``, and its memory may be DDP's bucket.
        """
        weights = [*(pair.model_param for pair in self.store.pairs), *self._plain]
        for index, (weight, gradient) in enumerate(zip(weights, kept, strict=True)):
            if gradient is not None and not is_sharded(gradient):
                weight.grad = scaler.scale(gradient).to(weight.dtype)
                self._left_to_ranks.add(index)

    def _forget_old_overflow(self, kept: Kept, any_left: bool) -> None:
        """Gradients may have been cleared by hand, gone or all 0, and an overflow with them; clipped ones were not."""
        if not any_left:
            self.found_inf = None
        if self.found_inf is None or (self.found_inf.device.type == "cpu" and self.found_inf.item() == 0):
            return
        left = [gradient for gradient in kept if gradient is not None]
        self.found_inf = torch.minimum(self.found_inf, any_nonzero(left, self.found_inf.device))

    def after_backward(
        self, kept: Kept | None, scaler: LossScaler, done: dict[int, torch.Tensor | None] | None = None
    ) -> torch.Tensor | None:
        """Unscale and check what the backward pass left, and add it to what was accumulated before.

        Args:
            kept: what :meth:`before_backward` returned.
            scaler: what the loss was scaled by.
            done: where several optimizers take part: gradients that are done already, by id, with the outcome of
                their check. A parameter of two optimizers has its gradient unscaled once.

        Returns:
            The outcome of the check (0-dimensional, above 0 where inf or nan was found), or None where nothing was.
        """
        self.saw_scale_loss = True
        self.aside = None
        arrived: Kept = self.store.fresh_gradients()
        plain = [parameter.grad for parameter in self._plain]
        every_day = (not arrived or self.store.are_usual(arrived, scaler.device)) and (
            not plain or are_plain(plain, scaler.device)
        )
        fresh = arrived if every_day else self.store.ready(arrived)
        if kept is None:
            self.store.put_gradients(fresh, weights_have_them=every_day)
            return None
        fresh = [*fresh, *(plain if every_day else map(_coalesced, plain))]
        found_inf = self._unscale(_present(fresh), scaler, every_day, done)
        if any(map(is_not, kept, repeat(None))):
            fresh = _sum([None if i in self._left_to_ranks else gradient for i, gradient in enumerate(kept)], fresh)
            every_day = False
        self._put_back(fresh, where_they_came=every_day)
        if done is not None:
            done.update((id(gradient), found_inf) for gradient in _present(fresh))
        self.found_inf = _any_of([self.found_inf, found_inf])
        return found_inf

    def _unscale(
        self, fresh: list[torch.Tensor], scaler: LossScaler, plain: bool, done: dict[int, torch.Tensor | None] | None
    ) -> torch.Tensor | None:
        shared = []
        if done:
            shared = [done[id(gradient)] for gradient in fresh if id(gradient) in done]
            fresh = [gradient for gradient in fresh if id(gradient) not in done]
        if scaler.rule.dynamic:
            return _any_of([unscale_and_check_(fresh, scaler.inverse_scale(), plain or None), *shared])
        if not scaler.is_identity:
            unscale_(fresh, scaler.inverse_scale())
        return None

    def _put_back(self, total: Kept, where_they_came: bool = False) -> None:
        count = len(self.store.pairs)
        self.store.put_gradients(total[:count], weights_have_them=where_they_came)
        for parameter, gradient in zip(self._plain, total[count:], strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def abandon_backward(self, kept: Kept | None) -> None:
        """After an exception: put back what was there before the backward pass, where it was taken away."""
        self.aside = None
        if kept is None:
            self.store.relink()
        else:
            self._put_back(kept)

    def gradient_holders(self) -> Iterator[nn.Parameter]:
        """The parameters whose ``.grad`` the next step uses, in the groups' order."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                pair = self.store.pair_of(parameter)
                yield parameter if pair is None else self.store.gradient_holder(pair)

    def gradients_cleared(self, set_to_none: bool = True) -> None:
        """After ``zero_grad``: nothing is left of the cycle, an overflow in it included."""
        self.store.follow_cleared(set_to_none)
        self._forget_the_cycle()

    def clear_gradients(self) -> None:
        """Drop every gradient of the cycle: what torch's own ``zero_grad()`` does, in one go for pairs."""
        self.refresh()
        for parameter in self._plain:
            parameter.grad = None
        self.store.put_gradients([None] * len(self.store.pairs))
        self._forget_the_cycle()

    def _forget_the_cycle(self) -> None:
        self.found_inf = None
        self.saw_scale_loss = False
        if self.aside is not None:
            # Cleared inside of scale_loss, before its backward pass.
            self.aside[:] = [None] * len(self.aside)

    @property
    def scales(self) -> bool:
        """Whether any loss of this optimizer's session is scaled at all."""
        return not all(scaler.is_identity for scaler in self.scalers)

    def settle_pending_updates(self) -> None:
        """Move the scales whose update was put off until now."""
        for scaler in self.pending:
            scaler.update()
        self.pending.clear()


def _any_of(checks: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether any of several checks found inf or nan; None where none was made."""
    made = [check for check in checks if check is not None]
    return functools.reduce(torch.maximum, made) if made else None


def _present(gradients: Kept) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _coalesced(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _sum(kept: Kept, fresh: Kept) -> Kept:
    both = [(a, b) for a, b in zip(kept, fresh, strict=True) if a is not None and b is not None]
    if not both:
        return [b if a is None else a for a, b in zip(kept, fresh, strict=True)]
    sums = iter(add_([a for a, _ in both], [b for _, b in both]))
    return [
        next(sums) if a is not None and b is not None else (b if a is None else a)
        for a, b in zip(kept, fresh, strict=True)
    ]
