"""The scaling of losses: the context around a backward pass, which unscales the gradients at its end."""

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.bulk import have_grads
from ..basics.logs import log, warn_user
from ..basics.running import is_capturing, reads_without_sync
from ..basics.tables import counted
from ..distributed.sharding import is_distributed
from ..masters.masters import IN_FLOAT32, Masters
from ..scaling.scaler import LossScaler
from .gradient_state import NESTED_BLOCK, cleared, loss_reached_none
from .gradients import Done, Gradients, GradientSample
from .managed import ManagedOptimizer, before_backward
from .optimizers import ManagedOptimizers
from .ranks import Ranks
from .step import GradientChecks

_IS_PATCHED: Final = attrgetter("is_patched")
_AFTER_BLOCK: Final = (
    "backward() was called on scaled_loss after its `with mpinit.scale_loss(loss, optimizer) as scaled_loss` block: "
    "its gradients would stay multiplied by the loss scale. Call scaled_loss.backward() inside the block"
)
_FLOATS: Final = (torch.float32, torch.float64)


@dataclass(eq=False)
class _Use:
    """The use of a scaled loss by backward passes.

    Attributes:
        sample: a few gradients from before the block.
        is_used: whether a backward pass went through the loss.
        has_ended: whether the block has ended, so that nothing would unscale the gradients of another pass.
    """

    sample: Sequence[GradientSample]
    is_used: bool = False
    has_ended: bool = False

    def record(self, _: torch.Tensor) -> None:
        """Record a backward pass: a hook of the scaled loss.

        Raises:
            RuntimeError: the block has ended.
        """
        if self.has_ended:
            raise RuntimeError(_AFTER_BLOCK)
        self.is_used = True


