"""``mpinit.explain``: the dtypes of the operations in one run of a model."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn

from ..autocast.cast_lists import TORCH_POLICY, Cast
from ..basics.dtypes import dtype_name
from ..basics.tables import bytes_text, counted, plain_table
from ..basics.trees import tensors_in
from .copies import (
    as_initialized,
    at_level,
    copied_inputs,
    forward_refused,
    inside_wrappers,
    plain_copy,
    same_random_numbers,
    session_to_run,
)
from .trace import BACKWARD, FORWARD, ModelTrace

Loss = Callable[[Any], torch.Tensor]

_ADVICE: Final = "let loss= use nothing but the output, and forward nothing but the modules of self"
_COLUMNS: Final = ("module", "operation", "times", "inputs", "outputs", "cast", "why")
_ROWS_SHOWN: Final = 60
# The module of operations outside of the model, such as those of the loss.
_NO_MODULE: Final = "(loss)"
_FLOAT32_ROWS: Final = frozenset(row.name for row in TORCH_POLICY if row.cast in (Cast.FP32, Cast.BANNED))


@final
@dataclass(frozen=True)
class Row:
    """A group of operations with the same module, name, dtypes and reason.

    Attributes:
        module: the module's dotted name. "" is the model itself; "(loss)": outside of the model.
        phase: "forward" or "backward".
        op: the operation's name in torch's dispatcher, such as "addmm" or "_softmax".
        inputs: the floating dtypes among its inputs, each once, in order.
        outputs: the floating dtypes among its outputs, each once, in order.
        why: where its dtype comes from: a cast, a promotion, the module's weights, its inputs, or a forward operation.
        computes: whether it computes floating-point numbers; a view does not.
        flagged: whether it ran in 16 bits although the cast policy has it in float32.
        count: how often it ran.
        casts: how often it was a cast of a floating tensor.
        cast_bytes: the bytes that these casts wrote.
    """

    module: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    why: str
    computes: bool
    flagged: bool
    count: int = 0
    casts: int = 0
    cast_bytes: int = 0


@final
@dataclass(frozen=True)
class PrecisionReport:
    """The dtypes of the operations in one run of a model; printed, it is a table.

    Attributes:
        model: the model's class.
        level: its opt_level; "" if it is not initialised.
        rows: all operations, in the order in which they first ran.
    """

    model: str
    level: str
    rows: tuple[Row, ...]

    @property
    def flagged(self) -> tuple[Row, ...]:
        """Operations that ran in 16 bits although the cast policy has them in float32."""
        return tuple(row for row in self.rows if row.flagged)

    def summary(self) -> str:
        """Return a summary in one line."""
        forward, backward = (sum(row.count for row in self.rows if row.phase == p) for p in (FORWARD, BACKWARD))
        casts, size = sum(row.casts for row in self.rows), bytes_text(sum(row.cast_bytes for row in self.rows))
        return (
            f"{counted(forward, 'operation')} forward, {backward:,} backward; "
            f"{counted(casts, 'cast that writes', 'casts that write')} {size}; "
            f"{counted(sum(row.count for row in self.flagged), 'operation')} in 16 bits though the cast "
            "policy has them in float32"
        )

    def __str__(self) -> str:
        rows = [row for row in self.rows if row.computes]
        # Flagged rows are always shown.
        shown = sorted(sorted(range(len(rows)), key=lambda index: not rows[index].flagged)[:_ROWS_SHOWN])
        cells = [
            [
                row.module or f"({self.model})",  # the model itself has the name ""
                row.op if row.phase == FORWARD else f"{row.op} (backward)",
                f"{row.count:,}",
                *(", ".join(dtypes) for dtypes in (row.inputs, row.outputs)),
                bytes_text(row.cast_bytes) if row.casts else "",
                f"{'! ' if row.flagged else ''}{row.why}",
            ]
            for row in map(rows.__getitem__, shown)
        ]
        hidden = f"{len(rows) - len(shown)} more rows, " if len(rows) > len(shown) else ""
        lines = [
            f"{self.model} {f'at {self.level}' if self.level else 'as it is, not initialised'}",
            *(self.summary(), "", plain_table(_COLUMNS, cells, numbers=(2,))),
            f"{hidden}views and operations without floating point: in .rows",
        ]
        if not any(row.phase == BACKWARD for row in self.rows):
            lines.append("Forward only: with a function of the output that returns a loss, backward too.")
        return "\n".join(lines)


def explain(
    model: nn.Module, *args: Any, loss: Loss | None = None, opt_level: str | None = None, **kwargs: Any
) -> PrecisionReport:
    """Run a model once and report the dtype of each operation, and where it comes from.

    It runs a copy of the model on copies of the inputs: an initialised model with its own configuration, any other at
    ``opt_level``. Weights, buffers, inputs, gradients, attributes and random numbers do not change, also if the run
    raises. The copies need as much memory as the weights, buffers and inputs. Hooks on parameters' gradients, such as
    those that step an optimizer in the backward pass, are not copied and do not run.

    Args:
        model: a module, initialised or not. Of a compiled module, and of a DistributedDataParallel, the module inside
            runs. Pass a whole initialised model, not a part of it.
        args, kwargs: the arguments of the call, with any shapes and dtypes that the model accepts.
        loss: a function from the output to a loss, one number, for the backward pass too. Default None: forward only.
        opt_level: "O0" to "O5", only for a model that is not initialised. Default None: the model runs without casts
            of mpinit.

    Returns:
        The report, for ``print(report)``, with ``.rows``, ``.flagged``.

    Raises:
        ValueError: the level is unknown, the model is initialised already or is a part of an initialised model, or the
            model cannot be copied.
        TypeError: ``model`` is not a module, or ``loss`` is not a function.
        RuntimeError: the loss has more than one number: torch's error.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
        >>> report = mpinit.explain(model, torch.ones(2, 4), loss=torch.sum, opt_level="O2")
        >>> [(row.module, row.op, row.why) for row in report.flagged]
        [('1', '_softmax', 'inputs are float16')]
        >>> model[0].weight.dtype
        torch.float32
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function from the model's output to a loss, not {type(loss).__name__}")
    model = inside_wrappers(model)
    session = session_to_run(model, "mpinit.explain")
    if session is not None and opt_level is not None:
        raise ValueError(
            f"the model was initialised already, in {session.describe()}: drop opt_level={opt_level!r} to see "
            "what that session does, or call mpinit.undo on it first to see what another level would do"
        )
    with same_random_numbers():
        copied, (args, kwargs) = plain_copy(model, "explain the part that can be copied"), copied_inputs(args, kwargs)
        in_force: Any = nullcontext()
        if session is not None:
            in_force = as_initialized(model, session, copied)
        elif opt_level is not None:
            in_force = at_level([copied], [], opt_level)
        with in_force, forward_refused(model, copied, "mpinit.explain", _ADVICE):
            recording = _Recording(copied)
            with recording.trace:
                _run(copied, args, kwargs, loss)
    level = session.opt_level if session is not None else opt_level or ""
    return PrecisionReport(type(model).__name__, level, recording.rows())


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> None:
    if loss is None:
        model(*args, **kwargs)
        return
    with torch.enable_grad():
        value = loss(model(*args, **kwargs))
        leaves = [leaf for leaf in (*model.parameters(), *tensors_in((args, kwargs))) if leaf.requires_grad]
        if value.requires_grad and leaves:
            # inputs=, so that no other tensor that the loss uses gets a gradient.
            torch.autograd.backward(value, inputs=leaves)


