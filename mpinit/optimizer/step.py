"""The parts of a step: checks of gradients, one decision of all ranks, and the optimizer's own step on masters."""

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ..autocast.thread_flags import CastsOff, is_on
from ..basics.bulk import grads_of
from ..basics.logs import warn_user
from ..basics.patching import UndoStack
from ..basics.running import call_after_backward, is_capturing, reads_without_sync
from ..config.plan import Plan
from ..distributed.sharding import is_distributed
from ..model.float32_values import Float32Values
from ..model.forward_weights import refuse_changes_in_forward
from ..scaling.scaler import LossScaler
from ..torch_internals.compiling_with_gradients import follow_dynamo, has_compiled
from ..torch_internals.fused_sgd import unfused
from .gradient_state import SCALE, STEP_LATER, UNSCALE, Phase, check_of_grad_scaler
from .gradients import Done, Gradients, GradientSample, largest
from .members import Members
from .ranks import Ranks
from .scope import MasterSwap

STEP: Final = "optimizer.step()"
_LATE: Final = (
    "entries of model.state_dict() or masters of mpinit.master_params() were written to, and the forward pass has not "
    "used the new numbers. It ran before the write, or torch.compile has compiled it: compiled code applies no writes. "
    "The step will use them. Write before the forward pass; where that is compiled, write inside "
    "`with mpinit.float32_weights(model)`"
)
_WRITTEN: Final = (
    "gradients were written to while they were multiplied by the loss scale, {:g}: clip_grad_norm_, a limit or an "
    "addition compares or adds numbers that are not scaled. {}. Averages over ranks and masks are right here"
)


def _warn_of_late_writes(values: Float32Values, warned: set[str]) -> None:
    """Warn once of writes to handed-out tensors that the last forward pass has not used."""
    if _LATE not in warned and values.has_unapplied_writes():
        warned.add(_LATE)
        warn_user(_LATE)


