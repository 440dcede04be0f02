"""The state of an optimizer's gradients as one value, and the table of events that replace it by another.

Every function of :data:`TABLE` is pure: it returns the state after an event, or raises. Whether there is a gradient is
asked of the tensors, and is part of no state.
"""

import enum
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from ..scaling.scaler import LossScaler, UsedScale

# Weak references to gradients, so that they are freed as without mpinit.
Marks = tuple[weakref.ref[torch.Tensor], ...]

INSIDE_BLOCK: Final = "{} was called inside `with mpinit.scale_loss(...)`, where the gradients are still scaled: {}"
SCALED_BY_GRAD_SCALER: Final = (
    "{} was called, but the gradients are still scaled, by a GradScaler: call scaler.step(optimizer), or "
    "scaler.unscale_(optimizer) first"
)
NESTED_BLOCK: Final = (
    "mpinit.scale_loss was entered inside another block for the same optimizer, whose gradients were still scaled, and "
    "are dropped: close the outer block first, or add the losses up and call backward() once. Where that block was "
    "interrupted, go on with the next step"
)
OTHER_SCALER: Final = (
    "the gradients of {} are scaled by the scale of another loss: call unscale_(optimizer) of the GradScaler whose "
    "scaled loss they come from, before anything of this one"
)
# The name of an error on the page of the table -> its text.
ERRORS: Final = {
    "inside a block": INSIDE_BLOCK,
    "scaled by a GradScaler": SCALED_BY_GRAD_SCALER,
    "nested block": NESTED_BLOCK,
    "other scaler": OTHER_SCALER,
}
STEP_LATER: Final = (
    "move it after the with-block; where a hook steps each weight inside of the backward pass, there must be no loss "
    "scale: opt_level='O5' or loss_scale=1.0"
)
SCALE: Final = "scale() of a GradScaler"
UNSCALE: Final = "unscale_() of a GradScaler"


class Phase(enum.Enum):
    """A phase of gradients between one step and the next."""

    EMPTY = "there are no gradients of a scaled loss: none at all, or those of plain backward passes"
    SCALED = "gradients are multiplied by the loss scale, in a `scale_loss` block or by a `GradScaler`"
    UNSCALED = "the gradients of a scaled loss are unscaled, checked, and not used yet"
    USED = "a step has used the gradients"
    SKIPPED = "a step was skipped because of the gradients"


class GradientState(NamedTuple):
    """The state of the gradients of one optimizer.

    Attributes:
        phase: the phase.
        scaler: of the loss that was scaled last. With EMPTY: that loss has reached no parameter.
        found_inf: the result of the last check, 0-dimensional, above 0 for inf or nan; None without a check.
        agreed: whether ``found_inf`` is the verdict for the next step: of all ranks, where there are several.
        block: the open ``scale_loss`` block; None with a ``GradScaler``, and in any other phase.
        hidden: while SCALED, of an overflow from before: 1 where gradients were finite again by then, as after
            clipping, so that the next check cannot see it.
        checked: the gradients that ``found_inf`` belongs to, or one that a step used; other tensors are new gradients.
            Empty where no overflow was found without a device sync.
        versions: of these gradients after the check: a write to one, as by clipping, moves its version.
        scale: while SCALED, the scale that they are multiplied by; the scaler's own may change.
    """

    phase: Phase = Phase.EMPTY
    scaler: LossScaler | None = None
    found_inf: torch.Tensor | None = None
    agreed: bool = False
    block: weakref.ref[object] | None = None
    hidden: torch.Tensor | None = None
    checked: Marks = ()
    versions: tuple[int, ...] = ()
    scale: UsedScale | None = None

    @property
    def is_scaled(self) -> bool:
        """Return whether gradients are multiplied by the loss scale."""
        return self.phase is Phase.SCALED

    @property
    def is_open(self) -> bool:
        """Return whether a ``scale_loss`` block is open that multiplies gradients by the loss scale."""
        return self.block is not None and self.block() is not None

    @property
    def may_be_skipped(self) -> bool:
        """Return whether a step was skipped for the gradients, or a kernel may have skipped it."""
        return self.phase is Phase.SKIPPED or (self.phase is Phase.USED and self.found_inf is not None)

    def is_scaled_by(self, scaler: LossScaler) -> bool:
        """Return whether a GradScaler's loss has scaled the gradients by this scaler's present scale already."""
        is_same = self.scale is None or self.scale.before is None
        return self.is_scaled and self.scaler is scaler and not self.is_open and is_same

    @property
    def is_abandoned(self) -> bool:
        """Return whether a ``scale_loss`` block was dropped without an exit, as by a call of ``__enter__`` alone."""
        return self.block is not None and self.block() is None


EMPTY: Final = GradientState()


