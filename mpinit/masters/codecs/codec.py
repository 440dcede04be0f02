"""The interface of encodings: blocks of float32 numbers to a few tensors of codes, and back."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

import torch

from ...basics.running import is_faster_in_chunks
from ..arithmetic import EAGER, Arithmetic, Sample

# What tensor_rows() returns.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Codes = tuple[torch.Tensor, ...]

# Numbers that are encoded together, and a row of everything here: the last row of a tensor is filled up with zeros.
BLOCK: Final = 128
# Rows computed at a time on a CPU, so that they fit into a cache; the last chunk includes the remainder.
_CHUNK_ROWS: Final = 1024


class Codec(ABC):
    """An encoding of rows of :data:`BLOCK` float32 numbers.

    What was decoded and not changed is encoded to the same codes: writing back without a step changes nothing, and an
    optimizer's float32 state dict loses nothing.

    Attributes:
        name: what ``optimizer_state`` calls it.
    """

    name: str

    @abstractmethod
    def empty(self, rows: int, device: torch.device) -> Codes:
        """Allocate the codes of ``rows`` rows; each tensor has as many rows."""

    def encode_(
        self, values: torch.Tensor, codes: Codes, tensors: Tensors | None = None, run: Arithmetic = EAGER
    ) -> None:
        """Write the codes of ``values``.

        Args:
            values: float32, (rows, BLOCK), contiguous.
            codes: the tensors to write to, with as many rows.
            tensors: the result of :func:`tensor_rows`; None for a single tensor. Default None.
            run: calls functions of tensors. Default: as torch's operations.
        """
        chunks = list(_chunks(values, run))
        parts = [(values[rows], tuple(code[rows] for code in codes)) for rows in chunks]
        measured = [self._measure(*part, run) for part in parts]
        noise = _noise_of_rows(torch.cat([sums for sums, *_ in measured]), tensors)
        for part, (_, *known), rows in zip(parts, measured, chunks, strict=True):
            self._round(*part, noise[rows], known, run)

    def decode_(self, codes: Codes, values: torch.Tensor, run: Arithmetic = EAGER) -> None:
        """Write the decoded numbers into ``values`` (float32, (rows, BLOCK), contiguous)."""
        for rows in _chunks(values, run):
            self._decode(tuple(code[rows] for code in codes), values[rows], run)

    @abstractmethod
    def _measure(self, values: torch.Tensor, codes: Codes, run: Arithmetic) -> Sequence[torch.Tensor]:
        """Compute the result of :func:`low_sums` for some rows, and what else :meth:`_round` needs to know of them."""

    @abstractmethod
    def _round(
        self, values: torch.Tensor, codes: Codes, noise: torch.Tensor, known: Sequence[torch.Tensor], run: Arithmetic
    ) -> None:
        """Write the codes of some rows; the noise of a number is that of its row, (rows, 1), times its place."""

    @abstractmethod
    def _decode(self, codes: Codes, values: torch.Tensor, run: Arithmetic) -> None:
        """Write the numbers of some rows."""

    @abstractmethod
    def samples(self) -> list[Sample]:
        """List the functions that ``run`` is called with, with arguments for a comparison of their results."""


def _chunks(values: torch.Tensor, run: Arithmetic) -> Iterator[slice]:
    """Divide rows, on a CPU: twenty operations on a large tensor would read and write memory twenty times."""
    rows = len(values)
    ends = [*range(_CHUNK_ROWS, rows - _CHUNK_ROWS + 1, _CHUNK_ROWS), rows]
    if not is_faster_in_chunks(values.device) or run.is_compiled_on(values.device):
        ends = [rows]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield slice(begin, end)


# Noise: whole numbers, evenly distributed over the lower 20 bits, computed from the places of numbers and a sum over
# their tensor. So no random generator is used, and a resumed run has the same noise. If one number has changed, all
# others have other noise, so that no number stays the same for ever.

# Odd numbers without a pattern in their bits.
_ROW: Final = 0x85EBCA6B - 2**32
_STIR: Final = 0x27D4EB2F


def low_sums(bits: torch.Tensor) -> torch.Tensor:
    """Sum the lower halves of each row's numbers, (rows, 1).

    These sums of whole numbers are below 2**24, so float32 has them exactly, in any order. A compiler for CPUs makes
    slow sums of others.
    """
    return (bits & 0xFFFF).to(torch.float32).sum(1, keepdim=True)


def tensor_rows(rows: Sequence[int], device: torch.device) -> Tensors:
    """Describe concatenated tensors of so many rows, for their noise.

    Copies three tensors to the device, which is a device sync.

    Returns:
        The last row of each tensor, a start of its noise, and for each row the index of its tensor.
    """
    ends = list(accumulate(rows))
    begins = [-(end - count) * _ROW for end, count in zip(ends, rows, strict=True)]
    of_rows = [index for index, count in enumerate(rows) for _ in range(count)]
    last, starts = (
        torch.tensor(each, dtype=torch.int64, device=device) for each in ([end - 1 for end in ends], begins)
    )
    return last, starts, torch.tensor(of_rows, dtype=torch.int32, device=device)


def _noise_of_rows(sums: torch.Tensor, tensors: Tensors | None) -> torch.Tensor:
    """Compute the noise of rows, (rows, 1), from the sums of each.

    The noise of an element is its place times a number of its row. So equal numbers in a row have different noise, and
    do not end in a fixed pattern. Each tensor has the noise that it would have alone.
    """
    if tensors is None:
        seeds = sums.sum(dtype=torch.int64)
    else:
        last, begins, of_rows = tensors
        totals = sums.view(-1).cumsum(0, dtype=torch.int64)[last]
        seeds = totals.diff(prepend=totals.new_zeros(1)).add_(begins).index_select(0, of_rows)
    rows = torch.arange(len(sums), dtype=torch.int64, device=sums.device)
    noise = rows.mul_(_ROW).add_(seeds).to(torch.int32).mul_(_STIR).bitwise_right_shift_(12).bitwise_or_(1)
    return noise.view(-1, 1)


def places(device: torch.device) -> torch.Tensor:
    """List the places of a row's numbers."""
    return torch.arange(1, BLOCK + 1, dtype=torch.int32, device=device)


def sample_numbers() -> torch.Tensor:
    """Make float32 numbers of all kinds, in rows: of one sign and of two, of all sizes, with inf and nan."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(64, BLOCK, generator=generator, dtype=torch.float32, device="cpu")
    rows[16:32] *= torch.randn(16, BLOCK, generator=generator, dtype=torch.float32, device="cpu").mul_(8).exp_()
    rows[::2] **= 2
    rows *= torch.logspace(-44, 37, 64, dtype=torch.float32, device="cpu").view(-1, 1)
    rows[0], rows[1], rows[2], rows[3, ::2] = 0.0, -0.0, 1e-45, 0.0
    rows[40, 3], rows[41, 5], rows[42, 7], rows[43] = torch.inf, torch.nan, -torch.inf, torch.nan
    return rows


def sample_noise() -> tuple[torch.Tensor, torch.Tensor]:
    """Make the noise of the rows of :func:`sample_numbers`, and the numbers of places."""
    noise = torch.arange(64, dtype=torch.int32, device="cpu").view(-1, 1) * _STIR
    return noise, places(noise.device)
