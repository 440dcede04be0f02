"""One module's float32 parameters, and the 16-bit casts that stand in their places while a forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Protocol, final

import torch
from torch import nn

from ..torch_internals.float32_gradients import cast_with_float32_gradients
from ..torch_internals.parameter_watching import TENSOR_DATA, TENSOR_DETACH


class Writes(Protocol):
    """Who knows whether parameters were written to."""

    def mark(self, parameters: Sequence[nn.Parameter]) -> Any:
        """What :meth:`stands` compares with."""

    def stands(self, parameters: Sequence[nn.Parameter], mark: Any) -> bool:
        """Whether nobody can have written to any of these parameters since."""


class CastParameter(nn.Parameter):
    """A parameter's cast, inside a forward: it knows whether anybody got at its memory without leaving a trace.

    A VQ-VAE writes to ``self.codebook.weight.data`` in its forward: that has to come to the parameter.
    """

    handed_out = False

    @property
    def data(self) -> torch.Tensor:
        """The numbers, outside of autograd's view."""
        self.handed_out = True
        values: torch.Tensor = TENSOR_DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.handed_out = True
        TENSOR_DATA.__set__(self, values)

    def detach(self) -> torch.Tensor:
        """The numbers, without their graph."""
        self.handed_out = True
        values: torch.Tensor = TENSOR_DETACH(self)
        return values


@final
class _Casts:
    """Parameters of one module, and what stands in their places: names and both sides, in columns.

    Attributes:
        outside, inside: name -> the parameter, and its cast.
        mark: what is known of writes to the parameters; None where the casts are good for one forward.
    """

    __slots__ = ("_versions", "inside", "mark", "outside", "parameters", "tensors")

    def __init__(self, outside: dict[str, nn.Parameter], inside: dict[str, torch.Tensor], mark: Any) -> None:
        self.outside, self.inside, self.mark = outside, inside, mark
        self.parameters = list(outside.values())
        self.tensors = list(inside.values())
        self._versions = list(map(_version_of, self.tensors))

    def are_in(self, places: dict[str, Any]) -> bool:
        """Whether all casts stand where they were put."""
        return all(map(is_, map(places.get, self.inside), self.tensors))

    def were_written(self) -> bool:
        """Whether anybody may have written to a cast."""
        return list(map(_version_of, self.tensors)) != self._versions or any(map(_was_handed_out, self.tensors))

    def accept(self) -> None:
        """What was written changed nothing: an RNN's weights are put together in one piece of memory."""
        if any(map(_was_handed_out, self.tensors)):
            self.mark = None  # somebody may hold on to what was handed out
        self._versions = list(map(_version_of, self.tensors))


