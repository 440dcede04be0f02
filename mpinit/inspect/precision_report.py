"""The report of :func:`mpinit.explain`: the operations of a run, by module and dtypes, and the reasons."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..basics.dtypes import dtype_name
from ..basics.tables import bytes_text, counted, plain_table
from ..basics.trees import tensors_in
from ..functions.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow
from ..session import Session
from ..torch_internals.native_autocast import is_on
from ..torch_internals.operations import caller_of_operation
from .trace import BACKWARD, FORWARD, ModelTrace, Place

# Operations that return a view and compute nothing.
_VIEWS: Final = frozenset(
    {
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "expand",
        "detach",
        "alias",
        "slice",
        "select",
        "permute",
        "squeeze",
        "unsqueeze",
        "unbind",
        "split",
        "split_with_sizes",
        "chunk",
        "as_strided",
        "unfold",
        "diagonal",
        "_reshape_alias",
        "view_as_real",
        "lift_fresh",
    }
)
_COLUMNS: Final = ("module", "operation", "times", "inputs", "outputs", "cast", "why")
_SHOWN: Final = 60
_FORWARD_ONLY: Final = "Forward only: pass loss=, a function of the output, for the backward pass."


@final
@dataclass(frozen=True)
class Row:
    """A group of operations with the same module, name, dtypes and reason.

    Attributes:
        module: the module's dotted name. "" is the model itself; "(loss)": outside of the model.
        module_type: the module's class.
        phase: "forward" or "backward".
        op: the operation's name in torch's dispatcher, such as "addmm" or "_softmax".
        inputs: the floating dtypes among its inputs, each once, in order.
        outputs: the floating dtypes among its outputs, each once, in order.
        why: the reason of its dtype, such as the cast policy, the weights' or inputs' dtype, or a cast in your code.
        where: the file and line of a cast in the user's code; else "".
        flagged: whether it ran in 16 bits although the cast policy requires float32.
        count: how often it ran.
        casts: how often it was a cast of a floating tensor.
        cast_bytes: the bytes that these casts wrote.
    """

    module: str
    module_type: str
    phase: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    why: str
    where: str
    flagged: bool
    count: int = 0
    casts: int = 0
    cast_bytes: int = 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating dtypes of inputs and outputs, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.outputs)))

    @property
    def computes(self) -> bool:
        """Return whether it computes floating-point numbers; a view does not."""
        return bool(self.dtypes) and self.op not in _VIEWS

    def cells(self) -> list[str]:
        return [
            self.module or f"({self.module_type})",  # the model itself has the name ""
            self.op if self.phase == FORWARD else f"{self.op} (backward)",
            f"{self.count:,}",
            *(", ".join(dtypes) for dtypes in (self.inputs, self.outputs)),
            bytes_text(self.cast_bytes) if self.casts else "",
            f"{'! ' if self.flagged else ''}{self.why}" + (f" ({Path(self.where).name})" if self.where else ""),
        ]


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
        """Operations that ran in 16 bits although the cast policy requires float32."""
        return tuple(row for row in self.rows if row.flagged)

    def summary(self) -> str:
        """Return a summary in one line."""
        forward, backward = (sum(row.count for row in self.rows if row.phase == p) for p in (FORWARD, BACKWARD))
        casts = sum(row.casts for row in self.rows)
        size = bytes_text(sum(row.cast_bytes for row in self.rows))
        return (
            f"{counted(forward, 'operation')} forward, {backward:,} backward; "
            f"{counted(casts, 'cast that writes', 'casts that write')} {size}; "
            f"{counted(sum(row.count for row in self.flagged), 'operation')} in 16 bits though the cast "
            "policy requires float32"
        )

    def __str__(self) -> str:
        title = f"{self.model} {f'at {self.level}' if self.level else 'as it is, not initialised'}"
        rows = [row for row in self.rows if row.computes]
        # Flagged rows are always shown.
        shown = sorted(range(len(rows)), key=lambda index: not rows[index].flagged)[:_SHOWN]
        hidden = len(rows) - len(shown)
        return "\n".join(
            [
                *(title, self.summary(), ""),
                plain_table(_COLUMNS, (rows[index].cells() for index in sorted(shown)), numbers=(2,)),
                f"{f'{hidden} more rows, ' if hidden else ''}views and operations without floating point: see .rows",
                *(() if any(row.phase == BACKWARD for row in self.rows) else (_FORWARD_ONLY,)),
            ]
        )

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


_PACKAGE: Final = str(Path(__file__).parents[1]).replace("\\", "/")
_WATCHERS: Final = (f"{_PACKAGE}/inspect/", f"{_PACKAGE}/torch_internals/operations.py")
_BOUNDARY: Final = f"{_PACKAGE}/model/boundary.py"
_CASTING: Final = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "asarray", "as_tensor", "tensor"}
)
_LOWER: Final = ("float16", "bfloat16")
_FLOAT32: Final = "float32"
# The module of operations outside of the model, such as those of the loss.
_NO_MODULE: Final = "(loss)"

# The dispatcher's operations whose name differs from their row in the cast policy.
_OTHER_NAMES: Final = {
    **dict.fromkeys(("_convolution", "mkldnn_convolution", "cudnn_convolution", "miopen_convolution"), "convolution"),
    **dict.fromkeys(("convolution_overrideable", "_slow_conv2d_forward"), "convolution"),
    **dict.fromkeys(("mkldnn_linear", "_addmm_activation"), "linear"),
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), "lstm"),
    **dict.fromkeys(("_thnn_fused_lstm_cell",), "lstm_cell"),
    **dict.fromkeys(("_thnn_fused_gru_cell",), "gru_cell"),
    "linalg_vecdot": "vecdot",
    "_prelu_kernel": "prelu",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "_fused_rms_norm": "rms_norm",
    "linalg_vector_norm": "norm",
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), "cdist"),
    "_pdist_forward": "pdist",
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), "nll_loss"),
    "multilabel_margin_loss_forward": "multilabel_margin_loss",
    "linalg_cross": "cross",
    "_trilinear": "bilinear",
    "_ctc_loss": "ctc_loss",
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), "grid_sample"),
}
_PREFIXES: Final = (
    ("_scaled_dot_product_", "scaled_dot_product_attention"),
    ("upsample_", "interpolate"),
    ("_upsample_", "interpolate"),
)


class _Reason(NamedTuple):
    """The reason of an operation's dtype, with the fields ``why``, ``where`` and ``flagged`` of a :class:`Row`."""

    why: str
    where: str = ""
    flagged: bool = False


