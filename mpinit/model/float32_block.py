"""A ``float32_weights`` block: float32 parameters and buffers in the places of a session's 16-bit ones, for a while.

A block is about values. What else users may do to a parameter (gradients, hooks, ``requires_grad``, a replacement)
would be lost with it, so it is refused at the end.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..basics.modules import modules_of
from ..distributed.sharding import local, set_data
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
    "{} inside `with mpinit.float32_weights(...)`, which is about values: {}. The numbers were rounded into the "
    "model's own parameters where they have the same shapes, and the change was dropped. Do that before or after the "
    "with-block"
)


class Float32Block:
    """One ``float32_weights`` block of a session."""

    def __init__(self, models: Sequence[nn.Module], casts: Casts) -> None:
        self._models = models
        self._casts = casts
        # The parameters or buffers of a module, the name in them, the 16-bit tensor and the float32 one.
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        # The versions of the 16-bit tensors at the beginning.
        self._versions: list[int] = []
        # The full masters in the modules, and their memory.
        self._full: list[tuple[FullMaster, torch.Tensor]] = []
        # The ends of autograd's graphs: a graph that is made inside refers to these, and not to others.
        self._nodes: list[Any] = []

    def _modules(self) -> list[nn.Module]:
        return list({module: None for model in self._models for module in modules_of(model)})

    @torch.no_grad()
    def enter(self) -> None:
        """Put float32 tensors into all modules."""
        modules, masters = self._modules(), self._casts.masters
        tables: list[dict[str, Any]] = [table for m in modules for table in (m._parameters, m._buffers)]
        found = [(table, name, tensor) for table in tables for name, tensor in table.items() if is_16_bit(tensor)]
        full = [m for m in (masters.of(tensor) for *_, tensor in found) if isinstance(m, FullMaster)]
        if isinstance(masters, FullMasters):
            masters.follow(full)
            masters.count_writes(full)  # users may keep them
            masters.watch([master.parameter for master in full])
        self._full = [(m, TENSOR_DATA.__get__(m.parameter)) for m in {id(m): m for m in full}.values()]
        wide: dict[int, torch.Tensor] = {}
        for *_, tensor in found:
            if id(tensor) not in wide:
                wide[id(tensor)] = self._widened(tensor)
        slots = [(table, name, tensor, wide[id(tensor)]) for table, name, tensor in found]
        self._versions = _versions([tensor for *_, tensor in found])
        self._casts.narrow = {id(each): tensor for *_, tensor, each in slots}
        self._refuse_gradients([each for *_, each in slots])
        self._slots = slots
        for table, name, _, each in slots:
            table[name] = each
        _rebuild_rnns(modules)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        master = self._casts.masters.of(tensor)
        if isinstance(master, FullMaster):
            return master.parameter.requires_grad_(tensor.requires_grad)
        values = self._casts.values_of(tensor)
        # Memory of its own: the values of a buffer may be the user's tensor.
        wide = (tensor if values is None else values).detach().to(torch.float32, copy=True)
        return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide

    def _refuse_gradients(self, wide: Sequence[torch.Tensor]) -> None:
        with torch.enable_grad():
            self._nodes = [get_gradient_edge(each).node for each in wide if each.requires_grad and each.is_leaf]
        for node in self._nodes:
            node.register_prehook(_refuse_gradient)

    @torch.no_grad()
    def exit(self) -> None:
        """Put the 16-bit tensors back, with the float32 ones' values.

        Raises:
            RuntimeError: a parameter has changed in something else than its values; the others are as they should be.
        """
        slots, self._slots, self._nodes = self._slots, [], []
        names, faults = self._casts.masters.names, dict[int, tuple[torch.Tensor, str]]()
        present = {id(wide): wide for *_, wide in slots}
        versions = _versions([tensor for *_, tensor, _ in slots])
        for tensor in [slot[2] for slot, was, now in zip(slots, self._versions, versions, strict=False) if was != now]:
            faults[id(tensor)] = tensor, "was itself written to"
        for table, name, tensor, wide in slots:
            now = table.get(name)
            if now is not wide and now is not tensor and isinstance(now, torch.Tensor):
                if not isinstance(tensor, nn.Parameter) and now.shape == tensor.shape and now.is_floating_point():
                    present[id(wide)] = now  # a forward may replace a buffer
                else:
                    faults[id(tensor)] = tensor, "was replaced"
            if name in table:
                table[name] = tensor
            else:
                faults[id(tensor)] = tensor, "was removed"
        modules, narrow, self._casts.narrow = self._modules(), self._casts.narrow, {}
        for module in modules:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for own in tables:
                for name, each in own.items():
                    if id(each) in narrow:
                        own[name] = tensor = narrow[id(each)]
                        faults[id(tensor)] = tensor, "was put into another place"
        for tensor, wide in {id(tensor): (tensor, wide) for *_, tensor, wide in slots}.values():
            if isinstance(tensor, nn.Parameter) and (fault := _fault(tensor, wide)):
                faults.setdefault(id(tensor), (tensor, fault))
            if not isinstance(self._casts.masters.of(tensor), FullMaster):
                self._bring_back(tensor, wide, present[id(wide)])
        self._round_masters()
        _rebuild_rnns(modules)
        if faults:
            tensor, fault = next(iter(faults.values()))
            raise RuntimeError(_CHANGED.format(f"the parameter {names.of(tensor)!r} {fault}", _WAYS[fault]))

    def _round_masters(self) -> None:
        for master, memory in self._full:
            # The user's code has replaced the data, by numbers that are its own.
            if master.parameter.data_ptr() != memory.data_ptr():
                if master.parameter.shape == memory.shape:
                    memory.copy_(master.parameter)
                set_data(master.parameter, memory)
        masters, self._full = [master for master, _ in self._full], []
        if masters:
            self._casts.masters.batch(masters, masters[0].weight.device).write()

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


def _fault(tensor: torch.Tensor, wide: Any) -> str:
    """Name what has changed of a float32 parameter besides its values, and reset it; "" if nothing has."""
    found = ""
    if wide.dtype is not torch.float32 or wide.shape != tensor.shape:
        found = "has other memory"
    if wide.grad is not None:
        found, wide.grad = "has a gradient", None
    if wide._backward_hooks or wide._post_accumulate_grad_hooks:
        found, wide._backward_hooks, wide._post_accumulate_grad_hooks = "has hooks", None, None
    if wide.requires_grad is not tensor.requires_grad:
        found = "has another requires_grad"
        wide.requires_grad_(tensor.requires_grad)
    return found


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the tensors' versions; 0 for inference tensors, which have none."""
    if not any([each.is_inference() for each in tensors]):  # noqa: C419 (a generator costs more)
        return versions_of(tensors)
    return [0 if each.is_inference() else versions_of([each])[0] for each in tensors]


def _refuse_gradient(_: Any) -> None:
    raise RuntimeError(_IN_LOSS)


def _rebuild_rnns(modules: Sequence[nn.Module]) -> None:
    """Let RNNs read their parameters again, of which they have a second list."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
