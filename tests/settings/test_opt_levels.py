"""opt_levels: the property table, literally."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpinit.settings.opt_levels import OPT_LEVELS
from mpinit.settings.properties import Properties
from mpinit.settings.resolve import resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

TABLE: dict[str, dict[str, Any]] = {
    "cast_model_type": {"O0": F32, "O1": None, "O2": F16, "O3": F16, "O4": None, "O5": BF16},
    "patch_torch_functions": {"O0": False, "O1": True, "O2": False, "O3": False, "O4": True, "O5": False},
    "keep_batchnorm_fp32": {"O0": None, "O1": None, "O2": True, "O3": False, "O4": None, "O5": True},
    "master_weights": {"O0": False, "O1": None, "O2": True, "O3": False, "O4": None, "O5": True},
    "loss_scale": {"O0": 1.0, "O1": "dynamic", "O2": "dynamic", "O3": 1.0, "O4": 1.0, "O5": 1.0},
    "patch_torch_functions_type": {"O0": F16, "O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": F16},
}
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


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
