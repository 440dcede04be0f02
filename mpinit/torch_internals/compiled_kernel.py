"""Functions of torch's own operations that are compiled for a GPU where that pays, and give the same bits where not.

Twenty operations over a tensor read and write it twenty times; compiled they are one loop. On a CPU ``one_pass.cpp``
does the same, and what is between operations stays in its cache.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ..basics.logs import log
from .running import is_capturing, works_within_a_cache

# Compiling takes some seconds: about as long as this many rows of 128 numbers take without.
_WORTH_ROWS: Final = 1 << 20
# Rows worked on at a time where that keeps them in a cache; what is left over goes with the last.
_CHUNK_ROWS: Final = 2048


class CompiledKernel:
    """A function that writes into some of its arguments, row by row.

    It is compiled for a device's kind once it has been called on enough rows there, and tried on the numbers at hand:
    where what comes out is not the same to the bit, or there is no compiler, it runs as it is. It takes tensors of two
    dimensions, of as many rows each, and of one, the same for every row. It reads nothing that it writes to, so that it
    may be run again.
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
        # Inside of a dispatch mode, one that counts operations say, what torch has compiled raises.
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
            # In the middle of a step: the compiler was switched off since, or is forbidden to compile once more.
            log.info("a kernel runs as it is from here on: %s", str(error).partition("\n")[0])
            self._compiled[kind] = None
            return False

    def _proved(self, arguments: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
        # What is "compiled" where dynamo is off is the function, in one piece.
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
