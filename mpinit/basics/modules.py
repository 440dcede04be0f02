"""Walks over the modules and tensors of models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn


def modules_of(*models: nn.Module) -> list[nn.Module]:
    """List ``model.modules()``, each once, in a third of its time; torch makes a generator for each module."""
    found: dict[nn.Module, None] = {}
    pending: list[Iterator[nn.Module | None]] = [iter(models)]
    while pending:
        for module in pending[-1]:
            if module is not None and module not in found:
                found[module] = None
                below = module._modules
                if below:
                    pending.append(iter(below.values()))
                    break
        else:
            pending.pop()
    return list(found)


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List a module's own parameters and buffers by name, without those of its children."""
    own: list[tuple[str, torch.Tensor]] = []
    for name, parameter in module._parameters.items():
        if parameter is not None:
            own.append((name, parameter))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            own.append((name, buffer))
    return own


def share_attributes(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let another form of a tensor have the attributes that user code sets on the tensor, as ``weight.gain = 2.0``."""
    # Those of a wrapper are its parts, as the local tensor of a DTensor.
    if not hasattr(type(tensor), "__tensor_flatten__"):
        other.__dict__ = tensor.__dict__


def dotted(module_name: str, name: str) -> str:
    """Join a module's dotted name, "" for the model itself, and a name in that module."""
    return f"{module_name}.{name}" if module_name else name


class ModelIndex:
    """The modules and tensors of models, read in one walk for the checks, casts and hooks of one ``initialize``.

    It is dropped at the end of the call, because it would keep replaced parameters alive.

    Attributes:
        models: the models, in order.
        named_modules: (dotted name, module) of each model in turn, as ``nn.Module.named_modules`` yields them.
        names: module -> its first dotted name.
        first_parents: module -> its parent under that name; None for a model.
        parents: module -> all its parents.
        shares_modules: whether a module has several names.
        own: module -> its own tensors with their names, as :func:`own_tensors` lists them.
        parameters, buffers: (dotted name, tensor), once for each module that has the tensor.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = tuple(models)
        self.named_modules: list[tuple[str, nn.Module]] = []
        self.names: dict[nn.Module, str] = {}
        self.first_parents: dict[nn.Module, nn.Module | None] = {}
        self.parents: dict[nn.Module, list[nn.Module]] = {}
        self.shares_modules = False
        for model in self.models:
            self._walk(model)
        self.read_tensors()

    def _walk(self, model: nn.Module) -> None:
        seen: set[nn.Module] = set()
        pending: list[tuple[str, nn.Module, nn.Module | None]] = [("", model, None)]
        while pending:
            name, module, parent = pending.pop()
            if module in seen:
                self.shares_modules = True
                continue
            seen.add(module)
            self.named_modules.append((name, module))
            is_new = module not in self.names
            if is_new:
                self.names[module], self.first_parents[module] = name, parent
            else:
                self.shares_modules = True  # one model is a part of another, or both have the module
            children = module._modules
            if children:
                prefix = f"{name}." if name else ""
                # A list, because a ScriptModule's table cannot be reversed.
                for own, child in reversed(list(children.items())):
                    if child is not None:
                        pending.append((prefix + own, child, module))
                        if is_new:
                            self.parents.setdefault(child, []).append(module)

    def read_tensors(self) -> None:
        """Read the tensors of the modules. Call it again after FSDP has replaced parameters."""
        self.own: dict[nn.Module, list[tuple[str, torch.Tensor]]] = {}
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.buffers: list[tuple[str, torch.Tensor]] = []
        for module_name, module in self.named_modules:
            own = self.own[module] = []
            prefix = f"{module_name}." if module_name else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    own.append((name, parameter))
                    self.parameters.append((prefix + name, parameter))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    own.append((name, buffer))
                    self.buffers.append((prefix + name, buffer))

    @cached_property
    def paths(self) -> list[tuple[str, nn.Module]]:
        """All dotted names of all modules; a shared module has several."""
        if not self.shares_modules:
            return self.named_modules
        return [named for model in self.models for named in model.named_modules(remove_duplicate=False)]

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """List every parameter and buffer under each of its dotted names, without the model's index."""
        return [(dotted(path, name), tensor) for path, module in self.paths for name, tensor in self.own[module]]

    def tensor_ids(self) -> frozenset[int]:
        """Return the ids of all parameters and buffers."""
        return frozenset([id(tensor) for own in self.own.values() for _, tensor in own])


@dataclass(frozen=True)
class Names:
    """The dotted names of models' parameters and buffers, looked up at each call."""

    models: Sequence[nn.Module]

    def of(self, tensor: torch.Tensor) -> str:
        """Return a tensor's dotted name, with the model's index if there are several models."""
        return self.of_all([tensor])[0]

    def of_all(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Return what :meth:`of` returns for each of several tensors, in one walk over the models."""
        known: dict[int, str] = {}
        for index, model in enumerate(self.models):
            for own in (model.named_parameters(), model.named_buffers()):
                for name, each in own:
                    known.setdefault(id(each), f"models[{index}].{name}" if len(self.models) > 1 else name)
        unknown = "a parameter of shape {} outside of the models"
        return [known.get(id(tensor)) or unknown.format(tuple(tensor.shape)) for tensor in tensors]
