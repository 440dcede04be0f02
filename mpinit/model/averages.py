"""Averages of weights that have masters: whatever is averaged into a float32 copy is a master, not its rounding.

``e.lerp_(p, 0.1)`` with a 16-bit weight ``p`` would round the average's source at every step, or raise. The tensors of
a float32 copy therefore take part in ``__torch_function__``: where an operation that averages meets a 16-bit tensor of
a live session, or a view of one, it gets the master's values instead. Everything else runs as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..basics.patching import Undo, set_attribute
from ..basics.user_warnings import warn_user
from .aliases import is_16_bit


class Float32Source(Protocol):
    """A session's 16-bit tensors, as they are asked for here."""

    def float32_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float32 values that stand for a tensor or a view of one; None where it is not the session's."""


_IN_PLACE: Final = ("add_", "sub_", "subtract_", "lerp_", "copy_", "__iadd__", "__isub__")
_IN_PLACE_OF_MANY: Final = ("_foreach_add_", "_foreach_sub_", "_foreach_lerp_", "_foreach_copy_")
_OUT_OF_PLACE: Final = (
    *("add", "sub", "subtract", "rsub", "lerp", "stack", "cat", "where"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "_foreach_add", "_foreach_sub", "_foreach_lerp"),
)
# What gives the same numbers under another name, or a multiple of them, still averages what comes next.
_PASSED_ON: Final = (
    *("detach", "clone", "to", "float", "cpu", "cuda", "contiguous", "view", "view_as", "reshape", "flatten", "mul"),
    *("multiply", "div", "neg", "__mul__", "__rmul__", "__truediv__", "__neg__", "__getitem__", "select", "narrow"),
    *("split", "chunk", "unbind", "t", "transpose", "permute", "squeeze", "unsqueeze"),
)


def _functions(names: tuple[str, ...]) -> set[Any]:
    owners = (torch, torch.Tensor)
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


_AVERAGES_INTO_FIRST: Final = _functions((*_IN_PLACE, *_IN_PLACE_OF_MANY))
_AVERAGES: Final = _AVERAGES_INTO_FIRST | _functions(_OUT_OF_PLACE)
_KEEPS_KIND: Final = _functions(_PASSED_ON) | {torch.Tensor.data.__get__}  # type: ignore[attr-defined]

_sources: weakref.WeakSet[Any] = weakref.WeakSet()
_patches: list[Undo] = []


class AveragedTensor(torch.Tensor):
    """A float32 tensor into which 16-bit weights are averaged as their masters."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, with the masters' values in the place of 16-bit operands where it averages."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _AVERAGES:
                args, kwargs = _with_masters(func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
            keeps_kind = func in _KEEPS_KIND and not any(map(_is_plain, args[1:]))
            return _of_our_kind(result) if keeps_kind else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In files it is what it is: a tensor.
        return as_plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = as_plain(self).clone().as_subclass(AveragedTensor)
        return memo[id(self)]


class AveragedParameter(AveragedTensor, nn.Parameter):
    """:class:`AveragedTensor` as a parameter of a copy."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(as_plain(self), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = AveragedParameter(as_plain(self).clone(), self.requires_grad)
        return memo[id(self)]


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor outside of autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def _of_our_kind(result: Any) -> Any:
    if type(result) in (tuple, list):
        return type(result)(map(_of_our_kind, result))
    return result.as_subclass(AveragedTensor) if type(result) is torch.Tensor else result


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not isinstance(value, AveragedTensor)


def _with_masters(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    first = 1 if func in _AVERAGES_INTO_FIRST else 0
    averages = [tensor for tensor in _flattened(args[:1] if first else (args, *kwargs.values())) if _is_average(tensor)]
    if not averages:
        # An average that goes back into a model.
        return args, kwargs
    shapes = {tensor.shape for tensor in averages}
    changed = tuple(_float32(arg, shapes) for arg in args[first:])
    return (*args[:first], *changed), {name: _float32(value, shapes) for name, value in kwargs.items()}


def _is_average(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, AveragedTensor) and tensor.dtype is torch.float32


def _flattened(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flattened(value)
    return found


def _float32(value: Any, shapes: set[torch.Size]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_float32(item, shapes) for item in value)
    if not is_16_bit(value):
        return value
    for source in _sources:
        found: torch.Tensor | None = source.float32_of(value)
        if found is not None:
            return found
    if len(_sources) and value.shape in shapes:
        warn_user(
            "16-bit values of unknown origin were averaged into a float32 copy of an initialised model: what was "
            "computed from its weights before, such as (1 - decay) * p, was rounded then. Average the values of "
            "model.state_dict() or mpinit.master_params(optimizer), which are the float32 masters, or write "
            "average.lerp_(p, 1 - decay)"
        )
    return value


# -- torch.optim.swa_utils --------------------------------------------------------------------------------------------


def follow_masters(source: Float32Source) -> None:
    """From here on a session's masters are what averages are made from, torch's AveragedModel included."""
    _sources.add(source)
    if not _patches:
        original = AveragedModel.update_parameters

        def update_parameters(self: AveragedModel, model: nn.Module) -> None:
            original(self, _Masters(model) if len(_sources) else model)  # type: ignore[arg-type]

        _patches.append(set_attribute(AveragedModel, "update_parameters", update_parameters))


def forget_masters(source: Float32Source) -> None:
    """The reverse of :func:`follow_masters`; may be called again."""
    _sources.discard(source)
    if not len(_sources):
        while _patches:
            _patches[-1]()
            _patches.pop()


class _Masters:
    """A model as AveragedModel sees it: float32 values where there are masters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[torch.Tensor]:
        return (_float32(tensor, set()) for tensor in self._model.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return (_float32(tensor, set()) for tensor in self._model.buffers())
