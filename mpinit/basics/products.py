"""Products of tensors with a float32 factor on their device, and the check for inf and nan before it is multiplied.

On an accelerator torch converts a 0-dimensional factor to the tensor's dtype before it multiplies. In float16 65,536
becomes inf and 2**-25 becomes 0, and 1/3 has only 11 bits. The functions below compute each product in float32 and
round it once, on every device.
"""

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

import torch

_KIND: Final[Callable[[torch.Tensor], tuple[torch.device, torch.dtype]]] = attrgetter("device", "dtype")
# (device type, dtype) -> whether torch has a kernel that multiplies tensors and checks them for inf and nan. For
# bfloat16 on CUDA it has none: https://github.com/pytorch/pytorch/issues/127176
_has_kernel: Final[dict[tuple[str, torch.dtype], bool]] = {}


def multiply_(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply real, dense tensors in place by a 0-dimensional float32 factor."""
    for alike in _by_kind(tensors):
        _multiply_alike_(alike, factor.to(alike[0].device))


def multiply_and_check_(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    """Find inf and nan in real, dense tensors, and multiply these in place by a 0-dimensional float32 factor.

    Returns:
        For each device of the tensors a 0-dimensional float32 tensor: 1 if a number was inf or nan, otherwise 0.
    """
    return _check(tensors, factor)


def check(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Find inf and nan in real, dense tensors; see :func:`multiply_and_check_`."""
    return _check(tensors, None)


def _check(tensors: Iterable[torch.Tensor], factor: torch.Tensor | None) -> list[torch.Tensor]:
    found: dict[torch.device, torch.Tensor] = {}
    for alike in _by_kind(tensors):
        device, dtype = alike[0].device, alike[0].dtype
        if device not in found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        # torch's kernel would convert large float64 numbers to inf.
        if dtype != torch.float64 and _is_supported(alike[0]):
            _multiply_and_check_alike_(alike, found[device], factor)
            continue
        norms = _largest_of_alike(alike)
        if norms and dtype != torch.float64 and _is_supported(found[device]):
            _multiply_and_check_alike_([torch.stack(norms).float()], found[device], None)
        elif norms:
            found[device].copy_(torch.maximum(found[device], (~torch.stack(norms).isfinite()).any()))
        if factor is not None:
            _multiply_alike_(alike, factor.to(device))
    return list(found.values())


def largest(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the largest magnitude of each real, dense tensor that is not empty, by device and dtype; nan for a nan."""
    return [norms for alike in _by_kind(tensors) if (norms := _largest_of_alike(alike))]


def _largest_of_alike(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # The norm of an empty tensor raises.
    return list(torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], math.inf))


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device and dtype."""
    tensors = list(tensors)
    if len(set(map(_KIND, tensors))) < 2:
        return [tensors] if tensors else []
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(_KIND(tensor), []).append(tensor)
    return list(kinds.values())


def _multiply_and_check_alike_(
    tensors: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor | None
) -> None:
    if factor is None:
        factor = torch.ones((), dtype=torch.float32, device=found_inf.device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor.to(found_inf.device))


def _multiply_alike_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    if factor.dtype == tensors[0].dtype or factor.is_cpu:
        torch._foreach_mul_(tensors, factor)
        return
    # With one dimension a factor keeps its dtype. Beside a tensor without dimensions it keeps it anyway.
    wide = factor.reshape(1)
    torch._foreach_mul_(tensors, [wide if tensor.dim() else factor for tensor in tensors])


def _is_supported(tensor: torch.Tensor) -> bool:
    """Return whether torch has the kernel for the tensor's device and dtype; it is tried once in a process."""
    kind = tensor.device.type, tensor.dtype
    if kind not in _has_kernel:
        one = torch.ones((), dtype=torch.float32, device=tensor.device)
        try:
            torch._amp_foreach_non_finite_check_and_unscale_([torch.zeros_like(one, dtype=tensor.dtype)], one, one)
            _has_kernel[kind] = True
        except NotImplementedError:
            _has_kernel[kind] = False
    return _has_kernel[kind]
