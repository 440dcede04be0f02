"""State dicts of initialised models: float32 at every level, with the masters' values."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ..basics.dtypes import LOWER_PRECISION, is_lower_precision
from ..basics.logs import warn_user
from ..basics.modules import modules_of, own_tensors
from ..basics.patching import Undo, UndoStack, for_each, undo_when_dropped
from ..basics.tables import counted
from ..basics.weak_references import OfModule
from ..distributed.sharding import is_sharded, local, sharded_as
from ..masters.law import meaning
from . import copies
from .casting import Casts
from .forward_weights import ACTIVE_CASTS, parameter_of
from .shared_memory import is_16_bit, storage_of
from .writes import WrittenEntries


class Float32State:
    """The state-dict hooks of a session, which save float32 copies: those of masters, if there are masters.

    Every module has the hooks, so that the state dict of a part is float32 too. A module that is added to one of them
    later gets the hooks as well. With ``keep_vars=True`` the state dict has the 16-bit parameters themselves. What
    modules save by methods of their own (``get_extra_state``, ``_save_to_state_dict``) is saved as it is.
    """

    def __init__(self, casts: Casts, entries: WrittenEntries, made: copies.Float32Copies) -> None:
        self._casts = casts
        self._entries = entries
        # The id of a tensor -> the key and the entry that were made for it last.
        self._made: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        # The modules that were hooked, some of which may be freed.
        self._hooked: list[weakref.ref[nn.Module]] = []
        self._stop_following: Undo | None = None
        self.key = RemovableHandle(OrderedDict()).id
        self._copies = made
        self._outermost_load: object = None
        # The id of a module that is being loaded -> its prefix, and the dict that torch reads its values from.
        self._to_load: dict[int, tuple[str, dict[str, Any]]] = {}
        self._rebuilt: list[str] = []

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Hook the modules of the models, and let their copies be plain."""
        add_hooks = functools.partial(_add_hooks_to_new_part, weakref.ref(self), self.key)
        registered = UndoStack()
        self._stop_following = undo_when_dropped(self, registered.unwind)
        registered.push(register_module_module_registration_hook(add_hooks).remove)
        self._hook(modules, is_new=False)

    def remove(self) -> None:
        """Remove the hooks from every module that has them."""
        if self._stop_following is not None:
            self._stop_following()
        for_each(self._remove_from, [module for known in self._hooked if (module := known()) is not None])

    def _remove_from(self, module: nn.Module) -> None:
        copies.remove_methods(module)
        on_saving: Any = module._state_dict_hooks
        for hooks in (on_saving, module._load_state_dict_post_hooks, module._load_state_dict_pre_hooks):
            hooks.pop(self.key, None)

    def add_hooks(self, tree: nn.Module) -> None:
        """Hook a module and its submodules, unless they are hooked already, and let their copies be plain."""
        self._hook(modules_of(tree), is_new=True)

    def _hook(self, modules: Iterable[nn.Module], is_new: bool) -> None:
        # Straight into the dicts: torch's methods make a handle for each hook, which needs many times as long.
        key = self.key
        export, after_load = _as_hook(self.export), _as_hook(self.after_load)
        added = [module for module in modules if key not in module._state_dict_hooks]
        self._hooked += map(weakref.ref, added)  # first, so that remove() finds them after an interruption
        for module in added:
            hooks = cast(OrderedDict[int, Any], module._state_dict_hooks)
            # Before the user's own hooks, which then see float32 values as well.
            hooks[key] = export
            if len(hooks) > 1:
                hooks.move_to_end(key, last=False)
            module._load_state_dict_pre_hooks[key] = _BeforeLoad(module, self)
            module._load_state_dict_post_hooks[key] = after_load
        # A module that was added later may have to be converted first.
        copies.set_methods_of_all(added, self._copies, refuses_conversion=not is_new)

    def export(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace a module's own 16-bit entries by float32 copies, after its ``state_dict()``."""
        for own, child in module._modules.items():
            if child is not None and self.key not in child._state_dict_hooks:
                # Sequential.insert and ModuleList.insert run no registration hook.
                self.add_hooks(child)
                for name, part in child.named_modules(prefix=prefix + own):
                    self.export(part, state_dict, f"{name}.", _)
        # Few calls per tensor: the state dict of a large model has some 100,000 tensors.
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                saved = state_dict.get(prefix + name)
                if not isinstance(saved, torch.Tensor) or saved is tensor or tensor is None:
                    continue
                is_16_bit = saved.dtype in LOWER_PRECISION
                is_of_block = id(tensor) in self._casts.narrow
                if (is_16_bit or is_of_block) and _is_alias(saved, tensor):
                    state_dict[prefix + name] = self._entry(tensor, saved, state_dict, prefix + name)

    def _entry(self, tensor: torch.Tensor, saved: torch.Tensor, state_dict: dict[str, Any], key: str) -> torch.Tensor:
        """Return the float32 copy of a tensor: one for all of its names, because in torch these share memory, too."""
        first, known = self._made.get(id(tensor), (key, None))
        present: torch.Tensor | None = state_dict.get(first)
        if present is not None and known is not None and known() is present:
            return present
        parameter = parameter_of(tensor) if ACTIVE_CASTS else None
        values = self._casts.values_of(tensor) if parameter is None else parameter
        # An entry is never an inference tensor, which has no version counter.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            entry = (saved if values is None else values).detach().to(torch.float32, copy=True)
        self._made[id(tensor)] = key, weakref.ref(entry)
        self._entries.add(entry, key)
        return entry

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *lists: Any
    ) -> None:
        """Prepare for the load of one module, whose other hooks may still change ``state_dict``."""
        # torch passes one list of errors through all modules of a load_state_dict: a new list is a new call.
        if lists[-1] is not self._outermost_load:
            self._outermost_load = lists[-1]
            self._to_load.clear()
            self._rebuilt.clear()
            self._entries.loaded(state_dict)
            self._casts.masters.follow_writes()
            _check_way_of_loading(module, metadata)
            self.add_hooks(module)
        self._to_load[id(module)] = prefix, state_dict

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Record the float32 values that were loaded into one module, for every tensor that they fit."""
        prefix, loaded = self._to_load.pop(id(module), ("", {}))
        for name, tensor in own_tensors(module):
            value = loaded.get(prefix + name)
            if not is_lower_precision(tensor.dtype) or not isinstance(value, torch.Tensor):
                continue
            if tensor.shape != value.shape:
                continue
            # The value is the tensor itself: torch completes a partial state with these. It may have written to shards.
            if value.dtype == tensor.dtype and storage_of(value) == storage_of(tensor) and not is_sharded(tensor):
                continue
            if self._casts.load(tensor, _with_later_writes(tensor, value)) and is_lower_precision(value.dtype):
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


class _BeforeLoad(OfModule):
    """The hook of one module before its state is loaded."""

    __slots__ = ("state",)

    def __init__(self, module: nn.Module, state: Float32State) -> None:
        self._module = weakref.ref(module)
        self.state = state

    def __call__(self, *arguments: Any) -> None:
        self.state.before_load(self.module, *arguments)


def _add_hooks_to_new_part(
    known: weakref.ref[Float32State], key: int, module: nn.Module, name: str, part: nn.Module | None
) -> None:
    """Hook a module that is added to a hooked one, such as an adapter, a parametrization or a new head."""
    state = known() if part is not None and key in module._state_dict_hooks else None
    if state is not None and part is not None:
        state.add_hooks(part)


def _as_hook(method: Callable[..., None], *first: Any) -> Any:
    """Make a hook of a method and its first arguments: torch sets attributes on hooks, which a method refuses."""
    hook: Any = functools.partial(method, *first)
    hook._from_public_api = True
    return hook


def _check_way_of_loading(module: nn.Module, metadata: dict[str, Any]) -> None:
    """Refuse, before anything is loaded, the option that replaces 16-bit tensors by others."""
    tensors = [tensor for part in module.modules() for _, tensor in own_tensors(part)]
    if metadata.get("assign_to_params_buffers") and any(map(is_16_bit, tensors)):
        raise RuntimeError(
            "load_state_dict(assign=True) would replace tensors that mpinit.initialize has cast and an optimizer may "
            "have masters of; load with assign=False, or load before mpinit.initialize"
        )


@torch.no_grad()
def _with_later_writes(tensor: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of a tensor that was loaded, by the law of masters.

    A hook, or the module's own ``_load_from_state_dict``, may have written to the tensor after torch had copied
    ``loaded`` to it.
    """
    if tensor.layout is not torch.strided:
        return loaded
    values = torch.empty_like(tensor, dtype=torch.float32, requires_grad=False).copy_(loaded)
    return sharded_as(meaning(local(tensor), local(values)), tensor)


def _is_alias(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a saved value is the module's tensor itself, and was not computed from it."""
    if value.shape != tensor.shape:
        return False
    is_plain = type(value) is torch.Tensor and type(tensor) in (nn.Parameter, torch.Tensor)
    if is_plain and value.layout is torch.strided is tensor.layout and not value.is_meta:
        address: int = value.untyped_storage().data_ptr()
        return address == tensor.untyped_storage().data_ptr()
    return storage_of(value) == storage_of(tensor)