class GradientChecks:
    """The checks of one optimizer's gradients, around backward passes and before a step uses them.

    Attributes:
        skips: whether a step is skipped if its gradients contain inf or nan.
        awaits_step: whether a loss of the optimizer was scaled, and no step was called since.
        ranks: what the session shares with other processes.
        writes: the watch for writes to scaled gradients.
    """

    def __init__(self, members: Members, gradients: Gradients, plan: Plan, ranks: Ranks) -> None:
        self.skips = plan.skips
        self.awaits_step = False
        self.ranks = ranks
        self.writes = ScaledWrites(members)
        self._members = members
        self._gradients = gradients
        self._plan = plan
        self._due: dict[LossScaler, bool] = {}
        self._warned: set[str] = set()
        # How many forwards that were not compiled had run at the last step.
        self._forwards = 0

    # -- around backward passes -----------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Prepare for the backward pass of a scaled loss."""
        self._members.sync_groups()
        self._members.values.apply_gradients()
        _warn_of_late_writes(self._members.values, self._warned)
        follow_dynamo()

    def after_backward(self) -> None:
        """Include parameters that were added to the groups during a backward pass: their gradients are still scaled."""
        if not self._members.are_as_seen():
            self._members.sync_groups()
            self._members.values.apply_writes()

    def unscale(self, scaler: LossScaler, done: Done) -> bool:
        """Unscale and check the gradients of a GradScaler's losses.

        Returns:
            Whether there are gradients.
        """
        check_of_grad_scaler(self._gradients.state, scaler, UNSCALE, type(self._members.optimizer).__name__)
        were_written = self.writes.were_done()
        self._members.sync_groups()
        self._members.values.apply_gradients()
        present = bool(self._gradients.present())
        found_inf = self._gradients.unscale(scaler, done, is_block=False)
        if found_inf is not None:
            scaler.record_found_inf(found_inf)
        if were_written:
            self.writes.report(scaler.scale_now(), "Move it behind scaler.unscale_(optimizer)")
        return present

    def before_grad_scaler(self, scaler: LossScaler) -> None:
        """Prepare present gradients, which a GradScaler is about to multiply by its scale.

        It is called for each optimizer before the gradients of any are multiplied.

        Raises:
            RuntimeError: they are scaled by another loss's scale, or a ``scale_loss`` block is open.
        """
        gradients = self._gradients
        if gradients.present() or gradients.state.is_open:
            check_of_grad_scaler(gradients.state, scaler, SCALE, type(self._members.optimizer).__name__)
        self._members.sync_groups()
        self._members.values.apply_gradients()
        gradients.widen()

    # -- before a step --------------------------------------------------------------------------------------------

    def prepare(self, what: str = STEP) -> None:
        """Refuse or warn of gradients that a step should not use, and decide with all ranks whether they overflowed.

        Args:
            what: the name of the step, or of a half of one, for messages.
        """
        self._members.sync_groups()
        self.check_gradients(what)
        values, forwards = self._members.values, self.ranks.guard.eager_forwards
        if has_compiled() and forwards == self._forwards:
            _warn_of_late_writes(values, self._warned)  # after a plain backward pass, which nothing checks
        self._forwards = forwards
        values.apply_writes()
        self.agree()
        # An LR scheduler warns if no step came before it. A skipped step counts as one.
        self._members.optimizer._opt_called = True  # type: ignore[attr-defined]

    def prepare_state_only(self) -> None:
        """Refuse scaled gradients before a step that only creates the optimizer's state."""
        self._gradients.check_unscaled(STEP, STEP_LATER)
        self._members.values.apply_writes()

    def update_scale_later(self, scaler: LossScaler, is_local: bool) -> None:
        """Update a loss scale at the next step; without a step, when the next loss is scaled.

        Args:
            is_local: whether the scaler has no result of its own, because the pass was in ``no_sync()``: what the step
                finds counts.
        """
        self._due[scaler] = is_local

    def forget_update(self, scaler: LossScaler) -> None:
        """Do not update a loss scale at the next step: it was updated now."""
        self._due.pop(scaler, None)

    def agree(self) -> None:
        """Decide with all ranks, once a step, whether gradients overflowed, and update the scales that are due."""
        if self.ranks.is_first_step or is_distributed():
            self.ranks.before_step(self._members.weights)
        self.awaits_step = False
        if not self._gradients.are_decided():
            self._decide()

    def agree_on_evaluation(self) -> None:
        """Decide with all ranks whether the gradients of one evaluation of a closure overflowed."""
        self.check_gradients(STEP)
        self._decide()

    def _decide(self) -> None:
        self._check_again()
        if is_distributed() and self.skips:
            state, weights = self._gradients.state, self._members.weights
            device = weights[0].device if weights else torch.device("cpu")
            found_inf = self.ranks.reduce(state.found_inf, device)
            if self.ranks.groups and found_inf is not None:
                self._gradients.decide(found_inf)
            # A pass in no_sync() has left its overflow to the check of the gradients that this step uses.
            for scaler, is_local in self._due.items():
                if is_local and scaler.found_inf is None and found_inf is not None:
                    scaler.record_found_inf(found_inf)
        for scaler in self._pop_due():
            scaler.update()

    def agree_without_step(self) -> bool:
        """Update the scales of gradients whose step no rank has called.

        Returns:
            Whether they overflowed; reading that is a device sync.
        """
        self.awaits_step = False
        found_inf = self._gradients.state.found_inf
        if self.ranks.groups:
            # All ranks begin this block without gradients: those of the last one were cleared, and no step was called.
            if self._gradients.present():
                return False
            found_inf = self.ranks.reduce(found_inf, self._members.weights[0].device)
        for scaler in self._pop_due():
            scaler.update()
        if found_inf is None or is_capturing():
            return False
        return bool(found_inf.item() > 0)

    def _pop_due(self) -> list[LossScaler]:
        due, self._due = list(self._due), {}
        return due

    def _check_again(self) -> None:
        """Check the gradients that a step is about to use: new ones, and those that were written to since a check."""
        if self._gradients.state.checked:
            self._gradients.update_state()
        self._check_stepped()

    def _check_stepped(self) -> None:
        # torch.amp.GradScaler passes its own found_inf to a fused step.
        is_checked = getattr(self._members.optimizer, "found_inf", None) is not None
        if self.skips and not is_checked and any(weight.grad is not None for weight in self._members.weights):
            self._gradients.check()

    def hooks_wrote_nonfinite(self) -> bool:
        """Return whether step pre-hooks wrote inf or nan to gradients that were finite; False if a kernel skips.

        In a process group it is False, too: ranks have agreed on the step before the hooks ran.
        """
        before = self._gradients.state.found_inf
        if not self.skips or is_distributed():
            return False
        self._check_stepped()
        is_known = self._gradients.state.found_inf is before or self.skips_in_kernel()
        return not is_known and self._gradients.overflowed()

    def skips_in_kernel(self) -> bool:
        """Return whether a kernel can skip the step by itself, so that the host needs no device sync."""
        found_inf = self._gradients.state.found_inf
        return found_inf is not None and not reads_without_sync(found_inf.device) and self._has_skipping_kernel()

    def _has_skipping_kernel(self) -> bool:
        optimizer: Any = self._members.optimizer
        fused = all(group.get("fused") for group in optimizer.param_groups)
        return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    # -- refusals and warnings ------------------------------------------------------------------------------------

    def check_gradients(self, what: str) -> None:
        """Refuse gradients that are still scaled; warn if gradients were never scaled, or if there are none."""
        gradients = self._gradients
        gradients.check_unscaled(what, STEP_LATER if what == STEP else "move it after the with-block")
        if gradients.came_through_scaling():
            return
        if not gradients.present():
            if gradients.state.phase is Phase.EMPTY and gradients.state.scaler is not None and what == STEP:
                self.warn_no_gradient()
            return
        is_scaled = self._plan.loss_scale != 1.0
        if is_scaled and "unscaled" not in self._warned:
            self._warned.add("unscaled")
            warn_user(
                f"{what} uses gradients that did not come through mpinit.scale_loss: they were not scaled, and "
                "small ones may have become 0 in 16 bit. Use "
                "`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`; where a "
                "torch.amp.GradScaler scales them, pass mpinit.initialize loss_scale=1.0"
            )

    def warn_no_gradient(self) -> None:
        """Warn once that a loss was scaled, and no parameter has a gradient."""
        if "none" not in self._warned and any(weight.requires_grad for weight in self._members.weights):
            self._warned.add("none")
            self.ranks.guard.check_present()
            warn_user(
                "optimizer.step() does nothing: a loss was scaled, and none of its parameters has a gradient. "
                "They are not those that the model computes with (was it copied, or wrapped in something that replaces "
                "them, after the optimizer was made?), or the loss makes no use of any"
            )


