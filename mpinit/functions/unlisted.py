"""Functions in no row that all the same do not run in the type they are given, as data; measured with torch 2.13. A
name stands for the method of that name too.

Their bodies call functions that have a row, or the CPU's own autocast list casts them. The list is complete for
``torch.testing``'s database of operators; ``tests/functions/test_operators.py`` compares.
"""

from __future__ import annotations

from typing import Final

from ..torch_internals.cpu_autocast_list import RUNS_IN_FLOAT32
from .cast_lists import Cast

__all__ = ["FLOAT32_ON_CPU", "MADE_OF_OTHERS"]

# The matrix products inside run in 16 bits: float32 arguments come back in 16 bits.
_PRODUCTS: Final = (
    "torch.cov",
    "torch.corrcoef",
    "torch.matrix_power",
    "torch.linalg.matrix_power",
    "torch.linalg.pinv",
)

# Powers, logarithms and sums inside run in float32, and so the result is, though not every step is.
_POWERS: Final = (
    *("torch.nn.functional.gaussian_nll_loss", "torch.nn.functional.multilabel_soft_margin_loss"),
    *("torch.nn.functional.local_response_norm", "torch.nn.functional.linear_cross_entropy"),
)

MADE_OF_OTHERS: Final = {
    **dict.fromkeys(_PRODUCTS, Cast.LOWER_PRECISION),
    **dict.fromkeys(_POWERS, Cast.FP32),
}

FLOAT32_ON_CPU: Final = frozenset(RUNS_IN_FLOAT32)
