"""A ``float32_weights`` block: float32 parameters and buffers in the places of a session's 16-bit ones, for a while.

A block is about values. What else users may do to a parameter (gradients, hooks, ``requires_grad``, a replacement)
would be lost with it, so it is refused at the end.

The places are listed once, and kept for the next block: an average of the weights makes a block in each step.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..basics.bulk import Tables, are_same, data_ptrs
from ..basics.modules import modules_of, share_attributes
from ..distributed.sharding import is_sharded, local, rebuild_groups, set_all_local_data, set_data, sharded_as
from ..masters.full import FullMaster, FullMasters
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
_STATE: Final = attrgetter("dtype", "shape", "requires_grad", "grad", "_post_accumulate_grad_hooks")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_HOOKS: Final = attrgetter("_backward_hooks")


class _Place(NamedTuple):
    """A module's parameters or buffers, a name in them, the 16-bit tensor there, and the float32 one of a block."""

    table: dict[str, Any]
    name: str
    narrow: torch.Tensor
    wide: torch.Tensor


class Float32Block:
    """The places of 16-bit tensors in modules, and float32 tensors that are there while a block runs.

    It serves one block after another, until a module or tensor changes, or a weight gets or loses its master. The
    float32 tensor of a weight with a full master is the parameter that optimizers step. Others are empty outside of
    blocks: somebody may keep them.
    """

    def __init__(self, models: Sequence[nn.Module], casts: Casts) -> None:
        modules = modules_of(*models)
        self._modules = list(map(weakref.ref, modules))  # the session has this object, and modules keep their session
        self._rnns = [weakref.ref(module) for module in modules if isinstance(module, nn.RNNBase)]
        self._outside = Tables(modules, "_parameters", "_buffers")
        self._places: list[_Place] = []
        full: list[FullMaster] = []
        wide: dict[int, torch.Tensor] = {}
        for module in modules:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for own in tables:
                for name, tensor in own.items():
                    if not is_16_bit(tensor):
                        continue
                    if id(tensor) not in wide:
                        master = casts.masters.of(tensor)
                        full += [master] if isinstance(master, FullMaster) else []
                        wide[id(tensor)] = master.parameter if isinstance(master, FullMaster) else _empty_like(tensor)
                    self._places.append(_Place(own, name, tensor, wide[id(tensor)]))
        # Each 16-bit tensor once, those with full masters first; and their float32 ones.
        self._full = [master.parameter for master in full]
        with_master = {id(master.weight) for master in full}
        others = {id(place.narrow): place.narrow for place in self._places if id(place.narrow) not in with_master}
        self._tensors = [*(master.weight for master in full), *others.values()]
        self._wide = [wide[id(tensor)] for tensor in self._tensors]
        self._are_sharded = any(map(is_sharded, self._tensors))
        self._narrow = {id(each): tensor for each, tensor in zip(self._wide, self._tensors, strict=True)}
        self._batch = None
        if isinstance(casts.masters, FullMasters) and full:
            self._batch = casts.masters.batch(full, full[0].weight.device)
            casts.masters.count_writes()  # users may keep them
            casts.masters.watched.add(self._full)
        # Which 16-bit tensors required gradients in the last block.
        self._require_grad: list[bool] = []
        # While a block runs: the memory of full masters, the versions of 16-bit tensors, what float32 ones have.
        self._memory: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._states: list[Any] = []

    def is_current(self, models: Sequence[nn.Module]) -> bool:
        """Return whether the models have the same modules and tensors, of the same dtypes."""
        modules = modules_of(*models)
        return are_same(modules, [module() for module in self._modules]) and self._outside.are_as_seen(modules)

    @torch.no_grad()
    def enter(self, casts: Casts) -> None:
        """Put float32 tensors into all modules."""
        if self._batch is not None:
            self._batch.read()
        for tensor, wide in self._others():
            values = casts.values_of(tensor)
            # Memory of its own: the values of a buffer may be the user's tensor.
            values = (tensor if values is None else values).detach().to(torch.float32, copy=True)
            set_data(wide, values)
        require_grad = list(map(_REQUIRES_GRAD, self._tensors))
        if require_grad != self._require_grad:
            self._require_grad = require_grad
            for wide, requires_grad in zip(self._wide, require_grad, strict=True):
                wide.requires_grad_(requires_grad)
                if requires_grad and not wide._backward_hooks:
                    wide.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        self._memory = list(map(TENSOR_DATA.__get__, self._full))
        self._versions, self._states = versions_of(self._tensors), list(map(_STATE, self._wide))
        casts.narrow = self._narrow
        for table, name, _, wide in self._places:
            table[name] = wide
        _rebuild_rnns(self._rnns)

    def _others(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """List the 16-bit tensors without full masters, with their float32 ones."""
        first = len(self._full)
        return list(zip(self._tensors[first:], self._wide[first:], strict=True))

    @torch.no_grad()
    def exit(self, models: Sequence[nn.Module], casts: Casts) -> None:
        """Put the 16-bit tensors back, with the float32 ones' values.

        Raises:
            RuntimeError: a parameter has changed in something else than its values; the others are as they should be.
        """
        if not casts.narrow:
            return
        casts.narrow = {}
        modules = modules_of(*models)
        faults: dict[int, tuple[torch.Tensor, str]] = {}
        replaced = self._put_back(modules, faults)
        versions, hooks = versions_of(self._tensors), filter(None, map(_HOOKS, self._wide))
        # Together, in loops of C: an average of the weights makes a block in each step.
        if versions != self._versions or list(map(_STATE, self._wide)) != self._states or set(map(len, hooks)) - {1}:
            pairs = zip(self._tensors, self._wide, strict=True)
            for (tensor, wide), before, after in zip(pairs, self._versions, versions, strict=True):
                fault = _fault(tensor, wide) if isinstance(tensor, nn.Parameter) else ""
                if fault or before != after:
                    faults.setdefault(id(tensor), (tensor, fault or "was itself written to"))
        if faults or data_ptrs(self._full) != data_ptrs(self._memory):
            for wide, memory in zip(self._full, self._memory, strict=True):
                _restore_memory(wide, memory)
        self._memory = []
        if self._batch is not None:
            self._batch.write()
        for tensor, wide in self._others():
            _round(replaced.get(id(wide), wide), tensor, casts)
            set_all_local_data([wide], [torch.empty(0, dtype=wide.dtype, device=wide.device)], are_sharded=True)
        _rebuild_rnns(self._rnns)
        if self._are_sharded:
            rebuild_groups(modules, self._narrow)  # load_state_dict in the block let FSDP read float32 parameters
        if faults:
            casts.masters.kept_slots = None
            tensor, fault = next(iter(faults.values()))
            raise RuntimeError(_CHANGED.format(casts.masters.names.of(tensor), fault, _WAYS[fault]))

    def _put_back(
        self,
        modules: list[nn.Module],
        faults: dict[int, tuple[torch.Tensor, str]],
    ) -> dict[int, torch.Tensor]:
        """Put the 16-bit tensors into their places, and wherever else a float32 one is by now, which is a fault.

        Returns:
            The buffers that a forward has put in the places of float32 ones, by the ids of these.
        """
        replaced: dict[int, torch.Tensor] = {}
        for table, name, tensor, wide in self._places:
            now = table.get(name)
            if name not in table:
                faults[id(tensor)] = tensor, "was removed"
                continue
            table[name] = tensor
            if now is wide or now is tensor or not isinstance(now, torch.Tensor):
                continue
            if not isinstance(tensor, nn.Parameter) and now.shape == tensor.shape and now.is_floating_point():
                replaced[id(wide)] = now
            else:
                faults[id(tensor)] = tensor, "was replaced"
        for module in modules:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for table in tables:
                for name, each in table.items():
                    if id(each) in self._narrow:
                        table[name] = tensor = self._narrow[id(each)]
                        faults[id(tensor)] = tensor, "was put into another place"
        return replaced


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Make an empty float32 tensor for the place of a 16-bit one: a parameter for a parameter, a shard for a shard."""
    empty = sharded_as(torch.empty(0, dtype=torch.float32, device=tensor.device), tensor)
    empty = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    share_attributes(tensor, empty)
    return empty


def _round(values: torch.Tensor, tensor: torch.Tensor, casts: Casts) -> None:
    """Round float32 values into a 16-bit tensor, and keep them where it is a buffer, or has a split master."""
    if values.shape != tensor.shape:
        return  # refused
    if casts.masters.of(tensor) is None:
        rounded = values.detach().to(tensor.dtype)
        # A write moves the version, by which others see that a buffer is written to.
        if tensor.is_meta or not torch.equal(local(rounded), local(tensor.detach())):
            tensor.copy_(rounded)
    casts.load(tensor, values)


def _restore_memory(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Put the master's memory back where user code has set ``data``, with its numbers if they have this shape."""
    is_other = parameter.data_ptr() != memory.data_ptr()
    if is_other and parameter.shape == memory.shape:
        memory.copy_(parameter)
    if is_other or parameter.shape != memory.shape or parameter.dtype != memory.dtype:
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


def _rebuild_rnns(rnns: Sequence[weakref.ref[nn.RNNBase]]) -> None:
    """Let RNNs read their parameters again, of which they have a second list."""
    for known in rnns:
        rnn = known()
        if rnn is not None:
            rnn._init_flat_weights()
