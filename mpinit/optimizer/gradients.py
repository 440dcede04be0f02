"""The gradients of some parameters, and their state from one step to the next."""

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, Final, ParamSpec

import torch
from torch import nn

from ..basics import products
from ..basics.bulk import (
    are_alike,
    are_plain,
    are_same,
    grads_of,
    have_grads,
    in_fewer_tensors,
    some_of,
    versions_of,
)
from ..basics.running import reads_without_sync, without_gradients
from ..distributed.sharding import dense_views, is_distributed, is_sharded
from ..masters.masters import Masters
from ..masters.split import SplitMasters
from ..scaling.scaler import LossScaler
from . import gradient_state as states
from .gradient_state import EMPTY, GradientState, Marks, Phase

# Gradients that were scaled or unscaled already in the same pass, by id: two optimizers may have one parameter. The
# references keep other tensors from getting their ids. None: no other gradients are scaled or unscaled in this pass.
Done = dict[int, torch.Tensor] | None
P = ParamSpec("P")
# How many gradients are recorded: a few are enough, because a backward pass adds to all that its loss reaches, and
# clipping writes to all.
_SAMPLED: Final = 16


class Gradients:
    """The gradients of some parameters, each in ``weight.grad``, and their state.

    Attributes:
        weights: the parameters of an optimizer, or those that no optimizer has. The list is always the same object.
        state: whether the gradients are scaled, checked and used.
        are_sums: in a step with a closure, whether they contain gradients of backward passes before the step.
    """

    def __init__(self, weights: Sequence[nn.Parameter], masters: Masters) -> None:
        self.weights = weights
        self.state = EMPTY
        self.are_sums = False
        self._masters = masters
        self._inverse_scale: torch.Tensor | None = None

    def present(self) -> list[torch.Tensor]:
        """Return the gradients that are not None."""
        return [gradient for gradient in grads_of(self.weights) if gradient is not None]

    def apply(
        self, event: Callable[Concatenate[GradientState, P], GradientState], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Replace the state by that after an event of :data:`gradient_state.TABLE`."""
        self.state = event(self.state, *args, **kwargs)

    # -- around a backward pass -----------------------------------------------------------------------------------

    def widen(self) -> None:
        """Widen 16-bit gradients of split masters that another backward pass is about to add to.

        It is called before any gradients of the session are scaled, because it replaces gradients of other optimizers,
        too.
        """
        if have_grads(self.weights):
            self._masters.widen_unused_gradients(has_gradients=True)

    @without_gradients
    def scale(self, block: object | None, scaler: LossScaler, done: Done, is_own: bool = True) -> bool:
        """Multiply the present gradients by the scale, so that the gradients of a scaled loss can be added to them.

        Args:
            block: the ``scale_loss`` block that unscales them; None: a GradScaler unscales them.
            is_own: whether the loss is for this optimizer, and does not just reach its parameters.

        Returns:
            Whether there is no gradient yet.
        """
        state = self.state
        is_empty = not have_grads(self.weights)
        if is_empty:
            state, self.are_sums = EMPTY, False
        if scaler.is_identity:
            self.state = state
            return is_empty
        found_inf = hidden = None
        if not is_empty and not (is_own and state.phase in (Phase.USED, Phase.SKIPPED)):
            found_inf, hidden = _remaining_overflow(state, self.present())
        # A GradScaler's earlier loss may have scaled them, before the scale changed.
        before = state.scale if state.is_scaled else None
        if block is None:
            self.state = states.scaled_by_grad_scaler(state, scaler, found_inf, hidden)
        else:
            self.state = states.block_opened(state, scaler, block, found_inf, hidden)
        if not is_empty:
            with _dropped_on_error(self):
                factor = scaler.scale_now()
                _scale(self.weights, factor if before is None else factor / scaler.scale_now(before), done)
        return is_empty

    @without_gradients
    def unscale(self, scaler: LossScaler, done: Done, is_block: bool = True) -> torch.Tensor | None:
        """Unscale the gradients after a backward pass, and check them if the session skips steps.

        Args:
            is_block: whether a ``scale_loss`` block ends; otherwise a GradScaler unscales them.

        Returns:
            Whether this pass overflowed, as a 0-dimensional tensor; None without gradients or without a check.
        """
        state = self.state
        unscaled = states.block_closed if is_block else states.unscaled_by_grad_scaler
        has_gradients = have_grads(self.weights)
        if scaler.is_identity:
            if has_gradients or state.phase is not Phase.USED:
                self.state = unscaled(state, scaler, has_gradients=has_gradients)
            return None
        with _dropped_on_error(self):
            found_inf = self._unscale(scaler, done, has_gradients)
            earlier = state.found_inf
            before, hidden = earlier, state.hidden
            if before is not None and hidden is not None and found_inf is not None:
                # If gradients were inf or nan at the start of the block, this check has found them again, unless they
                # were cleared in it. If they had been made finite before the block, the earlier overflow still counts.
                before = before * hidden
            known = any_of([before, found_inf])
            marks, versions = _marks(known, self.weights) if has_gradients else ((), ())
            self.state = unscaled(state, scaler, known, marks, versions, has_gradients)
        if earlier is None or found_inf is None:
            return found_inf
        # After an earlier overflow the sums are inf or nan, too: that is no overflow of this loss.
        return found_inf * (earlier == 0)

    def _unscale(self, scaler: LossScaler, done: Done, has_gradients: bool) -> torch.Tensor | None:
        self._inverse_scale = inverse = scaler.inverse_scale(self.state.scale)
        is_checked = scaler.skips
        fresh = _in_kept_dtype(self.weights, self._masters)
        both = [gradient for gradient in fresh if id(gradient) in done] if done else []
        fresh = [gradient for gradient in fresh if id(gradient) not in done] if done else fresh
        if done is not None:
            done.update(zip(map(id, fresh), fresh, strict=True))
        if not is_checked:
            # Not by unscale_, which moves their versions: of two optimizers of a weight, the second sees a write then.
            unscale_and_check_(fresh, inverse)
            return None
        found_inf = unscale_and_check_(fresh, inverse)
        if both:
            # These were unscaled together with another optimizer's gradients, so they are checked again alone.
            found_inf = any_of([found_inf, unscale_and_check_(both, torch.ones_like(inverse))])
        return found_inf

    def drop(self) -> None:
        """Clear all gradients."""
        for weight in self.weights:
            weight.grad = None
        self.state = states.dropped(self.state)

    def last_scale(self) -> float | None:
        """Return the scale of the gradients that were unscaled last; reading it is a device sync."""
        return None if self._inverse_scale is None else 1.0 / float(self._inverse_scale)

    # -- at a step ------------------------------------------------------------------------------------------------

    @without_gradients
    def update_state(self) -> None:
        """Drop or repeat the last check if the gradients have been cleared or replaced since, without a device sync.

        - If there is no gradient any more, the overflow is dropped.
        - If a step was skipped for the overflow already, or no checked tensor is a gradient any more, the present
          gradients are checked instead.

        It is called only if ``state.checked`` is not empty: otherwise there was no overflow.
        """
        state = self.state
        found_inf = state.found_inf
        if found_inf is None or (reads_without_sync(found_inf.device) and found_inf.item() == 0):
            return
        if not have_grads(self.weights):
            self.state = states.cleared(state)
        elif state.phase is Phase.SKIPPED or _are_new(self.state.checked, self.weights):
            self.state = states.checked(state, _check_plain(self.present(), found_inf.device))

    @without_gradients
    def check(self) -> None:
        """Check the gradients that a step is about to use, in addition to the check after their backward pass.

        They may come from a plain ``backward()``, or clipping, a hook or a penalty may have written to them since. On a
        CPU all gradients are read. On other devices they are checked only if the version of one has changed, without a
        device sync.
        """
        before = self.state.found_inf
        is_read = before is not None and reads_without_sync(before.device)
        if is_read and before is not None and before.item() > 0:
            return
        present = self.present()
        if not present:
            return
        device = present[0].device
        is_read = reads_without_sync(device)
        if is_read:
            if are_finite(present):
                return
        elif before is not None and self._are_as_checked():
            return
        found_inf = _check_plain(present, device)
        if not is_read or found_inf.item() > 0:
            self.state = states.checked(self.state, any_of([before, found_inf]))

    def _are_as_checked(self) -> bool:
        """Return whether the gradients are those of the last check, with unchanged versions."""
        state, present = self.state, self.present()
        if len(state.versions) != len(present):
            return False
        known = [mark() for mark in state.checked]
        return are_same(known, present) and tuple(versions_of(present)) == state.versions

    def forget_check(self) -> None:
        """Drop the result of the last check: a later one, of the gradients of all ranks, counts."""
        self.state = self.state._replace(found_inf=None, checked=(), versions=())

    def decide(self, found_inf: torch.Tensor) -> None:
        """Replace the result of the last check by the verdict of all ranks."""
        marks, versions = _marks(found_inf, self.weights)
        self.state = states.agreed(self.state, found_inf)._replace(checked=marks, versions=versions)

    def are_decided(self) -> bool:
        """Return whether ranks have agreed on the present gradients."""
        return self.state.agreed and not (have_grads(self.weights) and _are_new(self.state.checked, self.weights))

    def were_dropped(self) -> bool:
        """Return whether the gradients of a loss were cleared without a step."""
        state = self.state
        if state.phase is not Phase.UNSCALED:
            return False
        if not have_grads(self.weights):
            return True
        found_inf = state.found_inf
        overflowed = found_inf is not None and reads_without_sync(found_inf.device) and found_inf.item() > 0
        return overflowed and largest(self.present(), self.weights[0].device).item() == 0

    def share(self, found_inf: torch.Tensor) -> None:
        """Count an overflow in the gradients of other optimizers as one of these gradients."""
        marks, versions = _marks(found_inf, self.weights)
        self.state = states.checked(self.state, found_inf)._replace(checked=marks, versions=versions)

    @torch.no_grad()
    def overflowed(self) -> bool:
        """Return whether the present gradients overflowed; reading that is a device sync."""
        state = self.state
        if state.found_inf is None or state.found_inf.item() == 0:
            return False
        if state.agreed:
            return True
        present = self.present()
        if not present or largest(present, state.found_inf.device).item() == 0:
            # Cleared, or set to 0.
            self.state = states.cleared(state)
            return False
        return True

    def stepped(self, in_kernel: bool = False) -> None:
        """Mark the gradients as used by a step; ``in_kernel``: its kernel skips by itself after an overflow."""
        self.state = states.stepped(self.state, _used(self.state, self.weights, in_kernel), in_kernel)
        self._mark_used()

    def skipped(self) -> None:
        """Mark the gradients as those that a step was skipped for."""
        self.state = states.skipped(self.state, _used(self.state, self.weights, keeps_check=True))
        self._mark_used()

    def _mark_used(self) -> None:
        if isinstance(self._masters, SplitMasters):
            self._masters.gradients_used()

    def came_through_scaling(self) -> bool:
        """Return whether the gradients are those of a scaled loss, whether a step has used them or not."""
        phase = self.state.phase
        if phase is Phase.USED or phase is Phase.SKIPPED:
            return self.state.scaler is not None and not _are_new(self.state.checked, self.weights)
        return phase is Phase.UNSCALED

    # -- refusals -------------------------------------------------------------------------------------------------

    def check_unscaled(self, what: str, instead: str) -> None:
        """Refuse to use gradients that are still scaled.

        Args:
            what: the call that would use them, for the message.
            instead: the advice of the message.

        Raises:
            RuntimeError: they are scaled.
        """
        if self.state.phase is not Phase.SCALED:
            return
        self.end_abandoned()
        states.read(self.state, what, instead, have_grads(self.weights))

    def end_abandoned(self) -> None:
        """Unscale the gradients if their ``scale_loss`` block was dropped without an exit."""
        if self.state.is_abandoned:
            self.end()

    @torch.no_grad()
    def adopt(self, unowned: "Gradients") -> None:
        """Continue the state of gradients that no optimizer had so far."""
        present = _in_kept_dtype(self.weights, self._masters)
        found_inf = unowned.state.found_inf
        if found_inf is not None and present:
            found_inf = _check_plain(present, found_inf.device)
        self.state = states.adopted(unowned.state, found_inf, bool(present))

    def end(self) -> None:
        """Unscale gradients that are still scaled."""
        if self.state.phase is Phase.SCALED and self.state.scaler is not None:
            self.unscale(self.state.scaler, None)

    def keep_in_dtype(self) -> None:
        """Convert the gradients to the dtype that a step uses."""
        _in_kept_dtype(self.weights, self._masters)


def begin_evaluations(gradients: Gradients) -> None:
    """Record whether a closure's loss is going to be added to gradients that no step was called for."""
    state, weights = gradients.state, gradients.weights
    is_used = state.phase in (Phase.USED, Phase.SKIPPED) and not _are_new(state.checked, weights)
    gradients.are_sums = not is_used and have_grads(weights)


@contextmanager
def _dropped_on_error(gradients: Gradients) -> Iterator[None]:
    """Clear all gradients on an error, because some of them may be scaled and others not."""
    try:
        yield
    except BaseException:
        gradients.drop()
        raise


class GradientSample:
    """A record of a few gradients, to find writes to them without a cost for each parameter."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        some = some_of(weights, _SAMPLED)
        self._recorded = [(each, None if each.grad is None else _version_of(each.grad)) for each in some]

    def was_written(self) -> bool:
        """Return whether a recorded gradient, which is its weight's still, was written to in place."""
        for weight, known in self._recorded:
            gradient = weight.grad
            if gradient is not None and known is not None and known[0]() is gradient and known[1] != gradient._version:
                return True
        return False

    def was_added_to(self) -> bool:
        """Return whether a gradient was written to, replaced or made, and is not 0; reading that is a device sync."""
        for weight, known in self._recorded:
            gradient = weight.grad
            if gradient is None or (known is not None and known[0]() is gradient and known[1] == gradient._version):
                continue
            if largest([gradient], gradient.device).item() != 0:
                return True
        return False


def _version_of(gradient: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], int]:
    return weakref.ref(gradient), gradient._version


