"""The texts of errors of torch where float32 tensors meet 16-bit weights: the part or method, and the entry for it.

Two kinds are found. A forward makes a float32 tensor itself (``x.float()``) and passes it to a layer. And a method that
computes with weights of its own (``x @ self.proj``) is called from outside of every forward, without being an entry
point.
"""

import re
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from ..basics.dtypes import dtype_name, is_lower_precision
from ..basics.weak_references import OfModule
from ..torch_internals.running import is_eager
from .boundary import Boundary, current_forward

# Torch's words where dtypes do not match, those of matrix products, convolutions, norms, RNNs and index functions.
_DTYPES: Final = re.compile(r"\bd?types?\b|type promoting", re.IGNORECASE)


def is_of_dtypes(error: Exception) -> bool:
    """Return whether an error of torch is one of floating tensors whose dtypes do not match."""
    text = str(error)
    return _DTYPES.search(text) is not None and "Long" not in text  # indices


def explain_inside(error: Exception, boundary: Boundary, module: nn.Module) -> str | None:
    """Return the text for a forward, or entry point, that passed float32 to 16-bit weights; None for other errors.

    Args:
        error: the exception, with its traceback.
        boundary: the one that was called across.
        module: the module that was called from outside.
    """
    inner = boundary.inner_dtype
    if inner is None or not is_lower_precision(inner) or not is_of_dtypes(error):
        return None
    names = _names(boundary, module)
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    failed = next((each for each in reversed(frames) if isinstance(each, nn.Module) and each in names), module)
    name, kind, caller = names.get(failed, ""), type(failed).__name__, type(module).__name__
    if not name:
        return (
            f"forward of {caller} has failed where float32 tensors meet its {dtype_name(inner)} weights ({error}): its "
            "code makes float32 tensors, by .float() or of constants. Let it cast them to the weights' dtype, or use "
            "opt_level='O1' or 'O4', which cast in functions"
        )
    if type(failed).__module__.startswith("torch.nn."):
        way_out = f"cast its inputs: entry_points={[f'{name}.forward']}"
    else:
        way_out = f"keep it in float32: keep_fp32={[name]}"
    return (
        f"{name!r} ({kind}) has failed in a forward of {caller}, because it was called with float32 and its weights "
        f"are {dtype_name(inner)} ({error}): the model's own code makes float32 tensors, by .float() or of constants. "
        f"In mpinit.initialize {way_out}, beside those that you passed; or use opt_level='O1' or 'O4', which cast in "
        "functions"
    )


def _names(boundary: Boundary, module: nn.Module) -> dict[nn.Module, str]:
    """Return the dotted names of the modules of a session, or where it is undone of the module alone."""
    models = boundary.guard.models if boundary.guard is not None else [module]
    return {part: name for model in models for name, part in model.named_modules()}


class _Calls(threading.local):
    """The number of this thread's running calls of methods that were called from outside of every forward."""

    depth = 0


_calls: Final = _Calls()


class MethodOutside(OfModule):
    """A method that computes with weights of its own module; calls from outside of every forward name it in errors.

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
        _calls.depth += 1
        try:
            return method(module, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            inner = self.boundary.inner_dtype
            if _calls.depth > 1 or inner is None or not is_of_dtypes(error) or self.boundary.guard is None:
                raise
            name = _names(self.boundary, module).get(module, "")
            entry = f"{name}.{self.name}" if name else self.name
            raise RuntimeError(
                f"{self.name!r} of {type(module).__name__} was called from outside of the model's forward, and has "
                f"failed where float32 tensors meet {dtype_name(inner)} weights ({error}). Name it in "
                f"mpinit.initialize, beside those that you passed, so that its inputs and outputs are cast: "
                f"entry_points={[entry]}"
            ) from error
        finally:
            _calls.depth -= 1

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