class ScaledWrites:
    """A watch for writes to scaled gradients, as by clipping inside the ``scale_loss`` block.

    It records the versions of a few gradients at the end of the backward pass of a scaled loss.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._has_warned = False
        self._recorded: GradientSample | None = None

    def watch(self, scaled: torch.Tensor) -> None:
        """Record the versions at the end of the backward pass of a scaled loss.

        A hook on the loss queues the recording, so its cost does not grow with the number of parameters.
        """
        self._recorded = None
        if not self._has_warned:
            scaled.register_hook(lambda _: call_after_backward(self._record))  # type: ignore[no-untyped-call]

    def _record(self) -> None:
        self._recorded = GradientSample(self._members.weights)

    def were_done(self) -> bool:
        """Return whether gradients were written to since the backward pass ended, and clear the recorded versions."""
        recorded, self._recorded = self._recorded, None
        return recorded is not None and recorded.was_written()

    def report(self, scale: torch.Tensor, instead: str) -> None:
        """Warn once of such a write, with the place to move it to."""
        if not self._has_warned and not is_capturing():
            self._has_warned = True
            if scale.item() != 1.0:
                warn_user(_WRITTEN.format(scale.item(), instead))


class WeakMethod:
    """A method that is set as an attribute of the object it is bound to, and refers to that object weakly.

    A bound method would be a reference cycle. Copies and pickles of optimizers do not have such methods, because torch
    leaves attributes out of an optimizer's state.
    """

    __slots__ = ("__func__", "__weakref__", "_owner")

    def __init__(self, function: Callable[..., Any], owner: object) -> None:
        self.__func__ = function
        self._owner = weakref.ref(owner)

    @property
    def __self__(self) -> Any:
        """The optimizer.

        Raises:
            ReferenceError: it was freed, and this method was kept.
        """
        owner = self._owner()
        if owner is None:
            raise ReferenceError(
                f"the optimizer of this {self.__func__.__name__} was freed: keep it as long as its methods"
            )
        return owner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__func__, self.__self__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        return self.__func__(self.__self__ if owner is None else owner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Not self.__func__: before copy or pickle has set it, that would call __getattr__ again.
        return getattr(object.__getattribute__(self, "__func__"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeakMethod":
        return WeakMethod(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a bound method is pickled: by its owner and name."""
        return getattr, (self.__self__, self.__func__.__name__)


