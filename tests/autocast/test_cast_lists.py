"""The lists of casts: rows that cast, rows that promote, and torch's own lists beside them.

Below the public face: the rows of the policy are data, which has no public name.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cast_samples import resolve
from casts import BF16, FP32, HALF, LOWER, StartCasts
from torch.nn import functional as F

from mpinit.autocast.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow

POLICIES = pytest.mark.parametrize("rows", [TORCH_POLICY, APEX_POLICY], ids=["torch", "apex"])

# torch's name of a kernel -> the row it belongs to, where the two differ.
ROW_OF_KERNEL = {
    "_convolution": "convolution",
    "linalg_vecdot": "vecdot",
    "linalg_multi_dot": "multi_dot",
    "_thnn_fused_lstm_cell": "lstm_cell",
    "_thnn_fused_gru_cell": "gru_cell",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "native_layer_norm": "layer_norm",
    "frobenius_norm": "norm",
    "nuclear_norm": "norm",
    "linalg_vector_norm": "norm",
    "linalg_matrix_norm": "norm",
    "nll_loss2d": "nll_loss",
    "grid_sampler": "grid_sample",
}
KINDS = {
    "AT_FORALL_LOWER_PRECISION_FP": Cast.LOWER_PRECISION,
    "AT_FORALL_FP32": Cast.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Cast.FP32,
    "AT_FORALL_PROMOTE": Cast.PROMOTE,
}
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def torchs_own_list() -> list[tuple[str, Cast]]:
    """Every kernel of torch's CUDA autocast lists, read from the header that ships with torch."""
    found = []
    text = HEADER.read_text(encoding="utf-8").replace("\\\n", "\n")
    for macro, cast in KINDS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\s*\n", text, re.DOTALL)
        assert body is not None, macro
        found += [(kernel, cast) for kernel in re.findall(r"_\((\w+)", body.group(1))]
    return found


def row_of_kernel(kernel: str) -> str:
    if "upsample" in kernel:
        return "interpolate"
    return ROW_OF_KERNEL.get(kernel, kernel)


@pytest.mark.skipif(not HEADER.exists(), reason="this torch ships without headers")
def test_torchs_cuda_lists_are_covered_row_by_row() -> None:
    kernels = torchs_own_list()
    assert len(kernels) > 90
    casts = {row.name: row.cast for row in TORCH_POLICY}
    different = [kernel for kernel, cast in kernels if casts.get(row_of_kernel(kernel)) is not cast]
    assert different == ["addbmm", "index_put"], "a CPU adds in 16 bits there: they are float32"


@POLICIES
def test_names_are_unique_and_exist(rows: tuple[CastRow, ...]) -> None:
    assert len({row.name for row in rows}) == len(rows)
    names = [name for row in rows for name in row.names]
    assert len(set(names)) == len(names)
    assert all(callable(resolve(name)) for name in names)
    assert all(row.wraps for row in rows)


def test_the_stricter_policy_only_adds_and_replaces() -> None:
    apex = {row.name: row for row in APEX_POLICY}
    changed = {row.name for row in TORCH_POLICY if apex[row.name] is not row}
    assert changed == {"grid_sample"}
    added = {name for name in apex if not name.endswith("_")} - {row.name for row in TORCH_POLICY}
    assert added == {"gelu", "std", "var", "local_response_norm", "ctc_loss", "cpu"}


def test_in_place_float32_functions_are_refused_by_apex_policy() -> None:
    floats = {row.name for row in APEX_POLICY if row.cast is Cast.FP32}
    refused = {row.name for row in APEX_POLICY if row.cast is Cast.REFUSED}
    unseen = {"sum_", "index_add_", "index_put_", "index_reduce_", "addbmm_"}
    assert {f"{name}_" for name in floats if hasattr(torch.Tensor, f"{name}_")} <= refused | unseen


CATS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("cat", "stack", "hstack", "column_stack")},
    "block_diag": lambda tensors: torch.block_diag(*tensors),
    "roll": lambda tensors: sum(tensor.roll(1, 0) for tensor in tensors),  # type: ignore[return-value]
    "gradient": lambda tensors: sum(torch.gradient(tensor)[0] for tensor in tensors),  # type: ignore[return-value]
    "index_copy": lambda tensors: tensors[0].index_copy(0, torch.tensor([0, 1]), tensors[-1]),
}


