"""``multi_tensor_applier``, whose ``available`` is False: scripts then use their own fallback of apex's kernels."""

from typing import Any, NoReturn

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """A launcher of the kernels in ``amp_C``. It is never available, because mpinit does not provide ``amp_C``."""

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        raise RuntimeError(
            "multi_tensor_applier was called, but there are no amp_C kernels here: test multi_tensor_applier.available "
            "(it is False) and use torch's own torch._foreach_* or plain torch code"
        )


multi_tensor_applier = MultiTensorApply(2048 * 32)
