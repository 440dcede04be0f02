"""Reads and writes of attributes of many tensors, in loops of C instead of Python, because every step does them."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, Final

import torch

_GRAD_OF: Final = attrgetter("grad")
_ADDRESS_OF: Final[Any] = torch.Tensor.data_ptr
_STRIDE_OF: Final[Any] = torch.Tensor.stride
_SIZE_OF: Final[Any] = torch.Tensor.size
_VERSION_OF: Final = attrgetter("_version")
_DTYPE: Final = attrgetter("dtype")
_IS_SPARSE: Final = attrgetter("is_sparse")
_DEVICE: Final[Any] = torch.Tensor.get_device
_NO: Final = {False}
_PLAIN: Final = {torch.Tensor}
# Elements of a gradient up to which copying it into a flat tensor is cheaper than one more kernel call on a CPU.
_SMALL: Final = 1 << 14

# Exhausts an iterator without running Python code for each element.
consume: Final = deque[Any](maxlen=0).extend


def are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether two sequences have the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))


class Tables:
    """A record of dicts of modules, such as ``_parameters``, with their keys and values, and the dtypes of tensors.

    It does not refer to the modules.
    """

    def __init__(self, modules: Sequence[Any], *names: str) -> None:
        self._attributes = list(map(attrgetter, names))
        self._tables = self._of(modules)
        self._entries = _entries(self._tables)
        self._tensors = [each for each in self._entries if isinstance(each, torch.Tensor)]
        self._dtypes = list(map(_DTYPE, self._tensors))

    def are_as_seen(self, modules: Sequence[Any]) -> bool:
        """Return whether these modules have the same dicts, with the same keys and values, in the same order, still."""
        tables = self._of(modules)
        return (
            are_same(tables, self._tables)
            and are_same(_entries(tables), self._entries)
            and list(map(_DTYPE, self._tensors)) == self._dtypes
        )

    def _of(self, modules: Sequence[Any]) -> list[dict[str, Any]]:
        return [table for attribute in self._attributes for table in map(attribute, modules)]


def _entries(tables: Sequence[dict[str, Any]]) -> list[Any]:
    filled = list(filter(None, tables))
    return [*chain(*filled), *chain(*map(dict.values, filled))]


def grads_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return each tensor's ``grad``."""
    return list(map(_GRAD_OF, tensors))


def have_grads(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any tensor has a ``grad``."""
    return any(map(is_not, map(_GRAD_OF, tensors), repeat(None)))


def set_grads(tensors: list[Any], grads: list[torch.Tensor | None]) -> None:
    """Set each tensor's ``grad``."""
    consume(map(setattr, tensors, repeat("grad"), grads))


def data_ptrs(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return each tensor's ``data_ptr()``."""
    return list(map(_ADDRESS_OF, tensors))


def layouts_of(tensors: list[torch.Tensor]) -> object:
    """Return a value that compares equal as long as no tensor gets other memory, sizes or strides."""
    return list(map(_ADDRESS_OF, tensors)), list(map(_SIZE_OF, tensors)), list(map(_STRIDE_OF, tensors))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's memory as one dimension, in the order of the memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return each tensor's version counter."""
    return list(map(_VERSION_OF, tensors))


def are_alike(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients are dense and real, of one dtype and device, and of no subclass."""
    first = gradients[0]
    return (
        first.dtype.is_floating_point
        and set(map(_DTYPE, gradients)) == {first.dtype}
        and set(map(type, gradients)) == _PLAIN
        and set(map(_IS_SPARSE, gradients)) == _NO
        and len(set(map(_DEVICE, gradients))) == 1
    )


def in_fewer_tensors(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Concatenate small gradients on the CPU, for operations that run one kernel per tensor there.

    Returns:
        The other gradients, and one flat tensor of the small ones of each dtype.
    """
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    found = []
    for gradient in gradients:
        if gradient.numel() <= _SMALL and type(gradient) is torch.Tensor and gradient.is_cpu:
            small.setdefault(gradient.dtype, []).append(gradient)
        else:
            found.append(gradient)
    return found + [torch._C._nn.flatten_dense_tensors(each) for each in small.values()]