class _Recording:
    """A counter of operations by module of ``model``, dtypes and reason.

    Attributes:
        trace: a context manager to enter around the run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trace = ModelTrace(model, self._operation)
        self._weights = {
            name: _floating([*module.parameters(recurse=False), *module.buffers(recurse=False)])
            for name, module in model.named_modules()
        }
        # Row -> its count, casts, and bytes written by casts.
        self._rows: dict[Row, list[int]] = {}

    def rows(self) -> tuple[Row, ...]:
        """Return the rows, in the order in which their operations first ran."""
        return tuple(
            dataclasses.replace(row, count=count, casts=casts, cast_bytes=cast_bytes)
            for row, (count, casts, cast_bytes) in self._rows.items()
        )

    def _operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        inputs = _floating(tensors_in((args, kwargs)))
        result = run()
        written = list(tensors_in(result))
        outputs, cast = _floating(written), _cast_of(operation, args, written)
        name = str(operation.overloadpacket).rpartition(".")[2]
        place = self.trace.place()
        module = _NO_MODULE if place.module is None else place.module
        is_lower = "float16" in inputs or "bfloat16" in inputs
        # Kernels are named after their functions: _softmax, native_layer_norm, nll_loss_forward.
        function = name.removeprefix("native_").removeprefix("_").removesuffix("_forward")
        flagged = place.phase == FORWARD and is_lower and cast is None and function in _FLOAT32_ROWS
        why = "no floating point"
        if cast is not None:
            why = f"{'backward of a ' if place.phase == BACKWARD else ''}cast: {cast[0]} to {cast[1]}"
        elif place.phase == BACKWARD:
            forward = place.node.removesuffix("0").removesuffix("Backward")
            why = "gradient of a parameter" if forward == "AccumulateGrad" else f"backward of {forward}"
        elif len(inputs) > 1:
            why = f"promotion: {' with '.join(inputs)} returns {', '.join(outputs) or 'no floats'}"
        elif inputs or outputs:
            (dtype,) = inputs or outputs[:1]
            is_of_weights = dtype in self._weights.get(module, ())
            why = f"weights are {dtype}" if is_of_weights else f"inputs are {dtype}" if inputs else f"made in {dtype}"
        computes = bool(inputs or outputs) and not operation.is_view
        row = Row(module, place.phase, name, inputs, outputs, why, computes, flagged)
        counts = self._rows.setdefault(row, [0, 0, 0])
        counts[0] += 1
        if cast is not None:
            counts[1] += 1
            counts[2] += sum(tensor.nbytes for tensor in written)
        return result


def _floating(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()))


def _cast_of(operation: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of the source and target dtype of a cast; None if the operation does not cast."""
    if operation is torch.ops.aten._to_copy.default and args and outputs:
        source, target = args[0], outputs[0]
    elif operation is torch.ops.aten.copy_.default and len(args) > 1:
        target, source = args[0], args[1]
    else:
        return None
    if source.dtype == target.dtype or not (source.is_floating_point() and target.is_floating_point()):
        return None
    return dtype_name(source.dtype), dtype_name(target.dtype)
