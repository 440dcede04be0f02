"""A switch for torch's fast path of nn.TransformerEncoderLayer and nn.MultiheadAttention.

In evaluation without gradients torch computes an encoder layer by one kernel, in one dtype. The kernel uses the weights
of the modules inside and does not call their ``forward``. So it ignores casts around these forwards, and it raises for
modules of another dtype than the rest of the layer.

torch disables the path under CUDA's autocast flag, and for a layer whose modules have hooks. It does not disable it
under the flags of other devices, nor for a patched ``forward``. nn.TransformerEncoder builds nested tensors for the
path without checking for hooks.

Upstream: https://github.com/pytorch/pytorch/issues/107663 and .../issues/191796 (flags of other devices),
.../issues/128413 (modules inside are not called). In all versions since 1.12, 2.13 included. This file can be deleted
when the layer checks the flag of its input's device, and checks for a ``forward`` on its modules' instances.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Final

import torch
from torch import nn

from ..basics.patching import UndoStack

_FUSED: Final = (nn.TransformerEncoderLayer, nn.MultiheadAttention)

# Conditions that switch the path off. They share one patch: several patches, undone in any order, would not restore
# torch.
_reasons: Final[dict[object, Callable[[], bool]]] = {}
_patch: Final = UndoStack()


def keep_off(when: Callable[[], bool], undos: UndoStack) -> None:
    """Keep the fast path off, for every layer of the process, while ``when()`` is true."""
    reason = object()

    def undo() -> None:
        _reasons.pop(reason, None)
        if not _reasons:
            _patch.unwind()

    undos.push(undo)
    _reasons[reason] = when
    if len(_patch):
        return
    original = torch.backends.mha.get_fastpath_enabled

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        # torch.compile generates its own kernels, and cannot trace the original.
        if torch.compiler.is_dynamo_compiling():
            return False
        return not any(when() for when in _reasons.values()) and original()

    _patch.set_attribute(torch.backends.mha, "get_fastpath_enabled", get_fastpath_enabled)


def is_bypassed(modules: Collection[nn.Module], among: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules is inside a layer of ``among`` that may compute without calling it."""
    layers = [layer for layer in among if isinstance(layer, _FUSED)]
    return any(module in modules for layer in layers for module in layer.modules())
