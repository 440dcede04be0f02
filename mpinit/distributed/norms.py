"""The norm of gradients of which a process holds parts: plain and sharded ones, over any meshes, and other stages'."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .agreement import Group, device_for
from .sharding import is_sharded, local


@torch.no_grad()
def clip_grad_norm_(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    process_group: Group | None,
) -> torch.Tensor:
    """Clip the norm of all parameters' gradients in place, as one process that held all of them would.

    Returns:
        The norm before clipping, 0-dimensional, float32, the same on every rank.
    """
    total = total_norm(parameters, norm_type, process_group)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(total)}, so it cannot be clipped; give "
            "error_if_nonfinite=False to let the step be skipped where that is to happen"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            part = local(parameter.grad)
            part.mul_(factor.to(part.device))
    return total


def total_norm(parameters: Sequence[nn.Parameter], norm_type: float, process_group: Group | None) -> torch.Tensor:
    """The norm of all gradients; see :func:`clip_grad_norm_`."""
    order = float(norm_type)
    parts: dict[tuple[Any, tuple[int, ...]], list[torch.Tensor]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        norms = parts.setdefault(_spread_of(parameter), [])
        device = local(parameter).device
        if parameter.grad is not None:
            norms.append(_norm(_whole(parameter), order))
    powers = []
    for (mesh, dims), norms in parts.items():
        power = _power_of([norm.to(device) for norm in norms], order, device)
        groups = [mesh.get_group(dim) for dim in dims]
        powers.append(_over(power, groups, order))
    total = torch.stack(powers) if powers else torch.zeros(1, dtype=torch.float64, device=device)
    power = total.amax() if math.isinf(order) else total.sum()
    power = _over(power, [] if process_group is None else [process_group], order)
    return (power if math.isinf(order) else power.pow(1.0 / order)).float()


def _spread_of(parameter: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh, and along which of its dimensions every rank has other numbers."""
    if not is_sharded(parameter):
        return None, ()
    dims = tuple(dim for dim, placement in enumerate(parameter.placements) if placement.is_shard())
    return parameter.device_mesh, dims


def _whole(parameter: Any) -> torch.Tensor:
    """The gradient's numbers that this process has, where the parameter's are; parts of a sum are added up first."""
    gradient: Any = parameter.grad
    if is_sharded(gradient) and tuple(gradient.placements) != tuple(parameter.placements):
        gradient = gradient.redistribute(placements=parameter.placements)
    part = local(gradient)
    return part.coalesce().values() if part.is_sparse else part


def _norm(values: torch.Tensor, order: float) -> torch.Tensor:
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    norm: torch.Tensor = torch.linalg.vector_norm(wide, order)
    return norm.double()


def _power_of(norms: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """What adds up over ranks: the norm to its order; of the largest, the largest."""
    stacked = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms])
    power: torch.Tensor = stacked.amax() if math.isinf(order) else stacked.pow(order).sum()
    return power


def _over(power: torch.Tensor, groups: Iterable[Group], order: float) -> torch.Tensor:
    distributed: Any = torch.distributed
    operation = distributed.ReduceOp.MAX if math.isinf(order) else distributed.ReduceOp.SUM
    for group in groups:
        there = power.to(device_for(group, power.device), copy=True)
        distributed.all_reduce(there, operation, group=group)
        power = there.to(power.device)
    return power
