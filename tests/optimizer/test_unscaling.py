"""Unscaling and checking lists of gradients, for every kind of tensor a gradient can be."""

from __future__ import annotations

import pytest
import torch

from mpinit.basics.dtypes import as_float32
from mpinit.optimizer import gradients as unscaling

pytestmark = pytest.mark.device

INVERSE = torch.tensor(0.25)
BAD = (float("inf"), float("-inf"), float("nan"))


def sparse(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows 0 and 2 of a 4 x 1 matrix, row 2 named twice."""
    rows = torch.tensor(values, dtype=dtype).unsqueeze(1)
    return sparse_rows([0, 2, 2], rows, 4)


def sparse_rows(indices: list[int], rows: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` rows of which ``rows`` stand at ``indices``."""
    # The argument check_invariants=False says the same, but before 2.13 torch warned of unchecked invariants anyway.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.tensor([indices]), rows, (count, *rows.shape[1:]))


def kinds() -> dict[str, torch.Tensor]:
    return {
        "float32": torch.tensor([4.0, 8.0]),
        "float16": torch.tensor([4.0, 8.0], dtype=torch.float16),
        "bfloat16": torch.tensor([4.0, 8.0], dtype=torch.bfloat16),
        "float64": torch.tensor([4.0, 8.0], dtype=torch.float64),
        "float64 beyond float32": torch.tensor([4e300, 8.0], dtype=torch.float64),
        "complex": torch.tensor([4 + 8j, 1j]),
        "sparse": sparse([4.0, 8.0, 12.0]).coalesce(),
        "empty": torch.empty(0),
    }


@pytest.mark.parametrize("kind", kinds())
def test_unscaling_multiplies_and_finds_nothing_wrong(kind: str) -> None:
    gradient, expected = kinds()[kind], kinds()[kind] * 0.25
    found_inf = unscaling.unscale_and_check_([gradient], INVERSE)
    assert found_inf is not None and found_inf.dim() == 0 and found_inf.item() == 0
    torch.testing.assert_close(gradient.to_dense(), expected.to_dense(), rtol=0, atol=0)
    static = kinds()[kind]
    unscaling.unscale_([static], INVERSE)
    torch.testing.assert_close(static.to_dense(), expected.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind != "empty"])
def test_inf_and_nan_are_found_wherever_they_are(kind: str, bad: float) -> None:
    everything = kinds()
    dense = unscaling.dense_view(everything[kind])
    dense[(-1,) * dense.dim()] = bad
    found_inf = unscaling.unscale_and_check_(list(everything.values()), INVERSE)
    assert found_inf is not None and found_inf.item() == 1.0
    assert everything["float32"][0].item() == 1.0, "the others are unscaled all the same"


def test_without_gradients_there_is_no_finding() -> None:
    assert unscaling.unscale_and_check_([], INVERSE) is None


def test_a_16_bit_sparse_gradient_is_summed_in_float32() -> None:
    many = sparse_rows([0] * 300, torch.ones(300, 1, dtype=torch.bfloat16), 2)
    assert as_float32(many).to_dense().tolist() == [[300.0], [0.0]]
