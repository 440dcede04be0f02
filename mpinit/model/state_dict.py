"""State dicts of initialised models: float32 at every level, the masters' bits where there are masters."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ..basics.dtypes import LOWER_PRECISION, is_lower_precision
from ..basics.logs import warn_user
from ..basics.modules import modules_of, own_tensors
from ..basics.patching import for_each
from ..basics.tables import counted
from ..basics.weak_set import WeakIdSet
from ..distributed.sharding import is_sharded
from . import copies
from .float32_values import Float32Values
from .forward_weights import STANDING, parameter_of
from .shared_memory import is_16_bit, same_view, storage_of


class Float32State:
    """State-dict hooks: what leaves a model is float32 (the masters' bits where there are masters), at every level.

    Every module has them, so that a part's state dict is float32 as well, and every module that becomes a part of one
    later. With ``keep_vars=True`` the caller wants the parameters themselves, which are what they are.
    """

    def __init__(self, values: Float32Values, has_float32_weights: bool) -> None:
        self._values: Float32Values | None = values
        self._has_float32_weights = has_float32_weights
        # The dict that the state dict at hand is put into, and the entries made for it by the id of their tensor.
        self._destination: weakref.ref[Any] | None = None
        self._made: dict[int, torch.Tensor] = {}
        self._modules: WeakIdSet[nn.Module] = WeakIdSet()
        self._newcomers: RemovableHandle | None = None
        # Its negative is the other hook's key, which a process's first handle, 0, has not.
        self.key = RemovableHandle(OrderedDict()).id or RemovableHandle(OrderedDict()).id
        self._outermost_load: object = None
        self._arriving: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        self._rebuilt: list[str] = []

    def install(self, models: Sequence[nn.Module], modules: Iterable[nn.Module]) -> None:
        """Hook the models and the modules in them."""
        take_in = functools.partial(_take_in_newcomer, weakref.ref(self), self.key)
        self._newcomers = register_module_module_registration_hook(take_in)
        weakref.finalize(self, self._newcomers.remove).atexit = False
        self._hook(modules)

    def remove(self) -> None:
        """Take the hooks away, however many there are by now."""
        if self._newcomers is not None:
            self._newcomers.remove()
        for_each(self._leave_for_good, list(self._modules))

    def _leave_for_good(self, module: nn.Module) -> None:
        self.leave(module)
        self._modules.discard(module)

    def take_in(self, tree: nn.Module) -> None:
        """Hook a module and everything below it, where it is not hooked yet."""
        self._hook(modules_of(tree))

    def _hook(self, modules: Iterable[nn.Module]) -> None:
        # Straight into the dicts: torch's methods make a handle for each hook, which takes many times as long.
        key = self.key
        export, export_rest, settle = (_as_hook(each) for each in (self.export, self.export_rest, self.settle))
        for module in modules:
            hooks = cast(OrderedDict[int, Any], module._state_dict_hooks)
            if key in hooks:
                continue
            self._modules.add(module)
            # Before the user's own hooks, which then see float32 values as well.
            hooks[-key] = export
            if len(hooks) > 1:
                hooks.move_to_end(-key, last=False)
            hooks[key] = export_rest
            module._load_state_dict_pre_hooks[key] = _as_hook(self.arrive, module)
            module._load_state_dict_post_hooks[key] = settle
            copies.put_on(module, self)

    def leave(self, module: nn.Module) -> None:
        """Take everything off a module again, or off a copy of it."""
        copies.take_off(module, self)
        hooks_on_saving: Any = module._state_dict_hooks
        for hooks in (hooks_on_saving, module._load_state_dict_post_hooks, module._load_state_dict_pre_hooks):
            hooks.pop(self.key, None)
            hooks.pop(-self.key, None)

    def has_masters(self) -> bool:
        """Return whether copies of the model are to be float32: it has masters, or float32 weights."""
        return self._values is not None and (self._has_float32_weights or len(self._values.masters) > 0)

    def apply_writes(self) -> None:
        """Apply what was written through tensors that were handed out."""
        if self._values is not None:
            self._values.apply_writes()

    def float32_values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Read the float32 values of a 16-bit tensor; None where those are its own, or it is not 16-bit."""
        if STANDING and (parameter := parameter_of(tensor)) is not None:
            return parameter.detach()  # saved inside of a forward
        if self._values is None or not is_lower_precision(tensor.dtype):
            return None
        return self._values.of(tensor)

    def _begin(self, state_dict: dict[str, Any]) -> None:
        """Prepare for the first module of a state dict."""
        if self._values is not None:
            self._values.prepare_entries()
        self._destination = _reference(state_dict)
        self._made = {}

    def _entry(self, tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Make a float32 copy of a tensor, one for all of its names, as they share memory in torch's state dict."""
        made = self._made.get(id(tensor))
        if made is None:
            if STANDING and (parameter := parameter_of(tensor)) is not None:
                made = parameter.detach().clone()
            elif self._values is None:
                made = saved.detach().to(torch.float32, copy=True)
            else:
                made = self._values.entry(tensor, saved)
            self._made[id(tensor)] = made
        return made

    def export(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict()`` of one module: replace its own 16-bit entries by float32 ones."""
        if self._destination is None or self._destination() is not state_dict:
            self._begin(state_dict)
        is_in_block = self._values is not None and self._values.masters.are_in_model
        # Without calls for what can be seen here: a state dict of a large model passes some 100,000 tensors.
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                saved = state_dict.get(prefix + name)
                if not isinstance(saved, torch.Tensor) or saved is tensor or tensor is None:
                    continue
                if is_in_block and self._values is not None:
                    self._values.record_block_entry(tensor, saved)
                if saved.dtype in LOWER_PRECISION and _is_alias(saved, tensor):
                    state_dict[prefix + name] = self._entry(tensor, saved)

    def export_rest(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After the outermost ``state_dict()``: the same for what modules or hooks saved in their own way."""
        metadata = getattr(state_dict, "_metadata", None)
        if not metadata or next(iter(metadata.values())) is not local_metadata:
            return
        self.take_in(module)  # ModuleList.insert and Sequential.insert run no hook for newcomers
        left = [
            key
            for key, value in state_dict.items()
            if isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION and key.startswith(prefix)
        ]
        if left:
            tensors = (tensor for part in modules_of(module) for _, tensor in own_tensors(part))
            owners = {storage_of(tensor): tensor for tensor in tensors if is_16_bit(tensor)}
            for key in left:
                saved = state_dict[key]
                owner = owners.get(storage_of(saved))
                if owner is not saved:
                    state_dict[key] = saved.float() if owner is None else same_view(saved, owner, self._entry)
        self._destination, self._made = None, {}

    def arrive(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *lists: Any) -> None:
        """Before loading: remember the values that are to arrive."""
        if self._values is None:
            return
        # One list collects the errors of one load_state_dict.
        if lists[-1] is not self._outermost_load:
            self._outermost_load = lists[-1]
            self._arriving.clear()
            self._rebuilt.clear()
            self._values.entries_loaded(state_dict)
            self.apply_writes()
            _check_way_of_loading(module, metadata)
            self.take_in(module)
        arriving = {
            name: state_dict[prefix + name]
            for name, tensor in own_tensors(module)
            if is_lower_precision(tensor.dtype) and isinstance(state_dict.get(prefix + name), torch.Tensor)
        }
        self._arriving[id(module)] = prefix, arriving

    def settle(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After loading: hand the values over, for every tensor they fit."""
        prefix, arrived = self._arriving.pop(id(module), ("", {}))
        tensors = dict(own_tensors(module)) if arrived else {}
        for name, value in arrived.items():
            tensor = tensors.get(name)
            if tensor is None or self._values is None or tensor.shape != value.shape:
                continue
            # torch fills a partial state up with the tensors themselves; shards it may have written to before.
            if value.dtype == tensor.dtype and storage_of(value) == storage_of(tensor) and not is_sharded(tensor):
                continue
            if self._values.load(tensor, value) and is_lower_precision(value.dtype):
                self._rebuilt.append(prefix + name)
        # The outermost module settles last, and speaks for all.
        if not self._arriving:
            self._outermost_load = None
            names, self._rebuilt = self._rebuilt, []
            if names:
                warn_user(
                    f"the state loaded holds 16-bit values for "
                    f"{counted(len(names), 'weight that has a float32 master', 'weights that have float32 masters')} "
                    f"({', '.join(names[:3])} first): masters were rebuilt from these, without the lower bits. Save "
                    "model.state_dict() of the initialised model, which is float32, to resume exactly"
                )

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no masters: it exports its own weights.
        nothing = ("_values", "_newcomers", "_outermost_load", "_destination")
        return dict.fromkeys(nothing) | {
            "key": self.key,
            "_has_float32_weights": False,
            "_modules": set(),
            "_arriving": {},
            "_rebuilt": [],
            "_made": {},
        }


def _take_in_newcomer(
    known: weakref.ref[Float32State], key: int, module: nn.Module, name: str, newcomer: nn.Module | None
) -> None:
    """torch calls it for every module that becomes a part of another: adapters, parametrisations, a new head."""
    state = known() if newcomer is not None and key in module._state_dict_hooks else None
    if state is not None and newcomer is not None:
        state.take_in(newcomer)


def _reference(state_dict: dict[str, Any]) -> weakref.ref[Any] | None:
    """Refer weakly to the dict of a state dict; None where a caller has given a plain dict, which cannot be."""
    try:
        return weakref.ref(state_dict)
    except TypeError:
        return None


def _as_hook(method: Callable[..., None], *first: Any) -> Any:
    """A method and its first arguments as a hook: torch marks hooks with attributes, which methods cannot carry."""
    hook: Any = functools.partial(method, *first)
    hook._from_public_api = True
    return hook


def _check_way_of_loading(module: nn.Module, metadata: dict[str, Any]) -> None:
    """Refuse, before anything is loaded, what would put other tensors in the place of 16-bit ones."""
    assigns = metadata.get("assign_to_params_buffers")
    if not assigns and not torch.__future__.get_swap_module_params_on_conversion():
        return
    if any(is_16_bit(tensor) for part in module.modules() for _, tensor in own_tensors(part)):
        asked, instead = (
            ("load_state_dict(assign=True)", "load with assign=False")
            if assigns
            else (
                "load_state_dict with torch.__future__.set_swap_module_params_on_conversion(True)",
                "set it to False while loading",
            )
        )
        raise RuntimeError(
            f"{asked} would replace tensors that mpinit.initialize has cast and an optimizer may have masters of; "
            f"{instead}, or load before mpinit.initialize"
        )


def _is_alias(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a saved value is the module's tensor, and nothing that was computed from it."""
    if value.shape != tensor.shape:
        return False
    is_plain = type(value) is torch.Tensor and type(tensor) in (nn.Parameter, torch.Tensor)
    if is_plain and value.layout is torch.strided is tensor.layout and not value.is_meta:
        address: int = value.untyped_storage().data_ptr()
        return address == tensor.untyped_storage().data_ptr()
    return storage_of(value) == storage_of(tensor)
