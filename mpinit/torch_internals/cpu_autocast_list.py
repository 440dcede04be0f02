"""The CPU's own autocast list where it departs from CUDA's, and how to make it follow.

Beside what the two lists share, the CPU's names functions that CUDA's leaves alone. It casts some to float32 although
their kernels take 16-bit tensors by now, and has ``cat``, ``stack`` and ``index_copy`` promote: that kernel raises
"Unexpected floating ScalarType in at::autocast::prioritize" for any tensor of the other 16-bit type, one alone
included, and inside ``roll``, ``matrix_exp``, ``gradient`` as well. Without it ``cat`` and ``stack`` promote by
themselves.

Upstream: https://github.com/pytorch/pytorch/pull/191125 (the promotion), https://github.com/pytorch/pytorch/pull/63534
and .../pull/77623 (the CPU's list). All versions since 1.10, 2.13 included. :data:`RUNS_AS_GIVEN` can go, name by name,
when the CPU's list no longer has it.
"""

import warnings
from typing import Any, Final

import torch

from ..basics.patching import UndoStack

# Kernels that take 16-bit tensors on a CPU: cast by its list, and not by CUDA's.
RUNS_AS_GIVEN: Final = (
    "cat",
    "stack",
    "index_copy",
    "adaptive_avg_pool3d",
    "adaptive_max_pool3d",
    "max_pool3d",
    "fractional_max_pool2d",
    "fractional_max_pool3d",
    "max_unpool2d",
    "max_unpool3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "grid_sampler_2d",
    "_grid_sampler_2d_cpu_fallback",
    "grid_sampler_3d",
    "trace",
    "fake_quantize_per_tensor_affine",
)

_KEY: Final = "AutocastCPU"
_KERNELS: Final[Any] = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def follow_cuda(undos: UndoStack) -> None:
    """Take :data:`RUNS_AS_GIVEN` off the CPU's autocast list, for the process, until undone.

    Their kernels then see the tensors as they are given, as CUDA's do; nothing stands between, in eager mode or in a
    compiled graph.
    """
    names = [name for name in RUNS_AS_GIVEN if name != "trace" or _traces_16_bit()]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undos.push(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in names:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY):
                library.impl(name, torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]


def _traces_16_bit() -> bool:
    """Return whether there is a kernel: torch 2.11 has none, and needs its list's cast to float32 to run."""
    one = torch.ones(1, 1, dtype=torch.float16, device="cpu")
    try:
        torch.ops.aten.trace.default.redispatch(_KERNELS, one)  # past autocast, which may be on
    except NotImplementedError:
        return False
    return True
