"""State dicts of initialised models: float32 at every level, with the masters' values."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ..basics.dtypes import LOWER_PRECISION, is_lower_precision
from ..basics.logs import warn_user
from ..basics.modules import modules_of, own_tensors
from ..basics.patching import Undo, UndoStack, for_each, undo_when_dropped
from ..basics.tables import counted
from ..basics.weak_references import OfModule, WeakIdSet
from ..distributed.sharding import is_sharded, local, sharded_as
from ..masters.law import is_rounding, meaning
from ..torch_internals.bulk import are_same
from . import copies
from .float32_values import Float32Values
from .forward_weights import ACTIVE_CASTS, parameter_of
from .shared_memory import is_16_bit, same_view, storage_of

_CONTAINERS: Final = (dict, list, tuple)


class Float32State:
    """The state-dict hooks of a session, which save float32 values: those of masters, if there are masters.

    Every module has the hooks, so that the state dict of a part is float32 too. A module that is added to one of them
    later gets the hooks as well. With ``keep_vars=True`` the state dict has the 16-bit parameters themselves.
    """

    def __init__(self, values: Float32Values, has_float32_weights: bool) -> None:
        self._values: Float32Values | None = values
        # For the call of state_dict() that runs: its dict, and the id of a tensor -> the entry that was made for it.
        self._destination: weakref.ref[Any] | None = None
        self._made: dict[int, torch.Tensor] = {}
        self._modules: WeakIdSet[nn.Module] = WeakIdSet()
        self._stop_following: Undo | None = None
        # A module has two hooks, with this key and its negative. 0 is not used, because it is its own negative.
        self.key = RemovableHandle(OrderedDict()).id or RemovableHandle(OrderedDict()).id
        self._originals: copies.Originals | None = copies.Originals(values, has_float32_weights, self.key)
        self._outermost_load: object = None
        # The id of a module that is being loaded -> its prefix, and the dict that torch reads its values from.
        self._to_load: dict[int, tuple[str, dict[str, Any]]] = {}
        self._rebuilt: list[str] = []

    def install(self, models: Sequence[nn.Module], modules: Iterable[nn.Module]) -> None:
        """Hook the models and the modules in them."""
        add_hooks = functools.partial(_add_hooks_to_new_part, weakref.ref(self), self.key)
        registered = UndoStack()
        self._stop_following = undo_when_dropped(self, registered.unwind)
        registered.push(register_module_module_registration_hook(add_hooks).remove)
        self._hook(modules)

    def remove(self) -> None:
        """Remove the hooks from every module that has them."""
        if self._stop_following is not None:
            self._stop_following()
        for_each(self._remove_from, list(self._modules))

    def _remove_from(self, module: nn.Module) -> None:
        copies.remove_hooks(module, self.key, self._originals)
        self._modules.discard(module)

    def add_hooks(self, tree: nn.Module) -> None:
        """Hook a module and its submodules, unless they are hooked already."""
        self._hook(modules_of(tree))

    def _hook(self, modules: Iterable[nn.Module]) -> None:
        # Straight into the dicts: torch's methods make a handle for each hook, which needs many times as long.
        key = self.key
        export, export_rest, after_load = (_as_hook(each) for each in (self.export, self.export_rest, self.after_load))
        added = [module for module in modules if key not in module._state_dict_hooks]
        self._modules.update(added)  # first, so that remove() finds them after an interruption
        for module in added:
            hooks = cast(OrderedDict[int, Any], module._state_dict_hooks)
            # Before the user's own hooks, which then see float32 values as well.
            hooks[-key] = export
            if len(hooks) > 1:
                hooks.move_to_end(-key, last=False)
            hooks[key] = export_rest
            module._load_state_dict_pre_hooks[key] = _BeforeLoad(module, self)
            module._load_state_dict_post_hooks[key] = after_load
        copies.set_methods(added, self._originals)

    def _begin(self, state_dict: dict[str, Any]) -> None:
        """Prepare for the first module of a state dict."""
        if self._values is not None:
            self._values.prepare_entries()
        self._destination = _reference(state_dict)
        self._made = {}

    def _entry(self, tensor: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        """Return the float32 copy of a tensor: one for all of its names, because in torch these share memory, too."""
        made = self._made.get(id(tensor))
        if made is None:
            if ACTIVE_CASTS and (parameter := parameter_of(tensor)) is not None:
                made = parameter.detach().clone()
            elif self._values is None:
                made = saved.detach().to(torch.float32, copy=True)
            else:
                made = self._values.entry(tensor, saved)
            self._made[id(tensor)] = made
        return made

    def export(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace a module's own 16-bit entries by float32 ones, after its ``state_dict()``."""
        if self._destination is None or self._destination() is not state_dict:
            self._begin(state_dict)
        is_in_block = self._values is not None and self._values.masters.are_in_model
        # Few calls per tensor: the state dict of a large model has some 100,000 tensors.
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                saved = state_dict.get(prefix + name)
                if not isinstance(saved, torch.Tensor) or saved is tensor or tensor is None:
                    continue
                if is_in_block and self._values is not None:
                    if id(tensor) not in self._made:
                        self._made[id(tensor)] = self._values.block_entry(tensor, saved)
                    saved = state_dict[prefix + name] = self._made[id(tensor)]
                if saved.dtype in LOWER_PRECISION and _is_alias(saved, tensor):
                    state_dict[prefix + name] = self._entry(tensor, saved)

    def export_rest(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace 16-bit entries that modules or hooks have made themselves, after the outermost ``state_dict()``."""
        metadata = getattr(state_dict, "_metadata", None)
        if not metadata or next(iter(metadata.values())) is not local_metadata:
            return
        self.add_hooks(module)  # ModuleList.insert and Sequential.insert run no registration hook
        remaining = [
            key
            for key, value in state_dict.items()
            if (type(value) in _CONTAINERS or (isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION))
            and key.startswith(prefix)
        ]
        if remaining:
            tensors = (tensor for part in modules_of(module) for _, tensor in own_tensors(part))
            owners = {storage_of(tensor): tensor for tensor in tensors if is_16_bit(tensor)}
            keeps_variables = _keeps_variables(module, state_dict, prefix)
            for key in remaining:
                saved = state_dict[key]
                if isinstance(saved, torch.Tensor) and storage_of(saved) not in owners:
                    state_dict[key] = saved.float()
                else:
                    state_dict[key] = self._widened(saved, owners, keeps_variables)
        self._destination, self._made = None, {}

    def _widened(self, saved: Any, owners: Mapping[int, torch.Tensor], keeps_variables: bool) -> Any:
        """Replace the models' 16-bit tensors by float32 entries in an object that a module has saved itself.

        Args:
            saved: a tensor, or a dict, list or tuple of them.
            owners: the address of a storage -> the model's 16-bit tensor with that storage.
            keeps_variables: whether ``state_dict(keep_vars=True)`` was called.
        """
        if type(saved) is dict:
            parts = {key: self._widened(value, owners, keeps_variables) for key, value in saved.items()}
            return saved if are_same(list(parts.values()), list(saved.values())) else parts
        if type(saved) in (list, tuple):
            items = [self._widened(value, owners, keeps_variables) for value in saved]
            return saved if are_same(items, saved) else type(saved)(items)
        if not isinstance(saved, torch.Tensor) or saved.dtype not in LOWER_PRECISION:
            return saved
        owner = owners.get(storage_of(saved))
        if owner is None:
            return saved  # a tensor of the module's own making in a container stays as it is
        if owner is saved:
            return saved if keeps_variables else self._entry(owner, saved)
        return same_view(saved, owner, self._entry)

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *lists: Any
    ) -> None:
        """Prepare for the load of one module, whose other hooks may still change ``state_dict``."""
        if self._values is None:
            return
        # torch passes one list of errors through all modules of a load_state_dict: a new list is a new call.
        if lists[-1] is not self._outermost_load:
            self._outermost_load = lists[-1]
            self._to_load.clear()
            self._rebuilt.clear()
            self._values.entries_loaded(state_dict, module, prefix)
            self._values.apply_writes()
            _check_way_of_loading(module, metadata)
            self.add_hooks(module)
        self._to_load[id(module)] = prefix, state_dict

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Record the float32 values that were loaded into one module, for every tensor that they fit."""
        prefix, loaded = self._to_load.pop(id(module), ("", {}))
        for name, tensor in own_tensors(module):
            value = loaded.get(prefix + name)
            if self._values is None or not is_lower_precision(tensor.dtype) or not isinstance(value, torch.Tensor):
                continue
            if tensor.shape != value.shape:
                continue
            # The value is the tensor itself: torch completes a partial state with these. It may have written to shards.
            if value.dtype == tensor.dtype and storage_of(value) == storage_of(tensor) and not is_sharded(tensor):
                continue
            if self._values.load(tensor, _with_later_writes(tensor, value)) and is_lower_precision(value.dtype):
                self._rebuilt.append(prefix + name)
        # The outermost module is the last, and warns once for all modules.
        if not self._to_load:
            self._outermost_load = None
            names, self._rebuilt = self._rebuilt, []
            if names:
                warn_user(
                    f"the state loaded has 16-bit values for "
                    f"{counted(len(names), 'weight that has a float32 master', 'weights that have float32 masters')} "
                    f"({', '.join(names[:3])} first): masters were rebuilt from these, without the lower bits. Save "
                    "model.state_dict() of the initialised model, which is float32, to resume exactly"
                )

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no masters: it saves its own weights.
        nothing = ("_values", "_originals", "_stop_following", "_outermost_load", "_destination")
        return dict.fromkeys(nothing) | {
            "key": self.key,
            "_modules": set(),
            "_to_load": {},
            "_rebuilt": [],
            "_made": {},
        }


class _BeforeLoad(OfModule):
    """The hook of one module before its state is loaded."""

    __slots__ = ("state",)

    def __init__(self, module: nn.Module, state: Float32State) -> None:
        self._module = weakref.ref(module)
        self.state = state

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "state": self.state}

    def __call__(self, *arguments: Any) -> None:
        self.state.before_load(self.module, *arguments)


