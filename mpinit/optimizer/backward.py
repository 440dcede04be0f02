"""A scaled backward pass: gradients set aside before it, unscaled, checked and added up after it."""

from __future__ import annotations

from itertools import repeat
from operator import is_, is_not
from typing import Any, final

import torch

from ..basics.gradients import add_, are_plain
from ..distributed.sharding import is_distributed, is_sharded
from ..scaling.scaled_loss import Done, TakesPart
from ..scaling.scaler import LossScaler
from ..torch_internals.columns import grads_of, have_grads
from ..torch_internals.devices import is_read_freely
from .gradient_cycle import GradientCycle, Kept, any_of
from .observers import Observer
from .overflow_log import OverflowLog
from .parameter_groups import ParameterGroups
from .unscaling import any_nonzero, unscale_, unscale_and_check_


@final
class BackwardPass(TakesPart):
    """One optimizer's part in scaled backward passes.

    Args:
        groups: its parameters.
        cycle: the state of its gradients.
        observers: who is told of them.
        overflows: where an overflow is recorded.
    """

    def __init__(
        self, groups: ParameterGroups, cycle: GradientCycle, observers: list[Observer], overflows: OverflowLog
    ) -> None:
        self._groups = groups
        self._cycle = cycle
        self._observers = observers
        self._overflows = overflows
        self._left_to_ranks: set[int] = set()
        self._scaled_by: LossScaler | None = None
        self._inverse: torch.Tensor | None = None

    @property
    def last_scaling(self) -> tuple[LossScaler | None, float | None]:
        """What scaled the last loss whose gradients were checked, and by how much; waits for the device."""
        return self._scaled_by, None if self._inverse is None else 1.0 / float(self._inverse)

    @property
    def ranks_may_differ(self) -> bool:
        """Whether there are other processes."""
        return is_distributed()

    # -- before -------------------------------------------------------------------------------------------------

    def before_backward(self, block: object, scaler: LossScaler) -> None:
        """Set gradients aside, unless nothing is going to be unscaled and autograd may add to them in place."""
        groups, cycle = self._groups, self._cycle
        if cycle.is_open:
            raise RuntimeError(
                "mpinit.scale_loss was entered inside another block for the same optimizer, whose gradients are still "
                "scaled: close the outer block first, or add the losses up and call backward() once"
            )
        self.abandon_backward()
        groups.refresh()
        cycle.check_unscaled("mpinit.scale_loss was entered", groups.model_params())
        if scaler.is_identity and groups.store.adds_up_natively():
            groups.copies.look_at_masters_gradients()
            groups.store.arrivals.hold_back(block)
            return
        kept: Kept = [*groups.copies.look_at_gradients(), *grads_of(groups.plain)]
        any_left = any(map(is_not, kept, repeat(None)))
        self._forget_old_overflow(kept, any_left)
        self._left_to_ranks.clear()
        cycle.open(block, kept)
        if any_left:
            try:
                self._put_back([None] * len(kept))
                if is_distributed():
                    self._leave_to_ranks(kept, scaler)
            except BaseException:
                self.abandon_backward()
                raise

    def _forget_old_overflow(self, kept: Kept, any_left: bool) -> None:
        """Gradients may have been cleared by hand, gone or all 0, and an overflow with them; clipped ones were not."""
        cycle = self._cycle
        if not any_left:
            cycle.forget_overflow()
        found_inf = cycle.found_inf
        if found_inf is None or (is_read_freely(found_inf.device) and found_inf.item() == 0):
            return
        left = [gradient for gradient in kept if gradient is not None]
        cycle.found_inf = torch.minimum(found_inf, any_nonzero(left, found_inf.device))

    @torch.no_grad()
    def _leave_to_ranks(self, kept: Kept, scaler: LossScaler) -> None:
        """Let autograd accumulate onto what is there, scaled again.

        DistributedDataParallel averages what a parameter holds after accumulation. What was set aside in the meantime
        would miss that where it comes from ``no_sync()``, and its memory may be DDP's bucket.
        """
        weights: list[Any] = [*self._groups.copies.weights, *self._groups.plain]
        for index, (weight, gradient) in enumerate(zip(weights, kept, strict=True)):
            if gradient is not None and not is_sharded(gradient):
                weight.grad = scaler.scale(gradient).to(weight.dtype)
                self._left_to_ranks.add(index)

    # -- after --------------------------------------------------------------------------------------------------

    def after_backward(self, scaler: LossScaler, done: Done | None = None) -> torch.Tensor | None:
        """Unscale, check and add up; a parameter of two optimizers has its gradient unscaled once."""
        groups, cycle = self._groups, self._cycle
        if not groups.is_as_seen():
            raise RuntimeError(
                "optimizer.param_groups was changed inside `with mpinit.scale_loss(...)`, where the gradients are "
                "still scaled: move the change before or after the with-block. All gradients were cleared"
            )
        copies, store = groups.copies, groups.store
        arrived = grads_of(copies.weights)
        cycle.saw_backward(any(map(is_not, arrived, repeat(None))) or have_grads(groups.plain))
        usual = not arrived or store.are_plain(copies, arrived, scaler.device)
        fresh = arrived if usual else store.as_held(arrived)
        kept = cycle.close()
        if kept is None:
            # Nothing was scaled.
            copies.put_gradients(fresh, weights_have_them=usual or all(map(is_, fresh, arrived)))
            store.arrivals.go_on(len(copies.pairs))
            return None
        plain = grads_of(groups.plain)
        usual = usual and (not plain or are_plain(plain, scaler.device))
        fresh = [*fresh, *(plain if usual else map(_coalesced, plain))]
        found_inf = self._unscale(_present(fresh), scaler, usual, done)
        unscaled = fresh
        if any(map(is_not, kept, repeat(None))):
            fresh = _sum([None if i in self._left_to_ranks else gradient for i, gradient in enumerate(kept)], fresh)
            usual = False
        self._put_back(fresh, where_they_came=usual)
        if done is not None:
            for total, gradient in zip(fresh, unscaled, strict=True):
                done.setdefault(id(total), gradient)
        cycle.note(found_inf)
        return found_inf

    def inverse_scale(self, scaler: LossScaler) -> torch.Tensor:
        """What gradients are about to be multiplied by, of which :attr:`last_scaling` knows from here on."""
        self._scaled_by, self._inverse = scaler, scaler.inverse_scale()
        return self._inverse

    def tell_of_backward(self, loss: torch.Tensor, scaler: LossScaler, overflowed: bool) -> str | None:
        """Tell the observers; take an overflow down."""
        for observer in self._observers:
            observer.backward_ended(loss, scaler)
        if not overflowed:
            return None
        worst = self._overflows.write(scaler, scaler.loss_scale(), loss).worst()
        return f"{worst[0].name}, {worst[0].share:.0%} of it inf or nan" if worst else None

    def _unscale(
        self, fresh: list[torch.Tensor], scaler: LossScaler, plain: bool, done: Done | None
    ) -> torch.Tensor | None:
        # What has just arrived: what was kept of earlier passes has been checked then.
        shared = _present([done[id(total)] for total in fresh if id(total) in done]) if done else []
        if done:
            fresh = [gradient for gradient in fresh if id(gradient) not in done]
        if scaler.rule.dynamic:
            inverse = self.inverse_scale(scaler)
            found_inf = unscale_and_check_(fresh, inverse, plain or None)
            if not shared:
                return found_inf
            # Unscaled already, and checked together with others that are not this optimizer's.
            return any_of([found_inf, unscale_and_check_(shared, torch.ones_like(inverse))])
        if not scaler.is_identity:
            unscale_(fresh, scaler.inverse_scale())
        return None

    def _put_back(self, total: Kept, where_they_came: bool = False) -> None:
        count = len(self._groups.copies.pairs)
        self._groups.copies.put_gradients(total[:count], weights_have_them=where_they_came)
        for parameter, gradient in zip(self._groups.plain, total[count:], strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def abandon_backward(self) -> None:
        """Put back what was set aside; where nothing was, what ``backward()`` has added stays, as in plain torch."""
        kept = self._cycle.close()
        if kept is not None:
            self._put_back(kept)
        self._groups.store.arrivals.stop_waiting()

    def start_over(self) -> None:
        """Drop every gradient."""
        self.clear()
        self._cycle.close()
        self._groups.store.arrivals.stop_waiting()

    def update_later(self, scaler: LossScaler) -> None:
        """At the next step."""
        self._cycle.update_later(scaler)

    def clear(self) -> None:
        """Drop every gradient of the cycle: what torch's own ``zero_grad()`` does, in one go for pairs."""
        self._groups.refresh()
        for parameter in self._groups.plain:
            parameter.grad = None
        self._groups.copies.put_gradients([None] * len(self._groups.copies.pairs))
        self._cycle.cleared()


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
