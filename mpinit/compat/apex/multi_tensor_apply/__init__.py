"""The switch by which scripts choose between apex's kernels and their own fallback: it says that there are none."""

from __future__ import annotations

from .multi_tensor_apply import MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
