"""The step: skip on overflow, step the masters with casts off, round them back into the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import torch

from ..basics.patching import UndoStack, set_attribute
from ..basics.user_warnings import warn_user
from ..masters.full import round_into_weights
from ..masters.two_copies import TwoCopies
from ..plan import Plan
from ..torch_internals.devices import is_capturing, is_read_freely
from ..torch_internals.fused_sgd import unfused
from ..torch_internals.native_autocast import CastsAs, CastsOff, flags, is_on
from ..torch_internals.step_hooks import StepHooks, has_step_hooks
from .backward import BackwardPass
from .bystanders import OtherParameters
from .compiled_step import CompiledStep
from .gradient_check import GradientCheck
from .gradient_cycle import GradientCycle
from .observers import Observer
from .overflow_log import OverflowLog
from .parameter_groups import ParameterGroups
from .parts import in_parts, step_with_closure
from .ranks import Ranks
from .snapshot import Snapshot
from .step_counts import StepCounter

# Steps between looks for weights beyond float16's range, each of which reads all of them.
_LOOKS_EVERY: Final = 1000
Closure = Callable[[], Any]
NamesOf = Callable[[torch.Tensor], str]


class _EvaluationOverflow(Exception):
    """A closure went on overflowing however far the scale was lowered."""


@final
class Step:
    """One optimizer's step.

    Args:
        groups: its parameters.
        cycle: the state of its gradients.
        backward: clears gradients.
        bystanders: who knows of gradients that are still scaled.
        ranks: what is one over all ranks.
        plan: what to do.
        scales: whether any loss of the session is scaled at all.
        name_of: a parameter's dotted name, for errors.
        inner: the optimizer's own step.
        observers: who is told of a step.
        overflows: what is known of the last overflow.
    """

    def __init__(
        self,
        groups: ParameterGroups,
        cycle: GradientCycle,
        backward: BackwardPass,
        bystanders: OtherParameters,
        ranks: Ranks,
        plan: Plan,
        scales: bool,
        name_of: NamesOf,
        inner: Callable[..., Any],
        observers: list[Observer],
        overflows: OverflowLog,
    ) -> None:
        self.counter = StepCounter()
        self._groups = groups
        self._cycle = cycle
        self._backward = backward
        self._ranks = ranks
        self._check = GradientCheck(groups, cycle, bystanders, ranks, scales, name_of)
        self._rule = plan.scaling
        self._name_of = name_of
        self._inner = inner
        self._observers = observers
        self._overflows = overflows
        self._skipped: bool | torch.Tensor = False
        self._compiled: CompiledStep | None = None
        if plan.compile_step:
            self._compiled = CompiledStep(groups.optimizer, inner, lambda: round_into_weights(groups.copies))
        self._since_look = 0
        self._has_agreed = False
        self.is_running = False

    def __call__(self, closure: Closure | None, *args: Any, **kwargs: Any) -> Any:
        """One step; returns what the optimizer's own step returns, or None where it was skipped."""
        self.prepare("optimizer.step()")
        self.is_running = True
        try:
            if not has_step_hooks(self._groups.optimizer):
                result = self._step(closure, *args, **kwargs)
            elif self._is_to_be_skipped() if closure is None else self.overflowed():
                result = None
                self.skip()
            else:
                result = self._with_hooks(self._step, closure, *args, **kwargs)
        finally:
            self.is_running = False
        if self._groups.store.watcher.assigned:
            self._groups.copies.look_at_gradients()  # the optimizer's own doing
        if self._observers:
            self.tell_observers()
        return result

    def tell_observers(self) -> None:
        """A step is over, as a whole or in halves."""
        for observer in self._observers:
            observer.step_ended(self._skipped)

    def prepare(self, what: str) -> None:
        """Before a step, or a half of one: scales move, masters follow weights."""
        groups, cycle = self._groups, self._cycle
        cycle.check_closed(what, "move it after the with-block")
        self._backward.abandon_backward()
        groups.refresh()
        self._agree()
        self._has_agreed = False
        groups.copies.look_at_weights()
        groups.copies.look_at_trained(to_step=True)
        # Schedulers ask whether a step came before them; a skipped one did.
        groups.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._skipped = False

    def _agree(self) -> None:
        """Once a step, with all ranks, who ask for as many."""
        if not self._has_agreed:
            self._ranks.before_step()
            self._ranks.agree(self._cycle, self._groups)
        self._has_agreed = True

    def skips(self) -> bool:
        """Count a step as skipped where that is certain before it begins; whether it was."""
        self._groups.refresh()
        self._agree()
        if not self._is_to_be_skipped():
            return False
        self.prepare("optimizer.step()")
        self.skip()
        self.tell_observers()
        return True

    def make_state(self) -> None:
        """Let the optimizer make its state of the gradients there are: no step that is counted, checked or skipped."""

        def step(closure: None) -> None:
            self._run(self._step_soundly)

        self._groups.copies.look_at_gradients()
        if has_step_hooks(self._groups.optimizer):
            self._with_hooks(step, None)
        else:
            step(None)

    def part(self, copies: TwoCopies) -> None:
        """A part of a step, of the parameters that have gradients: not checked, skipped or counted, without hooks.

        Args:
            copies: the pairs among them.
        """
        with CastsOff(), in_parts(self._groups, rounds_itself=False, copies=copies) as parts:
            for _ in parts:
                self._step_soundly()

    def _with_hooks(self, step: Callable[..., Any], closure: Closure | None, *args: Any, **kwargs: Any) -> Any:
        hooks = StepHooks(self._groups.optimizer)
        given = (closure, *args) if closure is not None else args
        given, kwargs = hooks.before(given, kwargs)
        closure, *rest = given or (None,)
        with hooks:
            self._groups.refresh()
            self._groups.copies.look_at_weights()
            result = step(closure, *rest, **kwargs)
        hooks.after(given, kwargs)
        self._groups.copies.look_at_both()
        return result

    def _step(self, closure: Closure | None, *args: Any, **kwargs: Any) -> Any:
        if closure is not None:
            # An optimizer that evaluates the loss again may make use of the gradients that are there first.
            if self.overflowed():
                return self.skip()
            return self._step_with_closure(closure, *args, **kwargs)
        self.check_gradients()
        found_inf = self._cycle.found_inf
        if found_inf is not None and self._skips_in_kernel(found_inf):
            return self._step_in_kernel(found_inf, *args, **kwargs)
        if found_inf is not None and found_inf.item() > 0:
            return self.skip()
        result = self._run(self._compiled or self._step_soundly, *args, **kwargs)
        self.count_done()
        return result

    def count_done(self) -> None:
        """Count a step that was done."""
        self.counter.count(skipped=False)
        self._since_look += 1
        if self._since_look == _LOOKS_EVERY:
            self._clamp_weights()

    def _clamp_weights(self) -> None:
        """Notice weights that float16 does not hold any more: by what they did to gradients, and now and then."""
        self._since_look = 0
        copies = self._groups.copies
        found = [pair for pair in copies.pairs if pair.clamp()]
        for pair in found:
            copies.note_one(pair)
        if found:
            names = [self._name_of(pair.model_param) for pair in found]
            warn_user(
                f"{', '.join(names)} grew beyond the largest float16 number, 65504, and became infinite in the model, "
                "not in the float32 masters: from here on the model holds that largest instead. Use bfloat16 "
                f"(opt_level='O5'), or give keep_fp32=[{', '.join(map(repr, names))}]"
            )

    def overflowed(self) -> bool:
        """Whether gradients that are there overflowed."""
        found_inf = self._cycle.found_inf
        if found_inf is None or found_inf.item() == 0:
            return False
        return self._cycle.is_agreed or any(p.grad is not None for p in self._groups.present())

    def _is_to_be_skipped(self) -> bool:
        self.check_gradients()
        found_inf = self._cycle.found_inf
        return found_inf is not None and not self._skips_in_kernel(found_inf) and found_inf.item() > 0

    def _run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result, groups = None, self._groups
        with CastsOff(), in_parts(groups, rounds_itself=step is self._compiled) as parts:
            for _ in parts:
                result = step(*args, **kwargs)
        return result

    def _step_soundly(self, *args: Any, **kwargs: Any) -> Any:
        if not self._groups.unsound:
            return self._inner(*args, **kwargs)
        with unfused(self._groups.unsound):
            return self._inner(*args, **kwargs)

    # -- skipping -----------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Count a step that is not done."""
        self._skipped = True
        found_inf = self._cycle.found_inf
        # Where it was read freely, the backward pass has taken it down.
        if found_inf is not None and not is_read_freely(found_inf.device):
            self._overflows.write(*self._backward.last_scaling, None)
        self.counter.count(skipped=True)
        # A step that is done rounds all masters, also those that somebody wrote to.
        self._groups.copies.look_at_masters()
        self._clamp_weights()
        self._raise_after_too_many()

    def _raise_after_too_many(self) -> None:
        limit = self._rule.max_consecutive_skips
        if self.counter.read().consecutive >= limit:
            record = self._overflows.last or self._overflows.write(*self._backward.last_scaling, None)
            names = ", ".join(bad.name for bad in record.parameters[:3]) or "gradients cleared since"
            at = "" if record.scale is None else f", at a loss scale of {record.scale:g}"
            raise RuntimeError(
                f"{limit} steps in a row were skipped because gradients were inf or nan, in {names} first{at}: "
                "lowering the loss scale does not help, so the forward or the loss itself gives inf or nan. "
                f"{record.advice()}; max_consecutive_skips moves the limit"
            )

    def _skips_in_kernel(self, found_inf: torch.Tensor) -> bool:
        """Whether the step can be left to skip itself, so that nobody waits for the device."""
        if is_read_freely(found_inf.device):
            return False
        optimizer = self._groups.optimizer
        fused = all(group.get("fused") for group in optimizer.param_groups)
        return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def _step_in_kernel(self, found_inf: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self._groups.optimizer
        undos = UndoStack()
        undos.push(set_attribute(optimizer, "found_inf", found_inf))
        undos.push(set_attribute(optimizer, "grad_scale", None))
        try:
            result = self._run(self._compiled or self._step_soundly, *args, **kwargs)
        finally:
            undos.unwind()
        self._skipped = found_inf
        self.counter.count_on_device(found_inf)
        # Reading the counters waits for the device: done once in as many steps as may be skipped in a row.
        if not is_capturing() and self.counter.is_due(self._rule.max_consecutive_skips):
            self._raise_after_too_many()
        return result

    def check_gradients(self) -> None:
        """Refuse gradients that would be ignored or are scaled; warn of those that nobody scaled, or of none."""
        self._check.check(self.is_running)

    # -- closures -----------------------------------------------------------------------------------------------

    def _step_with_closure(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that evaluates the loss itself; casts are off in it and on again in the closure."""
        groups = self._groups
        before = Snapshot(groups) if self._rule.dynamic else None

        def step(evaluate: Closure | None) -> Any:
            return self._step_soundly(*((evaluate, *args) if evaluate is not None else args), **kwargs)

        evaluate = self._evaluator(closure)
        try:
            with CastsOff():
                result = step_with_closure(groups, step, evaluate)
        except BaseException as error:
            if before is not None:
                before.restore()
            if not isinstance(error, _EvaluationOverflow):
                raise
            self.skip()
            return None
        self.counter.count(skipped=False)
        return result

    def _evaluator(self, closure: Closure) -> Closure:
        cycle, casts = self._cycle, flags() if is_on() else None

        def evaluate() -> Any:
            for _ in range(self._rule.max_consecutive_skips):
                if casts is None:
                    loss = closure()
                else:
                    with CastsAs(casts):
                        loss = closure()
                self.check_gradients()
                self._ranks.agree(cycle, self._groups)
                if cycle.found_inf is None or cycle.found_inf.item() == 0:
                    return loss
                self._backward.clear()
            raise _EvaluationOverflow

        return evaluate
