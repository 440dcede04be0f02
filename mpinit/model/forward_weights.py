"""Float32 parameters that are 16-bit inside forwards: ``master_weights="model"``.

While a forward runs, 16-bit casts replace the parameters in ``module._parameters``, as in
``torch.func.functional_call``: ``module.weight`` is 16-bit inside the forward, and float32 outside. A cast is an
ordinary differentiable operation, so the parameters get float32 gradients.

A parameter has one cast, which is kept until the parameter changes. So code that computes a part of a forward again in
the backward pass finds the same tensors: activation checkpointing, reversible blocks, and functions that were passed
``self.parameters()`` in the forward, and ask autograd for the gradients of these tensors.
"""

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

from ..basics.bulk import Tables, are_same
from ..basics.modules import share_attributes
from ..basics.running import constant_when_compiled, is_eager
from ..basics.weak_references import OfModule
from ..distributed.sharding import fsdp2_refusal, is_distributed, is_managed_by_fsdp
from ..torch_internals.float32_gradients import cast_together
from ..torch_internals.parameter_data import Watched, versions_of

_FLAT_WEIGHTS: Final = ("_flat_weights", "_flat_weight_refs")
# Tensors of other dtypes are never cast.
_CAST: Final = (torch.float32, torch.float16, torch.bfloat16)
_REQUIRES_GRAD: Final = attrgetter("requires_grad")


class _Cast(NamedTuple):
    parameter: nn.Parameter
    version: int
    cast: torch.Tensor


class WeightCasts:
    """The casts of a session's parameters, and the modules that have them in the places of the parameters now.

    Args:
        dtype: the 16-bit dtype: a cast is kept until its parameter changes. Or float32, for modules that compute in
            it: each forward makes new ones, also of buffers.
        kept: the modules whose parameters stay float32.
        kept_parameters: parameters of other modules that stay float32.
        sums: the dtype in which gradients of several uses of a cast add up; None: 16-bit.

    Attributes:
        entered: the modules that have casts in the places of their parameters now.
        lock: held by the thread that runs a forward of the session's models.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        kept: Collection[nn.Module],
        kept_parameters: Sequence[torch.Tensor],
        sums: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self._keeps = dtype is not torch.float32
        self._sums = sums
        # Weakly: what a user replaces is freed.
        self._kept = list(map(weakref.ref, kept))
        self.entered: set[nn.Module] = set()
        self.lock = threading.RLock()
        self._kept_parameters = list(map(weakref.ref, kept_parameters))
        # The id of a parameter -> its cast. A cast keeps its parameter alive, by its graph.
        self._casts: dict[int, _Cast] = {}
        self._watched = Watched()

    def kept(self) -> set[nn.Module | None]:
        """Return the modules whose parameters stay float32; None for those that were freed."""
        return {known() for known in self._kept}

    def slots_of(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        """List the parameters to cast in modules: the module's table of parameters, the name, the parameter."""
        tables: list[dict[str, Any]] = []
        for module in modules:
            tables += [module._parameters] if self._keeps else [module._parameters, module._buffers]
        return [
            (table, name, tensor)
            for table in tables
            for name, tensor in table.items()
            if tensor is not None
            and tensor.dtype is not self.dtype
            and tensor.dtype in _CAST
            and not any(tensor is known() for known in self._kept_parameters)
        ]

    def of(self, layout: "_Layout") -> list[torch.Tensor]:
        """Return the cast of each parameter of a layout; casts of parameters that have changed are made anew."""
        parameters = layout.parameters
        if not (is_eager() and self._keeps):
            return [self._cast_alone(parameter) for parameter in parameters]
        versions = versions_of(parameters)
        seen = [*versions, *map(_REQUIRES_GRAD, parameters)]
        if layout.source is self._casts and layout.seen == seen:
            return layout.casts
        # Casts record a graph although a forward may not: a later one trains with them.
        with torch.inference_mode(False), torch.enable_grad():
            self._renew(parameters, versions)
            known = [self._casts.get(id(parameter)) for parameter in parameters]
            casts = [
                self._cast_alone(parameter) if each is None or each.version != version else each.cast
                for parameter, version, each in zip(parameters, versions, known, strict=True)
            ]
        layout.casts, layout.seen, layout.source = casts, seen, self._casts
        return casts

    def _renew(self, parameters: Sequence[nn.Parameter], versions: Sequence[int]) -> None:
        """Make the casts that are missing, or older than their parameters, in one operation."""
        stale: dict[int, tuple[nn.Parameter, int]] = {}
        for parameter, version in zip(parameters, versions, strict=True):
            known = self._casts.get(id(parameter))
            if known is not None and known.version == version and known.cast.requires_grad == parameter.requires_grad:
                continue
            is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided and parameter.is_leaf
            if is_plain and not parameter.is_inference():
                stale[id(parameter)] = parameter, version
        if not stale:
            return
        made = cast_together([parameter for parameter, _ in stale.values()], self.dtype, self._sums)
        self._watched.discard(self._casts[key].cast for key in stale if key in self._casts)
        for (key, (parameter, version)), cast in zip(stale.items(), made, strict=True):
            cast.__class__ = nn.Parameter  # code in a forward may check isinstance(weight, nn.Parameter)
            share_attributes(parameter, cast)
            self._casts[key] = _Cast(parameter, version, cast)
        self._watched.add(parameter for parameter, _ in stale.values())
        self._watched.add(made)  # a forward may write through the cast's ``data``

    def _cast_alone(self, parameter: torch.Tensor) -> torch.Tensor:
        cast = parameter.to(self.dtype)
        if is_eager():
            share_attributes(parameter, cast)
        return cast

    def drop(self) -> None:
        """Drop all casts, with the parameters: the next forward makes new ones."""
        for each in self._casts.values():
            self._watched.discard([each.parameter, each.cast])
        self._casts.clear()  # layouts have this dict, too
        self._casts = {}

    def close(self) -> None:
        """Drop the casts, and watch the parameters' ``data`` no more."""
        self.drop()
        self._watched.end()


