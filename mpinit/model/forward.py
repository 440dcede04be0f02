"""Casts around the forwards of models, of what else is called from outside, and of modules of another type inside.

What is put on a module are objects of module-level classes that know their module, never closures: a copy or an
unpickled model then runs its own weights.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ..basics.modules import modules_of
from ..basics.patching import Undo, UndoStack
from ..plan import Plan
from ..torch_internals.compiled_calls import compiled_calls
from ..torch_internals.forward_casts import ForwardCasts
from ..torch_internals.running import is_tracing_symbolically
from .arguments import ArgumentNames
from .boundary import Boundary, caller_dtype, here
from .entry_points import entry_points
from .forward_weights import ForwardWeights, ModulesWithCasts
from .own_weights import Writes
from .selection import Selection

_ABSENT: Final = object()


class _CannotBeScripted(RuntimeError, AttributeError):
    """Both, so that ``hasattr`` goes on saying no."""


class PatchedForward:
    """A module's method with casts around it; stands at ``module.forward`` (or another name) as a plain attribute.

    Args:
        module: the module whose method runs inside.
        boundary: what is done to calls from outside.
        name: the method's name.
        is_part: whether calls from any forward that computes in the same type are passed on as they are. A model casts
            its inputs and outputs for whoever calls it but itself.
        weights: casts that stand in the places of its float32 parameters while it runs; None where it has its own.
    """

    # Without a __dict__, which functools.wraps would copy into a wrapper of the user's, session and all.
    __slots__ = (
        *("__weakref__", "boundary", "inner", "is_direct", "is_part", "is_replica", "module", "name", "names"),
        *("owner", "weights"),
    )

    def __init__(
        self,
        module: nn.Module,
        boundary: Boundary,
        name: str = "forward",
        is_part: bool = True,
        weights: ForwardWeights | None = None,
    ) -> None:
        self.module = module
        self.boundary = boundary
        self.name = name
        self.is_part = is_part
        self.is_replica = False
        # What stood on the instance before this one; None: the class's own.
        self.inner: Callable[..., Any] | None = _beneath_dead_patches(vars(module).get(name))
        self.names = ArgumentNames(self.__wrapped__) if boundary.keep_inputs else None
        self.owner: object = None
        self.weights = weights
        # Whether calls that need no cast go to the class's own forward.
        self.is_direct = is_part and weights is None and self.inner is None and name == "forward"

    def __call__(self, first: Any = _ABSENT, /, *args: Any, **kwargs: Any) -> Any:
        # Every module of a model comes through here, with one argument nearly always.
        if self.is_direct and here.dtype is self.boundary.inner_dtype and not args and not kwargs:
            module = self.module
            if first is not _ABSENT:
                return type(module).forward(module, first)
        if (
            here.dtype is self.boundary.inner_dtype
            and (self.is_part or here.module is self.module)
            and (self.weights is None or self.weights.are_in)
        ):
            if args or kwargs or first is _ABSENT or self.inner is not None:
                args = args if first is _ABSENT else (first, *args)
                return self._inside()(*args, **kwargs)
            module = self.module
            return getattr(type(module), self.name)(module, first)
        return self._from_outside(args if first is _ABSENT else (first, *args), kwargs)

    def _from_outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        boundary, output_dtype = self.boundary, self.boundary.output_dtype
        if boundary.inner_dtype is None:
            return self._inside()(*args, **kwargs)
        is_inside = False
        if self.is_part:
            caller = caller_dtype(boundary.inner_dtype, args, kwargs, self.is_replica)
            is_inside = caller is boundary.inner_dtype
            output_dtype = caller or output_dtype
        if not is_inside and boundary.before_forward is not None and here.dtype is None and not self.is_replica:
            boundary.announce()
        # What torch.fx records are the float32 weights: casts of them it would take for constants.
        if self.weights is None or self.weights.dtype is not boundary.inner_dtype or is_tracing_symbolically():
            return self._run(is_inside, args, kwargs, output_dtype)
        if self.is_replica:
            self.weights.cast_replica(self.module)
            return self._run(is_inside, args, kwargs, output_dtype)
        try:
            self.weights.enter()
            return self._run(is_inside, args, kwargs, output_dtype)
        finally:
            self.weights.leave()

    def _run(
        self, is_inside: bool, args: tuple[Any, ...], kwargs: dict[str, Any], output_dtype: torch.dtype | None
    ) -> Any:
        run = self._inside()
        if is_inside:
            return run(*args, **kwargs)
        return self.boundary.cross(self.module, run, self.names, args, kwargs, output_dtype)

    def _inside(self) -> Callable[..., Any]:
        # Not bound by __get__, which torch.compile of torch 2.11 and 2.12 does not know for methods of torch's modules.
        return self.inner or partial(getattr(type(self.module), self.name), self.module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What runs inside; ``inspect.signature`` asks it too."""
        if self.inner is not None:
            return self.inner
        method: Callable[..., Any] = getattr(type(self.module), self.name).__get__(self.module)
        return method

    @property
    def __code__(self) -> types.CodeType:
        """That of what runs inside: torch.export names its inputs' source by it."""
        code: types.CodeType = self.__wrapped__.__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        # torch.jit.script asks for these first of all.
        raise _CannotBeScripted(
            f"torch.jit.script compiles source, and would leave out the casts around {type(self.module).__name__}."
            f"{self.name}, which mpinit.initialize put there: use torch.jit.trace or torch.export.export, which record "
            "them, or call mpinit.undo on the model first"
        )

    def for_replica(self, replica: nn.Module) -> PatchedForward:
        """The same on a replica that DataParallel makes of the module."""
        patched = copy.copy(self)
        patched.module, patched.is_replica = replica, True
        if isinstance(self.inner, PatchedForward):
            patched.inner = self.inner.for_replica(replica)
        return patched

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # A copy is no part of the session that owns the original.
        state = {name: getattr(self, name) for name in self.__slots__ if name != "__weakref__"}
        return None, {**state, "owner": None}


