"""Which tensors of the models are cast, and which modules stay float32: reads, never changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ..basics.dtypes import is_lower_precision
from ..distributed.sharding import check_groups
from ..plan import Plan


def kept_float32(models: Sequence[nn.Module], plan: Plan) -> list[nn.Module]:
    """The topmost modules that stay float32; everything below them does too."""
    kept: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if plan.keep_float32(name, module):
            kept.append(module)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    for model in models:
        visit("", model)
    return kept


def float32_tensors(models: Sequence[nn.Module], plan: Plan) -> set[torch.Tensor]:
    """The parameters and buffers of modules that stay float32.

    Raises:
        ValueError: a parameter is shared between a module that stays float32 and one that does not.
    """
    kept_modules = {module for top in kept_float32(models, plan) for module in top.modules()}
    kept = {tensor for module in kept_modules for tensor in own_tensors(module)}
    for model in models:
        for name, module in model.named_modules():
            if module in kept_modules:
                continue
            shared = [own for own, tensor in module.named_parameters(recurse=False) if tensor in kept]
            if shared:
                where = f"{name}.{shared[0]}" if name else shared[0]
                raise ValueError(
                    f"parameter {where!r} is shared with a module that keep_fp32 leaves in float32, and cannot be in "
                    "two dtypes at once: name both modules in keep_fp32, or neither"
                )
    return kept


def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def tensors_to_cast(models: Sequence[nn.Module], plan: Plan) -> dict[torch.Tensor, torch.dtype]:
    """Every floating parameter and buffer with the dtype it is to have, tied ones once, in the models' order."""
    if not plan.cast_model:
        return {}
    kept = float32_tensors(models, plan)
    targets = {
        tensor: torch.float32 if tensor in kept else plan.model_dtype
        for model in models
        for module in model.modules()
        for tensor in own_tensors(module)
        if tensor.is_floating_point()
    }
    check_groups(models, targets)
    return targets


def will_hold_16_bit(models: Sequence[nn.Module], targets: Mapping[torch.Tensor, torch.dtype]) -> bool:
    """Whether any parameter or buffer will be 16-bit once ``targets`` are cast."""
    tensors = (tensor for model in models for module in model.modules() for tensor in own_tensors(module))
    return any(is_lower_precision(targets.get(tensor, tensor.dtype)) for tensor in tensors)
