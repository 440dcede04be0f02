"""Everything that a run of a model changes beside weights and gradients, put back after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def random_state() -> list[Any]:
    """The states of the generators of torch on every device in use, of Python, and of numpy where it is loaded."""
    cuda: Any = torch.cuda
    devices = cuda.get_rng_state_all() if cuda.is_available() and cuda.is_initialized() else None
    numpy: Any = sys.modules.get("numpy")
    return [torch.get_rng_state(), devices, random.getstate(), numpy and numpy.random.get_state()]


def set_random_state(state: list[Any]) -> None:
    """Put back what :func:`random_state` gave."""
    host, devices, python, of_numpy = state
    torch.set_rng_state(host)
    if devices is not None:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(python)
    if of_numpy:
        numpy: Any = sys.modules["numpy"]
        numpy.random.set_state(of_numpy)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Whatever runs inside takes no random numbers away, as far as those outside can tell.

    Example:
        >>> with same_random_numbers():
        ...     inside = torch.rand(1)
        >>> bool(inside == torch.rand(1))
        True
    """
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


@contextmanager
def same_buffers(models: Iterable[nn.Module]) -> Iterator[None]:
    """The models' buffers, modes and gradients are inside what they are outside, tensor for tensor and bit for bit."""
    modules = [module for model in models for module in model.modules()]
    buffers = [
        (module, name, b, b.clone()) for module in modules for name, b in module._buffers.items() if b is not None
    ]
    modes = [(module, module.training) for module in modules]
    parameters = list(dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None))
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer.nan_to_num(), values.nan_to_num()) or buffer.isnan().any():
                    buffer.copy_(values)
            for parameter, gradient, kept in gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
        for module, training in modes:
            module.training = training
