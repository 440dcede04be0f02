"""``mpinit convert`` finds loss scales, and the state dicts of optimizers at any depth; it replaces nothing else.

Below the public face: checkpoints are converted in memory, without files.
"""

from typing import Any

import pytest
import torch
from torch import nn

from mpinit.cli.convert import converted

SCALES = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}, "loss_scaler1": {"loss_scale": 64.0, "unskipped": 1}}
SCALER = {"scale": 8.0, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 50, "_growth_tracker": 7}


def half_model() -> dict[str, Any]:
    return nn.Linear(2, 2).half().state_dict()


def test_nested_optimizers_get_step_counts() -> None:
    fused = {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0], "step": 7}]}
    result, changes = converted({"optimizers": {"G": fused}, "amp": SCALES}, "torch")
    assert result["optimizers"]["G"]["state"][0]["step"] == 7.0
    assert any(line.startswith("optimizers['G']: the step in the groups") for line in changes)


def test_models_and_averages_stay_as_they_are() -> None:
    model, shadow = half_model(), [torch.ones(2).half()]
    found = converted({"nets": [{"G": model}], "ema": {"shadow": shadow}, "amp": SCALES}, "mpinit")[0]
    assert found["nets"][0]["G"] is model and found["ema"]["shadow"][0] is shadow[0]


@pytest.mark.parametrize("to", ["mpinit", "apex", "torch"])
def test_entry_of_the_user_under_the_key_of_a_scaler_is_refused(to: str) -> None:
    key = {"mpinit": "mpinit", "apex": "amp", "torch": "scaler"}[to]
    other = "amp" if key != "amp" else "scaler"
    scale = SCALES if other == "amp" else SCALER
    for value in ({"mean": torch.ones(2)}, "mine", 3):
        with pytest.raises(ValueError, match=f"loss scales under .*'{key}'"):
            converted({"model": half_model(), key: value, other: scale}, to)
        with pytest.raises(ValueError, match=f"the entry '{key}' is not the state of"):
            converted({"model": half_model(), key: value}, to)


@pytest.mark.parametrize("empty", [None, {}])
def test_state_of_a_disabled_scaler_is_replaced(empty: Any) -> None:
    result, _ = converted({"model": half_model(), "amp": SCALES, "scaler": empty}, "torch")
    assert result["scaler"]["scale"] == 1024.0


def test_grad_scaler_keeps_its_growth() -> None:
    assert converted({"model": half_model(), "scaler": SCALER}, "torch")[0]["scaler"] == SCALER
    assert converted({"scaler": SCALER}, "apex")[0]["amp"] == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}}


def test_lines_name_scale_that_is_written_and_those_that_are_not() -> None:
    _, changes = converted({"model": half_model(), "amp": SCALES}, "torch")
    assert "loss scale 1024 under 'scaler', with torch's default growth" in changes
    assert any(line.startswith("loss scale 64 is not in the file") for line in changes)
    assert "loss scale 1024, 64 under 'amp'" in converted({"mpinit": SCALES}, "apex")[1]


def test_missing_scale_is_reported() -> None:
    assert (
        "no loss scale under any of 'mpinit', 'amp', 'scaler': start with a fresh one"
        in converted({"model": half_model()}, "mpinit")[1]
    )
