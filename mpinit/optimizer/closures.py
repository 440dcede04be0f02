"""Steps that evaluate the loss more than once: with a closure, and in the two halves of sharpness-aware optimizers."""

from collections.abc import Callable
from typing import Any, Final

import torch

from ..autocast.thread_flags import CastsAs, CastsOff, flags, is_on
from ..config.plan import Plan
from .gradients import Gradients, begin_evaluations
from .members import Members, Snapshot
from .per_parameter import steps_per_parameter
from .skipping import Skips
from .step import GradientChecks, OwnStep, renew_weight_casts

# The names that sharpness-aware optimizers have for the two halves of a step.
FIRST: Final = "first_step"
SECOND: Final = "second_step"
Closure = Callable[[], Any]


class _EvaluationOverflow(Exception):
    """A closure whose gradients overflow at every scale that was tried, or are a part of sums that overflowed."""


class ClosureSteps:
    """Steps of an optimizer that are called with a closure."""

    def __init__(self, members: Members, plan: Plan, checks: GradientChecks, own: OwnStep, skips: Skips) -> None:
        self._members = members
        self._plan = plan
        self._checks = checks
        self._own = own
        self._skips = skips

    def step(self, gradients: Gradients, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Step with a closure: O1's casts are off in the step, and on again in the closure.

        An evaluation that overflows is repeated at a lower scale. If it was added to gradients of earlier backward
        passes, as in gradient accumulation, the step is skipped instead, because these gradients overflowed with it.

        Returns:
            The optimizer's result; None for a step that was skipped because every evaluation overflowed.
        """
        optimizer = self._members.optimizer
        # The snapshot restores the weights if every evaluation overflows, or the step raises. With a static scale only
        # an optimizer that changes weights before it evaluates the loss needs it.
        is_kept = self._plan.is_dynamic or (self._checks.skips and not steps_per_parameter(optimizer))
        before = Snapshot(self._members) if is_kept else None
        evaluate = self._evaluator(gradients, closure)
        try:
            with CastsOff():
                if steps_per_parameter(optimizer):
                    # torch's optimizers evaluate the loss once, before anything else.
                    with torch.enable_grad():
                        result = evaluate()
                    self._members.sync_groups()
                    self._own.run(*args, **kwargs)
                else:
                    with self._own.scope.open():
                        result = self._own.call(evaluate, *args, **kwargs)
        except BaseException as error:
            if before is not None:
                before.restore()
            if not isinstance(error, _EvaluationOverflow):
                raise
            self._skips.skip()
            return None
        self._skips.count_done()
        return result

    def _evaluator(self, gradients: Gradients, closure: Closure) -> Closure:
        """Return the closure with the weights in the groups, evaluated again at a lower scale after an overflow."""
        casts = flags() if is_on() else None
        begin_evaluations(gradients)

        def evaluate() -> Any:
            with self._own.scope.closed():
                renew_weight_casts()  # LBFGS changes weights between two evaluations of one step
                return evaluate_until_finite()

        def evaluate_until_finite() -> Any:
            for _ in range(self._plan.max_consecutive_skips if self._plan.is_dynamic else 1):
                if casts is None:
                    loss = closure()
                else:
                    with CastsAs(casts):
                        loss = closure()
                self._checks.agree_on_evaluation()
                if not gradients.overflowed():
                    gradients.stepped()
                    return loss
                gradients.drop()
                if gradients.are_sums:
                    break
            raise _EvaluationOverflow

        return evaluate


class SamSteps:
    """Steps of a sharpness-aware optimizer, called as two halves: an overflow in either half skips both.

    The first half moves the weights to where the loss is sharpest, and the second moves them back and steps. Skipping
    one of them alone would keep the weights moved, or make them infinite.
    """

    def __init__(
        self, gradients: Gradients, members: Members, checks: GradientChecks, own: OwnStep, skips: Skips
    ) -> None:
        self._gradients = gradients
        self._members = members
        self._checks = checks
        self._own = own
        self._skips = skips
        self._before: Snapshot | None = None
        self._is_skipping = False

    def first(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the first half, unless its gradients overflowed: the second half is skipped with it."""
        self._checks.prepare(f"optimizer.{FIRST}()")
        self._is_skipping = self._gradients.overflowed()
        if self._is_skipping:
            self._gradients.skipped()
            return self._clear(*args, **kwargs)
        self._before = Snapshot(self._members) if self._checks.skips else None
        with CastsOff(), self._own.scope.open():
            result = inner(*args, **kwargs)
        self._gradients.stepped()
        renew_weight_casts()
        return result

    def second(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the second half; after an overflow the weights are restored to those before the first half."""
        self._checks.prepare(f"optimizer.{SECOND}()")
        before, self._before = self._before, None
        is_skipping, self._is_skipping = self._is_skipping, False
        if is_skipping or self._gradients.overflowed():
            if before is not None:
                before.restore()
            self._skips.skip()
            self._gradients.skipped()
            renew_weight_casts()
            return self._clear(*args, **kwargs)
        with CastsOff(), self._own.scope.open():
            result = inner(*args, **kwargs)
        self._skips.count_done()
        self._gradients.stepped()
        renew_weight_casts()
        return result

    def _clear(self, zero_grad: bool = False, *_: Any, **__: Any) -> None:
        if zero_grad:
            self._members.optimizer.zero_grad()
