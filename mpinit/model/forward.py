"""Casts around the forwards and entry points of models, and around modules inside that compute in another dtype.

Patches are objects of classes, not closures: a copy of the module omits them (``copies.py``).
"""

import inspect
import re
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..autocast.forward_casts import ForwardCasts
from ..autocast.thread_flags import call_without_casts, is_on
from ..basics.dtypes import dtype_name, is_lower_precision
from ..basics.patching import UndoStack
from ..basics.running import constant_when_compiled, current_pass, is_tracing_symbolically, without_tracing
from ..basics.weak_references import OfModule
from ..config.plan import MasterWeightsMode, Plan
from ..distributed.ddp import note_running_wrapper
from .boundary import Boundary, caller_dtype, current_forward
from .entry_points import ArgumentNames
from .forward_weights import ForwardWeights, WeightCasts
from .input_values import warn_of_inputs
from .selection import Selection, has_forward
from .writes import Writes

# Torch's and NumPy's words where dtypes do not match, or where a function has no 16-bit kernel.
_DTYPES: Final = re.compile(r"\bd?types?\b|type promoting|ScalarType|\b(Complex)?Half\b|\bBFloat16\b", re.IGNORECASE)
_NOTE: Final = (
    "mpinit: forward of {} runs in {}. Where its own code needs float32 (a function without a 16-bit kernel, a tensor"
    " that it makes itself), name that module in mpinit.initialize(keep_fp32=[...]), or use opt_level='O1' or 'O4', "
    "which cast in functions. Where a module is named in compute_fp32, it returns float32 to the layers after it: "
    "name it in keep_fp32, and it returns 16 bits. Where a method besides forward was called, name it in "
    "entry_points=[...], so that its inputs and outputs are cast. Where forward computes the loss too, initialize the"
    " parts that have the weights, mpinit.initialize(model.layers, optimizer): the loss is float32 then. Where an "
    "input is an object with tensors in it, mpinit.register_input its class. Where a module was put into the model "
    "after mpinit.initialize, call .to({}) on it, and optimizer.add_param_group. Where functional_call was given "
    "model.state_dict(), whose entries are float32, call it inside mpinit.float32_weights(model)."
)
_REPLICATES: Final = (
    "torch.nn.DataParallel makes copies of {0} in every forward, and they would omit the casts around {0}.forward, "
    "which mpinit.initialize put there: use DistributedDataParallel with a process for each device, or call "
    "mpinit.undo on the model first"
)


_ON_REPLICA: Final = "_replicate_for_data_parallel"


class _Absent:
    """The default of an argument that was not passed: a class, which cloudpickle and dill pickle by its name."""