# -- gradients of some weights -----------------------------------------------------------------------------------------


def _scale(weights: Sequence[nn.Parameter], scale: torch.Tensor, done: Done) -> None:
    """Multiply the gradients of weights by the scale, but for those that were multiplied already."""
    present = [gradient for gradient in grads_of(weights) if gradient is not None]
    _multiply(weights, [each for each in present if id(each) not in done] if done else present, scale)
    if done is not None:
        # Read again, because in a process group some were replaced.
        present = [gradient for gradient in grads_of(weights) if gradient is not None]
        done.update(zip(map(id, present), present, strict=True))


def _multiply(weights: Sequence[nn.Parameter], gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    narrow = []
    if is_distributed():
        narrow = [w for w in weights if w.grad is not None and w.grad_dtype is None and w.grad.dtype != w.dtype]
    unscale_(gradients, factor)
    for weight in narrow:
        # DDP reduces gradients in the weight's own dtype.
        if weight.grad is not None and not is_sharded(weight):
            weight.grad = weight.grad.to(weight.dtype)


def _in_kept_dtype(weights: Sequence[nn.Parameter], masters: Masters) -> list[torch.Tensor]:
    """Convert gradients to the dtype in which weights keep them until the step, and return them."""
    arrived = grads_of(weights)
    if are_plain(arrived, weights[0].device if weights else torch.device("cpu")):
        return [gradient for gradient in arrived if gradient is not None]
    kept = masters.in_kept_dtype(arrived)
    for weight, before, now in zip(weights, arrived, kept, strict=True):
        if now is not None and now is not before and weight.grad_dtype in (None, now.dtype):
            weight.grad = now
    return [gradient for gradient in grads_of(weights) if gradient is not None]


def _remaining_overflow(
    state: GradientState, gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return whether an earlier overflow still applies, and whether the gradients are finite again.

    An overflow no longer applies if all gradients were set to 0. It still applies if they were clipped to finite
    numbers, unless a step was skipped for it.
    """
    found_inf = state.found_inf
    if found_inf is None or (reads_without_sync(found_inf.device) and found_inf.item() == 0):
        return found_inf, None
    magnitude = largest(gradients, found_inf.device)
    is_finite = magnitude.isfinite()
    remains = ~is_finite if state.phase in (Phase.USED, Phase.SKIPPED) else magnitude != 0
    return torch.minimum(found_inf, remains.float()), is_finite


def _marks(found_inf: torch.Tensor | None, weights: Sequence[nn.Parameter]) -> tuple[Marks, tuple[int, ...]]:
    """Return weak references to the gradients that a check was of, and their versions.

    Both are empty if it is known without a device sync that no gradient overflowed.
    """
    if found_inf is None or (reads_without_sync(found_inf.device) and found_inf.item() == 0):
        return (), ()
    present = [gradient for gradient in grads_of(weights) if gradient is not None]
    return tuple(map(weakref.ref, present)), tuple(versions_of(present))


def _are_new(marks: Marks, weights: Sequence[nn.Parameter]) -> bool:
    """Return whether none of the tensors that were checked, or that a step used, is a gradient any more."""
    if not marks:
        return False
    first = marks[0]()
    if first is not None and any(weight.grad is first for weight in weights):
        return False
    known = {id(gradient) for mark in marks if (gradient := mark()) is not None}
    return known.isdisjoint(map(id, grads_of(weights)))


def _used(state: GradientState, weights: Sequence[nn.Parameter], keeps_check: bool) -> Marks:
    """Return weak references to gradients that a step was called for: those of the last check, or else the first."""
    for weight in weights:
        if weight.grad is not None:
            return state.checked if keeps_check and state.checked else (weakref.ref(weight.grad),)
    return ()


def _check_plain(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    dense = [gradient.coalesce() if gradient.is_sparse else gradient for gradient in gradients]
    return _combine(products.check(dense_views(dense)), device)


# -- lists of gradients ------------------------------------------------------------------------------------------------


def any_of(checks: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return whether any of several checks found inf or nan; None without a check."""
    made = [check for check in checks if check is not None]
    return functools.reduce(torch.maximum, made) if made else None


def unscale_and_check_(gradients: list[torch.Tensor], inverse_scale: torch.Tensor) -> torch.Tensor | None:
    """Multiply every gradient in place by ``inverse_scale``, and find inf and nan, in one pass over memory.

    Returns:
        A 0-dimensional float32 tensor on ``inverse_scale``'s device: 1 if a number was inf or nan, otherwise 0. Of
        sharded gradients only the parts of this process are checked. None without gradients.
    """
    if not gradients:
        return None
    if are_plain(gradients, inverse_scale.device):
        found_inf = torch.zeros((), dtype=torch.float32, device=inverse_scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)
        return found_inf
    found = products.multiply_and_check_(dense_views(gradients), inverse_scale)
    return _combine(found, inverse_scale.device)


def are_finite(gradients: list[torch.Tensor]) -> bool:
    """Return True only if all numbers are finite; False means "perhaps not". This is a device sync.

    Only the sums of gradients are checked. If a sum is finite, so are its numbers. An infinite sum may come from finite
    numbers, too.
    """
    if not are_alike(gradients):
        return False
    return all(math.isfinite(each.sum().item()) for each in in_fewer_tensors(gradients))


def largest(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the largest magnitude, 0-dimensional float32; nan if there is a nan. Of shards only the local part."""
    norms = products.largest(dense_views(gradients))
    found = [torch.stack(each).amax().float() for each in norms]
    return _combine(found, device) if found else torch.zeros((), dtype=torch.float32, device=device)


def _combine(found: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    combined = found[0].to(device)
    for other in found[1:]:
        combined = torch.maximum(combined, other.to(device))
    return combined


def unscale_(gradients: Sequence[torch.Tensor], inverse_scale: torch.Tensor) -> None:
    """Multiply every gradient in place by ``inverse_scale``, without a check."""
    if are_plain(gradients, inverse_scale.device):
        torch._foreach_mul_(list(gradients), inverse_scale)
        return
    products.multiply_(dense_views(gradients), inverse_scale)