class _Layout:
    """A module's submodules, and the parameters to cast in all of them; valid until a module or parameter changes.

    It refers to the submodules only, because the module refers to it: a reference back would be a cycle.

    Attributes:
        casts, seen, source: the casts of the last forward, what was seen of the parameters, and what the casts are of.
    """

    def __init__(self, modules: list[nn.Module], weights: WeightCasts) -> None:
        self.below = modules[1:]
        self.has_rnn = any(isinstance(module, nn.RNNBase) for module in modules)
        found = weights.slots_of(modules)
        self.slots = [(parameters, name) for parameters, name, _ in found]
        self.parameters = [parameter for *_, parameter in found]
        self.casts: list[torch.Tensor] = []
        self.seen: list[int] = []
        self.source: object = None
        self._tables = Tables(modules, "_modules", "_parameters")

    def is_current(self, module: nn.Module) -> bool:
        """Return whether no module or parameter was added, removed or replaced."""
        return self._tables.are_as_seen([module, *self.below])


class _ActiveCasts:
    """The casts that are in the places of parameters while one forward runs."""

    def __init__(self, modules: list[nn.Module], layout: _Layout, casts: list[torch.Tensor]) -> None:
        self.thread = threading.get_ident()
        self.slots, self.parameters, self.casts = layout.slots, layout.parameters, casts
        self._rnns = [module for module in modules if isinstance(module, nn.RNNBase)] if layout.has_rnn else []
        self._flat: dict[nn.RNNBase, dict[str, Any]] = {}
        self._versions: list[int] = []

    def swap_in(self) -> None:
        for (parameters, name), cast in zip(self.slots, self.casts, strict=True):
            parameters[name] = cast
        for module in self._rnns:
            # __dict__, because torch.compile cannot trace vars(module) in torch 2.15.
            self._flat[module] = {name: module.__dict__[name] for name in _FLAT_WEIGHTS}
            module._init_flat_weights()
        # Now: cudnn has written the casts of RNNs to one buffer, which is no write of the user's.
        self._versions = versions_of(self.casts)

    def swap_out(self) -> list[int]:
        """Put the parameters back; return the indices of those whose casts were written to or replaced."""
        written: list[int] = []
        present = [parameters.get(name) for parameters, name in self.slots]
        # No versions: swap_in() has failed, and the casts may be in some places only.
        now = versions_of(self.casts)
        before = self._versions or now
        if now != before or not are_same(present, self.casts):
            written = [
                index
                for index, (found, cast) in enumerate(zip(present, self.casts, strict=True))
                if now[index] != before[index] or not (found is cast or found is self.parameters[index])
            ]
        for (parameters, name), parameter in zip(self.slots, self.parameters, strict=True):
            parameters[name] = parameter
        for module, flat in self._flat.items():
            module.__dict__.update(flat)
        return written


