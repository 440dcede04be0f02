"""Float32 parameters that are 16-bit inside forwards: ``master_weights="model"``.

While a forward runs, casts stand in the places of the parameters, in ``module._parameters``, as the tensors do that are
given to ``torch.func.functional_call``: whatever reads ``module.weight`` inside gets 16 bit, and whatever does outside
float32. A cast is an ordinary differentiable one, so gradients arrive on the parameters in float32. Every outermost
forward makes its casts anew, as autocast does.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..torch_internals.float32_gradients import casts_with_float32_gradients
from ..torch_internals.running import computes_at_once

_TENSOR_DATA: Final[Any] = torch.Tensor.data
_TENSOR_DETACH: Final[Any] = torch.Tensor.detach
_COMPUTING: Final = (WeightNorm, SpectralNorm)
_VERSION: Final[Any] = attrgetter("_version")
_FLAT_WEIGHTS: Final = ("_flat_weights", "_flat_weight_refs")


class CastParameter(nn.Parameter):
    """A parameter's cast, inside a forward: it knows whether its memory was given out, through which it can be written.

    A VQ-VAE writes to ``self.codebook.weight.data`` in its forward: that has to come to the parameter.
    """

    handed_out = False
    parameter: nn.Parameter

    @property
    def data(self) -> torch.Tensor:
        """The numbers, outside of autograd's view."""
        self.handed_out = True
        values: torch.Tensor = _TENSOR_DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.handed_out = True
        _TENSOR_DATA.__set__(self, values)

    def detach(self) -> torch.Tensor:
        """The numbers, without their graph."""
        self.handed_out = True
        values: torch.Tensor = _TENSOR_DETACH(self)
        return values


@final
class _Standing:
    """The casts that stand in one module.

    Attributes:
        outside, inside: name -> the parameter, and its cast.
        forwards: those that run inside the module or around it, in all threads.
    """

    __slots__ = ("_flat_outside", "_versions", "_versions_outside", "forwards", "inside", "module", "outside")

    def __init__(self, module: nn.Module, outside: dict[str, nn.Parameter], forwards: set[object]) -> None:
        self.module = module
        self.outside = outside
        self.forwards = forwards
        self.inside: dict[str, torch.Tensor] = {}
        self._versions: list[int] = []
        self._versions_outside: list[int] = []
        self._flat_outside: dict[str, Any] = {}

    def put_in(self, casts: Mapping[int, torch.Tensor]) -> None:
        """Put casts, found by their parameters' ids, in the places of the parameters."""
        module = self.module
        self.inside = {name: casts[id(parameter)] for name, parameter in self.outside.items()}
        self._remember_versions()
        if isinstance(module, nn.RNNBase):
            self._flat_outside = self._flat_outside or {name: vars(module)[name] for name in _FLAT_WEIGHTS}
            module._parameters.update(self.inside)  # type: ignore[arg-type]
            module._init_flat_weights()
            self._remember_versions()
        else:
            module._parameters.update(self.inside)  # type: ignore[arg-type]

    def _remember_versions(self) -> None:
        self._versions = _versions(self.inside.values())
        self._versions_outside = _versions(self.outside.values())

    def bring_back(self) -> None:
        """Write to the parameters what was written to their casts; one that was written itself counts as it is."""
        casts = self.inside.values()
        written = [now != before for now, before in zip(_versions(casts), self._versions, strict=False)]
        if not any(written) and not any(getattr(cast, "handed_out", False) for cast in casts):
            return
        outside = zip(_versions(self.outside.values()), self._versions_outside, strict=False)
        for (name, cast), (now, before) in zip(self.inside.items(), outside, strict=False):
            if now == before:
                _write_back(self.outside[name], cast)

    def take_out(self) -> None:
        """Put the parameters back in their places."""
        parameters: dict[str, Any] = self.module._parameters
        if all(map(is_, map(parameters.get, self.inside), self.inside.values())):
            parameters.update(self.outside)
        else:
            self._take_out_of_changed(parameters)
        vars(self.module).update(self._flat_outside)

    def _take_out_of_changed(self, parameters: dict[str, Any]) -> None:
        for name, parameter in self.outside.items():
            present = parameters.get(name)
            if name not in self.inside or present is self.inside[name]:
                parameters[name] = parameter
            elif present is not None and present.dtype is self.inside[name].dtype and present.is_leaf:
                # Another parameter, made of 16-bit numbers: the truth is float32.
                _TENSOR_DATA.__set__(present, _TENSOR_DATA.__get__(present).float())


