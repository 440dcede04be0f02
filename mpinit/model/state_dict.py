"""State dicts of initialised models: float32 at every level, the masters' bits where there are masters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.patching import Undo, UndoStack


class Float32State:
    """State-dict hooks: what leaves a model is float32 (the masters' bits where there are masters), at every level.

    Args:
        find_master: model parameter -> the float32 values that stand for it, or None.
        load_master: (model parameter, float32 values) -> whether it has a master: takes over loaded values.
    """

    def __init__(
        self,
        find_master: Callable[[torch.Tensor], torch.Tensor | None],
        load_master: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self._find_master: Callable[[torch.Tensor], torch.Tensor | None] | None = find_master
        self._load_master: Callable[[torch.Tensor, torch.Tensor], bool] | None = load_master
        self._arriving: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        self._rebuilt: list[str] = []

    def install(self, models: Sequence[nn.Module]) -> Undo:
        """Hook every module of the models, so that a part's state dict is float32 as well."""
        export, arrive, settle = _Hook(self, "export"), _Hook(self, "arrive"), _Hook(self, "settle")
        modules: dict[Any, None] = {module: None for model in models for module in model.modules()}
        with UndoStack() as undos:
            for module in modules:
                undos.push(module.register_state_dict_post_hook(export).remove)
                undos.push(module.register_load_state_dict_pre_hook(arrive).remove)
                undos.push(module.register_load_state_dict_post_hook(settle).remove)
        return undos.unwind

    def export(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict()``: replace this module's own 16-bit entries by float32 ones."""
        for name, tensor in _named_own_tensors(module):
            value = state_dict.get(prefix + name)
            # With keep_vars=True the caller wants the parameters themselves.
            if isinstance(value, torch.Tensor) and is_lower_precision(value.dtype) and value is not tensor:
                master = self._find_master(tensor) if self._find_master is not None else None
                state_dict[prefix + name] = value.float() if master is None else master

    def arrive(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
        """Before loading: remember the float32 values that masters are to get."""
        if self._find_master is None:
            return
        arriving = {
            name: state_dict[prefix + name]
            for name, tensor in module._parameters.items()
            if tensor is not None
            and is_lower_precision(tensor.dtype)
            and isinstance(state_dict.get(prefix + name), torch.Tensor)
        }
        if arriving and local_metadata.get("assign_to_params_buffers"):
            self._arriving.clear()
            raise RuntimeError(
                "load_state_dict(assign=True) would replace parameters that an optimizer has masters of; load with "
                "assign=False, or before mpinit.initialize"
            )
        self._arriving[id(module)] = prefix, arriving

    def settle(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After loading: hand the float32 values over, for every parameter they fit."""
        prefix, arrived = self._arriving.pop(id(module), ("", {}))
        for name, value in arrived.items():
            parameter = module._parameters[name]
            if parameter is None or self._load_master is None or parameter.shape != value.shape:
                continue
            if self._load_master(parameter, value) and is_lower_precision(value.dtype):
                self._rebuilt.append(prefix + name)
        # The outermost module settles last, and speaks for all.
        if self._rebuilt and not self._arriving:
            self._say_what_was_rebuilt()

    def _say_what_was_rebuilt(self) -> None:
        names, self._rebuilt = self._rebuilt, []
        warnings.warn(
            f"the state loaded holds 16-bit values for {len(names)} weights that have float32 masters "
            f"({', '.join(names[:3])} first): their masters were rebuilt from these, without the lower bits. Save "
            "model.state_dict() of the initialised model, which is float32, to resume exactly",
            UserWarning,
            stacklevel=6,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no masters: it exports its own weights.
        return {"_find_master": None, "_load_master": None, "_arriving": {}, "_rebuilt": []}


class _Hook:
    """One of the hooks above as an object: torch marks hooks with attributes, which bound methods cannot carry."""

    def __init__(self, state: Float32State, verb: str) -> None:
        self._state = state
        self._verb = verb

    def __call__(self, *args: Any) -> None:
        getattr(self._state, self._verb)(*args)


def _named_own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
