"""Whatever a run of a model leaves behind, put back bit for bit, also after an exception."""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from ..basics.patching import Undo, UndoStack
from ..distributed.sharding import local
from ..torch_internals.native_autocast import device_types

_CONTAINERS: Final = (dict, OrderedDict, list, set)


class Untouched:
    """A context in which models may be run, and after which everything is what it was before.

    That is: parameters and buffers (the same tensors with the same bits), gradients (the same tensors), attributes of
    modules (train and eval flags, hooks, counters, caches) and what their own lists and dicts hold, random numbers of
    torch on every device, of Python and of numpy, and this thread's autocast and gradient modes.

    Buffers are copied at the start. Other tensors are copied when something is about to write to them:
    :meth:`before_write` has to be told, by whoever sees the operations.

    Args:
        models: the models.
        tensors: what else may be written to: inputs, masters, gradients, state of optimizers.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with Untouched([norm]):
        ...     _ = norm(torch.randn(3, 2))
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, models: Iterable[nn.Module], tensors: Iterable[torch.Tensor] = ()) -> None:
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._tensors = list(tensors)
        self._known: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._undos = UndoStack()

    def __enter__(self) -> Untouched:
        with self._undos:
            self._undos.push(_random_numbers())
            self._undos.push(_modes_of_this_thread())
            self._undos.push(self._give_back_values)
            for module in self._modules:
                self._undos.push(_attributes(module))
            parameters = {p: None for module in self._modules for p in module._parameters.values() if p is not None}
            for parameter in parameters:
                self._undos.push(_parameter(parameter))
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._know([*parameters, *gradients, *self._tensors])
            self._save(b for module in self._modules for b in module._buffers.values() if b is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self._undos.unwind()

    def before_write(self, tensor: torch.Tensor) -> None:
        """An operation is about to write to ``tensor``: keep what it holds, where that is in memory of ours."""
        for storage in _storages(tensor):
            pointer = storage.data_ptr()
            if pointer in self._known and pointer not in self._saved:
                self._saved[pointer] = storage, storage.clone()  # type: ignore[no-untyped-call]

    def _know(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for storage in _storages(tensor):
                self._known[storage.data_ptr()] = storage

    def _save(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors = list(tensors)
        self._know(tensors)
        for tensor in tensors:
            self.before_write(tensor)

    def _give_back_values(self) -> None:
        # Bytes, so that no version moves and nobody who watches weights is told of a write that changes nothing.
        for storage, before in self._saved.values():
            storage.copy_(before)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    part = local(tensor)
    if part.layout is torch.strided and not part.is_meta and part.numel():
        try:
            storage = part.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # tensors without memory of their own
        if storage.data_ptr():
            yield storage


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dicts.

    Example:
        >>> len(list(tensors_in({"x": torch.ones(1), "more": [torch.ones(1), 3]})))
        2
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


# -- what is remembered, each with its way back ----------------------------------------------------------------------


def _random_numbers() -> Undo:
    undos = [functools.partial(random.setstate, random.getstate())]
    undos.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
    for device in device_types()[1:]:
        module: Any = torch.get_device_module(device)
        if module.is_initialized():
            undos.append(functools.partial(module.set_rng_state_all, module.get_rng_state_all()))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        undos.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))
    return functools.partial(_all, undos)


def _all(undos: list[Any]) -> None:
    for undo in undos:
        undo()


def _modes_of_this_thread() -> Undo:
    casts = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types()]
    cache, gradients = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()

    def give_back() -> None:
        for device, on, dtype in casts:
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        torch._C._set_grad_enabled(gradients)

    return give_back


@contextmanager
def same_modes() -> Iterator[None]:
    """Autocast and gradient modes of this thread are after the block what they were before it."""
    give_back = _modes_of_this_thread()
    try:
        yield
    finally:
        give_back()


def _attributes(module: nn.Module) -> Undo:
    own = vars(module)
    before = dict(own)
    held = [(value, value.copy()) for value in own.values() if type(value) in _CONTAINERS]

    def give_back() -> None:
        if list(own) != list(before) or any(own[name] is not value for name, value in before.items()):
            own.clear()
            own.update(before)
        for container, content in held:
            if not _same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)

    return give_back


def _same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), content.items(), strict=True)
        return all(key is old_key and value is old_value for (key, value), (old_key, old_value) in pairs)
    if isinstance(container, set):
        return bool(container == content)
    return all(value is old for value, old in zip(container, content, strict=True))


def _parameter(parameter: torch.Tensor) -> Undo:
    """Its gradient and where its numbers are; hooks that run once a gradient is there, which step optimizers, wait."""
    gradient, wants, data = parameter.grad, parameter.requires_grad, parameter.detach()
    hooks: Any = parameter._post_accumulate_grad_hooks
    waiting = dict(hooks) if hooks else {}
    if hooks:
        hooks.clear()
    pointer = data.data_ptr() if not data.is_meta else 0

    def give_back() -> None:
        if parameter.dtype != data.dtype or (not data.is_meta and parameter.data_ptr() != pointer):
            parameter.grad = None
            torch.Tensor.data.__set__(parameter, data)  # type: ignore[attr-defined]
        parameter.requires_grad_(wants)
        if parameter.grad is not gradient:
            parameter.grad = gradient
        if hooks is not None:
            hooks.update(waiting)

    return give_back
