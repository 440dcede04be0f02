"""``save_pretrained`` of an initialised model: weights of one dtype, which its config names."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from . import registry
from .basics.dtypes import cast_within_range, dtype_name, is_lower_precision
from .basics.weak_references import OfModule
from .session import Session


def save_in_float32(session: Session) -> None:
    """Let models write float32: torch's state dict is, but their own method writes a config that names 16 bits."""
    for part in [part for model in session.models for part in with_configs(model)]:
        session.patch(part, "save_pretrained", SavePretrained(part, torch.float32))


class SavePretrained(OfModule):
    """A model's ``save_pretrained``; a copy of the model has its own."""

    __slots__ = ("dtype",)

    def __init__(self, module: Any, dtype: torch.dtype | Callable[[], torch.dtype]) -> None:
        super().__init__(module)
        self.dtype = dtype

    def __call__(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        model: Any = self.module
        wanted = self.dtype() if callable(self.dtype) else self.dtype
        state = model.state_dict() if state_dict is None else state_dict
        # Empty for a deep copy, which is float32.
        cast = _cast(model, state, wanted, is_models_state_dict=state_dict is None)
        if cast and kwargs.get("push_to_hub") and model.dtype != wanted:
            raise ValueError(
                f"save_pretrained(push_to_hub=True) would upload a config that names {dtype_name(model.dtype)}, the "
                "dtype of the weights in memory: call model.push_to_hub(name) instead"
            )
        type(model).save_pretrained(model, save_directory, *args, state_dict={**state, **cast}, **kwargs)
        if cast and kwargs.get("is_main_process", True) and not hasattr(model, "peft_config"):
            config = copy.deepcopy(model.config)
            config.dtype = dtype_name(wanted)
            config.save_pretrained(save_directory)


def with_configs(model: Any) -> list[Any]:
    """List the outermost modules with a config: the model, or modules inside it, as in Sentence Transformers."""
    found: dict[Any, None] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        save = getattr(type(module), "save_pretrained", None)
        if save is not None and (hasattr(module, "peft_config") or "state_dict" in inspect.signature(save).parameters):
            found[module] = None
        else:
            pending += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


def _cast(model: Any, state: dict[str, Any], dtype: torch.dtype, is_models_state_dict: bool) -> dict[str, Any]:
    """Return the entries of weights that are 16-bit in forwards, in ``dtype``.

    Entries of tied weights share one tensor. A weight that has this dtype is used itself, not a cast of its master:
    split masters round ties away from zero, but a cast rounds ties to even.
    """
    cast, of_weight = {}, dict[int, torch.Tensor]()
    session = registry.sharing(model)
    float32_ids = set[int]() if session is None else session.view.ids_cast_in_forwards()
    for name, weight in model.state_dict(keep_vars=True).items():
        if name not in state or not isinstance(weight, torch.Tensor):
            continue
        if is_lower_precision(weight.dtype) or id(weight) in float32_ids:
            uses_weight_itself = is_models_state_dict and weight.dtype == dtype
            values = weight.detach() if uses_weight_itself else cast_within_range(state[name], dtype)
            cast[name] = of_weight.setdefault(id(weight), values)
    return cast
