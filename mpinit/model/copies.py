"""Copies and conversions of initialised models: ``copy.deepcopy`` makes a float32 model, ``.half()`` is refused.

A deep copy is often an average of the weights, or is evaluated. It has the masters' values, and belongs to no session.
Without masters (O3) it is 16-bit, as the model is.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..basics.modules import own_tensors
from ..basics.weak_references import OfModule
from ..distributed.sharding import is_sharded
from .float32_values import Float32Values
from .forward import patched_forward
from .forward_weights import ACTIVE_CASTS, parameter_of
from .shared_memory import is_16_bit


@dataclass(frozen=True, eq=False)
class Originals:
    """The float32 values of a session's models, from which copies are made.

    Attributes:
        has_float32_weights: whether the session has ``master_weights="model"``, so that parameters are float32.
        key: the key of the session's hooks in modules; the other hook has its negative.
    """

    values: Float32Values
    has_float32_weights: bool
    key: int

    def copies_are_float32(self) -> bool:
        """Return whether deep copies of the models are float32: the models have masters, or float32 weights."""
        return self.has_float32_weights or len(self.values.masters) > 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 values of a 16-bit tensor; None if it has no other values, or is not 16-bit."""
        if ACTIVE_CASTS and (parameter := parameter_of(tensor)) is not None:
            return parameter.detach()  # the copy is made inside of a forward, where the tensor is a cast
        return self.values.of(tensor) if is_lower_precision(tensor.dtype) else None


class _Method(OfModule):
    """A method that is set on a module. In copies and unpickled modules it calls the method of the module's class.

    Attributes:
        originals: the originals of the session; None in copies and unpickled modules.
        is_of_copy: whether the module was a copy, or was unpickled, before it was initialised: the undo restores the
            method that it had.
    """

    is_of_copy = False

    def __init__(self, module: nn.Module, originals: Originals | None) -> None:
        self._module = weakref.ref(module)
        self.originals = originals

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "originals": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Method.__init__(self, **state)


class DeepCopy(_Method):
    """A module's ``__deepcopy__``; its method :meth:`reduce` is the module's ``__reduce_ex__``."""

    def reduce(self, protocol: Any) -> Any:
        """Apply pending writes before the module is pickled, as by ``torch.save(model)``."""
        if self.originals is not None:
            self.originals.values.apply_writes()
        return type(self.module).__reduce_ex__(self.module, protocol)

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        originals = self.originals
        if originals is not None:
            originals.values.apply_writes()
        if originals is None or not originals.copies_are_float32():
            return self._as_it_is(memo)
        for _, tensor in own_tensors(self.module):
            known = memo.get(id(tensor))
            if is_16_bit(tensor) and not is_sharded(tensor) and (known is None or is_16_bit(known)):
                copied_tensor = _float32_copy(tensor, originals.of(tensor))
                if known is None:
                    memo[id(tensor)] = copied_tensor
                else:
                    # The optimizer was copied first, and the parameter with it.
                    known.grad, known.data = None, copied_tensor.data
        copied = self._as_it_is(memo)
        remove_hooks(copied, originals.key, originals)
        vars(copied)["_apply"] = Conversion(copied, None)
        # The copy's inputs are cast to float32, as those of a module that keep_fp32 names.
        for patched in filter(None, map(patched_forward, vars(copied).values())):
            patched.boundary.inner_dtype = torch.float32
        return copied

    def _as_it_is(self, memo: dict[int, Any]) -> nn.Module:
        own: Callable[..., nn.Module] | None = getattr(type(self.module), "__deepcopy__", None)
        if own is not None:
            return own(self.module, memo)
        # copy.deepcopy does the same for an object without __deepcopy__.
        copied: nn.Module = copy._reconstruct(self.module, memo, *self.module.__reduce_ex__(4))  # type: ignore[attr-defined]
        return copied


