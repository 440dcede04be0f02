"""The models and optimizers of a session, the optimizers that an optimizer wraps, and the state of weights in them."""

import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..basics.dtypes import LOWER_PRECISION
from ..basics.logs import warn_user
from ..basics.patching import UndoStack
from ..basics.tables import counted
from ..basics.weak_references import Models, WeakList
from ..distributed.sharding import is_sharded, model_parameters, replaced_since

_numbers = itertools.count()


class Members:
    """The models and optimizers of one session, by weak references, and by what messages name it.

    Attributes:
        number, opt_level: the number of the session in this process, and its level.
        models, optimizers: those of ``initialize``, and the optimizers of ``add_optimizers``.
        tensor_ids: the ids of the models' parameters and buffers, after the casts.
    """

    def __init__(self, opt_level: str) -> None:
        self.number, self.opt_level = next(_numbers), opt_level
        self.models, self.optimizers = Models(), WeakList[Optimizer]()
        self.tensor_ids: frozenset[int] = frozenset()

    def refer_to(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Add the models and optimizers of ``initialize``."""
        for model in models:
            self.models.append(model)
        for optimizer in optimizers:
            self.optimizers.append(optimizer)

    def describe(self) -> str:
        """Return one line that names the session: its number, level, models and optimizers."""
        models = ", ".join(type(model).__name__ for model in self.models) or "no model"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "no optimizer"
        return f"session {self.number} ({self.opt_level}: {models}; {optimizers})"

    def parameters(self) -> dict[nn.Parameter, None]:
        """Return the models' parameters, each once."""
        return model_parameters(self.models)

    def check_present(self, masters_weights: Iterable[torch.Tensor]) -> None:
        """Check that the models still have the parameters that optimizers step.

        Args:
            masters_weights: the weights with masters, which an optimizer may step without having them.

        Raises:
            RuntimeError: ``fully_shard`` or a similar call has replaced some; the optimizer would step the old ones.
        """
        named = [each for model in self.models for each in model.named_parameters()]
        fault = replaced_since(named, [*masters_weights, *parameters_of(self.optimizers)])
        if fault:
            raise RuntimeError(fault)

    def warn_of_new_parameters(self) -> None:
        """Warn where a parameter replaces one that an optimizer steps, and is in no optimizer."""
        parameters = parameters_of(self.optimizers)
        if any(map(is_sharded, parameters)):
            return  # FSDP2 may have gathered them into others
        stepped = set(map(id, parameters))
        named = [each for model in self.models for each in model.named_parameters()]
        gone = (stepped & self.tensor_ids).difference(id(parameter) for _, parameter in named)
        # A cast in the place of a parameter, by a forward in another thread, is no leaf.
        added = [(name, p) for name, p in named if id(p) not in stepped | self.tensor_ids] if gone else []
        new = [name for name, parameter in added if parameter.requires_grad and parameter.is_leaf]
        if new:
            warn_user(
                f"{counted(len(new), 'parameter was', 'parameters were')} put into the model after mpinit.initialize "
                f"({', '.join(map(repr, new[:3]))} first), where an optimizer steps what was there before: they are "
                "not trained. Change the model (resize_token_embeddings, a new head) before its optimizer is made and "
                "mpinit.initialize is called"
            )


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """List the parameters in the groups of optimizers."""
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def trained_by(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """List the trainable parameters in the groups of optimizers and of those that they wrap, each once."""
    return [p for p in dict.fromkeys(parameters_of(with_wrapped(optimizers))) if p.requires_grad]


def wrapped_by(optimizer: Optimizer) -> list[Optimizer]:
    """List the optimizers among an optimizer's attributes, also in lists and dicts, and those inside of these."""
    found: dict[Optimizer, None] = {}
    _collect(optimizer, found)
    found.pop(optimizer, None)
    return list(found)


def with_wrapped(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """List optimizers, and all that they wrap."""
    return [each for top in optimizers for each in (top, *wrapped_by(top))]


def _collect(optimizer: Optimizer, found: dict[Optimizer, None]) -> None:
    if optimizer in found:
        return
    found[optimizer] = None
    for value in vars(optimizer).values():
        items = value if isinstance(value, (list, tuple)) else list(value.values()) if type(value) is dict else [value]
        for item in items:
            if isinstance(item, Optimizer):
                _collect(item, found)


# -- the state of weights ----------------------------------------------------------------------------------------------

# Entries of the states of torch's optimizers that are 0-dimensional whatever the parameter's shape: counters, and the
# rates and products of ASGD and NAdam.
_SCALARS: Final = frozenset({"step", "eta", "mu", "mu_product"})
Casts = Mapping[torch.Tensor, tuple[torch.dtype, torch.dtype]]


def _floats_of(state: Any) -> list[tuple[Any, torch.Tensor]]:
    """List the floating tensors of a parameter's state; none beside 8-bit codes, whose kernels need their dtypes."""
    entries = state.items() if isinstance(state, dict) else ()
    found = [(key, each) for key, each in entries if isinstance(each, torch.Tensor)]
    has_codes = any(each.dtype in (torch.uint8, torch.int8) and each.dim() > 0 for _, each in found)
    return [] if has_codes else [(key, each) for key, each in found if each.is_floating_point()]


def widen_state(state: Any) -> None:
    """Cast a parameter's 16-bit state to float32, because the parameter has got a float32 master."""
    for key, value in _floats_of(state):
        if value.dtype in LOWER_PRECISION:
            state[key] = value.to(torch.float32)


def widen_states(optimizers: Sequence[Optimizer], weights: Sequence[nn.Parameter]) -> None:
    """Do the same for several weights that become float32 themselves; there is no undo."""
    for optimizer in with_wrapped(optimizers) if weights else ():
        for weight in weights:
            widen_state(optimizer.state.get(weight))


def cast_states(optimizers: Sequence[Optimizer], casts: Casts, undos: UndoStack) -> None:
    """Cast the state of parameters that are cast without a master; the undo casts it back."""
    known: MutableMapping[torch.Tensor, Any] = WeakIdKeyDictionary(dict(casts))  # replaced parameters are freed
    for optimizer in with_wrapped(optimizers):
        undos.push(functools.partial(_cast_back, weakref.ref(optimizer), known))
        for parameter, state in optimizer.state.items():
            if parameter in casts:
                _cast_state(state, parameter.shape, *casts[parameter])


def _cast_back(reference: weakref.ref[Optimizer], casts: Casts) -> None:
    optimizer = reference()
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        if parameter in casts:
            old, new = casts[parameter]
            _cast_state(state, parameter.shape, new, old)


def _cast_state(state: Any, shape: torch.Size, old: torch.dtype, new: torch.dtype) -> None:
    """Cast arrays of the parameter's dtype, of any shape, because the optimizer computes in that dtype; no counters."""
    for key, value in _floats_of(state):
        if value.dtype is old and key not in _SCALARS and (value.dim() > 0 or value.shape == shape):
            state[key] = value.to(new)
