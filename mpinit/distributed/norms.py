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
def clip_grad_norm_(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    process_group: Group | None,
) -> torch.Tensor:
    """Clip the norm of all parameters' gradients in place, as one process that has all of them would.

    Returns:
        The norm before clipping, 0-dimensional, float32, the same on every rank.
    """
    order = float(norm_type)
    gradients = [gradient for gradient in grads_of(parameters) if gradient is not None]
    if process_group is not None or any(map(is_sharded, parameters)):
        total = _norm_over_ranks(parameters, order, process_group)
    elif not any(_is_beyond_torch(gradient, order) for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    else:
        norms = _norms(gradients, order)
        device = norms[0].device
        total = torch.linalg.vector_norm(torch.stack([norm.to(device, torch.float32) for norm in norms]), order)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(_NOT_FINITE.format(norm_type, float(total)))
    # As torch does: multiplied by at most 1, without a device sync.
    products.multiply_(dense_views(gradients), (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _is_beyond_torch(gradient: torch.Tensor, order: float) -> bool:
    """Return whether torch's own function cannot compute a gradient's norm.

    It has no norms of sparse gradients, and none of order inf of empty ones. It computes in the gradient's dtype: a
    float16 norm above 65,504 is inf, and all gradients become 0.
    """
    is_empty = math.isinf(order) and not gradient.numel()
    return gradient.dtype in LOWER_PRECISION or gradient.is_sparse or is_empty


def _norm_over_ranks(parameters: Sequence[nn.Parameter], order: float, process_group: Group | None) -> torch.Tensor:
    """Compute the norm of the gradients of all ranks that have shards, or are in the group."""
    if not order > 0:
        raise ValueError(f"norm_type must be above 0 for gradients of several processes, not {order!r}")
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
        own = parts.setdefault(_spread_of(parameter), [])
        if parameter.grad is not None:
            own.append(local(redistribute_like(parameter.grad, parameter)))
    powers = []
    for (mesh, dims), own in parts.items():
        norms = [norm.to(zero) for norm in _norms(own, order)]
        powers.append(
            reduced(norms if is_max else [norm.pow(order) for norm in norms], [mesh.get_group(dim) for dim in dims])
        )
    power = reduced(powers, [] if process_group is None else [process_group])
    return (power if is_max else power.pow(1.0 / order)).float()


def _spread_of(parameter: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh, and its dimensions along which every rank has other numbers."""
    if not is_sharded(parameter):
        return None, ()
    dims = tuple(dim for dim, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.device_mesh, dims


def _norms(gradients: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Compute norms, of 16-bit gradients in float32: together where they are dense, on a CPU small ones as one."""
    dense = [g for g in gradients if g.dtype in LOWER_PRECISION and not g.is_sparse and g.numel()]
    together = set(map(id, dense))
    # The norm of order 0 counts numbers, and is no norm of norms.
    fewer = list(in_fewer_tensors(dense)) if order > 0 else dense
    norms = list(torch._foreach_norm(fewer, order, dtype=torch.float32)) if fewer else []
    return norms + [_norm(gradient, order) for gradient in gradients if id(gradient) not in together]


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.float32 if is_lower_precision(values.dtype) else None
    # vector_norm of order inf raises on an empty tensor.
    if not values.numel():
        return values.new_zeros((), dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
    return norm
