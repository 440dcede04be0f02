"""Configuration files: what they hold, and what is said of those that are wrong.

Below the public face: a configuration is resolved without a model.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import mpinit
from mpinit import OPT_LEVELS
from mpinit.config.reading import DEFAULT_LEVEL, resolve

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
        {"loss_scale": mpinit.DynamicLossScale(hysteresis=2, growth_interval=4000, min=1.0, max_consecutive_skips=32)},
    ),
    "o2_float32_norms": ("O2", {"keep_fp32": ("*norm*", "*.ln_*", "head", "lm_head")}),
    "o1_model_scope": ("O1", {"patch_torch_functions": "model"}),
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
def test_file_begins_with_its_purpose(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# {read(path)['opt_level']}")


def refused(config: Any, kind: type[BaseException] = ValueError, **keywords: Any) -> str:
    """What ``initialize`` says to a configuration; the model is as it was."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(kind) as caught:
        mpinit.initialize(model, config=config, **keywords)
    assert model.weight.dtype == torch.float32 and "forward" not in vars(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("loss_scale = 2 # é".encode("latin-1"), "save it as UTF-8"),
        ("loss_scale = 2".encode("utf-16"), "save it as UTF-8"),
        (b"keep_fp32 = " + b"[" * 100_000, "is not TOML"),
        (b"loss_scale = ", "is not TOML"),
        (b"# mine\nopt_level = O2 # fast", "line 2, column 13); save it as UTF-8; strings are in quotes"),
        (b'opt_level = "O9"', "opt_level='O9' is not a level"),
        (b'opt_level = "O2"\nmin_loss_scale = 0', "min_loss_scale: value=0.0 is not a number between 2**-126"),
        (b'opt_level = "O2"\nloss_scale = "big"', "loss_scale: 'big' is not a loss scale"),
        (b'opt_level = "O1"\nmaster_weights = true', "master_weights=True contradicts patch_torch_functions=True"),
        (b"num_losses = 0", "num_losses: input should be greater than or equal to 1, but 0 was passed"),
        (b"num_losses = 1.5", "num_losses: input should be a valid integer"),
        (b'verbosity = "loud"', "verbosity: input should be a valid integer"),
        (b"growth = 3", "has no property 'growth'"),
    ],
)
def test_wrong_value_in_a_file_names_the_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    for config in (path, str(path)):
        text = refused(config)
        assert text.startswith(f"config file {str(path)!r}")
        assert says in text


def test_a_keyword_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('opt_level = "O2"\nmin_loss_scale = 5\nnum_losses = 2')
    assert "mine.toml" not in refused(path, min_loss_scale=0)
    assert "mine.toml" not in refused(path, num_losses=0)
    assert "mine.toml" not in refused(path, opt_level="O9")
    assert refused(path, master_weights="split").startswith("master_weights="), "both sides are not the file's"


def test_a_mapping_is_named_as_config() -> None:
    assert refused({"num_losses": 0}).startswith("config: num_losses: ")
    assert refused({"min_loss_scale": 0}).startswith("config: min_loss_scale: ")


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none.toml", FileNotFoundError)):
        assert str(path) in refused(path, kind)
    assert "config file 'a\\x00b'" in refused("a\0b")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes('opt_level = "O3"'.encode("utf-8-sig"))
    model = torch.nn.Linear(2, 2)
    mpinit.initialize(model, config=path)
    assert model.weight.dtype == torch.float16


@pytest.mark.parametrize("name", sorted(mpinit.Properties.model_fields))
def test_a_value_that_holds_itself_is_refused_by_name(name: str) -> None:
    mapping: dict[str, Any] = {}
    mapping[name] = mapping
    items: list[Any] = []
    items.append(items)
    for value in (mapping, items):
        text = refused({name: value})
        assert name in text and "config" in text
