"""State of a model: buffers and frozen parameters that its forwards write to.

Counters, running means, biases of routers, codebooks and momentum encoders are updated in place, a little at a time. In
16 bits such an update is rounded away: a counter stops at 256 in bfloat16. To find these tensors, the forwards before
some of the steps are watched for in-place writes.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..basics.dtypes import is_lower_precision
from ..basics.logs import warn_user
from ..distributed.sharding import is_distributed, is_sharded
from ..torch_internals.parameter_data import record_batch, stop_batch
from .forward_weights import record_writes

# The values of larger buffers are not compared: writes to them are found by their version.
_MOST_COMPARED: Final = 1 << 22
# A change is small where it is less than this many times the distance between two numbers of the type.
_SMALL: Final = 16
# The step after which no forward is watched any more.
_LAST_STEP: Final = 4096 + 512


def is_watched(step: int) -> bool:
    """Return whether the forwards before a step are watched: from step 2**n on, the next 2**n / 8 steps are."""
    power: int = 1 << (step.bit_length() - 1)
    return step <= _LAST_STEP and step - power <= power // 8


@dataclass(frozen=True, eq=False)
class Place:
    """A place of a tensor in a module.

    Attributes:
        owner: a weak reference to the module, because the module keeps its session alive.
        tensors, own_name: the module's dict of parameters or buffers, and the tensor's name in it.
        name: the tensor's dotted name in the models.
        is_buffer: whether the tensor is a buffer; otherwise it is a frozen parameter.
    """

    owner: weakref.ref[nn.Module]
    tensors: dict[str, Any]
    own_name: str
    name: str
    is_buffer: bool

    @property
    def module(self) -> nn.Module | None:
        """The module; None where it was freed."""
        return self.owner()

    def present(self) -> torch.Tensor | None:
        """Return the tensor that is there now."""
        found: torch.Tensor | None = self.tensors.get(self.own_name)
        return found


@dataclass(eq=False)
class WrittenState:
    """The state that forwards were seen to write to.

    Attributes:
        places: the places of 16-bit buffers and frozen parameters.
        written: the names of places whose tensors a forward has written to.
        changed_little: the names of those whose last change was so small that 16 bits may round it away.
        is_watching: whether forwards are watched at the moment.
        watched: how many forwards were watched.
        eager_forwards: how many forwards that were not compiled had run at the last step.
        versions: name -> the id and the version of the tensor at the last step.
    """

    places: list[Place]
    written: set[str] = field(default_factory=set)
    changed_little: set[str] = field(default_factory=set)
    is_watching: bool = True
    watched: int = 0
    eager_forwards: int = 0
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def end_of_iteration(self, eager_forwards: int) -> None:
        """Find writes of compiled forwards, which cannot be watched, by the versions since the last step.

        In a process group nothing is found this way, because DistributedDataParallel writes to all buffers.

        Args:
            eager_forwards: how many forwards have run that were not compiled.
        """
        now = {place.name: (id(t), _version(t)) for place in self.places if (t := place.present()) is not None}
        if self.is_watching and eager_forwards == self.eager_forwards and not is_distributed():
            self.written |= {name for name, version in now.items() if self.versions.get(name, version) != version}
        self.versions, self.eager_forwards = now, eager_forwards

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch one forward of a model."""
        self.watched += 1
        before = [_Snapshot(place, tensor) for place in self.places if (tensor := place.present()) is not None]
        use = record_batch([each.tensor for each in before if not each.place.is_buffer], keeps_views=True)
        try:
            with record_writes() as written_casts:
                yield
        finally:
            stop_batch(use)
            through_data = use.written()
            for each in before:
                if each.was_written() or id(each.tensor) in through_data or each.tensor in written_casts:
                    self.written.add(each.place.name)
                    if each.changed_little():
                        self.changed_little.add(each.place.name)


class _Snapshot:
    """A tensor before a forward."""

    def __init__(self, place: Place, tensor: torch.Tensor) -> None:
        self.place = place
        self.tensor = tensor
        self._version = _version(tensor)
        self._address = tensor.data_ptr()
        is_small = place.is_buffer and tensor.numel() <= _MOST_COMPARED
        self._values = tensor.detach().clone() if is_small else None

    def was_written(self) -> bool:
        """Return whether the tensor was written to or replaced; values are compared where torch counts no write."""
        now = self.place.present()
        if now is None or not now.is_floating_point():
            return False
        if now is not self.tensor or _version(now) != self._version or now.data_ptr() != self._address:
            return True
        return self._values is not None and not torch.equal(now.nan_to_num(), self._values.nan_to_num())

    def changed_little(self) -> bool:
        """Return whether half of the numbers that changed did so by a few of the type's smallest steps."""
        now, before = self.place.present(), self._values
        if now is None or before is None or now.shape != before.shape or not is_lower_precision(before.dtype):
            return False
        now, before = now.detach().float(), before.float()
        changed = (now != before) & (before != 0) & now.isfinite() & before.isfinite()
        share = ((now - before) / before)[changed].abs()
        limit = _SMALL * torch.finfo(self.tensor.dtype).eps
        return share.numel() > 0 and bool(share.median() < limit)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def warn_of_writes(names: Iterable[str]) -> None:
    """Warn of state that forwards write to in 16 bits."""
    listed = list(names)
    entries = ", ".join(map(repr, listed))
    if listed:
        warn_user(
            f"forward writes in place to {', '.join(listed)}, in 16 bits: small changes of a number are rounded away, "
            f"so that a counter or an average stops moving. Add keep_fp32=[{entries}] beside what you keep, and "
            "cast what forward computes of it to the type of the other numbers"
        )


def find_places(
    named_modules: Iterable[tuple[str, nn.Module]], kept: Iterable[nn.Module], weights_are_cast_inside: bool
) -> list[Place]:
    """Find the buffers and frozen parameters that are 16-bit, or are inside of forwards.

    BatchNorm's buffers are not among them, because ``keep_batchnorm_fp32`` decides about them. Neither are the vectors
    of spectral norms, which are computed from the weight in every forward.
    """
    float32 = set(kept)
    places = []
    for module_name, module in named_modules:
        if module in float32 or isinstance(module, (_BatchNorm, _SpectralNorm)):
            continue
        hooks = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        prefix = f"{module_name}." if module_name else ""
        for own_name, tensor in module._buffers.items():
            is_norms = any(own_name in (f"{name}_u", f"{name}_v") for name in hooks)
            if tensor is not None and not is_norms and _is_state(tensor, False):
                places.append(Place(weakref.ref(module), module._buffers, own_name, prefix + own_name, True))
        for own_name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad and _is_state(parameter, weights_are_cast_inside):
                places.append(Place(weakref.ref(module), module._parameters, own_name, prefix + own_name, False))
    return places


def _is_state(tensor: torch.Tensor, weights_are_cast_inside: bool) -> bool:
    if tensor.is_meta or is_sharded(tensor) or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return False
    return weights_are_cast_inside or is_lower_precision(tensor.dtype)
