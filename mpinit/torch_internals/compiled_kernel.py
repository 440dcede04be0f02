"""Functions made of torch's operations that are compiled on a GPU if the result has the same bits.

Twenty operations on a tensor read and write it twenty times; compiled they are one loop. On a CPU ``native_code`` does
the same. Without it, rows are computed in chunks that fit into the cache.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ..basics.logs import log
from .running import is_capturing, is_faster_in_chunks

# Compiling lasts some seconds, as long as computing this many rows of 128 numbers without it.
_WORTH_ROWS: Final = 1 << 20
# Rows computed at a time, so that they fit into a cache; the last chunk includes the remainder.
_CHUNK_ROWS: Final = 2048


class CompiledKernel:
    """A function that writes into some of its arguments, row by row.

    It is compiled for a device type after enough calls there, and the compiled result is compared with the uncompiled
    one. If a bit differs, or there is no compiler, it runs uncompiled. Two-dimensional arguments have equal numbers of
    rows; a one-dimensional argument is the same for every row. The function must not read what it writes, because it
    may run twice.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._rows: dict[str, int] = {}
        self._compiled: dict[str, Callable[..., Any] | None] = {}

    def __call__(self, *arguments: torch.Tensor) -> None:
        rows, device = arguments[0].shape[0], arguments[0].device
        if is_faster_in_chunks(device):
            ends = [*range(_CHUNK_ROWS, rows - _CHUNK_ROWS + 1, _CHUNK_ROWS), rows]
            for begin, end in zip([0, *ends], ends, strict=False):
                self._function(*(a[begin:end] if a.dim() == 2 else a for a in arguments))
        # Compiled functions raise inside a dispatch mode, such as one that counts operations.
        elif is_capturing() or torch._C._len_torch_dispatch_stack() or not self._runs_compiled(device.type, arguments):
            self._function(*arguments)

    def _runs_compiled(self, kind: str, arguments: Sequence[torch.Tensor]) -> bool:
        rows = self._rows[kind] = self._rows.get(kind, 0) + arguments[0].shape[0]
        if rows < _WORTH_ROWS:
            return False
        try:
            if kind not in self._compiled:
                self._compiled[kind] = None
                self._compiled[kind] = self._compile(arguments)
            compiled = self._compiled[kind]
            if compiled is not None:
                compiled(*arguments)
            return compiled is not None
        except Exception as error:
            # The compiler was switched off, or its recompile limit was reached, in the middle of a step.
            log.info("a kernel runs uncompiled from here on: %s", str(error).partition("\n")[0])
            self._compiled[kind] = None
            return False

    def _compile(self, arguments: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
        """Compile the function; return None if a bit of its result differs, or if torch.compile is switched off."""
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