class ScaledLoss:
    """The context that ``scale_loss`` returns.

    All gradients of the session are scaled while the block is open, and unscaled at its end. These include gradients of
    optimizers that were not passed, because a loss may reach their parameters: a GAN's generator loss reaches the
    discriminator.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        scaler: LossScaler,
        optimizers: Sequence[ManagedOptimizer],
        others: Sequence[Gradients],
        delay_update: bool,
    ) -> None:
        self._loss = loss
        self._scaler = scaler
        self._optimizers = optimizers
        self._own = [each.gradients for each in optimizers]
        # Keeps an optimizer alive that the caller has not kept.
        self._kept_alive = [each.reference() for each in optimizers]
        self._others = others
        self._delay_update = delay_update
        # None: backward passes through the scaled loss are not watched.
        self._use: _Use | None = None
        # The session's masters, if the loss's graph is to be searched.
        self._masters: Masters | None = None

    def __enter__(self) -> torch.Tensor:
        if any(each.members.table.are_in_model for each in self._optimizers):
            raise RuntimeError(IN_FLOAT32.format("mpinit.scale_loss"))
        for gradients in (*self._own, *self._others):
            if gradients.state.block is not None and gradients.state.is_open:
                for each in (*self._own, *self._others):
                    each.drop()  # the exit of the other block may have been interrupted
                raise RuntimeError(NESTED_BLOCK)
            gradients.check_unscaled("mpinit.scale_loss", "move it after the with-block")
        ranks = self._ranks()
        if ranks is not None:
            ranks.check_reduces(self._scaler)
        if self._masters is not None:
            _warn_of_foreign_parameters(self._loss, [*self._own, *self._others], self._masters)
        for optimizer in self._optimizers:
            before_backward(optimizer)
        done = self._none_done()
        begun: list[Gradients] = []
        are_new = True
        try:
            for gradients in (*self._own, *self._others):
                gradients.widen()
            for gradients in self._own:
                begun.append(gradients)
                are_new &= gradients.scale(self, self._scaler, done)
            for gradients in self._others:
                begun.append(gradients)
                gradients.scale(self, self._scaler, done, is_own=False)
            if self._optimizers:
                # The multiplication by the scale is no write of the user's.
                self._optimizers[0].members.values.bind_gradients()
            scaled = self._scaler.scale(self._loss)
            if scaled.requires_grad and not self._scaler.is_identity and not torch.compiler.is_compiling():
                self._watch(scaled, are_new)
            return scaled
        except BaseException:
            self._unscale(begun, self._none_done())
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        done = self._none_done()
        if self._use is not None:
            self._use.has_ended = True
            if exc_type is None and not self._use.is_used:
                self._check_used(self._use.sample)
        try:
            # The scale is copied before its update. The copy may fail, and gradients have to be unscaled all the same.
            written = [(each.writes, self._scaler.scale_now()) for each in self._checks() if each.writes.were_done()]
            for optimizer in self._optimizers if exc_type is None else ():
                optimizer.members.values.apply_gradients()
            for optimizer in self._optimizers:
                optimizer.checks.after_backward()
            if exc_type is None and (ranks := self._ranks()) is not None:
                ranks.check_reduces(self._scaler)
        finally:
            found = self._unscale([*self._own, *self._others], done)
            for optimizer in self._optimizers:
                optimizer.members.values.bind_gradients()
        if exc is None:
            self._finish(found)
            for writes, scale in written:
                writes.report(scale, "Move it behind the with-block")
        else:
            _explain(exc, self._loss)

    def __getattr__(self, name: str) -> Any:
        """Refuse an attribute of the loss: the ``with`` is missing."""
        raise AttributeError(_without_with(name), name=name, obj=self)

    def _ranks(self) -> Ranks | None:
        return self._optimizers[0].shared.ranks if is_distributed() and self._optimizers else None

    def _none_done(self) -> Done:
        return {} if len(self._own) + len(self._others) > 1 else None

    def _checks(self) -> list[GradientChecks]:
        return [each.checks for each in self._optimizers]

    def _watch(self, scaled: torch.Tensor, are_new: bool) -> None:
        """Record whether a backward pass goes through ``scaled``, and the versions of gradients after it.

        Args:
            are_new: whether all gradients come from this block.
        """
        for optimizer in self._optimizers:
            optimizer.checks.writes.watch(scaled)
        sample = [] if are_new else [GradientSample(gradients.weights) for gradients in self._own]
        self._use = _Use(sample)
        scaled.register_hook(self._use.record)  # type: ignore[no-untyped-call]

    def search_graph(self, masters: Masters | None) -> None:
        """Warn at the block's beginning if the loss reaches parameters outside of the session.

        Args:
            masters: the session's; None: do not warn, because the loss has blocks of other sessions, too.
        """
        self._masters = masters

    def expect_no_use(self) -> None:
        """Skip the check that ``backward()`` used this loss: it is called on another block's, with the same scale."""
        self._use = None

    def _check_used(self, sample: Sequence[GradientSample]) -> None:
        """Refuse gradients of the unscaled loss, which would be divided by a scale that they were not multiplied by.

        Args:
            sample: a few gradients of earlier backward passes, as they were when the block began; empty if there were
                none.

        Raises:
            RuntimeError: there are such gradients. They are dropped.
        """
        if sample and not any(each.was_added_to() for each in sample):
            return
        if not any(have_grads(gradients.weights) for gradients in self._own):
            return
        for gradients in (*self._own, *self._others):
            gradients.drop()
        raise RuntimeError(
            "gradients came into the `with mpinit.scale_loss(loss, optimizer) as scaled_loss` block, but not from "
            "scaled_loss. Call scaled_loss.backward() in it: gradients of loss.backward() would be divided by the "
            f"scale of {self._scaler.loss_scale():g}, without having been multiplied by it. They were dropped"
        )

    def _unscale(self, gradients: Sequence[Gradients], done: Done) -> list[torch.Tensor]:
        found: list[torch.Tensor | None] = []

        def unscale(each: Gradients) -> None:
            found.append(each.unscale(self._scaler, done))

        with ExitStack() as stack:
            # All are unscaled, even if one raises.
            for each in reversed(gradients):
                stack.callback(unscale, each)
        return [each for each in found if each is not None]

    def _finish(self, found: list[torch.Tensor]) -> None:
        scaler = self._scaler
        ranks = self._ranks()
        are_shared = ranks is None or ranks.have_reduced([w for own in self._own for w in own.weights])
        if ranks is None or are_shared or ranks.groups:
            for found_inf in found:
                scaler.record_found_inf(found_inf)
        else:
            # After a pass in no_sync() each rank has other gradients. The next pass averages them, or the step checks
            # what it uses: both find this rank's inf on all ranks.
            for gradients in self._own:
                gradients.forget_check()
        # Read only if that is no device sync.
        overflowed = any(reads_without_sync(each.device) and each.item() > 0 for each in found)
        worst = [each.after_unscaling(self._loss, scaler, overflowed) for each in self._optimizers]
        for optimizer in self._optimizers:
            optimizer.checks.awaits_step = True
        if self._delay_update or not are_shared:
            # The first of these optimizers that steps updates the scale.
            for optimizer in self._optimizers:
                optimizer.checks.update_scale_later(scaler, is_local=not (are_shared or ranks is None or ranks.groups))
        else:
            scaler.update()
            for optimizer in self._optimizers:
                optimizer.checks.forget_update(scaler)
        if overflowed:
            log.info(
                "Gradient overflow: the next optimizer.step() is skipped; loss scale now %s%s",
                scaler.loss_scale(),
                "".join(f"; worst: {each}" for each in worst if each is not None),
            )


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