def _float32_copy(tensor: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    wide = (tensor if values is None else values).detach().to(torch.float32, copy=True)
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


class Conversion(_Method):
    """A module's ``_apply``, which ``.float()``, ``.half()``, ``.to(...)`` and similar methods all call."""

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module = self.module
        if self.originals is not None:
            _check_conversion(module, fn)
        before = _dtypes(module) if self.originals is None else []
        converted: nn.Module = type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self.originals is None and _dtypes(module) != before:
            # Its inputs would be cast to the dtype of before. A converted copy is an ordinary module.
            for patched in (patched_forward(each) for part in module.modules() for each in vars(part).values()):
                if patched is not None and patched.boundary.cast_inputs:
                    patched.boundary.retire()
        return converted


def _dtypes(module: nn.Module) -> list[torch.dtype]:
    return [tensor.dtype for part in module.modules() for _, tensor in own_tensors(part)]


def _check_conversion(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse to change the dtype of tensors with masters, or to replace them by other parameters."""
    tensors = [tensor for part in module.modules() for _, tensor in own_tensors(part)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    changed = [dtype for dtype in dtypes if _converted(fn, dtype) != dtype]
    if changed:
        raise RuntimeError(
            f"{type(module).__name__} belongs to a model that mpinit.initialize has cast, and cannot be converted to "
            f"{_converted(fn, changed[0])}: its float32 masters would go on without it. To keep a part in float32 pass "
            "mpinit.initialize keep_fp32; for a float32 copy use copy.deepcopy(model); to convert the model itself "
            "call mpinit.undo(model) first"
        )
    for flag in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion"):
        if getattr(torch.__future__, f"get_{flag}")() and any(map(is_16_bit, tensors)):
            raise RuntimeError(
                f"torch.__future__.set_{flag}(True) replaces parameters where {type(module).__name__} is moved, and "
                "mpinit.initialize has made float32 masters for them: set it to False, or move the model before "
                "mpinit.initialize"
            )


def _converted(fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that ``fn`` converts a tensor of ``dtype`` to; ``dtype`` if ``fn`` raises."""
    try:
        with torch.no_grad():
            return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
    except Exception:
        return dtype


_KINDS: Final[tuple[tuple[str, type[_Method]], ...]] = (("__deepcopy__", DeepCopy), ("_apply", Conversion))
_REDUCE: Final = "__reduce_ex__"


def set_methods(modules: Iterable[nn.Module], originals: Originals | None) -> None:
    """Make copies of modules float32, apply pending writes before they are pickled, and refuse their conversions."""
    for module in modules:
        for name, kind in _KINDS:
            present = vars(module).get(name)
            if present is None:
                vars(module)[name] = kind(module, originals)
            elif isinstance(present, kind) and present.originals is None:
                made = vars(module)[name] = kind(module, originals)
                made.is_of_copy = True
        # No call of a function for each module: models have thousands.
        deep_copy = vars(module)["__deepcopy__"]
        if _REDUCE in vars(module):
            _set_reduce(module)
        elif isinstance(deep_copy, DeepCopy):
            vars(module)[_REDUCE] = deep_copy.reduce


def _set_reduce(module: nn.Module) -> None:
    """Make pickling call :meth:`DeepCopy.reduce`, unless the module has a ``__reduce_ex__`` as an attribute."""
    own = vars(module)
    present, deep_copy = own.get(_REDUCE), own.get("__deepcopy__")
    if isinstance(deep_copy, DeepCopy) and (present is None or _is_reduce(present)):
        own[_REDUCE] = deep_copy.reduce
    elif _is_reduce(present):
        del own[_REDUCE]


def _is_reduce(method: Any) -> bool:
    return isinstance(method, MethodType) and method.__func__ is DeepCopy.reduce


def remove_hooks(module: nn.Module, key: int, originals: Originals | None) -> None:
    """Remove the methods of :func:`set_methods`, and the session's state-dict hooks, from a module or a copy of it."""
    for name, kind in _KINDS:
        found = vars(module).get(name)
        if isinstance(found, kind) and found.originals in (originals, None):
            del vars(module)[name]
            if found.is_of_copy:
                vars(module)[name] = kind(module, None)
    _set_reduce(module)
    hooks_on_saving: Any = module._state_dict_hooks
    for hooks in (hooks_on_saving, module._load_state_dict_post_hooks, module._load_state_dict_pre_hooks):
        hooks.pop(key, None)
        hooks.pop(-key, None)