# The casts of the forwards that run now, in all threads.
ACTIVE_CASTS: Final[list[_ActiveCasts]] = []


class ForwardWeights(OfModule):
    """The casts of the parameters of a module and its submodules, without the modules that stay float32."""

    __slots__ = ("_layout", "casts")

    def __init__(self, module: nn.Module, casts: WeightCasts) -> None:
        super().__init__(module)
        self.casts = casts
        self._layout: _Layout | None = None

    def are_in(self) -> bool:
        """Return whether a forward of this thread has replaced the module's parameters by casts."""
        # In compiled code cast_traced() finds by the dtypes which parameters are cast already.
        return not is_compiling() and self._module() in self.casts.entered

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters that forwards cast; called between forwards."""
        return [parameter for *_, parameter in self.casts.slots_of(self._modules())]

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Replace the parameters by casts inside the block.

        Raises:
            RuntimeError: a forward of the session's models runs in another thread; or the forward has written to
                parameters, which have their values from before.
        """
        module, weights = self.module, self.casts
        if not weights.lock.acquire(blocking=False):
            raise RuntimeError(_IN_ANOTHER_THREAD.format(type(module).__name__))
        try:
            modules, layout = self._modules_to_enter()
            active = _ActiveCasts(modules, layout, weights.of(layout))
            written: list[int] = []
            ACTIVE_CASTS.append(active)
            try:
                active.swap_in()
                weights.entered.update(modules)
                yield
            finally:
                weights.entered.difference_update(modules)
                written = active.swap_out()
                ACTIVE_CASTS[:] = [each for each in ACTIVE_CASTS if each is not active]
                if written:
                    weights.drop()
            if written:
                name, shape = active.slots[written[0]][1], tuple(active.parameters[written[0]].shape)
                raise RuntimeError(_WRITTEN.format(name, shape, type(module).__name__))
        finally:
            weights.lock.release()

    def _modules_to_enter(self) -> tuple[list[nn.Module], _Layout]:
        """Return the modules that no running forward has entered, and their layout."""
        module, layout, entered = self.module, self._layout, self.casts.entered
        if layout is None or not layout.is_current(module):
            is_first = layout is None
            managed = next(filter(is_managed_by_fsdp, module.modules()), None) if is_distributed() else None
            if managed is not None:
                raise RuntimeError(fsdp2_refusal(type(managed).__name__))
            layout = self._layout = _Layout(self._modules(), self.casts)
            # torch.func.functional_call replaces parameters for one forward: those come back.
            if not is_first and not entered and all(type(p) is nn.Parameter for p in layout.parameters):
                self.casts.drop()
        modules = [module, *layout.below]
        if entered.isdisjoint(modules):
            return modules, layout
        modules = [each for each in modules if each not in entered]
        return modules, _Layout(modules, self.casts)

    def _modules(self) -> list[nn.Module]:
        """List module and submodules, without those that stay float32; some may have been added since the last call."""
        found: dict[nn.Module, None] = {}
        kept = self.casts.kept()
        pending: list[nn.Module | None] = [self.module]
        while pending:
            module = pending.pop()
            if module is not None and module not in found and module not in kept:
                found[module] = None
                pending += module._modules.values()
        return list(found)

    @contextmanager
    def cast_traced(self) -> Iterator[None]:
        """Do the same as :meth:`cast` while torch.compile traces: the casts become part of the graph.

        A forward that writes in place to a cast is not traced, but runs inside of :meth:`cast`, which refuses it. With
        ``fullgraph=True`` torch.compile raises.
        """
        outside = self.casts.slots_of(self._modules())
        casts = [parameter.to(self.casts.dtype) for *_, parameter in outside]
        attributes = self._attributes() if outside else []
        for (parameters, name, parameter), cast in zip(outside, casts, strict=True):
            for attribute in attributes:
                if hasattr(parameter, attribute):
                    setattr(cast, attribute, getattr(parameter, attribute))
            parameters[name] = cast
        try:
            yield
        finally:
            for parameters, name, parameter in outside:
                parameters[name] = parameter
        for (_, name, parameter), cast in zip(outside, casts, strict=True):
            shape, kind = tuple(parameter.shape), type(self._module()).__name__
            _refuse_traced_write(cast, _WRITTEN.format(name, shape, kind))

    @constant_when_compiled  # torch.compile cannot trace __dict__
    def _attributes(self) -> list[str]:
        """List the names of attributes that user code has set on any of the parameters."""
        parameters = [each for each in self.parameters() if not hasattr(type(each), "__tensor_flatten__")]
        names = {name for parameter in parameters for name in parameter.__dict__}
        return sorted(name for name in names if not name.startswith("_dynamo"))