@LOWER
@pytest.mark.parametrize("name", CATS)
def test_cat_and_stack_promote_both_16_bit_types(name: str, lower: torch.dtype, start_casts: StartCasts) -> None:
    x = torch.arange(4.0).reshape(2, 2)
    want = {count: CATS[name]([x] * count) for count in (1, 2)}
    start_casts(patch_torch_functions_type=lower)
    for given in [(HALF,), (BF16,), (HALF, FP32), (FP32, BF16), (HALF, BF16), (BF16, HALF), (lower, lower)]:
        got = CATS[name]([x.to(dtype) for dtype in given])
        assert got.dtype is (given[0] if len(set(given)) == 1 else FP32), given
        assert torch.equal(got.float(), want[len(given)])


@LOWER
def test_bilinear_in_float32_is_exact(lower: torch.dtype, start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions_type=lower)
    x = torch.full((1, 4), 200.0)
    assert F.bilinear(x, x, torch.ones(1, 4, 4)).item() == 640_000.0
    assert torch.nn.Bilinear(4, 4, 1)(x, x).dtype is FP32


@LOWER
def test_a_0_dimensional_float32_argument_counts(lower: torch.dtype, start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions_type=lower)
    x, exact = torch.ones(2, dtype=lower), torch.tensor(1 + 2.0**-20)
    assert torch.atan2(x, exact).dtype is FP32
    assert torch.equal(torch.addcmul(torch.zeros(2, dtype=lower), x, exact), exact.expand(2))
    assert torch.equal(torch.zeros(2, dtype=lower).addcdiv(exact, x), exact.expand(2))
    assert torch.equal(torch.zeros(2, dtype=lower).addcmul(x, exact, value=2), 2 * exact.expand(2))


@LOWER
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, dtype: x.norm(dtype=dtype),
        lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
        lambda x, dtype: torch.masked.norm(x, 2, dtype=dtype),
    ],
    ids=["norm", "vector_norm", "masked.norm"],
)
def test_norms_return_the_requested_dtype(
    norm: Callable[..., torch.Tensor], lower: torch.dtype, start_casts: StartCasts
) -> None:
    start_casts(patch_torch_functions_type=lower)
    x = torch.tensor([[3.0, 4.0]], dtype=lower)
    assert norm(x, lower).dtype is lower
    assert norm(x, lower).item() == 5.0
    assert torch.linalg.vector_norm(x, dtype=torch.float64).dtype is torch.float64
    assert torch.linalg.vector_norm(x).dtype is FP32


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@LOWER
def test_a_call_with_out_runs_as_without_casts(lower: torch.dtype, start_casts: StartCasts) -> None:
    a, b = torch.rand(3, 3) + 100, torch.rand(3, 3)
    calls: list[Callable[[Any], Any]] = [
        lambda out: torch.tensordot(a, b, 1, out=out),
        lambda out: torch.linalg.multi_dot([a, b, a], out=out),
        lambda out: torch.chain_matmul(a, b, out=out),
        lambda out: torch.inner(a, b, out=out),
        lambda out: torch.linalg.vector_norm(a, out=out),
    ]
    normalized = F.normalize(a.to(lower), out=torch.empty(3, 3, dtype=lower))
    want = [call(None) for call in calls]
    start_casts(patch_torch_functions_type=lower)
    for call, expected in zip(calls, want, strict=True):
        out = torch.empty_like(expected)
        assert call(out) is out
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
    assert torch.equal(F.normalize(a.to(lower), out=torch.empty(3, 3, dtype=lower)), normalized)
    assert torch.exp(torch.full((2,), 12.0, dtype=HALF), out=None).isfinite().all()


@LOWER
def test_sums_and_powers_in_compiled_functions_are_float32(lower: torch.dtype, start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions_type=lower)
    x = torch.full((5000,), 100.0, dtype=lower)
    assert torch.trapezoid(x).item() == pytest.approx(499_900.0)
    assert x.sum_to_size(1).item() == 500_000.0
    assert torch.ldexp(x, torch.tensor(12, dtype=lower))[0].item() == 409_600.0
    assert torch.inner(x.float(), x.float()).item() == 5000 * 100.0**2
    assert torch.inner(x.float()[None], x.float()[None]).item() == 5000 * 100.0**2
