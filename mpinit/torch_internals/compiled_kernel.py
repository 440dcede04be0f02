"""Functions of torch's own operations that are compiled where that pays, and give the same bits where they are not.

Twenty operations over a tensor read and write it twenty times; compiled they are one loop.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from .devices import is_capturing

_log = logging.getLogger("mpinit")

# Compiling takes some seconds: about as long as this many rows of 128 numbers take without.
_WORTH_ROWS: Final = 1 << 20
# Calling what is compiled takes longer than a few rows do.
_FEWEST_ROWS: Final = 64
# Kinds of device that there is a compiler for.
_KINDS: Final = ("cpu", "cuda")
# Rows worked on at a time without, so that what is between operations stays in the CPU's cache.
_CHUNK_ROWS: Final = 512
# No multiplication and addition in one, which would round once instead of twice; and no pool of processes.
_OPTIONS: Final[dict[str, Any]] = {"cpp.enable_floating_point_contract_flag": "off", "compile_threads": 1}


@final
class CompiledKernel:
    """A function that writes into some of its arguments, row by row.

    It is compiled for a kind of device once it has been called on enough rows there, where there is a compiler and
    where what comes out on a sample is the same to the bit; anywhere else it runs as it is.

    Args:
        function: takes tensors of two dimensions, of as many rows each, and of one, the same for every row. It reads
            nothing that it writes to, so that it may be run again.
        sample: makes arguments to try it on.
        worth: rows that take as long without as compiling does.

    Example:
        >>> kernel = CompiledKernel(lambda x, out: out.copy_(x * 2), lambda: [torch.ones(1, 2), torch.ones(1, 2)])
        >>> out = torch.empty(1, 2); kernel(torch.ones(1, 2), out); out
        tensor([[2., 2.]])
    """

    def __init__(
        self, function: Callable[..., Any], sample: Callable[[], list[torch.Tensor]], worth: int | None = None
    ) -> None:
        self._function = function
        self._sample = sample
        self._worth = _WORTH_ROWS if worth is None else worth
        self._rows: dict[str, int] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, *arguments: torch.Tensor) -> None:
        """Run it."""
        rows, device = arguments[0].shape[0], arguments[0].device
        if self.is_ready(device, rows) and rows >= _FEWEST_ROWS and self._runs_compiled(device.type, arguments):
            return
        if device.type == "cpu":
            _in_chunks(self._function, arguments, rows)
        else:
            self._function(*arguments)

    def _runs_compiled(self, kind: str, arguments: Sequence[torch.Tensor]) -> bool:
        try:
            self._compiled[kind](*arguments)
        except Exception as error:
            # In the middle of a step: the compiler was switched off since, or is forbidden to compile once more.
            _log.info("a kernel runs as it is from here on: %s", str(error).partition("\n")[0])
            del self._compiled[kind]
            return False
        return True

    def is_ready(self, device: torch.device, rows: int) -> bool:
        """Whether it is compiled for a device and can run now; so many rows more count towards compiling it."""
        # Inside of a dispatch mode, one that counts operations say, what torch has compiled raises.
        if torch._C._len_torch_dispatch_stack():
            return False
        kind = device.type
        so_far = self._rows.get(kind, 0)
        if so_far < self._worth and kind in _KINDS and not (kind == "cuda" and is_capturing()):
            self._rows[kind] = so_far + rows
            if so_far + rows >= self._worth:
                self.compile(kind)
        return kind in self._compiled

    def compile(self, kind: str = "cpu") -> bool:
        """Compile it now, for a kind of device; whether that worked, and gives the same bits."""
        self._rows[kind] = self._worth
        try:
            # What is "compiled" then is the function, in one piece.
            if torch._dynamo.config.disable:
                return False
            compiled = torch.compile(self._function, dynamic=True, fullgraph=True, options=dict(_OPTIONS))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = _same_bits(self._function, compiled, [argument.to(kind) for argument in self._sample()])
        except Exception as error:
            _log.info("a kernel runs as it is: %s", str(error).partition("\n")[0])
            return False
        if same:
            self._compiled[kind] = compiled
        return same


def _in_chunks(function: Callable[..., Any], arguments: Sequence[torch.Tensor], rows: int) -> None:
    for begin in range(0, rows, _CHUNK_ROWS):
        function(*(a[begin : begin + _CHUNK_ROWS] if a.dim() == 2 else a for a in arguments))


def _same_bits(function: Callable[..., Any], other: Callable[..., Any], sample: list[torch.Tensor]) -> bool:
    twins = [argument.clone() for argument in sample]
    function(*sample)
    other(*twins)
    return all(
        torch.equal(one.view(torch.uint8), twin.view(torch.uint8)) for one, twin in zip(sample, twins, strict=True)
    )
