"""What is known of devices, asked by name instead of by comparing their types everywhere."""

from typing import Final

import torch

# On a CPU, memory past this size goes back to the system after every step and is faulted in again by the next:
# buckets of 16 MiB were measured to step twice as fast as ones of 64.
_CPU_BUCKET_BYTES: Final = 16 * 2**20


def is_read_freely(device: torch.device) -> bool:
    """Whether reading a number off the device waits for nothing."""
    return device.type == "cpu"


def bucket_bytes_at_most(device: torch.device, wanted: int) -> int:
    """How many bytes are best worked on at a time, of those ``wanted``."""
    return min(wanted, _CPU_BUCKET_BYTES) if device.type == "cpu" else wanted


def works_within_a_cache(device: torch.device) -> bool:
    """Whether several passes over memory are best done on parts that stay in a cache between them."""
    return device.type == "cpu"


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, during which nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
