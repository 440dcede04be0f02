"""Faults: operations that made inf or nan, what they were computed from, and a hint for each kind of operation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from ..basics.dtypes import dtype_name
from .numbers import TensorStats
from .trace import BACKWARD


@dataclass(frozen=True)
class Fault:
    """The origin of inf or nan: an operation, the model's inputs, a parameter or a buffer.

    Attributes:
        kind: "forward" or "backward" (an operation's result overflowed), "cast" (a cast to 16 bits overflowed),
            "float32" (computed in float32), "data" (the model's inputs had it), "weights" (a parameter or buffer had
            it).
        module: the dotted name of the module. "" is the model itself; None: outside of the model, as in the loss.
        phase: "forward" or "backward".
        operation: torch's name of the operation, as "aten.mm.default"; the name of a parameter or buffer if ``kind`` is
            "weights".
        dtype: dtype of the result.
        inputs: statistics of the operation's inputs.
        may_be_intended: whether it may be intended: -inf, as in a mask, a float32 result that may not be used, or a
            buffer, which a forward may only write to.
        numbers: the constants among the operation's arguments.
        node: the name of the node of the backward graph that ran, as "SqrtBackward0"; "" in a forward pass.
        follows_16_bit: whether anything was computed in 16 bits before.
    """

    kind: str
    module: str | None
    phase: str
    operation: str
    dtype: torch.dtype
    inputs: tuple[TensorStats, ...]
    may_be_intended: bool = False
    numbers: tuple[float, ...] = ()
    node: str = ""
    follows_16_bit: bool = False

    @property
    def where(self) -> str:
        """The module's name, as text."""
        if self.module is None:
            return "the loss (outside of the model)"
        return f"module {self.module!r}" if self.module else "the model's own forward"

    @property
    def hint(self) -> str:
        """The usual cure for the operation, as text; "" if there is none."""
        if self.kind in ("data", "weights"):
            return ""
        if self.kind == "cast":
            return _CAST_OF_MASK if self.may_be_intended else _CAST
        name = self.operation.removeprefix("aten.").partition(".")[0].strip("_")
        if self.phase == BACKWARD:
            node = self.node.partition("Backward")[0].lower()
            return next((text for nodes, text in _BACKWARD if node in nodes), _GRADIENT)
        if name in ("rsqrt", "reciprocal", "div") or (name == "pow" and any(number < 0 for number in self.numbers)):
            return _DIVISION
        if name == "mul" and self.numbers:
            return f"a factor of {max(self.numbers, key=abs):g} is too large here: {_FACTOR}"
        return next((text for names, text in _FORWARD if name in names), "")

    @property
    def text(self) -> str:
        """The operation and its inputs, without the hint."""
        what = _SENTENCES[self.kind].format(
            where=self.where, phase=self.phase, operation=self.operation, dtype=dtype_name(self.dtype)
        )
        if self.kind == "float32":
            what += _AFTER_16_BIT if self.follows_16_bit else ": precision is not at fault"
        return what + (f"; from {'; '.join(map(str, self.inputs))}" if self.inputs else "")

    def __str__(self) -> str:
        return f"{self.text}. Hint: {self.hint}" if self.hint else self.text


_SENTENCES: Final = {
    **dict.fromkeys(
        ("forward", "backward", "float32"), "{where}: {operation} computed inf or nan in {dtype} in the {phase} pass"
    ),
    "cast": "{where}: a cast to {dtype} left its range in the {phase} pass ({operation})",
    "data": "the inputs of {where} contained inf or nan",
    "weights": "{where}: {operation} contained inf or nan before anything was computed",
}
_AFTER_16_BIT: Final = ", after operations in 16 bits: a run at O0 shows whether precision is at fault"

_DIVISION: Final = (
    "a division by 0, which a smaller number became in 16 bit: raise the eps to 1e-5 or more, or keep the module in "
    "float32"
)
_FACTOR: Final = "multiply after a mean or a norm, or in float32"
_CAST: Final = "clamp to the range first, or keep what is cast in float32"
_CAST_OF_MASK: Final = "a mask of -1e9 or finfo(float32).min becomes -inf: a row that is masked whole is nan then"
_GRADIENT: Final = (
    "a dynamic loss scale that is too large decreases by itself; if overflows go on, keep the module in float32"
)
_SUM: Final = (
    "a sum of many or large numbers: divide before it is summed, or keep the module in float32; where a learning rate "
    "that is too large has made weights large, lower it"
)
_FORWARD: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("softmax", "log_softmax", "safe_softmax", "logsumexp"),
        "a row that is masked whole is nan: keep one position of each row unmasked, or replace nan by 0 there",
    ),
    (
        ("exp", "exp2", "expm1", "sinh", "cosh"),
        "in a sigmoid or swish that is written out, call torch.sigmoid or silu instead; in a softmax, subtract the "
        "largest number first, as softmax and logsumexp do",
    ),
    (
        ("log", "log2", "log10"),
        "a logarithm of 0, which a smaller number became in 16 bit: use log_softmax or logsigmoid, or compute it in "
        "float32",
    ),
    (("pow", "square"), "a power: divide before it, as by the largest magnitude, or keep the module in float32"),
    (("sum", "mean", "cumsum", "var", "var_mean", "norm", "linalg_vector_norm", "prod", "cumprod"), _SUM),
    (("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "mkldnn_convolution", "dot", "mv"), _SUM),
)
_BACKWARD: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("sqrt", "rsqrt", "norm", "linalgvectornorm"), "the gradient of a root at 0 is inf: add an eps below the root"),
    (("div", "reciprocal"), "a division by numbers near 0: raise the eps to 1e-5 or more"),
    (("exp", "pow"), "an inf of the forward pass meets a gradient of 0: keep the numbers in range there"),
    (("log",), "the gradient of a logarithm at 0 is inf: clamp its argument to at least 1e-6"),
)


def worst(faults: Iterable[Fault]) -> Fault | None:
    """Return the first fault that cannot be intended, or else the first that may be; None without any.

    In both groups, operations and inputs come before parameters and buffers.
    """
    return min(faults, key=lambda fault: (fault.may_be_intended, fault.kind == "weights"), default=None)


class Origins:
    """The faults that the inf and nan in memory come from, by storage.

    A fault is identified by its index in the list of its ``OverflowWatch``. When an operation writes a new result into
    the same memory, the faults of the earlier result are dropped.
    """

    def __init__(self) -> None:
        self._of: dict[int, frozenset[int]] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Return the faults that these tensors' inf and nan come from."""
        found: frozenset[int] = frozenset()
        for tensor in tensors if self._of else ():
            found |= self._of.get(_place(tensor), frozenset())
        return found

    def set(self, tensor: torch.Tensor, faults: frozenset[int], is_written_in_place: bool = False) -> None:
        """Register the faults of a result."""
        place = _place(tensor)
        if is_written_in_place:
            faults |= self._of.get(place, frozenset())
        self._of[place] = faults

    def clear(self, tensor: torch.Tensor) -> None:
        """Drop the faults of earlier numbers in a new result's memory."""
        if self._of:
            self._of.pop(_place(tensor), None)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