class PatchedForward(OfModule):
    """Patched method of a module; its :attr:`run` is set as ``module.forward`` (or another name).

    With ``is_part=True`` (a submodule) it casts only if no forward of the same dtype is running in this thread. With
    ``is_part=False`` (an argument of ``initialize``) it always casts, except when it calls itself. ``weights`` replaces
    float32 parameters by 16-bit casts while the method runs; None if it computes with the parameters themselves.
    """

    # Without a __dict__: functools.wraps would copy it, and with it the session, into a wrapper of the user's.
    __slots__ = (
        "boundary",
        "callers",
        "casts_inside",
        "has_read_inputs",
        "inner",
        "is_part",
        "name",
        "names",
        "owner",
        "weights",
    )

    _is_direct: ClassVar[bool] = False

    def __init__(
        self,
        module: nn.Module,
        boundary: Boundary,
        name: str = "forward",
        is_part: bool = True,
        weights: ForwardWeights | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.boundary = boundary
        self.name = name
        self.is_part = is_part
        # The instance's own method before this one; None: the class's.
        self.inner: Callable[..., Any] | None = vars(module).get(name)
        self.names = ArgumentNames(self._inner()) if boundary.keep_inputs else None
        self.owner: object = None
        self.weights = weights
        # The dtypes of the forwards that called this submodule, and None if user code did. Calls from a forward of the
        # same dtype are not recorded: they are fast.
        self.callers: tuple[torch.dtype | None, ...] = ()
        # True: inputs are cast for callers inside of the model, too.
        self.casts_inside = False
        self.has_read_inputs = False

    @constant_when_compiled
    def direct_dtype(self) -> torch.dtype | None:
        """Return the dtype of the forwards inside of which calls go straight to the class's forward; None: of none."""
        return self.boundary.inner_dtype if self._is_direct else None

    @property
    def run(self) -> types.MethodType:
        """Return a bound method that runs the module with its casts, so that dynamo shares one graph per class."""
        run = types.FunctionType(_run.__code__, globals(), "run", _run.__defaults__)
        if self.inner is None:
            method = getattr(type(self._module()), self.name)
            run.__doc__ = method.__doc__
            run.__wrapped__ = method  # type: ignore[attr-defined]
        else:
            run.__doc__ = self.inner.__doc__
            signature = _signature_of(self.inner)
            if signature is not None:
                run.__signature__ = signature  # type: ignore[attr-defined]
        return types.MethodType(run, self)

    def _from_outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        boundary, output_dtype = self.boundary, self.boundary.output_dtype
        if boundary.inner_dtype is None:
            return self._inner()(*args, **kwargs)
        caller = None
        if self.is_part:
            caller = caller_dtype(boundary.inner_dtype, self.callers, args, kwargs)
            if not torch.compiler.is_compiling() and caller not in self.callers and current_pass() == -1:
                self.callers = (*self.callers, caller)
            output_dtype = torch.float32 if boundary.computes else caller or output_dtype
        is_inside = caller is boundary.inner_dtype and not self.casts_inside
        if is_inside or current_forward.dtype is not None or torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling():
                note_running_wrapper()
            return self._with_weights(is_inside, args, kwargs, output_dtype)
        writes = boundary.writes
        if writes is not None and torch._C._is_tracing():
            with without_tracing():
                writes.before_forward()
        elif writes is not None:
            writes.before_forward()
            if boundary.warns_of_inputs and not self.has_read_inputs:
                self.has_read_inputs = True  # once, because reading numbers may be a device sync
                named = [*ArgumentNames(self._inner()).named(args), *kwargs.items()]
                method = f"{type(self.module).__name__}.{self.name}"
                warn_of_inputs(named, boundary.keep_inputs, boundary.inner_dtype, method)
        try:
            return self._with_weights(is_inside, args, kwargs, output_dtype)
        except (RuntimeError, ValueError, TypeError) as error:
            dtype = boundary.inner_dtype
            is_of_dtypes = dtype is not None and is_lower_precision(dtype) and _DTYPES.search(str(error)) is not None
            # One note for all forwards that the error comes through.
            if is_of_dtypes and not any(note.startswith("mpinit: ") for note in getattr(error, "__notes__", ())):
                error.add_note(_NOTE.format(type(self.module).__name__, dtype_name(dtype), dtype))
            raise

    def _with_weights(
        self, is_inside: bool, args: tuple[Any, ...], kwargs: dict[str, Any], output_dtype: torch.dtype | None
    ) -> Any:
        # While torch.fx traces, weights are not cast: it would record the casts as constants.
        weights = self.weights
        if weights is None or weights.casts.dtype is not self.boundary.inner_dtype or is_tracing_symbolically():
            return self._run(is_inside, args, kwargs, output_dtype)
        with weights.cast_traced() if torch.compiler.is_compiling() else weights.cast():
            return self._run(is_inside, args, kwargs, output_dtype)

    def _run(
        self, is_inside: bool, args: tuple[Any, ...], kwargs: dict[str, Any], output_dtype: torch.dtype | None
    ) -> Any:
        run, casts = self._inner(), self.boundary.casts
        if is_inside:
            return self.boundary.call_inside(self._module(), run, args, kwargs)
        # Inside a forward of its model a part runs with that forward's autocast state. A model of a session without O1
        # runs with autocast off, also if another session has switched it on. What computes in float32 has all casts
        # off: a checkpoint that recomputes it has opened a block with those of its forward.
        is_outermost = current_forward.dtype is None or not self.is_part
        if self.boundary.computes:
            run = partial(call_without_casts, run) if is_on() or torch.compiler.is_compiling() else run
        elif casts is not None and is_outermost and (casts.dtype or is_on() or torch.compiler.is_compiling()):
            run = partial(casts.run, run)
        return self.boundary.call_with_casts(self._module(), run, self.names, args, kwargs, output_dtype)

    def _inner(self) -> Callable[..., Any]:
        # Not bound by __get__, which torch.compile does not support for methods of torch's modules in 2.11 and 2.12.
        if self.inner is not None:
            return self.inner
        module = self._module()
        if module is None:
            module = self.module  # raises
        method: Callable[..., Any] = getattr(type(module), self.name)
        return partial(method, module)

    def refuse_replica(self) -> None:
        """Refuse DataParallel, which calls ``_replicate_for_data_parallel``."""
        raise RuntimeError(_REPLICATES.format(type(self.module).__name__))

    def put_back(self) -> None:
        """Put back what the module had before, unless another patch has been added since. May be called again."""
        self.owner = None
        module = self._module()
        if module is not None and vars(module).get(_ON_REPLICA) == self.refuse_replica:
            del vars(module)[_ON_REPLICA]
        if module is None or patched_forward(vars(module).get(self.name)) is not self:
            return
        if self.inner is None:
            del vars(module)[self.name]
        else:
            vars(module)[self.name] = self.inner

    def __reduce__(self) -> Any:
        """Copy a wrapper of the user's around this method with the method that is inside of this one."""
        return _without_casts, (self.module, self.name, self.inner)


class _DirectPart(PatchedForward):
    """Patched forward of a submodule which, inside of a forward of its dtype, runs its class's forward and no more.

    A class, because a compiled forward checks the types of these objects: what else it reads of each, it would check
    in every call. The dtype it need not check: weights of this dtype are inputs of the graph.
    """

    __slots__ = ()

    _is_direct = True


def _without_casts(module: nn.Module, name: str, inner: Callable[..., Any] | None) -> PatchedForward:
    forward = PatchedForward(module, Boundary(None, cast_inputs=False, casts=None), name)
    forward.inner = inner
    return forward


def _run(self: PatchedForward, first: Any = _Absent, /, *args: Any, **kwargs: Any) -> Any:
    # The fast path: every call of a patched module runs this, with one argument nearly always.
    running = current_forward.dtype
    if running is not None and running is self.direct_dtype():
        module = self._module()
        if module is not None:
            if first is _Absent:
                return type(module).forward(module, *args, **kwargs)
            return type(module).forward(module, first, *args, **kwargs)
    arguments = args if first is _Absent else (first, *args)
    is_inside = running is self.boundary.inner_dtype and (self.weights is None or self.weights.are_in())
    if is_inside and ((self.is_part and not self.casts_inside) or current_forward.module is self._module()):
        return self._inner()(*arguments, **kwargs)
    return self._from_outside(arguments, kwargs)


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's signature with a first argument more, because ``inspect`` drops the first of a method."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def patched_forward(method: Any) -> PatchedForward | None:
    """Return the object that :attr:`PatchedForward.run` is bound to; None for any other method."""
    is_bound = type(method) is types.MethodType and isinstance(method.__self__, PatchedForward)
    return method.__self__ if is_bound and method.__func__.__code__ is _run.__code__ else None


def patch_forwards(selection: Selection, plan: Plan, writes: Writes, owner: object, undos: UndoStack) -> Boundary:
    """Put casts around the models' forwards and entry points, and around the parts that can be called by themselves.

    The patches keep ``owner`` alive. Returns the boundary of the modules that are cast.
    """
    casts_model = plan.cast_model and is_lower_precision(plan.model_dtype)
    casts = ForwardCasts(plan.function_dtype, casts_model)
    make = partial(
        Boundary,
        output_dtype=plan.output_dtype,
        keep_inputs=plan.keep_inputs,
        writes=writes,
        warns_of_inputs=casts_model and plan.properties.verbosity > 0,
    )
    kept, cast = (make(dtype, plan.cast_model, casts) for dtype in (torch.float32, plan.model_dtype))
    computing = make(torch.float32, True, None, computes=True)
    for each in (kept, cast, computing):
        undos.push(each.retire)
    narrow_casts = float32_casts = None
    if plan.masters is MasterWeightsMode.IN_MODEL:
        float32_modules = frozenset([*selection.float32_modules, *selection.computes])
        kept_parameters, sums = selection.float32_parameters, plan.properties.grad_dtype
        narrow_casts = WeightCasts(plan.model_dtype, float32_modules, kept_parameters, sums)
        undos.push(narrow_casts.close)
    elif casts_model and selection.computes:
        float32_casts = WeightCasts(torch.float32, (), ())
    # Weakly: a patch keeps the session alive, and the session has this list.
    patched: list[weakref.ref[PatchedForward]] = []
    undos.push(partial(_put_back, patched))
    entry_forwards = {module for module, name in selection.entry_points if name == "forward"}

    def patch(module: nn.Module, is_kept: bool, name: str, is_part: bool) -> PatchedForward:
        computes = module in selection.computes
        # With "model" the parameters of one that computes in float32 are float32, and no cast replaces them.
        weight_casts = float32_casts if computes else None if is_kept else narrow_casts
        weights = None if weight_casts is None else ForwardWeights(module, weight_casts)
        is_parts_forward = is_part and name == "forward"
        casts_inside = computes or (is_parts_forward and module in entry_forwards)
        is_direct = is_parts_forward and not casts_inside and weights is None and name not in vars(module)
        boundary = computing if computes else kept if is_kept else cast
        forward = (_DirectPart if is_direct else PatchedForward)(module, boundary, name, is_part, weights)
        forward.casts_inside = casts_inside
        forward.owner = owner
        patched.append(weakref.ref(forward))
        vars(module)[name] = forward.run
        return forward

    models = set(selection.index.models)
    for module in selection.computes:
        if has_forward(module) and module not in models:
            patch(module, False, "forward", is_part=True)
    for module, dtype in selection.parts.items():
        if module not in selection.computes:
            patch(module, dtype is torch.float32, "forward", is_part=True)
    for module, name in selection.entry_points:
        if name != "forward" or module not in selection.parts:
            patch(module, module in selection.float32_modules, name, is_part=bool(selection.parts))
    inside = {module for name, module in selection.index.named_modules if name}
    for model in selection.index.models:
        is_part = bool(selection.parts) and model in inside
        forward = patch(model, model in selection.kept, "forward", is_part)
        # Of a part's replica torch says that tensors are on two devices.
        vars(model)[_ON_REPLICA] = forward.refuse_replica
    return cast


def _put_back(patched: list[weakref.ref[PatchedForward]]) -> None:
    for known in reversed(patched):
        forward = known()
        if forward is not None:
            forward.put_back()