def _add_hooks_to_new_part(
    known: weakref.ref[Float32State], key: int, module: nn.Module, name: str, part: nn.Module | None
) -> None:
    """Hook a module that is added to a hooked one, such as an adapter, a parametrization or a new head."""
    state = known() if part is not None and key in module._state_dict_hooks else None
    if state is not None and part is not None:
        state.add_hooks(part)


def _keeps_variables(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> bool:
    """Return whether ``state_dict(keep_vars=True)`` was called: then an entry is the module's tensor itself."""
    for name, part in module.named_modules(prefix=prefix.rstrip(".")):
        if type(part)._save_to_state_dict is nn.Module._save_to_state_dict:
            for own, tensor in own_tensors(part):
                saved = state_dict.get(f"{name}.{own}" if name else own)
                if saved is not None:
                    return saved is tensor
    return False


def _reference(state_dict: dict[str, Any]) -> weakref.ref[Any] | None:
    """Return a weak reference to a state dict; None for a plain ``dict``, which cannot have one."""
    try:
        return weakref.ref(state_dict)
    except TypeError:
        return None


def _as_hook(method: Callable[..., None], *first: Any) -> Any:
    """Make a hook of a method and its first arguments: torch sets attributes on hooks, which a method refuses."""
    hook: Any = functools.partial(method, *first)
    hook._from_public_api = True
    return hook


def _check_way_of_loading(module: nn.Module, metadata: dict[str, Any]) -> None:
    """Refuse, before anything is loaded, options of loading that replace 16-bit tensors by others."""
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


@torch.no_grad()
def _with_later_writes(tensor: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of a tensor that was loaded, by the law of masters.

    A hook, or the module's own ``_load_from_state_dict``, may have written to the tensor after torch had copied
    ``loaded`` to it.
    """
    if tensor.is_meta or tensor.layout is not torch.strided:
        return loaded
    wide = torch.empty_like(tensor, dtype=torch.float32, requires_grad=False).copy_(loaded)
    present, values = local(tensor), local(wide)
    # A sharded value is not compared: ranks would differ in whether they redistribute it.
    if not is_sharded(tensor) and bool(is_rounding(present, values).all()):
        return loaded
    return sharded_as(meaning(present, values), tensor)


def _is_alias(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a saved value is the module's tensor itself, and was not computed from it."""
    if value.shape != tensor.shape:
        return False
    is_plain = type(value) is torch.Tensor and type(tensor) in (nn.Parameter, torch.Tensor)
    if is_plain and value.layout is torch.strided is tensor.layout and not value.is_meta:
        address: int = value.untyped_storage().data_ptr()
        return address == tensor.untyped_storage().data_ptr()
    return storage_of(value) == storage_of(tensor)
