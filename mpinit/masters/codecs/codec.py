"""The interface of encodings: blocks of float32 numbers to a few tensors of codes, and back."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

import torch

from ...basics.running import is_faster_in_chunks
from ..arithmetic import EAGER, Arithmetic, Sample

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
        self, values: torch.Tensor, codes: Codes, tensors: torch.Tensor | None = None, run: Arithmetic = EAGER
    ) -> None:
        """Write the codes of ``values``.

        Args:
            values: float32, (rows, BLOCK), contiguous.
            codes: the tensors to write to, with as many rows.
            tensors: the result of :func:`tensor_rows`; None for a single tensor. Default None.
            run: calls functions of tensors. Default: as torch's operations.
        """
        numbers, groups = _numbers_and_groups(values, tensors)
        places = torch.arange(1, BLOCK + 1, dtype=torch.int32, device=values.device)
        for rows in _chunks(values, run):
            noise = _noise_of_rows(values[rows].view(torch.int32), numbers[rows], groups[rows])
            self._encode(values[rows], tuple(code[rows] for code in codes), noise, places, run)

    @abstractmethod
    def _encode(
        self, values: torch.Tensor, codes: Codes, noise: torch.Tensor, places: torch.Tensor, run: Arithmetic
    ) -> None:
        """Write the codes of some rows; the noise of a number is that of its row (rows, 1) times its place (BLOCK)."""

    @abstractmethod
    def decode_(self, codes: Codes, values: torch.Tensor, run: Arithmetic = EAGER) -> None:
        """Write the decoded numbers into ``values`` (float32, (rows, BLOCK), contiguous)."""

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


def in_rows(values: torch.Tensor) -> torch.Tensor:
    """View a one-dimensional float32 tensor as whole rows; where its size is no multiple, a copy padded with zeros."""
    missing = -values.numel() % BLOCK
    if missing:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.view(-1, BLOCK)


# Noise: whole numbers, evenly distributed over the lower 20 bits, computed from the numbers themselves, their places
# and a sum over their neighbours. So no random generator is used, and a resumed run has the same noise. If one number
# has changed, its neighbours have other noise, so that no number stays the same for ever.

# Number of rows that share noise. If all numbers of a single row stayed the same once, they would stay for ever.
_NEIGHBOURS: Final = 32
# Odd numbers without a pattern in their bits.
_ROW: Final = 0x85EBCA6B - 2**32
_STIR: Final = 0x27D4EB2F


def tensor_rows(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Compute row offsets and noise groups of several concatenated tensors, each of which has one of these row counts.

    Copies them to the device, which is a device sync.
    """
    groups = [max(count // _NEIGHBOURS, 1) for count in rows]
    ends = list(accumulate(rows))
    # For each tensor: the row after its last, its first row, its first group, the number of its groups without one.
    lines = [ends, [0, *ends[:-1]], [0, *accumulate(groups[:-1])], [count - 1 for count in groups]]
    return torch.tensor(lines, dtype=torch.int32, device=device)


def _numbers_and_groups(values: torch.Tensor, tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a number for each row, and the number of its group, each (rows, 1).

    A group is 32 rows; the last group also has the remaining rows. If the values are those of several tensors, numbers
    and groups begin anew with each: ``tensors`` is then made by :func:`tensor_rows`.
    """
    numbers = torch.arange(len(values), dtype=torch.int32, device=values.device).view(-1, 1)
    if tensors is None:
        groups = (numbers // _NEIGHBOURS).clamp_(max=max(len(values) // _NEIGHBOURS - 1, 0))
        return numbers * _ROW, groups
    ends, *others = tensors
    which = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    first, group, last = (line[which] for line in others)
    numbers = numbers - first
    return numbers * _ROW, torch.minimum(numbers // _NEIGHBOURS, last).add_(group)


def _noise_of_rows(bits: torch.Tensor, numbers: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Compute the noise of rows, (rows, 1), from float32 numbers viewed as int32; there are whole groups of rows.

    The noise of an element is its place times a number of its row. So equal numbers in a row have different noise, and
    do not end in a fixed pattern.
    """
    # Integer sums wrap around, so they do not depend on the order.
    sums = bits.sum(1, dtype=torch.int32)
    within = (groups - groups[0]).view(-1)
    shared = torch.zeros_like(sums).index_add_(0, within, sums)[within].view(-1, 1)
    return shared.add_(numbers).mul_(_STIR).bitwise_right_shift_(12).bitwise_or_(1)


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
    return noise, torch.arange(1, BLOCK + 1, dtype=torch.int32, device="cpu")
