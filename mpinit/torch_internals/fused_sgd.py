"""SGD's fused kernel, which updates 16-bit parameters on a CPU wrongly; such groups are stepped without it.

The kernel changes only the last elements of a parameter, those beyond a multiple of 16 (with AVX-512). In torch 2.11 to
2.13, right in 2.15; no upstream report was found. This file can be deleted when no version before 2.15 is supported.
"""

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
        if any(map(is_lower_precision, dtypes)):
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
