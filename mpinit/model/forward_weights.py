"""Float32 parameters that are 16-bit inside forwards: ``master_weights="model"``.

While a forward runs, 16-bit casts replace the parameters in ``module._parameters``, as in
``torch.func.functional_call``: ``module.weight`` is 16-bit inside the forward, and float32 outside. A cast is an
ordinary differentiable operation, so the parameters get float32 gradients. Every outermost forward makes new casts.
"""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..basics.weak_references import OfModule
from ..torch_internals.bulk import Entries, are_same, versions_of
from ..torch_internals.float32_gradients import casts_with_float32_gradients
from ..torch_internals.parameter_data import TENSOR_DATA, TENSOR_DETACH, DataUse, record_batch, stop_batch
from ..torch_internals.running import is_eager
from ..torch_internals.traced_writes import break_graph_if_written

_COMPUTING: Final = (WeightNorm, SpectralNorm)
_FLAT_WEIGHTS: Final = ("_flat_weights", "_flat_weight_refs")
# Seconds that a forward waits for another thread to make its casts, or to remove them.
_LONGEST_WAIT: Final = 10.0


class _Layout:
    """A module's submodules, and the parameters to cast in all of them; valid until a module or parameter changes.

    It refers to the submodules only, because the module refers to it: a reference back would be a cycle.
    """

    def __init__(self, modules: list[nn.Module], dtype: torch.dtype) -> None:
        self.below = modules[1:]
        found = _to_be_cast(modules, dtype)
        self.slots = [(parameters, name) for parameters, name, _ in found]
        self.parameters = [parameter for *_, parameter in found]
        self.has_tied = len(set(map(id, self.parameters))) < len(found)
        self._seen = Entries(self.below, "_modules"), Entries(self.below, "_parameters")
        self._first = _entries_of(modules[:1])
        self._tensors = [p for module in modules for p in module._parameters.values() if p is not None]
        self._dtypes = [tensor.dtype for tensor in self._tensors]

    def is_current(self, module: nn.Module) -> bool:
        """Return whether no module or parameter was added, removed or replaced."""
        if not are_same(_entries_of([module]), self._first):
            return False
        return all(map(Entries.are_as_seen, self._seen)) and [each.dtype for each in self._tensors] == self._dtypes


def _entries_of(modules: Sequence[nn.Module]) -> list[Any]:
    """List the names and members of modules, and their parameters."""
    tables = [table for module in modules for table in (module._modules, module._parameters)]
    return [part for table in tables for part in (*table, *table.values())]


