"""Float32 parameters that are 16-bit inside forwards: ``master_weights="model"``.

While a forward runs, casts stand in the places of the parameters, in ``module._parameters``, as the tensors do that are
given to ``torch.func.functional_call``: whatever reads ``module.weight`` inside gets 16 bit, and whatever does outside
float32. A cast is an ordinary differentiable one, so gradients arrive on the parameters in float32. It is made once and
used until somebody writes to its parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..torch_internals.running import computes_at_once
from .newcomers import follow_newcomers
from .own_weights import OwnWeights, Writes

_COMPUTING: Final = (WeightNorm, SpectralNorm)
_lock: Final = threading.RLock()  # forwards of one model in several threads share what stands in it


@final
class ForwardWeights:
    """A module's parameters and those of everything below it, together in or out.

    Args:
        module: the module whose forward, or another method, runs inside.
        own: every module of the session that has casts.
    """

    __slots__ = ("_computed", "_here", "_inside", "_structure", "dtype", "module", "own")

    def __init__(self, module: nn.Module, own: ModulesWithCasts) -> None:
        self.module = module
        self.own: ModulesWithCasts | None = own
        self.dtype = own.dtype
        self._structure = -1
        self._here: OwnWeights | None = None
        self._inside: list[OwnWeights] = []
        self._computed: dict[str, torch.Tensor] = {}
        self._look()

    def _look(self) -> None:
        if self.own is not None and self._structure != self.own.structure:
            self._structure = self.own.structure
            self._inside = [self.own.of[part] for part in self.module.modules() if part in self.own.of]
            self._here = self.own.of.get(self.module)

    @property
    def are_in(self) -> bool:
        """Whether casts stand in the places of the module's parameters now."""
        return self._here is not None and self._here.depth > 0

    def enter(self) -> None:
        """Put casts in; :meth:`leave` has to follow, whatever happens."""
        if torch.compiler.is_compiling():
            for own in self._inside:
                own.put_in_traced()
            return
        self._look()
        made: dict[int, torch.Tensor] = {}
        with _lock:
            remembers = computes_at_once()
            for own in self._inside:
                own.put_in(remembers, made)
        if self.module._forward_pre_hooks:
            self._cast_computed()

    def leave(self) -> None:
        """Put the parameters back."""
        if torch.compiler.is_compiling():
            for own in self._inside:
                own.take_out_traced()
            return
        with _lock:
            for own in self._inside:
                own.take_out()
        computed, self._computed = self._computed, {}
        for name, values in computed.items():
            setattr(self.module, name, values)

    def _cast_computed(self) -> None:
        """The module's own pre-hooks ran outside: what weight_norm and pruning have computed there is float32."""
        for hook in self.module._forward_pre_hooks.values():
            name = getattr(hook, "name", None) if isinstance(hook, _COMPUTING) else getattr(hook, "_tensor_name", None)
            values = vars(self.module).get(name) if isinstance(name, str) else None
            if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dtype != self.dtype:
                self._computed[str(name)] = values
                setattr(self.module, str(name), values.to(self.dtype))

    def cast_replica(self, replica: nn.Module) -> None:
        """Cast what DataParallel has put on a replica of the module: it lasts for one forward."""
        casting = {own.module for own in self._inside}
        for original, copied in zip(self.module.modules(), replica.modules(), strict=True):
            for name, values in getattr(copied, "_former_parameters", {}).items():
                if original in casting and values.is_floating_point():
                    setattr(copied, name, values.to(self.dtype))

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, {**state, "own": None, "_computed": {}}


_NO_SYMBOLIC_TRACE: Final = (
    'torch.fx\'s tracer would take the 16-bit weights of {} for constants: with master_weights="model" they are casts '
    "made in its forward. Use torch.export.export, which records the casts, or call mpinit.undo on the model first"
)


@final
class ModulesWithCasts:
    """The modules of a session whose parameters are 16-bit inside forwards, those that join later with them.

    Args:
        modules: the modules there are now.
        dtype: what their floating parameters are cast to.
        writes: who knows of writes to parameters.

    Attributes:
        of: module -> its own parameters.
        structure: goes up whenever a module joins.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype, writes: Writes) -> None:
        self.dtype = dtype
        self.of: dict[nn.Module, OwnWeights] = {module: OwnWeights(module, dtype, writes) for module in modules}
        self.structure = 0
        self._writes = writes
        self._newcomers = follow_newcomers(self)

    def holds(self, module: nn.Module) -> bool:
        """Whether a module's parameters are cast."""
        return module in self.of

    def take_in(self, tree: nn.Module) -> None:
        """A module has become a part of one that is held."""
        for module in tree.modules():
            if module not in self.of:
                self.of[module] = OwnWeights(module, self.dtype, self._writes)
        self.structure += 1

    def close(self) -> None:
        """Follow no newcomers any more, and let go of all casts."""
        self._newcomers.remove()
        for own in self.of.values():
            own.forget()
