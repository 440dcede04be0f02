"""A warning of 16-bit buffers that a model writes to while it trains, such as counters and running means.

They change a little at a time, and 16 bits round small changes away: in bfloat16 a counter stops at 256.
"""

import weakref
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..basics.dtypes import is_lower_precision
from ..basics.logs import warn_user
from ..basics.modules import dotted
from ..distributed.sharding import is_distributed, is_sharded

# Writes of the first two steps are looked for. A model writes to its state in every step, or after every step.
_STEPS: Final = 2


class WrittenBuffers:
    """The 16-bit buffers of models as they were when training began, compared at the first two steps.

    What is loaded before the first forward that records a graph is no write.
    """

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str, str]] = []
        # Each buffer, its version and its numbers.
        self._before: list[tuple[torch.Tensor, int, torch.Tensor]] | None = None
        self._steps = 0

    def list_buffers(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        """List the 16-bit buffers of modules, which are referred to weakly."""
        for path, module in named_modules:
            # keep_batchnorm_fp32 decides about BatchNorms. The vectors of spectral norms are computed in every forward.
            if isinstance(module, (_BatchNorm, _SpectralNorm)):
                continue
            spectral = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
            for name, buffer in module._buffers.items():
                is_norms = any(name in (f"{own}_u", f"{own}_v") for own in spectral)
                if buffer is None or is_norms or buffer.is_meta or is_sharded(buffer):
                    continue
                if is_lower_precision(buffer.dtype):
                    self._places.append((weakref.ref(module), name, dotted(path, name)))

    def begin(self) -> None:
        """Note the buffers as they are, before the first forward that records a graph."""
        if self._before is None and self._places:
            buffers = [(place, self._present(*place[:2])) for place in self._places]
            present = [(place, buffer) for place, buffer in buffers if buffer is not None]
            self._places = [place for place, _ in present]
            self._before = [(buffer, _version(buffer), buffer.detach().clone()) for _, buffer in present]

    def before_step(self) -> None:
        """Warn once, before the first two steps, of the buffers that were written to or replaced since the beginning.

        A forward may have done so, or a method such as the update of a normaliser of observations.
        """
        if not self._places:
            return
        self.begin()  # where no forward was seen, as of a compiled model: then the second step compares
        self._steps += 1
        written = [
            (module, name)
            for (module, own, name), before in zip(self._places, self._before or (), strict=True)
            if _was_written(self._present(module, own), *before)
        ]
        if written or self._steps == _STEPS:
            self._before, self._places = None, []
        if written:
            names = [name for _, name in written]
            entries = list(dict.fromkeys(_entry(module(), name) for module, name in written))
            warn_user(
                f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} written to while the model trains, in 16 "
                "bits: small changes of a number are rounded away, so counters and running averages stall. Append "
                f"keep_fp32={entries} to what you keep; where that is a buffer alone, cast what forward computes of it"
            )

    @staticmethod
    def _present(module: weakref.ref[nn.Module], name: str) -> torch.Tensor | None:
        found = module()
        return None if found is None else found._buffers.get(name)


def _entry(module: nn.Module | None, name: str) -> str:
    """Return the module's name where nothing in it is trained, because a whole module casts its inputs and outputs."""
    path = name.rpartition(".")[0]
    trains = module is None or any(parameter.requires_grad for parameter in module.parameters())
    return path if path and not trains else name


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _was_written(now: torch.Tensor | None, before: torch.Tensor, version: int, numbers: torch.Tensor) -> bool:
    if now is None or not is_lower_precision(now.dtype) or now.device != numbers.device:
        return False
    # DistributedDataParallel writes to all buffers in every forward: there only numbers show what the model writes.
    if (now is not before or _version(now) != version) and not is_distributed():
        return True
    # Writes through .data move no version.
    return not torch.equal(now.nan_to_num(), numbers.nan_to_num())
