"""Properties: what is refused, what is read back, and strings as a command line and a file have them.

Below the public face: values are parsed without a model.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpinit.basics.dtypes import dtype_name, is_lower_precision, parse_dtype
from mpinit.config.loss_scale import LARGEST_SCALE, SMALLEST_SCALE
from mpinit.config.properties import OPT_LEVELS, build
from mpinit.config.reading import PROPERTIES, is_override

DTYPE_FIELDS = ("cast_model_type", "patch_torch_functions_type", "cast_model_outputs")
BOOLEAN_FIELDS = ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "skip_nonfinite")
NUMBER_FIELDS = ("loss_scale", "min_loss_scale", "max_loss_scale")


@pytest.mark.parametrize("field", DTYPE_FIELDS)
@pytest.mark.parametrize("spelling", [torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16"])
def test_dtypes_in_any_spelling(field: str, spelling: Any) -> None:
    assert getattr(build({field: spelling}), field) is torch.bfloat16


@pytest.mark.parametrize("nothing", [None, False, "None", "False", "false", "none"])
def test_no_cast_in_any_spelling(nothing: Any) -> None:
    assert build({"cast_model_type": nothing}).cast_model_type is None


@pytest.mark.parametrize("field", BOOLEAN_FIELDS)
@pytest.mark.parametrize(("spelling", "value"), [("True", True), ("false", False), ("1", True)])
def test_booleans_from_a_command_line(field: str, spelling: str, value: bool) -> None:
    keywords = {"cast_model_type": "bf16"} if field == "master_weights" else {}
    assert getattr(build({field: spelling, **keywords}), field) is value


@pytest.mark.parametrize("field", BOOLEAN_FIELDS)
@pytest.mark.parametrize("value", ["maybe", 2, 0.5, [], torch.float16])
def test_what_is_no_boolean_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        build({field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", ["128.0", "128", 128, 128.0, torch.tensor(128.0)])
def test_scales_in_any_spelling(field: str, value: Any) -> None:
    parsed = getattr(build({field: value}), field)
    assert parsed == 128.0
    assert type(parsed) is float


def test_dynamic_is_a_loss_scale_but_not_a_limit() -> None:
    assert build({"loss_scale": "dynamic"}).loss_scale == "dynamic"
    for field in ("min_loss_scale", "max_loss_scale"):
        with pytest.raises(ValueError, match=f"{field}.*dynamic"):
            build({field: "dynamic"})


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, "-1", "0", float("nan"), "nan", float("inf"), "-inf", "big", 2.0**127, 2.0**-127]
)
def test_scales_that_cannot_be_undone_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        build({field: value})


def test_a_boolean_is_no_loss_scale() -> None:
    with pytest.raises(ValueError, match="True is not a loss scale"):
        build({"loss_scale": True})


@given(st.floats(SMALLEST_SCALE, LARGEST_SCALE))
def test_scales_and_their_reciprocals_are_normal_numbers(scale: float) -> None:
    assert build({"loss_scale": scale}).loss_scale == scale
    for number in (torch.tensor(scale), torch.tensor(scale).reciprocal()):
        assert torch.finfo(torch.float32).tiny <= number.item() < float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_losses", value) for value in (0, -1, 1.5, "two", 2**17)),
        *(("verbosity", value) for value in ("loud", 1.5, [1])),
        ("master_weights", "splitt"),
        ("loss_scale", "dynamc"),
        ("optimizer_state", "int4"),
        *((name, value) for name in ("keep_fp32", "compute_fp32") for value in (3, torch.nn.Linear(1, 1), int)),
        ("keep_inputs", torch.nn.Linear),
        ("entry_points", "no method"),
        ("cast_model_type", "float8"),
    ],
)
def test_values_out_of_range_are_refused_and_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        build({field: value})
    text = str(caught.value)
    assert text.startswith(field)
    assert "validation error" not in text, "pydantic's own report is not for users"
    assert (type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)) in text


def predicate(name: str, module: torch.nn.Module) -> bool:
    return name == "head"


@pytest.mark.parametrize("field", ["keep_fp32", "compute_fp32"])
@pytest.mark.parametrize("entry", ["head", "*.norm", torch.nn.LayerNorm, predicate])
def test_modules_are_names_types_predicates_or_lists_of_them(field: str, entry: Any) -> None:
    assert getattr(build({field: entry}), field) == (entry,)
    assert getattr(build({field: [entry, "tail"]}), field) == (entry, "tail")
    assert getattr(build({field: "None"}), field) == ()


def test_properties_are_frozen_and_compare_by_value() -> None:
    props = OPT_LEVELS["O2"]
    with pytest.raises(ValueError, match="frozen"):
        props.loss_scale = 1.0  # type: ignore[misc]
    assert props == build({name: getattr(props, name) for name in PROPERTIES})
    assert hash(props) == hash(props.model_copy())
    assert props != OPT_LEVELS["O5"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"patch_torch_functions": True}, torch.float16),
        ({"patch_torch_functions": "model", "patch_torch_functions_type": "bf16"}, torch.bfloat16),
        ({"cast_model_type": "bf16"}, torch.bfloat16),
        ({"cast_model_type": "fp32"}, None),
        ({"patch_torch_functions_type": "bf16"}, None),
        ({}, None),
    ],
)
def test_the_16_bit_type_a_property_set_works_in(values: dict[str, Any], expected: torch.dtype | None) -> None:
    assert build(values).lower_precision_type is expected


@pytest.mark.parametrize("nothing", ["None", "none"])
def test_string_none_sets_only_optional_properties(nothing: str) -> None:
    nullable = [name for name in PROPERTIES if is_override(name, nothing)]
    for name in nullable:
        build({name: nothing})
    for name in set(PROPERTIES) - set(nullable):
        with pytest.raises(ValueError, match=name):
            build({name: nothing})
    assert not any(is_override(name, None) for name in PROPERTIES)


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
def test_other_dtypes_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError) as caught:
        parse_dtype(value)
    text = str(caught.value)
    assert repr(value) in text
    assert all(name in text for name in ("float16", "bfloat16", "float32"))


@pytest.mark.parametrize("dtype", list(SPELLINGS))
def test_dtype_name_round_trips(dtype: torch.dtype) -> None:
    assert "." not in dtype_name(dtype)
    assert parse_dtype(dtype_name(dtype)) is dtype


def test_only_the_two_16_bit_floats_are_lower_precision() -> None:
    all_dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {dtype for dtype in all_dtypes if is_lower_precision(dtype)} == {torch.float16, torch.bfloat16}