def weakly_bound(method: Any, owner: object) -> Any:
    """Return a bound method of ``owner`` as a :class:`WeakMethod`; any other callable unchanged."""
    if type(method) is types.MethodType and method.__self__ is owner:
        return WeakMethod(method.__func__, owner)
    return method


class OwnStep:
    """The ``step`` that an optimizer had when it was initialised.

    Attributes:
        inner: that method.
        scope: the swap that puts float32 masters into the groups while it runs.
    """

    def __init__(self, optimizer: Optimizer, members: Members, scope: MasterSwap) -> None:
        self.inner: Callable[..., Any] = weakly_bound(optimizer.step, optimizer)
        self.scope = scope
        self._members = members

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Step without a closure: in one call, or in one call per bucket of parameters."""
        if is_on():
            with CastsOff():
                return self.run(*args, **kwargs)
        scope = self.scope
        if not scope.steps_in_parts:
            with scope.open():
                return self.call(*args, **kwargs)
        result = None
        with scope.by_part() as parts:
            for _ in parts:
                result = self.call(*args, **kwargs)
        return result

    def run_in_kernel(self, found_inf: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a fused step whose kernel skips if ``found_inf`` is above 0."""
        undos = UndoStack()
        try:
            undos.set_attribute(self._members.optimizer, "found_inf", found_inf)
            undos.set_attribute(self._members.optimizer, "grad_scale", None)
            return self.run(*args, **kwargs)
        finally:
            undos.unwind()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method itself while :attr:`scope` is open."""
        if not self._members.groups_without_fused:
            return self.inner(*args, **kwargs)
        with unfused(self._members.groups_without_fused):
            return self.inner(*args, **kwargs)


def renew_weight_casts() -> None:
    """Drop O1's casts of weights, after an optimizer may have changed weights inside of a forward.

    They are in torch's cache until the outermost forward ends. Outside of forwards there are none.

    Raises:
        RuntimeError: a forward runs with the casts of ``master_weights="model"``.
    """
    torch.clear_autocast_cache()
    refuse_changes_in_forward("a method of the optimizer that changes weights")


def creates_state_only(optimizer: Optimizer) -> bool:
    """Return whether the next step only creates the optimizer's state, as when torch's checkpoints call ``step``.

    Such a step has no state before, and learning rates and gradients of 0. It is not counted, and ranks do not agree on
    it, because not every rank needs it.
    """
    if optimizer.state or not all(_is_zero(group.get("lr")) for group in optimizer.param_groups):
        return False
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = [gradient for gradient in grads_of(parameters) if gradient is not None]
    return bool(gradients) and largest(gradients, gradients[0].device).item() == 0


def _is_zero(rate: Any) -> bool:
    return not (isinstance(rate, torch.Tensor) and not reads_without_sync(rate.device)) and bool(rate == 0)
