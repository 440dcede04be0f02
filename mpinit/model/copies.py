"""Copies and conversions of initialised models: ``copy.deepcopy`` gives a float32 model, ``.half()`` is refused.

A copy is there to be averaged into, or to be evaluated: it gets the masters' bits, and no session. Where there are no
masters (O3) it is 16-bit, as the model is.
"""

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from ..basics.modules import own_tensors
from ..distributed.sharding import is_sharded
from .forward import patched_forward
from .shared_memory import is_16_bit


class _OfModule:
    """Something that stands on a module and knows it; in copies and files it does what the module's class does.

    ``owner`` is the ``Float32State`` of its session; None in copies and files.
    """

    def __init__(self, module: nn.Module, owner: Any) -> None:
        self.module = module
        self.owner = owner

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "owner": None}


class DeepCopy(_OfModule):
    """A module's ``__deepcopy__``."""

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        owner = self.owner
        if owner is not None:
            owner.apply_writes()
        if owner is None or not owner.has_masters():
            return self._as_it_is(memo)
        for _, tensor in own_tensors(self.module):
            known = memo.get(id(tensor))
            if is_16_bit(tensor) and not is_sharded(tensor) and (known is None or is_16_bit(known)):
                copied_tensor = _float32_copy(tensor, owner.float32_values(tensor))
                if known is None:
                    memo[id(tensor)] = copied_tensor
                else:
                    known.grad, known.data = None, copied_tensor.data  # copied with its optimizer before
        copied = self._as_it_is(memo)
        owner.leave(copied)
        # What is called across its boundary is cast to float32, as around a module that keep_fp32 names.
        for patched in filter(None, map(patched_forward, vars(copied).values())):
            patched.boundary.inner_dtype = torch.float32
        return copied

    def _as_it_is(self, memo: dict[int, Any]) -> nn.Module:
        own: Callable[..., nn.Module] | None = getattr(type(self.module), "__deepcopy__", None)
        if own is not None:
            return own(self.module, memo)
        # What copy.deepcopy does with an object that has no method for it.
        copied: nn.Module = copy._reconstruct(self.module, memo, *self.module.__reduce_ex__(4))  # type: ignore[attr-defined]
        return copied


def _float32_copy(tensor: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    wide = (tensor if values is None else values).detach().to(torch.float32, copy=True)
    # A buffer's 16-bit value is all there is of it.
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide


class Conversion(_OfModule):
    """A module's ``_apply``, which ``.float()``, ``.half()``, ``.to(...)`` and the like all come down to."""

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        if self.owner is not None:
            _check_conversion(self.module, fn)
        converted: nn.Module = type(self.module)._apply(self.module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        return converted


def _check_conversion(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse what would change dtypes under masters' feet, or put other parameters in the place of those they know."""
    tensors = [tensor for part in module.modules() for _, tensor in own_tensors(part)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    changed = [dtype for dtype in dtypes if _converted(fn, dtype) != dtype]
    if changed:
        raise RuntimeError(
            f"{type(module).__name__} belongs to a model that mpinit.initialize has cast, and cannot be converted to "
            f"{_converted(fn, changed[0])}: its float32 masters would go on without it. To keep a part in float32 give "
            "mpinit.initialize keep_fp32; for a float32 copy use copy.deepcopy(model); to convert the model itself "
            "call mpinit.undo(model) first"
        )
    for flag in ("swap_module_params_on_conversion", "overwrite_module_params_on_conversion"):
        if getattr(torch.__future__, f"get_{flag}")() and any(map(is_16_bit, tensors)):
            raise RuntimeError(
                f"torch.__future__.set_{flag}(True) replaces parameters where {type(module).__name__} is moved, and "
                "mpinit.initialize has given them float32 masters: set it to False, or move the model before "
                "mpinit.initialize"
            )


def _converted(fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    """What becomes of a tensor of ``dtype``, asked with an empty one; whatever raises is left to raise in earnest."""
    try:
        with torch.no_grad():
            return fn(torch.empty(0, dtype=dtype)).dtype
    except Exception:
        return dtype


_KINDS: Final[tuple[tuple[str, type[_OfModule]], ...]] = (("__deepcopy__", DeepCopy), ("_apply", Conversion))


def put_on(module: nn.Module, owner: Any) -> None:
    """Let copies of a module be float32, and conversions of it be refused."""
    for name, kind in _KINDS:
        if name not in vars(module):
            vars(module)[name] = kind(module, owner)


def take_off(module: nn.Module, owner: Any) -> None:
    """Take off what :func:`put_on` put on, here or on what this is a copy of."""
    for name, kind in _KINDS:
        found = vars(module).get(name)
        if isinstance(found, kind) and found.owner in (owner, None):
            del vars(module)[name]
