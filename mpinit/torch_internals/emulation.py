"""Processors without 16-bit units, on which torch emulates 16-bit arithmetic more slowly than float32 runs."""

import functools
import time
from typing import Final

import torch

from .native_autocast import CastsOff
from .running import is_capturing, is_eager

# Matrices that are multiplied: large enough that arithmetic is most of the time, and done in milliseconds.
_SIDE: Final = 128
_REPEATS: Final = 5
# A processor with 16-bit units is faster in 16 bits than in float32, or as fast; noise is less than this.
_SLOW: Final = 1.5


def slowdown(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the time of a matrix product in a 16-bit dtype over float32's where 16 bits are emulated; else None.

    It is measured once in a process: on a CPU, and on a CUDA device without bfloat16 units.
    """
    if is_capturing() or not is_eager() or not _may_be_emulated(device.type, dtype):
        return None
    ratio = _ratio(device, dtype)
    return ratio if ratio >= _SLOW else None


def _may_be_emulated(kind: str, dtype: torch.dtype) -> bool:
    if kind == "cuda":
        return dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu"


@functools.cache
def _ratio(device: torch.device, dtype: torch.dtype) -> float:
    with torch.no_grad(), CastsOff():
        return seconds_of_product(device, dtype) / seconds_of_product(device, torch.float32)


def seconds_of_product(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the shortest time of a matrix product."""
    matrix = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        # A number that is read is computed: no other synchronisation is needed on any device.
        torch.nn.functional.linear(matrix, matrix)[0, 0].item()
        times.append(time.perf_counter() - begin)
    return min(times)
