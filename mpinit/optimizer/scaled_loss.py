"""The scaling of losses: the context around a backward pass, which unscales the gradients at its end."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Final

import torch

from ..basics.bulk import have_grads
from ..basics.logs import warn_user
from ..basics.running import call_after_backward, is_capturing
from ..distributed.sharding import is_distributed
from ..scaling.scaler import LossScaler
from .gradients import Gradients, any_of
from .optimizers import ManagedOptimizers
from .step import ManagedOptimizer

_NESTED: Final = (
    "mpinit.scale_loss was entered inside another block for the same optimizer, whose gradients were still scaled, and "
    "are dropped: close the outer block first, or add the losses up and call backward() once. Where that block was "
    "interrupted, go on with the next step"
)
_AFTER_BLOCK: Final = (
    "backward() was called on scaled_loss after its `with mpinit.scale_loss(loss, optimizer) as scaled_loss` block: "
    "its gradients would stay multiplied by the loss scale. Call scaled_loss.backward() inside the block"
)
_NOT_OF_SCALED_LOSS: Final = (
    "gradients came into the `with mpinit.scale_loss(loss, optimizer) as scaled_loss` block, but not from scaled_loss. "
    "Call scaled_loss.backward() in it: gradients of loss.backward() would be divided by the scale of {:g}, without "
    "having been multiplied by it. They were dropped"
)
_WRITTEN: Final = (
    "gradients were written to while they were multiplied by the loss scale, {:g}: clip_grad_norm_, a limit or an "
    "addition compares or adds numbers that are not scaled. Move it after the with-block. Averages over ranks and "
    "masks are right here"
)
_OTHER_FACE: Final = (
    "there are gradients of a loss that was scaled by mpinit.{0}, and mpinit.{1} would unscale them once more: use the "
    "one or the other in all backward passes of a step"
)


class ScaledLoss:
    """The context that ``scale_loss`` returns.

    All gradients of the session are scaled while the block is open, and unscaled at its end. These include gradients of
    optimizers that were not passed, because a loss may reach their parameters: a GAN's generator loss reaches the
    discriminator.
    """

    def __init__(
        self, loss: torch.Tensor, scaler: LossScaler, own: Sequence[ManagedOptimizer], losses: "Losses", delays: bool
    ) -> None:
        self._loss = loss
        self._scaler = scaler
        self._own = own
        # Keeps optimizers alive that the caller has not kept.
        self._kept_alive = [managed.reference() for managed in own]
        self._losses = losses
        # Whether the scale moves later, at the end of another block or in the step.
        self._delays = delays
        self._all: list[Gradients] = []
        # The scale that this block multiplies by, and its reciprocal; None: 1.
        self._scale: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        # For each of _all: whether there were inf and nan before the block.
        self._before: list[torch.Tensor | None] = []
        self._use = _Use()

    def __enter__(self) -> torch.Tensor:
        managed = self._losses.managed
        managed.shared.masters.refuse_inside_block("mpinit.scale_loss")
        if is_distributed():
            managed.shared.ranks.check_reduces(self._scaler)
        for each in self._own:
            each.before_block()
        self._all = managed.all_gradients(self._own, with_others=not self._scaler.is_identity)
        if any([gradients.is_scaled for gradients in self._all]):  # noqa: C419 (a generator costs more)
            for gradients in self._all:
                gradients.drop()
            raise RuntimeError(_NESTED)
        self._move_scale_of_dropped()
        scaled = self._scaler.scale(self._loss)
        if not self._scaler.is_identity:
            self._scale, self._inverse = self._scaler.factors()
        done = self._ids()
        in_ddp = is_distributed() and managed.shared.ranks.has_wrappers
        try:
            for gradients in self._all:
                self._before.append(gradients.begin(self._scale, done, in_ddp))
            if scaled.requires_grad and self._scale is not None and not torch.compiler.is_compiling():
                own = self._all[: len(self._own)]
                self._use.watch(scaled, own)
        except BaseException:
            self._unscale()
            raise
        return scaled

    def _ids(self) -> set[int] | None:
        """Return a set for the ids of gradients that a pass has multiplied; None where each has one optimizer."""
        return set() if len(self._all) > 1 else None

    def _move_scale_of_dropped(self) -> None:
        """Move the scale by an earlier block whose gradients were cleared without a step, as by a loop of its own."""
        ranks, scaler = self._losses.managed.shared.ranks, self._scaler
        if scaler.found_inf is None or any(map(_has_gradients, self._all)):
            return
        if ranks.groups:
            ranks.reduce(scaler.found_inf, self._loss.device)
        scaler.update()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._use.has_ended = True
        try:
            if exc_type is None:
                self._check_use()
        finally:
            for managed in self._own:
                managed.params.sync()  # a backward pass may have added parameters
            found = self._unscale()
        if exc is not None:
            _explain(exc, self._loss)
            return
        for managed in self._own:
            managed.after_block(self._loss, self._scaler, self._scale)
        ranks = self._losses.managed.shared.ranks
        if is_distributed():
            ranks.after_block([weight for own in self._own for weight in own.params.weights])
        if found is None:
            return
        if ranks.are_local:
            # After a pass in no_sync() each rank has other gradients. The next pass averages them, or the step checks
            # those that it uses: either finds the inf of one rank on all.
            for gradients in self._all:
                gradients.consume()
            return
        self._scaler.record_found_inf(found)
        # In a process group the scale moves in the step, once and by what all ranks have found, so that it stays one.
        if not (self._delays or is_distributed()):
            self._scaler.update()

    def _unscale(self) -> torch.Tensor | None:
        """Unscale all gradients, even if an error comes up for some.

        Returns:
            Whether this pass has overflowed; None without a check. Gradients that contained inf or nan before the block
            do not count: the scale moves once for them.
        """
        scaler, done = self._scaler, self._ids()
        are_local = self._losses.managed.shared.ranks.are_local
        found: torch.Tensor | None = None
        error: BaseException | None = None
        for index, gradients in enumerate(self._all):
            try:
                result = gradients.end(self._inverse, done, scaler.skips)
            except BaseException as raised:
                error = error or raised
                continue
            before = self._before[index] if index < len(self._before) else None
            if result is not None and before is not None and not are_local:
                result = result * (before == 0)
            found = any_of(found, result)
        if error is not None:
            raise error
        return found

    def _check_use(self) -> None:
        """Refuse gradients of another loss than the scaled one, and warn of writes to scaled gradients.

        Raises:
            RuntimeError: there are gradients, there were none before, and no backward pass went through scaled_loss.
        """
        use = self._use
        if use.is_watched and not use.is_used and use.were_empty and any(map(_has_gradients, self._all)):
            for gradients in self._all:
                gradients.drop()
            raise RuntimeError(_NOT_OF_SCALED_LOSS.format(self._scaler.loss_scale()))
        if self._scale is not None and use.was_written() and not self._losses.has_warned_of_writes:
            self._losses.has_warned_of_writes = True
            if not is_capturing() and self._scale.item() != 1.0:
                warn_user(_WRITTEN.format(self._scale.item()))

    def __getattr__(self, name: str) -> Any:
        """Refuse an attribute of the loss: the ``with`` is missing."""
        raise AttributeError(_without_with(name), name=name, obj=self)

    def skip_use_check(self) -> None:
        """Do not require ``backward()`` on this loss; apex calls it on another block's."""
        self._use.is_used = True


