"""A ``float32_weights`` block: float32 parameters and buffers in the places of a session's 16-bit ones, for a while.

A block is about values. What else users may do to a parameter (gradients, hooks, ``requires_grad``, a replacement)
would be lost with it, so it is refused at the end.

What is exchanged is listed once, and kept for the next block: an average of the weights makes a block in each step.
"""

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn

from ..basics.bulk import Tables, are_same, data_ptrs, have_grads
from ..basics.modules import modules_of, share_attributes
from ..distributed.sharding import local, set_data
from ..masters.full import FullMaster, FullMasters
from ..masters.masters import MasterBatch
from ..torch_internals.parameter_data import TENSOR_DATA, versions_of
from .casting import Casts
from .shared_memory import is_16_bit

_IN_LOSS: Final = (
    "backward() has reached a float32 parameter that was in the model inside `with mpinit.float32_weights(...)`: its "
    "gradient would be lost. Compute the loss and call backward() before or after the with-block; to evaluate, use "
    "torch.no_grad()"
)
_CHANGED: Final = (
    "the parameter {!r} {} inside `with mpinit.float32_weights(...)`, which is about values: {}. The numbers were "
    "rounded into the model's own parameters where they have the same shapes, and the change was dropped. Do that "
    "before or after the with-block"
)
_WAYS: Final = {
    "was itself written to": "in the block the model has another one, whose numbers count; read that one",
    "was replaced": "copy the numbers into it instead, with copy_()",
    "was removed": "add parametrizations and the like outside of the block",
    "was put into another place": "tie weights outside of the block",
    "has a gradient": "gradients are those of the model's own parameters",
    "has hooks": "hooks are those of the model's own parameters",
    "has another requires_grad": "freeze and unfreeze the model's own parameters",
    "has other memory": "write numbers of the same shape, with copy_()",
}
_DTYPE: Final = attrgetter("dtype")
_SHAPE: Final = attrgetter("shape")
_LAYOUT: Final = attrgetter("shape", "dtype")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_HOOKS: Final = attrgetter("_backward_hooks")
_LATER_HOOKS: Final = attrgetter("_post_accumulate_grad_hooks")
_TABLES: Final = ("_parameters", "_buffers")
_FLOAT32: Final = {torch.float32}

# The parameters or buffers of a module, a name in them, the 16-bit tensor there, and the float32 one of a block.
_Place = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]


class Slots:
    """The places of 16-bit tensors in modules; valid until a module or tensor changes, or a weight gets a master.

    Attributes:
        full: the places of weights with full masters; the float32 tensor is the parameter that optimizers step.
        others: the places of other tensors, which get a new float32 one in each block.
        tensors, wide, shapes: the tensors in ``full``, and their shapes.
        requires_grad: which of them require gradients; empty before the first block.
        narrow: the id of each float32 tensor in ``full`` -> the 16-bit tensor.
        batch: the full masters, which are read and rounded together; ``masters`` are their parameters.
        memory, addresses: the memory of the masters, and its addresses.
        inside: the modules' tables in a block; None before the first, and where there are ``others``.
        have_versions: whether no 16-bit tensor is an inference tensor.
        rnns: the indices of RNNs among the modules.
    """

    def __init__(self, modules: list[nn.Module], casts: Casts) -> None:
        self._modules = list(map(weakref.ref, modules))  # the session has this list, and modules keep their session
        self._outside = Tables(modules, *_TABLES)
        tables: list[dict[str, Any]] = [table for m in modules for table in (m._parameters, m._buffers)]
        self._all = [tensor for table in tables for tensor in table.values() if tensor is not None]
        self._dtypes = list(map(_DTYPE, self._all))
        found = [(table, name, tensor) for table in tables for name, tensor in table.items() if is_16_bit(tensor)]
        of = {id(tensor): casts.masters.of(tensor) for *_, tensor in found}
        full = [master for master in of.values() if isinstance(master, FullMaster)]
        wide = {id(master.weight): master.parameter for master in full}
        self.full: list[_Place] = [(*each, wide[id(each[2])]) for each in found if id(each[2]) in wide]
        self.others = [each for each in found if id(each[2]) not in wide]
        self.tensors, self.wide = [place[2] for place in self.full], [place[3] for place in self.full]
        self.shapes = list(map(_SHAPE, self.tensors))
        self.requires_grad: list[bool] = []
        self.narrow = {id(each): tensor for *_, tensor, each in self.full}
        self.masters = list(wide.values())
        self.batch: MasterBatch | None = None
        if isinstance(casts.masters, FullMasters) and full:
            self.batch = casts.masters.batch(full, full[0].weight.device)
            casts.masters.count_writes()  # users may keep them
            casts.masters.watched.add(self.masters)
        self.memory: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self.inside: Tables | None = None
        self.have_versions = not any(tensor.is_inference() for *_, tensor in found)
        self.rnns = [index for index, module in enumerate(modules) if isinstance(module, nn.RNNBase)]

    def are_current(self, modules: list[nn.Module]) -> bool:
        """Return whether the models have the same modules and tensors, of the same dtypes."""
        return (
            are_same(modules, [module() for module in self._modules])
            and self._outside.are_as_seen(modules)
            and list(map(_DTYPE, self._all)) == self._dtypes
        )


