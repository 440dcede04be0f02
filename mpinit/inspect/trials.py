"""Trials: a few training steps of copies of a model and its optimizer, at a level or in float32."""

import math
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import cast_within_range, is_lower_precision
from ..basics.logs import log
from ..basics.patching import Undo
from ..basics.trees import cast_tree
from ..model.entry_points import ArgumentNames
from ..session import Session
from ..settings.resolve import resolve
from ..torch_internals.native_autocast import CastsOff
from ..torch_internals.step_hooks import global_hooks_hidden
from .copies import at_level, copy_of_optimizer, float32_copy
from .numbers import floating_tensors, sample_of
from .originals import Originals, forward_refused
from .overflow import OverflowWatch

UserStep = Callable[[Any, Any], Any]
_ADVICE: Final = "let step(model, optimizer) use its arguments"
# How many steps a trial does. Faults that single gradients do not show are visible in the losses of several steps.
STEPS: Final = 8
# After this many skipped steps a trial ends: a dynamic scale has then decreased from 2**16 to 2**-12.
_MOST_SKIPS: Final = 28


@dataclass
class Trial:
    """The results of a trial.

    Attributes:
        model: the copy that was trained.
        damaged_buffers: the names of buffers whose numbers a 16-bit dtype cannot store.
        losses: the losses of the steps that were not skipped.
        gradients: parameter name -> unscaled float32 gradient of the first step that was not skipped. If all steps were
            skipped, of the last one.
        skips: the numbers of skipped steps before and after the first step that was not skipped.
        scale: the loss scale at the first step that was not skipped, or else at the last; None without loss scaling.
        watch: the record of operations of the first step; None if it was not watched.
        inputs: samples of the model's inputs in the first step.
        input_names: the names of the arguments with floating inputs.
    """

    model: nn.Module
    damaged_buffers: Sequence[str] = ()
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    skips: tuple[int, int] = (0, 0)
    scale: float | None = None
    watch: OverflowWatch | None = None
    inputs: list[torch.Tensor] | None = None
    input_names: list[str] = field(default_factory=list)

    def copy_gradients(self) -> None:
        """Copy the gradients before a step, which may clear them."""
        self.gradients.clear()
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                self.gradients[name] = whole.detach().to(torch.float32, copy=True)

    def record_inputs(self, names: ArgumentNames, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record samples of the inputs of the first call."""
        if self.inputs is not None:
            return
        self.inputs = [sample_of(tensor) for tensor in floating_tensors((args, kwargs))]

        def is_floating(name: str, value: Any) -> bool:
            if any(True for _ in floating_tensors(value)):
                self.input_names.append(name)
            return True

        names.cast(args, kwargs, (is_floating,), lambda value: value)


@dataclass(frozen=True)
class Trials:
    """The trials of one model. Each trains fresh copies, and begins with the same random numbers.

    Attributes:
        restore_random_numbers: restores the random generators to their state at the beginning of a trial.
    """

    model: nn.Module
    optimizer: Optimizer
    step: UserStep
    restore_random_numbers: Undo

    def run(
        self,
        level: str,
        keywords: Mapping[str, Any],
        steps: int = STEPS,
        watched: Iterable[torch.dtype] | None = None,
        rounded: tuple[torch.dtype, Sequence[str]] | None = None,
    ) -> Trial:
        """Train copies for a few steps.

        Args:
            steps: the number of steps that are not skipped.
            watched: watch the first step, and estimate the rounding errors of these 16-bit dtypes; None: do not watch.
            rounded: a 16-bit dtype, and the names of the model's arguments that are rounded to it.

        Raises:
            ValueError: the step does not use its arguments.
            TypeError: the step returns no loss.
        """
        clone = float32_copy(self.model)
        copied_optimizer = copy_of_optimizer(
            self.optimizer, dict(zip(self.model.parameters(), clone.parameters(), strict=True))
        )
        before = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
        trial = Trial(clone)
        # Above the trial's own limit of skips, so that no step raises.
        words = {**keywords, "max_consecutive_skips": _MOST_SKIPS + STEPS}
        with _quiet(), CastsOff(), at_level([clone], [copied_optimizer], *resolve(level, words)) as session:
            trial.damaged_buffers = _damaged(before, dict(clone.named_buffers()))
            hook = _on_inputs(clone, trial, rounded)
            trial.watch = None if watched is None else OverflowWatch(clone, watched)
            self.restore_random_numbers()
            try:
                originals = Originals(self.model, self.optimizer)
                with (
                    forward_refused(self.model, clone, "mpinit.suggest", _ADVICE),
                    originals.calls_refused(),
                    global_hooks_hidden(),
                    torch.enable_grad(),
                ):
                    _Training(trial, copied_optimizer, session, self, originals).run(steps)
            finally:
                hook()
        return trial


@dataclass
class _Training:
    """The steps of one trial."""

    trial: Trial
    optimizer: Optimizer
    session: Session
    trials: Trials
    originals: Originals
    stepped: int = 0

    def run(self, steps: int) -> None:
        trial, scaler = self.trial, self.session.losses.scaler(0)
        is_scaled = not scaler.is_identity
        self._count_steps()
        while len(trial.losses) < steps:
            trial.scale = scaler.loss_scale() if is_scaled and not trial.losses else trial.scale
            is_first = not trial.losses and not trial.skips[0]
            watch = trial.watch if is_first and trial.watch is not None else nullcontext()
            skipped = self._skipped()
            with watch:
                loss, was_stepped = self._one()
            if self._skipped() > skipped:
                early, late = trial.skips
                trial.skips = (early, late + 1) if trial.losses else (early + 1, late)
                can_help = self.session.plan.scaling.dynamic and math.isfinite(loss)
                if sum(trial.skips) >= _MOST_SKIPS or not can_help:
                    break
                if not trial.losses:
                    # The first step that is not skipped has the same random numbers in every trial.
                    self.trials.restore_random_numbers()
                continue
            if not trial.gradients:
                # The step was called with a closure, which has computed the gradients inside of it.
                trial.copy_gradients()
            trial.losses.append(loss)
            if not was_stepped or not math.isfinite(loss):
                break

    def _skipped(self) -> int:
        return self.session.managed.find(self.optimizer).skips.counter.read().skipped

    def _count_steps(self) -> None:
        """Count the steps that the user's function calls, and copy the gradients of the first that is not skipped."""
        step = self.optimizer.step

        def counted(_: Any, *args: Any, **kwargs: Any) -> Any:
            self.stepped += 1
            if not self.trial.losses:
                self.trial.copy_gradients()
            return step(*args, **kwargs)

        # A bound method, because schedulers read step.__func__.
        vars(self.optimizer)["step"] = types.MethodType(counted, self.optimizer)

    def _one(self) -> tuple[float, bool]:
        """Do one step; return its loss, and whether the optimizer has stepped."""
        stepped, parameters = self.stepped, list(self.trial.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        try:
            loss = self.trials.step(self.trial.model, self.optimizer)
        finally:
            self.originals.check()
        if self.trial.inputs is None:
            raise ValueError(
                "step(model, optimizer) did not run the model that was passed to it: it has to use its arguments"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(f"step(model, optimizer) must return the loss, a tensor of one number, not {loss!r:.80}")
        was_stepped = self.stepped > stepped
        if not was_stepped and loss.requires_grad and all(parameter.grad is None for parameter in parameters):
            with self.session.losses.scaled(loss, [self.optimizer], 0, False) as scaled_loss:
                scaled_loss.backward()
        if not was_stepped and any(parameter.grad is not None for parameter in parameters):
            was_stepped = self._step_without_closure()
        return float(loss.detach()), was_stepped

    def _step_without_closure(self) -> bool:
        try:
            self.optimizer.step()
        except TypeError:  # an optimizer whose step requires a closure
            return False
        return True


def _on_inputs(model: nn.Module, trial: Trial, rounded: tuple[torch.dtype, Sequence[str]] | None) -> Callable[[], None]:
    """Record the inputs of a model's calls, and round some of them; return the function that ends this."""
    names = ArgumentNames(model.forward)
    if isinstance(model, torch.jit.ScriptModule):  # it cannot have Python hooks
        trial.inputs = []
        return lambda: None

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trial.record_inputs(names, args, kwargs)
        if rounded is None:
            return None
        dtype, which = rounded
        return names.cast(args, kwargs, (lambda name, _: name not in which,), lambda value: _rounded(value, dtype))

    handle = model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
    return handle.remove


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """Round the float32 tensors of an argument to a 16-bit type, and keep them in float32."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
        return cast_within_range(value.detach(), dtype).float()
    return value if isinstance(value, torch.Tensor) else cast_tree(cast_tree(value, dtype), torch.float32)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log lines and warnings about the copies: skipped steps of a trial do not concern the user."""
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_disabled


def _damaged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """List buffers that a cast to 16 bits has damaged: a number differs by more than a hundredth of itself."""
    cast = {name: buffer for name, buffer in after.items() if name in before and is_lower_precision(buffer.dtype)}
    return [
        name
        for name, buffer in cast.items()
        if not torch.allclose(buffer.double(), before[name].double(), rtol=0.01, atol=0.0, equal_nan=True)
    ]
