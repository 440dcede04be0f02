"""SGD's fused kernel does not update 16-bit parameters on a CPU rightly: such groups are stepped without it.

From 16 elements on, all-ones weights stay 1.0. Seen in torch 2.11 to 2.13; no upstream report was found. The kernel
itself is asked, once a process and type, so this file can go when no supported version of torch answers wrongly.
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
    """The groups with parameters that the kernel would step wrongly, whether it is in use or not."""
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
    """Groups' ``fused`` switched off for a step."""
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
    """Return whether SGD's fused kernel updates parameters of this kind correctly, by running it on a sample."""
    parameter = torch.ones(512, dtype=dtype, device="cpu")
    torch._fused_sgd_(
        *([parameter], [torch.ones_like(parameter)], []),
        lr=0.5, momentum=0.0, weight_decay=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip
    return bool((parameter == 0.5).all())
