"""Wrappers that cast a function's arguments by its row of the policy, while their device's autocast flag is on."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ..basics.dtypes import LOWER_PRECISION
from ..basics.trees import TreeCast
from .cast_lists import CASTS_INSIDE, Cast, CastRow
from .thread_flags import call_without_casts, device_types, is_on

Function = Callable[..., Any]

_CASTABLE: Final = (torch.float32, *LOWER_PRECISION)
_CONTAINERS: Final = (list, tuple)
# First parameters of functions that are passed by Python or autograd, not by the caller.
_IMPLICIT_PARAMETERS: Final = ("self", "cls", "ctx")


def wrapper(row: CastRow, name: str, original: Function, devices: tuple[str, ...]) -> Function:
    """Wrap the function at ``name``, once for each device whose own autocast does not follow the row."""
    wrapped = _traceable_method(original, name) if name.startswith("torch.Tensor.") else original
    if row.casts_off:  # innermost: the wrapper of the next device would find its flag off
        wrapped = without_casts(wrapped)
    for device in devices:
        wrapped = _for_device(row, name, wrapped, device)
    return renamed(wrapped, original, name)


def without_casts(original: Function) -> Function:
    """Make a function that runs ``original`` with casts off."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return call_without_casts(original, *args, **kwargs) if is_on() else original(*args, **kwargs)

    return function


def _traceable_method(original: Function, name: str) -> Function:
    """Return a method that torch.compile can trace when it is called as ``torch.Tensor.exp(x)``.

    torch.compile identifies a C method by the class's attribute, which is the wrapper now. While compiling, the call
    becomes ``x.exp()``, which it can trace: the method is looked up again when the graph runs.
    """
    method = name.rpartition(".")[2]

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return getattr(args[0], method)(*args[1:], **kwargs)
        return original(*args, **kwargs)

    return call


def renamed(function: Function, original: Function, name: str) -> Function:
    """Set the name of a wrapper to ``name``.

    pickle finds a function by its ``__module__`` and ``__qualname__``. A builtin's own may name a C module, where the
    wrapper is not.
    """
    functools.update_wrapper(function, original)
    owner, _, function.__name__ = name.rpartition(".")
    function.__qualname__ = f"Tensor.{function.__name__}" if owner == "torch.Tensor" else function.__name__
    function.__module__ = "torch" if owner == "torch.Tensor" else owner
    return function


def _for_device(row: CastRow, name: str, inner: Function, device: str) -> Function:
    """Make a function that calls ``inner``, with casts of the device's tensors while the device's casts are on."""
    if device == "cuda" and row.name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent(inner)
    if row.cast is Cast.LOWER_PRECISION:
        return _lower(row.arguments if device in CASTS_INSIDE else 0, inner, device)
    if row.cast is Cast.PROMOTE:
        return _promote(inner, device)
    if row.cast is Cast.REFUSED:
        return _refused(name, inner, device)
    return _banned(row.name, _fp32(inner, device), device) if row.cast is Cast.BANNED else _fp32(inner, device)


def _fp32(inner: Function, device: str) -> Function:
    # Locals instead of globals, and an inlined loop, for speed: this wrapper is called between small layers.
    is_on_device, tensor_type, lower_types = torch.is_autocast_enabled, torch.Tensor, LOWER_PRECISION

    def fp32_function(*args: Any, **kwargs: Any) -> Any:
        if not is_on_device(device):
            return inner(*args, **kwargs)
        if kwargs:
            if fixes_result_dtype(kwargs):
                return call_without_casts(inner, *args, **kwargs)
            kwargs = {key: to_float(value, device) for key, value in kwargs.items()}
        cast = [
            value.float()
            if isinstance(value, tensor_type) and value.dtype in lower_types and value.device.type == device
            else value
            for value in args
        ]
        return inner(*cast, **kwargs)

    return fp32_function


def fixes_result_dtype(kwargs: dict[str, Any]) -> bool:
    """Return whether a call fixes the dtype of its result: by ``out=``, or by a 16-bit ``dtype=``.

    Such a call runs without casts, inside its body too: a product computed in 16 bits might not fit into ``out``, and
    a norm refuses a ``dtype`` narrower than its input.
    """
    return kwargs.get("out") is not None or kwargs.get("dtype") in LOWER_PRECISION


def to_float(value: Any, device: str) -> Any:
    """Cast a 16-bit tensor of the device to float32; return anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in LOWER_PRECISION and value.device.type == device:
        return value.float()
    return value


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Cast float32 and 16-bit tensors of the device to ``dtype``, also inside lists and tuples."""
    if isinstance(value, torch.Tensor):
        castable = value.dtype is not dtype and value.dtype in _CASTABLE and value.device.type == device
        return value.to(dtype) if castable else value
    if type(value) in _CONTAINERS:
        return type(value)([_cast(leaf, dtype, device) for leaf in value])
    return value


