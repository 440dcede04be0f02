"""The modules and tensors of models, as ``named_modules()`` and its like give them, in a fraction of their time.

Those are generators inside of generators, one for each module and level.
"""

from collections.abc import Sequence

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What ``model.modules()`` gives, in its order."""
    found: dict[nn.Module, None] = {model: None}
    left = [iter(model._modules.values())]
    while left:
        for module in left[-1]:
            if module is not None and module not in found:
                found[module] = None
                below = module._modules
                if below:
                    left.append(iter(below.values()))
                    break
        else:
            left.pop()
    return list(found)


def named_modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``model.named_modules()`` gives, in its order."""
    found: dict[nn.Module, str] = {}
    left: list[tuple[str, nn.Module | None]] = [("", model)]
    while left:
        name, module = left.pop()
        if module is not None and module not in found:
            found[module] = name
            if module._modules:
                prefix = f"{name}." if name else ""
                left += [(prefix + child, part) for child, part in reversed(module._modules.items())]
    return [(name, module) for module, name in found.items()]


def dotted(module_name: str, name: str) -> str:
    """What a tensor is called in a model whose module of that name has it under ``name``."""
    return f"{module_name}.{name}" if module_name else name


class Walk:
    """What models hold, under dotted names, read once for all that is asked of it before anything is changed.

    A parameter or buffer that several modules share is there under each of its names.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.modules = [named for model in models for named in named_modules_of(model)]
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.buffers: list[tuple[str, torch.Tensor]] = []
        for module_name, module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.parameters.append((dotted(module_name, name), parameter))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self.buffers.append((dotted(module_name, name), buffer))

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.parameters, *self.buffers]
