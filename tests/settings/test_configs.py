"""configs: every shipped file resolves, and the levels' files say the same as their Python rows."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from mpinit.settings.defaults import DEFAULT_LEVEL
from mpinit.settings.opt_levels import OPT_LEVELS
from mpinit.settings.resolve import resolve

CONFIGS = Path(__file__).parents[2] / "configs"
FIVE = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "o5_split_masters": ("O5", {"master_weights": "split"}),
    "o5_masters_in_model": ("O5", {"master_weights": "model"}),
    "o5_split_int8": ("O5", {"master_weights": "split", "optimizer_state": "int8"}),
    "o3_batchnorm_fp32": ("O3", {"keep_batchnorm_fp32": True}),
    "o2_static_scale": ("O2", {"loss_scale": 128.0}),
    "o2_cautious_scale": (
        "O2",
        {"hysteresis": 2, "growth_interval": 4000, "min_loss_scale": 1.0, "max_consecutive_skips": 32},
    ),
    "o2_float32_norms": ("O2", {"keep_fp32": ("*norm*", "*.ln_*", "head", "lm_head")}),
    "o1_model_scope": ("O1", {"cast_scope": "model"}),
}


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def test_every_level_and_every_variant_is_shipped_and_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {level.lower() for level in OPT_LEVELS} | set(VARIANTS)


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_a_levels_file_resolves_to_its_row(level: str) -> None:
    assert resolve(DEFAULT_LEVEL, {}, CONFIGS / f"{level.lower()}.toml") == (level, OPT_LEVELS[level])


@pytest.mark.parametrize("level", OPT_LEVELS)
@pytest.mark.parametrize("base", OPT_LEVELS)
def test_a_levels_file_spells_every_property_out(level: str, base: str) -> None:
    values = read(CONFIGS / f"{level.lower()}.toml")
    assert set(FIVE) <= set(values)
    props = resolve(base, {}, values)[1]
    assert {name: getattr(props, name) for name in FIVE} == {name: getattr(OPT_LEVELS[level], name) for name in FIVE}
    if props.patch_torch_functions:
        assert props.patch_torch_functions_type is OPT_LEVELS[level].patch_torch_functions_type


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_its_level_with_a_few_overrides(name: str) -> None:
    level, overrides = VARIANTS[name]
    resolved_level, props = resolve(DEFAULT_LEVEL, {}, CONFIGS / f"{name}.toml")
    assert resolved_level == level
    assert props == resolve(level, overrides)[1]
    assert props != OPT_LEVELS[level]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_file_begins_with_what_it_is_for(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# {read(path)['opt_level']}")
