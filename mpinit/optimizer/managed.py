"""An initialised optimizer: its patched methods, which run, skip and count its steps."""

import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..autocast.thread_flags import CastsOff
from ..basics.patching import UndoStack
from ..basics.running import reads_without_sync
from ..config.plan import MasterWeightsMode, Plan
from ..distributed.sharding import is_distributed
from ..masters.states import EncodedStates, decode, decoded_state_dict
from ..model.float32_values import Float32Values
from ..model.forward_weights import refuse_changes_in_forward
from ..model.written_buffers import WrittenBuffers
from ..scaling.scaler import LossScaler
from ..torch_internals.step_hooks import StepHooks, has_step_hooks
from .closures import FIRST, SECOND, Closure, ClosureSteps, SamSteps
from .gradient_state import Phase, agreed, cleared, loss_reached_none
from .gradients import Gradients
from .members import Members
from .ranks import Ranks
from .scope import MasterSwap
from .skipping import Skips
from .step import GradientChecks, OwnStep, WeakMethod, creates_state_only, renew_weight_casts, weakly_bound

_LOAD: Final = "load_state_dict"
_BESIDE: Final = (
    "{0}.{1} was not called through the attribute `optimizer.{1}`, which mpinit.initialize has replaced: this method "
    "was read or compiled before, or is that of the class or of an optimizer inside. It would {2}. Call "
    "optimizer.{1}() of the optimizer that mpinit.initialize was called with, and read or compile it "
    "after mpinit.initialize"
)


@dataclass(frozen=True, eq=False)
class Shared:
    """The parts of a session that all of its optimizers use.

    The lists lose an optimizer at the line at which it is freed, which may be in a loop over them. So loops go over a
    copy, ``members[:]``.

    Attributes:
        members: the members of each optimizer whose :meth:`ManagedOptimizer.list_members` was called.
        written: the 16-bit buffers that a warning names if the model writes to them.
    """

    plan: Plan
    values: Float32Values
    ranks: Ranks
    states: EncodedStates | None
    members: list[Members]
    written: WrittenBuffers


class Decision(enum.Enum):
    """A decision about one call of ``step``."""

    OWN = "the optimizer's own step, with nothing done to it: the session has ended, or another step runs"
    STATE_ONLY = "a step that creates the optimizer's state and has no effect: not counted"
    SKIP = "no step: gradients overflowed"
    IN_KERNEL = "a fused kernel skips by itself, because reading whether gradients overflowed is a device sync"
    CLOSURE = "a step that evaluates the loss"
    RUN = "a step"