def _without_skipped(optimizers: list[ManagedOptimizer]) -> list[ManagedOptimizer]:
    """Omit optimizers whose gradients are still those of a skipped step, unless all are.

    The loss is for the others: a GAN's loop clears a network's gradients before each loss that it is stepped for, and
    Lightning and Accelerate pass the optimizers of both networks with each loss. The old gradients would count as an
    overflow of this loss.
    """
    all_gradients = ((each, each.gradients) for each in optimizers)
    new = [each for each, own in all_gradients if not (own.state.may_be_skipped and have_grads(own.weights))]
    return new or optimizers


# Smaller factors have other reasons, such as weights of tasks or numbers of micro-batches.
_SMALLEST_SECOND_SCALE: Final = 256.0


def _warn_of_second_scaler(loss: torch.Tensor, scaler: LossScaler) -> None:
    """Warn if ``torch.amp.GradScaler`` scales the same loss, before ``scale_loss`` or inside its block.

    Gradients stay right, but each scale is halved at the overflows of the other, and steps are skipped without need.
    The check is a device sync, so it runs only until the first step.
    """

    def check(factor: float) -> None:
        if factor >= _SMALLEST_SECOND_SCALE and math.frexp(factor)[0] == 0.5:
            warn_user(
                "the loss of mpinit.scale_loss was multiplied by a large number elsewhere, as "
                "torch.amp.GradScaler.scale does: with two loss scales steps are skipped without need. Remove the "
                "GradScaler, or keep it alone, with mpinit.initialize(..., loss_scale=1.0) and without "
                "mpinit.scale_loss"
            )

    def check_gradient(grad: torch.Tensor) -> None:
        if not grad.dim():
            check(grad.item() / scaler.loss_scale())

    if loss.is_meta or torch.compiler.is_compiling() or is_capturing():
        return
    scale = getattr(loss.grad_fn, "_saved_other", None)
    if isinstance(scale, torch.Tensor) and not scale.dim() and not scale.requires_grad:
        check(scale.item())
    if loss.requires_grad and not loss.dim():
        loss.register_hook(check_gradient)  # type: ignore[no-untyped-call]


# Nodes of a loss's graph that are searched: those of 20,000 need about 20 ms, and most models have fewer.
_MOST_NODES: Final = 20_000


def _warn_of_foreign_parameters(loss: torch.Tensor, gradients: Sequence[Gradients], masters: Masters) -> None:
    """Warn of parameters that a loss reaches, and whose gradients the end of the block does not unscale.

    The graph is searched only until the first step. In a process group it is not: FSDP computes with other tensors than
    the optimizer's parameters.
    """
    if is_distributed() or torch.compiler.is_compiling() or is_capturing():
        return
    known = {id(weight) for each in gradients for weight in each.weights}
    known.update(id(master.parameter) for master in masters)  # a penalty on them
    found = [p for p in _parameters_below(loss) if id(p) not in known]
    if found:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in found[:3])
        warn_user(
            f"the loss of mpinit.scale_loss reaches {counted(len(found), 'parameter')} outside of the session's models "
            f"and optimizers, of shape {shapes}: their gradients stay multiplied by the loss scale. Pass "
            "mpinit.initialize the optimizer that steps them, too, or their module; if nothing trains them, set "
            "requires_grad to False"
        )


def _parameters_below(loss: torch.Tensor) -> list[nn.Parameter]:
    """List the parameters that the graph of a loss leads to, each once."""
    found: dict[nn.Parameter, None] = {}
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found[variable] = None
        pending.extend([below for below, _ in node.next_functions])
    return list(found)


class Unscaled(nullcontext[Any]):
    """The context that ``scale_loss`` returns if gradients are not scaled: it yields the loss."""

    def __exit__(self, *raised: Any) -> None:
        if raised[1] is not None:
            _explain(raised[1], self.enter_result)

    def __getattr__(self, name: str) -> Any:
        """Refuse an attribute of the loss: the ``with`` is missing."""
        raise AttributeError(_without_with(name), name=name, obj=self)

    def search_graph(self, masters: Masters | None) -> None:
        """Do nothing: no gradient is scaled."""

    def expect_no_use(self) -> None:
        """Skip the check that ``backward()`` used this loss: there is none."""


