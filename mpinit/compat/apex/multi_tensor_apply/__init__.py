"""The switch by which scripts choose between apex's kernels and their own fallback: it says that there are none."""

from typing import Any, NoReturn

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Never available: ``amp_C``, whose kernels it launches, is not part of what mpinit provides."""

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        raise RuntimeError(
            "multi_tensor_applier was called, but there are no amp_C kernels here: test multi_tensor_applier.available "
            "(it is False) and use torch's own torch._foreach_* or plain torch code"
        )


multi_tensor_applier = MultiTensorApply(2048 * 32)
