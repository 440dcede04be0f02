"""Casts of parameters and buffers, and their undo to the bit."""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..basics.dtypes import cast_within_range, dtype_name, is_lower_precision, may_overflow
from ..basics.logs import warn_user
from ..basics.modules import ModelIndex, dotted, modules_of, own_tensors
from ..basics.weak_references import WeakIdSet
from ..distributed.sharding import local, rebuild_groups, set_data
from ..masters.law import restore_unchanged
from ..masters.masters import Masters
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH
from .precision_loss import warn_about_precision_loss
from .selection import is_parameter

# Elements of a tensor that are compared at a time.
_PIECE = 1 << 18


@dataclass(eq=False)
class _Buffer:
    """A buffer: the user's tensor, its cast, and the modules that have it, weakly, with its names there."""

    original: torch.Tensor
    cast: torch.Tensor
    places: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)


class TensorCasts:
    """The casts of all parameters and buffers that have no masters.

    A parameter stays the same object and gets new data. A buffer is replaced, as by ``module.half()``, in every module
    of the models that has it, because the tensor may be the user's own or another model's. Finite values beyond the
    narrower dtype's largest become that largest, with a warning.

    :meth:`undo` restores the dtypes. Buffers that were not changed are the original tensors again. Parameters keep
    their rounding: their float32 values are kept, on the host, only until :meth:`finish`, for a failed set-up.
    """

    def __init__(
        self,
        targets: Mapping[torch.Tensor, torch.dtype],
        trained: Collection[torch.Tensor],
    ) -> None:
        self._targets = {tensor: dtype for tensor, dtype in targets.items() if tensor.dtype != dtype}
        self._out_of_range: set[torch.Tensor] = set()
        self._original_dtypes: dict[torch.Tensor, torch.dtype] = {}
        # Values of parameters before they were cast; of sharded ones the part in this process.
        self._originals: dict[torch.Tensor, torch.Tensor] = {}
        # Gradients from before the cast, or while their parameter changes its dtype.
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._buffers: dict[torch.Tensor, _Buffer] = {}
        self._restored: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def apply(self, index: ModelIndex) -> None:
        """Cast the tensors one after another, with their gradients, and update the index.

        After an exception :meth:`undo` reverses the casts that were made.

        Args:
            index: the index of the models.
        """
        self._out_of_range = out_of_range(self._targets)
        warn_about_clamping(index, self._out_of_range)
        warn_about_precision_loss(index, self._targets, but_for=self._out_of_range)
        places = index.places_of_buffers()
        for tensor, dtype in self._targets.items():
            if is_parameter(tensor):
                self._cast_parameter(tensor, dtype)
            else:
                self._cast_buffer(tensor, dtype, places.get(tensor, []))
        index.replace_buffers({entry.original: cast for cast, entry in self._buffers.items()})

    def finish(self) -> None:
        """Drop the values that only a failed set-up needs."""
        # All at once: until here an interruption is one of the set-up.
        self._targets, self._gradients, self._originals = {}, {}, {}

    def rounded(self) -> list[torch.Tensor]:
        """List the float32 parameters that were cast to 16 bits: without a master they keep their rounding."""
        return [
            p for p, dtype in self._original_dtypes.items() if dtype is torch.float32 and is_lower_precision(p.dtype)
        ]

    def original_values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's values in its original dtype, with later writes; None if it has no other values."""
        if tensor in self._buffers:
            return _with_original_bits(self._buffers[tensor], tensor)
        original = self._originals.get(tensor)
        if original is None or tensor.dtype == original.dtype:
            return None
        return _widened(tensor, original.dtype, original)

    def original_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of a parameter before it was cast."""
        return self._original_dtypes.get(tensor, tensor.dtype)

    def mark_trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Do nothing: no values from before a cast are kept."""

    def adopt(self, parameter: torch.Tensor, original_dtype: torch.dtype) -> None:
        """Let :meth:`undo` restore the dtype of a parameter whose master was discarded."""
        self._original_dtypes.setdefault(parameter, original_dtype)

    @torch.no_grad()
    def load(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Store the float32 values that were just loaded into a 16-bit tensor.

        So ``state_dict()`` and :meth:`undo` return all their bits.
        """
        if tensor.is_meta or not (tensor in self._buffers or isinstance(tensor, nn.Parameter)):
            return
        values = values.detach().to(device=tensor.device)
        if out_of_range({values: tensor.dtype}):
            tensor.copy_(cast_within_range(values, tensor.dtype))
        if tensor in self._buffers:
            entry = self._buffers[tensor]
            if not torch.equal(entry.original.to(values), values):
                entry.original = values.to(entry.original.dtype, copy=True)

    def undo(self) -> None:
        """Restore the dtype of every tensor, and all bits that were not written since. May be called again."""
        for parameter in reversed(list(self._original_dtypes)):
            self._restore_parameter(parameter)
        for entry in reversed(list(self._buffers.values())):
            self._restore_buffer(entry)

    # -- parameters ---------------------------------------------------------------------------------------------

    def _cast_parameter(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        values = TENSOR_DETACH(parameter)
        cast = cast_within_range(values, dtype) if parameter in self._out_of_range else values.to(dtype)
        self._original_dtypes[parameter] = parameter.dtype
        self._keep(parameter, values, cast)
        if parameter.grad is not None:
            self._gradients[parameter] = parameter.grad
        _replace_data(parameter, cast, self._gradients.get(parameter))

    def _keep(self, parameter: torch.Tensor, values: torch.Tensor, cast: torch.Tensor) -> None:
        """Keep values that lose bits in a cast, in memory that no other tensor shares."""
        self._originals.pop(parameter, None)
        original = local(values)
        has_numbers = original.layout is torch.strided and not original.is_meta
        pieces = zip(_pieces(local(cast)), _pieces(original), strict=True) if has_numbers else ()
        if any(not torch.equal(narrow.to(original.dtype), piece) for narrow, piece in pieces):
            self._originals[parameter] = original.to("cpu", copy=True)

    @torch.no_grad()
    def _restore_parameter(self, parameter: torch.Tensor) -> None:
        dtype = self._original_dtypes[parameter]
        if parameter.dtype == dtype and parameter not in self._gradients:
            return
        gradient = self._gradients.get(parameter, parameter.grad)
        if gradient is not None:
            # An interruption between here and the end finds it there.
            self._gradients[parameter] = gradient
        if parameter.dtype != dtype:
            _replace_data(parameter, _widened(parameter, dtype, self._originals.get(parameter)), gradient)
        elif gradient is not None:
            parameter.grad = gradient.to(dtype)
        self._gradients.pop(parameter, None)

    # -- buffers ------------------------------------------------------------------------------------------------

    def _cast_buffer(self, original: torch.Tensor, dtype: torch.dtype, places: list[tuple[nn.Module, str]]) -> None:
        values = original.detach()
        cast = cast_within_range(values, dtype) if original in self._out_of_range else values.to(dtype)
        self._buffers[cast] = _Buffer(original, cast, [(weakref.ref(module), name) for module, name in places])
        for module, name in places:
            module._buffers[name] = cast

    @torch.no_grad()
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
            _replace_data(weight, before.to(dtype), gradient)
        except BaseException:
            _replace_data(weight, before, gradient)
            raise


def _replace_data(tensor: torch.Tensor, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Replace a tensor's data by data of another dtype, and cast its gradient, because torch requires equal dtypes."""
    tensor.grad = None
    set_data(tensor, values)
    if gradient is not None:
        tensor.grad = gradient.to(values.dtype)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor along its first dimension, so that temporaries are small."""
    if tensor.dim() == 0:
        return (tensor,)
    return torch.split(tensor, max(1, len(tensor) * _PIECE // max(1, tensor.numel())))


def _widened(parameter: torch.Tensor, dtype: torch.dtype, original: torch.Tensor | None) -> torch.Tensor:
    present: torch.Tensor = TENSOR_DETACH(parameter)
    values = present.to(dtype)
    part = local(values)
    if original is not None and part.shape == original.shape:
        here = original.to(part.device)
        part.copy_(restore_unchanged(here, cast_within_range(here, present.dtype), local(present)))
    return values


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


# -- tensors that come into a cast model later ------------------------------------------------------------------------


class LaterTensors:
    """The 16-bit tensors that were added to models after their casts, such as the masks of pruning.

    Without :meth:`widen` they would stay 16-bit after the undo, in a float32 model, whose forward then fails.

    Args:
        models: the models.
        index: the index of the models before the casts.
        dtype: the dtype that the models are cast to.
        masters: the masters of the models' weights.
    """

    def __init__(self, models: Sequence[nn.Module], index: ModelIndex, dtype: torch.dtype, masters: Masters) -> None:
        self._models = models
        self._masters = masters
        self._dtype = dtype
        # Tensors that had this dtype before initialize, also by name: moving a model to a device replaces its buffers.
        before = [(name, tensor) for name, tensor in (*index.parameters, *index.buffers) if tensor.dtype is dtype]
        self._names_before = {name for name, _ in before}
        self._before: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._before.update(tensor for _, tensor in before)

    @torch.no_grad()
    def widen(self) -> None:
        """Make these tensors float32, after the undo of the casts; a weight whose undo failed still has a master."""
        wide: dict[int, torch.Tensor] = {}
        for path, module in [named for model in self._models for named in model.named_modules()]:
            for name, tensor in own_tensors(module):
                if (
                    tensor.dtype is not self._dtype
                    or tensor in self._before
                    or dotted(path, name) in self._names_before
                ):
                    continue
                if self._masters.of(tensor) is not None:
                    continue
                if isinstance(tensor, nn.Parameter):
                    convert(tensor, torch.float32)
                else:
                    # Modules that share a buffer share the float32 one.
                    module._buffers[name] = wide.setdefault(id(tensor), tensor.float())


# -- values out of range ----------------------------------------------------------------------------------------------


def out_of_range(targets: Mapping[torch.Tensor, torch.dtype]) -> set[torch.Tensor]:
    """Find the tensors whose finite values overflow in the dtype that they are cast to."""
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    narrows: dict[tuple[torch.dtype, torch.dtype], bool] = {}
    for tensor, dtype in targets.items():
        types = tensor.dtype, dtype
        if types not in narrows:
            narrows[types] = may_overflow(*types)
        if not narrows[types]:
            continue
        part = TENSOR_DETACH(tensor)  # not through a method of a subclass
        if type(part) is not torch.Tensor:
            part = local(part)
        if part.numel() and not part.is_meta and part.layout is torch.strided:
            groups.setdefault((part.device, part.dtype, dtype), []).append((tensor, part))
    found = set()
    for (_, _, dtype), members in groups.items():
        limit = torch.finfo(dtype).max
        # One call and one device sync for many tensors. If a norm is inf or nan, the tensor is examined itself.
        norms = torch._foreach_norm([part for _, part in members], float("inf"))
        for (tensor, part), norm in zip(members, torch.stack(norms).tolist(), strict=True):
            if not norm <= limit and bool((part.isfinite() & (part.abs() > limit)).any()):
                found.add(tensor)
    return found


def check_range(index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse weights with masters whose finite values overflow in the dtype that they are cast to."""
    found = out_of_range(targets)
    if found:
        names = index.named_by_model(found)
        name = dtype_name(next(iter(targets[tensor] for tensor in found)))
        raise ValueError(
            f"{', '.join(names)} would be infinite in {name}, which has no numbers as large: add "
            f"keep_fp32=[{', '.join(map(repr, names))}], or the modules that have them"
            + (', or use opt_level="O5", whose bfloat16 has float32\'s range' if name == "float16" else "")
        )


def warn_about_clamping(index: ModelIndex, tensors: Collection[torch.Tensor]) -> None:
    """Warn once, naming all ``tensors`` whose values are about to be clamped."""
    if not tensors:
        return
    names = index.named_by_model(tensors)
    warn_user(
        f"finite values of {', '.join(names)} are beyond the largest of the narrower type they are cast to: they "
        "become that largest instead of infinite. Masters and buffers keep the full numbers for mpinit.undo. Where "
        f"the full numbers are needed, add keep_fp32=[{', '.join(map(repr, names))}], or their modules"
    )


def rebuild_flat_weights(modules: Collection[nn.Module]) -> None:
    """Let RNNs, and FSDP, gather their weights anew after a cast."""
    rebuild_groups(modules)
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def rebuild_flat_weights_of(models: Sequence[nn.Module]) -> None:
    """Do the same as :func:`rebuild_flat_weights` for all modules that models have by now."""
    rebuild_flat_weights(dict.fromkeys(module for model in models for module in modules_of(model)))