@dataclass(eq=False)
class Losses:
    """The losses of a session, which are scaled by one scaler each."""

    managed: ManagedOptimizers
    scalers: list[LossScaler]

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss."""
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise ValueError(
                f"loss_id={loss_id!r}, but this session was initialised with num_losses={len(self.scalers)}: "
                f"loss_id goes from 0 to {len(self.scalers) - 1}; pass initialize a larger num_losses"
            )
        return self.scalers[loss_id]

    def scaled(
        self, loss: torch.Tensor, optimizers: Sequence[Optimizer], loss_id: int, delay: bool
    ) -> ScaledLoss | Unscaled:
        """Return the context of a backward pass of ``loss``."""
        managed = self.managed
        if managed.awaits and not managed.initialized.optimizers:
            name = managed.initialized.describe()
            raise RuntimeError(f"{name} awaits its optimizers: call mpinit.add_optimizers(optimizer) first")
        scaler = self.scaler(loss_id)
        own = list(map(managed.find, optimizers))
        some = own or list(managed)
        if some and not any(map(_IS_PATCHED, some)):
            if managed.shared.values.masters.are_in_model:
                raise RuntimeError(IN_FLOAT32.format("mpinit.scale_loss"))
            # The first step warns if the loss has reached no parameter.
            for each in own if managed.shared.ranks.is_first_step else ():
                each.gradients.apply(loss_reached_none, scaler)
            return Unscaled(loss if loss.dtype in _FLOATS else loss.float())
        if len(own) > 1:
            own = _without_skipped(own)
        others = [] if scaler.is_identity else managed.gradients_beside(own)
        if managed.shared.ranks.is_first_step and not scaler.is_identity:
            _warn_of_second_scaler(loss, scaler)
        block = ScaledLoss(loss, scaler, own, others, delay)
        if managed.shared.ranks.is_first_step and not scaler.is_identity:
            block.search_graph(managed.shared.values.masters)
        return block

    def scaled_output(self, output: torch.Tensor, loss_id: int) -> torch.Tensor:
        """Return ``output`` times a loss scale; gradients of its backward pass stay scaled until :meth:`unscale`."""
        scaler = self.scaler(loss_id)
        scaled = scaler.scale(output)
        if scaled.requires_grad and not scaler.is_identity:
            if is_distributed():
                self.managed.shared.ranks.check_reduces(scaler)
            done: Done = {}
            patched = self.managed.patched()
            for managed in patched:
                managed.gradients.end_abandoned()
            unscaled = [managed for managed in patched if not managed.gradients.state.is_scaled_by(scaler)]
            for managed in unscaled:
                managed.checks.before_grad_scaler(scaler)
            for managed in unscaled:
                managed.gradients.scale(None, scaler, done)
            # add_optimizers may include gradients that no optimizer has yet, in a later iteration.
            for gradients in self.managed.gradients_beside(list(self.managed)):
                if not gradients.state.is_scaled_by(scaler):
                    gradients.end()
                    gradients.scale(None, scaler, done, is_own=False)
            for managed in () if torch.compiler.is_compiling() else patched:
                managed.checks.writes.watch(scaled)
        return scaled

    def unscale(self, optimizer: Optimizer, loss_id: int) -> bool:
        """Unscale and check an optimizer's gradients, and return whether there are any."""
        own = self.managed.find(optimizer)
        others = [each.gradients for each in self.managed if each is not own]
        # A weight may have several optimizers: its gradient is unscaled once.
        done = {id(g): g for gradients in others if not gradients.state.is_scaled for g in gradients.present()}
        scaler = self.scaler(loss_id)
        if is_distributed():
            self.managed.shared.ranks.check_reduces(scaler)
        for gradients in self.managed.gradients_beside(list(self.managed)):
            if gradients.state.is_scaled and gradients.state.scaler is scaler and not gradients.state.is_open:
                gradients.unscale(scaler, None, is_block=False)
        return own.checks.unscale(scaler, done)

    def drop_unreached(self) -> None:
        """Forget that gradients were to be scaled by a GradScaler, where its losses have reached none."""
        for managed in self.managed.patched():
            gradients = managed.gradients
            if gradients.state.is_scaled and not gradients.state.is_open and not gradients.present():
                gradients.apply(cleared)