class Float32Block:
    """One ``float32_weights`` block of a session."""

    def __init__(self, models: Sequence[nn.Module], casts: Casts) -> None:
        self._models = models
        self._casts = casts
        self._slots: Slots | None = None
        # As they are at the beginning: the modules, and their tables; what was exchanged; the versions of the 16-bit
        # tensors, which of them require gradients, and shapes.
        self._modules: list[nn.Module] = []
        self._inside: Tables | None = None
        self._places: list[_Place] = []
        self._tensors: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._requires_grad: list[bool] = []
        self._shapes: list[torch.Size] = []

    @torch.no_grad()
    def enter(self) -> None:
        """Put float32 tensors into all modules."""
        modules, masters = modules_of(*self._models), self._casts.masters
        slots: Slots | None = masters.kept_slots
        if slots is None or not slots.are_current(modules):
            slots = masters.kept_slots = Slots(modules, self._casts)
        if slots.batch is not None:
            slots.batch.read()
            if data_ptrs(slots.masters) != slots.addresses:  # new, or the model was moved to another device
                slots.memory = list(map(TENSOR_DATA.__get__, slots.masters))
                slots.addresses = data_ptrs(slots.memory)
        made: dict[int, torch.Tensor] = {}
        for *_, tensor in slots.others:
            if id(tensor) not in made:
                made[id(tensor)] = self._widened(tensor)
        others = [(table, name, tensor, made[id(tensor)]) for table, name, tensor in slots.others]
        tensors = slots.tensors + [place[2] for place in others]
        wide = slots.wide + [place[3] for place in others]
        self._shapes = slots.shapes + [place[2].shape for place in others]
        self._requires_grad = list(map(_REQUIRES_GRAD, tensors))
        if others or self._requires_grad != slots.requires_grad:
            for tensor, each in zip(tensors, wide, strict=True):
                each.requires_grad_(tensor.requires_grad)
                if tensor.requires_grad and not each._backward_hooks:
                    each.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
            slots.requires_grad = self._requires_grad
        self._versions = versions_of(tensors) if slots.have_versions else []
        self._modules, self._places, self._tensors, self._wide = modules, [*slots.full, *others], tensors, wide
        self._slots, self._casts.narrow = slots, slots.narrow | {id(each): tensor for *_, tensor, each in others}
        for table, name, _, each in self._places:
            table[name] = each
        self._inside = slots.inside or Tables(modules, *_TABLES)
        slots.inside = None if others else self._inside
        _rebuild_rnns([modules[index] for index in slots.rnns])

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self._casts.values_of(tensor)
        # Memory of its own: the values of a buffer may be the user's tensor.
        wide = (tensor if values is None else values).detach().to(torch.float32, copy=True)
        wide = nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide
        share_attributes(tensor, wide)
        return wide

    @torch.no_grad()
    def exit(self) -> None:
        """Put the 16-bit tensors back, with the float32 ones' values.

        Raises:
            RuntimeError: a parameter has changed in something else than its values; the others are as they should be.
        """
        slots, places, modules = self._slots, self._places, self._modules
        if slots is None:
            return
        faults: dict[int, tuple[torch.Tensor, str]] = {}
        replaced: dict[int, torch.Tensor] = {}
        rnns = [modules[index] for index in slots.rnns]
        if not self._has_only_values(slots):
            self._casts.masters.kept_slots = None
            rnns = modules = modules_of(*self._models)
            self._find_faults(modules, faults, replaced)
        for table, name, tensor, _ in places:
            if name in table:
                table[name] = tensor
        back: set[int] = set()
        for *_, tensor, wide in places[len(slots.full) :]:
            if id(tensor) not in back:
                back.add(id(tensor))
                self._bring_back(tensor, wide, replaced.get(id(wide), wide))
        if slots.batch is not None:
            if faults or data_ptrs(slots.masters) != slots.addresses:
                for parameter, memory in zip(slots.masters, slots.memory, strict=True):
                    _put_back(parameter, memory)
            slots.batch.write()
        self._slots, self._casts.narrow = None, {}
        _rebuild_rnns(rnns)
        if faults:
            tensor, fault = next(iter(faults.values()))
            raise RuntimeError(_CHANGED.format(self._casts.masters.names.of(tensor), fault, _WAYS[fault]))

    def _has_only_values(self, slots: Slots) -> bool:
        """Return whether nothing can have changed in the block but numbers; looks at all parameters together."""
        tensors, wide, modules, inside = self._tensors, self._wide, self._modules, self._inside
        hooks = chain.from_iterable(map(dict.values, filter(None, map(_HOOKS, wide))))
        return (
            are_same(modules_of(*self._models), modules)
            and inside is not None
            and inside.are_as_seen(modules)
            and (not slots.have_versions or versions_of(tensors) == self._versions)
            and not have_grads(wide)
            and not any(map(_LATER_HOOKS, wide))
            and set(hooks) <= {_refuse_gradient}
            and list(map(_REQUIRES_GRAD, wide)) == self._requires_grad
            and set(map(_DTYPE, wide)) <= _FLOAT32
            and list(map(_SHAPE, wide)) == self._shapes
        )

    def _find_faults(
        self,
        modules: list[nn.Module],
        faults: dict[int, tuple[torch.Tensor, str]],
        replaced: dict[int, torch.Tensor],
    ) -> None:
        """Name what has changed besides values, of each 16-bit tensor by its id, and reset it.

        A forward may replace a buffer: then ``replaced`` has the new one, by the id of the float32 one.
        """
        places, narrow = self._places, self._casts.narrow
        versions = versions_of(self._tensors) if self._versions else []
        for tensor, before, after in zip(self._tensors, self._versions, versions, strict=False):
            if before != after:
                faults[id(tensor)] = tensor, "was itself written to"
        for table, name, tensor, wide in places:
            now = table.get(name)
            if now is not wide and now is not tensor and isinstance(now, torch.Tensor):
                if not isinstance(tensor, nn.Parameter) and now.shape == tensor.shape and now.is_floating_point():
                    replaced[id(wide)] = now
                else:
                    faults[id(tensor)] = tensor, "was replaced"
            if name not in table:
                faults[id(tensor)] = tensor, "was removed"
        known = {(id(table), name) for table, name, *_ in places}
        for module in modules:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for own in tables:
                for name, each in own.items():
                    if id(each) in narrow and (id(own), name) not in known:
                        own[name] = tensor = narrow[id(each)]
                        faults[id(tensor)] = tensor, "was put into another place"
        for *_, tensor, wide in places:
            if isinstance(tensor, nn.Parameter) and (fault := _fault(tensor, wide)):
                faults.setdefault(id(tensor), (tensor, fault))

    def _bring_back(self, tensor: torch.Tensor, wide: torch.Tensor, present: torch.Tensor) -> None:
        """Round a float32 tensor into its 16-bit one, and empty it: somebody may keep it."""
        master = self._casts.masters.of(tensor)
        if present.shape != tensor.shape:
            pass  # refused
        elif master is not None:
            self._casts.masters.load(master, present)
        else:
            rounded = present.detach().to(tensor.dtype)
            # A write moves the version, by which others see that a buffer is written to.
            if tensor.is_meta or not torch.equal(local(rounded), local(tensor.detach())):
                tensor.copy_(rounded)
            self._casts.load(tensor, present)
        TENSOR_DATA.__set__(wide, torch.empty(0, dtype=wide.dtype, device=wide.device))


