"""Functions that are on the CPU's autocast list but not on CUDA's, and their removal from the CPU's list.

The CPU's autocast runs some functions in float32 although their kernels accept 16-bit tensors by now. It also promotes
the arguments of ``cat``, ``stack`` and ``index_copy``. This promotion raises "Unexpected floating ScalarType in
at::autocast::prioritize" for a tensor of the 16-bit dtype that is not autocast's, also inside ``roll``, ``matrix_exp``
and ``gradient``. Off the list, ``cat`` and ``stack`` promote without autocast.

Upstream: https://github.com/pytorch/pytorch/pull/191125 (the promotion), https://github.com/pytorch/pytorch/pull/63534
and .../pull/77623 (the CPU's list). In all versions since 1.10, 2.13 included. A name can be removed from
:data:`RUNS_UNCAST` when it is no longer on the CPU's list.
"""

import warnings
from typing import Final

import torch

from ..basics.patching import UndoStack

# Functions whose CPU kernels accept 16-bit tensors. The CPU's autocast casts their arguments; CUDA's does not.
RUNS_UNCAST: Final = (
    *("cat", "stack", "index_copy", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d"),
    *("reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "grid_sampler_2d"),
    *("_grid_sampler_2d_cpu_fallback", "grid_sampler_3d", "fake_quantize_per_tensor_affine"),
)

_KEY: Final = "AutocastCPU"


def follow_cuda(undos: UndoStack) -> None:
    """Remove :data:`RUNS_UNCAST` from the CPU's autocast list, for the process, until undone.

    Their kernels then receive the arguments without casts, as on CUDA, in eager mode and in compiled graphs.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undos.push(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in RUNS_UNCAST:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY):
                library.impl(name, torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