class _Use:
    """The use of a scaled loss by backward passes.

    Attributes:
        is_watched: whether it is known.
        were_empty: whether there was no gradient before the block.
        is_used: whether a backward pass went through the loss.
        has_ended: whether the block has ended, so that nothing would unscale the gradients of another pass.
    """

    def __init__(self) -> None:
        self.is_watched = self.were_empty = self.is_used = self.has_ended = False
        # A weight, and its gradient and the version of that after the backward pass. One is enough, because clipping
        # writes to all.
        self._last: tuple[Any, torch.Tensor, int] | None = None

    def watch(self, scaled: torch.Tensor, own: Sequence[Gradients]) -> None:
        """Record backward passes through a scaled loss."""
        self.is_watched, self.were_empty = True, all([gradients.were_empty for gradients in own])  # noqa: C419
        lists = [gradients.weights for gradients in own]

        def record(_: torch.Tensor) -> None:
            if self.has_ended:
                raise RuntimeError(_AFTER_BLOCK)
            self.is_used = True
            call_after_backward(remember)

        def remember() -> None:
            weight = next((weight for weights in lists for weight in weights if weight.grad is not None), None)
            if weight is not None and weight.grad is not None:
                self._last = weight, weight.grad, weight.grad._version

        scaled.register_hook(record)  # type: ignore[no-untyped-call]

    def was_written(self) -> bool:
        """Return whether gradients were written to in place after the last backward pass."""
        last, self._last = self._last, None
        return last is not None and last[0].grad is last[1] and last[1]._version != last[2]


