"""An optimizer's gradients from one step to the next: whether they are scaled at the moment, and sound."""

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from ..distributed.sharding import is_sharded, local
from ..masters.masters import Masters
from ..scaling.scaler import LossScaler
from ..torch_internals.columns import are_plain, grads_of, have_grads
from ..torch_internals.one_pass import native
from ..torch_internals.running import computes_at_once, is_read_freely

# By the id of a gradient that another optimizer has unscaled in the same pass.
Done = set[int]

# Numbers of a gradient up to which a copy costs less time than one more call.
_SMALL: Final = 1 << 14


class Gradients:
    """The gradients of some parameters, which are ``weight.grad`` and nowhere else.

    They are scaled between :meth:`scale` and :meth:`unscale`, unscaled otherwise.

    Attributes:
        weights: the parameters, as they are by now: an optimizer's members, or those that no optimizer has.
        found_inf: what the checks of gradients since they were last cleared found: 0-dimensional, above 0 for inf or
            nan; None where none was made.
        is_agreed: whether that is what all ranks together found.
        scaled_by: what the gradients are scaled by now; None where they are not.
        was_reached: whether a scaled backward pass has left any since they were last cleared.
    """

    def __init__(self, weights: Sequence[nn.Parameter], masters: Masters) -> None:
        self.weights = weights
        self.found_inf: torch.Tensor | None = None
        self.is_agreed = False
        self.scaled_by: LossScaler | None = None
        self.was_reached = self._was_scaled = self._was_stepped = False
        self._used: weakref.ref[torch.Tensor] | None = None
        self._masters = masters
        self._block: weakref.ref[object] | None = None
        self._inverse: torch.Tensor | None = None
        # Of an overflow found before the block that is open: whether the gradients were finite again, clipped, say.
        self._is_hidden: torch.Tensor | None = None
        self._was_skipped_for = self._was_found_at_step = False

    def present(self) -> list[torch.Tensor]:
        return [gradient for gradient in grads_of(self.weights) if gradient is not None]

    @property
    def is_open(self) -> bool:
        """Whether a ``scale_loss`` block is open; one that was dropped without having ended is not."""
        return self._block is not None and self._block() is not None

    # -- around a backward pass -----------------------------------------------------------------------------------

    @torch.no_grad()
    def scale(self, block: object, scaler: LossScaler, done: Done) -> bool:
        """A block begins in which a scaled loss adds to the gradients: what is there is scaled, too.

        Returns:
            Whether there are none yet.
        """
        self._block = weakref.ref(block)
        self._was_scaled, self._was_stepped = True, False
        is_empty = not have_grads(self.weights)
        if is_empty:
            self.was_reached = False
            self.forget_overflow()
        if scaler.is_identity:
            return is_empty
        self.scaled_by = scaler
        if not is_empty:
            left = self.present()
            self._look_for_overflow(left)
            self._was_skipped_for = False
            with self._dropped_if_it_fails():
                factor = scaler.scale_now()
                self._multiply([gradient for gradient in left if id(gradient) not in done], factor)
            done.update(map(id, self.present()))
        return is_empty

    def scale_until_unscaled(self, scaler: LossScaler) -> None:
        """:meth:`scale` without a block: a GradScaler says when it is over."""
        self.scale(self, scaler, set())
        self._block = None

    def _multiply(self, gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
        narrow = [w for w in self.weights if w.grad is not None and w.grad_dtype is None and w.grad.dtype != w.dtype]
        unscale_(gradients, factor)
        for weight in narrow:
            # Ranks add up what lies here in the weight's own type.
            if weight.grad is not None and not is_sharded(weight):
                weight.grad = weight.grad.to(weight.dtype)

    def _look_for_overflow(self, left: Sequence[torch.Tensor]) -> None:
        """Gradients may have been cleared to 0, and an overflow with them; clipped ones were not.

        Where a step was skipped for it, it counts for as long as it is there.
        """
        found_inf = self.found_inf
        if found_inf is None or (is_read_freely(found_inf.device) and found_inf.item() == 0):
            return
        magnitude = largest(left, found_inf.device)
        self._is_hidden = magnitude.isfinite()
        remains = ~self._is_hidden if self._was_skipped_for else magnitude != 0
        self.found_inf = torch.minimum(found_inf, remains.float())

    @torch.no_grad()
    def unscale(self, scaler: LossScaler, done: Done) -> torch.Tensor | None:
        """The backward pass is over: unscale the gradients, and check them where the scale is dynamic.

        Returns:
            What the check found beside earlier overflows; None where there is nothing to find.
        """
        self._block = self.scaled_by = None
        self._was_scaled, self._was_stepped = True, False
        self.was_reached |= have_grads(self.weights)
        if scaler.is_identity:
            return None
        with self._dropped_if_it_fails():
            return self._unscale(scaler, done)

    def _unscale(self, scaler: LossScaler, done: Done) -> torch.Tensor | None:
        fresh = self._held()
        both = [gradient for gradient in fresh if id(gradient) in done] if done else []
        fresh = [gradient for gradient in fresh if id(gradient) not in done] if done else fresh
        done.update(map(id, fresh))
        self._inverse = scaler.inverse_scale()
        if not (scaler.rule.dynamic or scaler.rule.skips_nonfinite):
            unscale_(fresh, self._inverse)
            return None
        found_inf = unscale_and_check_(fresh, self._inverse)
        if both:
            # Unscaled together with others that are not this optimizer's, and checked once more for it alone.
            found_inf = any_of([found_inf, unscale_and_check_(both, torch.ones_like(self._inverse))])
        before, is_hidden, self._is_hidden = self.found_inf, self._is_hidden, None
        if before is not None and is_hidden is not None and found_inf is not None:
            # What gradients showed when the block began they show now, unless they were cleared in it.
            self.found_inf = before * is_hidden
        self.note(found_inf)
        if before is None or found_inf is None:
            return found_inf
        # What overflowed before is in the sums, and none of this loss's fault.
        return found_inf * (before == 0)

    @contextmanager
    def _dropped_if_it_fails(self) -> Iterator[None]:
        """Gradients of which some are scaled and others are not are of no use."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        for weight in self.weights:
            weight.grad = None
        self._block = self.scaled_by = None
        self.forget_overflow()

    def _held(self) -> list[torch.Tensor]:
        """The gradients in the type in which they are kept, from here on on the weights."""
        arrived = grads_of(self.weights)
        if are_plain(arrived, self.weights[0].device if self.weights else torch.device("cpu")):
            return [gradient for gradient in arrived if gradient is not None]
        held = self._masters.in_kept_dtype(arrived)
        for weight, before, now in zip(self.weights, arrived, held, strict=True):
            if now is not None and now is not before and weight.grad_dtype in (None, now.dtype):
                weight.grad = now
        return self.present()

    def last_scale(self) -> float | None:
        """What the gradients that were checked last had been scaled by. Waits for the device."""
        return None if self._inverse is None else 1.0 / float(self._inverse)

    # -- overflow -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self) -> None:
        """Look at gradients that no backward pass has checked, as those of a plain ``backward()``; a step begins."""
        if self.found_inf is None or self._was_found_at_step:
            left = [gradient.coalesce() if gradient.is_sparse else gradient for gradient in self.present()]
            if left and is_read_freely(left[0].device) and are_plain(left, left[0].device) and are_finite(left):
                self.found_inf = torch.zeros((), dtype=torch.float32, device=left[0].device)
            else:
                # Times 1, because torch's own check multiplies.
                self.found_inf = (
                    unscale_and_check_(left, torch.ones((), dtype=torch.float32, device=left[0].device))
                    if left
                    else None
                )
            self.is_agreed, self._was_found_at_step = False, True

    def note(self, found_inf: torch.Tensor | None) -> None:
        if self._was_found_at_step:
            self.found_inf, self._was_found_at_step = None, False
        self.found_inf = any_of([self.found_inf, found_inf])
        self.is_agreed = False

    def agree(self, found_inf: torch.Tensor) -> None:
        """Take what all ranks together found."""
        self.found_inf, self.is_agreed = found_inf, True

    def forget_overflow(self) -> None:
        """The gradients that overflowed are gone."""
        self.found_inf, self.is_agreed, self._was_skipped_for = None, False, False
        self._was_found_at_step = False

    def forget_skipped_overflow(self) -> None:
        """A loss of this optimizer's is about to be scaled, whose fault is what overflows from here on."""
        if self._was_skipped_for:
            self.forget_overflow()

    @torch.no_grad()
    def overflowed(self) -> bool:
        """Whether the gradients that are there overflowed. Waits for the device."""
        if self.found_inf is None or self.found_inf.item() == 0:
            return False
        if self.is_agreed:
            return True
        left = self.present()
        # Cleared since, or set to 0: only looked at where there was an overflow.
        if not left or largest(left, self.found_inf.device).item() == 0 or self._are_others(left):
            self.forget_overflow()
            return False
        return True

    @torch.no_grad()
    def take_over(self, loose: "Gradients") -> None:
        """These were among the gradients of parameters that no optimizer has, until now."""
        self._was_scaled = loose._was_scaled
        left = self._held()
        if loose.found_inf is not None and left:
            self.note(unscale_and_check_(left, torch.ones_like(loose.found_inf)))

    def _are_others(self, left: list[torch.Tensor]) -> bool:
        """Whether a step was skipped since, and these are finite: a plain backward pass has left them."""
        if not self._was_skipped_for:
            return False
        found_inf = unscale_and_check_(left, torch.ones((), dtype=torch.float32, device=left[0].device))
        return found_inf is None or found_inf.item() == 0

    def stepped(self) -> None:
        """A step has used the gradients, or was skipped because of them; another one may use them again."""
        left = next((weight.grad for weight in self.weights if weight.grad is not None), None)
        self._used = None if left is None else weakref.ref(left)
        self._was_stepped = self._was_skipped_for = True

    def came_through_scaling(self) -> bool:
        """Whether the gradients that are there have been unscaled, and are not new since the last step."""
        if not self._was_stepped:
            return self._was_scaled
        used = None if self._used is None else self._used()
        return self._was_scaled and used is not None and any(used is weight.grad for weight in self.weights)

    # -- refusing -------------------------------------------------------------------------------------------------

    def check_closed(self, what: str, instead: str) -> None:
        """Refuse what must not happen while gradients are scaled."""
        if self.is_open and self.scaled_by is not None:
            raise RuntimeError(
                f"{what} was called inside `with mpinit.scale_loss(...)`, where the gradients are still scaled: "
                f"{instead}"
            )
        if self.scaled_by is None:
            return
        if not self.present():
            self.scaled_by = None
        elif self._block is not None:
            # A block that was dropped without having ended.
            self.unscale(self.scaled_by, set())
        else:
            raise RuntimeError(
                f"{what} was called, but the gradients are still scaled, by a GradScaler: call scaler.step(optimizer), "
                "or scaler.unscale_(optimizer) first"
            )

    def give_up(self) -> None:
        """The session ends: gradients that are still scaled are unscaled."""
        if self.scaled_by is not None:
            self.unscale(self.scaled_by, set())


def any_of(checks: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether any of several checks found inf or nan; None where none was made."""
    made = [check for check in checks if check is not None]
    return functools.reduce(torch.maximum, made) if made else None


# -- lists of gradients ------------------------------------------------------------------------------------------------


def dense_view(gradient: torch.Tensor) -> torch.Tensor:
    """The real, dense tensor that holds a gradient's numbers, sharing its memory.

    A sparse gradient gives its values (it must be coalesced), a complex one its real view, a DTensor its local part.
    """
    gradient = local(gradient)
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def unscale_and_check_(gradients: list[torch.Tensor], inverse_scale: torch.Tensor) -> torch.Tensor | None:
    """Multiply every gradient in place by ``inverse_scale`` and look for inf and nan, in one pass over memory.

    Returns:
        A 0-dimensional float32 tensor on ``inverse_scale``'s device, 1 where anything was inf or nan and 0
        otherwise; where gradients are sharded, for the parts of this process. None without gradients.
    """
    if not gradients:
        return None
    if are_plain(gradients, inverse_scale.device):
        found_inf = torch.zeros((), dtype=torch.float32, device=inverse_scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)
        return found_inf
    return _unscale_and_check_any_(gradients, inverse_scale)


def _unscale_and_check_any_(gradients: Iterable[torch.Tensor], inverse_scale: torch.Tensor) -> torch.Tensor:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        dense = dense_view(gradient)
        groups.setdefault((dense.device, dense.dtype), []).append(dense)
    found = {device: torch.zeros((), dtype=torch.float32, device=device) for device, _ in groups}
    for (device, dtype), tensors in groups.items():
        if dtype == torch.float64:
            _unscale_double_(tensors, inverse_scale.to(device), found[device])
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found[device], inverse_scale.to(device))
    return _combine(list(found.values()), inverse_scale.device)


def _unscale_double_(tensors: list[torch.Tensor], inverse_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """float64 gradients by hand: the fused check takes them through float32 and would call large numbers inf."""
    torch._foreach_mul_(tensors, inverse_scale.double())
    for tensor in tensors:
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(tensor)).any().float()))


def are_finite(gradients: list[torch.Tensor]) -> bool:
    """Whether numbers are finite, by a pass over memory that only reads; waits for the device.

    Without native code the sums of gradients are looked at, which are finite only where all numbers are. The reverse is
    not so: then False says nothing.
    """
    if (code := native()) is not None and computes_at_once():
        found = code.are_finite(gradients)
        if found is not None:
            return bool(found)
    small = [gradient for gradient in gradients if gradient.numel() <= _SMALL]
    sums = [gradient.sum() for gradient in gradients if gradient.numel() > _SMALL]
    if small:
        sums.append(torch._C._nn.flatten_dense_tensors(small).sum())
    return all(math.isfinite(each.item()) for each in sums)


def largest(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest magnitude in the gradients: 0-dimensional float32, nan where one is; of shards, in this process."""
    dense = [dense_view(gradient) for gradient in gradients]
    return _combine([(each.abs().max() if each.numel() else each.sum()).float() for each in dense], device)


def _combine(found: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    combined = found[0].to(device)
    for other in found[1:]:
        combined = torch.maximum(combined, other.to(device))
    return combined


def unscale_(gradients: Sequence[torch.Tensor], inverse_scale: torch.Tensor) -> None:
    """Multiply every gradient in place by ``inverse_scale``, without looking at it."""
    if are_plain(gradients, inverse_scale.device):
        torch._foreach_mul_(list(gradients), inverse_scale)
        return
    for gradient in gradients:
        dense = dense_view(gradient)
        dense.mul_(inverse_scale.to(dense.device))