class _Thread(threading.local):
    """What stands because of this thread's forwards: module -> its casts."""

    def __init__(self) -> None:
        self.inside: dict[nn.Module, object] = {}


_lock: Final = threading.RLock()  # forwards of one model in several threads share what stands in it
_standing: Final[dict[nn.Module, _Standing]] = {}
_thread: Final = _Thread()


@final
class ForwardWeights:
    """A module's parameters and those of everything below it, together in or out.

    Args:
        module: the module whose forward, or another method, runs inside.
        dtype: what its floating parameters are cast to.
        kept: modules whose parameters stay float32, with everything below them.
    """

    __slots__ = ("_kept", "dtype", "module")

    def __init__(self, module: nn.Module, dtype: torch.dtype, kept: Collection[nn.Module]) -> None:
        self.module = module
        self.dtype = dtype
        self._kept = kept

    @property
    def are_in(self) -> bool:
        """Whether this thread's forwards have put casts in the places of the module's parameters."""
        # Compiled code looks at the parameters themselves, in cast_traced, and finds nothing to cast.
        return not torch.compiler.is_compiling() and self.module in _thread.inside

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Inside the block casts stand in the places of the parameters."""
        forward, entered = object(), list[nn.Module]()
        computed: dict[str, torch.Tensor] = {}
        try:
            with _lock:
                self._put_in(forward, entered)
            if self.module._forward_pre_hooks:
                self._cast_computed(computed)
            yield
        finally:
            for name, values in computed.items():
                setattr(self.module, name, values)
            with _lock:
                for module in entered:
                    _leave(module, forward)

    def _put_in(self, forward: object, entered: list[nn.Module]) -> None:
        standing: list[_Standing] = []
        for module in self._modules():
            if module in _thread.inside:
                continue
            entered.append(module)
            _thread.inside[module] = forward
            if module._parameters:
                known = _standing.get(module)
                outside = self._to_be_cast(module._parameters) if known is None else known.outside
                if known is not None:
                    known.bring_back()
                    known.forwards.add(forward)
                    standing.append(known)
                elif outside:
                    standing.append(_Standing(module, outside, {forward}))
        casts = self._made({id(p): p for each in standing for p in each.outside.values()})
        for each in standing:
            _standing[each.module] = each
            each.put_in(casts)

    def _modules(self) -> list[nn.Module]:
        """The module and what is below it, but for what stays float32: found anew, for modules may have joined."""
        found: dict[nn.Module, None] = {}
        left: list[nn.Module | None] = [self.module]
        while left:
            module = left.pop()
            if module is not None and module not in found and module not in self._kept:
                found[module] = None
                left += module._modules.values()
        return list(found)

    def _to_be_cast(self, parameters: Mapping[str, Any]) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in parameters.items()
            if parameter is not None and parameter.dtype is not self.dtype and parameter.is_floating_point()
        }

    def _made(self, parameters: dict[int, nn.Parameter]) -> dict[int, torch.Tensor]:
        if not computes_at_once():
            return {key: parameter.to(self.dtype) for key, parameter in parameters.items()}
        ordinary = {key: parameter for key, parameter in parameters.items() if _is_ordinary(parameter)}
        # With a graph always: a forward in another thread may train with what stands in the model.
        with torch.inference_mode(False), torch.enable_grad():
            casts = casts_with_float32_gradients(list(ordinary.values()), self.dtype)
        made = dict(zip(ordinary, casts, strict=True))
        for key, parameter in parameters.items():
            if key in made:
                made[key].__class__ = CastParameter
                made[key].parameter = parameter  # type: ignore[attr-defined]
            else:
                made[key] = parameter.to(self.dtype)
        return made

    @contextmanager
    def cast_traced(self) -> Iterator[None]:
        """:meth:`cast` for torch.compile: the casts are a part of the graph."""
        outside: list[tuple[dict[str, Any], dict[str, nn.Parameter]]] = []
        for module in self._modules():
            if module._parameters:
                outside.append((module._parameters, self._to_be_cast(module._parameters)))
        for parameters, own in outside:
            for name, parameter in own.items():
                parameters[name] = parameter.to(self.dtype)
        try:
            yield
        finally:
            for parameters, own in outside:
                for name, parameter in own.items():
                    parameters[name] = parameter

    def _cast_computed(self, computed: dict[str, torch.Tensor]) -> None:
        """The module's own pre-hooks ran outside: what weight_norm and pruning have computed there is float32."""
        for hook in self.module._forward_pre_hooks.values():
            name = getattr(hook, "name", None) if isinstance(hook, _COMPUTING) else getattr(hook, "_tensor_name", None)
            values = vars(self.module).get(name) if isinstance(name, str) else None
            if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dtype != self.dtype:
                computed[str(name)] = values
                setattr(self.module, str(name), values.to(self.dtype))

    def cast_replica(self, replica: nn.Module) -> None:
        """Cast what DataParallel has put on a replica of the module: it lasts for one forward."""
        casting = set(self._modules())
        for original, copied in zip(self.module.modules(), replica.modules(), strict=True):
            for name, values in getattr(copied, "_former_parameters", {}).items():
                if original in casting and values.is_floating_point():
                    setattr(copied, name, values.to(self.dtype))

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # Of what stays float32 a copy of a part needs only what is below it.
        kept = [module for module in self.module.modules() if module in self._kept]
        return None, {"module": self.module, "dtype": self.dtype, "_kept": kept}


