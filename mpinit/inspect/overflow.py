"""The origin of an overflow: parameters and modules after a skipped step, or the operation while it runs."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.dtypes import dtype_name, is_lower_precision
from ..optimizer.overflow_log import OverflowReport
from .numbers import TensorStats, floating_tensors, is_finite, sample_of, stats_of
from .trace import BACKWARD, FORWARD, ModelTrace, Place


def overflow_report(optimizer: Optimizer) -> OverflowReport:
    """Report why the last step of an optimizer was skipped. Steps without an overflow cost nothing.

    When an overflow is found, the parameters with inf or nan in their gradients are recorded, with the order in which
    the backward pass reached them. So it can be called after ``zero_grad()`` too. Gradients do not show which
    *operation* overflowed first. To find it, run the batch again inside :func:`watch_overflow`.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        The report; printed, it is a few lines of text. If no step has overflowed, it has no parameters.

    Raises:
        RuntimeError: the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> _ = model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> report = mpinit.overflow_report(optimizer)
        >>> report.first_module, report.scale
        ('0', 65536.0)
        >>> mpinit.undo(model)
    """
    session = registry.session_of(optimizer)
    log = session.managed.find(optimizer).skips.log
    now = log.read(None, None, None)
    if log.last is None and not now.gradients:
        return replace(now, advice="no step of this optimizer has overflowed")
    before = now if log.last is None else log.last
    report = before if not now.gradients or set(before.parameters) == set(now.parameters) else now
    is_known = report.loss_id is not None or len(session.scalers) > 1
    return report if is_known else replace(report, loss_id=0)


def watch_overflow(model: nn.Module) -> "OverflowWatch":
    """Find the first operation in a block that computes inf or nan from finite numbers.

    It checks the forward pass, the loss and the backward pass of any model, initialised or not, and changes no number.
    Code in the block is several times slower. The hooks are removed at the end, also after an exception.

    Infinities that do no harm are not reported: a mask of -inf, and any other if results and gradients are finite.

    Args:
        model: the model whose modules are named in the report.

    Returns:
        A context manager that yields an :class:`OverflowWatch`: its ``first_module`` and ``kind`` name the place, and
        its ``first`` is the :class:`Fault` with the operation and its inputs.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 4), opt_level="O3", verbosity=0)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> with mpinit.watch_overflow(model) as watch:
        ...     _ = model(torch.full((1, 4), 6e4))
        >>> watch.kind, watch.first.operation
        ('forward', 'aten.addmm.default')
        >>> mpinit.undo(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch_overflow takes a module, not {type(model).__name__}")
    return OverflowWatch(model)


# Operations that compute nothing: their results are uninitialised memory or existing numbers.
_NOT_COMPUTED: Final = ("empty", "new_empty", "resize", "set_", "detach", "alias", "_local_scalar_dense", "_amp_")
_CASTS: Final = ("_to_copy", "copy_", "copy", "to")
_ENOUGH: Final = 1000
_FLOAT16_MAX: Final = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Fault:
    """The origin of inf or nan: an operation, the model's inputs or a parameter.

    Attributes:
        kind: "forward" or "backward" (an operation's result overflowed), "cast" (a cast to 16 bits overflowed),
            "float32" (computed in float32, so precision is not the cause), "data" (the model's inputs had it),
            "weights" (a parameter had it).
        module: the dotted name of the module. "" is the model itself; None: outside of the model, as in the loss.
        phase: "forward" or "backward".
        operation: torch's name of the operation, as "aten.mm.default"; a parameter's name if ``kind`` is "weights".
        dtype: dtype of the result.
        inputs: statistics of the operation's inputs.
        may_be_meant: whether it may be harmless: -inf, as in a mask, or a float32 result that may not be used.
    """

    kind: str
    module: str | None
    phase: str
    operation: str
    dtype: torch.dtype
    inputs: tuple[TensorStats, ...]
    may_be_meant: bool = False

    @property
    def where(self) -> str:
        """The module's name, as text."""
        if self.module is None:
            return "the loss (outside of the model)"
        return f"module {self.module!r}" if self.module else "the model's own forward"

    def __str__(self) -> str:
        what = _SENTENCES[self.kind].format(
            where=self.where, phase=self.phase, operation=self.operation, dtype=dtype_name(self.dtype)
        )
        return what + (f"; from {'; '.join(map(str, self.inputs))}" if self.inputs else "")


_SENTENCES: Final = {
    "forward": "{where}: {operation} left the range of {dtype} in the forward pass",
    "backward": "{where}: {operation} left the range of {dtype} in the backward pass",
    "cast": "{where}: a cast to {dtype} left its range in the {phase} pass ({operation})",
    "float32": "{where}: {operation} gave inf or nan in {dtype} in the {phase} pass: precision is not at fault",
    "data": "the inputs of {where} held inf or nan",
    "weights": "{where}: {operation} held inf or nan before anything was computed",
}


@final
class OverflowWatch:
    """A record of the operations that compute inf or nan from finite numbers, which :func:`watch_overflow` yields.

    It can be read inside the block and after it. A mask of -inf is not reported, because the program writes it.

    Attributes:
        peaks: module -> the largest finite magnitude among its operations' results in the forward pass. Values beyond
            float16 count only if the operation's inputs were smaller: a mask of ``finfo(dtype).min`` is a different
            number in each dtype.
        result_peaks: module -> the largest finite magnitude that it returned.
        sensitivity: 16-bit dtype -> module -> how far rounding its operations' results to this dtype changes the loss,
            to first order: the sum of abs(gradient x rounding error).
        largest_gradient: the largest finite magnitude in a backward pass.
        results_are_bad: whether a result of the model, or a loss computed from it, was inf or nan.
        gradients_are_bad: whether a result in a backward pass was inf or nan.
        went_backward: whether there was a backward pass.
        batch: samples of the model's inputs at its first call; None before it.
    """

    def __init__(self, model: torch.nn.Module, rounded_to: Iterable[torch.dtype] = ()) -> None:
        self._trace = ModelTrace(model, self._operation, self._module_begins, self._module_ends)
        self._model = model
        self._faults: list[Fault] = []
        self.peaks: dict[str | None, float] = {}
        self.result_peaks: dict[str, float] = {}
        self.sensitivity: dict[torch.dtype, dict[str | None, float]] = {dtype: {} for dtype in rounded_to}
        self.largest_gradient = 0.0
        self.results_are_bad = False
        self.gradients_are_bad = False
        self.went_backward = False
        self.batch: list[torch.Tensor] | None = None
        self._infinite_inputs: list[Fault] = []
        self._weighed: list[tuple[str | None, torch.Tensor]] = []
        self._is_weighing = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            is_weight = isinstance(tensor, torch.nn.Parameter)
            for values in floating_tensors(tensor):
                if not is_finite(values) if is_weight else bool(values.isnan().any()):
                    module = name.rpartition(".")[0]
                    self._faults.append(Fault("weights", module, FORWARD, name, tensor.dtype, (stats_of(values),)))
        with ExitStack() as stack:
            # Only a module's own hooks receive keyword arguments; scripted modules cannot have hooks.
            if not isinstance(self._model, torch.jit.ScriptModule):
                hook = self._model.register_forward_pre_hook(self._read_inputs, with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
            stack.enter_context(self._trace)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    @property
    def first(self) -> Fault | None:
        """The first fault that did harm. A fault that may be meant did none if results and gradients are finite."""
        if self.results_are_bad:
            return next(iter((*self._faults, *self._infinite_inputs)), None)
        surely = [fault for fault in self._faults if not fault.may_be_meant]
        return next(iter(surely or (self._faults if self.gradients_are_bad else ())), None)

    @property
    def first_module(self) -> str | None:
        """The dotted name of the first fault's module. "" is the model itself; None: outside of it, or no fault."""
        return None if self.first is None else self.first.module

    @property
    def kind(self) -> str | None:
        """The first fault's kind, as in :class:`Fault`; None if there is no fault."""
        return None if self.first is None else self.first.kind

    def __str__(self) -> str:
        return "nothing left the range" if self.first is None else str(self.first)

    def _read_inputs(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = list(floating_tensors((args, kwargs)))
        if self.batch is None:
            self.batch = [sample_of(tensor) for tensor in tensors]
        for tensor in tensors:
            if not is_finite(tensor):
                fault = Fault("data", "", FORWARD, "inputs", tensor.dtype, (stats_of(tensor),))
                (self._infinite_inputs if _may_be_mask(tensor) else self._faults).append(fault)

    def _module_begins(self, name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Check the inputs, if the module is the model itself: they are the data."""
        if not name and isinstance(module, torch.jit.ScriptModule):
            self._read_inputs(module, args, {})

    def _module_ends(self, name: str, output: Any) -> None:
        """Check the results, if the module is the model itself: they show whether a fault did harm."""
        for tensor in floating_tensors(output):
            peak = _peak(tensor)
            if math.isfinite(peak):
                self.result_peaks[name] = max(peak, self.result_peaks.get(name, 0.0))
            elif not name:
                self.results_are_bad = True

    def _operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run an operation and check its result; check its inputs before if it overwrites them."""
        name = operation._schema.name.removeprefix("aten::")
        if self._is_weighing or name.startswith(_NOT_COMPUTED) or getattr(operation, "is_view", False):
            return run()
        self._weigh_last()
        overwrites = operation._schema.is_mutable
        before = _Inputs(args[1:] if name == "copy_" else args, kwargs) if overwrites else None
        result = run()
        place = self._trace.place()
        for tensor in floating_tensors(result):
            peak = _peak(tensor)
            if math.isfinite(peak):
                if place.phase == BACKWARD:
                    self.went_backward = True
                    self.largest_gradient = max(self.largest_gradient, peak)
                elif peak <= _FLOAT16_MAX or _grew(peak, args[1:] if overwrites else args, kwargs):
                    self.peaks[place.module] = max(peak, self.peaks.get(place.module, 0.0))
                if place.phase == FORWARD and self.sensitivity:
                    self._weighed.append((place.module, tensor))
            else:
                self._record_bad(str(operation), name, tensor, before or _Inputs(args, kwargs), place)
        return result

    def _weigh_last(self) -> None:
        """Register hooks on the last operation's results, which are in the graph by now, for their gradients."""
        for module, tensor in self._weighed:
            if tensor.requires_grad and not tensor.is_leaf:
                values = tensor.detach()
                errors = {
                    dtype: (values - values.to(dtype)).nan_to_num_(0.0, 0.0, 0.0).to(torch.bfloat16)
                    for dtype in self.sensitivity
                }
                tensor.register_hook(functools.partial(self._weigh, module, errors))  # type: ignore[no-untyped-call]
        self._weighed.clear()

    def _weigh(
        self, module: str | None, errors: dict[torch.dtype, torch.Tensor], gradient: torch.Tensor | None
    ) -> None:
        if gradient is None:  # the loss does not depend on this result
            return
        self._is_weighing = True
        try:
            for dtype, error in errors.items():
                found = self.sensitivity[dtype]
                found[module] = found.get(module, 0.0) + float((gradient.detach().float() * error).abs().sum())
        finally:
            self._is_weighing = False

    def _record_bad(self, operation: str, name: str, tensor: torch.Tensor, inputs: "_Inputs", place: Place) -> None:
        if place.phase == BACKWARD:
            self.went_backward = self.gradients_are_bad = True
        elif place.module is None and tensor.numel() == 1:
            self.results_are_bad = True
        # An operation may turn an inf among its inputs into nan.
        was_in_inputs = inputs.any_nan or (inputs.any_inf and not bool(tensor.isnan().any()))
        if was_in_inputs or inputs.infinite_number or len(self._faults) == _ENOUGH:
            return
        kind: str = place.phase
        if not is_lower_precision(tensor.dtype):
            kind = "float32"
        elif name in _CASTS and inputs.bits > torch.finfo(tensor.dtype).bits:
            kind = "cast"
        meant = place.phase == FORWARD and (kind == "float32" or _may_be_mask(tensor))
        self._faults.append(Fault(kind, place.module, place.phase, operation, tensor.dtype, inputs.stats(), meant))


def _may_be_mask(tensor: torch.Tensor) -> bool:
    return not bool((tensor.isnan() | (tensor == math.inf)).any())


def _peak(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), math.inf))


def _grew(peak: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    numbers = (abs(n) for n in (*args, *kwargs.values()) if isinstance(n, float))
    return peak not in numbers and all(_peak(tensor) < peak for tensor in floating_tensors((args, kwargs)))


class _Inputs:
    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = list(floating_tensors((args, dict(kwargs))))
        self._stats = [(tensor, None if is_finite(tensor) else stats_of(tensor)) for tensor in tensors]
        self.bits = max((torch.finfo(tensor.dtype).bits for tensor in tensors), default=0)
        bad = [tensor for tensor, stats in self._stats if stats is not None]
        self.any_nan = any(bool(tensor.isnan().any()) for tensor in bad)
        self.any_inf = any(bool(tensor.isinf().any()) for tensor in bad)
        numbers = (*args, *kwargs.values())
        self.infinite_number = any(isinstance(n, float) and not math.isfinite(n) for n in numbers)

    def stats(self) -> tuple[TensorStats, ...]:
        return tuple(stats or stats_of(tensor) for tensor, stats in self._stats)
