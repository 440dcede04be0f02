"""The float32 numbers of a session's tensors: read, loaded, and handed out to users between steps.

They are handed out in three ways: as entries of ``model.state_dict()``, as masters of ``master_params(optimizer)``, and
as the parameters inside ``with float32_weights(model)``. One rule applies to all three:

1. A number that was written through one of them counts, unless its weight was changed by a step, a load or a write
   after it was handed out. Then the write is an error that names the tensor. A stale tensor is never copied into a
   weight.
2. A master is the same object for as long as the session lives, and its ``grad`` is its weight's after each backward
   pass. An entry of a state dict is a copy. A parameter inside a ``float32_weights`` block is the full master if there
   is one. Otherwise it is made for the block, and after the block it is empty: all nan, and not writable.
3. :meth:`Float32Values.apply_writes` applies all pending writes. It is called before anything is read, saved, copied or
   exchanged.
4. Code that runs in every iteration works on all tensors in bulk.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..basics.modules import Names
from ..distributed.sharding import is_sharded, local, set_data, shard
from ..masters.full import FullMasters
from ..masters.law import is_rounding, meaning, round_into
from ..masters.masters import Master, Masters
from ..torch_internals.bulk import (
    are_same,
    changed_versions,
    versions_of,
)
from ..torch_internals.parameter_data import TENSOR_DATA, have_same_bits, record_data_use
from ..torch_internals.running import reads_without_sync
from .block_parameters import BlockParameters
from .casting import TensorCasts
from .master_gradients import BOTH, MasterGradients

# How many tensors an error names.
_NAMED: Final = 12
_STALE: Final = (
    "{} of a state dict that model.state_dict() returned {} written to after the weight had moved (by a step, a load "
    "or a write): its other numbers are those of before. Entries are copies: call model.state_dict() anew and write to "
    "that, or write inside `with mpinit.float32_weights(model)`. This write is dropped"
)
_TWICE: Final = (
    "{!r} was written to in two state dicts that model.state_dict() returned, differently: write to one of them. "
    "Nothing was changed, and both writes are dropped"
)


class Float32Values:
    """The float32 numbers of a session's 16-bit tensors.

    Attributes:
        masters: the masters of the weights that are trained.
        casts: the casts of all other tensors, with their float32 values.
        block_parameters: the float32 parameters that were made for ``float32_weights`` blocks; None before the first.
    """

    def __init__(self, models: Sequence[nn.Module], masters: Masters) -> None:
        self.masters = masters
        self.casts = TensorCasts({}, ())
        self._models = models
        self._names = Names(models)
        self._entries: list[_Entry] = []
        # Ids of masters that, rounded, were equal to their weights when the present call of state_dict() began.
        self._agreeing: set[int] = set()
        # Entries of state dicts that were made inside a block: the user's tensor, a tensor with the same memory, and
        # the 16-bit tensor.
        self._block_entries: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        self._handed_out = HandedOutMasters(masters) if isinstance(masters, FullMasters) else None
        # For the last hand_out(): the weights, their masters, the list that was returned, the number of masters.
        self._last_handed_out: tuple[list[nn.Parameter], list[Master], list[nn.Parameter], int] = [], [], [], 0
        self.block_parameters: BlockParameters | None = None

    # -- reading and loading ------------------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 values of a 16-bit tensor; changes nothing.

        Returns:
            A tensor that must not be written to; None if the tensor has no other values than its own.
        """
        master = self.masters.of(tensor)
        return self.casts.original_values(tensor) if master is None else self.masters.values(master)

    def load(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Record float32 values that were loaded into a 16-bit tensor of the same shape.

        Returns:
            Whether the tensor has a master, which has these values now.
        """
        master = self.masters.of(tensor)
        if master is None:
            self.casts.load(tensor, values)
            return False
        self.masters.load(master, values)
        if self._handed_out is not None:
            self._handed_out.remember(master)
        return True

    def apply_gradients(self) -> None:
        """Apply changes of the ``grad`` of handed-out masters to the weights, before a scaled loss adds gradients.

        Raises:
            RuntimeError: a weight and its master got other gradients.
        """
        handed_out = self._handed_out
        if handed_out is not None and handed_out.masters and not self.masters.are_in_model:
            handed_out.drop_discarded()
            handed_out.gradients.apply()

    def has_unapplied_writes(self) -> bool:
        """Return whether a handed-out entry or master was written to since :meth:`apply_writes`; changes nothing."""
        if any(entry.values._version != entry.version for entry in self._entries):
            return True
        handed_out = None if self.masters.are_in_model else self._handed_out
        return handed_out is not None and handed_out.were_written()

    def apply_writes(self, with_gradients: bool = True) -> None:
        """Apply all writes to handed-out tensors; cheap if nothing was handed out.

        Args:
            with_gradients: whether gradients are going to be used. Default True.

        Raises:
            RuntimeError: a weight and its master, or two entries, were written to differently; an entry was written to
                after its weight had moved; or a weight's memory was replaced by another one's.
        """
        if self.masters.are_in_model or (isinstance(self.masters, FullMasters) and self.masters.is_open):
            return  # at the moment the masters have the present values, and the weights are out of date
        if self.masters.data_use.replaced:
            self.casts.follow_replaced_data(self.masters, self._names)
            self.masters.follow_replaced_memory()
        if self._handed_out is not None and self._handed_out.masters:
            self._handed_out.apply_writes()
            if with_gradients:
                self._handed_out.gradients.apply()
        if self._entries:
            self._apply_entries()
        if self.block_parameters:
            self.block_parameters.check_kept(self._names)

    # -- entries of state dicts ---------------------------------------------------------------------------------------

    def entry(self, tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Make the entry of a state dict for a 16-bit tensor of a module: a float32 copy, whose writes count.

        Args:
            tensor: the parameter or buffer.
            saved: the tensor that torch would save for it.
        """
        master = self.masters.of(tensor)
        agreed = id(master) in self._agreeing
        if master is None:
            values = self.casts.original_values(tensor)
        else:
            values = master.parameter if agreed else self.masters.values(master)
        # An entry is never an inference tensor, which has no version counter.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            wide = (saved if values is None else values).detach().to(torch.float32, copy=True)
        if master is None:
            self.masters.data_use.watch(tensor, is_recorded=False)
        clock = self.masters.data_use.clock(tensor)
        self._entries.append(_Entry(weakref.ref(wide), wide.detach(), wide._version, tensor, clock, agreed))
        return wide

    def prepare_entries(self) -> None:
        """Prepare for one call of ``state_dict()``, in bulk for all entries."""
        self.apply_writes(with_gradients=False)
        self.masters.data_use.watch_all([master.weight for master in self.masters])
        self._agreeing = self.masters.agreeing() if isinstance(self.masters, FullMasters) else set()

    def block_entry(self, wide: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Make the entry of a state dict inside of a block: until the end of that it shares the parameter's memory.

        Its version counter is its own, because later writes to the parameter are no writes to the entry.
        """
        tensor = None if self.block_parameters is None else self.block_parameters.narrow.get(id(wide))
        if tensor is None:
            return saved
        entry: torch.Tensor = TENSOR_DATA.__get__(saved)
        self._block_entries.append((weakref.ref(entry), entry.detach(), tensor))
        return entry

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the float32 values that a buffer or frozen parameter has from now on; earlier entries become stale."""
        for entry in self._entries:
            if entry.tensor is tensor:
                entry.clock = (-1,)
        return self.casts.keep(tensor)

    def entries_loaded(self, state_dict: Mapping[str, Any], module: nn.Module, prefix: str) -> None:
        """Record that a state dict is about to be loaded into a module, whose names begin with ``prefix`` in it.

        The load applies the writes to entries under their own names. Stale entries may be loaded anywhere. A write to
        any other entry counts beside the load.
        """
        written = [entry for entry in self._entries if entry.values._version != entry.version]
        if not written:
            return
        start = prefix.removesuffix(".")
        parameters = module.named_parameters(start, remove_duplicate=False)
        tensors = chain(parameters, module.named_buffers(start, remove_duplicate=False))
        under_own_name = {(id(state_dict.get(name)), id(tensor)) for name, tensor in tensors}
        loaded = set(map(id, state_dict.values()))
        for entry in written:
            value = id(entry.handed_out())
            if (value, id(entry.tensor)) in under_own_name or (value in loaded and self._has_moved(entry)):
                entry.version = entry.values._version

    @contextmanager
    def without_moving(self) -> Iterator[None]:
        """Run code of an optimizer that changes no weight inside the block, so that entries do not become stale."""
        current = [entry for entry in self._entries if not self._has_moved(entry)]
        before, self.masters.keeps_bits = self.masters.keeps_bits, True
        try:
            yield
        finally:
            self.masters.keeps_bits = before
            for entry in current:
                entry.clock = self._record_clock(entry.tensor)

    @torch.no_grad()
    def _apply_entries(self) -> None:
        written: dict[int, list[_Entry]] = {}
        for entry in self._entries:
            if entry.values._version == entry.version:
                continue
            if _has_present_numbers(self, entry):
                entry.version, entry.clock = entry.values._version, self._record_clock(entry.tensor)
            else:
                written.setdefault(id(entry.tensor), []).append(entry)
        if written:
            for entries, values in self._check_entries(list(written.values())):
                tensor = entries[0].tensor
                tensor.copy_(values)
                self.load(tensor, values)
                for entry in entries:
                    entry.version, entry.clock = entry.values._version, self._record_clock(tensor)
        self._entries = [entry for entry in self._entries if entry.handed_out() is not None]

    def _check_entries(self, written: Sequence[list["_Entry"]]) -> list[tuple[list["_Entry"], torch.Tensor]]:
        """Refuse stale entries, and two entries that contradict each other; the refused writes are dropped.

        Returns:
            The entries of each tensor with the values to write to it, before any is written.
        """
        stale = [entry for entries in written for entry in entries if self._has_moved(entry)]
        for entry in stale:
            entry.version = entry.values._version
        if stale:
            names = list(dict.fromkeys(repr(self._names.of(entry.tensor)) for entry in stale))
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise RuntimeError(_STALE.format(", ".join(names[:_NAMED]) + more, "was" if len(names) == 1 else "were"))
        checked = []
        for entries in written:
            values = _merge(self, entries)
            if values is None:
                for entry in entries:
                    entry.version = entry.values._version
                raise RuntimeError(_TWICE.format(self._names.of(entries[0].tensor)))
            checked.append((entries, values))
        return checked

    def _record_clock(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Watch a tensor from now on, and read its clock; see :meth:`DataUse.clock`."""
        use = self.masters.data_use
        use.watch(tensor, is_recorded=self.masters.of(tensor) is not None)
        return use.clock(tensor)

    def _has_moved(self, entry: "_Entry") -> bool:
        if self.masters.data_use.clock(entry.tensor) != entry.clock:
            return True
        values = self.of(entry.tensor) if entry.agreed else None
        return values is not None and not _is_masters_memory(self.masters, entry.tensor, values)

    # -- masters ------------------------------------------------------------------------------------------------------

    def hand_out(self, weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """List the full masters of some weights; for a weight without one, the weight itself.

        From now on these masters follow writes to their weights, and writes to the masters count.
        """
        asked = list(weights)
        if self._handed_out is None or len(self.masters) == 0:
            return asked
        last, masters, returned, count = self._last_handed_out
        if count != len(self.masters) or not are_same(asked, last):
            found = [self.masters.of(weight) for weight in asked]
            masters = [master for master in found if master is not None]
            returned = [w if m is None else m.parameter for w, m in zip(asked, found, strict=True)]
            self._last_handed_out = asked, masters, returned, len(self.masters)
            self._handed_out.add(masters)
        self._handed_out.gradients.begin()
        return list(returned)

    def bind_gradients(self) -> None:
        """Set the ``grad`` of handed-out masters to their weights'; after a backward pass."""
        if self._handed_out is not None and self._handed_out.masters and not self.masters.are_in_model:
            self._handed_out.gradients.bind()

    def moved(self, masters: Sequence[Master]) -> None:
        """Record that weights and their masters were just changed together, so that this does not count as a write.

        Args:
            masters: these masters. Writes to the others still count: a hook of a step may have written to a weight that
                another optimizer steps.
        """
        if self._handed_out is not None and self._handed_out.masters:
            self._handed_out.remember_changed(masters)

    def drop_if_unused(self, masters: Iterable[Master]) -> None:
        """Free the masters of weights that are in no optimizer and in no model any more."""
        unused = [master for master in masters if master.optimizers == 0]
        if unused:
            self._last_handed_out = [], [], [], 0
            used = {id(parameter) for model in self._models for parameter in model.parameters()}
            for master in unused:
                if id(master.weight) not in used:
                    self.masters.discard(master)

    def close(self) -> None:
        """Release what was handed out: the session ends."""
        if self._handed_out is not None:
            self._handed_out.close()
        self._entries, self._block_entries = [], []
        self.block_parameters = None

    # -- parameters inside of a block ---------------------------------------------------------------------------------

    def end_block(self) -> None:
        """End a block: all masters count as handed out, and entries of its state dicts are copies from now on."""
        if self._handed_out is not None:
            self._handed_out.add(self.masters)
            self._handed_out.gradients.follow_graphs()
        self.moved(list(self.masters))
        for handed_out, saved, tensor in self._block_entries:
            entry = handed_out()
            if entry is not None:
                if _is_masters_memory(self.masters, tensor, saved):
                    set_data(entry, entry.detach().clone())  # a kept state dict does not change with later steps
                    saved = entry.detach()
                self._entries.append(
                    _Entry(handed_out, saved, saved._version, tensor, self._record_clock(tensor), False)
                )
        self._block_entries = []


@dataclass(slots=True)
class _Entry:
    """An entry of a state dict.

    Attributes:
        handed_out: a weak reference to the user's tensor.
        values: a tensor with the same memory and version counter.
        version: the version when the entry was made, or when writes to it were last applied.
        tensor: the 16-bit tensor that it is a copy of.
        clock: the clock of ``tensor`` at that time; see :meth:`DataUse.clock`.
        agreed: whether ``tensor`` was its master's rounding at that time.
    """

    handed_out: weakref.ref[torch.Tensor]
    values: torch.Tensor
    version: int
    tensor: torch.Tensor
    clock: tuple[int, ...]
    agreed: bool


def _merge(values_of: Float32Values, entries: Sequence["_Entry"]) -> torch.Tensor | None:
    """Merge the writes to several entries of one tensor; None if two contradict each other."""
    if len(entries) == 1:
        return entries[0].values
    values = values_of.of(entries[0].tensor)
    before = local(entries[0].tensor.float() if values is None else values)
    merged, changed = before.clone(), torch.zeros_like(before, dtype=torch.bool)
    for entry in entries:
        now = local(entry.values)
        writes = ~((now == before) | (now.isnan() & before.isnan()))
        if bool((writes & changed & (now != merged)).any()):
            return None
        merged, changed = torch.where(writes, now, merged), changed | writes
    result = entries[0].values.clone()
    local(result).copy_(merged)
    return result


def _has_present_numbers(values_of: Float32Values, entry: "_Entry") -> bool:
    """Return whether an entry equals its tensor's present float32 values, so that its writes are in them already."""
    values = values_of.of(entry.tensor)
    present = local(entry.tensor.float() if values is None else values)
    return present.shape == entry.values.shape and torch.equal(present, local(entry.values))


def _is_masters_memory(masters: Masters, tensor: torch.Tensor, values: torch.Tensor) -> bool:
    master = masters.of(tensor)
    if master is None or not isinstance(masters, FullMasters) or values.is_meta or is_sharded(tensor):
        return False
    return values.data_ptr() == master.parameter.data_ptr()


class HandedOutMasters:
    """The full masters that users may refer to, from ``master_params`` or a block.

    A write to a master is rounded into its weight.
    """

    def __init__(self, table: FullMasters) -> None:
        self.masters: list[Master] = []
        self._table = table
        self._index: dict[int, int] = {}
        self._weights: list[nn.Parameter] = []
        self._parameters: list[nn.Parameter] = []
        self._are_sharded = False
        # Versions of weights and of masters, from the last time that they agreed.
        self._versions: tuple[list[int], list[int]] = [], []

    @functools.cached_property
    def gradients(self) -> MasterGradients:
        """The gradients that they share with their weights."""
        return MasterGradients(self._table)

    def add(self, masters: Iterable[Master]) -> None:
        """Hand out masters, unless they are handed out already: from now on writes to them count."""
        asked = list(masters)
        new = [] if are_same(asked, self.masters) else [each for each in asked if id(each) not in self._index]
        for master in new:
            self._table.follow(master, keeps_bits=True)
            self._table.handed_out.add(id(master))
            record_data_use(master.parameter, self._table.data_use)
            self._table.data_use.keep(master.weight)
            self._table.data_use.keep(master.parameter)
        if new:
            self._arrange([*self.masters, *new])
            self.gradients.bind()

    def _arrange(self, masters: list[Master]) -> None:
        before = self._index
        self.masters = masters
        self._index = {id(master): index for index, master in enumerate(masters)}
        self._weights = [master.weight for master in masters]
        self._parameters = [master.parameter for master in masters]
        self._are_sharded = any(map(is_sharded, self._weights))
        self.gradients.arrange(masters)
        # Writes to masters that stay are still to be found.
        places = [before.get(id(master)) for master in masters]
        weights, parameters = map(versions_of, map(self._counted, (self._weights, self._parameters)))
        known = self._versions
        self._versions = (
            [now if place is None else known[0][place] for place, now in zip(places, weights, strict=True)],
            [now if place is None else known[1][place] for place, now in zip(places, parameters, strict=True)],
        )

    def close(self) -> None:
        """Drop all masters."""
        self.gradients.close()
        for master in self.masters:
            self._table.handed_out.discard(id(master))
        self._arrange([])

    def drop_discarded(self) -> None:
        """Drop masters that the session has discarded, because their weights are in no model and no optimizer."""
        if len(self._table.handed_out) != len(self.masters):
            self._arrange([master for master in self.masters if id(master) in self._table.handed_out])

    # -- values -------------------------------------------------------------------------------------------------------

    def remember_all(self) -> None:
        """Record that all masters agree with their weights at the moment."""
        self._versions = versions_of(self._counted(self._weights)), versions_of(self._counted(self._parameters))
        use = self._table.data_use
        for master in self.masters if use.touched else ():
            for tensor in (master.weight, master.parameter):
                if id(tensor) in use.touched:
                    use.keep(tensor)
        self.gradients.bind(anew=True)

    def remember_changed(self, masters: Sequence[Master]) -> None:
        """Do the same as :meth:`remember_all` for some masters; those that are not handed out are left out."""
        if are_same(masters, self.masters):
            self.remember_all()
            return
        places = [(self._index[id(each)], each) for each in masters if id(each) in self._index]
        pairs = ([each.weight for _, each in places], [each.parameter for _, each in places])
        for versions, tensors in zip(self._versions, pairs, strict=True):
            for (index, _), version in zip(places, versions_of(self._counted(tensors)), strict=True):
                versions[index] = version
        use = self._table.data_use
        for tensor in chain(*pairs) if use.touched else ():
            if id(tensor) in use.touched:
                use.keep(tensor)
        self.gradients.bind(anew=True)

    def _counted(self, tensors: list[nn.Parameter]) -> list[Any]:
        return list(map(shard, tensors)) if self._are_sharded else tensors

    def _changed_versions(self, tensors: list[nn.Parameter], which: int) -> list[int] | None:
        return changed_versions(self._counted(tensors), self._versions[which])

    def were_written(self) -> bool:
        """Return whether the version of a master has moved."""
        return self._changed_versions(self._parameters, 1) is not None

    def remember(self, master: Master) -> None:
        """Record that one master agrees with its weight at the moment."""
        index = self._index.get(id(master))
        if index is not None:
            for versions, tensor in zip(self._versions, (master.weight, master.parameter), strict=True):
                versions[index] = shard(tensor)._version
                self._table.data_use.keep(tensor)

    def apply_writes(self) -> None:
        """Apply writes to masters to their weights, and writes to weights to their masters.

        Raises:
            RuntimeError: a weight and its master were written to, or got other gradients, and differ.
        """
        self.drop_discarded()
        touched = self._table.data_use.touched
        weights, parameters = self._changed_versions(self._weights, 0), self._changed_versions(self._parameters, 1)
        if touched or not (weights is None and parameters is None):
            for index, master in enumerate(self.masters):
                weight_moved = weights is not None and weights[index] != self._versions[0][index]
                master_moved = parameters is not None and parameters[index] != self._versions[1][index]
                is_touched = id(master.weight) in touched or id(master.parameter) in touched
                if weight_moved or master_moved or is_touched:
                    self._apply(master, weight_moved, master_moved)
                    self.remember(master)

    @torch.no_grad()
    def _apply(self, master: Master, weight_moved: bool, master_moved: bool) -> None:
        weight, parameter = shard(master.weight), shard(master.parameter)
        kept = self._table.data_use.kept
        before = kept.get(id(master.weight)), kept.get(id(master.parameter))
        if reads_without_sync(weight.device):
            weight_moved = weight_moved or not (before[0] is None or have_same_bits(weight, before[0]))
            master_moved = master_moved or not (before[1] is None or have_same_bits(parameter, before[1]))
        elif before[0] is not None and (before[1] is not None or master_moved):
            self._merge(master, weight, parameter, before[0])
            return
        elif not (weight_moved or master_moved):
            # The weight or the master may have been written to through its data, which torch does not count.
            with _unsafe_preserve_version_counter(master.weight):
                self._unify(master, before[0] is not None)
            return
        if weight_moved and master_moved and not bool(is_rounding(weight, parameter).all()):
            raise RuntimeError(BOTH.format(self._table.names.of(master.weight), "written to"))
        if weight_moved or master_moved:
            self._unify(master, not master_moved)

    def _unify(self, master: Master, by_weight: bool) -> None:
        """Make a weight and its master agree: by the weight's numbers, or by the master's."""
        if by_weight:
            self._table.follow(master, keeps_bits=True)
        else:
            self._table.load(master, master.parameter)

    def _merge(self, master: Master, weight: torch.Tensor, parameter: torch.Tensor, before: torch.Tensor) -> None:
        """Merge writes to a weight and to its master, element by element, without a device sync."""
        is_written = (weight.view(torch.int16) != before.view(torch.int16)) & ~is_rounding(weight, parameter)
        parameter.copy_(torch.where(is_written, meaning(weight, parameter), parameter))
        round_into(master.weight, master.parameter, master.clamps)
        master.last_seen = None
