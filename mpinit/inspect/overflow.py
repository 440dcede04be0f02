"""The origin of an overflow: parameters and modules after a skipped step, or the operation while it runs."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final, Self, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.dtypes import is_lower_precision
from ..basics.tables import counted
from ..optimizer.overflow_log import OverflowReport
from .faults import Fault, Origins, worst
from .numbers import TensorStats, floating_tensors, is_finite, stats_of
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
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> _ = model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).mean(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> report = mpinit.overflow_report(optimizer)
        >>> report.first_module, report.scale
        ('0', 65536.0)
        >>> mpinit.undo(model)
    """
    return registry.session_of(optimizer).view.overflow(registry.unwrapped(optimizer))


def watch_overflow(model: nn.Module) -> "OverflowWatch":
    """Find the first operation in a block that computes inf or nan from finite numbers.

    It checks the forward pass, the loss and the backward pass of any model, initialised or not, and changes no number.
    Code in the block is several times slower. The hooks are removed at the end, also after an exception.

    Infinities that reach no result are not reported: a mask of -inf, and any other if results and gradients are finite.

    Args:
        model: the model whose modules are named in the report.

    Returns:
        A context manager that yields an :class:`OverflowWatch`. Its ``first_module`` and ``kind`` name the place, and
        its ``first`` is the :class:`Fault` with the operation and its inputs.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 4), opt_level="O3")
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> with mpinit.watch_overflow(model) as watch:
        ...     _ = model(torch.full((1, 4), 6e4))
        >>> watch.kind, watch.first.operation
        ('forward', 'aten.addmm.default')
        >>> mpinit.undo(model)
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"watch_overflow needs a module, and not one of torch.jit, but got {type(model).__name__}")
    return OverflowWatch(model)


# Operations that compute nothing: their results are uninitialised memory or existing numbers.
_NOT_COMPUTED: Final = ("empty", "new_empty", "resize", "set_", "detach", "alias", "_local_scalar_dense", "_amp_")
_NEW_MEMORY: Final = ("empty", "new_empty")
_CASTS: Final = ("_to_copy", "copy_", "copy", "to")
_MOST_FAULTS: Final = 1000


@final
class OverflowWatch:
    """A record of every operation that makes inf or nan out of finite numbers, as :func:`watch_overflow` yields it.

    It follows inf and nan from the operation that made them to the results, the loss and the gradients, and reports the
    faults that have reached one of them. An infinite constant in the code, as of a mask with -inf, is no fault. The
    properties can be read inside of the block and after it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._trace = ModelTrace(model, self._operation, self._module_ends)
        self._model = model
        self._faults: list[Fault] = []
        self._origins = Origins()
        # "results", "loss", "backward" (any result of the backward pass) or "parameters" (their gradients) -> the
        # faults whose inf or nan reached it first; no entry where no inf or nan did.
        self._reached: dict[str, frozenset[int]] = {}
        self._went_backward = self._sees_gradients = False
        self._is_16_bit = False
        self._operations = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
                is_weight = isinstance(tensor, torch.nn.Parameter)
                for values in floating_tensors(tensor):
                    self._is_16_bit |= is_lower_precision(values.dtype)
                    if not is_finite(values) if is_weight else bool(values.isnan().any()):
                        module, stats = name.rpartition(".")[0], (stats_of(values),)
                        # A forward in training may only write to a buffer, such as the running mean of BatchNorm.
                        fault = Fault(
                            "weights", module, FORWARD, name, tensor.dtype, stats, may_be_intended=not is_weight
                        )
                        self._found(fault, values)
                if tensor.requires_grad and tensor.is_leaf:
                    stack.callback(tensor.register_hook(self._gradient_arrives).remove)  # type: ignore[no-untyped-call]
            # Only a module's own hooks receive keyword arguments, not the global ones.
            hook = self._model.register_forward_pre_hook(self._read_inputs, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
            stack.enter_context(self._trace)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    @property
    def first(self) -> Fault | None:
        """The first fault that reached a result; without any, the first 16-bit forward operation with +inf or nan."""
        # A result of the model that is not finite may be meant, as a mask; with a backward pass the loss counts.
        results = None if self._went_backward else self._reached.get("results")
        loss = self._reached.get("loss") if results is None else results
        gradients = self._reached.get("parameters" if self._sees_gradients else "backward")
        if loss is None and gradients is None:
            return next((f for f in self._faults if f.phase == FORWARD and not f.may_be_intended), None)
        numbers = loss or gradients or range(len(self._faults))
        return worst(self._faults[number] for number in sorted(numbers))

    @property
    def first_module(self) -> str | None:
        """The dotted name of the first fault's module. "" is the model itself; None: outside of it, or no fault."""
        return None if self.first is None else self.first.module

    @property
    def kind(self) -> str | None:
        """The first fault's kind, as in :class:`Fault`; None if there is no fault."""
        return None if self.first is None else self.first.kind

    def __str__(self) -> str:
        if self.first is not None:
            return str(self.first)
        if not self._operations:
            return "no operation ran inside the block"
        return (
            f"no overflow in this batch: {self._operations} operations ran, and no inf or nan reached a result of the "
            f"model, the loss or a gradient{self._lowered_scales()}"
        )

    def _lowered_scales(self) -> str:
        """Say whether skipped steps have lowered the loss scale, so that what overflowed then does not overflow now."""
        texts = []
        for session in registry.all_sharing(self._model):
            skipped = sum(session.view.counts(optimizer)[1] for optimizer in session.optimizers)
            if skipped and any(scaler.is_dynamic for scaler in session.scalers):
                scales = ", ".join(f"{scaler.loss_scale():g}" for scaler in session.scalers)
                steps = counted(skipped, "skipped step has", "skipped steps have")
                texts.append(f". {steps} lowered the loss scale, now {scales}: at a larger one it may overflow again")
        return "".join(texts)

    def _found(self, fault: Fault, tensor: torch.Tensor, earlier: frozenset[int] = frozenset()) -> None:
        """Record a fault, and that a tensor contains its inf or nan."""
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(fault)
            earlier |= {len(self._faults) - 1}
        self._origins.set(tensor, earlier)

    def _reach(self, what: str, tensor: torch.Tensor) -> None:
        """Record that inf or nan reached a result. Of several times the first counts: later ones may follow from it."""
        self._reached[what] = self._reached.get(what) or self._origins.of([tensor])

    def _read_inputs(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._trace.unseen():
            for tensor in floating_tensors((args, kwargs)):
                if not is_finite(tensor) and not self._origins.of([tensor]):
                    stats = (stats_of(tensor),)
                    fault = Fault(
                        "data", "", FORWARD, "inputs", tensor.dtype, stats, may_be_intended=_may_be_mask(tensor)
                    )
                    self._found(fault, tensor)

    def _module_ends(self, name: str, output: Any) -> None:
        """Record whether inf or nan reach what the model returns."""
        for tensor in floating_tensors(output) if not name else ():
            if not is_finite(tensor):
                self._reach("results", tensor)

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        """Record whether inf or nan reach the gradient of a parameter."""
        with self._trace.unseen():
            self._went_backward = self._sees_gradients = True
            for tensor in floating_tensors(gradient):
                if not is_finite(tensor):
                    self._reach("parameters", tensor)

    def _operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Inspect the arguments where they are about to be overwritten, run the operation, inspect its result."""
        name = operation._schema.name.removeprefix("aten::")
        if name.startswith(_NOT_COMPUTED) or getattr(operation, "is_view", False):
            result = run()
            for tensor in floating_tensors(result) if name.startswith(_NEW_MEMORY) else ():
                self._origins.clear(tensor)
            return result
        overwrites = operation._schema.is_mutable
        self._operations += 1
        before = _Inputs(args[1:] if name == "copy_" else args, kwargs) if overwrites else None
        result = run()
        place = self._trace.place()
        for tensor in floating_tensors(result):
            self._is_16_bit |= is_lower_precision(tensor.dtype)
            self._went_backward |= place.phase == BACKWARD
            if not is_finite(tensor):
                self._record_nonfinite(operation, tensor, before or _Inputs(args, kwargs), place)
            elif not overwrites:
                self._origins.clear(tensor)
        return result

    def _record_nonfinite(self, operation: Any, tensor: torch.Tensor, inputs: "_Inputs", place: Place) -> None:
        """Record a result with inf or nan: a new fault, or one of its arguments'."""
        earlier = self._origins.of(inputs.bad)
        overwrites, name = operation._schema.is_mutable, operation._schema.name.removeprefix("aten::")
        # An operation may compute nan from inf, as inf times 0; the cause is the operation that computed the inf.
        # Softmax is an exception: it is called with -inf on purpose, so nan from a row of -inf is a fault of its own.
        is_made_here = inputs.any_inf and bool(tensor.isnan().any()) and (not earlier or "softmax" in name)
        was_in_inputs = inputs.any_nan or (inputs.any_inf and not is_made_here)
        if was_in_inputs or inputs.infinite_number:
            self._origins.set(tensor, earlier, overwrites)
        else:
            kind: str = place.phase
            if not is_lower_precision(tensor.dtype):
                kind = "float32"
            elif name in _CASTS and inputs.bits > torch.finfo(tensor.dtype).bits:
                kind = "cast"
            meant = place.phase == FORWARD and (kind == "float32" or _may_be_mask(tensor))
            fault = Fault(
                *(kind, place.module, place.phase, str(operation), tensor.dtype, inputs.stats(), meant),
                numbers=inputs.numbers,
                node=place.node,
                follows_16_bit=self._is_16_bit,
            )
            self._found(fault, tensor, earlier)
        if place.phase == BACKWARD:
            self._reach("backward", tensor)
        elif place.module is None and tensor.numel() == 1:
            self._reach("loss", tensor)


def _may_be_mask(tensor: torch.Tensor) -> bool:
    """Return whether the only numbers that are not finite are -inf."""
    return not bool((tensor.isnan() | (tensor == math.inf)).any())


class _Inputs:
    """The floating arguments of an operation.

    Attributes:
        bad: those with inf or nan.
        bits: of the widest.
        any_nan, any_inf: whether one contains nan, and whether one contains inf.
        numbers: the finite constants among the arguments.
        infinite_number: whether there is an infinite one.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = list(floating_tensors((args, dict(kwargs))))
        self._stats = [(tensor, None if is_finite(tensor) else stats_of(tensor)) for tensor in tensors]
        self.bits = max((torch.finfo(tensor.dtype).bits for tensor in tensors), default=0)
        self.bad = [tensor for tensor, stats in self._stats if stats is not None]
        self.any_nan = any(bool(tensor.isnan().any()) for tensor in self.bad)
        self.any_inf = any(bool(tensor.isinf().any()) for tensor in self.bad)
        constants = [n for n in (*args, *kwargs.values()) if isinstance(n, (int, float)) and not isinstance(n, bool)]
        self.numbers = tuple(float(n) for n in constants if math.isfinite(n))
        self.infinite_number = len(self.numbers) < len(constants)

    def stats(self) -> tuple[TensorStats, ...]:
        """Return the statistics of all."""
        return tuple(stats or stats_of(tensor) for tensor, stats in self._stats)