@dataclass(eq=False)
class ManagedOptimizer:
    """The state and the methods that mpinit adds to one optimizer; the optimizer stays the object that it was.

    Its parts are made when they are first used. The optimizer's patched methods, or its hooks, keep this object alive;
    this object refers to the optimizer weakly.

    Attributes:
        reference: a weak reference to the optimizer.
        shared: the parts of its session.
        is_patched: whether :func:`patch` has set methods on the optimizer; otherwise hooks count its steps.
    """

    reference: weakref.ref[Optimizer]
    shared: Shared
    is_patched: bool = field(default=False, init=False)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        optimizer = self.reference()
        assert optimizer is not None, "an optimizer that was freed is in no list"
        return optimizer

    @functools.cached_property
    def members(self) -> Members:
        """The parameters in its groups."""
        shared = self.shared
        return Members(self.reference, shared.values, shared.plan.masters)

    def list_members(self) -> None:
        """Add its members to those of the session."""
        if self.members not in self.shared.members:
            self.shared.members.append(self.members)

    @functools.cached_property
    def scope(self) -> MasterSwap:
        """The float32 masters that are in its groups while its own code runs."""
        return MasterSwap(self.members, self.shared.states)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """The gradients of its parameters."""
        return Gradients(self.members.weights, self.members.table)

    @functools.cached_property
    def checks(self) -> GradientChecks:
        """The checks of its gradients."""
        shared = self.shared
        return GradientChecks(self.members, self.gradients, shared.plan, shared.ranks)

    @functools.cached_property
    def skips(self) -> Skips:
        """The counts of steps, and the last overflow."""
        return Skips(self.members, self.gradients, self.shared.plan)

    @functools.cached_property
    def sam(self) -> SamSteps:
        """The two halves of a step of a sharpness-aware optimizer."""
        return SamSteps(self.gradients, self.members, self.checks, self.own, self.skips)

    @functools.cached_property
    def _closures(self) -> ClosureSteps:
        return ClosureSteps(self.members, self.shared.plan, self.checks, self.own, self.skips)

    @functools.cached_property
    def own(self) -> OwnStep:
        """The optimizer's own step; first read before the optimizer is patched."""
        return OwnStep(self.optimizer, self.members, self.scope)

    # -- a step ---------------------------------------------------------------------------------------------------

    def decide(self, closure: Closure | None) -> Decision:
        """Return what a call of ``step`` is going to do.

        Raises:
            RuntimeError: gradients are scaled, or ranks cannot agree.
        """
        if not self.is_patched or self.scope.is_open:
            return Decision.OWN
        refuse_changes_in_forward("step()")
        if closure is None and creates_state_only(self.optimizer):
            self.checks.prepare_state_only()
            return Decision.STATE_ONLY
        self.checks.prepare()
        if closure is None and self.checks.skips_in_kernel():
            return Decision.IN_KERNEL
        # Also with a closure: the optimizer may use the present gradients before it evaluates the loss.
        if self.gradients.overflowed():
            return Decision.SKIP
        return Decision.RUN if closure is None else Decision.CLOSURE

    def step(self, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step, or skip the step: the optimizer's ``step``."""
        decision = self.decide(closure)
        if decision not in (Decision.OWN, Decision.STATE_ONLY):
            self.shared.written.before_step()
        if decision is Decision.SKIP:
            return self._skip()
        if decision is Decision.STATE_ONLY:
            with self.members.values.without_moving():
                return self._with_hooks(decision, (closure, *args), kwargs)
        if decision is Decision.OWN:
            return self.own.inner(*(args if closure is None else (closure, *args)), **kwargs)
        result = self._with_hooks(decision, (closure, *args), kwargs)
        self.gradients.stepped(in_kernel=decision is Decision.IN_KERNEL)
        renew_weight_casts()
        if self.shared.plan.masters is MasterWeightsMode.IN_MODEL:
            # Fused kernels do not count their writes. The casts of these weights have to be made anew.
            torch.autograd.graph.increment_version([p for g in self.optimizer.param_groups for p in g["params"]])
        return result

    def _with_hooks(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not has_step_hooks(self.optimizer):
            return self._run(decision, *args, **kwargs)
        # Hooks are the user's code: they run once per step, also if it has several parts, with weights in the groups.
        hooks = StepHooks(self.optimizer)
        args, kwargs = hooks.before(args, kwargs)
        self.members.values.apply_writes()
        if decision in (Decision.RUN, Decision.IN_KERNEL):
            if self.checks.hooks_wrote_nonfinite():
                return self._skip()
            decision = Decision.IN_KERNEL if self.checks.skips_in_kernel() else Decision.RUN
        with hooks:
            self.members.sync_groups()
            result = self._run(decision, *args, **kwargs)
        hooks.after(args, kwargs)
        return result

    def _run(self, decision: Decision, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        # A hook may have replaced the closure.
        if closure is not None:
            return self._closures.step(self.gradients, closure, *args, **kwargs)
        found_inf = self.gradients.state.found_inf
        if decision is Decision.IN_KERNEL and found_inf is not None:
            result = self.own.run_in_kernel(found_inf, *args, **kwargs)
            self.skips.count_in_kernel(found_inf)
            return result
        result = self.own.run(*args, **kwargs)
        if decision is not Decision.STATE_ONLY:
            self.skips.count_stepped(self.optimizer)
        return result

    def skips_step(self) -> bool:
        """Skip the next step now if gradients overflowed; otherwise return False, and the caller calls ``step``.

        A GradScaler and Accelerate call this before ``step``, so that wrappers of ``step`` do not see a skipped step.
        """
        if not self.is_patched:
            return False
        self.members.sync_groups()
        self.checks.agree()
        if self.checks.skips_in_kernel() or not self.gradients.overflowed():
            self.gradients.apply(agreed, self.gradients.state.found_inf)
            return False
        self.checks.prepare()
        self._skip()
        return True

    def _skip(self) -> None:
        self.skips.skip()
        self.gradients.skipped()
        renew_weight_casts()

    def after_unscaling(self, loss: torch.Tensor, scaler: LossScaler, overflowed: bool) -> str | None:
        """Record the result of a backward pass, before the scale is updated.

        Returns:
            A description of the gradient with the largest share of inf and nan; None without an overflow.
        """
        if self.gradients.state.phase is Phase.EMPTY:
            self.gradients.apply(loss_reached_none, scaler)
        if overflowed:
            return self.skips.record_overflow(loss, scaler)
        if not reads_without_sync(loss.device):
            self.skips.remember(loss)
        return None

    # -- its parameters -------------------------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters in its groups, each once, in their order."""
        return self.members.parameters()

    def master_params(self) -> Iterator[nn.Parameter]:
        """Yield the groups' members in float32, with their unscaled gradients; see :func:`mpinit.master_params`."""
        self.gradients.check_unscaled("mpinit.master_params()", "move it after the with-block")
        values = self.members.values
        values.apply_writes()
        yield from values.hand_out(self.members.parameters())

    def gradients_to_clip(self) -> list[nn.Parameter]:
        """Return the parameters whose ``grad`` the next step uses, unscaled and in the dtype that it is kept in.

        In a process group 16-bit gradients stay 16-bit: DistributedDataParallel adds to them in the weights' dtype.
        """
        self.gradients.check_unscaled("mpinit.clip_grad_norm_()", "move it after the with-block")
        self.members.values.apply_writes()
        if self.is_patched:
            self.members.sync_groups()
            if not is_distributed():
                self.gradients.keep_in_dtype()
        return self.members.parameters()


def before_backward(managed: ManagedOptimizer) -> None:
    """Prepare for the backward pass of a scaled loss; count a step that the loop did not call after an overflow."""
    checks, gradients = managed.checks, managed.gradients
    checks.before_backward()
    if checks.awaits_step and gradients.were_dropped():
        if checks.agree_without_step():
            managed._skip()
        gradients.apply(cleared)


def check_own_step(managed: ManagedOptimizer) -> None:
    """Refuse the optimizer's own step outside of mpinit's, unless it would do the same.

    Raises:
        RuntimeError: it would step 16-bit weights instead of their masters, or use gradients that overflowed.
    """
    managed.members.sync_groups()
    if managed.members.masters or managed.shared.states is not None or managed.shared.plan.skips:
        name = type(managed.optimizer).__name__
        raise RuntimeError(
            _BESIDE.format(name, "step", "update 16-bit weights without their masters, or with inf and nan")
        )


def check_own_load(managed: ManagedOptimizer, holder: Optimizer, state: dict[str, Any]) -> None:
    """Refuse the own ``load_state_dict`` of an optimizer, or of one inside it, if it would cast state to 16 bit.

    Raises:
        RuntimeError: it was not called through the optimizer's attribute.
    """
    is_inside = managed.scope.is_open or managed.members.table.are_in_model
    if is_inside or not state.get("state") or getattr(vars(holder).get("step"), "managed", managed) is not managed:
        return
    managed.members.sync_groups()
    if managed.members.masters or managed.shared.states is not None:
        name = type(holder).__name__
        raise RuntimeError(_BESIDE.format(name, _LOAD, "cast the state of float32 masters to 16 bit"))


# -- its patched methods ----------------------------------------------------------------------------------------------


def patch(managed: ManagedOptimizer, states: EncodedStates | None, undos: UndoStack, owner: object) -> None:
    """Patch an optimizer's methods, which then run on float32 masters.

    Args:
        states: the encoding of the optimizer's state between steps; None: the state is float32.
        owner: an object that the patched methods keep alive.
    """
    optimizer, inner, known = managed.optimizer, managed.own.inner, managed.reference
    managed.list_members()

    def step(self: Any, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        if self is not known():
            # A copy of the optimizer has the method as an attribute.
            return type(self).step(self, closure, *args, **kwargs)
        return managed.step(closure, *args, **kwargs)

    step.owner = owner  # type: ignore[attr-defined]

    if hasattr(inner, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.managed = managed  # type: ignore[attr-defined]
    names = [_LOAD, *_own_methods(optimizer)]
    methods: list[Any] = [step, *(_on_masters(managed, name) for name in names)]
    undos.push(functools.partial(_end, managed))
    if states is not None:
        undos.push(functools.partial(_decode_states, managed))
        with managed.scope.open():
            pass  # the exit encodes the state that the optimizer has already
        for holder in managed.members.holders():
            if hasattr(holder, "_optimizer_state_dict_post_hooks"):
                undos.push(holder.register_state_dict_post_hook(lambda _, state: decoded_state_dict(state)).remove)
    for function in methods:
        # Like a bound method, because LR schedulers read ``optimizer.step.__func__``. A scheduler that is made later
        # wraps this method. The undo cannot remove the method without that wrapper, so both stay, and call the
        # optimizer's own.
        undos.set_attribute(optimizer, function.__name__, WeakMethod(function, optimizer), stays_wrapped=True)
    for holder in managed.members.holders():
        if hasattr(holder, "_optimizer_load_state_dict_pre_hooks"):
            undos.push(holder.register_load_state_dict_pre_hook(functools.partial(check_own_load, managed)).remove)
    managed.is_patched = True


def _end(managed: ManagedOptimizer) -> None:
    managed.is_patched = False
    managed.scope.release()


def _decode_states(managed: ManagedOptimizer) -> None:
    """Convert the optimizer's state back to float32, unless it was freed."""
    if managed.reference() is None:
        return
    managed.scope.close()
    for holder in managed.members.holders():
        decode([state for state in holder.state.values() if isinstance(state, dict)])


def _on_masters(managed: ManagedOptimizer, name: str) -> Callable[..., Any]:
    """Make a method that runs one of the optimizer's own methods on float32 masters."""
    optimizer, known = managed.optimizer, managed.reference
    inner = weakly_bound(getattr(optimizer, name), optimizer)
    is_half = name in (FIRST, SECOND)

    @functools.wraps(getattr(inner, "__func__", inner))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not known():
            return getattr(type(self), name)(self, *args, **kwargs)
        if not managed.is_patched or managed.scope.is_open:
            return inner(*args, **kwargs)
        if is_half:
            half = managed.sam.first if name == FIRST else managed.sam.second
            return half(inner, *args, **kwargs)
        values = managed.members.values
        if name == _LOAD and values.masters.are_in_model:
            return inner(*args, **kwargs)  # the groups contain float32 parameters
        values.apply_writes()
        with CastsOff(), values.without_moving() if name == _LOAD else nullcontext(), managed.scope.open():
            result = inner(*args, **kwargs)
        renew_weight_casts()
        return result

    method.__name__ = name
    return method


def _own_methods(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's public methods that torch's do not have, such as schedule-free's ``eval``."""
    known = set(dir(Optimizer))
    names = dict.fromkeys([name for cls in type(optimizer).__mro__ for name in vars(cls)])
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in known
        and inspect.isfunction(getattr(type(optimizer), name, None))
        and not isinstance(inspect.getattr_static(type(optimizer), name), staticmethod)
    ]
