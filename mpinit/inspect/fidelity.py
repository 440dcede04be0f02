"""``mpinit.fidelity``: compares a model's forward in training with that of the 16-bit model that will be served."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn

from ..autocast.thread_flags import CastsAs
from ..basics.dtypes import cast_within_range, dtype_name
from ..basics.trees import cast_tree
from .copies import (
    copied_inputs,
    forward_refused,
    inside_wrappers,
    plain_copy,
    same_random_numbers,
    session_to_run,
)
from .numbers import floating_tensors
from .trace import ModelTrace

_ADVICE: Final = "pass served=, a plain model in 16 bit that was loaded from the checkpoint"
_COMPILED: Final = (
    "The training forward is compiled, and inductor keeps float32 between fused operations: serve the compiled model, "
    "or set torch._inductor.config.emulate_precision_casts = True before compiling, which rounds as eager code does"
)
_ALONE: Final = "let its forward run nothing but the modules of self"


@final
@dataclass(frozen=True)
class Fidelity:
    """Differences of two forwards on the same inputs; true if there are none: ``assert mpinit.fidelity(...)``.

    Attributes:
        mean: mean absolute difference of the outputs' numbers.
        largest: the largest absolute difference; inf if only one number of a pair is finite, or their infinities have
            opposite signs.
        equal: share of the numbers that are equal, 0 to 1.
        first_module: the dotted name of the first module to return whose result differed. "" is the model itself; None:
            no result differed, or the model is compiled.
        served: the name of the served model's dtype.
        compiled: whether the model that is trained is compiled.
    """

    mean: float
    largest: float
    equal: float
    first_module: str | None
    served: str
    compiled: bool = False

    def __bool__(self) -> bool:
        return self.largest == 0.0

    def __str__(self) -> str:
        if self.largest == 0.0 and self.first_module is None:
            return f"training forward matches the served {self.served} model bit for bit"
        where = "" if self.first_module is None else f"; first mismatch in module {self.first_module!r}"
        why = f". {_COMPILED}" if self.compiled else ""
        return (
            f"training forward differs from the served {self.served} model: {self.equal:.1%} of the numbers are equal, "
            f"the others differ by {self.largest:.3g} at most, and all by {self.mean:.3g} on average{where}{why}"
        )


@torch.no_grad()
def fidelity(
    model: nn.Module,
    *inputs: Any,
    served: nn.Module | None = None,
    output: Callable[[Any], Any] | None = None,
    **keywords: Any,
) -> Fidelity:
    """Compare a model's forward in training with that of the plain 16-bit model that will be served.

    The model runs in evaluation mode with its session's casts; without a session, with the casts that are on. Then it
    runs without mpinit, entirely in the session's 16-bit dtype, as a server loads a checkpoint. At O2 and O5 the
    two are equal, bit for bit, unless modules are kept in float32. With float32 weights and casts of functions (O1,
    ``torch.autocast``) they differ, and a compiled forward differs, because inductor keeps float32 between fused
    operations. The model itself runs, on copies of the inputs and without gradients, and a copy of it in the place of
    the served one. Modes, buffers and the random numbers of torch, Python and numpy are restored. What a forward writes
    to attributes or to a generator of its own is not.

    Args:
        model: a module, initialised or not, also compiled. Of a DistributedDataParallel the module inside runs. Pass a
            whole initialised model, not a part of it.
        inputs, keywords: the arguments of the call. The copy receives floating tensors in its own dtype.
        served: the served model, such as one loaded from a checkpoint. Required for a model that cannot be copied, such
            as FSDP2's. Default None: a copy of ``model``.
        output: a function from a model's output to the tensors to compare, such as log-probabilities. Default None: all
            floating tensors in the output.

    Returns:
        The report, with ``.mean``, ``.largest``, ``.equal``, ``.first_module``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model cannot be copied, is a part of an initialised model, or is a compiled
            DistributedDataParallel; or the outputs have no floating tensors, or have different shapes.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> model = mpinit.initialize(model, opt_level="O5")
        >>> print(mpinit.fidelity(model, torch.randn(2, 8)))
        training forward matches the served bfloat16 model bit for bit
        >>> mpinit.undo(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fidelity needs a module and its inputs, not {type(model).__name__}")
    to_train, is_compiled = _to_run(model)
    model = inside_wrappers(model)
    session = session_to_run(model, "mpinit.fidelity")
    dtype = (None if session is None else session.properties.lower_precision_type) or torch.bfloat16
    with same_random_numbers() as restore:
        # Made first, because it refuses a model that cannot be copied.
        plain = _served(model, dtype) if served is None else served
        trained, seen = _run(to_train, *copied_inputs(inputs, keywords))
        restore()
        dtype = next((p.dtype for p in plain.parameters() if p.is_floating_point()), dtype)
        with CastsAs(), forward_refused(model, plain, "mpinit.fidelity", _ALONE):
            expected, known = _run(plain, *cast_tree(copied_inputs(inputs, keywords), dtype))
    one, other = (list(floating_tensors(out if output is None else output(out))) for out in (trained, expected))
    if not one or [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        shapes = ", ".join(str([tuple(tensor.shape) for tensor in each]) for each in (one, other))
        raise ValueError(
            f"there is nothing to compare: the floating tensors of the two outputs have shapes {shapes}; pass output=, "
            "a function from the output to the tensor that is to be compared"
        )
    differences = torch.cat([_difference(a, b).reshape(-1) for a, b in zip(one, other, strict=True)])
    parted = (name for name, result in seen.items() if name in known and not _are_equal(result, known[name]))
    return Fidelity(
        mean=float(differences.mean()),
        largest=float(differences.max()),
        equal=float((differences == 0).double().mean()),
        first_module=next(parted, None),
        served=dtype_name(dtype),
        compiled=is_compiled,
    )


def _to_run(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module inside of DistributedDataParallel, and whether its call is compiled."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is a compiled DistributedDataParallel, whose forward needs all ranks: pass "
            "mpinit.fidelity(torch.compile(ddp.module), ...)"
        )
    return model, inner is not None or getattr(model, "_compiled_call_impl", None) is not None


def _served(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make a copy as a server loads it: 16-bit weights as in a 16-bit checkpoint, and all others cast."""
    plain = plain_copy(model, _ADVICE)
    own = dict(_tensors(model))
    for name, tensor in _tensors(plain):
        if tensor.is_floating_point():
            own_values = own[name].detach()
            tensor.data = own_values.clone() if own_values.dtype == dtype else cast_within_range(tensor.detach(), dtype)
    return plain


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode inside the block, and restore its modes and buffers."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module._buffers, name, buffer, buffer._version, buffer.clone())
        for module in modes
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    # Not eval(), which may merge weights (LoRA) that train() would have to separate again.
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for own, name, buffer, version, values in buffers:
            own[name] = buffer
            # Only if it was written: a session counts writes to 16-bit buffers, and warns of them.
            if buffer._version != version:
                buffer.copy_(values)


def _run(model: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> tuple[Any, dict[str, list[torch.Tensor]]]:
    """Run a model in evaluation mode.

    Returns:
        The output, and the last result of each module, in the order in which they returned.
    """
    results: dict[str, list[torch.Tensor]] = {}

    def ended(name: str, output: Any) -> None:
        results.pop(name, None)
        # Cloned, because a later operation may write to it.
        results[name] = [tensor.clone() for tensor in floating_tensors(output)]

    # A trace needs hooks, which a compiled call does not run.
    trace = nullcontext() if _to_run(model)[1] else ModelTrace(model, ends=ended)
    with _in_evaluation(model), trace:
        return model(*inputs, **keywords), results


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute absolute differences in float32: 0 for equal infinities and for two nans, inf if only one is finite."""
    one, other = one.detach().float(), other.detach().float()
    alike = (one == other) | (one.isnan() & other.isnan())
    return torch.where(alike, 0.0, (one - other).abs().nan_to_num(nan=torch.inf))


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and not bool(_difference(a, b).any()) for a, b in zip(one, other, strict=True)
    )
