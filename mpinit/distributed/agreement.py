"""One overflow verdict for all ranks."""

from __future__ import annotations

from typing import Any

import torch


def agree_across_ranks(found_inf: torch.Tensor, meshes: list[Any]) -> None:
    """Reduce over every mesh a gradient lives on, small ones first, so that all ranks step or all skip."""
    done = set()
    for mesh in sorted(meshes, key=lambda mesh: (mesh.ndim, mesh.size())):
        for group in mesh.get_all_groups():
            if group.group_name not in done:
                done.add(group.group_name)
                torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, group=group)
