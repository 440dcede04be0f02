"""Wrappers that cast a function's arguments by its row of the policy, while their device's autocast flag is on."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ..basics.dtypes import LOWER_PRECISION
from ..basics.trees import TreeCast
from . import cudnn_weights
from .cast_lists import CASTS_INSIDE, Cast, CastRow
from .thread_flags import call_without_casts, device_types

Function = Callable[..., Any]

_CASTABLE: Final = (torch.float32, *LOWER_PRECISION)
_CONTAINERS: Final = (list, tuple)
# First parameters of functions that are passed by Python or autograd, not by the caller.
_IMPLICIT_PARAMETERS: Final = ("self", "cls", "ctx")


def wrapper(row: CastRow, name: str, original: Function, devices: tuple[str, ...]) -> Function:
    """Wrap the function at ``name``, once for each device whose own autocast does not follow the row."""
    wrapped = _traceable_method(original, name) if name.startswith("torch.Tensor.") else original
    body = functools.partial(call_without_casts, wrapped) if row.casts_off else wrapped
    for device in devices:
        outer = _for_device(row, name, wrapped, body, device)
        # With casts_off, only the innermost call switches the flags off. If an outer wrapper did that, the wrapper of
        # the next device would find its flag off and cast nothing.
        body = _for_device(row, name, body, body, device) if row.casts_off else outer
        wrapped = outer
    for device in devices if row.cast is Cast.BANNED else ():
        wrapped = _banned(row.name, wrapped, device)
    return renamed(wrapped, original, name) if devices else wrapped


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


def _for_device(row: CastRow, name: str, original: Function, body: Function, device: str) -> Function:
    """Make a function that casts and calls ``body`` while the device's casts are on, and else calls ``original``."""
    if device == "cuda" and row.name in cudnn_weights.NETWORKS:
        return _recurrent(row.name, original)
    if row.cast is Cast.LOWER_PRECISION:
        return _lower(row.arguments if device in CASTS_INSIDE else 0, original, body, device)
    if row.cast is Cast.PROMOTE:
        return _promote(original, body, device)
    if row.cast is Cast.REFUSED:
        return _refused(name, original, device)
    return _fp32(original, body, device)


def _fp32(original: Function, body: Function, device: str) -> Function:
    # Locals instead of globals, and an inlined loop, for speed: this wrapper is called between small layers.
    is_on, tensor_type, lower_types = torch.is_autocast_enabled, torch.Tensor, LOWER_PRECISION

    def fp32_function(*args: Any, **kwargs: Any) -> Any:
        if not is_on(device):
            return original(*args, **kwargs)
        if kwargs and fixes_result_dtype(kwargs):
            return call_without_casts(original, *args, **kwargs)
        cast = [
            value.float()
            if isinstance(value, tensor_type) and value.dtype in lower_types and value.device.type == device
            else value
            for value in args
        ]
        if not kwargs:
            return body(*cast)
        return body(*cast, **{key: to_float(value, device) for key, value in kwargs.items()})

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


def _lower(leading: int, original: Function, body: Function, device: str) -> Function:
    def lower_precision_function(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return original(*args, **kwargs)
        if kwargs and fixes_result_dtype(kwargs):
            return call_without_casts(original, *args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        if leading:
            args = tuple(
                value if index >= leading or type(value) is list else _cast(value, dtype, device)
                for index, value in enumerate(args)
            )
        else:
            args = tuple(_cast(value, dtype, device) for value in args)
            kwargs = {key: _cast(value, dtype, device) for key, value in kwargs.items()}
        return body(*args, **kwargs)

    return lower_precision_function


def _recurrent(name: str, original: Function) -> Function:
    """Run a recurrent network in bfloat16 on CUDA, where torch's autocast runs it in float16 whatever its dtype is.

    Casts to float16 are torch's own, which copies all weights into cuDNN's buffer at once, unless the weights have
    several dtypes, which it refuses.
    """

    def recurrent_function(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        if not tensors or not torch.is_autocast_enabled("cuda"):
            return original(*args, **kwargs)
        dtype, are_usual = torch.get_autocast_dtype("cuda"), len(args) == cudnn_weights.ARGUMENTS
        if dtype is torch.float16:
            weights = cudnn_weights.weights_of(args) if are_usual else tensors
            if len({weight.dtype for weight in weights}) == 1:
                return original(*args, **kwargs)
        cast = [_cast(value, dtype, "cuda") for value in args]
        if are_usual:
            cudnn_weights.flatten_casts(name, args, cast)
        return call_without_casts(original, *cast, **{key: _cast(each, dtype, "cuda") for key, each in kwargs.items()})

    return recurrent_function


def collect_dtypes(value: Any, device: str, found: list[torch.dtype]) -> None:
    """Collect the castable dtypes of the device's tensors, also inside lists and tuples."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype
        if dtype not in found and dtype in _CASTABLE and value.device.type == device:
            found.append(dtype)
    elif type(value) in _CONTAINERS:
        for leaf in value:
            collect_dtypes(leaf, device, found)


def promoted_dtype(found: list[torch.dtype]) -> torch.dtype | None:
    """Return the dtype that these promote to: the only one, float32 for several, None for none."""
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.float32


def _promote(original: Function, body: Function, device: str) -> Function:
    def promoting_function(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return original(*args, **kwargs)
        if kwargs and fixes_result_dtype(kwargs):
            return call_without_casts(original, *args, **kwargs)
        if not kwargs and _is_uniform(args, torch.get_autocast_dtype(device)):
            return body(*args)
        found: list[torch.dtype] = []
        collect_dtypes((*args, *kwargs.values()), device, found)
        if len(found) > 1:
            args = tuple(_cast(value, torch.float32, device) for value in args)
            kwargs = {key: _cast(value, torch.float32, device) for key, value in kwargs.items()}
        elif found and found[0] is not torch.float32 and found[0] is not torch.get_autocast_dtype(device):
            # torch's autocast promotes too, and raises for the 16-bit dtype that is not its own.
            return call_without_casts(body, *args, **kwargs)
        return body(*args, **kwargs)

    return promoting_function


def _is_uniform(args: tuple[Any, ...], lower: torch.dtype) -> bool:
    """Return whether all tensors among ``args`` have one dtype, ``lower`` or float32, so that none is cast."""
    dtype: torch.dtype | None = None
    for value in args:
        if isinstance(value, torch.Tensor):
            if dtype is None:
                dtype = value.dtype
            elif value.dtype is not dtype:
                return False
        elif type(value) in _CONTAINERS:
            return False
    return dtype is lower or dtype is torch.float32


def _banned(name: str, run: Function, device: str) -> Function:
    def banned_function(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(device):
            found: list[torch.dtype] = []
            collect_dtypes((*args, *kwargs.values()), device, found)
            if torch.float16 in found:
                raise NotImplementedError(
                    f"{name} was called with float16 tensors: its gradient overflows float16 where a probability is "
                    "near 0 or 1. Use torch.nn.BCEWithLogitsLoss (or binary_cross_entropy_with_logits) and drop the "
                    'sigmoid before it; or mpinit.register_float_function(torch, "sigmoid") before '
                    "mpinit.initialize"
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
    found: list[torch.dtype] = []
    for leaf in tree_leaves((args, kwargs)):
        for device in on:
            collect_dtypes(leaf, device, found)
    return promoted_dtype(found)
