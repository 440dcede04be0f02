"""From a level and keywords to properties, and to the plan.

Below the public face: settings are resolved to a plan without a model.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import mpinit
from mpinit.config.loss_scale import DynamicLossScale
from mpinit.config.plan import MasterWeightsMode, make_plan
from mpinit.config.properties import OPT_LEVELS, Properties
from mpinit.config.reading import DEFAULT_LEVEL, resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


@pytest.mark.parametrize("level", ["00", "01", "o1", "O6", "O", "", " O1", "1", 0, 1, None, 1.0, b"O1", [], F16])
def test_unknown_level_says_it_is_letter_and_lists_levels(level: Any) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(level, {})
    text = str(caught.value)
    assert repr(level) in text
    assert "letter O" in text
    assert all(repr(name) in text for name in LEVELS)


@pytest.mark.parametrize(
    ("level", "name", "value", "expected"),
    [
        ("O0", "cast_model_outputs", "fp16", F16),
        ("O1", "cast_model_type", False, None),
        ("O1", "loss_scale", 128, 128.0),
        ("O1", "patch_torch_functions", "False", False),
        ("O2", "master_weights", "False", False),
        ("O2", "cast_model_type", False, None),
        ("O3", "keep_batchnorm_fp32", "True", True),
        ("O3", "master_weights", "True", True),
        ("O5", "master_weights", "split", "split"),
        ("O5", "loss_scale", "dynamic", "dynamic"),
    ],
)
def test_a_keyword_overrides_one_property_and_no_other(level: str, name: str, value: Any, expected: Any) -> None:
    props = resolve(level, {name: value})[1]
    assert getattr(props, name) == expected
    for other in set(Properties.model_fields) - {name}:
        assert getattr(props, other) == getattr(OPT_LEVELS[level], other)


@pytest.mark.parametrize("name", list(Properties.model_fields))
@pytest.mark.parametrize("level", LEVELS)
def test_none_means_not_given(level: str, name: str) -> None:
    assert resolve(level, {name: None})[1] == OPT_LEVELS[level]
    assert resolve(level, {}, {name: "None"})[1] == resolve(level, {name: "None"})[1]


@pytest.mark.parametrize(
    ("level", "name"), [("O1", "patch_torch_functions_type"), ("O2", "cast_model_type"), ("O3", "cast_model_type")]
)
@pytest.mark.parametrize("spelling", [BF16, "bf16", "bfloat16"])
def test_bfloat16_needs_no_loss_scale(level: str, name: str, spelling: Any) -> None:
    props = resolve(level, {name: spelling})[1]
    assert props.lower_precision_type is BF16
    assert props.loss_scale == 1.0
    assert resolve(level, {name: spelling, "loss_scale": "dynamic"})[1].loss_scale == "dynamic"
    assert resolve(level, {name: spelling, "loss_scale": "None"})[1].loss_scale == 1.0
    assert resolve(level, {name: spelling}, {"loss_scale": 64})[1].loss_scale == 64.0


def test_o4_and_o5_are_o1_and_o2_in_bfloat16() -> None:
    assert resolve("O4", {})[1] == resolve("O1", {"patch_torch_functions_type": BF16})[1]
    assert resolve("O5", {})[1] == resolve("O2", {"cast_model_type": BF16})[1]


CONTRADICTIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("O1", {"cast_model_type": F16}, ["cast_model_type=torch.float16", "patch_torch_functions=True", "O2"]),
    ("O2", {"patch_torch_functions": True}, ["cast_model_type=torch.float16", "patch_torch_functions=True", "O1"]),
    ("O1", {"master_weights": True}, ["master_weights=True", "patch_torch_functions=True", "O2"]),
    ("O4", {"master_weights": "split"}, ["master_weights='split'", "patch_torch_functions=True", "O2"]),
    ("O2", {"master_weights": "split"}, ['master_weights="split"', "cast_model_type=torch.float16", "O5"]),
    ("O1", {"keep_batchnorm_fp32": False}, ["keep_batchnorm_fp32=False", "patch_torch_functions=True", "O3"]),
    ("O5", {"grad_dtype": "bf16"}, ["grad_dtype=torch.bfloat16", "torch.float32", "None"]),
    ("O3", {"grad_dtype": F32}, ["grad_dtype=torch.float32", "master_weights=False"]),
    ("O3", {"optimizer_state": "int8"}, ['optimizer_state="int8"', "master_weights=False"]),
    ("O2", {"min_loss_scale": 4.0, "max_loss_scale": 2.0}, ["min_loss_scale=4.0", "max_loss_scale=2.0", "lower"]),
]


@pytest.mark.parametrize(("level", "overrides", "named"), CONTRADICTIONS)
def test_a_contradiction_names_both_sides_and_a_way(level: str, overrides: dict[str, Any], named: list[str]) -> None:
    for arguments in ((overrides, None), ({}, overrides)):
        with pytest.raises(ValueError) as caught:
            resolve(level, *arguments)
        assert [word for word in named if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("los_scale", "loss_scale"),
        ("keep_batchnorm_float32", "keep_batchnorm_fp32"),
        ("optlevel", "opt_level"),
        ("num_loss", "num_losses"),
        ("await_optimizer", "await_optimizers"),
    ],
)
def test_an_unknown_keyword_finds_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"initialize\(\) has no keyword '{name}'; did you mean '{near}'\?"):
        mpinit.initialize(torch.nn.Linear(2, 2), **{name: 1})
    with pytest.raises(ValueError, match=r"'zzz'\. There are: models, .*opt_level, .*cast_model_type, .*grad_dtype"):
        mpinit.initialize(torch.nn.Linear(2, 2), zzz=None)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"])
def test_a_keyword_of_the_rule_names_the_rule(name: str) -> None:
    model, field = torch.nn.Linear(2, 2), "init" if name == "init_scale" else name
    for given in ({name: 1}, {"config": {name: 1}}):
        with pytest.raises(ValueError, match=rf"'{name}': use loss_scale=mpinit.DynamicLossScale\({field}="):
            mpinit.initialize(model, **given)
    assert model.weight.dtype is F32


def test_keywords_beat_the_file_and_the_file_beats_the_level(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('opt_level = "O2"\nloss_scale = 64\nnum_losses = 2\nkeep_fp32 = ["head"]\n')
    for config in (path, str(path)):
        level, props = resolve(DEFAULT_LEVEL, {"loss_scale": 32.0}, config)
        assert level == "O2"
        assert props.loss_scale == 32.0
        assert props.num_losses == 2
        assert props.keep_fp32 == ("head",)
        assert props.master_weights is True
        assert resolve("O3", {}, config)[0] == "O3", "a level given by keyword beats the file's"
        assert resolve("O1", {}, config)[0] == "O1", "also where it is the default one"


def test_the_default_level_is_o1() -> None:
    assert DEFAULT_LEVEL == "O1"
    assert resolve(DEFAULT_LEVEL, {})[1] == OPT_LEVELS["O1"]
    assert resolve(DEFAULT_LEVEL, {}, {"opt_level": None})[0] == "O1"


@pytest.mark.parametrize("name", ["enabled", "await_optimizers"])
@pytest.mark.parametrize("value", ["False", None, 2, "maybe"])
def test_a_switch_that_is_no_boolean_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        mpinit.initialize(torch.nn.Linear(2, 2), **{name: value})


CHOICES: dict[str, list[Any]] = {
    "cast_model_type": [None, False, F16, BF16, F32, "fp16", "None"],
    "patch_torch_functions": [None, True, False, "True", "None"],
    "patch_torch_functions_type": [None, F16, "bf16"],
    "keep_batchnorm_fp32": [None, True, False, "None"],
    "master_weights": [None, True, False, "split", "None"],
    "loss_scale": [None, "dynamic", 128.0, "128.0", 1, "None"],
    "min_loss_scale": [None, 1.0, 2.0**20],
    "max_loss_scale": [None, 2.0**10, 2.0**24],
}


def check_invariants(level: str, given_values: dict[str, Any], props: Properties) -> None:
    lower = props.lower_precision_type
    cast = props.cast_model_type
    assert not (props.patch_torch_functions and (props.master_weights or cast in (F16, BF16)))
    assert props.master_weights != "split" or cast is BF16
    if lower is BF16 and given_values.get("loss_scale") in (None, "None"):
        assert props.loss_scale == 1.0
    plan = make_plan(props)
    assert plan.properties is props
    assert plan.cast_model is (cast is not None)
    assert (plan.masters is not MasterWeightsMode.NONE) == bool(props.master_weights and cast in (F16, BF16))
    rule = plan.loss_scale
    if isinstance(rule, DynamicLossScale):
        assert rule.lowest <= rule.init <= rule.max
    else:
        assert rule == props.loss_scale


def resolves_or_names_both_sides(level: str, values: dict[str, Any]) -> bool:
    try:
        _, props = resolve(level, values)
    except ValueError as error:
        named = [name for name in CHOICES if f"{name}=" in str(error)]
        assert len(named) >= 2, f"{values} at {level} were refused without naming both sides: {error}"
        assert any(values.get(name) is not None for name in named), "and one of them is what was given"
        return False
    check_invariants(level, values, props)
    return True


def test_pairs_of_overrides_are_consistent_or_both_named() -> None:
    outcomes = {True: 0, False: 0}
    for level, (first, second) in itertools.product(LEVELS, itertools.combinations(CHOICES, 2)):
        for one, other in itertools.product(CHOICES[first], CHOICES[second]):
            outcomes[resolves_or_names_both_sides(level, {first: one, second: other})] += 1
    assert min(outcomes.values()) > 100, "both outcomes are exercised"


TABLE: dict[str, dict[str, Any]] = {
    "cast_model_type": {"O0": F32, "O1": None, "O2": F16, "O3": F16, "O4": None, "O5": BF16},
    "patch_torch_functions": {"O0": False, "O1": True, "O2": False, "O3": False, "O4": True, "O5": False},
    "keep_batchnorm_fp32": {"O0": None, "O1": None, "O2": True, "O3": False, "O4": None, "O5": True},
    "master_weights": {"O0": False, "O1": None, "O2": True, "O3": False, "O4": None, "O5": True},
    "loss_scale": {"O0": 1.0, "O1": "dynamic", "O2": "dynamic", "O3": 1.0, "O4": 1.0, "O5": 1.0},
    "patch_torch_functions_type": {"O0": F16, "O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": F16},
}


@pytest.mark.parametrize("name", TABLE)
def test_the_property_table(name: str) -> None:
    assert list(OPT_LEVELS) == LEVELS
    for level, expected in TABLE[name].items():
        row = getattr(OPT_LEVELS[level], name)
        assert row is expected if not isinstance(expected, float) else row == expected
        assert getattr(resolve(level, {})[1], name) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_everything_else_is_the_default_at_every_level(level: str) -> None:
    assert resolve(level, {}) == (level, OPT_LEVELS[level])
    for name in set(Properties.model_fields) - set(TABLE):
        assert getattr(OPT_LEVELS[level], name) == getattr(Properties(), name)


def test_the_levels_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        OPT_LEVELS["O2"] = OPT_LEVELS["O3"]  # type: ignore[index]