class _ActiveCasts:
    """The casts of one forward, which forwards of other threads may share.

    Attributes:
        entered: all modules of the forward.
        evaluates: whether the forward records no graph, so that forwards of other threads may use the same casts.
        users: the number of forwards that use the casts.
        are_in: whether the casts are in the modules.
        has_failed: whether the casts could not be made.
        slots: for each cast the ``_parameters`` of a module, and the name in it.
        parameters, casts: for each slot the parameter and its cast.
    """

    def __init__(self, modules: list[nn.Module], layout: _Layout, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.entered = modules
        self.modules = [module for module in modules if module._parameters]
        self.rnns = [module for module in modules if isinstance(module, nn.RNNBase)]
        self.slots = layout.slots
        self.parameters = layout.parameters
        self.has_tied = layout.has_tied
        self.evaluates = not torch.is_grad_enabled()
        self.users = 1
        self.are_in = self.has_failed = False
        self.casts: list[torch.Tensor] = []
        self._flat: dict[nn.RNNBase, dict[str, Any]] = {}
        self._data_use = DataUse()
        self._versions: tuple[list[int], list[int]] = [], []

    def swap_in(self, casts: list[torch.Tensor]) -> None:
        self.casts = casts
        self._remember()
        for (parameters, name), cast in zip(self.slots, casts, strict=True):
            parameters[name] = cast
        for module in self.rnns:
            # __dict__, because torch.compile cannot trace vars(module) in torch 2.15.
            self._flat.setdefault(module, {name: module.__dict__[name] for name in _FLAT_WEIGHTS})
            module._init_flat_weights()
            self._remember()  # cudnn has written the casts to one buffer, which is no write of the user's
        self.are_in = True

    def are_stale(self) -> bool:
        """Return whether a parameter was written since it was cast."""
        return self.are_in and _versions(self.parameters) != self._versions[1]

    def _remember(self) -> None:
        stop_batch(self._data_use)
        self._data_use = record_batch(self.casts, keeps_views=bool(_records))
        self._versions = _versions(self.casts), _versions(self.parameters)

    def write_back(self) -> None:
        """Copy in-place writes to casts into their parameters, unless a parameter was written to itself."""
        before, before_outside = self._versions
        now, touched = _versions(self.casts), self._data_use.touched
        if now == before and not touched:
            return
        written = self._data_use.written()
        for record in _records:
            casts = enumerate(zip(self.parameters, self.casts, strict=True))
            record |= {p for i, (p, cast) in casts if now[i] != before[i] or id(cast) in written}
        now_outside = _versions(self.parameters)
        for index, (parameter, cast) in enumerate(zip(self.parameters, self.casts, strict=True)):
            was_written = now[index] != before[index] or id(cast) in touched
            if was_written and now_outside[index] == before_outside[index]:
                _write_back(parameter, cast)

    def swap_out(self) -> None:
        stop_batch(self._data_use)
        # Not strict: there are no casts where making them has failed.
        for (parameters, name), parameter, cast in zip(self.slots, self.parameters, self.casts, strict=False):
            present = parameters.get(name)
            if present is cast:
                parameters[name] = parameter
            elif present is not None and present.dtype is self.dtype and present.is_leaf:
                # The forward has made a parameter of a cast: between forwards parameters are float32.
                TENSOR_DATA.__set__(present, TENSOR_DATA.__get__(present).float())
        for module, flat in self._flat.items():
            module.__dict__.update(flat)


class _Thread(threading.local):
    """The modules that this thread's forwards have entered."""

    def __init__(self) -> None:
        self.entered: set[nn.Module] = set()


# Reentrant: a signal handler that saves a checkpoint may run while its own thread has the lock.
_lock: Final = threading.RLock()
# Notified when a forward has put the parameters back.
_has_ended: Final = threading.Condition(_lock)
# The casts of running forwards, in all threads.
ACTIVE_CASTS: Final[dict[nn.Module, _ActiveCasts]] = {}
_thread: Final = _Thread()
# One set for each open record_writes(): the parameters whose casts were written to.
_records: Final[list[set[torch.Tensor]]] = []


@contextmanager
def record_writes() -> Iterator[set[torch.Tensor]]:
    """Collect the parameters whose casts are written to by forwards in the block, even if no number changes."""
    record: set[torch.Tensor] = set()
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [each for each in _records if each is not record]


class ForwardWeights(OfModule):
    """The casts of the parameters of a module and its submodules, without the modules in ``kept``."""

    __slots__ = ("_kept", "_layout", "dtype")

    def __init__(self, module: nn.Module, dtype: torch.dtype, kept: Collection[nn.Module]) -> None:
        super().__init__(module)
        self.dtype = dtype
        self._kept = kept
        self._layout: _Layout | None = None

    def exclude(self, modules: Iterable[nn.Module]) -> None:
        """Cast no parameters of these modules from now on, which compute in float32."""
        self._kept = {*self._kept, *modules}
        self._layout = None

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters that forwards cast; called between forwards."""
        return [parameter for *_, parameter in _to_be_cast(self._modules(), self.dtype)]

    def are_in(self) -> bool:
        """Return whether a forward of this thread has replaced the module's parameters by casts."""
        # In compiled code cast_traced() finds by the dtypes which parameters are cast already.
        return not is_compiling() and self._module() in _thread.entered

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Replace the parameters by casts inside the block.

        Raises:
            RuntimeError: a forward of the module or of a submodule runs in another thread.
        """
        computed: dict[str, torch.Tensor] = {}
        active: _ActiveCasts | None = None
        shared: list[_ActiveCasts] = []
        try:
            with _lock:  # inside, no other thread puts casts into these modules
                if ACTIVE_CASTS:
                    self._wait_for_ends()
                    shared = self._share()
                active = self._new_casts()
                _thread.entered.update(active.entered)
                ACTIVE_CASTS.update(dict.fromkeys(active.modules, active))
            active.swap_in(_casts_of([active])[0] if active.has_tied else _casts(active.parameters, self.dtype))
            if shared and not _wait(lambda: not all(each.are_in or each.has_failed for each in shared)):
                self._refuse()
            if any(each.has_failed for each in shared):
                self._refuse()
            if self.module._forward_pre_hooks:
                self._cast_computed(computed)
            yield
        finally:
            for name, values in computed.items():
                setattr(self.module, name, values)
            for each in shared:
                _end(each)
            if active is not None:
                _end(active)

    def _wait_for_ends(self) -> None:
        """Wait for forwards of other threads that have ended, but have not put the parameters back yet.

        The lock is released while this waits, and acquired again before it returns.
        """
        modules = [module for module in self._modules() if module not in _thread.entered]

        def none_is_ending() -> bool:
            return all(each.users > 0 for each in map(ACTIVE_CASTS.get, modules) if each is not None)

        _has_ended.wait_for(none_is_ending, _LONGEST_WAIT)

    def _share(self) -> list[_ActiveCasts]:
        """Use the casts of forwards that run in other threads, and count their modules as entered.

        Raises:
            RuntimeError: such a forward, or this one, records a graph; or weights were written since they were cast.
        """
        entered = _thread.entered
        present = [ACTIVE_CASTS[m] for m in self._modules() if m in ACTIVE_CASTS and m not in entered]
        others = list(dict.fromkeys(present))
        evaluates = not torch.is_grad_enabled() and is_eager() and not self._has_computed()
        for each in others:
            if not (evaluates and each.evaluates and each.users > 0) or each.are_stale():
                self._refuse()
        for each in others:
            each.users += 1
            entered.update(each.entered)
        return others

    def _refuse(self) -> NoReturn:
        raise RuntimeError(_IN_ANOTHER_THREAD.format(type(self.module).__name__))

    def _new_casts(self) -> _ActiveCasts:
        """Return the casts to make: those of all modules that no forward of this thread has entered."""
        entered, layout, module = _thread.entered, self._layout, self.module
        if layout is None or not layout.is_current(module):
            layout = self._layout = _Layout(self._modules(), self.dtype)
        modules = [module, *layout.below]
        if not entered.isdisjoint(modules):
            modules = [each for each in modules if each not in entered]
            layout = _Layout(modules, self.dtype)
        return _ActiveCasts(modules, layout, self.dtype)

    def _modules(self) -> list[nn.Module]:
        """List module and submodules, without ``kept`` ones; modules may have been added since the last call."""
        found: dict[nn.Module, None] = {}
        pending: list[nn.Module | None] = [self.module]
        while pending:
            module = pending.pop()
            if module is not None and module not in found and module not in self._kept and not _is_float32_copy(module):
                found[module] = None
                pending += module._modules.values()
        return list(found)

    @contextmanager
    def cast_traced(self) -> Iterator[None]:
        """Do the same as :meth:`cast` while torch.compile traces: the casts become part of the graph.

        A forward that writes in place to a cast is not traced, but runs inside of :meth:`cast`. To copy such a write
        back, a graph would read all weights in each forward.
        """
        outside = _to_be_cast(self._modules(), self.dtype)
        casts = [parameter.to(self.dtype) for *_, parameter in outside]
        for (parameters, name, _), cast in zip(outside, casts, strict=True):
            parameters[name] = cast
        try:
            yield
        finally:
            for parameters, name, parameter in outside:
                parameters[name] = parameter
        for (_, name, parameter), cast in zip(outside, casts, strict=True):
            shape, kind = tuple(parameter.shape), type(self._module()).__name__
            break_graph_if_written(cast, _WRITTEN_IN_COMPILED_CODE.format(name, shape, kind))

    def _has_computed(self) -> bool:
        return any(isinstance(name, str) for name in map(_computed_name, self.module._forward_pre_hooks.values()))

    def _cast_computed(self, computed: dict[str, torch.Tensor]) -> None:
        """Cast the tensors that pre-hooks (weight_norm, pruning) computed in float32 before :meth:`cast` began."""
        for name in map(_computed_name, self.module._forward_pre_hooks.values()):
            values = vars(self.module).get(name) if isinstance(name, str) else None
            if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dtype != self.dtype:
                computed[str(name)] = values
                setattr(self.module, str(name), values.to(self.dtype))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a submodule needs only the kept modules below it.
        kept = [module for module in self.module.modules() if module in self._kept]
        return {"module": self.module, "dtype": self.dtype, "kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _is_float32_copy(module: nn.Module) -> bool:
    """Return whether a module is a deep copy of a part that was put back into the model: it computes in float32."""
    patched = getattr(module.__dict__.get("forward"), "__self__", None)
    weights = getattr(patched, "weights", None)
    return isinstance(weights, ForwardWeights) and patched.boundary.inner_dtype is not weights.dtype  # type: ignore[union-attr]


def _end(active: _ActiveCasts) -> None:
    _thread.entered.difference_update(active.entered)
    with _lock:
        active.has_failed = not active.are_in
        active.users -= 1
        if active.users > 0:
            return  # the last of the threads puts the parameters back
    try:
        active.write_back()
    finally:
        try:
            active.swap_out()
        finally:
            with _lock:
                for module in active.modules:
                    if ACTIVE_CASTS.get(module) is active:  # not where another thread's forward was refused
                        del ACTIVE_CASTS[module]
                _has_ended.notify_all()


def renew_casts() -> None:
    """Make the casts of this thread's running forwards again, after an optimizer has stepped inside a forward."""
    active = dict.fromkeys(ACTIVE_CASTS[module] for module in _thread.entered if module in ACTIVE_CASTS)
    for dtype in dict.fromkeys(each.dtype for each in active):
        members = [each for each in active if each.dtype is dtype]
        for each in members:
            each.write_back()
        for each, casts in zip(members, _casts_of(members), strict=True):
            each.swap_in(casts)


def _wait(condition: Callable[[], bool]) -> bool:
    """Wait until a condition of another thread's forward is False; return whether it is, within a limit."""
    last = time.monotonic() + _LONGEST_WAIT
    while condition():
        if time.monotonic() > last:
            return False
        time.sleep(1e-4)
    return True


def _computed_name(hook: Any) -> Any:
    """Return the name of the tensor that a pre-hook (weight_norm, pruning) computes; None for any other hook."""
    return getattr(hook, "name", None) if isinstance(hook, _COMPUTING) else getattr(hook, "_tensor_name", None)


_IN_ANOTHER_THREAD: Final = (
    '{0} runs in another thread, and with master_weights="model" 16-bit casts replace its parameters while its forward '
    "runs. Evaluate in all threads under torch.no_grad(), let one forward end before the next begins, make for each "
    "thread a copy of its own (copy.deepcopy(model)), or use master_weights=True"
)


_WRITTEN_IN_COMPILED_CODE: Final = (
    "parameter {0!r} of shape {1} in {2} is written to in place by its forward, where master_weights='model' casts it "
    "to 16 bits, and one graph cannot copy the write back: name its module in keep_fp32, where parameters are float32, "
    "or write outside of the forward, or use master_weights=True, or compile without fullgraph=True"
)


def _to_be_cast(modules: Iterable[nn.Module], dtype: torch.dtype) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
    """List the floating parameters of another dtype: the module's table of parameters, the name, the parameter."""
    return [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype is not dtype and parameter.is_floating_point()
    ]


def _casts_of(active: Sequence[_ActiveCasts]) -> list[list[torch.Tensor]]:
    """Make the casts of each; a parameter in several places has one cast."""
    parameters = {id(parameter): parameter for each in active for parameter in each.parameters}
    casts = dict(zip(parameters, _casts(list(parameters.values()), active[0].dtype), strict=True))
    return [[casts[id(parameter)] for parameter in each.parameters] for each in active]


def _casts(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
    if not is_eager():
        return [parameter.to(dtype) for parameter in parameters]
    # Casts always record a graph: a forward of another thread may train with them.
    with torch.inference_mode(False), torch.enable_grad():
        casts = casts_with_float32_gradients(parameters, dtype)
    if all(map(is_not, casts, itertools.repeat(None))):
        return casts  # type: ignore[return-value]
    return [p.to(dtype) if cast is None else cast for p, cast in zip(parameters, casts, strict=True)]


def parameter_of(cast: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that a cast replaces at the moment; None for any other tensor."""
    with _lock:
        # Not strict, because a forward that is about to make its casts has none yet.
        pairs = [zip(each.casts, each.parameters, strict=False) for each in dict.fromkeys(ACTIVE_CASTS.values())]
        return next((parameter for active, parameter in itertools.chain(*pairs) if active is cast), None)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return version counters of tensors; 0 for inference tensors, which have none."""
    try:
        return versions_of(tensors)
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@torch.no_grad()
def _write_back(parameter: nn.Parameter, cast: torch.Tensor) -> None:
    """Copy the changed elements of a cast into its parameter; all others keep their lower bits."""
    cast = TENSOR_DETACH(cast)
    if not parameter.is_leaf:
        return
    if cast.shape != parameter.shape:
        TENSOR_DATA.__set__(parameter, cast.to(parameter.dtype))
        return
    before = TENSOR_DETACH(parameter)
    rounded = before.to(cast.dtype)
    changed = (rounded != cast) & ~(rounded.isnan() & cast.isnan())
    if changed.any():
        parameter.copy_(torch.where(changed, cast.to(parameter.dtype), before))
