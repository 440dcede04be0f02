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


@contextmanager
def unchanged(models: Iterable[nn.Module], inputs: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """After the block everything is what it was before, bit for bit.

    That is: parameters, buffers and inputs (the same tensors with the same bits), their gradients (the same tensors),
    attributes of modules (train and eval flags, hooks, counters, caches) and what their own lists and dicts hold,
    random numbers of torch on every device, of Python and of numpy, and this thread's autocast and gradient modes.
    Hooks that run after a gradient was accumulated, such as those that step an optimizer in the backward pass, wait.

    All of these tensors are copied at the start.

    Args:
        models: the models.
        inputs: other tensors that may be written to, or get gradients.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with unchanged([norm]):
        ...     _ = norm(torch.randn(3, 2))
        >>> norm.running_mean, norm.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    parameters = dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None)
    buffers = [b for module in modules for b in module._buffers.values() if b is not None]
    leaves = list(dict.fromkeys([*parameters, *(tensor for tensor in inputs if tensor.is_leaf)]))
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    undos = UndoStack()
    try:
        undos.push(random_numbers())
        undos.push(_modes_of_this_thread())
        undos.push(_values([*parameters, *buffers, *inputs, *gradients]))
        for module in modules:
            undos.push(_attributes(module))
        for leaf in leaves:
            undos.push(_leaf(leaf))
        yield
    finally:
        undos.unwind()


# -- what is remembered, each with its way back ----------------------------------------------------------------------


def random_numbers() -> Undo:
    """The generators of torch on every device in use, of Python, and of numpy where it is loaded.

    Returns:
        A function that puts back their present state, as often as it is called.

    Example:
        >>> again = random_numbers()
        >>> first = torch.rand(1)
        >>> again()
        >>> bool(first == torch.rand(1))
        True
    """
    undos = [functools.partial(random.setstate, random.getstate())]
    undos.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
    for device in device_types()[1:]:
        module: Any = torch.get_device_module(device)
        if module.is_initialized():
            undos.append(functools.partial(module.set_rng_state_all, module.get_rng_state_all()))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        undos.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))

    def give_back() -> None:
        for undo in undos:
            undo()

    return give_back


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


def _values(tensors: Iterable[torch.Tensor]) -> Undo:
    storages = {storage.data_ptr(): storage for tensor in tensors for storage in _storages(tensor)}
    kept = [(storage, storage.clone()) for storage in storages.values()]  # type: ignore[no-untyped-call]

    def give_back() -> None:
        # Bytes, so that no version counter moves.
        for storage, before in kept:
            storage.copy_(before)

    return give_back


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    part = local(tensor)
    if part.layout is torch.strided and not part.is_meta and part.numel():
        try:
            storage = part.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # tensors without memory of their own
        if storage.data_ptr():
            yield storage


def _pointer(tensor: torch.Tensor) -> int:
    """Where its first number is; 0 where it has no memory of its own."""
    return tensor.data_ptr() if next(_storages(tensor), None) is not None else 0


def _attributes(module: nn.Module) -> Undo:
    own = vars(module)
    before = dict(own)
    held = [(value, value.copy()) for value in own.values() if type(value) in _CONTAINERS]

    def give_back() -> None:
        if list(own) != list(before) or any(own[name] is not value for name, value in before.items()):
            own.clear()
            own.update(before)
        for container, content in held:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)

    return give_back


def _leaf(leaf: torch.Tensor) -> Undo:
    """Its gradient and where its numbers are; its hooks on accumulated gradients wait until then."""
    gradient, wants, data = leaf.grad, leaf.requires_grad, leaf.detach()
    hooks: Any = leaf._post_accumulate_grad_hooks
    waiting = dict(hooks) if hooks else {}
    if hooks:
        hooks.clear()
    pointer = _pointer(data)

    def give_back() -> None:
        if leaf.dtype != data.dtype or _pointer(leaf) != pointer:
            leaf.grad = None
            torch.Tensor.data.__set__(leaf, data)  # type: ignore[attr-defined]
        leaf.requires_grad_(wants)
        if leaf.grad is not gradient:
            leaf.grad = gradient
        if hooks is not None:
            hooks.update(waiting)

    return give_back