@final
class OwnWeights:
    """One module's own parameters, and what stands in their places while a forward runs.

    Args:
        module: the module.
        dtype: what its floating parameters are cast to.
        writes: who knows of writes; None: casts are made anew in every forward.

    Attributes:
        depth: how many calls are inside; above 0 the casts are in place.
    """

    __slots__ = ("_casts", "_dtype", "_flat_inside", "_flat_outside", "_writes", "depth", "module")

    def __init__(self, module: nn.Module, dtype: torch.dtype, writes: Writes | None) -> None:
        self.module = module
        self.depth = 0
        self._dtype = dtype
        self._writes = writes
        self._casts: _Casts | None = None
        self._flat_inside: dict[str, Any] = {}
        self._flat_outside: dict[str, Any] = {}

    def put_in(self, remembers: bool, made: dict[int, torch.Tensor]) -> None:
        """Cast, where that is not done already.

        Args:
            remembers: whether casts are kept for the next forward, and those of the last one used.
            made: casts that have been made just now, by their parameters' ids, for weights that are tied.
        """
        self.depth += 1
        parameters = self.module._parameters
        if self.depth > 1 or not parameters:
            return
        outside = self._to_be_cast(parameters)
        casts = self._casts
        if casts is None or not remembers or not self._stand(casts, outside):
            casts = self._casts = self._make(outside, remembers, made)
        parameters.update(casts.inside)  # type: ignore[arg-type]
        if isinstance(self.module, nn.RNNBase):
            # torch sees that the weights are others, and gathers them; those of the last forward may be these.
            self._flat_outside = _flat_weights(self.module)
            vars(self.module).update(self._flat_inside)

    def take_out(self) -> None:
        """The parameters, back in their places, with what was written to their casts."""
        # Not above 0: putting in was interrupted before it came here.
        self.depth = max(self.depth - 1, 0)
        casts, parameters = self._casts, self.module._parameters
        if self.depth > 0 or casts is None:
            return
        if casts.are_in(parameters):
            parameters.update(casts.outside)
        else:
            self._take_out_of_changed(casts, parameters)
        if self._flat_outside:
            self._flat_inside = _flat_weights(self.module)
            vars(self.module).update(self._flat_outside)
            self._flat_outside = {}
        if casts.were_written():
            for parameter, cast in zip(casts.parameters, casts.tensors, strict=True):
                _write_back(parameter, cast)
            casts.accept()
        if casts.mark is None:
            self._casts = None

    def _take_out_of_changed(self, casts: _Casts, parameters: dict[str, Any]) -> None:
        for name, parameter in casts.outside.items():
            present = parameters.get(name)
            if present is casts.inside[name]:
                parameters[name] = parameter
            elif present is not None and present.dtype is self._dtype and present.is_leaf:
                # Another parameter, made of 16-bit numbers: the truth is float32.
                TENSOR_DATA.__set__(present, TENSOR_DATA.__get__(present).float())

    def put_in_traced(self) -> None:
        """:meth:`put_in` for torch.compile: the casts are a part of the graph."""
        self.depth += 1
        parameters = self.module._parameters
        if self.depth > 1 or not parameters:
            return
        outside = self._to_be_cast(parameters)
        for name, parameter in outside.items():
            parameters[name] = parameter.to(self._dtype)  # type: ignore[assignment]
        self._flat_outside = outside

    def take_out_traced(self) -> None:
        """:meth:`take_out` for torch.compile."""
        self.depth -= 1
        if self.depth == 0 and self._flat_outside:
            for name, parameter in self._flat_outside.items():
                self.module._parameters[name] = parameter
            self._flat_outside = {}

    def forget(self) -> None:
        """Let go of casts."""
        if self.depth == 0:
            self._casts, self._flat_inside = None, {}

    def _to_be_cast(self, parameters: dict[str, Any]) -> dict[str, nn.Parameter]:
        dtype = self._dtype
        return {
            name: parameter
            for name, parameter in parameters.items()
            if parameter is not None and parameter.dtype is not dtype and parameter.is_floating_point()
        }

    def _stand(self, casts: _Casts, outside: dict[str, nn.Parameter]) -> bool:
        return (
            self._writes is not None
            and len(outside) == len(casts.parameters)
            and all(map(is_, map(outside.get, casts.outside), casts.parameters))
            and self._writes.stands(casts.parameters, casts.mark)
        )

    def _make(self, outside: dict[str, nn.Parameter], remembers: bool, made: dict[int, torch.Tensor]) -> _Casts:
        parameters, mark = list(outside.values()), None
        remembers = remembers and self._writes is not None and all(map(_is_ordinary, parameters))
        if self._writes is not None and remembers:
            mark = self._writes.mark(parameters)
        for parameter in parameters:
            if id(parameter) not in made:
                made[id(parameter)] = self._cast(parameter, remembers)
        return _Casts(outside, {name: made[id(parameter)] for name, parameter in outside.items()}, mark)

    def _cast(self, parameter: nn.Parameter, remembers: bool) -> torch.Tensor:
        if not remembers:
            return parameter.to(self._dtype)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            cast = cast_with_float32_gradients(parameter, self._dtype)
        else:
            # With a graph, whoever asks first: a forward that trains may come next.
            with torch.inference_mode(False), torch.enable_grad():
                cast = cast_with_float32_gradients(parameter, self._dtype)
        cast.__class__ = CastParameter
        return cast

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # A copy has no session that knows of writes.
        nothing: dict[str, Any] = {"depth": 0, "_casts": None, "_flat_inside": {}, "_flat_outside": {}, "_writes": None}
        return None, {"module": self.module, "_dtype": self._dtype, **nothing}


def _is_ordinary(parameter: torch.Tensor) -> bool:
    """Whether a parameter is dense, in this process as a whole, and nobody's result."""
    return type(parameter) is nn.Parameter and parameter.is_leaf and not parameter.is_inference()


def _version_of(cast: torch.Tensor) -> int:
    return 0 if cast.is_inference() else cast._version


def _was_handed_out(cast: torch.Tensor) -> bool:
    return getattr(cast, "handed_out", False)


@torch.no_grad()
def _write_back(parameter: nn.Parameter, cast: torch.Tensor) -> None:
    """What a forward wrote to a cast comes to the parameter; what it did not keeps its low bits."""
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


def _flat_weights(module: nn.Module) -> dict[str, Any]:
    """An RNN's own list of its weights, and what it knows them by."""
    return {name: vars(module)[name] for name in ("_flat_weights", "_flat_weight_refs")}
