"""The modules and tensors of models."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What ``model.modules()`` gives, in a third of its time: that is a generator for each module and level."""
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


def dotted(module_name: str, name: str) -> str:
    """What a tensor is called in a model whose module of that name has it under ``name``."""
    return f"{module_name}.{name}" if module_name else name


class Walk:
    """What models hold, under dotted names, read once for all that is asked of it before anything is changed.

    A parameter or buffer that several modules share is there under each of its names.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = models
        self.modules = [named for model in models for named in model.named_modules()]
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


@dataclass(frozen=True)
class Names:
    """The dotted names of models' parameters and buffers, as they are when they are asked for."""

    models: Sequence[nn.Module]

    def of(self, tensor: torch.Tensor) -> str:
        """Look up a tensor's dotted name in its model, with the model's index where there are several."""
        for index, model in enumerate(self.models):
            for own in (model.named_parameters(), model.named_buffers()):
                for name, each in own:
                    if each is tensor:
                        return f"models[{index}].{name}" if len(self.models) > 1 else name
        return f"a parameter of shape {tuple(tensor.shape)} outside of the models"
