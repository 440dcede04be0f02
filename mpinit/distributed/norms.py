"""The norm of gradients, in float32 whatever their dtype: of one process, and of shards and pipeline stages."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics import products
from ..basics.bulk import grads_of, in_fewer_tensors
from ..basics.dtypes import LOWER_PRECISION, is_lower_precision
from .sharding import dense_views, is_sharded, local, redistribute_like
from .verdict import Group, device_for

_NOT_FINITE: Final = (
    "the norm of order {} of the gradients is {}, which is non-finite, so it cannot be clipped; use "
    "error_if_nonfinite=False to let the step be skipped where that is to happen"
)


@torch.no_grad()
def clip_own_grad_norm_(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Clip the norm of gradients of this process in place; of 16-bit ones it is computed in float32.

    torch computes the norm in the gradients' dtype: a norm above 65,504 is inf in float16, and all gradients become 0.

    Returns:
        The norm before clipping, 0-dimensional, float32.
    """
    gradients = [gradient for gradient in grads_of(parameters) if gradient is not None]
    narrow = [gradient for gradient in gradients if gradient.dtype in LOWER_PRECISION]
    # torch has no norms of sparse gradients, and none of order inf of empty ones.
    is_own = bool(narrow) or any(g.is_sparse or (math.isinf(norm_type) and not g.numel()) for g in gradients)
    if not is_own:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    order = float(norm_type)
    norms = _norms_of_narrow(narrow, order) if narrow else []
    norms += [_norm(gradient, order) for gradient in gradients if gradient.dtype not in LOWER_PRECISION]
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device, torch.float32) for norm in norms]), order
    )
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(_NOT_FINITE.format(norm_type, float(total)))
    _clip(gradients, max_norm, total)
    return total


@torch.no_grad()
def clip_grad_norm_(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: Group | None,
) -> torch.Tensor:
    """Clip the norm of all parameters' gradients in place, as one process that has all of them would.

    Returns:
        The norm before clipping, 0-dimensional, float32, the same on every rank.
    """
    total = total_norm(parameters, norm_type, process_group)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(_NOT_FINITE.format(norm_type, float(total)))
    _clip([gradient for gradient in grads_of(parameters) if gradient is not None], max_norm, total)
    return total


def _clip(gradients: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply gradients in place by ``max_norm / norm`` if the norm is larger, as torch does."""
    products.multiply_(dense_views(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))


def total_norm(parameters: Sequence[nn.Parameter], norm_type: float, process_group: Group | None) -> torch.Tensor:
    """Compute the norm of all gradients; see :func:`clip_grad_norm_`."""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be above 0 for gradients of several processes, not {norm_type!r}")
    is_max = math.isinf(order)
    device = next((local(parameter).device for parameter in parameters), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    distributed: Any = torch.distributed
    operation = distributed.ReduceOp.MAX if is_max else distributed.ReduceOp.SUM

    def reduced(powers: list[torch.Tensor], groups: Iterable[Group]) -> torch.Tensor:
        stacked = torch.stack([zero, *powers])
        power = stacked.amax() if is_max else stacked.sum()
        for group in groups:
            there = power.to(device_for(group, device), copy=True)
            distributed.all_reduce(there, operation, group=group)
            power = there.to(device)
        return power

    # Every rank has the same keys, whichever gradients it has.
    parts: dict[tuple[Any, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        powers = parts.setdefault(_spread_of(parameter), [])
        if parameter.grad is not None:
            norm = _norm(local(redistribute_like(parameter.grad, parameter)), order).to(zero)
            powers.append(norm if is_max else norm.pow(order))
    powers = [reduced(own, [mesh.get_group(dim) for dim in dims]) for (mesh, dims), own in parts.items()]
    power = reduced(powers, [] if process_group is None else [process_group])
    return (power if is_max else power.pow(1.0 / order)).float()


def _spread_of(parameter: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh, and its dimensions along which every rank has other numbers."""
    if not is_sharded(parameter):
        return None, ()
    dims = tuple(dim for dim, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.device_mesh, dims


def _norms_of_narrow(gradients: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Compute float32 norms of 16-bit gradients; on a CPU of small ones together."""
    if any(gradient.is_sparse or not gradient.numel() for gradient in gradients):
        return [_norm(gradient, order) for gradient in gradients]
    # The norm of order 0 counts numbers, and is no norm of norms.
    fewer = in_fewer_tensors(gradients) if order > 0 else gradients
    return list(torch._foreach_norm(list(fewer), order, dtype=torch.float32))


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.float32 if is_lower_precision(values.dtype) else None
    # vector_norm of order inf raises on an empty tensor.
    if not values.numel():
        return values.new_zeros((), dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
    return norm