def _has_gradients(gradients: Gradients) -> bool:
    return have_grads(gradients.weights)


def _without_with(name: str) -> str:
    """Return the error text for an attribute of the context that ``scale_loss`` returns."""
    if name.startswith("_"):
        return f"the context of mpinit.scale_loss has no attribute {name!r}"
    return (
        "mpinit.scale_loss returns a context manager, not a tensor; write "
        f"`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.{name}(...)`"
    )


def _explain(error: BaseException, loss: Any) -> None:
    """Add a note to an error of ``backward()``: what is wrong with the loss that was passed to ``scale_loss``."""
    if not isinstance(error, RuntimeError) or not isinstance(loss, torch.Tensor):
        return
    if "only for scalar outputs" in str(error) and loss.dim():
        shape = tuple(loss.shape)
        error.add_note(
            f"mpinit: the loss passed to scale_loss has the shape {shape}, one number for each sample or element; pass "
            "their mean, mpinit.scale_loss(loss.mean(), optimizer)"
        )
    elif "does not require grad" in str(error) and not loss.requires_grad:
        error.add_note(
            "mpinit: no gradient leads from the loss passed to scale_loss to a parameter: all parameters are frozen "
            "(requires_grad is False), or the loss was computed under torch.no_grad(), or detached"
        )


class Unscaled(nullcontext[Any]):
    """The context that ``scale_loss`` returns where mpinit is disabled: it yields the loss."""

    def __exit__(self, *raised: Any) -> None:
        if raised[1] is not None:
            _explain(raised[1], self.enter_result)

    def __getattr__(self, name: str) -> Any:
        """Refuse an attribute of the loss: the ``with`` is missing."""
        raise AttributeError(_without_with(name), name=name, obj=self)

    def skip_use_check(self) -> None:
        """Do nothing: no gradient is scaled."""


class Losses:
    """The losses of a session, which are scaled by one scaler each.

    Attributes:
        managed: the session's optimizers.
        scalers: the scalers.
        has_warned_of_writes: whether a write to scaled gradients was warned of.
    """

    def __init__(self, managed: ManagedOptimizers, scalers: list[LossScaler]) -> None:
        self.managed = managed
        self.scalers = scalers
        self.has_warned_of_writes = False
        self._face = ""

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss."""
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise ValueError(
                f"loss_id={loss_id!r}, but this session was initialised with num_losses={len(self.scalers)}: "
                f"loss_id goes from 0 to {len(self.scalers) - 1}; pass initialize a larger num_losses"
            )
        return self.scalers[loss_id]

    def scaled(self, loss: torch.Tensor, optimizers: Sequence[Any], loss_id: int, delays: bool) -> ScaledLoss:
        """Return the context of a backward pass of ``loss``."""
        managed = self.managed
        if managed.awaits and not managed.members.optimizers:
            name = managed.members.describe()
            raise RuntimeError(f"{name} awaits its optimizers: call mpinit.add_optimizers(optimizer) first")
        scaler = self.scaler(loss_id)
        if not scaler.is_identity:
            self.use_only("scale_loss")
        return ScaledLoss(loss, scaler, list(map(managed.find, optimizers)), self, delays)

    def use_only(self, face: str) -> None:
        """Refuse to scale losses in both ways at once, by ``scale_loss`` and by ``GradScaler``.

        Raises:
            RuntimeError: there are gradients of losses that were scaled in the other way.
        """
        if self._face not in ("", face):
            every = self.managed.all_gradients([], with_others=True)
            if any(gradients.is_scaled or _has_gradients(gradients) for gradients in every):
                raise RuntimeError(_OTHER_FACE.format(self._face, face))
        self._face = face
