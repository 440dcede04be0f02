"""One module's float32 parameters, and the 16-bit casts that stand in their places while a forward runs."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import nn

from ..torch_internals.float32_gradients import cast_with_float32_gradients
from ..torch_internals.parameter_watching import TENSOR_DATA, TENSOR_DETACH


class Writes(Protocol):
    """Who knows whether parameters were written to."""

    def mark(self, parameter: nn.Parameter) -> Any:
        """What :meth:`stands` compares with."""

    def stands(self, parameter: nn.Parameter, mark: Any) -> bool:
        """Whether nobody can have written to a parameter since."""


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


class Cast(NamedTuple):
    """A parameter, what stands in its place, and what is known of both."""

    parameter: nn.Parameter
    cast: torch.Tensor
    version: int
    mark: Any


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

    __slots__ = ("_casts", "_dtype", "_flat_inside", "_flat_outside", "_in_place", "_writes", "depth", "module")

    def __init__(self, module: nn.Module, dtype: torch.dtype, writes: Writes | None) -> None:
        self.module = module
        self.depth = 0
        self._dtype = dtype
        self._writes = writes
        self._casts: dict[str, Cast] = {}
        self._in_place: dict[str, Cast] = {}
        self._flat_inside: dict[str, Any] = {}
        self._flat_outside: dict[str, Any] = {}

    def put_in(self, remembers: bool, made: dict[int, Cast]) -> None:
        """Cast, where that is not done already.

        Args:
            remembers: whether casts are kept for the next forward, and those of the last one used.
            made: casts that have been made just now, by their parameters' ids, for weights that are tied.
        """
        self.depth += 1
        if self.depth > 1:
            return
        parameters, dtype = self.module._parameters, self._dtype
        for name, parameter in parameters.items():
            if parameter is not None and parameter.dtype is not dtype and parameter.is_floating_point():
                known = self._casts.get(name)
                if known is None or not remembers or not self._stands(known, parameter):
                    known = made.get(id(parameter)) or self._cast(parameter, remembers)
                    made[id(parameter)] = known
                    self._keep(name, known)
                self._in_place[name] = known
                parameters[name] = known.cast  # type: ignore[assignment]
        if isinstance(self.module, nn.RNNBase):
            # torch sees that the weights are others, and gathers them; those of the last forward may be these.
            self._flat_outside = _flat_weights(self.module)
            vars(self.module).update(self._flat_inside)

    def take_out(self) -> None:
        """The parameters, back in their places, with what was written to their casts."""
        self.depth -= 1
        if self.depth > 0:
            return
        in_place, self._in_place = self._in_place, {}
        parameters = self.module._parameters
        for name, known in in_place.items():
            present = parameters.get(name)
            if present is known.cast:
                parameters[name] = known.parameter
            elif present is not None and present.dtype is self._dtype and present.is_leaf:
                # Another parameter, made of 16-bit numbers: the truth is float32.
                TENSOR_DATA.__set__(present, TENSOR_DATA.__get__(present).float())
        if self._flat_outside:
            self._flat_inside = _flat_weights(self.module)
            vars(self.module).update(self._flat_outside)
            self._flat_outside = {}
        for name, known in in_place.items():
            self._see_to_writes(name, known)

    def _see_to_writes(self, name: str, known: Cast) -> None:
        handed_out = getattr(known.cast, "handed_out", False)
        if handed_out or _version_of(known.cast) != known.version:
            is_as_before = not _write_back(known) and not handed_out
            if is_as_before and name in self._casts:
                # An RNN's weights are put together in one piece of memory.
                self._casts[name] = known._replace(version=known.cast._version)
            else:
                self._casts.pop(name, None)

    def put_in_traced(self) -> None:
        """:meth:`put_in` for torch.compile: the casts are a part of the graph."""
        self.depth += 1
        if self.depth > 1:
            return
        parameters, dtype = self.module._parameters, self._dtype
        for name, parameter in parameters.items():
            if parameter is not None and parameter.dtype is not dtype and parameter.is_floating_point():
                known = Cast(parameter, parameter.to(dtype), 0, None)
                self._in_place[name] = known
                parameters[name] = known.cast  # type: ignore[assignment]

    def take_out_traced(self) -> None:
        """:meth:`take_out` for torch.compile."""
        self.depth -= 1
        if self.depth > 0:
            return
        for name, known in self._in_place.items():
            self.module._parameters[name] = known.parameter
        self._in_place = {}

    def forget(self) -> None:
        """Let go of casts."""
        self._casts, self._flat_inside = {}, {}

    def _stands(self, known: Cast, parameter: nn.Parameter) -> bool:
        return (
            known.parameter is parameter
            and known.cast.requires_grad is parameter.requires_grad
            and self._writes is not None
            and self._writes.stands(parameter, known.mark)
        )

    def _keep(self, name: str, known: Cast) -> None:
        if known.mark is not None:
            self._casts[name] = known
        else:
            self._casts.pop(name, None)

    def _cast(self, parameter: nn.Parameter, remembers: bool) -> Cast:
        writes = self._writes
        if not (remembers and writes is not None and _is_ordinary(parameter)):
            cast = parameter.to(self._dtype)
            return Cast(parameter, cast, _version_of(cast), None)
        # With a graph, whoever asks first: a forward that trains may come next.
        with torch.inference_mode(False), torch.enable_grad():
            cast = cast_with_float32_gradients(parameter, self._dtype)
        cast.__class__ = CastParameter
        return Cast(parameter, cast, cast._version, writes.mark(parameter))

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # A copy has no session that knows of writes.
        nothing: dict[str, Any] = {"depth": 0, "_writes": None} | {name: {} for name in ("_casts", "_in_place", *_FLAT)}
        return None, {"module": self.module, "_dtype": self._dtype, **nothing}


def _is_ordinary(parameter: torch.Tensor) -> bool:
    """Whether a parameter is dense, in this process as a whole, and nobody's result."""
    return type(parameter) is nn.Parameter and parameter.is_leaf and not parameter.is_inference()


_FLAT: Final = ("_flat_inside", "_flat_outside")


def _version_of(cast: torch.Tensor) -> int:
    return 0 if cast.is_inference() else cast._version


@torch.no_grad()
def _write_back(known: Cast) -> bool:
    """What a forward wrote to a cast comes to the parameter; what it did not keeps its low bits.

    Returns:
        Whether it wrote anything.
    """
    parameter, cast = known.parameter, TENSOR_DETACH(known.cast)
    if not parameter.is_leaf:
        return False
    if cast.shape != parameter.shape:
        TENSOR_DATA.__set__(parameter, cast.to(parameter.dtype))
        return True
    before = TENSOR_DETACH(parameter)
    rounded = before.to(cast.dtype)
    changed = (rounded != cast) & ~(rounded.isnan() & cast.isnan())
    if not changed.any():
        return False
    parameter.copy_(torch.where(changed, cast.to(parameter.dtype), before))
    return True


def _flat_weights(module: nn.Module) -> dict[str, Any]:
    """An RNN's own list of its weights, and what it knows them by."""
    return {name: vars(module)[name] for name in ("_flat_weights", "_flat_weight_refs")}
