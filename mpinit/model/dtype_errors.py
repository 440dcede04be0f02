"""The texts of errors of torch where float32 tensors meet 16-bit weights: the part or method, and the entry for it.

Two kinds are found. A forward makes a float32 tensor itself (``x.float()``) and passes it to a layer. And a method that
computes with weights of its own (``x @ self.proj``) is called by user code, without being an entry point.
"""

import os
import re
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..basics.dtypes import dtype_name, is_lower_precision
from ..basics.weak_references import OfModule
from ..torch_internals.running import is_eager
from .boundary import Boundary, current_forward
from .selection import reads_weights

# Torch's words where dtypes do not match, those of matrix products, convolutions, norms, RNNs and index functions.
_DTYPES: Final = re.compile(r"\bd?types?\b|type promoting", re.IGNORECASE)


def is_of_dtypes(error: Exception) -> bool:
    """Return whether an error of torch is one of floating tensors whose dtypes do not match."""
    text = str(error)
    return _DTYPES.search(text) is not None and "Long" not in text  # indices


def explain_array(error: TypeError, module: nn.Module, method: str) -> str | None:
    """Return the text for a forward, or entry point, that makes a NumPy array of bfloat16; None for other errors."""
    if "unsupported ScalarType" not in str(error):
        return None
    return (
        f"{method} of {type(module).__name__} makes a NumPy array of a 16-bit tensor, which NumPy does not have "
        f"({error}). Instead of {method}, name in entry_points the methods that it calls with tensors: their outputs "
        "are float32"
    )


def explain_inside(error: Exception, boundary: Boundary, module: nn.Module, method: str) -> str | None:
    """Return the text for a forward, or entry point, that passed float32 to 16-bit weights; None for other errors.

    Args:
        error: the exception, with its traceback.
        boundary: the one that was called across.
        module: the module that was called from outside.
        method: the name of its method, such as "forward".
    """
    inner = boundary.inner_dtype
    if inner is None or not is_lower_precision(inner) or not is_of_dtypes(error):
        return None
    names = _names(boundary, module)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_locals.get("self") for frame in frames]
    failed = next((each for each in reversed(modules) if isinstance(each, nn.Module) and each in names), module)
    name, kind, caller = names.get(failed, ""), type(failed).__name__, type(module).__name__
    innermost = next((each for each in reversed(modules) if isinstance(each, nn.Module)), module)
    if _is_called_functionally(innermost, frames, inner) or (innermost not in names and _has_weights(innermost)):
        return (
            f"{method} of {caller} has failed in a {type(innermost).__name__} whose weights another object has put "
            f"there for the call, as TensorDict.to_module does and with it the losses of TorchRL ({error}). mpinit "
            "casts a module's own weights, and those of such a call, of a target network for example, it does not "
            "cast. Use opt_level='O1' or 'O4', which cast in functions"
        )
    is_of_torch = type(failed).__module__.startswith("torch.nn.")
    parts = [] if is_of_torch or not _is_most(failed, module) else _parts_without(module, failed, names)
    if parts and not reads_weights(_last_frame(frames).f_code, failed):
        return (
            f"{method} of {caller} has failed{_place(frames, failed)}, where float32 tensors meet {dtype_name(inner)} "
            f"ones ({error}): that code is outside of every layer and makes float32 tensors, but {method} has cast its "
            "other ones. Initialize the parts that have the weights instead, and code around them computes in float32: "
            f"mpinit.initialize({parts[0] if len(parts) == 1 else '[' + ', '.join(parts) + ']'}, ...); or use "
            "opt_level='O1' or 'O4', which cast in functions"
        )
    if not name:
        return (
            f"{method} of {caller} has failed where float32 tensors meet its {dtype_name(inner)} weights ({error}): "
            "its code makes float32 tensors, by .float() or of constants. Let it cast them to the weights' dtype, or "
            "use opt_level='O1' or 'O4', which cast in functions"
        )
    if is_of_torch:
        way_out = f"cast its inputs: entry_points={[f'{name}.forward']}"
    else:
        way_out = f"keep it in float32: keep_fp32={[name]}"
    return (
        f"{name!r} ({kind}) has failed in a {method} of {caller}, because it was called with float32 and its weights "
        f"are {dtype_name(inner)} ({error}): the model's own code makes float32 tensors, by .float() or of constants. "
        f"In mpinit.initialize {way_out}, beside those that you passed; or use opt_level='O1' or 'O4', which cast in "
        "functions"
    )


def _has_weights(module: nn.Module) -> bool:
    return bool(module._parameters) or isinstance(vars(module).get("weight"), torch.Tensor)


