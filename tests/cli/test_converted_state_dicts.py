"""``mpinit convert`` finds the state dicts of models and optimizers at any depth, and replaces nothing else.

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


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


NESTS: dict[str, Any] = {
    "a dict": {"models": {"G": half_model(), "D": half_model()}},
    "a list": {"models": [half_model(), half_model()]},
    "a tuple": {"models": (half_model(), 3)},
    "a list of tensors": {"ema": {"decay": 0.9, "shadow": [torch.ones(2).half(), torch.ones(3).bfloat16()]}},
    "three levels": {"state": {"nets": [{"G": half_model()}]}},
    "Lightning": {"callbacks": {"EMA": {"ema_state_dict": half_model()}}, "state_dict": half_model()},
}


@pytest.mark.parametrize("nest", NESTS)
def test_16_bit_weights_are_widened_at_any_depth(nest: str) -> None:
    checkpoint = NESTS[nest]
    before = repr(checkpoint)
    result, changes = converted({**checkpoint, "amp": SCALES}, "mpinit")
    found = [tensor for key, tree in result.items() if key != "mpinit" for tensor in tensors(tree)]
    originals = [tensor for tree in checkpoint.values() for tensor in tensors(tree)]
    assert {tensor.dtype for tensor in found} == {torch.float32}
    assert all(torch.equal(new, old.float()) for new, old in zip(found, originals, strict=True))
    assert any("16-bit" in line for line in changes) and repr(checkpoint) == before


def test_line_of_a_nested_model_has_its_place() -> None:
    changes = converted({"models": {"G": half_model()}}, "mpinit")[1]
    assert changes[0] == "models['G']: 2 tensors were 16-bit, the first 'weight'; widened to float32"


def test_nested_optimizers_get_step_counts() -> None:
    fused = {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0], "step": 7}]}
    result, changes = converted({"optimizers": {"G": fused}, "amp": SCALES}, "torch")
    assert result["optimizers"]["G"]["state"][0]["step"] == 7.0
    assert any(line.startswith("optimizers['G']: the step in the groups") for line in changes)


def test_metadata_and_the_class_of_a_state_dict_stay() -> None:
    """Check the versions in ``_metadata``, by which torch upgrades the entries of old modules."""
    state = nn.BatchNorm1d(2).half().state_dict()
    found = converted({"model": state}, "mpinit")[0]["model"]
    assert type(found) is type(state) and found._metadata == state._metadata


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
    _, changes = converted({"model": half_model(), "amp": SCALES}, "torch", loss_id=1)
    assert "loss scale 64 under 'scaler', with torch's default growth" in changes
    assert any(line.startswith("loss scale 1024 of loss_scaler0 is not in the file") for line in changes)
    assert "loss scale 1024, 64 under 'amp'" in converted({"mpinit": SCALES}, "apex")[1]


def test_missing_scale_is_reported() -> None:
    assert (
        "no loss scale under any of 'mpinit', 'amp', 'scaler': start with a fresh one"
        in converted({"model": half_model()}, "mpinit")[1]
    )
