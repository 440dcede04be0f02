"""The time of the parts of a step with split masters and encoded states, beside that of the optimizer's own step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from .case import Case, Facts, Unavailable

TENSORS: Final = 4


@dataclass(frozen=True)
class Work:
    """A function to time, and an untimed function that runs before it each time.

    Attributes:
        numbers: how many numbers the function works on.
        is_native: whether native code does the work, if it is built.
    """

    numbers: int
    timed: Callable[[], Any]
    untimed: Callable[[], Any] = lambda: None
    is_native: bool = False


def _adam(side: int, form: str) -> Work:
    weights = [nn.Parameter(torch.randn(side, side)) for _ in range(TENSORS)]
    for weight in weights:
        weight.grad = torch.randn(side, side)
    settings: dict[str, Any] = {form: True}
    return Work(TENSORS * side**2, torch.optim.Adam(weights, **settings).step)


def _split(side: int, way: str) -> Work:
    from mpinit.masters.split import SplitMasters

    masters, weights = SplitMasters(), [nn.Parameter(torch.randn(side, side)) for _ in range(TENSORS)]
    made = [master for weight in weights if (master := masters.add(weight, torch.bfloat16)) is not None]
    for master in made:
        masters.cast(master, torch.bfloat16, clamps=False)
    gradients = [torch.randn(side, side, dtype=torch.bfloat16) for _ in weights]
    opened = masters.batch(made, torch.device("cpu"))

    def join() -> None:
        opened.read()
        opened.widened(gradients)

    if way == "out":
        return Work(TENSORS * side**2, opened.write, join)
    return Work(TENSORS * side**2, join, opened.write)


def _encoding(side: int, name: str, way: str) -> Work:
    from mpinit.masters.codecs.bfloat16 import BFloat16
    from mpinit.masters.codecs.codec import BLOCK
    from mpinit.masters.codecs.minifloat import Minifloat

    codec = {"bfloat16": BFloat16, "int8": Minifloat}[name]()
    rows = TENSORS * side**2 // BLOCK
    values, codes = torch.randn(rows, BLOCK), codec.empty(rows, torch.device("cpu"))
    codec.encode_(values, codes)
    timed = partial(codec.encode_, values, codes) if way == "encoded" else partial(codec.decode_, codes, values)
    return Work(values.numel(), timed, is_native=True)


PIECES: Final[Mapping[str, Callable[[int], Work]]] = {
    "fused Adam": partial(_adam, form="fused"),
    "foreach Adam": partial(_adam, form="foreach"),
    "split: masters put together, gradients widened": partial(_split, way="in"),
    "split: masters taken apart": partial(_split, way="out"),
    **{
        f"{name} state: {way}": partial(_encoding, name=name, way=way)
        for name in ("bfloat16", "int8")
        for way in ("decoded", "encoded")
    },
}


def has_native_code() -> bool:
    """Return whether native code, which steps, encodes and decodes on a CPU, is built; load it."""
    from mpinit.torch_internals.native import native

    return native() is not None


class Piece(Case):
    """The time of one piece.

    Args:
        name: a row of ``PIECES``.
        side: the size of the square matrices that it works on.
        needs_native: whether a piece that native code can do is unavailable without native code.
    """

    def __init__(self, name: str, side: int, needs_native: bool = True) -> None:
        self.make, self.side, self.needs_native = PIECES[name], side, needs_native

    def prepare(self) -> None:
        torch.manual_seed(0)
        self.work = self.make(self.side)
        if self.needs_native and self.work.is_native and not has_native_code():
            raise Unavailable("native code is not built: mpinit build-native")
        self.seconds(3)

    def seconds(self, loops: int) -> float:
        spent = 0.0
        for _ in range(loops):
            self.work.untimed()
            begin = time.process_time()
            self.work.timed()
            spent += time.process_time() - begin
        return spent

    def facts(self, first: bool) -> Facts:
        return {"numbers": self.work.numbers}