def _put_back(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Put the master's memory back where user code has set ``data``, with its numbers if they have this shape."""
    if parameter.data_ptr() != memory.data_ptr() and parameter.shape == memory.shape:
        memory.copy_(parameter)
    if (parameter.data_ptr(), *_LAYOUT(parameter)) != (memory.data_ptr(), *_LAYOUT(memory)):
        set_data(parameter, memory)


def _fault(tensor: torch.Tensor, wide: Any) -> str:
    """Name what has changed of a float32 parameter besides its values, and reset it; "" if nothing has."""
    found = ""
    if wide.dtype is not torch.float32 or wide.shape != tensor.shape:
        found = "has other memory"
    if wide.grad is not None:
        found, wide.grad = "has a gradient", None
    others = set((wide._backward_hooks or {}).values()) - {_refuse_gradient}
    if others or wide._post_accumulate_grad_hooks:
        found, wide._backward_hooks, wide._post_accumulate_grad_hooks = "has hooks", None, None
    if wide.requires_grad is not tensor.requires_grad:
        found = "has another requires_grad"
        wide.requires_grad_(tensor.requires_grad)
    return found


def _refuse_gradient(_: Any) -> None:
    raise RuntimeError(_IN_LOSS)


def _rebuild_rnns(modules: Sequence[nn.Module]) -> None:
    """Let RNNs read their parameters again, of which they have a second list."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