class PatchedReplicate:
    """``_replicate_for_data_parallel`` for patched modules: each replica's forward must run the replica."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        module = self.module
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
        for name, value in vars(module).items():
            if isinstance(value, PatchedForward):
                replica.__dict__[name] = value.for_replica(replica)
        return replica


def patch_forwards(
    selection: Selection,
    plan: Plan,
    owner: object,
    before_forward: Callable[..., None] | None = None,
    writes: Writes | None = None,
) -> Undo:
    """Put casts around the models' forwards and entry points, and around whatever of them can be called by itself.

    Args:
        selection: the models and what of them computes in which type; patched in place.
        plan: what to do.
        owner: kept alive as long as the models are.
        before_forward: called before every forward that comes from outside of all initialised models; with True where
            compiled code is run that may hold one.
        writes: who knows of writes to parameters, where these stay float32 and are cast inside forwards.

    Returns:
        The undo. A wrapper that was put around a patched forward later is left where it is, and casts no longer.
    """
    casts = ForwardCasts(plan.function_dtype) if plan.patch_functions else None
    output_dtype = plan.output_dtype if plan.cast_outputs else None

    def boundary(dtype: torch.dtype) -> Boundary:
        return Boundary(dtype, plan.cast_model, output_dtype, casts, plan.keep_inputs, before_forward)

    kept, cast = boundary(torch.float32), boundary(plan.model_dtype)
    within = {module for model in selection.models for module in modules_of(model)[1:]}
    with UndoStack() as undos:
        own = _modules_with_casts(selection, plan, writes, undos)
        undos.push(kept.retire)
        undos.push(cast.retire)
        if before_forward is not None:
            compiled_calls.add(cast)

        def patch(module: nn.Module, is_kept: bool, name: str, is_part: bool) -> PatchedForward:
            weights = None if is_kept or own is None else ForwardWeights(module, own)
            forward = PatchedForward(module, kept if is_kept else cast, name, is_part, weights)
            _patch_forward(forward, undos)
            return forward

        for module, dtype in selection.parts.items():
            patch(module, dtype is torch.float32, "forward", is_part=True)
        for module, name in entry_points(selection.models, plan.entry_points):
            patch(module, module in selection.float32_modules, name, is_part=bool(selection.parts))
        for model in selection.models:
            is_part = bool(selection.parts) and model in within
            patch(model, model in selection.kept, "forward", is_part).owner = owner
    return undos.unwind


def _modules_with_casts(
    selection: Selection, plan: Plan, writes: Writes | None, undos: UndoStack
) -> ModulesWithCasts | None:
    if writes is None:
        return None
    modules = dict.fromkeys(module for model in selection.models for module in model.modules())
    own = ModulesWithCasts(
        (module for module in modules if module not in selection.float32_modules), plan.model_dtype, writes
    )
    undos.push(own.close)
    return own


def _patch_forward(forward: PatchedForward, undos: UndoStack) -> None:
    attributes = vars(forward.module)
    replicate = PatchedReplicate(forward.module)
    undos.push(_Reversion(attributes, forward, replicate))
    attributes[forward.name] = forward
    attributes["_replicate_for_data_parallel"] = replicate


class _Reversion:
    """Puts back what stood in a module before, unless somebody else has put something there since."""

    __slots__ = ("_attributes", "_before", "_forward", "_replicate")

    def __init__(self, attributes: dict[str, Any], forward: PatchedForward, replicate: PatchedReplicate) -> None:
        self._attributes, self._forward, self._replicate = attributes, forward, replicate
        self._before = attributes.get(forward.name), attributes.get("_replicate_for_data_parallel")

    def __call__(self) -> None:
        self._forward.owner = None
        self._put_back(self._forward.name, self._forward, self._before[0])
        self._put_back("_replicate_for_data_parallel", self._replicate, self._before[1])

    def _put_back(self, name: str, ours: Any, before: Any) -> None:
        if self._attributes.get(name) is not ours:
            return
        if before is None:
            del self._attributes[name]
        else:
            self._attributes[name] = before


def take_off_copy(copied: nn.Module) -> None:
    """Take the patches off a copy of an initialised model, which belong to no session: it then casts nothing."""
    for module in copied.modules():
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, PatchedForward):
                beneath = _beneath_dead_patches(value)
                if beneath is None:
                    del attributes[name]
                else:
                    attributes[name] = beneath


def _beneath_dead_patches(forward: Any) -> Any:
    """What a forward's patches run inside that belong to no session: those of a copy, or ones that were undone."""
    while isinstance(forward, PatchedForward) and not forward.boundary.is_live:
        forward = forward.inner
    return forward
