"""Unscaling and checking gradients, in as few passes and calls as torch allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..basics.gradients import are_plain
from ..distributed.sharding import local


def dense_view(gradient: torch.Tensor) -> torch.Tensor:
    """The real, dense tensor that holds a gradient's numbers, sharing its memory.

    A sparse gradient gives its values (it must be coalesced), a complex one its real view, a DTensor its local part.
    """
    gradient = local(gradient)
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def unscale_and_check_(
    gradients: list[torch.Tensor], inverse_scale: torch.Tensor, plain: bool | None = None
) -> torch.Tensor | None:
    """Multiply every gradient in place by ``inverse_scale`` and look for inf and nan, in one pass over memory.

    Args:
        gradients: floating or complex gradients of any dtypes and devices; sparse ones coalesced.
        inverse_scale: 0-dimensional float32.
        plain: what :func:`are_plain` says of them and ``inverse_scale``'s device, where that is known.

    Returns:
        A 0-dimensional float32 tensor on ``inverse_scale``'s device, 1 where anything was inf or nan and 0
        otherwise; where gradients are sharded, for the parts of this process. None without gradients.
    """
    if not gradients:
        return None
    if plain or (plain is None and are_plain(gradients, inverse_scale.device)):
        found_inf = torch.zeros((), dtype=torch.float32, device=inverse_scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)
        return found_inf
    return _unscale_and_check_any_(gradients, inverse_scale)


def _unscale_and_check_any_(gradients: Iterable[torch.Tensor], inverse_scale: torch.Tensor) -> torch.Tensor:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        dense = dense_view(gradient)
        groups.setdefault((dense.device, dense.dtype), []).append(dense)
    found = {device: torch.zeros((), dtype=torch.float32, device=device) for device, _ in groups}
    for (device, dtype), tensors in groups.items():
        if dtype == torch.float64:
            _unscale_double_(tensors, inverse_scale.to(device), found[device])
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found[device], inverse_scale.to(device))
    return _combine(list(found.values()), inverse_scale.device)


def _unscale_double_(tensors: list[torch.Tensor], inverse_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """float64 gradients by hand: the fused check takes them through float32 and would call large numbers inf."""
    torch._foreach_mul_(tensors, inverse_scale.double())
    for tensor in tensors:
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(tensor)).any().float()))


def largest(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest magnitude in the gradients: 0-dimensional float32, nan where one is; of shards, in this process."""
    dense = [dense_view(gradient) for gradient in gradients]
    return _combine([(each.abs().max() if each.numel() else each.sum()).float() for each in dense], device)


def _combine(found: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    combined = found[0].to(device)
    for other in found[1:]:
        combined = torch.maximum(combined, other.to(device))
    return combined


def unscale_(gradients: Sequence[torch.Tensor], inverse_scale: torch.Tensor) -> None:
    """Multiply every gradient in place by ``inverse_scale``, without looking at it."""
    if are_plain(gradients, inverse_scale.device):
        torch._foreach_mul_(list(gradients), inverse_scale)
        return
    for gradient in gradients:
        dense = dense_view(gradient)
        dense.mul_(inverse_scale.to(dense.device))