def _lower(leading: int, inner: Function, device: str) -> Function:
    def lower_precision_function(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return inner(*args, **kwargs)
        if kwargs and fixes_result_dtype(kwargs):
            return call_without_casts(inner, *args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        if leading:
            first = [value if type(value) is list else _cast(value, dtype, device) for value in args[:leading]]
            return inner(*first, *args[leading:], **kwargs)
        cast = [_cast(value, dtype, device) for value in args]
        return inner(*cast, **{key: _cast(value, dtype, device) for key, value in kwargs.items()})

    return lower_precision_function


def _recurrent(original: Function) -> Function:
    """Run a recurrent network in bfloat16 on CUDA, where torch's autocast runs it in float16 whatever its dtype is.

    Casts to float16 are torch's own, which copies all weights into cuDNN's buffer at once, unless the weights have
    several dtypes, which it refuses. Other casts cuDNN copies at each call, and torch warns of that.
    """

    def recurrent_function(*args: Any, **kwargs: Any) -> Any:
        # The last list among the arguments; that of an LSTM's state comes before.
        weights = [value for value in (*args, *kwargs.values()) if type(value) in _CONTAINERS][-1]
        if not torch.is_autocast_enabled("cuda") or not weights[0].is_cuda:
            return original(*args, **kwargs)
        dtype = torch.get_autocast_dtype("cuda")
        if dtype is torch.float16 and len({weight.dtype for weight in weights}) == 1:
            return original(*args, **kwargs)
        cast = [_cast(value, dtype, "cuda") for value in args]
        return call_without_casts(original, *cast, **{key: _cast(each, dtype, "cuda") for key, each in kwargs.items()})

    return recurrent_function


def _dtypes(values: Iterable[Any], devices: Sequence[str]) -> set[torch.dtype]:
    """Return the castable dtypes of the devices' tensors among values, and in lists and tuples among these."""
    leaves = [leaf for value in values for leaf in (value if type(value) in _CONTAINERS else (value,))]
    return {
        leaf.dtype
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _CASTABLE and leaf.device.type in devices
    }


def _promote(inner: Function, device: str) -> Function:
    def promoting_function(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return inner(*args, **kwargs)
        found = _dtypes((*args, *kwargs.values()), (device,))
        # torch's autocast promotes too, and raises for the 16-bit dtype that is not its own.
        is_other = len(found) == 1 and found.isdisjoint((torch.float32, torch.get_autocast_dtype(device)))
        if is_other or fixes_result_dtype(kwargs):
            return call_without_casts(inner, *args, **kwargs)
        if len(found) > 1:
            args = tuple(_cast(value, torch.float32, device) for value in args)
            kwargs = {key: _cast(value, torch.float32, device) for key, value in kwargs.items()}
        return inner(*args, **kwargs)

    return promoting_function


def _banned(name: str, run: Function, device: str) -> Function:
    def banned_function(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(device) and torch.float16 in _dtypes((*args, *kwargs.values()), (device,)):
            raise NotImplementedError(
                f"{name} was called with float16 tensors: its gradient overflows float16 where a probability is near 0 "
                "or 1. Use torch.nn.BCEWithLogitsLoss (or binary_cross_entropy_with_logits) and drop the sigmoid "
                'before it; or mpinit.register_float_function(torch, "sigmoid") before mpinit.initialize'
            )
        return run(*args, **kwargs)

    return banned_function


def _refused(name: str, original: Function, device: str) -> Function:
    def refused_function(*args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else None
        if torch.is_autocast_enabled(device) and to_float(target, device) is not target:
            raise NotImplementedError(
                f"{name} would write a float32 result into a {args[0].dtype} tensor; use the function that is not "
                "in place, or call .float() on the tensor first"
            )
        return original(*args, **kwargs)

    return refused_function


def user_wrapper(cast: Cast, function: Function) -> Function:
    """Wrap a user's function: its arguments, nested containers included, are cast while casts are on.

    What the function writes to its arguments is copied into the caller's tensors and containers. Results are not cast.

    A float32 function runs with casts off, because the matrix products in its body would cast to 16 bits again. A
    builtin function of torch runs with casts off, because torch's own autocast would cast its arguments again.
    """
    if not callable(function):
        raise TypeError(
            f"the function to cast for must be callable, not {function!r}; to name it, use mpinit.register_*"
        )
    implicit = 1 if _has_implicit_parameter(function) else 0
    builtin = not isinstance(function, types.FunctionType) or (function.__module__ or "").partition(".")[0] == "torch"
    without_casts = cast is Cast.FP32 or builtin

    @functools.wraps(function)
    def user_function(*args: Any, **kwargs: Any) -> Any:
        dtype = _dtype_for(cast, args[implicit:], kwargs)
        if dtype is None:
            return function(*args, **kwargs)
        cast_tree = TreeCast(dtype)
        args = (*args[:implicit], *[cast_tree(value) for value in args[implicit:]])
        kwargs = {key: cast_tree(value) for key, value in kwargs.items()}
        try:
            if without_casts:
                return call_without_casts(function, *args, **kwargs)
            return function(*args, **kwargs)
        finally:
            cast_tree.write_back(None)

    return user_function


def _has_implicit_parameter(function: Function) -> bool:
    """Return whether the first argument is ``self``, ``cls`` or ``ctx``, which is not cast."""
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in _IMPLICIT_PARAMETERS


def _dtype_for(cast: Cast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype to cast the arguments to; None if casts are off or no argument can be cast."""
    on = [device for device in device_types() if torch.is_autocast_enabled(device)]
    if not on:
        return None
    if cast is Cast.LOWER_PRECISION:
        return torch.get_autocast_dtype(on[-1])
    if cast is Cast.FP32:
        return torch.float32
    found = _dtypes(tree_leaves((args, kwargs)), on)
    return (found.pop() if len(found) == 1 else torch.float32) if found else None