def _is_called_functionally(module: nn.Module, frames: Sequence[types.FrameType], dtype: torch.dtype) -> bool:
    """Return whether a layer of torch has failed though its inputs have the dtype of its own weights.

    The other weights may be there no longer: a ``with`` block that puts them there has ended.
    """
    if not type(module).__module__.startswith("torch.nn."):
        return False
    called = next((frame.f_locals for frame in reversed(frames) if frame.f_locals.get("self") is module), {})
    inputs = [value for value in called.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return bool(inputs) and all(value.dtype is dtype for value in inputs)


# A longer list of parts is no advice.
_MOST_PARTS: Final = 8


def _parts_without(module: nn.Module, failed: nn.Module, names: dict[nn.Module, str]) -> list[str]:
    """List the largest parts of a module that have its weights, but not the failed part; none if one is not enough."""
    parts: list[str] = []
    opened = [module]
    while opened:
        part = opened.pop()
        if any(parameter is not None for parameter in part._parameters.values()):
            return []  # its own code may compute with them
        for child in part.children():
            if failed in child.modules():
                opened.append(child)
            elif next(child.parameters(), None) is not None and child in names:
                parts.append(f"model.{names[child]}")
    return parts if len(parts) <= _MOST_PARTS else []


def _is_most(failed: nn.Module, module: nn.Module) -> bool:
    """Return whether a failed part has most weights of the module, so that it can hardly be kept in float32."""
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (failed, module)]
    return 2 * counts[0] > counts[1]


def _last_frame(frames: Sequence[types.FrameType]) -> types.FrameType:
    """Return the innermost frame outside of torch's own Python code."""
    own = (frame for frame in reversed(frames) if not str(frame.f_globals.get("__name__")).startswith("torch."))
    return next(own, frames[-1])


def _place(frames: Sequence[types.FrameType], failed: nn.Module) -> str:
    """Name the failed module's method and the line that the error comes from."""
    last = _last_frame(frames)
    called = [frame.f_code.co_name for frame in frames if frame.f_locals.get("self") is failed]
    line = f"{os.path.basename(last.f_code.co_filename)}, line {last.f_lineno}"
    method = f" in its method {called[-1]!r}" if called and called[-1] != "forward" else ""
    return f"{method} (in {last.f_code.co_qualname}: {line})"


def _names(boundary: Boundary, module: nn.Module) -> dict[nn.Module, str]:
    """Return the dotted names of the modules of a session, or where it is undone of the module alone."""
    models = boundary.guard.models if boundary.guard is not None else [module]
    return {part: name for model in models for name, part in model.named_modules()}


class _Calls(threading.local):
    """This thread's running calls of methods that user code has called, while no forward of a model runs.

    Attributes:
        inputs: the arguments of each, the outermost first.
        explained: the text of the error that names a method; the methods that have called it let it pass.
    """

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.explained = ""

    def have_tensors(self) -> list[bool]:
        """Return for each call whether an argument has a floating tensor."""
        leaves = (tree_leaves(inputs) for inputs in self.inputs)
        return [any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in each) for each in leaves]


_calls: Final = _Calls()


class MethodOutside(OfModule):
    """A method that computes with weights of its own module; errors name it if user code has called it.

    It casts nothing. Its :attr:`run` is set on the module.
    """

    __slots__ = ("boundary", "name")

    def __init__(self, module: nn.Module, boundary: Boundary, name: str) -> None:
        super().__init__(module)
        self.boundary = boundary
        self.name = name

    @property
    def run(self) -> types.MethodType:
        """Return a bound method, with the signature of the class's."""
        run = types.FunctionType(_run.__code__, globals(), "run")
        method = getattr(type(self._module()), self.name)
        run.__doc__ = method.__doc__
        run.__wrapped__ = method  # type: ignore[attr-defined]
        return types.MethodType(run, self)

    def call_from_outside(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the class's method.

        Raises:
            RuntimeError: it has failed because float32 tensors met 16-bit weights.
        """
        module = self.module
        _calls.inputs.append((args, kwargs))
        try:
            return method(module, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            inner = self.boundary.inner_dtype
            if inner is None or not is_of_dtypes(error) or self.boundary.guard is None or not self._is_entry(error):
                raise
            name = _names(self.boundary, module).get(module, "")
            entry = f"{name}.{self.name}" if name else self.name
            text = (
                f"{self.name!r} of {type(module).__name__} was called from outside of the model's forward, and has "
                f"failed where float32 tensors meet {dtype_name(inner)} weights ({error}). Name it in "
                f"mpinit.initialize, beside those that you passed, so that its inputs and outputs are cast: "
                f"entry_points={[entry]}"
            )
            _calls.explained = text
            raise RuntimeError(text) from error
        finally:
            _calls.inputs.pop()
            if not _calls.inputs:
                _calls.explained = ""

    @staticmethod
    def _is_entry(error: Exception) -> bool:
        """Return whether the innermost running method is the one to be named: the first that is called with tensors.

        A ``predict`` that is called with NumPy's arrays has no tensors to cast, and its result could be no array where
        it was bfloat16. If none of the methods is called with tensors, the outermost is named.
        """
        if str(error) == _calls.explained:
            return False
        *outer, own = _calls.have_tensors()
        return not any(outer) and (own or not outer)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "boundary": self.boundary, "name": self.name}


def _run(self: MethodOutside, /, *args: Any, **kwargs: Any) -> Any:
    module = self._module()
    method = getattr(type(module), self.name)
    if current_forward.dtype is not None or not is_eager():
        return method(module, *args, **kwargs)
    return self.call_from_outside(method, args, kwargs)


def method_outside(method: Any) -> MethodOutside | None:
    """Return the object that :attr:`MethodOutside.run` is bound to; None for any other method."""
    owner = method.__self__ if type(method) is types.MethodType else None
    return owner if isinstance(owner, MethodOutside) else None