@dataclass
class _Frame:
    """The running forward of a module: the dtypes of its own tensors, and the casts in its code so far.

    ``casts_on`` is read when the forward begins, because autocast's own kernels switch the flag off.
    """

    weights: tuple[str, ...]
    is_kept: bool
    casts_on: bool
    casts: dict[str, str]


class Recording:
    """A counter of operations by module of ``model``, dtypes and reason.

    Attributes:
        trace: a context manager to enter around the run.
    """

    def __init__(self, model: nn.Module, session: Session | None) -> None:
        self.trace = ModelTrace(model, self._operation, self._module_begins, self._module_ends)
        self._types = {name: type(module).__name__ for name, module in model.named_modules()}
        self._plan = None if session is None else session.plan
        self._kept = () if session is None else tuple(session.selection.float32_modules)
        is_apex = self._plan is not None and self._plan.properties.cast_policy == "apex"
        self._policy: dict[str, CastRow] = {row.name: row for row in (APEX_POLICY if is_apex else TORCH_POLICY)}
        # The first frame is outside of all modules.
        self._frames = [_Frame((), False, is_on(), {})]
        # Row -> its count, casts, and bytes written by casts.
        self._rows: dict[Row, list[int]] = {}

    def rows(self) -> tuple[Row, ...]:
        """Return the rows, in the order in which their operations first ran."""
        return tuple(
            dataclasses.replace(row, count=count, casts=casts, cast_bytes=cast_bytes)
            for row, (count, casts, cast_bytes) in self._rows.items()
        )

    def _module_begins(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        weights = _floating(t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        is_kept = module in self._kept or (isinstance(module, _NormBase) and _FLOAT32 in weights)
        # The model's own forward switches casts on after this hook.
        is_outermost = len(self._frames) == 1
        switches_on = is_outermost and self._plan is not None and self._plan.properties.patch_torch_functions
        self._frames.append(_Frame(weights, is_kept, switches_on or is_on(), {}))

    def _module_ends(self, name: str, output: Any) -> None:
        self._frames.pop()

    def _operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        inputs = _floating(tensors_in((args, kwargs)))
        result = run()
        written = list(tensors_in(result))
        outputs, cast = _floating(written), _cast_of(operation, args, written)
        name = str(operation.overloadpacket).rpartition(".")[2]
        place = self.trace.place()
        reason = self._reason(name, inputs, outputs, cast, place)
        module = _NO_MODULE if place.module is None else place.module
        row = Row(module, self._types.get(module, ""), place.phase, name, inputs, outputs, *reason)
        counts = self._rows.setdefault(row, [0, 0, 0])
        counts[0] += 1
        if cast is not None:
            counts[1] += 1
            counts[2] += sum(tensor.nbytes for tensor in written)
        return result

    def _reason(
        self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], cast: tuple[str, str] | None, place: Place
    ) -> _Reason:
        is_backward = place.phase == BACKWARD
        if cast is not None:
            words = f"{cast[0]} to {cast[1]}"
            return _Reason(f"backward of a cast: {words}") if is_backward else self._reason_of_cast(words, cast[1])
        if not (inputs or outputs):
            return _Reason("no floating point")
        if self._plan is not None and not is_backward:
            caller = caller_of_operation(_WATCHERS)
            if caller is not None and caller.file.startswith(_BOUNDARY):
                return _Reason("mpinit: reads the range of an input, to clamp it in its cast")
        if is_backward:
            forward = place.node.removesuffix("0").removesuffix("Backward")
            if forward == "AccumulateGrad":
                return _Reason("gradient of a parameter")
            return _Reason(f"backward of {forward}, in the type of its forward")
        row = self._row_of(name)
        lower = any(each in _LOWER for each in inputs)
        followed = _reason_of_row(row, inputs, lower) if row is not None and self._frames[-1].casts_on else None
        if followed is not None:
            return followed
        flagged = row is not None and row.cast in (Cast.FP32, Cast.BANNED) and lower
        return self._reason_of_inputs(inputs, outputs)._replace(flagged=flagged)

    def _row_of(self, operation: str) -> CastRow | None:
        """Return the policy's row of an operation of the dispatcher; None for in-place operations and those without."""
        row = self._policy.get(_OTHER_NAMES.get(operation, operation))
        if row is not None:
            return None if operation.endswith("_") else row
        named = next((name for prefix, name in _PREFIXES if operation.startswith(prefix)), "")
        return None if "backward" in operation else self._policy.get(named)

    def _reason_of_inputs(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> _Reason:
        frame = self._frames[-1]
        if len(inputs or outputs) > 1:
            if frame.is_kept:
                return _Reason(f"weight type: module kept in {_FLOAT32} has {(inputs or outputs)[0]}")
            return _Reason(f"promotion: {' with '.join(inputs or outputs)} returns {', '.join(outputs) or 'no floats'}")
        (dtype,) = inputs or outputs
        if dtype in frame.casts:
            return _Reason(f"user's code: cast to {dtype}", frame.casts[dtype])
        if frame.is_kept and dtype == _FLOAT32 and self._plan is not None:
            return _Reason(f"weight type: module kept in {_FLOAT32}")
        if dtype in frame.weights:
            return _Reason(f"weight type: weights are {dtype}")
        return _Reason(f"input type: {dtype}" if inputs else f"made in {dtype}")

    def _reason_of_cast(self, words: str, target: str) -> _Reason:
        caller, frame = caller_of_operation(_WATCHERS), self._frames[-1]
        if caller is None:
            return _Reason(f"cast by torch: {words}")
        if caller.file.startswith(_PACKAGE):
            folder = caller.file.removeprefix(_PACKAGE).split("/")[1]
            if folder in ("functions", "torch_internals"):
                return _Reason(f"policy: argument cast, {words}")
            return _Reason(f"weight type: cast at the boundary of a module, {words}")
        if caller.called not in _CASTING and frame.casts_on:
            return _Reason(f"policy: argument of {caller.called or 'an operator'} cast, {words}")
        where = f"{caller.file}:{caller.line}"
        if caller.is_torch:
            return _Reason(f"torch's code: {words}", "/".join(where.split("/")[-2:]))
        frame.casts[target] = where
        return _Reason(f"user's code: {words}", where)


def _reason_of_row(row: CastRow, inputs: tuple[str, ...], lower: bool) -> _Reason | None:
    """Return the reason of an operation that has a row, while casts are on; None if it did not follow the row."""
    if row.cast is Cast.PROMOTE:
        return _Reason(f"policy: {row.name} runs in the widest type of its arguments")
    if row.cast is Cast.LOWER_PRECISION:
        return _Reason(f"policy: {row.name} runs in {inputs[0]}") if lower else None
    if not lower:
        return _Reason(f"policy: {row.name} runs in {_FLOAT32}")
    caller = caller_of_operation(_WATCHERS)
    if caller is not None and caller.called and not any(n.rpartition(".")[2] == caller.called for n in row.names):
        # A kernel of torch calls it, after the casts.
        return _Reason(f"inside {caller.called}, which runs in {inputs[0]}")
    return None


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
