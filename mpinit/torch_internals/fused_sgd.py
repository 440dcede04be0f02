"""A check of SGD's fused kernel, which updates 16-bit parameters on a CPU wrongly; such groups are stepped without it.

The kernel changes only the last elements of a parameter, those beyond a multiple of 16 (with AVX-512). Seen in torch
2.11 to 2.13; no upstream report was found. The kernel is run on a sample, once per process and dtype. This file can be
deleted when the kernel is right in every supported version of torch.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision


def stepped_wrongly(
    optimizers: Sequence[Optimizer], groups: Iterable[dict[str, Any]], targets: Mapping[torch.Tensor, torch.dtype]
) -> list[dict[str, Any]]:
    """List the groups with parameters that the fused kernel would step wrongly, whether or not they use it."""
    if not any(isinstance(each, torch.optim.SGD) for each in optimizers):
        return []
    found = []
    for group in groups:
        dtypes = {targets.get(p, p.dtype) for p in group["params"] if p.device.type == "cpu" and p.requires_grad}
        if not all(fused_sgd_is_sound_on_cpu(dtype) for dtype in dtypes if is_lower_precision(dtype)):
            found.append(group)
    return found


@contextmanager
def unfused(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Switch ``fused`` off in these groups for a step."""
    switched = [group for group in groups if group.get("fused")]
    for group in switched:
        group["fused"] = False
    try:
        yield
    finally:
        for group in switched:
            group["fused"] = True


@functools.cache
def fused_sgd_is_sound_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether SGD's fused kernel updates parameters of this dtype correctly; run it on a sample."""
    parameter = torch.ones(512, dtype=dtype, device="cpu")
    torch._fused_sgd_(
        *([parameter], [torch.ones_like(parameter)], []),
        lr=0.5, momentum=0.0, weight_decay=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip
    return bool((parameter == 0.5).all())
