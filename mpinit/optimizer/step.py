"""An initialised optimizer: its patched methods, which decide on a step, run it on float32 masters, and count it."""

import copy
import enum
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..autocast.thread_flags import CastsAs, is_on, present_state
from ..basics.bulk import grads_of, have_grads
from ..basics.dtypes import is_lower_precision
from ..basics.logs import warn_user
from ..basics.patching import UndoStack
from ..basics.running import current_pass, reads_without_sync
from ..config.plan import MasterWeightsMode, Plan
from ..distributed.sharding import is_distributed
from ..masters.masters import Masters
from ..masters.states import EncodedStates, decode, decoded_state_dict
from ..model.forward_weights import refuse_changes_in_forward
from ..model.writes import Writes
from ..scaling.scaler import LossScaler
from ..torch_internals.compiling_with_gradients import follow_dynamo
from ..torch_internals.fused_sgd import unfused
from . import hooks
from .gradients import Gradients, any_of, are_zero
from .members import wrapped_by
from .params import OptimizerParams, Snapshot
from .per_parameter import steps_per_parameter
from .ranks import Ranks
from .skipping import Skips

STEP: Final = "optimizer.step()"
_LOAD: Final = "load_state_dict"
_INSIDE_BLOCK: Final = "{} was called inside `with mpinit.scale_loss(...)`, at whose end gradients are unscaled: {}"
_LATER: Final = "move it after the with-block"
_STEP_LATER: Final = (
    "move it after the with-block; a hook that steps each weight inside of the backward pass needs opt_level='O5' or "
    "loss_scale=1.0"
)
FIXED_SCALE: Final = (
    "{} evaluates the loss more than once in a step, and a dynamic loss scale may move in between: choose bfloat16, "
    "opt_level='O5', which needs no loss scale, or a fixed one, loss_scale=128.0"
)
_NOT_SCALED: Final = (
    "optimizer.step() uses gradients that did not come through mpinit.scale_loss: they were not scaled, and small "
    "ones may have become 0 in 16 bit. Use `with mpinit.scale_loss(loss, optimizer) as scaled_loss: "
    "scaled_loss.backward()`; where a torch.amp.GradScaler scales them, use mpinit.GradScaler(optimizer) in its place"
)
_JOINED: Final = (
    "{!r} was added to the optimizer after backward(), and its gradient is still multiplied by the loss scale: call "
    "add_param_group before `with mpinit.scale_loss(...)`"
)
_NO_GRADIENT: Final = (
    "optimizer.step() does nothing: a loss was scaled, and no parameter of this optimizer has a gradient. Was "
    "scaled_loss.backward() called? Does the loss use these parameters? Was the model copied, or wrapped in something "
    "that replaces its parameters, after the optimizer was made?"
)

Closure = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Shared:
    """The parts of a session that all of its optimizers use.

    Attributes:
        states: the encoding of optimizer states between steps; None: they are float32.
        scalers: the session's loss scalers.
        params: the parameters of each optimizer. The list loses an optimizer's at the line at which that is freed,
            which may be in a loop over it. So loops go over a copy, ``params[:]``.
        unowned: the gradients of the models' parameters that no optimizer has.
    """

    plan: Plan
    masters: Masters
    writes: Writes
    ranks: Ranks
    states: EncodedStates | None
    scalers: list[LossScaler]
    params: list[OptimizerParams] = field(default_factory=list)
    unowned: Gradients = field(default_factory=lambda: Gradients(widens=True))


class _Decision(enum.Enum):
    RUN = enum.auto()
    SKIP = enum.auto()
    # A fused kernel skips by itself, so that the host need not wait for the device.
    IN_KERNEL = enum.auto()


class _Overflowed(Exception):
    """An evaluation of a closure whose gradients contain inf or nan."""


