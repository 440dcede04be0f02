"""The boundary around an initialised model: calls by user code are checked, and their arguments and results cast.

Inside a forward everything is in one dtype, and a call from one module to the next casts nothing.
``current_forward.dtype`` is the dtype of the forward that runs in this thread. If it is None, user code is the caller.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..autocast.forward_casts import ForwardCasts
from ..basics.dtypes import cast_within_range, is_lower_precision
from ..basics.running import current_pass, is_tracing_symbolically
from ..basics.trees import TensorCast, TreeCast, cast_tree, write_elements
from ..config.plan import KeepInputPredicate
from .entry_points import ArgumentNames
from .writes import Writes


class _CurrentForward(threading.local):
    """The forward that runs in this thread.

    Attributes:
        dtype: the type that the innermost running forward computes in; None: no forward of an initialised model runs.
        module: the module whose forward, or entry point, was called across the boundary last.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.module: nn.Module | None = None

    def __reduce__(self) -> str:
        # Pickle it by its name in this module: cloudpickle pickles a patched forward's code with the globals it reads.
        return "current_forward"


current_forward: Final = _CurrentForward()


@dataclass(eq=False)
class Boundary:
    """The casts around calls of an initialised model from outside; one object serves many modules.

    Attributes:
        inner_dtype: the dtype that the modules compute in.
        writes: what is done before a call while no forward of an initialised model runs in this thread.
        computes: whether modules compute in float32, without O1's casts, and return float32 to every caller.
        warns_of_inputs: whether the first call of each method warns of inputs that their cast spoils.
    """

    inner_dtype: torch.dtype | None
    cast_inputs: bool
    casts: ForwardCasts | None
    output_dtype: torch.dtype | None = None
    keep_inputs: tuple[KeepInputPredicate, ...] = ()
    writes: Writes | None = None
    computes: bool = False
    warns_of_inputs: bool = False

    def retire(self) -> None:
        """Cast nothing from now on: a wrapper of the user's may still call the patched forward after the undo."""
        self.inner_dtype = self.output_dtype = self.casts = self.writes = None
        self.cast_inputs = False

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Let the modules compute in float32 inside the block, where their parameters are float32."""
        narrow, self.inner_dtype = self.inner_dtype, torch.float32
        try:
            yield
        finally:
            if self.writes is not None:  # it was not retired
                self.inner_dtype = narrow

    def call_with_casts(
        self,
        module: nn.Module | None,
        function: Callable[..., Any],
        names: ArgumentNames | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output_dtype: torch.dtype | None,
    ) -> Any:
        """Call ``function`` with inputs and outputs cast.

        All inputs are cast where ``names`` is None, and no outputs where ``output_dtype`` is.
        """
        is_plain = self.cast_inputs and names is None and not torch.compiler.is_compiling()
        if is_plain and len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            return self._call_with_tensor(module, function, args[0], output_dtype)
        inputs = None
        if self.cast_inputs and self.inner_dtype is not None:
            inputs = TreeCast(self.inner_dtype, cast=self._cast_of_inputs())
            if names is None:
                args = tuple([inputs(value) for value in args])
                kwargs = {name: inputs(value) for name, value in kwargs.items()} if kwargs else kwargs
            else:
                args, kwargs = names.cast(args, kwargs, self.keep_inputs, inputs)
        try:
            output = self.call_inside(module, function, args, kwargs)
        finally:
            if inputs is not None and output_dtype is not None:
                inputs.write_back(output_dtype)
        if output_dtype is None:
            return output
        return cast_tree(output, output_dtype) if inputs is None else inputs.back(output, output_dtype)

    def call_inside(
        self, module: nn.Module | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function`` inside the model: neither its arguments nor those of nested calls are cast."""
        dtype, outer = current_forward.dtype, current_forward.module
        if module is not None and "_orig_mod" in module._modules:
            # Dynamo fails where it reads a compiled module: it has the module inside of it already.
            module = module._modules["_orig_mod"]
        current_forward.dtype, current_forward.module = self.inner_dtype or dtype, module
        try:
            return function(*args, **kwargs)
        finally:
            current_forward.dtype, current_forward.module = dtype, outer

    def _cast_of_inputs(self) -> TensorCast:
        """Return the function that casts an input: the user's stay finite, those between parts of a model may not."""
        return cast_within_range if current_forward.dtype is None else torch.Tensor.to

    def _call_with_tensor(
        self,
        module: nn.Module | None,
        function: Callable[..., Any],
        tensor: torch.Tensor,
        output_dtype: torch.dtype | None,
    ) -> Any:
        """Do the same as :meth:`call_with_casts` for one tensor in a third of the time.

        Norms that stay float32 inside a 16-bit model are called this way, many in each forward.
        """
        passed, cast = tensor, self._cast_of_inputs()
        if tensor.is_floating_point() and self.inner_dtype is not None and tensor.dtype is not self.inner_dtype:
            passed = cast(tensor, self.inner_dtype)
        version = passed._version if passed is not tensor and not passed.is_inference() else None
        keeps_identity = version is not None
        try:
            output = self.call_inside(module, function, (passed,), {})
        finally:
            if keeps_identity and passed._version != version:
                keeps_identity = write_elements(tensor, passed, cast)
        if output_dtype is None:
            return output
        if output is passed and keeps_identity:
            output = tensor
        if type(output) is torch.Tensor:
            return output.to(output_dtype) if output.is_floating_point() else output
        return TreeCast(output_dtype, {id(passed): tensor} if keeps_identity else None)(output)


def caller_dtype(
    inner_dtype: torch.dtype | None,
    callers: Sequence[torch.dtype | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.dtype | None:
    """Return the dtype of the forward that calls this submodule; None if user code calls it.

    Activation checkpointing calls a submodule again in the backward pass, when no forward runs. If user code never
    called it, a forward did. Otherwise the dtypes of its inputs decide.

    Args:
        inner_dtype: the dtype that the submodule computes in.
        callers: the results of earlier calls, without those for callers that compute in ``inner_dtype``.
        args, kwargs: the inputs.
    """
    if is_tracing_symbolically():
        return inner_dtype
    if current_forward.dtype is not None or torch.compiler.is_compiling() or current_pass() == -1:
        return current_forward.dtype
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    narrow = next((dtype for dtype in dtypes if is_lower_precision(dtype)), None)
    if narrow is not None:
        return narrow
    if None not in callers:
        return callers[-1] if callers else inner_dtype
    found = next(iter(dtypes), inner_dtype)
    return None if found is torch.float32 and inner_dtype is not torch.float32 else found
