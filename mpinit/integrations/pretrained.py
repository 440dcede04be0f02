"""``save_pretrained`` of an initialised model: weights of one dtype, which its config names."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .. import registry
from ..basics.dtypes import cast_within_range, dtype_name, is_lower_precision, parse_dtype
from ..basics.weak_references import OfModule


def save_in(model: Any, dtype: torch.dtype | Callable[[], torch.dtype] = torch.float32) -> None:
    """Make ``model.save_pretrained`` write weights in ``dtype``, and a config with this dtype, until ``mpinit.undo``.

    Without it, the file has the masters' float32 values, the config's dtype is 16-bit, and ``from_pretrained`` casts.

    Args:
        model: an initialised model of Transformers or PEFT, or one that contains one, as in Sentence Transformers.
        dtype: the dtype of weights that are 16-bit in forwards, or a function that returns it. With
            ``master_weights="model"`` and inside ``float32_weights`` these are float32 between forwards. Other weights
            keep their dtype. Default float32.

    Raises:
        RuntimeError: the model is not initialised.
        TypeError: it has no ``save_pretrained``.
        ValueError: ``dtype`` is not a dtype.

    Example:
        >>> import mpinit, transformers
        >>> from mpinit.integrations.pretrained import save_in
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
        >>> model = mpinit.initialize(model, opt_level="O5", await_optimizers=True)
        >>> save_in(model)  # from here on model.save_pretrained(folder) writes float32
        >>> mpinit.undo(model)
    """
    session = registry.session_of(model)
    wanted = dtype if callable(dtype) else parse_dtype(dtype)
    parts = _with_configs(model)
    if not parts:
        raise TypeError(f"{type(model).__name__} has no save_pretrained: use torch.save(model.state_dict(), file)")
    for part in parts:
        session.patch(part, "save_pretrained", _SavePretrained(part, wanted))


class _SavePretrained(OfModule):
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


def _with_configs(model: Any) -> list[Any]:
    """List the outermost modules with a config: the model, or modules inside it, as in Sentence Transformers."""
    save = getattr(type(model), "save_pretrained", None)
    if save is not None and (hasattr(model, "peft_config") or "state_dict" in inspect.signature(save).parameters):
        return [model]
    return [part for child in model.children() for part in _with_configs(child)]


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
