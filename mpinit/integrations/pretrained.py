"""``save_pretrained`` of an initialised model, in the dtype that one chooses."""

from collections.abc import Callable
from typing import Any

import torch

from .. import registry
from ..basics.dtypes import parse_dtype
from ..pretrained import SavePretrained, with_configs


def save_in(model: Any, dtype: torch.dtype | Callable[[], torch.dtype] = torch.float32) -> None:
    """Make ``model.save_pretrained`` write weights in ``dtype``, and a config with this dtype, until ``mpinit.undo``.

    Without it they are float32: the masters' values, which ``from_pretrained`` reads as they are.

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
        >>> save_in(model, "bfloat16")  # model.save_pretrained(folder) writes the weights that forwards compute with
        >>> mpinit.undo(model)
    """
    session = registry.session_of(model)
    wanted = dtype if callable(dtype) else parse_dtype(dtype)
    parts = with_configs(model)
    if not parts:
        raise TypeError(f"{type(model).__name__} has no save_pretrained: use torch.save(model.state_dict(), file)")
    for part in parts:
        session.patch(part, "save_pretrained", SavePretrained(part, wanted))