def _leave(module: nn.Module, forward: object) -> None:
    _thread.inside.pop(module, None)
    standing = _standing.get(module)
    if standing is not None:
        standing.forwards.discard(forward)
        standing.bring_back()
        if not standing.forwards:
            standing.take_out()
            del _standing[module]


def renew_casts() -> None:
    """Cast what stands in forwards of this thread anew: parameters were written, by an optimizer's step inside, say."""
    if not _thread.inside:
        return
    with _lock:
        standing = [_standing[module] for module in _thread.inside if module in _standing]
        for dtype in dict.fromkeys(cast.dtype for each in standing for cast in each.inside.values()):
            weights = ForwardWeights(standing[0].module, dtype, ())
            members = [each for each in standing if next(iter(each.inside.values())).dtype is dtype]
            for each in members:
                each.bring_back()
            casts = weights._made({id(p): p for each in members for p in each.outside.values()})
            for each in members:
                each.put_in(casts)


def _is_ordinary(parameter: torch.Tensor) -> bool:
    """Whether a parameter is dense, in this process as a whole, and not computed."""
    return type(parameter) is nn.Parameter and parameter.is_leaf and not parameter.is_inference()


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """What tells whether tensors have been written to in place."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # those of inference mode count nothing
        return []


@torch.no_grad()
def _write_back(parameter: nn.Parameter, cast: torch.Tensor) -> None:
    """What a forward wrote to a cast comes to the parameter; what it did not keeps its low bits."""
    cast = _TENSOR_DETACH(cast)
    if not parameter.is_leaf:
        return
    if cast.shape != parameter.shape:
        _TENSOR_DATA.__set__(parameter, cast.to(parameter.dtype))
        return
    before = _TENSOR_DETACH(parameter)
    rounded = before.to(cast.dtype)
    changed = (rounded != cast) & ~(rounded.isnan() & cast.isnan())
    if changed.any():
        parameter.copy_(torch.where(changed, cast.to(parameter.dtype), before))
