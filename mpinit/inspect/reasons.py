"""Why an operation runs in the dtype it does: the cast policy, the weights' type, promotion, the user's code."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..basics.dtypes import dtype_name
from ..functions.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow
from ..plan import CastPolicy, Plan
from ..torch_internals.callers import Caller
from ..torch_internals.native_autocast import is_on

_PACKAGE: Final = str(Path(__file__).parents[1]).replace("\\", "/")
_CASTING: Final = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "asarray", "as_tensor", "tensor"}
)
_LOWER: Final = ("float16", "bfloat16")
_FLOAT32: Final = "float32"
_NO_FLOATS: Final = "no floating point"

# The dispatcher's operations have the name of their row in the cast policy, but for these.
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


@dataclass(frozen=True)
class Operation:
    """One operation, as it was seen.

    Attributes:
        name: its name, without the overload's.
        inputs, outputs: names of the floating dtypes among them, each once.
        cast: from which floating dtype to which it casts; None where it is no cast.
        caller: the frame that asked for it.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cast: tuple[str, str] | None
    caller: Caller | None


class Reason(NamedTuple):
    """Why.

    Attributes:
        why: in words.
        where: file and line of a cast in the user's code; "" elsewhere.
        flagged: whether it ran in 16 bits though the cast policy calls for float32.
    """

    why: str
    where: str = ""
    flagged: bool = False


@dataclass
class _Frame:
    """A module's forward that is running: its own floating dtypes, and the casts that its code has made so far.

    Whether casts were on is asked where it begins: inside the kernels that cast, torch says that they are off.
    """

    weights: tuple[str, ...]
    is_kept: bool
    is_norm: bool
    casts_on: bool
    casts: dict[str, str]


class AtenPolicy:
    """The rows of a cast policy, by the names that the dispatcher knows.

    Args:
        policy: which table.

    Example:
        >>> AtenPolicy(CastPolicy.TORCH).row_of("_softmax").cast.value
        'fp32'
        >>> AtenPolicy(CastPolicy.TORCH).row_of("exp_") is None
        True
    """

    def __init__(self, policy: CastPolicy) -> None:
        rows: Iterable[CastRow] = APEX_POLICY if policy is CastPolicy.APEX else TORCH_POLICY
        self._rows = {row.name: row for row in rows}

    def row_of(self, operation: str) -> CastRow | None:
        """The row that an operation, without its overload's name, carries out; None for in-place ones and others."""
        row = self._rows.get(_OTHER_NAMES.get(operation, operation))
        if row is not None:
            return None if operation.endswith("_") else row
        named = next((name for prefix, name in _PREFIXES if operation.startswith(prefix)), "")
        return None if "backward" in operation else self._rows.get(named)


