"""An initialised optimizer: the decision on a step, the step on float32 masters, and its count."""

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..autocast.thread_flags import CastsAs, is_on, present_state
from ..basics.bulk import grads_of, have_grads
from ..basics.logs import warn_user
from ..basics.running import current_pass, reads_without_sync
from ..config.plan import MasterWeightsMode, Plan
from ..distributed.sharding import is_distributed
from ..masters.masters import Masters
from ..masters.states import EncodedStates
from ..model.forward_weights import refuse_changes_in_forward
from ..model.writes import Writes
from ..scaling.scaler import LossScaler
from ..torch_internals.compiling_with_gradients import follow_dynamo
from . import hooks
from .gradients import Gradients, any_of, are_zero
from .params import OptimizerParams
from .ranks import Ranks
from .skipping import Skips

STEP: Final = "optimizer.step()"
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
        unowned: the gradients of the models' parameters that no optimizer has.
    """

    plan: Plan
    masters: Masters
    writes: Writes
    ranks: Ranks
    states: EncodedStates | None
    scalers: list[LossScaler]
    unowned: Gradients = field(default_factory=lambda: Gradients(widens=True))


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
        inner: its own step, as a function of the optimizer and the arguments.
    """

    def __init__(self, optimizer: Optimizer, shared: Shared) -> None:
        self.reference = weakref.ref(optimizer)
        self.shared = shared
        self.params = OptimizerParams(optimizer, shared.masters, shared.plan, shared.states)
        self.gradients = self.params.gradients
        self.skips = Skips(self.params, shared.plan)
        self.is_patched = False
        self.inner = unbound(optimizer, "step")
        self._beneath_hooks = hooks.inside_hooks(optimizer.step)
        # What skips_step() has decided for the next step.
        self._decided: tuple[bool, torch.Tensor | None] | None = None
        # True: the last loss has reached none of the parameters.
        self._lacks_gradients = False
        self._warned: set[str] = set()
        self._name = f"Optimizer.step#{type(optimizer).__name__}.step"  # in profiles, as torch names it

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.params.groups.optimizer

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step, or skip the step: the optimizer's ``step``."""
        optimizer = self.optimizer
        passed = args if closure is None and not args else (closure, *args)
        if not self.is_patched or self.params.is_open:
            # The session has ended, or the optimizer's own code steps inside of one of its methods.
            return self.inner(optimizer, *passed, **kwargs)
        refuse_changes_in_forward("step()")
        self.check_outside(STEP, _STEP_LATER)
        run: Callable[..., Any] = self._create_state
        if closure is not None or not creates_state_only(optimizer):
            self._prepare()
            found_inf = None
            if closure is None:
                skips, found_inf = self._decide()
                if skips:
                    return self._skip()
            elif self.shared.plan.is_dynamic:
                raise RuntimeError(FIXED_SCALE.format(f"{type(optimizer).__name__}.step(closure)"))
            self.gradients.consume()
            run = functools.partial(self._step_once, found_inf)
        if self._beneath_hooks is None:
            return run(optimizer, *passed, **kwargs)  # a step that other code has replaced runs the hooks itself
        return hooks.run_with_hooks(optimizer, run, (optimizer, *passed), kwargs)

    def _step_once(
        self, found_inf: torch.Tensor | None, optimizer: Any, closure: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step that was decided on, and count it; hooks have been called with the weights in the groups.

        Args:
            found_inf: whether a fused kernel is to skip; None: the step is not to be skipped.
        """
        if closure is not None:
            return self._step_with_closure(closure, *args, **kwargs)
        passed = (closure, *args) if args else ()
        if found_inf is None:
            result = self.run_own(*passed, **kwargs)
            self.skips.count_stepped(optimizer)
            return result
        optimizer.found_inf, optimizer.grad_scale = found_inf, None
        try:
            result = self.run_own(*passed, **kwargs)
        finally:
            del optimizer.found_inf, optimizer.grad_scale
        self.skips.count_in_kernel(found_inf)
        return result

    def _create_state(self, _: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step that only creates state, and restore the numbers: an optimizer may have divided 0 by 0 in it.

        Only weights with a gradient are stepped, and the masters of others are not even read: a weight may contain
        other values for a while, as for an evaluation.
        """
        self.params.sync()
        stepped = [weight for weight in self.params.weights if weight.grad is not None]
        restore = self._numbers(stepped)
        try:
            with self.params.only(stepped):
                return self.run_own(*args, **kwargs)
        finally:
            restore()

    def _numbers(self, weights: Sequence[nn.Parameter]) -> Callable[[], None]:
        """Copy the numbers of masters, and of weights without one; the function that is returned restores them."""
        masters = self.shared.masters
        found = [(weight, masters.of(weight)) for weight in weights]
        plain = [(weight, weight.detach().clone()) for weight, master in found if master is None]
        of_masters = [(master, masters.values(master).clone()) for _, master in found if master is not None]

        def restore() -> None:
            with torch.no_grad():
                for weight, values in plain:
                    weight.copy_(values)
            for master, values in of_masters:
                masters.load(master, values)

        return restore

    def run_own(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's own step, without hooks, on masters."""
        optimizer = self.optimizer
        step = self._beneath_hooks or self.inner
        with CastsAs() if is_on() else nullcontext(), torch.profiler.record_function(self._name):
            result = self.params.run(functools.partial(step, optimizer, *args, **kwargs))
        renew_weight_casts()
        if self.shared.plan.masters is MasterWeightsMode.IN_MODEL:
            # Fused kernels do not count their writes. The casts of these weights have to be made anew.
            torch.autograd.graph.increment_version(self.params.weights)
        return result

    def _prepare(self) -> None:
        """Refuse, or warn of, gradients that a step should not use."""
        params, shared = self.params, self.shared
        params.sync()
        joined, params.joined = params.joined, []
        if joined and any(scaler.has_scaled for scaler in shared.scalers):
            # Weights that came after the last block, which has not unscaled their gradients.
            unscaled = set(map(id, shared.unowned.weights))
            for weight in joined:
                if weight.grad is not None and id(weight) not in unscaled:
                    raise RuntimeError(_JOINED.format(shared.masters.names.of(weight)))
        shared.writes.before_step()
        if shared.ranks.is_first_step or is_distributed():
            shared.ranks.before_step(params.weights)
        # An LR scheduler warns if no step came before it. A skipped step counts as one.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._lacks_gradients:
            self._lacks_gradients = False
            if not have_grads(params.weights) and any(weight.requires_grad for weight in params.weights):
                shared.ranks.check_present()
                self._warn_once(_NO_GRADIENT)

    def _decide(self) -> tuple[bool, torch.Tensor | None]:
        """Decide with all ranks what a step does, and move the scales that are to move in the step.

        Returns:
            Whether to skip the step, and what a fused kernel decides by, so that the host need not wait for the device;
            None where the host has decided.
        """
        if self._decided is not None:
            decided, self._decided = self._decided, None
            return decided
        found_inf = self._reduced(self._found_inf())
        for scaler in self.shared.scalers:
            scaler.update()
        if found_inf is None:
            return False, None
        optimizer: Any = self.optimizer
        skips_in_kernel = getattr(optimizer, "_step_supports_amp_scaling", False) and all(
            group.get("fused") for group in optimizer.param_groups
        )
        if skips_in_kernel and not reads_without_sync(found_inf.device):
            return False, found_inf
        return found_inf.item() > 0, None

    def _found_inf(self) -> torch.Tensor | None:
        """Return whether the gradients that the next step uses contain inf or nan; None where it is not to be known."""
        plan, gradients = self.shared.plan, self.gradients
        if not plan.skips or getattr(self.optimizer, "found_inf", None) is not None:
            return None  # torch.amp.GradScaler passes a fused step what it has found
        if gradients.found_inf is not None and not plan.properties.skip_nonfinite:
            return gradients.found_inf
        found_inf = gradients.check()
        if found_inf is not None and plan.is_dynamic and not any(scaler.has_scaled for scaler in self.shared.scalers):
            self._warn_once(_NOT_SCALED)
        return any_of(gradients.found_inf, found_inf)

    def _reduced(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Return the largest result of all ranks, where something can be skipped; also that of each scaler."""
        if not (is_distributed() and self.shared.plan.skips):
            return found_inf
        weights = self.params.weights
        return self.shared.ranks.reduce(found_inf, weights[0].device if weights else torch.device("cpu"))

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
        self.check_outside(STEP, _STEP_LATER)
        self._prepare()
        self._decided = self._decide()
        if self._decided[0]:
            self._decided = None
            self._skip()
            return True
        return False

    def _step_with_closure(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Step with a closure: while it runs, the groups contain the weights, and O1's casts are on.

        A step in which gradients of an evaluation contain inf or nan is skipped, where steps are skipped at all: the
        weights are those from before it.
        """
        params = self.params
        casts = present_state() if is_on() else None
        restore = self._numbers(params.weights) if self.shared.plan.skips else None

        def evaluate() -> Any:
            with params.weights_in_groups(), CastsAs(casts) if casts is not None else nullcontext():
                renew_weight_casts()  # LBFGS changes weights between two evaluations of one step
                loss = closure()
                self.check_outside(STEP, _STEP_LATER)
                found_inf = self._reduced(self._found_inf())
                self.gradients.consume()
                if found_inf is not None and found_inf.item() > 0:
                    raise _Overflowed
                return loss

        try:
            with params.masters_in_groups():
                result = self.run_own(evaluate, *args, **kwargs)
        except BaseException as error:
            if restore is not None:
                restore()
            if not isinstance(error, _Overflowed):
                raise
            self._skip()
            return None
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

    def check_outside(self, what: str, instead: str = _LATER) -> None:
        """Refuse to use gradients or masters inside of a ``scale_loss`` or ``float32_weights`` block.

        Args:
            what: the call that would use them.
            instead: what to do.

        Raises:
            RuntimeError: a block is open.
        """
        self.shared.masters.refuse_inside_block(what)
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
        self.check_outside("mpinit.master_params()")
        self.params.sync()
        self.shared.masters.follow_writes()
        yield from self.shared.masters.hand_out(self.params.parameters())

    def gradients_to_clip(self) -> list[nn.Parameter]:
        """Return the parameters whose ``grad`` the next step uses."""
        self.check_outside("mpinit.clip_grad_norm_()")
        self.params.sync()
        self.shared.masters.follow_writes()
        if self.gradients.widens:
            self.gradients.widen()
        return self.params.parameters()


def unbound(owner: object, name: str) -> Callable[..., Any]:
    """Return a method as a function of its object, which does not keep the object alive."""
    method = getattr(owner, name)
    if isinstance(method, types.MethodType) and method.__self__ is owner:
        return method.__func__
    return lambda _, *args, **kwargs: method(*args, **kwargs)


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