def block_opened(
    state: GradientState,
    scaler: LossScaler,
    block: object,
    found_inf: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> GradientState:
    """Multiply gradients by the scale for the time of a block.

    ``found_inf`` and ``hidden`` are what remains of an earlier check.

    Raises:
        RuntimeError: they are multiplied already.
    """
    if state.phase is Phase.SCALED:
        if state.is_open:
            raise RuntimeError(NESTED_BLOCK)
        read(state, "mpinit.scale_loss", "")
    return GradientState(
        Phase.SCALED, scaler, found_inf, block=weakref.ref(block), hidden=hidden, scale=scaler.used_scale()
    )


def block_closed(
    state: GradientState,
    scaler: LossScaler,
    found_inf: torch.Tensor | None = None,
    checked: Marks = (),
    versions: tuple[int, ...] = (),
    has_gradients: bool = True,
) -> GradientState:
    """End a block: its gradients are unscaled and checked."""
    if not has_gradients:
        return EMPTY
    return GradientState(Phase.UNSCALED, scaler, found_inf, False, None, None, checked, versions)


def scaled_by_grad_scaler(
    state: GradientState,
    scaler: LossScaler,
    found_inf: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> GradientState:
    """Multiply gradients by the scale until :func:`unscaled_by_grad_scaler`.

    Raises:
        RuntimeError: a block is open, or they are multiplied by the scale of another loss.
    """
    check_of_grad_scaler(state, scaler, SCALE)
    return GradientState(Phase.SCALED, scaler, found_inf, hidden=hidden, scale=scaler.used_scale())


def unscaled_by_grad_scaler(
    state: GradientState,
    scaler: LossScaler,
    found_inf: torch.Tensor | None = None,
    checked: Marks = (),
    versions: tuple[int, ...] = (),
    has_gradients: bool = True,
) -> GradientState:
    """End :func:`scaled_by_grad_scaler`: gradients are unscaled and checked.

    Raises:
        RuntimeError: as there.
    """
    check_of_grad_scaler(state, scaler, UNSCALE)
    if not has_gradients:
        return EMPTY
    return GradientState(Phase.UNSCALED, scaler, found_inf, False, None, None, checked, versions)


def check_of_grad_scaler(state: GradientState, scaler: LossScaler, what: str, owner: str = "an optimizer") -> None:
    """Refuse that a GradScaler handles gradients which a block, or another scale, has multiplied.

    Raises:
        RuntimeError: it is about to.
    """
    if state.is_open:
        raise RuntimeError(INSIDE_BLOCK.format(what, "use the one or the other"))
    if state.phase is Phase.SCALED and state.scaler is not scaler:
        raise RuntimeError(OTHER_SCALER.format(owner))


def loss_reached_none(state: GradientState, scaler: LossScaler) -> GradientState:
    """Remember that a scaled loss has reached none of an optimizer's parameters."""
    return GradientState(Phase.EMPTY, scaler) if state.phase is Phase.EMPTY else state


def read(state: GradientState, what: str, instead: str, has_gradients: bool = True) -> GradientState:
    """Refuse to use gradients that are scaled.

    Raises:
        RuntimeError: they are, and ``instead`` is what to do.
    """
    if state.phase is not Phase.SCALED:
        return state
    if state.is_open:
        raise RuntimeError(INSIDE_BLOCK.format(what, instead))
    if has_gradients and state.block is None:
        raise RuntimeError(SCALED_BY_GRAD_SCALER.format(what))
    return state


def checked(state: GradientState, found_inf: torch.Tensor | None) -> GradientState:
    """Replace what a check found by what another found in the gradients that a step is about to use."""
    _check_of_step(state)
    return state._replace(found_inf=found_inf, agreed=False)


def unread(state: GradientState) -> GradientState:
    """Drop what a check found where reading it would need a device sync that nobody asked for."""
    _check_of_step(state)
    return state._replace(found_inf=None, checked=(), versions=())


def agreed(state: GradientState, found_inf: torch.Tensor | None) -> GradientState:
    """Replace what a check found by the verdict for the next step."""
    _check_of_step(state)
    return state._replace(found_inf=found_inf, agreed=True)


def cleared(state: GradientState) -> GradientState:
    """Forget gradients that are gone, and an overflow with them; a block goes on."""
    return state if state.is_open else EMPTY


def stepped(state: GradientState, used: Marks, in_kernel: bool = False) -> GradientState:
    """Mark gradients as used by a step, which keeps what the check found where a kernel was to skip by it."""
    if not used:
        return cleared(state)
    _check_of_step(state)
    return GradientState(Phase.USED, state.scaler, state.found_inf if in_kernel else None, checked=used)


def skipped(state: GradientState, used: Marks) -> GradientState:
    """Mark gradients as those that a step was skipped for."""
    if not used:
        return cleared(state)
    _check_of_step(state)
    return GradientState(Phase.SKIPPED, state.scaler, state.found_inf, checked=used)


def _check_of_step(state: GradientState) -> None:
    if state.phase is Phase.SCALED:
        read(state, "optimizer.step()", STEP_LATER)


def adopted(state: GradientState, found_inf: torch.Tensor | None, has_gradients: bool) -> GradientState:
    """Return the state of an optimizer's gradients that no optimizer had so far, whose ``state`` that was."""
    read(state, "mpinit.add_optimizers()", "move it before or after the with-block", has_gradients)
    if not has_gradients or state.phase is Phase.EMPTY:
        return EMPTY
    return GradientState(
        state.phase, state.scaler, found_inf, block=state.block, hidden=state.hidden, scale=state.scale
    )


def dropped(state: GradientState) -> GradientState:
    """Forget gradients of which some may be scaled and others not: all are cleared."""
    return EMPTY


# Every event with the function that returns the state after it.
TABLE: Final[dict[str, Callable[..., GradientState]]] = {
    "`scale_loss` is entered": block_opened,
    "`scale_loss` is exited": block_closed,
    "a loss has reached no parameter": loss_reached_none,
    "`GradScaler.scale`": scaled_by_grad_scaler,
    "`GradScaler.unscale_`": unscaled_by_grad_scaler,
    "a step, `master_params` or the like reads them": read,
    "a step checks them again": checked,
    "a step does not read their check": unread,
    "ranks agree": agreed,
    "they are found cleared": cleared,
    "a step is done": stepped,
    "a step is skipped": skipped,
    "`add_optimizers` includes them": adopted,
    "an error drops them": dropped,
}