class Reasons:
    """Says why, for one model.

    Args:
        plan: what is in force for the model; None: it is not initialised.
        float32_modules: modules that the plan leaves in float32.
    """

    def __init__(self, plan: Plan | None, float32_modules: Collection[nn.Module]) -> None:
        self._plan = plan
        self._float32_modules = float32_modules
        self._policy = AtenPolicy(CastPolicy.TORCH if plan is None else plan.cast_policy)
        self._outermost = _Frame((), False, False, is_on(), {})
        self._frames: list[_Frame] = []

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        own = (*module._parameters.values(), *module._buffers.values())
        floating = dict.fromkeys(dtype_name(t.dtype) for t in own if t is not None and t.is_floating_point())
        is_kept = module in self._float32_modules or (isinstance(module, _NormBase) and _FLOAT32 in floating)
        begins = not self._frames and self._plan is not None and self._plan.patch_functions
        self._frames.append(_Frame(tuple(floating), is_kept, isinstance(module, _NormBase), begins or is_on(), {}))

    def leave(self) -> None:
        """It has ended."""
        self._frames.pop()

    def of_backward(self, operation: Operation, node: str) -> Reason:
        """Of an operation that the node of the backward graph of this name runs."""
        if operation.cast is not None:
            return Reason(f"backward of a cast: {operation.cast[0]} to {operation.cast[1]}")
        if not (operation.inputs or operation.outputs):
            return Reason(_NO_FLOATS)
        forward = node.removesuffix("0").removesuffix("Backward")
        if forward == "AccumulateGrad":
            return Reason("gradient of a parameter")
        return Reason(f"backward of {forward}, in the type of its forward")

    def of_forward(self, operation: Operation) -> Reason:
        """Of any other operation."""
        if operation.cast is not None:
            return self._of_cast(operation.cast, operation.caller)
        if not (operation.inputs or operation.outputs):
            return Reason(_NO_FLOATS)
        row = self._policy.row_of(operation.name)
        lower = any(name in _LOWER for name in operation.inputs)
        if row is not None and self._frame.casts_on:
            followed = _of_row(row, operation, lower)
            if followed is not None:
                return followed
        flagged = row is not None and row.cast in (Cast.FP32, Cast.BANNED) and lower
        why, where = self._of_inputs(operation)
        return Reason(why, where, flagged)

    @property
    def _frame(self) -> _Frame:
        return self._frames[-1] if self._frames else self._outermost

    def _of_inputs(self, operation: Operation) -> tuple[str, str]:
        frame = self._frame
        inputs = operation.inputs or operation.outputs
        if len(inputs) > 1:
            if frame.is_norm:
                return f"weight type: BatchNorm kept in {_FLOAT32} takes {inputs[0]}", ""
            return f"promotion: {' with '.join(inputs)} gives {', '.join(operation.outputs) or 'no floats'}", ""
        (dtype,) = inputs
        if dtype in frame.casts:
            return f"user's code: cast to {dtype}", frame.casts[dtype]
        if frame.is_kept and dtype == _FLOAT32 and self._plan is not None:
            return f"weight type: module kept in {_FLOAT32}", ""
        if dtype in frame.weights:
            return f"weight type: weights are {dtype}", ""
        if operation.inputs:
            return f"input type: {dtype}", ""
        return f"made in {dtype}", ""

    def _of_cast(self, cast: tuple[str, str], caller: Caller | None) -> Reason:
        words = f"{cast[0]} to {cast[1]}"
        if caller is None:
            return Reason(f"cast by torch: {words}")
        if caller.file.startswith(_PACKAGE):
            folder = caller.file.removeprefix(_PACKAGE).split("/")[1]
            if folder in ("functions", "torch_internals"):
                return Reason(f"policy: argument cast, {words}")
            return Reason(f"weight type: cast at the boundary of a module, {words}")
        if caller.called in _CASTING or not self._frame.casts_on:
            where = f"{caller.file}:{caller.line}"
            if caller.is_torch:
                return Reason(f"torch's code: {words}", "/".join(where.split("/")[-2:]))
            self._frame.casts[cast[1]] = where
            return Reason(f"user's code: {words}", where)
        return Reason(f"policy: argument of {caller.called or 'an operator'} cast, {words}")


def _of_row(row: CastRow, operation: Operation, lower: bool) -> Reason | None:
    """Of an operation that has a row, while casts are on; None where the row was not followed."""
    if row.cast is Cast.PROMOTE:
        return Reason(f"policy: {row.name} takes the widest type given")
    if row.cast is Cast.LOWER_PRECISION:
        return Reason(f"policy: {row.name} runs in {operation.inputs[0]}") if lower else None
    if not lower:
        return Reason(f"policy: {row.name} runs in {_FLOAT32}")
    called = "" if operation.caller is None else operation.caller.called
    if called and not any(name.rpartition(".")[2] == called for name in row.names):
        # A kernel of torch's calls it, behind the casts.
        return Reason(f"inside {called}, which runs in {operation.inputs[0]}")
    return None