class ManagedOptimizer:
    """What mpinit adds to one optimizer, which stays the object that it was.

    The optimizer's patched methods keep this object alive; it refers to the optimizer weakly.

    Attributes:
        reference: a weak reference to the optimizer.
        shared: the parts of its session.
        params: the parameters in its groups.
        gradients: their gradients.
        skips: the counts of its steps, and its last overflow.
        is_patched: whether its methods are patched.
    """

    def __init__(self, optimizer: Optimizer, shared: Shared) -> None:
        self.reference = weakref.ref(optimizer)
        self.shared = shared
        self.params = OptimizerParams(self.reference, shared.masters, shared.plan, shared.states)
        self.gradients = self.params.gradients
        self.skips = Skips(self.params, shared.plan)
        self.is_patched = False
        self.inner = weakly_bound(optimizer.step, optimizer)
        self._beneath_hooks = hooks.inside_hooks(optimizer.step)
        # What skips_step() has decided for the next step.
        self._decided: tuple[_Decision, torch.Tensor | None] | None = None
        # True: the last loss has reached none of the parameters.
        self._lacks_gradients = False
        self._warned: set[str] = set()
        self._name = f"Optimizer.step#{type(optimizer).__name__}.step"  # in profiles, as torch names it

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.params.optimizer

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step, or skip the step: the optimizer's ``step``."""
        optimizer = self.optimizer
        if not self.is_patched or self.params.is_open:
            # The session has ended, or the optimizer's own code steps inside of one of its methods.
            return self.inner(*(args if closure is None else (closure, *args)), **kwargs)
        refuse_changes_in_forward("step()")
        if closure is None and creates_state_only(optimizer):
            self.check_unscaled(STEP, _STEP_LATER)
            return self._with_hooks(lambda _, *args, **kwargs: self._create_state(*args, **kwargs), args, kwargs)
        self._prepare()
        decision, found_inf = _Decision.RUN, None
        if closure is None:
            decision, found_inf = self._decide()
            if decision is _Decision.SKIP:
                return self._skip()
        elif self.shared.plan.is_dynamic:
            raise RuntimeError(FIXED_SCALE.format(f"{type(optimizer).__name__}.step(closure)"))
        self.gradients.consume()
        passed = args if closure is None and not args else (closure, *args)
        run = functools.partial(self._step_once, found_inf if decision is _Decision.IN_KERNEL else None)
        return self._with_hooks(run, passed, kwargs)

    def _with_hooks(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``run(optimizer, *args, **kwargs)`` between the user's hooks, which see the weights in the groups."""
        optimizer = self.optimizer
        if self._beneath_hooks is None:
            return run(optimizer, *args, **kwargs)  # a step that other code has replaced runs the hooks itself
        return hooks.run_with_hooks(optimizer, run, (optimizer, *args), kwargs)

    def _step_once(self, found_inf: torch.Tensor | None, _: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step that was decided on, and count it; hooks have been called with the weights in the groups."""
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            args, kwargs = args[1:], {name: value for name, value in kwargs.items() if name != "closure"}
            return self._step_with_closure(closure, *args, **kwargs)
        if found_inf is None:
            result = self.run_own(*args, **kwargs)
            self.skips.count_stepped(self.optimizer)
            return result
        undos = UndoStack()
        try:
            undos.set_attribute(self.optimizer, "found_inf", found_inf)
            undos.set_attribute(self.optimizer, "grad_scale", None)
            result = self.run_own(*args, **kwargs)
        finally:
            undos.unwind()
        self.skips.count_in_kernel(found_inf)
        return result

    def _create_state(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step that only creates state. In 16 bits, at O3, it may divide 0 by an eps that is 0 there."""
        mastered = set(map(id, self.params.mastered))
        others = [p for p in self.params.weights if id(p) not in mastered and is_lower_precision(p.dtype)]
        before = [(parameter, parameter.detach().clone()) for parameter in others]
        result = self.run_own(*args, **kwargs)
        with torch.no_grad():
            for parameter, values in before:
                parameter.copy_(values)
        return result

    def run_own(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's own step on masters: in one call, or in one call per bucket of parameters."""
        params, result = self.params, None
        with CastsAs() if is_on() else nullcontext():  # the casts of O1
            if params.steps_in_parts:
                with params.parts_in_groups() as parts:
                    for _ in parts:
                        result = self._call(*args, **kwargs)
            else:
                with params.masters_in_groups():
                    result = self._call(*args, **kwargs)
        renew_weight_casts()
        if self.shared.plan.masters is MasterWeightsMode.IN_MODEL:
            # Fused kernels do not count their writes. The casts of these weights have to be made anew.
            torch.autograd.graph.increment_version(params.weights)
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's own step, without hooks, while masters are in the groups."""
        optimizer, step, groups = self.optimizer, self._beneath_hooks, self.params.groups_without_fused
        call = self.inner if step is None else functools.partial(step, optimizer)
        with unfused(groups) if groups else nullcontext(), torch.profiler.record_function(self._name):
            return call(*args, **kwargs)

    def _prepare(self) -> None:
        """Refuse, or warn of, gradients that a step should not use."""
        self.params.sync()
        self.check_unscaled(STEP, _STEP_LATER)
        if self.params.joined:
            self._check_joined()
        self.shared.writes.before_step()
        if self.shared.ranks.is_first_step or is_distributed():
            self.shared.ranks.before_step(self.params.weights)
        # An LR scheduler warns if no step came before it. A skipped step counts as one.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._lacks_gradients:
            self._lacks_gradients = False
            if not have_grads(self.params.weights) and any(weight.requires_grad for weight in self.params.weights):
                self.shared.ranks.check_present()
                self._warn_once(_NO_GRADIENT)

    def _check_joined(self) -> None:
        """Refuse gradients of parameters that were added since the last block, whose gradients it has not unscaled."""
        joined, self.params.joined = self.params.joined, []
        unscaled = set(map(id, self.shared.unowned.weights))
        for weight in joined if any(scaler.has_scaled for scaler in self.shared.scalers) else ():
            if weight.grad is not None and id(weight) not in unscaled:
                raise RuntimeError(_JOINED.format(self.shared.masters.names.of(weight)))

    def _decide(self) -> tuple[_Decision, torch.Tensor | None]:
        """Decide with all ranks what a step does, and move the scales that are to move in the step.

        Returns:
            The decision, and whether gradients contain inf or nan; None where that is not known.
        """
        if self._decided is not None:
            decided, self._decided = self._decided, None
            return decided
        found_inf = self._found_inf()
        found_inf = self._reduced(found_inf)
        for scaler in self.shared.scalers:
            scaler.update()
        if found_inf is None:
            return _Decision.RUN, None
        if not reads_without_sync(found_inf.device) and self._skips_in_kernel():
            return _Decision.IN_KERNEL, found_inf
        return _Decision.SKIP if found_inf.item() > 0 else _Decision.RUN, found_inf

    def _found_inf(self) -> torch.Tensor | None:
        """Return whether the gradients that the next step uses contain inf or nan; None where it is not to be known."""
        plan, gradients = self.shared.plan, self.gradients
        self.skips.checked_before = None
        if not plan.skips or getattr(self.optimizer, "found_inf", None) is not None:
            return None  # torch.amp.GradScaler passes a fused step what it has found
        if gradients.is_fresh and not plan.properties.skip_nonfinite:
            return gradients.found_inf
        found_inf = gradients.check()
        if found_inf is None:
            return gradients.found_inf
        if plan.is_dynamic and not any(scaler.has_scaled for scaler in self.shared.scalers):
            self._warn_once(_NOT_SCALED)
        self.skips.checked_before = gradients.found_inf if gradients.is_fresh else None
        return any_of(gradients.found_inf, found_inf)

    def _reduced(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Return the largest result of all ranks, where something can be skipped; also that of each scaler."""
        if not (is_distributed() and self.shared.plan.skips):
            return found_inf
        weights = self.params.weights
        return self.shared.ranks.reduce(found_inf, weights[0].device if weights else torch.device("cpu"))

    def _skips_in_kernel(self) -> bool:
        optimizer: Any = self.optimizer
        are_fused = all(group.get("fused") for group in optimizer.param_groups)
        return are_fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def _skip(self) -> None:
        self.gradients.consume()
        self.skips.skip()
        renew_weight_casts()

    def skips_step(self) -> bool:
        """Skip the next step now if gradients overflowed; otherwise return False, and the caller calls ``step``.

        A GradScaler and Accelerate call this before ``step``, so that wrappers of ``step`` do not see a skipped step.
        """
        if not self.is_patched:
            return False
        self._prepare()
        decision, found_inf = self._decide()
        if decision is _Decision.SKIP:
            self._skip()
            return True
        self._decided = decision, found_inf
        return False

    # -- a step with a closure ------------------------------------------------------------------------------------

    def _step_with_closure(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Step with a closure: while it runs, the groups contain the weights, and O1's casts are on.

        A step in which gradients of an evaluation contain inf or nan is skipped, where steps are skipped at all: the
        weights are those from before it.
        """
        optimizer, params = self.optimizer, self.params
        casts = present_state() if is_on() else None
        skips = self.shared.plan.skips
        evaluates_first = steps_per_parameter(optimizer)

        def evaluate() -> Any:
            with params.weights_in_groups(), ExitStack() as stack:
                if casts is not None:
                    stack.enter_context(CastsAs(casts))
                renew_weight_casts()  # LBFGS changes weights between two evaluations of one step
                loss = closure()
                self.check_unscaled(STEP, _STEP_LATER)
                found_inf = self._reduced(self._found_inf())
                self.gradients.consume()
                if found_inf is not None and found_inf.item() > 0:
                    raise _Overflowed
                return loss

        before = Snapshot(params) if skips and not evaluates_first else None
        try:
            with CastsAs():
                if evaluates_first:
                    # torch's optimizers evaluate the loss once, before anything else.
                    with torch.enable_grad():
                        result = evaluate()
                    params.sync()
                    self.run_own(*args, **kwargs)
                else:
                    with params.masters_in_groups():
                        result = self._call(evaluate, *args, **kwargs)
        except BaseException as error:
            if before is not None:
                before.restore()
            if not isinstance(error, _Overflowed):
                raise
            self._skip()
            return None
        renew_weight_casts()
        self.skips.count_done()
        return result

    # -- around a block -------------------------------------------------------------------------------------------

    def before_block(self) -> None:
        """Prepare for a ``scale_loss`` block."""
        self._decided = None
        self.params.joined = []
        follow_dynamo()

    def after_block(self, loss: torch.Tensor, scaler: LossScaler, scale: torch.Tensor | None) -> None:
        """Remember a block whose backward pass has ended, for the report of an overflow."""
        self.params.joined = []
        self.skips.after_block(loss, scaler, scale)
        self._lacks_gradients = not have_grads(self.params.weights)

    def check_unscaled(self, what: str, instead: str = _LATER) -> None:
        """Refuse to use gradients inside of a block.

        Args:
            what: the call that would use them.
            instead: what to do.

        Raises:
            RuntimeError: a block is open.
        """
        # At scale 1 a hook of the backward pass may step weights whose gradients are complete.
        if self.gradients.is_scaled or (self.gradients.is_open and current_pass() == -1):
            raise RuntimeError(_INSIDE_BLOCK.format(what, instead))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text)

    # -- its parameters -------------------------------------------------------------------------------------------

    def master_params(self) -> Iterator[nn.Parameter]:
        """Yield the groups' parameters in float32, with their unscaled gradients; see :func:`mpinit.master_params`."""
        self.check_unscaled("mpinit.master_params()")
        self.params.sync()
        self.shared.masters.apply_writes()
        yield from self.shared.masters.hand_out(self.params.parameters())

    def gradients_to_clip(self) -> list[nn.Parameter]:
        """Return the parameters whose ``grad`` the next step uses."""
        self.check_unscaled("mpinit.clip_grad_norm_()")
        self.params.sync()
        self.shared.masters.apply_writes()
        if self.gradients.widens:
            self.gradients.widen()
        return self.params.parameters()


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
    return bool(gradients) and are_zero(gradients)


def _is_zero(rate: Any) -> bool:
    # Torch's checkpoints set a number, or a tensor on the CPU.
    return rate.is_cpu and bool(rate == 0) if isinstance(rate, torch.Tensor) else bool(rate == 0)


# -- its patched methods ----------------------------------------------------------------------------------------------


def patch(managed: ManagedOptimizer, undos: UndoStack, owner: object) -> None:
    """Patch an optimizer's methods, which then run on float32 masters.

    Args:
        owner: an object that the patched methods keep alive.
    """
    optimizer, known, states = managed.optimizer, managed.reference, managed.shared.states

    def step(self: Any, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        if self is not known():
            # A copy of the optimizer has the method as an attribute.
            return type(self).step(self, closure, *args, **kwargs)
        return managed.step(closure, *args, **kwargs)

    step.owner = owner  # type: ignore[attr-defined]
    step.managed = managed  # type: ignore[attr-defined]
    if hasattr(managed.inner, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    methods: list[Any] = [step, *(_on_masters(managed, optimizer, name) for name in (_LOAD, *_own_methods(optimizer)))]
    undos.push(functools.partial(_end, managed))
    if states is not None:
        undos.push(functools.partial(_decode_states, managed))
        with managed.params.masters_in_groups():
            pass  # the end encodes the state that the optimizer has already
        for holder in managed.params.holders():
            if hasattr(holder, "_optimizer_state_dict_post_hooks"):
                undos.push(holder.register_state_dict_post_hook(lambda _, state: decoded_state_dict(state)).remove)
    for function in methods:
        # Like a bound method, because LR schedulers read ``optimizer.step.__func__``. A scheduler that is made later
        # wraps this method. The undo cannot remove the method without that wrapper, so both stay, and call the
        # optimizer's own.
        undos.set_attribute(optimizer, function.__name__, WeakMethod(function, optimizer), stays_wrapped=True)
    for inner in wrapped_by(optimizer):
        # Its load_state_dict would cast state to the dtype of the weights, too.
        undos.set_attribute(inner, _LOAD, WeakMethod(_on_masters(managed, inner, _LOAD), inner), stays_wrapped=True)
    managed.is_patched = True


def _end(managed: ManagedOptimizer) -> None:
    managed.is_patched = False
    managed.params.release()


def _decode_states(managed: ManagedOptimizer) -> None:
    """Convert the optimizer's state back to float32, unless it was freed."""
    if managed.reference() is None:
        return
    managed.params.close()
    for holder in managed.params.holders():
        decode([state for state in holder.state.values() if isinstance(state, dict)])


def _on_masters(managed: ManagedOptimizer, optimizer: Optimizer, name: str) -> Callable[..., Any]:
    """Make a method that runs a method of an optimizer, or of one that it wraps, on float32 masters."""
    known = weakref.ref(optimizer)
    inner = weakly_bound(getattr(optimizer, name), optimizer)

    @functools.wraps(getattr(inner, "__func__", inner))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not known():
            return getattr(type(self), name)(self, *args, **kwargs)
        params, masters = managed.params, managed.shared.masters
        if not managed.is_patched or params.is_open or (name == _LOAD and masters.are_in_model):
            return inner(*args, **kwargs)
        managed.check_unscaled(f"optimizer.{name}()")
        masters.apply_writes()
        with CastsAs():
            if name == _LOAD:
                with params.masters_in_groups_for_load():
                    result = inner(*args, **kwargs)
            else:
                with params.masters_in_groups():
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
