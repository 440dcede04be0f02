"""Copies of initialised models are plain float32 models, as after ``undo``; conversions (``.half()``) are refused.

``copy.deepcopy``, ``pickle``, ``torch.save(model)``, cloudpickle, dill, and processes that are spawned copy an object
by its ``__deepcopy__`` or ``__reduce_ex__``. The modules and optimizers of a session have these two as attributes. A
module is copied without the patches and hooks of mpinit, and 16-bit tensors are copied as float32 ones.
"""

import copy
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.modules import own_tensors, share_attributes
from ..basics.weak_references import OfModule
from ..distributed.sharding import is_sharded
from .casting import Casts
from .forward import patched_forward
from .forward_weights import ACTIVE_CASTS, parameter_of
from .shared_memory import is_16_bit

_DEEPCOPY, _REDUCE, _APPLY = "__deepcopy__", "__reduce_ex__", "_apply"
_COPIES: Final = "_copies_of_mpinit"
_PACKAGE: Final = __name__.partition(".")[0]


class Float32Copies:
    """The copies that are made of a session's 16-bit tensors."""

    def __init__(self, casts: Casts) -> None:
        self.casts = casts
        # The id of a tensor -> its copy in the pickle that is being made, which keeps it alive.
        self._in_pickle: dict[int, weakref.ref[torch.Tensor]] = {}

    def deep_copy(self, tensor: torch.Tensor, memo: dict[int, Any]) -> None:
        """Put a copy into the memo of a ``copy.deepcopy``."""
        known = memo.get(id(tensor))
        if not is_16_bit(tensor) or is_sharded(tensor):
            return
        if known is None:
            memo[id(tensor)] = self._copy(tensor)
        elif is_16_bit(known) and tensor.dtype == known.dtype:
            known.grad, known.data = None, self._copy(tensor).detach()  # it was copied as a part of another object

    def in_pickle(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy to pickle: the same one for all places of the tensor in one pickle."""
        if not is_16_bit(tensor) or is_sharded(tensor):
            return tensor
        known = self._in_pickle.get(id(tensor))
        copied = None if known is None else known()
        if copied is None:
            copied = self._copy(tensor)
            share_attributes(tensor, copied)
            self._in_pickle[id(tensor)] = weakref.ref(copied)
        starting: Any = get_spawning_popen()
        if (
            starting is not None
        ):  # a process that is started with this argument opens the copy's memory after the pickle
            vars(starting).setdefault(_COPIES, []).append(copied)
        return copied

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.casts.values_of(tensor)
        stays = values is None and self.casts.stays_16_bit(tensor)
        dtype = tensor.dtype if stays else torch.float32 if values is None else values.dtype
        copied = (tensor if values is None else values).detach().to(dtype, copy=True)
        return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


class _ModuleCopies(OfModule):
    """A module's ``__deepcopy__``.

    Its method :meth:`reduce` is the module's ``__reduce_ex__``, and :meth:`convert` its ``_apply``.
    """

    __slots__ = ("copies",)

    def __init__(self, module: nn.Module, copies: Float32Copies) -> None:
        super().__init__(module)
        self.copies = copies

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        plain = self._plain()
        for _, tensor in own_tensors(plain):
            self.copies.deep_copy(tensor, memo)
        memo.setdefault(id(memo), []).append(plain)  # as copy.deepcopy does, so that no other object gets its id
        own: Callable[..., nn.Module] | None = getattr(type(plain), _DEEPCOPY, None)
        if own is not None:
            return own(plain, memo)
        # copy.deepcopy does the same for an object without __deepcopy__.
        copied: nn.Module = copy._reconstruct(self.module, memo, *plain.__reduce_ex__(4))  # type: ignore[attr-defined]
        return copied

    def reduce(self, protocol: Any) -> Any:
        """Return what pickle stores of the module; ``copy.copy`` calls this, too."""
        plain = self._plain()
        for tensors in (plain._parameters, plain._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else self.copies.in_pickle(tensor)  # type: ignore[assignment]
        plain._forward_pre_hooks = _HooksOfShallowCopy(plain._forward_pre_hooks)
        return plain.__reduce_ex__(protocol)

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Do what ``.float()``, ``.half()``, ``.to(...)`` and similar methods call, unless it changes dtypes."""
        module = self.module
        _check_conversion(module, fn)
        buffers = dict(module._buffers)
        converted: nn.Module = type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        self.copies.casts.follow_buffers(module, buffers)
        return converted

    def _plain(self) -> nn.Module:
        """Return an object of the module's class with its attributes, but without those of mpinit."""
        self.copies.casts.masters.follow_writes()
        module, plain = self.module, object.__new__(type(self.module))
        for name, value in vars(module).items():
            kept: Any = value
            while (patch := patched_forward(kept)) is not None:
                kept = patch.inner  # the module's own method as an attribute, or None
            if kept is not value and kept is None:
                continue
            if isinstance(kept, OfModule) or isinstance(getattr(kept, "__self__", None), OfModule):
                continue  # another method that was set on the module
            if name.endswith("_hooks") and isinstance(value, dict):
                kept = type(value)((key, hook) for key, hook in value.items() if not _is_ours(hook))
            elif name in ("_parameters", "_buffers"):
                kept = type(value)((own, _present(each)) for own, each in value.items())
            vars(plain)[name] = kept
        return plain


class _OptimizerCopies:
    """An optimizer's ``__deepcopy__``; its method :meth:`reduce` is the optimizer's ``__reduce_ex__``."""

    def __init__(self, optimizer: Optimizer, copies: Float32Copies) -> None:
        self._optimizer, self._copies = weakref.ref(optimizer), copies

    def __call__(self, memo: dict[int, Any]) -> Optimizer:
        optimizer = self._present()
        for group in optimizer.param_groups:
            for weight in group["params"]:
                self._copies.deep_copy(weight, memo)
        reduced = type(optimizer).__reduce_ex__(optimizer, 4)
        copied: Optimizer = copy._reconstruct(optimizer, memo, *reduced)  # type: ignore[attr-defined]
        return copied

    def reduce(self, protocol: Any) -> Any:
        """Return what pickle stores of the optimizer: float32 weights, and the state of each."""
        optimizer = self._present()
        reduced: Any = type(optimizer).__reduce_ex__(optimizer, protocol)
        function, arguments, state, *more = reduced
        copied = self._copies.in_pickle
        groups = [{**group, "params": list(map(copied, group["params"]))} for group in optimizer.param_groups]
        states = copy.copy(optimizer.state)
        states.clear()
        for key, value in optimizer.state.items():
            states[copied(key) if isinstance(key, torch.Tensor) else key] = value
        return function, arguments, {**state, "param_groups": groups, "state": states}, *more

    def _present(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "a method of an optimizer is called while the optimizer is alive"
        self._copies.casts.masters.follow_writes()
        return optimizer


class _HooksOfShallowCopy(OrderedDict[int, Any]):
    """The forward pre-hooks of a module, and one that refuses the forward; pickled and deep-copied without that one.

    A shallow copy has the parts of the model itself, and tensors of its own.
    """

    def __init__(self, hooks: Mapping[int, Any]) -> None:
        super().__init__(hooks)
        self[-1] = _refuse_shallow_copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, ([(key, hook) for key, hook in self.items() if hook is not _refuse_shallow_copy],)


def _refuse_shallow_copy(module: nn.Module, _: Any) -> None:
    raise RuntimeError(
        f"this {type(module).__name__} is a shallow copy (copy.copy) of an initialised model, whose parts would be "
        "those of the model itself: use copy.deepcopy(model) for a float32 copy, or the model"
    )


def _present(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the parameter in whose place a forward has put a cast; any other tensor as it is."""
    parameter = parameter_of(tensor) if ACTIVE_CASTS and tensor is not None else None
    return tensor if parameter is None else parameter


def _is_ours(hook: Any) -> bool:
    """Return whether a hook was registered by mpinit."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    kind = owner if isinstance(owner, types.FunctionType) else type(owner)
    return str(kind.__module__).partition(".")[0] == _PACKAGE


def _check_conversion(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse to change the dtype of tensors with masters."""
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


def _converted(fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that ``fn`` converts a tensor of ``dtype`` to; ``dtype`` if ``fn`` raises."""
    try:
        with torch.no_grad():
            return fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
    except Exception:
        return dtype


def set_methods(owner: nn.Module | Optimizer, copies: Float32Copies) -> None:
    """Let copies of a model or an optimizer be plain."""
    if not {_DEEPCOPY, _REDUCE} & vars(owner).keys():
        kind: Any = _ModuleCopies if isinstance(owner, nn.Module) else _OptimizerCopies
        method = kind(owner, copies)
        vars(owner)[_DEEPCOPY], vars(owner)[_REDUCE] = method, method.reduce


def set_methods_of_all(modules: Iterable[nn.Module], copies: Float32Copies, refuses_conversion: bool) -> None:
    """Let copies of the modules of models with 16-bit weights be plain, and refuse conversions."""
    for module in modules:
        own = vars(module)
        if _DEEPCOPY in own or isinstance(module, torch.jit.ScriptModule):
            continue  # the copies of a ScriptModule are made in C++
        method = _ModuleCopies(module, copies)
        own[_DEEPCOPY] = method
        own.setdefault(_REDUCE, method.reduce)
        if refuses_conversion:
            own.setdefault(_APPLY, method.convert)


def remove_methods(owner: nn.Module | Optimizer) -> None:
    """Remove these methods."""
    own = vars(owner)
    for name in (_DEEPCOPY, _REDUCE, _APPLY):
        if isinstance(getattr(own.get(name), "__self__", own.get(name)), (_ModuleCopies, _OptimizerCopies)):
            del own[name]


def remove_all(owners: Iterable[nn.Module | Optimizer]) -> None:
    """Remove them from all these objects."""
    for owner in owners:
        remove_methods(owner)