def _refuse_traced_write(tensor: torch.Tensor, reason: str) -> None:
    """Stop tracing if traced code has written in place to ``tensor``, an intermediate tensor.

    Traced code cannot branch on a version counter. ``comptime`` calls a function while torch.compile traces, and its
    second argument otherwise, as in torch.export without dynamo.
    """

    def refuse() -> None:
        if not tensor.is_inference() and tensor._version > 0:
            raise RuntimeError(reason)

    torch._dynamo.comptime.comptime(_break_graph, refuse)


def _break_graph(context: Any) -> None:
    # The caller's locals: comptime allows no closure.
    tensor = context.get_local("tensor").as_fake()
    if not tensor.is_inference() and tensor._version > 0:
        context.graph_break(context.get_local("reason").as_python_constant())


def parameter_of(cast: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that a cast replaces at the moment; None for any other tensor."""
    for active in ACTIVE_CASTS[:]:
        for parameter, each in zip(active.parameters, active.casts, strict=True):
            if each is cast:
                return parameter
    return None


def refuse_changes_in_forward(what: str) -> None:
    """Refuse a step inside of a forward whose weights are casts: what follows would compute with those of before."""
    if any(active.thread == threading.get_ident() for active in ACTIVE_CASTS[:]):
        raise RuntimeError(_STEP_IN_FORWARD.format(what))


_IN_ANOTHER_THREAD: Final = (
    "{0} runs in another thread, where casts are in the places of its parameters while its forward runs, because of "
    'master_weights="model" or compute_fp32. Let one forward end before the next begins, make for each thread a copy '
    "of its own (copy.deepcopy(model)), or use master_weights=True"
)
_WRITTEN: Final = (
    "parameter {0!r} of shape {1} in {2} was written to, or replaced, by the forward, where master_weights='model' "
    "or compute_fp32 has put a cast in its place: the write is lost. Name its module in keep_fp32, where parameters "
    "are float32, or write outside of the forward, or use master_weights=True"
)
_STEP_IN_FORWARD: Final = (
    "{0} was called inside of a forward, or of a method in entry_points, where master_weights='model' has put 16-bit "
    "casts in the places of the weights: what follows would compute with the weights of before. Call it after the "
    "forward, or use master_weights=True"
)
