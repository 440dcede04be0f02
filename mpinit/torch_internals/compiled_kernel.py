"""Functions of torch's operations, compiled on a GPU where that is faster, with the same bits.

Twenty operations over a tensor read and write it twenty times; compiled they are one loop. On a CPU ``one_pass.cpp``
does the same; without it rows are computed in chunks that stay in the cache.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ..basics.logs import log
from .running import is_capturing, works_within_a_cache

# Compiling lasts some seconds: as long as this many rows of 128 numbers without it.
_WORTH_ROWS: Final = 1 << 20
# Rows computed at a time where they stay in a cache; the last chunk includes the remainder.
_CHUNK_ROWS: Final = 2048


class CompiledKernel:
    """A function that writes into some of its arguments, row by row.

    It is compiled for a device type after it was called on enough rows there, and compared on the present arguments.
    Where the result differs in a bit, or there is no compiler, it runs uncompiled. Arguments are tensors of two
    dimensions, with equal numbers of rows, and of one dimension, the same for every row. The function reads nothing
    that it writes to, so that it may run twice.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._rows: dict[str, int] = {}
        self._compiled: dict[str, Callable[..., Any] | None] = {}

    def __call__(self, *arguments: torch.Tensor) -> None:
        rows, device = arguments[0].shape[0], arguments[0].device
        if works_within_a_cache(device):
            ends = [*range(_CHUNK_ROWS, rows - _CHUNK_ROWS + 1, _CHUNK_ROWS), rows]
            for begin, end in zip([0, *ends], ends, strict=False):
                self._function(*(a[begin:end] if a.dim() == 2 else a for a in arguments))
        # Compiled functions raise inside a dispatch mode (one that counts operations).
        elif is_capturing() or torch._C._len_torch_dispatch_stack() or not self._runs_compiled(device.type, arguments):
            self._function(*arguments)

    def _runs_compiled(self, kind: str, arguments: Sequence[torch.Tensor]) -> bool:
        rows = self._rows[kind] = self._rows.get(kind, 0) + arguments[0].shape[0]
        if rows < _WORTH_ROWS:
            return False
        try:
            if kind not in self._compiled:
                self._compiled[kind] = None
                self._compiled[kind] = self._proved(arguments)
            compiled = self._compiled[kind]
            if compiled is not None:
                compiled(*arguments)
            return compiled is not None
        except Exception as error:
            # In the middle of a step: the compiler was switched off, or its recompile limit was reached.
            log.info("a kernel runs as it is from here on: %s", str(error).partition("\n")[0])
            self._compiled[kind] = None
            return False

    def _proved(self, arguments: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
        # With dynamo off torch.compile returns the function itself.
        if torch._dynamo.config.disable:
            return None
        compiled = torch.compile(self._function, dynamic=True, fullgraph=True, options={"compile_threads": 1})
        twins = [argument.clone() for argument in arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(*twins)
        self._function(*arguments)
        same = (torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(arguments, twins, strict=True))
        return compiled if all(same) else None
