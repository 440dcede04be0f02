"""The step: skip on overflow, step the masters with casts off, round them back into the model.

Puts ``step``, ``zero_grad`` and ``add_param_group`` on the optimizer instance as bound methods, because learning-rate
schedulers reach for ``optimizer.step.__func__``.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..basics.patching import Undo, UndoStack, set_attribute
from ..masters.full import Pair
from ..torch_internals.native_autocast import CastsAs, CastsOff, flags, is_on
from .compiled_step import CompiledStep
from .control import OptimizerControl
from .state import unfused

Closure = Callable[[], Any]
NamesOf = Callable[[torch.Tensor], str]


class StepCounts(NamedTuple):
    """Steps done, skipped, and skipped since the last one done."""

    good: int
    skipped: int
    consecutive: int


class _EvaluationOverflow(Exception):
    """A closure went on overflowing however far the scale was lowered."""


class Stepper:
    """The patched methods of one optimizer, and the counters of its steps."""

    def __init__(self, control: OptimizerControl, name_of: NamesOf) -> None:
        self.control = control
        self._name_of = name_of
        self._inner_step: Callable[..., Any] = control.optimizer.step
        self._inner_zero_grad: Callable[..., None] = control.optimizer.zero_grad
        self._inner_add_param_group: Callable[[dict[str, Any]], None] = control.optimizer.add_param_group
        self._compiled: CompiledStep | None = None
        if control.plan.compile_step:
            self._compiled = CompiledStep(control.optimizer, self._inner_step, control.store.round_into_weights)
        own = getattr(self._inner_zero_grad, "__func__", None)
        self._zeroes_as_torch_does = own is torch.optim.Optimizer.zero_grad
        given = inspect.signature(self._inner_zero_grad).parameters.get("set_to_none")
        self._sets_to_none = given is None or bool(given.default)
        self._counted = StepCounts(0, 0, 0)
        self._since_reading = 0
        self._on_device: torch.Tensor | None = None
        self._active = True
        self._warned = False

    def install(self) -> Undo:
        """Put the methods on the optimizer; the undo puts back what stood there."""
        optimizer, stepper = self.control.optimizer, self

        def step(self: Any, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
            return stepper.step(closure, *args, **kwargs)

        def zero_grad(self: Any, set_to_none: bool = stepper._sets_to_none) -> None:
            stepper.zero_grad(set_to_none)

        def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
            stepper.add_param_group(param_group)

        if hasattr(self._inner_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        with UndoStack() as undos:
            for function in (step, zero_grad, add_param_group):
                name = function.__name__
                method = types.MethodType(function, optimizer)
                undos.push(_revert_if_ours(optimizer, name, method, set_attribute(optimizer, name, method)))

        def deactivate() -> None:
            self._active = False
            undos.unwind()

        return deactivate

    # -- counters -----------------------------------------------------------------------------------------------

    @property
    def counts(self) -> StepCounts:
        """Steps done and skipped; those of steps that skipped inside a kernel are read from the device."""
        if self._on_device is not None:
            good, skipped, consecutive = (int(number) for number in self._on_device.tolist())
            before = self._counted
            run = consecutive + (0 if good else before.consecutive)
            self._counted = StepCounts(before.good + good, before.skipped + skipped, run)
            self._on_device.zero_()
        return self._counted

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.counts.consecutive > 0

    def _count(self, skipped: bool) -> None:
        good, all_skipped, consecutive = self.counts
        self._counted = StepCounts(good + (not skipped), all_skipped + skipped, consecutive + 1 if skipped else 0)

    def _count_on_device(self, found_inf: torch.Tensor) -> None:
        """Count without reading, so that nobody waits: a captured graph counts its replays too."""
        if self._on_device is None:
            self._on_device = torch.zeros(3, device=found_inf.device)
        skipped = (found_inf > 0).float()
        self._on_device[0].add_(1 - skipped)
        self._on_device[1].add_(skipped)
        self._on_device[2].add_(skipped).mul_(skipped)
        self._since_reading += 1

    # -- the methods --------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's ``zero_grad``, for weights and masters."""
        if self._active:
            self.control.store.follow_masters()
        if self._active and set_to_none and self._zeroes_as_torch_does:
            self.control.clear_gradients()
            return
        if self._active:
            self.control.store.drop_cleared()
        self._inner_zero_grad(set_to_none)
        if self._active:
            self.control.gradients_cleared(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's ``add_param_group``, with masters for 16-bit parameters."""
        if self._active and self.control.aside is not None:
            raise RuntimeError(
                "optimizer.add_param_group() was called inside `with mpinit.scale_loss(...)`, where the gradients are "
                "still scaled: move it before or behind the with-block"
            )
        self._inner_add_param_group(param_group)
        if self._active:
            self.control.take_in_new_group()

    def step(self, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        """One step; returns what the optimizer's own step returns, or None where it was skipped."""
        if not self._active:
            return self._inner_step(*((closure, *args) if closure is not None else args), **kwargs)
        control = self.control
        if control.aside is not None:
            raise RuntimeError(
                "optimizer.step() was called inside `with mpinit.scale_loss(...)`, where the gradients are still "
                "scaled: move it behind the with-block"
            )
        control.settle_pending_updates()
        control.refresh()
        control.store.adopt_external_writes()
        # Schedulers ask whether a step came before them; a skipped one did.
        control.optimizer._opt_called = True  # type: ignore[attr-defined]
        if closure is not None:
            return self._step_with_closure(closure, *args, **kwargs)
        self._check_gradients()
        found_inf = control.found_inf
        if found_inf is not None and self._skips_in_kernel(found_inf):
            return self._step_in_kernel(found_inf, *args, **kwargs)
        if found_inf is not None and found_inf.item() > 0:
            return self._skip()
        result = self._run(*args, **kwargs)
        self._count(skipped=False)
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = None
        compiled = self._compiled
        with CastsOff(), self.control.store.stepping(rounds_itself=compiled is not None) as parts:
            for _ in parts:
                result = (compiled or self._step_soundly)(*args, **kwargs)
        return result

    def _step_soundly(self, *args: Any, **kwargs: Any) -> Any:
        if not self.control.unsound:
            return self._inner_step(*args, **kwargs)
        with unfused(self.control.unsound):
            return self._inner_step(*args, **kwargs)

    def _skip(self) -> None:
        self._count(skipped=True)
        self._raise_after_too_many()

    def _raise_after_too_many(self) -> None:
        limit = self.control.plan.scaling.max_consecutive_skips
        if self.counts.consecutive >= limit:
            names = self._names_of_bad_gradients()
            raise RuntimeError(
                f"{limit} steps in a row were skipped because gradients were inf or nan, in {names} first: lowering "
                "the loss scale does not help, so the forward or the loss itself gives inf or nan. Look at these "
                "parameters, keep their modules in float32 (keep_fp32=...), use bfloat16, or lower the learning rate; "
                "max_consecutive_skips moves the limit"
            )

    def _names_of_bad_gradients(self) -> str:
        bad = []
        for parameter in self.control.gradient_holders():
            gradient = parameter.grad
            if gradient is not None and not bool(torch.isfinite(gradient.to_dense()).all()):
                bad.append(self._name_of(self._model_param(parameter)))
            if len(bad) == 3:
                break
        return ", ".join(bad) or "gradients cleared since"

    def _model_param(self, parameter: torch.Tensor) -> torch.Tensor:
        pair = self.control.store.pair_of(parameter)
        return parameter if pair is None else pair.model_param

    def _check_gradients(self) -> None:
        """Notice that scale_loss was forgotten: an error where gradients would be ignored, else a warning."""
        control = self.control
        if control.saw_scale_loss:
            control.store.relink()
            if control.found_inf is not None and all(p.grad is None for p in control.gradient_holders()):
                control.found_inf = None
            return
        control.store.drop_cleared()
        stray = next(control.store.unlinked(), None)
        if stray is not None:
            raise RuntimeError(self._forgotten(stray))
        if control.scales and not self._warned and any(p.grad is not None for p in control.gradient_holders()):
            self._warned = True
            warnings.warn(
                "optimizer.step() uses gradients that did not come through mpinit.scale_loss: they were not scaled "
                "(small ones may have become 0 in 16 bit) and not checked. Use "
                "`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`",
                UserWarning,
                stacklevel=4,
            )

    def _forgotten(self, pair: Pair) -> str:
        return (
            f"parameter {self._name_of(pair.model_param)!r} has a gradient that its float32 master does not, so step() "
            "would ignore it: backward() ran outside of mpinit.scale_loss. Use "
            "`with mpinit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )

    # -- skipping inside the kernel -----------------------------------------------------------------------------

    def _skips_in_kernel(self, found_inf: torch.Tensor) -> bool:
        """Whether the step can be left to skip itself, so that nobody waits for the device."""
        if found_inf.device.type == "cpu":
            return False
        optimizer = self.control.optimizer
        fused = all(group.get("fused") for group in optimizer.param_groups)
        return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def _step_in_kernel(self, found_inf: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self.control.optimizer
        undos = UndoStack()
        undos.push(set_attribute(optimizer, "found_inf", found_inf))
        undos.push(set_attribute(optimizer, "grad_scale", None))
        try:
            result = self._run(*args, **kwargs)
        finally:
            undos.unwind()
        self._count_on_device(found_inf)
        # Reading the counters waits for the device: done once in as many steps as may be skipped in a row.
        if self._since_reading >= self.control.plan.scaling.max_consecutive_skips and not _is_capturing():
            self._since_reading = 0
            self._raise_after_too_many()
        return result

    # -- closures -----------------------------------------------------------------------------------------------

    def _step_with_closure(self, closure: Closure, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that evaluates the loss itself; casts are off in it and on again in the closure."""
        store = self.control.store
        before = self._snapshot()
        evaluate = self._evaluator(closure)
        try:
            with CastsOff():
                result = store.step_with_closure(self._step_soundly, evaluate, *args, **kwargs)
            store.copy_back()
        except _EvaluationOverflow:
            self._restore(before)
            self._skip()
            return None
        except BaseException:
            self._restore(before)
            raise
        self._count(skipped=False)
        return result

    def _evaluator(self, closure: Closure) -> Closure:
        control, casts = self.control, flags() if is_on() else None

        def evaluate() -> Any:
            for _ in range(control.plan.scaling.max_consecutive_skips):
                control.store.copy_back()
                if casts is None:
                    loss = closure()
                else:
                    with CastsAs(casts):
                        loss = closure()
                control.settle_pending_updates()
                self._check_gradients()
                if control.found_inf is None or control.found_inf.item() == 0:
                    return loss
                control.clear_gradients()
            raise _EvaluationOverflow

        return evaluate

    def _snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters' values, kept only where an overflow could make them needed."""
        if not self.control.plan.scaling.dynamic:
            return []
        groups = self.control.optimizer.param_groups
        return [(parameter, parameter.detach().clone()) for group in groups for parameter in group["params"]]

    @torch.no_grad()
    def _restore(self, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for parameter, values in before:
            parameter.copy_(values)
        self.control.store.copy_back()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _revert_if_ours(optimizer: Any, name: str, method: Any, revert: Undo) -> Undo:
    def undo() -> None:
        # A scheduler built later has wrapped our method: pulling it away would take the scheduler's wrapper too.
        # It stays, and hands through to what was there before.
        if vars(optimizer).get(name) is method:
            revert()

    return undo
