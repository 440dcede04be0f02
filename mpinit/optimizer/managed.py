"""An initialised optimizer: the methods that are put on it, and what becomes of a step."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.logs import warn_user
from ..basics.patching import UndoStack
from ..distributed.sharding import is_distributed
from ..masters.full import FullMasters
from ..masters.states import EncodedStates, decode, shown
from ..model.forward_weights import STANDING, renew_casts
from ..plan import ScalingRule
from ..scaling.scaler import LossScaler
from ..torch_internals.columns import grads_of
from ..torch_internals.compiling_with_gradients import follow_dynamo
from ..torch_internals.fused_sgd import unfused
from ..torch_internals.native_autocast import CastsAs, CastsOff, flags, is_on
from ..torch_internals.running import is_capturing, is_read_freely
from ..torch_internals.step_hooks import StepHooks, has_step_hooks
from .gradients import Done, Gradients, largest
from .halves import FIRST, SECOND, Halves
from .members import Members, Snapshot
from .overflow_log import OverflowLog
from .per_parameter import steps_per_parameter
from .ranks import Ranks
from .scope import Scope
from .step_counts import StepCounter

# Steps between looks for weights beyond float16's range, each of which reads all of them.
_LOOKS_EVERY: Final = 1000
_STEP: Final = "optimizer.step()"
_LOAD: Final = "load_state_dict"
_SKIPS_TO_WARN_OF: Final = 3
Closure = Callable[[], Any]


class _EvaluationOverflow(Exception):
    """A closure went on overflowing however far the scale was lowered."""


class ManagedOptimizer:
    """One optimizer of a session; it stays the object it was, with a ``step`` of ours.

    Attributes:
        gradients: its gradients.
        overflow_log: what is known of its last overflow.
        counter: of its steps.
        skips: whether steps are skipped whose gradients hold inf or nan.
    """

    def __init__(self, optimizer: Optimizer, members: Members, scope: Scope, rule: ScalingRule, ranks: Ranks) -> None:
        self.optimizer = optimizer
        self.members = members
        self.scope = scope
        self.gradients = Gradients(members.weights, members.table)
        self.overflow_log = OverflowLog(members)
        self.skips = rule.skips
        self._rule = rule
        self._ranks = ranks
        self.counter = StepCounter()
        self._pending: dict[LossScaler, None] = {}
        self._inner: Callable[..., Any] = optimizer.step
        self._halves = Halves(self)
        self._is_active = False
        self._has_agreed = False
        self._was_named = False
        self._last_scaler: LossScaler | None = None
        self._warned: set[str] = set()
        self._since_look = 0

    # -- the methods ----------------------------------------------------------------------------------------------

    def install(self, states: EncodedStates | None, undos: UndoStack) -> None:
        optimizer, managed = self.optimizer, self

        def step(self: Any, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
            if self is not optimizer:
                return type(self).step(self, closure, *args, **kwargs)
            return managed.step(closure, *args, **kwargs)

        if hasattr(self._inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        step.is_managed = True  # type: ignore[attr-defined]
        methods: list[Any] = [step, *map(self._in_scope, [_LOAD, *_methods_of_its_own(optimizer)])]
        undos.push(self._deactivate)
        if states is not None:
            undos.push(self._decode_states)
            with self.scope.open():
                pass  # states that were there before are encoded as well
            for holder in self.members.holders():
                if hasattr(holder, "_optimizer_state_dict_post_hooks"):
                    undos.push(holder.register_state_dict_post_hook(lambda _, state: shown(state)).remove)
        for function in methods:
            # Bound, because learning-rate schedulers reach for ``optimizer.step.__func__``. One that is built later
            # wraps our method: pulling that away would take its wrapper too, so both stay, and hand through.
            undos.set_attribute(optimizer, function.__name__, types.MethodType(function, optimizer), stays_wrapped=True)
        self._is_active = True

    def _decode_states(self) -> None:
        """The optimizer gets its states back in float32."""
        self.scope.close()
        for holder in self.members.holders():
            for state in holder.state.values():
                if isinstance(state, dict):
                    decode(state)

    def _deactivate(self) -> None:
        self._is_active = False

    def _in_scope(self, name: str) -> Callable[..., Any]:
        """A method of the optimizer's, run on float32 masters."""
        inner = getattr(self.optimizer, name)
        managed = self
        half = {FIRST: self._halves.first, SECOND: self._halves.second}.get(name)

        @functools.wraps(getattr(inner, "__func__", inner))
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not managed.optimizer:
                return getattr(type(self), name)(self, *args, **kwargs)
            if not managed._is_active or managed.scope.is_open:
                return inner(*args, **kwargs)
            if name == _LOAD and managed.members.table.are_in_model:
                return inner(*args, **kwargs)  # the groups hold float32 parameters
            if half is not None:
                return half(inner, *args, **kwargs)
            values = managed.members.values
            values.apply_writes()
            with CastsOff(), values.without_moving() if name == _LOAD else nullcontext(), managed.scope.open():
                return inner(*args, **kwargs)

        method.__name__ = name
        return method

    # -- around backward passes -----------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """A scaled backward pass is about to begin."""
        self.members.sync_groups()
        self.members.values.apply_writes()
        self.gradients.forget_skipped_overflow()
        self._was_named = True
        follow_dynamo()

    def after_backward(self) -> None:
        """It is over; gradients are still scaled."""
        if not self.members.are_as_seen():
            self.members.sync_groups()
            self.members.values.apply_writes()

    def note_overflow(self, loss: torch.Tensor, scaler: LossScaler, overflowed: bool) -> str | None:
        """Before the scale moves: take an overflow down, and say in which gradient it is worst."""
        self._last_scaler = scaler
        if not overflowed:
            return None
        worst = self.overflow_log.write(scaler, scaler.loss_scale(), loss).gradients
        return f"{worst[0].name}, {worst[0].share:.0%} of it inf or nan" if worst else None

    def update_later(self, scaler: LossScaler) -> None:
        """A scale is to move at the next step."""
        self._pending[scaler] = None

    def unscale(self, scaler: LossScaler, done: Done) -> bool:
        """Unscale and check the gradients that backward passes of a GradScaler's losses have left.

        Returns:
            Whether there are any.
        """
        self._check_scaled_by(scaler)
        self.members.sync_groups()
        self.members.values.apply_writes()
        present = bool(self.gradients.present())
        found_inf = self.gradients.unscale(scaler, done)
        if found_inf is not None:
            scaler.note(found_inf)
        return present

    def expect_scaled(self, scaler: LossScaler) -> None:
        """A loss was scaled by a GradScaler: what its backward pass leaves stays scaled until :meth:`unscale`."""
        gradients = self.gradients
        if gradients.is_open:
            gradients.check_closed("scale() of a GradScaler", "use the one or the other")
        self._check_scaled_by(scaler)
        if gradients.scaled_by is not scaler:
            self.members.sync_groups()
            self.members.values.apply_writes()
            gradients.forget_skipped_overflow()
            gradients.scale_until_unscaled(scaler)

    def _check_scaled_by(self, scaler: LossScaler) -> None:
        if self.gradients.scaled_by not in (None, scaler) and self.gradients.present():
            raise RuntimeError(
                f"the gradients of {type(self.optimizer).__name__} are scaled by the scale of another loss: call "
                "unscale_(optimizer) of the GradScaler whose scaled loss left them, before anything of this one"
            )

    def parameters(self) -> list[nn.Parameter]:
        """List the model's parameters in its groups, each once, in their order."""
        return self.members.parameters()

    def master_params(self, weights: Iterable[nn.Parameter] | None = None) -> Iterator[nn.Parameter]:
        """The groups' members in float32, with their unscaled gradients; see :func:`mpinit.master_params`."""
        # Steps warn of gradients that were never scaled; here they may be those that the last one has used.
        self.gradients.check_closed("mpinit.master_params()", "move it after the with-block")
        values = self.members.values
        values.apply_writes()
        yield from values.hand_out(self.members.parameters() if weights is None else weights)

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's ``step``."""
        given = (closure, *args) if closure is not None else args
        if not self._is_active or self.scope.is_open:
            return self._inner(*given, **kwargs)
        if closure is None and self._makes_state():
            with self.members.values.without_moving():
                return self._with_hooks(self.run, args, kwargs)
        self.prepare(_STEP)
        if not has_step_hooks(self.optimizer):
            result = self._step(closure, *args, **kwargs)
        elif self.overflowed() if closure is not None else self._is_to_be_skipped():
            result = None
            self.skip()
        else:
            result = self._with_hooks(self._step, given or (None,), kwargs)
        self.gradients.stepped()
        if STANDING:
            renew_casts()
        return result

    def prepare(self, what: str) -> None:
        """Before a step, or a half of one: gradients are looked at, ranks agree, scales move."""
        self.members.sync_groups()
        self.check_gradients(what)
        self.members.values.apply_writes()
        self._agree()
        self._has_agreed = False
        # Schedulers ask whether a step came before them; a skipped one did.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _agree(self) -> None:
        """Once a step, with all ranks, who ask for as many."""
        if not self._has_agreed:
            self._check_finite()
            pending, self._pending = list(self._pending), {}
            if self._ranks.to_be_checked or is_distributed():
                self._ranks.before_step()
                self._ranks.agree(self.gradients, pending)
            else:
                for scaler in pending:
                    scaler.update()
        self._has_agreed = True

    def _check_finite(self) -> None:
        """Look at gradients where no backward pass has: a scale that moves does, in the pass that unscales."""
        rule = self._rule
        # A GradScaler of torch's leaves its own verdict, and its scale, to a step that is fused.
        is_checked = getattr(self.optimizer, "found_inf", None) is not None
        if self.skips and not rule.dynamic and self._is_active and not is_checked:
            first = next((weight for weight in self.members.weights if weight.grad is not None), None)
            if first is None:
                return
            if rule.may_wait or is_read_freely(first.device) or self._can_skip_in_kernel():
                self.gradients.check()
            else:
                # Found in the pass that unscales, and not read: that would wait for the device.
                self.gradients.forget_overflow()

    def skips_step(self) -> bool:
        """Skip a step here and now where gradients overflowed; False where it is to be done, or skips by itself."""
        self.members.sync_groups()
        self._agree()
        if not self._is_to_be_skipped():
            return False
        self.prepare(_STEP)
        self.skip()
        self.gradients.stepped()
        if STANDING:
            renew_casts()
        return True

    def overflowed(self) -> bool:
        return self._is_active and self.gradients.overflowed()

    def _is_to_be_skipped(self) -> bool:
        return self.gradients.found_inf is not None and not self._skips_in_kernel() and self.gradients.overflowed()

    def _makes_state(self) -> bool:
        """Whether the step is one of :func:`makes_state`."""
        if not makes_state(self.optimizer):
            return False
        self.gradients.check_closed(_STEP, "move it after the with-block")
        self.members.values.apply_writes()
        return True

    def _with_hooks(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hooks are the user's code: they run once around all of a step, with the weights in the groups."""
        hooks = StepHooks(self.optimizer)
        args, kwargs = hooks.before(args, kwargs)
        with hooks:
            self.members.sync_groups()
            result = step(*args, **kwargs)
        hooks.after(args, kwargs)
        return result

    def _step(self, closure: Closure | None, *args: Any, **kwargs: Any) -> Any:
        if closure is not None:
            # An optimizer that evaluates the loss again may make use of the gradients that are there first.
            if self.overflowed():
                return self.skip()
            return self._step_with_closure(closure, *args, **kwargs)
        found_inf = self.gradients.found_inf
        if found_inf is not None and self._skips_in_kernel():
            return self._step_in_kernel(found_inf, *args, **kwargs)
        if found_inf is not None and self.gradients.overflowed():
            return self.skip()
        result = self.run(*args, **kwargs)
        self.count_done()
        return result

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step on float32 masters: not checked, skipped or counted."""
        if is_on():
            with CastsOff():
                return self.run(*args, **kwargs)
        if not self.scope.steps_in_parts:
            if not args and not kwargs and self.scope.step_natively():
                return None
            with self.scope.open():
                return self._inner_step(*args, **kwargs)
        result = None
        with self.scope.in_parts() as parts:
            for _ in parts:
                result = self._inner_step(*args, **kwargs)
        return result

    def _inner_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.members.unsound:
            return self._inner(*args, **kwargs)
        with unfused(self.members.unsound):
            return self._inner(*args, **kwargs)

    def count_done(self) -> None:
        self.counter.count(skipped=False)
        self._since_look += 1
        if self._since_look == _LOOKS_EVERY:
            self._clamp_weights()

    def _clamp_weights(self) -> None:
        """Notice weights that float16 does not hold any more: by what they did to gradients, and now and then."""
        self._since_look = 0
        table = self.members.table
        if not isinstance(table, FullMasters):
            return
        names = [self.members.names.of(master.weight) for master in self.members.masters if table.clamp(master)]
        if names:
            warn_user(
                f"{', '.join(names)} grew beyond the largest float16 number, 65504, and became infinite in the model, "
                "not in the float32 masters: from here on the model holds that largest instead. Use bfloat16 "
                f"(opt_level='O5'), or give keep_fp32=[{', '.join(map(repr, names))}]"
            )

    # -- gradients a step can use -----------------------------------------------------------------------------------

    def check_gradients(self, what: str) -> None:
        """Refuse gradients that are scaled; warn of those that were never scaled, or of none."""
        gradients = self.gradients
        gradients.check_closed(what, "move it after the with-block")
        if not self._is_active:
            return
        if gradients.came_through_scaling():
            if self._was_named and not gradients.was_reached and what == _STEP and not gradients.present():
                self.notice_no_gradient()
            return
        is_scaled = self._rule.dynamic or self._rule.init_scale != 1.0
        if not is_scaled or not gradients.present():
            return
        if "unscaled" not in self._warned:
            self._warned.add("unscaled")
            warn_user(
                f"{what} uses gradients that did not come through mpinit.scale_loss: they were not scaled "
                "(small ones may have become 0 in 16 bit) and not checked. Use "
                "`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`; where a "
                "torch.amp.GradScaler scales them, give mpinit.initialize loss_scale=1.0"
            )

    def notice_no_gradient(self) -> None:
        """A loss was scaled, and has reached no parameter."""
        if "none" not in self._warned and any(weight.requires_grad for weight in self.members.weights):
            self._warned.add("none")
            self._ranks.check_present()
            warn_user(
                "optimizer.step() does nothing: a loss was scaled, and none of its parameters has a gradient. "
                "They are not those that the model computes with (was it copied, or wrapped in something that replaces "
                "them, after the optimizer was made?), or the loss makes no use of any"
            )

    # -- skipping ---------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Count a step that is not done."""
        found_inf = self.gradients.found_inf
        # Where it was read freely, the backward pass has taken it down.
        if found_inf is not None and not (self._rule.dynamic and is_read_freely(found_inf.device)):
            self.overflow_log.write(self._last_scaler, self.gradients.last_scale(), None)
        self.counter.count(skipped=True)
        self._clamp_weights()
        self._raise_after_too_many()
        if not self._rule.dynamic and self.counter.read().consecutive == _SKIPS_TO_WARN_OF:
            last = self.overflow_log.last
            warn_user(
                f"{_SKIPS_TO_WARN_OF} steps in a row were skipped because gradients were inf or nan: the data, or a "
                f"training that diverges. {'' if last is None else last.advice}; skip_nonfinite=False lets them in"
            )

    def _raise_after_too_many(self) -> None:
        limit = self._rule.max_consecutive_skips
        if self.counter.read().consecutive >= limit:
            log = self.overflow_log
            record = log.last or log.write(self._last_scaler, self.gradients.last_scale(), None)
            names = ", ".join(record.parameters[:3]) or "gradients cleared since"
            at = "" if record.scale is None else f", at a loss scale of {record.scale:g}"
            raise RuntimeError(
                f"{limit} steps in a row were skipped because gradients were inf or nan, in {names}{at}: "
                "lowering the loss scale does not help, so the forward or the loss itself gives inf or nan. "
                f"{record.advice}; max_consecutive_skips moves the limit"
            )

    def _skips_in_kernel(self) -> bool:
        """Whether the step can be left to skip itself, so that nothing waits for the device."""
        found_inf = self.gradients.found_inf
        if found_inf is None or is_read_freely(found_inf.device):
            return False
        return self._can_skip_in_kernel()

    def _can_skip_in_kernel(self) -> bool:
        fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return fused and bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def _step_in_kernel(self, found_inf: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self.optimizer
        undos = UndoStack()
        try:
            undos.set_attribute(optimizer, "found_inf", found_inf)
            undos.set_attribute(optimizer, "grad_scale", None)
            result = self.run(*args, **kwargs)
        finally:
            undos.unwind()
        self.counter.count_on_device(found_inf)
        # Reading the counters waits for the device: done once in as many steps as may be skipped in a row.
        if not is_capturing() and self.counter.is_due(self._rule.max_consecutive_skips):
            self._raise_after_too_many()
        return result

    # -- closures ---------------------------------------------------------------------------------------------------

    def _step_with_closure(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that evaluates the loss itself; casts are off in it and on again in the closure."""
        # A scale that moves is tried again; else an optimizer that evaluates the loss first has changed nothing yet.
        is_kept = self._rule.dynamic or (self.skips and not steps_per_parameter(self.optimizer))
        before = Snapshot(self.members) if is_kept else None
        evaluate = self._evaluator(closure)
        try:
            with CastsOff():
                if steps_per_parameter(self.optimizer):
                    # They evaluate it once, before anything else.
                    with torch.enable_grad():
                        loss = evaluate()
                    self.members.sync_groups()
                    self.run(*args, **kwargs)
                    result = loss
                else:
                    with self.scope.open():
                        result = self._inner_step(evaluate, *args, **kwargs)
        except BaseException as error:
            if before is not None:
                before.restore()
            if not isinstance(error, _EvaluationOverflow):
                raise
            self.skip()
            return None
        self.count_done()
        return result

    def _evaluator(self, closure: Closure) -> Closure:
        """The closure with the weights in the groups, tried again with a lower scale where gradients overflow."""
        casts = flags() if is_on() else None

        def evaluate() -> Any:
            with self.scope.closed():
                return tried()

        def tried() -> Any:
            for _ in range(self._rule.max_consecutive_skips if self._rule.dynamic else 1):
                if casts is None:
                    loss = closure()
                else:
                    with CastsAs(casts):
                        loss = closure()
                self.check_gradients(_STEP)
                self._check_finite()
                pending, self._pending = list(self._pending), {}
                self._ranks.agree(self.gradients, pending)
                if not self.overflowed():
                    return loss
                for weight in self.members.weights:
                    weight.grad = None
                self.gradients.forget_overflow()
            raise _EvaluationOverflow

        return evaluate


def makes_state(optimizer: Optimizer) -> bool:
    """Whether the first step is to have no effect, as one by which torch's checkpoints make an optimizer's state.

    Its rates and gradients are 0. It is not counted, and no other rank need take part.
    """
    if optimizer.state or not all(_is_zero(group.get("lr")) for group in optimizer.param_groups):
        return False
    held = grads_of(parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = [gradient for gradient in held if gradient is not None]
    return bool(gradients) and largest(gradients, gradients[0].device).item() == 0


def _is_zero(rate: Any) -> bool:
    return not (isinstance(rate, torch.Tensor) and not is_read_freely(rate.device)) and bool(rate == 0)


def _methods_of_its_own(optimizer: Optimizer) -> list[str]:
    """Public methods that torch's optimizers do not have: ``eval()`` of schedule-free kinds, a first step of two."""
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
