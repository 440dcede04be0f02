"""Modules that save or load in a way of their own see float32 values: their tensors' stand-ins for that long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision

# The methods a module may override: those about itself alone, and those about everything below it.
_OWN: Final = ("_save_to_state_dict", "_load_from_state_dict")
_WHOLE: Final = ("state_dict", "load_state_dict")


class Float32Values(Protocol):
    """What is asked of a session here."""

    def float32_values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float32 values that stand for a 16-bit tensor, or None."""

    def load(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to a 16-bit tensor and to what stands for it."""


class CustomMethod:
    """One of those methods of a module, run with float32 values in the place of 16-bit ones.

    Args:
        module: the module, whose class has the method.
        name: the method's name.
        values: what the float32 values are asked of; None in copies, which save and load as their class does.
    """

    def __init__(self, module: nn.Module, name: str, values: Float32Values | None) -> None:
        self.module = module
        self.name = name
        self.values = values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = getattr(type(self.module), self.name).__get__(self.module)
        if self.values is None or _keeps_variables(self.name, args, kwargs):
            return method(*args, **kwargs)
        parts = self.module.modules() if self.name in _WHOLE else iter((self.module,))
        with _standing_in(list(parts), self.values, loads="load" in self.name):
            return method(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "name": self.name, "values": None}


def custom_methods(kind: type[nn.Module]) -> list[str]:
    """Which of the methods a class of modules has of its own."""
    found = [(name, getattr(kind, name)) for name in (*_OWN, *_WHOLE)]
    own = [(name, method) for name, method in found if method is not getattr(nn.Module, name)]
    return [name for name, method in own if not method.__module__.startswith("torch.")]


def put_around(module: nn.Module, name: str, values: Float32Values) -> None:
    """Put a :class:`CustomMethod` around one of :func:`custom_methods`."""
    vars(module).setdefault(name, CustomMethod(module, name, values))


def take_from_custom_methods(module: nn.Module, values: Float32Values) -> None:
    """Take them away again, also from a copy."""
    for name in (*_OWN, *_WHOLE):
        method = vars(module).get(name)
        if isinstance(method, CustomMethod) and method.values in (values, None):
            del vars(module)[name]


def _keeps_variables(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a caller wants the parameters themselves."""
    return "load" not in name and bool(kwargs.get("keep_vars", args[2] if len(args) > 2 else False))


@contextmanager
def _standing_in(modules: list[nn.Module], values: Float32Values, loads: bool) -> Iterator[None]:
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in modules:
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in own:
                for name, tensor in tensors.items():
                    if tensor is not None and is_lower_precision(tensor.dtype):
                        if tensor not in stand_ins:
                            stand_ins[tensor] = _stand_in(tensor, values, loads)
                        replaced.append((tensors, name, tensor))
                        tensors[name] = stand_ins[tensor]
        versions = {tensor: stand_in._version for tensor, stand_in in stand_ins.items()}
        yield
        if loads:
            _take_over(replaced, stand_ins, versions, values)
    finally:
        for holder, name, tensor in replaced:
            holder[name] = tensor


def _stand_in(tensor: torch.Tensor, values: Float32Values, loads: bool) -> torch.Tensor:
    found = values.float32_values(tensor)
    wide = tensor.detach().float() if found is None else found.detach().float()
    wide = wide.clone() if loads and found is not None else wide
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


def _take_over(
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]],
    stand_ins: dict[torch.Tensor, torch.Tensor],
    versions: dict[torch.Tensor, int],
    values: Float32Values,
) -> None:
    for tensors, name, tensor in replaced:
        if tensors.get(name) is not stand_ins[tensor] or stand_ins[tensor].shape != tensor.shape:
            raise RuntimeError(
                f"loading put another tensor in the place of {name!r}, which mpinit.initialize has cast, and an "
                "optimizer may have a master of; copy the values into it, or load before mpinit.initialize"
            )
    for tensor, stand_in in stand_ins.items():
        if stand_in._version != versions[tensor]:
            values.load(tensor, stand_in.detach())
