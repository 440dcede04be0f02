"""A guard of a model while a copy of it runs: calls of the original's modules raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from ..basics.patching import UndoStack


@contextmanager
def forward_refused(model: nn.Module, copied: nn.Module, tool: str, advice: str) -> Iterator[None]:
    """Raise a ValueError in the block if any module of the original is called; scripted modules are not checked.

    A lambda, a hook or a closure of the model's may refer to a module of the original, which a copy of it then runs.
    """

    def refuse(module: nn.Module, args: Any) -> NoReturn:
        what = "the model itself" if module is model else f"{names[module]!r} of the model itself"
        raise ValueError(f"{what} was run inside {tool}, and not the copy of it: {advice}. Nothing was changed")

    names = {module: name for name, module in model.named_modules()}
    # A model may share modules with its copies, through a __deepcopy__ of its own.
    shared = set(copied.modules())
    with UndoStack() as hooks:
        for module in names:
            if module not in shared and not isinstance(module, torch.jit.ScriptModule):
                hooks.push(module.register_forward_pre_hook(refuse, prepend=True).remove)
        try:
            yield
        finally:
            hooks.unwind()
