"""A ``float32_weights`` block: the exchange of a session's 16-bit tensors for float32 ones in all modules.

What a block exchanges is computed when the modules or the masters have changed, and used by all later blocks: an
average of the weights runs a block in every iteration.
"""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import torch
from torch import nn

from ..basics.modules import modules_of
from ..basics.weak_references import WeakList
from ..distributed.sharding import is_sharded, shard
from ..masters.full import FullMasters
from ..masters.masters import Master
from ..masters.split import SplitMasters
from ..torch_internals.bulk import (
    ModuleEntries,
    are_same,
    changed_grads,
    changed_versions,
    grads_of,
    in_pieces,
    replace_entries,
    set_grads,
    versions_of,
)
from ..torch_internals.parameter_data import DataUse, have_same_bits
from ..torch_internals.running import reads_without_sync
from .block_parameters import BlockParameters
from .float32_values import Float32Values
from .shared_memory import is_16_bit

_UNTIED: Final = (
    "inside `with mpinit.float32_weights(...)` the parameter {!r} was replaced in one of the places that share it, and "
    "not in the others: the block cannot untie them, and the replacement is dropped. Replace it in all its places, or "
    "untie them before or after the block"
)

_RESHAPED: Final = (
    "inside `with mpinit.float32_weights(...)` the data of {!r} got the shape {}, and the model's own tensor has the "
    "shape {}: the change is dropped. Change shapes before or after the block"
)
_WRITTEN_OUTSIDE: Final = (
    "the model's own parameter {!r} was written to inside `with mpinit.float32_weights(...)`, where the model has "
    "another one, in float32, whose numbers count at the end of the block. Write to that one (read it from the model "
    "inside the block), or write before or after the block"
)


class Places:
    """The places of the 16-bit parameters and buffers of some models; searched again only after a module has changed.

    Attributes:
        found: for each place the module's dict of parameters or buffers, the name in it, and the tensor.
        tensors: id of a tensor -> the tensor.
        rnns: RNN modules, which have a second list of their weights, ``_flat_weights``.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._seen: ModuleEntries | None = None
        self.found: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.rnns: WeakList[nn.RNNBase] = WeakList()

    def are_as_found(self) -> bool:
        """Return whether no module has changed since the last search."""
        return self._seen is not None and self._seen.are_as_seen()

    def find(self) -> bool:
        """Search the modules, unless none of them has changed; return whether they were searched."""
        if self.are_as_found():
            return False
        modules = list({module: None for model in self._models for module in modules_of(model)})
        self.found = []
        owners = set()
        for module in modules:
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            found = [(each, name, tensor) for each in own for name, tensor in each.items() if is_16_bit(tensor)]
            if found:
                owners.add(module)
                self.found += found
        self.tensors = {id(tensor): tensor for _, _, tensor in self.found}
        self.rnns = WeakList(module for module in modules if isinstance(module, nn.RNNBase) and module in owners)
        self._seen = ModuleEntries(modules)
        return True

    def present(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield the dict, the name and the tensor of all present parameters and buffers; records nothing."""
        for module in {module: None for model in self._models for module in modules_of(model)}:
            for each in (module._parameters, module._buffers):
                yield from ((each, name, tensor) for name, tensor in list(each.items()))


