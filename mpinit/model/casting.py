"""Casts of parameters and buffers, their float32 numbers, and the undo of the casts."""

import weakref
from collections.abc import Collection, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..basics.dtypes import cast_within_range, is_lower_precision
from ..basics.modules import ModelIndex, modules_of, own_tensors
from ..basics.weak_references import WeakIdSet
from ..distributed.sharding import local, rebuild_groups, replace_data, sharded_as
from ..masters.law import restore_unchanged
from ..masters.masters import Masters
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH
from .precision_loss import out_of_range
from .selection import is_parameter


@dataclass(eq=False)
class _Buffer:
    """A buffer: the user's tensor, its cast, and the modules that have it, weakly, with its names there."""

    original: torch.Tensor
    cast: torch.Tensor
    places: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)


class Casts:
    """The casts of a session's tensors, and the float32 numbers that the 16-bit ones have.

    A parameter stays the same object and gets new data. A buffer is replaced, as by ``module.half()``, in every module
    of the models that has it, because the tensor may be the user's own or another model's. Finite values beyond the
    narrower dtype's largest become that largest, with a warning; of a weight with a master they are refused.

    :meth:`undo` restores the dtypes of tensors without masters. Buffers that were not changed are the original tensors
    again. Parameters keep their rounding: their float32 values are kept, on the host, only until :meth:`finish`, for a
    failed set-up.

    What a user replaces is freed: parameters are known weakly, and buffers as long as a module that had them.

    Attributes:
        masters: the masters of the weights that are trained.
        narrow: inside a ``float32_weights`` block the id of each float32 tensor -> the 16-bit tensor that it replaces.
    """

    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self.narrow: dict[int, torch.Tensor] = {}
        # Before the casts: the dtypes of parameters; their data, of sharded ones the part in this process; their
        # gradients, which are also here while a parameter gets another dtype.
        self._original_dtypes: MutableMapping[torch.Tensor, torch.dtype] = WeakIdKeyDictionary()
        self._originals: dict[torch.Tensor, torch.Tensor] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        # By the id of the cast, and the buffers of each module, which keep them.
        self._buffers: MutableMapping[int, _Buffer] = weakref.WeakValueDictionary()
        self._buffers_of: MutableMapping[nn.Module, list[_Buffer]] = WeakIdKeyDictionary()
        self._restored: dict[torch.Tensor, torch.Tensor] = {}
        self._widened: Sequence[torch.Tensor] = ()
        # The tensors that were 16-bit before, weakly.
        self._widens_later = False
        self._before: WeakIdSet[torch.Tensor] = WeakIdSet()

    def note_16_bit(self, before: Iterable[torch.Tensor]) -> None:
        """Note the tensors that are 16-bit before the casts."""
        self._before |= set(before)

    def follow_buffers(self, module: nn.Module, before: Mapping[str, torch.Tensor | None]) -> None:
        """Let buffers of a module that was moved to a device or memory format be those that they replace."""
        for name, old in before.items():
            new = module._buffers.get(name)
            if old is None or new is None or new is old:
                continue
            if old in self._before:
                self._before.add(new)
            entry = self._buffers.get(id(old))
            if entry is not None:
                self._buffers[id(new)] = moved = _Buffer(entry.original, new, [(weakref.ref(module), name)])
                entry.places = [place for place in entry.places if place[0]() is not module or place[1] != name]
                own = [*self._buffers_of.get(module, ()), moved]
                self._buffers_of[module] = [each for each in own if any(known() is module for known, _ in each.places)]

    def stays_16_bit(self, tensor: torch.Tensor) -> bool:
        """Return whether the undo leaves a 16-bit tensor without a master as it is."""
        return not self._widens_later or tensor in self._before

    @torch.no_grad()
    def cast_models(
        self,
        index: ModelIndex,
        targets: Mapping[torch.Tensor, torch.dtype],
        clamped: Container[torch.Tensor] = (),
        widened: Sequence[torch.Tensor] = (),
    ) -> None:
        """Cast tensors one after another to the dtypes of ``targets``, with their gradients, and update the index.

        After an exception :meth:`undo`, and the undo of the masters, reverse the casts that were made. The ``widened``
        parameters stay float32 after the undo.
        """
        self._widened = widened
        self._widens_later = any(map(is_lower_precision, targets.values()))
        mastered = {id(master.weight) for master in self.masters}
        places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
        for module in index.names:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(buffer, []).append((module, name))
        for tensor, to in targets.items():
            if id(tensor) in mastered or tensor.dtype is to:
                continue
            values = TENSOR_DETACH(tensor)
            if is_parameter(tensor):
                if not values.is_meta:
                    # On the host: the device may have no room for both.
                    self._originals[tensor] = local(values).to("cpu")
                if tensor.grad is not None:
                    self._gradients[tensor] = tensor.grad
                self._original_dtypes[tensor] = tensor.dtype
                replace_data(tensor, _cast(values, to, tensor in clamped), tensor.grad)
            else:
                cast = _cast(values, to, tensor in clamped)
                found = places.get(tensor, [])
                entry = _Buffer(tensor, cast, [(weakref.ref(module), name) for module, name in found])
                self._buffers[id(cast)] = entry
                for module, name in found:
                    self._buffers_of.setdefault(module, []).append(entry)
                    module._buffers[name] = cast
        # The undo of these is that of the masters.
        self.masters.cast(list(self.masters))
        rebuild_flat_weights(index.names)
        if self._buffers:
            index.read_tensors()  # they are others

    def finish(self) -> None:
        """Drop the values that only a failed set-up needs."""
        for_good = set(self._widened)
        dtypes = WeakIdKeyDictionary({p: dtype for p, dtype in self._original_dtypes.items() if p not in for_good})
        # All at once: until here an interruption is one of the set-up.
        self._original_dtypes, self._gradients, self._originals, self._widened = dtypes, {}, {}, ()

    def rounded(self) -> list[torch.Tensor]:
        """List the float32 parameters that were cast to 16 bits: without a master they keep their rounding."""
        return [
            p for p, dtype in self._original_dtypes.items() if dtype is torch.float32 and is_lower_precision(p.dtype)
        ]

    # -- float32 numbers ----------------------------------------------------------------------------------------

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 values of a 16-bit tensor, with later writes; changes nothing.

        Returns:
            A tensor that must not be written to; None if the tensor has no other values than its own.
        """
        master = self.masters.of(tensor)
        if master is not None:
            return self.masters.values(master)
        entry = self._buffers.get(id(tensor))
        return None if entry is None else _with_original_bits(entry, tensor)

    def original_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of a parameter before ``initialize``."""
        master = self.masters.of(tensor)
        return self._original_dtypes.get(tensor, tensor.dtype) if master is None else master.original_dtype

    @torch.no_grad()
    def load(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Record float32 values that were loaded into a 16-bit tensor, so that ``state_dict()`` and undo return them.

        Args:
            tensor: the tensor.
            values: float32, of its shape.

        Returns:
            Whether the tensor has a master, which has these values now.
        """
        master = self.masters.of(tensor)
        if master is not None:
            self.masters.load(master, values)
            return True
        entry = self._buffers.get(id(tensor))
        if tensor.is_meta or (entry is None and not isinstance(tensor, nn.Parameter)):
            return False
        values = values.detach().to(device=tensor.device)
        if out_of_range({values: tensor.dtype}):
            tensor.copy_(cast_within_range(values, tensor.dtype))
        if entry is not None and not torch.equal(entry.original.to(values), values):
            entry.original = values.to(entry.original.dtype, copy=True)
        return False

    # -- undo -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the dtype of every tensor without a master, and the bits of buffers. May be called again."""
        for parameter in reversed(list(self._original_dtypes)):
            self._restore_parameter(parameter)
        for entry in reversed(list(self._buffers.values())):
            self._restore_buffer(entry)

    @torch.no_grad()
    def widen_later_tensors(self) -> None:
        """Make 16-bit tensors float32 that came into the models after the casts, such as the masks of pruning.

        Otherwise the forward of a float32 model would meet them. It is the last undo: a weight whose undo has failed
        still has a master.
        """
        wide: dict[int, torch.Tensor] = {}
        for module in modules_of(*self.masters.names.models) if self._widens_later else ():
            for name, tensor in own_tensors(module):
                was_so = not is_lower_precision(tensor.dtype) or tensor in self._before
                if was_so or self.masters.of(tensor) is not None:
                    continue
                if isinstance(tensor, nn.Parameter):
                    convert(tensor, torch.float32)
                else:
                    # Modules that share a buffer share the float32 one.
                    module._buffers[name] = wide.setdefault(id(tensor), tensor.float())

    def _restore_parameter(self, parameter: torch.Tensor) -> None:
        dtype = self._original_dtypes[parameter]
        if parameter.dtype == dtype and parameter not in self._gradients:
            return
        gradient = self._gradients.get(parameter, parameter.grad)
        if gradient is not None:
            # An interruption between here and the end finds it there.
            self._gradients[parameter] = gradient
        if parameter.dtype != dtype:
            original = self._originals.get(parameter)
            values = TENSOR_DETACH(parameter).to(dtype)
            if original is not None:
                values = sharded_as(original.to(local(values).device), parameter)
            replace_data(parameter, values, gradient)
        elif gradient is not None:
            parameter.grad = gradient.to(dtype)
        self._gradients.pop(parameter, None)

    def _restore_buffer(self, entry: _Buffer) -> None:
        for known, name in entry.places:
            module = known()
            present = None if module is None else module._buffers.get(name)
            # A buffer that the user has replaced since stays, in the original dtype.
            if module is None or present is None or present is entry.original or not present.is_floating_point():
                continue
            if present.dtype != entry.original.dtype:
                if present not in self._restored:
                    self._restored[present] = _with_original_bits(entry, present)
                module._buffers[name] = self._restored[present]


def convert(weight: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter and of its gradient."""
    if weight.dtype != dtype:
        before, gradient = TENSOR_DATA.__get__(weight), weight.grad
        try:
            replace_data(weight, before.to(dtype), gradient)
        except BaseException:
            replace_data(weight, before, gradient)
            raise


def _cast(values: torch.Tensor, dtype: torch.dtype, clamps: bool) -> torch.Tensor:
    return cast_within_range(values, dtype) if clamps else values.to(dtype)


def _with_original_bits(entry: _Buffer, present: torch.Tensor) -> torch.Tensor:
    """Return a buffer in its original dtype: the original tensor itself if nothing was written."""
    original = entry.original
    if present.shape != original.shape or present.dtype != entry.cast.dtype:
        return present.detach().to(original.dtype)
    if present.is_meta:
        return original  # there are no numbers that could have changed
    here = original.detach().to(present.device)
    found = restore_unchanged(here, cast_within_range(here, present.dtype), present.detach())
    return original if found is here and original.device == present.device else found


def rebuild_flat_weights(modules: Collection[nn.Module]) -> None:
    """Let RNNs, and FSDP, gather their weights anew after a cast."""
    rebuild_groups(modules)
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def rebuild_flat_weights_of(models: Sequence[nn.Module]) -> None:
    """Do the same as :func:`rebuild_flat_weights` for all modules that models have by now."""
    rebuild_flat_weights(modules_of(*models))
