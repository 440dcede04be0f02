"""dtypes: every spelling a user may give, and the text of the refusal."""

from __future__ import annotations

import pytest
import torch

from mpinit.basics.dtypes import dtype_name, is_lower_precision, parse_dtype

SPELLINGS = {
    torch.float16: [torch.float16, torch.half, "float16", "fp16", "half", "torch.float16", "FP16", " fp16 "],
    torch.bfloat16: [torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16", "BF16"],
    torch.float32: [torch.float32, torch.float, "float32", "fp32", "float", "torch.float32"],
}


@pytest.mark.parametrize(
    ("dtype", "spelling"), [(dtype, spelling) for dtype, spellings in SPELLINGS.items() for spelling in spellings]
)
def test_every_spelling_is_understood(dtype: torch.dtype, spelling: object) -> None:
    assert parse_dtype(spelling) is dtype


@pytest.mark.parametrize("value", [torch.float64, torch.int32, torch.bool, "double", "int8", "", "16", 16, True, None])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError) as caught:
        parse_dtype(value)
    text = str(caught.value)
    assert repr(value) in text
    assert all(name in text for name in ("float16", "bfloat16", "float32"))


@pytest.mark.parametrize("dtype", list(SPELLINGS))
def test_the_name_reads_back(dtype: torch.dtype) -> None:
    assert "." not in dtype_name(dtype)
    assert parse_dtype(dtype_name(dtype)) is dtype


def test_only_the_two_16_bit_floats_are_lower_precision() -> None:
    all_dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {dtype for dtype in all_dtypes if is_lower_precision(dtype)} == {torch.float16, torch.bfloat16}