class Float32Block:
    """The ``float32_weights`` blocks of a session, one at a time.

    Attributes:
        wide: id of a 16-bit tensor -> the float32 tensor that replaces it.
        narrow: id of a float32 tensor -> the 16-bit tensor that it replaces.
    """

    def __init__(self, models: Sequence[nn.Module], values: Float32Values) -> None:
        self._values = values
        self._full = values.masters if isinstance(values.masters, FullMasters) else None
        self._split = values.masters if isinstance(values.masters, SplitMasters) else None
        self._places = Places(models)
        self._parameters = values.block_parameters = BlockParameters()
        self.wide: dict[int, torch.Tensor] = {}
        self.narrow: dict[int, torch.Tensor] = {}
        # The masters of the session when the last block began.
        self._masters: list[Master] = []
        # The float32 tensors that are made for blocks, and the 16-bit tensors that they replace.
        self._made: list[torch.Tensor] = []
        self._tensors_of_made: list[torch.Tensor] = []
        # For each place the module's dict, the name, and the tensor outside and inside of blocks.
        self._dicts: list[dict[str, Any]] = []
        self._entries: list[str] = []
        self._outside: list[torch.Tensor] = []
        self._inside: list[torch.Tensor] = []
        self._carried = _Carried([], [])
        self._own = _OwnTensors([], values.masters.data_use)
        # Tensors that the user has replaced inside of the block, and the replacements; places where such a replacement
        # is refused.
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._refused: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        # The work that remains for exit().
        self._is_filled = self._is_carried = self._has_numbers = False

    @torch.no_grad()
    def enter(self) -> None:
        """Put float32 tensors into all modules; after :meth:`Float32Values.apply_writes`."""
        values = self._values
        masters = list(values.masters)
        is_changed = self._places.find() or not are_same(masters, self._masters)
        if is_changed or not self._parameters.are_for(self._tensors_of_made):
            self._arrange(masters)
        if self._full is not None:
            self._full.follow_all(keeps_bits=True)
        self._parameters.fill(self._numbers())
        self._has_numbers = True
        self._own.begin()
        self._carried.carry()
        self._is_carried = self._is_filled = True
        is_replaced = replace_entries(self._dicts, self._entries, self._outside, self._inside)
        assert is_replaced, "find() has just seen these entries"
        for rnn in self._places.rnns:
            rnn._init_flat_weights()

    def _arrange(self, masters: list[Master]) -> None:
        """Find the float32 tensor of each 16-bit one, and make those that are missing."""
        places = self._places
        self._masters = masters
        weights = [master.weight for master in masters]
        tensors: dict[int, torch.Tensor] = dict(zip(map(id, weights), weights, strict=True)) | places.tensors
        self.wide = {id(m.weight): m.parameter for m in masters} if self._full is not None else {}
        # Weights with split masters are the first ones, because tensors begins with the weights.
        self._tensors_of_made = [
            tensor for key, tensor in tensors.items() if key not in self.wide and is_16_bit(tensor)
        ]
        self._made = self._parameters.arrange(self._tensors_of_made)
        self.wide.update(zip(map(id, self._tensors_of_made), self._made, strict=True))
        self.narrow = {id(wide): tensors[key] for key, wide in self.wide.items()}
        self._parameters.narrow = self.narrow
        found = [place for place in places.found if id(place[2]) in self.wide]
        self._dicts = [each for each, _, _ in found]
        self._entries = [name for _, name, _ in found]
        self._outside = [tensor for _, _, tensor in found]
        self._inside = [self.wide[id(tensor)] for tensor in self._outside]
        own = [tensors[key] for key in self.wide]
        self._carried = _Carried(own, list(self.wide.values()))
        self._own = _OwnTensors(own, self._values.masters.data_use)

    def _numbers(self) -> list[torch.Tensor]:
        """Return float32 values, in memory of their own, of all tensors that need a float32 tensor of their own."""
        found: list[torch.Tensor] = []
        if self._split is not None:
            found = self._split.all_values(self._masters)
        for tensor in self._tensors_of_made[len(found) :]:
            values = self._values.of(tensor)
            found.append((tensor if values is None else values).detach().to(torch.float32, copy=True))
        return found

    def replace(self) -> dict[int, torch.Tensor]:
        """Put the 16-bit tensors back into the modules, wherever their float32 ones are now.

        A tensor that the user has put into all places of a 16-bit one replaces that one, and its values count. If it
        has another shape, or is not floating, it stays in the module.

        Returns:
            The id of each tensor to replace outside of the modules, too -> the 16-bit tensor. May be called again.
        """
        if not self._is_filled:
            return self.narrow
        are_back = replace_entries(self._dicts, self._entries, self._inside, self._outside)
        if are_back and self._places.are_as_found():
            self._is_filled = False
            return self.narrow
        self._find_replaced()
        others = self.narrow | {id(present): tensor for tensor, present in self._replaced}
        known = zip(self._dicts, self._entries, map(dict.get, self._dicts, self._entries), strict=True)
        for each, name, present in (*self._places.present(), *known):
            if id(present) in others:
                each[name] = others[id(present)]
        for each, name, tensor in self._refused:
            each[name] = tensor
        self._is_filled = False
        return others

    def _find_replaced(self) -> None:
        """Find the 16-bit tensors that the user has replaced inside the block, and the replacements."""
        present = {id(tensor) for _, _, tensor in self._places.present()}
        self._replaced, self._refused = [], []
        seen: set[int] = set()
        for each, name, tensor in zip(self._dicts, self._entries, self._outside, strict=True):
            new = each.get(name)
            if id(new) in seen or id(new) in self.narrow or id(new) in self.wide or not _fits(new, tensor):
                continue
            if id(tensor) in seen or not present.isdisjoint((id(tensor), id(self.wide[id(tensor)]))):
                self._refused.append((each, name, tensor))
            else:
                self._replaced.append((tensor, cast(torch.Tensor, new)))
                seen.update((id(tensor), id(new)))

    @torch.no_grad()
    def exit(self) -> None:
        """Put the 16-bit tensors back, with all changes of the float32 ones. May be called again.

        Raises:
            RuntimeError: a parameter was replaced in some of its places, or got another shape, or one of the model's
                own parameters was written to; everything else was applied.
        """
        self.replace()
        written = self._own.written() if self._has_numbers else []
        numbers = [self.wide[id(tensor)].detach().clone() for tensor in written]
        replaced, self._replaced = self._replaced, []
        # All are read before one is written to, because a replacement may share its memory with another parameter.
        values = [present.detach().to(torch.float32, copy=True) for _, present in replaced]
        for (tensor, _), new in zip(replaced, values, strict=True):
            self.wide[id(tensor)].copy_(new)
        if self._is_carried:
            self._is_carried = False
            self._carried.bring_back(replaced)
        if self._full is not None:
            self._full.round_all()
        reshaped: list[tuple[torch.Tensor, torch.Size]] = []
        if self._has_numbers:
            for index in self._written():
                tensor, now = self._tensors_of_made[index], self._made[index].detach()
                if tensor.shape != now.shape:
                    reshaped.append((tensor, now.shape))
                    continue
                tensor.copy_(now)
                self._values.load(tensor, now)
            self._has_numbers = False
            self._parameters.empty()
        for rnn in self._places.rnns:
            rnn._init_flat_weights()
        refused, self._refused = self._refused, []
        if reshaped:
            tensor, shape = reshaped[0]
            name = self._values.masters.names.of(tensor)
            raise RuntimeError(_RESHAPED.format(name, tuple(shape), tuple(tensor.shape)))
        if refused:
            raise RuntimeError(_UNTIED.format(self._values.masters.names.of(refused[0][2])))
        if written:
            for tensor, now in zip(written, numbers, strict=True):
                if tensor.shape == now.shape:
                    tensor.copy_(now)
                    self._values.load(tensor, now)
            raise RuntimeError(_WRITTEN_OUTSIDE.format(self._values.masters.names.of(written[0])))

    def _written(self) -> list[int]:
        """Return the indices of tensors whose float32 ones have other values; with one device sync per device."""
        found: list[int] = []
        norms: dict[torch.device, list[tuple[list[int], torch.Tensor]]] = {}
        for indices in self._groups_to_compare(0):
            now = [self._made[index].detach() for index in indices]
            before = self._present_values([self._tensors_of_made[index] for index in indices])
            if len(indices) == 1 or reads_without_sync(now[0].device):
                compared = zip(indices, now, before, strict=True)
                found += [index for index, ours, theirs in compared if not torch.equal(ours, theirs.to(ours))]
            else:
                # The difference of two nans is not 0, so they count as changed.
                norm = torch.stack(torch._foreach_norm(torch._foreach_sub(now, before), math.inf))
                norms.setdefault(now[0].device, []).append((indices, norm))
        for several in norms.values():
            places = [index for indices, _ in several for index in indices]
            differences = torch.cat([norm for _, norm in several]).tolist()
            found += [index for index, difference in zip(places, differences, strict=True) if difference != 0]
        return found

    def _present_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the float32 values of several 16-bit tensors, or float32 copies of their own numbers."""
        known: dict[int, torch.Tensor] = {}
        if self._split is not None:
            masters = [master for master in map(self._split.of, tensors) if master is not None]
            known = dict(zip((id(m.weight) for m in masters), self._split.all_values(masters), strict=True))
        found = [known[id(tensor)] if id(tensor) in known else self._values.of(tensor) for tensor in tensors]
        return [tensor.detach().float() if own is None else own for tensor, own in zip(tensors, found, strict=True)]

    def _groups_to_compare(self, begin: int) -> list[list[int]]:
        """Return the indices of tensors from ``begin`` on, in groups that are compared together."""
        tensors, made = self._tensors_of_made[begin:], self._made[begin:]
        are_usual = [
            wide.dtype is torch.float32 and wide.shape == tensor.shape and not is_sharded(wide)
            for tensor, wide in zip(tensors, made, strict=True)
        ]
        return [[begin + index for index in indices] for indices in in_pieces(tensors, are_usual)]


class _OwnTensors:
    """The 16-bit tensors of the models, which a block has replaced: a write to one of them inside is an error."""

    def __init__(self, tensors: Sequence[torch.Tensor], use: DataUse) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._use = use
        self._are_sharded = any(map(is_sharded, tensors))
        self._versions: list[int] = []
        self._touched: set[int] = set()
        use.watch_all(tensor for tensor in self._tensors if isinstance(tensor, nn.Parameter))

    def begin(self) -> None:
        """Record the tensors' versions, and the numbers of those that may be written to without a new version."""
        self._versions = versions_of(self._counted())
        self._touched = set(self._use.touched)
        for tensor in self._tensors if self._touched else ():
            if id(tensor) in self._touched:
                self._use.keep(tensor)

    def written(self) -> list[torch.Tensor]:
        """List the tensors that were written to, or got other memory, since :meth:`begin`."""
        now = changed_versions(self._counted(), self._versions)
        if now is None and not (self._use.touched or self._use.replaced):
            return []
        before = self._versions if now is None else now
        pairs = zip(self._tensors, self._versions, before, strict=True)
        return [tensor for tensor, was, version in pairs if version != was or self._has_other_data(tensor)]

    def _has_other_data(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._use.replaced:
            return True
        before = self._use.kept.get(id(tensor))
        # On an accelerator a comparison is a device sync: only for data that was used inside of this block.
        if before is None or (id(tensor) in self._touched and not reads_without_sync(before.device)):
            return False
        return not have_same_bits(shard(tensor), before)

    def _counted(self) -> list[Any]:
        return list(map(shard, self._tensors)) if self._are_sharded else self._tensors


def _fits(present: Any, tensor: torch.Tensor) -> bool:
    return isinstance(present, torch.Tensor) and present.shape == tensor.shape and present.is_floating_point()


_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_ATTRIBUTES: Final = attrgetter("__dict__")
# Attributes in which torch keeps a parameter's hooks.
_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF: Final = tuple(map(attrgetter, _HOOKS))


class _Carried:
    """The attributes that a block copies from 16-bit parameters to the float32 ones, and back at its end.

    These are ``requires_grad``, ``grad``, hooks, and attributes of the user's. Both parameters share their dicts of
    hooks: a hook that is registered inside stays after the block, and its handle removes it. Hooks and attributes that
    a master has of its own are removed for the block, and restored after it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> None:
        pairs = [(t, w) for t, w in zip(tensors, wide, strict=True) if isinstance(t, nn.Parameter)]
        self._tensors: list[Any] = [tensor for tensor, _ in pairs]
        self._wide: list[Any] = [each for _, each in pairs]
        self._nothing: list[Any] = [None] * len(pairs)
        # True if gradients are all that the present block carries, the usual case.
        self._is_bare = False
        self._required: list[bool] = []
        self._attributes: dict[int, dict[str, Any]] = {}
        self._hooks: list[list[Any]] = []
        self._own_attributes: dict[int, dict[str, Any]] = {}
        self._own_hooks: list[list[Any]] = []
        self._gradients: list[torch.Tensor | None] = []
        self._copies: dict[int, int] = {}
        self._reset()

    def _reset(self) -> None:
        """Drop what was copied."""
        self._required = [True] * len(self._wide)
        self._attributes, self._hooks = {}, [self._nothing for _ in _HOOKS]
        self._own_attributes, self._own_hooks = {}, [self._nothing for _ in _HOOKS]
        self._gradients, self._copies = list(self._nothing), {}

    def carry(self) -> None:
        """Copy the attributes to the float32 parameters, at the beginning of a block."""
        self._carry_attributes()
        theirs = grads_of(self._tensors)
        if not are_same(theirs, self._nothing):
            self._gradients = [None if gradient is None else gradient.float() for gradient in theirs]
            copies = enumerate(zip(self._gradients, theirs, strict=True))
            # Versions of the gradients that are float32 copies, to find writes to them.
            self._copies = {i: mine._version for i, (mine, its) in copies if mine is not None and mine is not its}
        if changed_grads(self._wide, self._gradients) is not None:
            set_grads(self._wide, self._gradients)

    def _carry_attributes(self) -> None:
        self._required = list(map(_REQUIRES_GRAD, self._tensors))
        if list(map(_REQUIRES_GRAD, self._wide)) != self._required:
            for each, required in zip(self._wide, self._required, strict=True):
                each.requires_grad_(required)
        for index, own in enumerate(map(_ATTRIBUTES, self._wide)):
            if own:
                self._own_attributes[index] = dict(own)
                own.clear()
        self._own_hooks = [list(map(hooks_of, self._wide)) for hooks_of in _HOOKS_OF]
        attributes = list(map(_ATTRIBUTES, self._tensors))
        self._attributes = {i: dict(own) for i, own in enumerate(attributes) if own} if any(attributes) else {}
        for index, own in self._attributes.items():
            vars(self._wide[index]).update(own)
        self._hooks = [list(map(hooks_of, self._tensors)) for hooks_of in _HOOKS_OF]
        self._set_hooks(self._hooks)

    def _set_hooks(self, hooks: Sequence[Sequence[Any]]) -> None:
        for name, hooks_of, wanted in zip(_HOOKS, _HOOKS_OF, hooks, strict=True):
            present = list(map(hooks_of, self._wide))
            if not are_same(present, wanted):
                for each, now, want in zip(self._wide, present, wanted, strict=True):
                    if now is not want:
                        setattr(each, name, want)

    def bring_back(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the attributes back from the float32 parameters, or from those that the user has put in their places."""
        sources = self._wide
        if replaced:
            others = {id(tensor): present for tensor, present in replaced}
            pairs = zip(self._tensors, self._wide, strict=True)
            sources = [others.get(id(tensor), each) for tensor, each in pairs]
        self._bring_all_attributes_back(sources)
        self._bring_gradients_back(sources)
        if changed_grads(self._wide, self._nothing) is not None:
            set_grads(self._wide, self._nothing)
        # Nothing is kept alive between blocks.
        self._reset()

    def _bring_all_attributes_back(self, sources: list[Any]) -> None:
        required = list(map(_REQUIRES_GRAD, sources))
        if required != self._required:
            for tensor, want, before in zip(self._tensors, required, self._required, strict=True):
                if want is not before:
                    tensor.requires_grad_(want)
        attributes = list(map(_ATTRIBUTES, self._wide))
        if self._attributes or any(attributes):
            for index, own in enumerate(attributes):
                if own or index in self._attributes:
                    self._bring_attributes_back(index, own)
        for index, own in self._own_attributes.items():
            vars(self._wide[index]).update(own)
        for name, hooks_of, known in zip(_HOOKS, _HOOKS_OF, self._hooks, strict=True):
            hooks = list(map(hooks_of, self._wide))
            if not are_same(hooks, known):
                for tensor, now, was in zip(self._tensors, hooks, known, strict=True):
                    if now is not was:
                        setattr(tensor, name, now)
        self._set_hooks(self._own_hooks)

    def _bring_attributes_back(self, index: int, own: Any) -> None:
        before = self._attributes.get(index, {})
        if list(own) != list(before) or not are_same(list(own.values()), list(before.values())):
            target = vars(self._tensors[index])
            target.clear()
            target.update(own)
        own.clear()

    def _bring_gradients_back(self, sources: list[Any]) -> None:
        now = changed_grads(sources, self._gradients)
        if now is None and not self._copies:
            return
        for index, gradient in enumerate(self._gradients if now is None else now):
            tensor, before = self._tensors[index], self._gradients[index]
            version = self._copies.get(index)
            is_written = version is not None and gradient is not None and gradient._version != version
            if gradient is not before or is_written:
                tensor.grad = None if gradient is None else gradient.to(tensor.grad_dtype or tensor.dtype)
