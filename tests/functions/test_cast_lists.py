"""The cast policy as data: complete against torch's own list, consistent, and the same as the page made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cast_samples import resolve

from mpinit.functions.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow

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
    assert [(kernel, cast) for kernel, cast in kernels if casts.get(row_of_kernel(kernel)) is not cast] == []


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


def test_every_in_place_variant_of_a_float32_function_is_refused_by_the_stricter_policy() -> None:
    floats = {row.name for row in APEX_POLICY if row.cast is Cast.FP32}
    refused = {row.name for row in APEX_POLICY if row.cast is Cast.REFUSED}
    assert {f"{name}_" for name in floats if hasattr(torch.Tensor, f"{name}_")} <= refused | {"sum_"}
