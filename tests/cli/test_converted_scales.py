"""``mpinit convert`` finds the state of a scaler by its form, in files of other libraries, and says where.

Below the public face: checkpoints are converted in memory, without files.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import mpinit
from mpinit.cli.convert import converted

TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
CUR_SCALE = {"cur_scale": 1024.0, "cur_iter": 108, "last_overflow_iter": 100, "scale_factor": 2.0, "scale_window": 1000}


def model_and_optimizer() -> tuple[dict[str, Any], dict[str, Any]]:
    model = nn.Linear(4, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


MODEL, OPTIMIZER = model_and_optimizer()
# The form of a file, the place that is named, and the good updates.
FILES: dict[str, tuple[dict[str, Any], str, int]] = {
    "Lightning": (
        {"epoch": 1, "state_dict": MODEL, "optimizer_states": [OPTIMIZER], "MixedPrecision": TORCH},
        "['MixedPrecision']",
        7,
    ),
    "Lightning 1": (
        {"state_dict": MODEL, "optimizer_states": [OPTIMIZER], "native_amp_scaling_state": TORCH},
        "['native_amp_scaling_state']",
        7,
    ),
    "timm": ({"epoch": 3, "state_dict": MODEL, "optimizer": OPTIMIZER, "amp_scaler": TORCH}, "['amp_scaler']", 7),
    "DINO": ({"student": MODEL, "optimizer": OPTIMIZER, "fp16_scaler": TORCH}, "['fp16_scaler']", 7),
    "nnU-Net": (
        {"network_weights": MODEL, "optimizer_state": OPTIMIZER, "grad_scaler_state": TORCH},
        "['grad_scaler_state']",
        7,
    ),
    "mmcv": (
        {"meta": {"epoch": 2, "fp16": {"loss_scaler": CUR_SCALE}}, "state_dict": MODEL, "optimizer": OPTIMIZER},
        "['meta']['fp16']['loss_scaler']",
        7,
    ),
    "mmengine": (
        {"state_dict": MODEL, "optimizer": OPTIMIZER | {"loss_scaler": TORCH}},
        "['optimizer']['loss_scaler']",
        7,
    ),
    "fairseq": (
        {"model": MODEL, "last_optimizer_state": OPTIMIZER | {"loss_scale": 1024.0}, "optimizer_history": [{"n": 1}]},
        "['last_optimizer_state']['loss_scale']",
        0,
    ),
    "a list": ({"model": MODEL, "extra": [{"x": 1}, {"scaler": TORCH}]}, "['extra'][1]['scaler']", 7),
    "a tensor": (
        {"model": MODEL, "s": {"scale": torch.tensor(1024.0), "_growth_tracker": torch.tensor(7)}},
        "['s']",
        7,
    ),
}


@pytest.mark.parametrize("to", ["mpinit", "apex", "torch"])
@pytest.mark.parametrize("file", FILES)
def test_scale_is_found_wherever_it_lies(file: str, to: str) -> None:
    checkpoint, place, unskipped = FILES[file]
    before = repr(checkpoint)
    result, changes = converted(checkpoint, to)
    assert f"loss scale 1024 found at {place}" in changes and repr(checkpoint) == before
    if to == "torch":
        assert (result["scaler"]["scale"], result["scaler"]["_growth_tracker"]) == (1024.0, unskipped)
        torch.amp.GradScaler("cpu").load_state_dict(result["scaler"])
    else:
        key = {"mpinit": "mpinit", "apex": "amp"}[to]
        assert result[key] == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": unskipped}}


@pytest.mark.parametrize("file", FILES)
def test_converted_scale_loads(file: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2")
    mpinit.load_state_dict(converted(FILES[file][0], "mpinit")[0]["mpinit"], optimizer)
    assert mpinit.loss_scale(optimizer) == 1024.0


def test_several_scalers_are_several_losses_in_their_order() -> None:
    other = TORCH | {"scale": 64.0}
    result, changes = converted({"model": MODEL, "scaler_g": TORCH, "scaler_d": other}, "mpinit")
    assert [state["loss_scale"] for state in result["mpinit"].values()] == [1024.0, 64.0]
    assert "loss scale 64 found at ['scaler_d'], as loss_scaler1" in changes
    assert converted({"model": MODEL, "scaler_g": TORCH, "scaler_d": other}, "torch", 1)[0]["scaler"]["scale"] == 64.0


def test_key_of_torch_goes_before_what_else_looks_like_a_scaler() -> None:
    checkpoint = {"model": MODEL, "scaler": TORCH, "teacher": {"scaler": TORCH | {"scale": 2.0}}}
    result, changes = converted(checkpoint, "mpinit")
    assert result["mpinit"]["loss_scaler0"]["loss_scale"] == 1024.0
    assert "scaler" not in result
    assert not any("found at" in line for line in changes)


@pytest.mark.parametrize(
    "state", [TORCH | {"scale": float("inf")}, {"cur_scale": -1.0}, {"loss_scaler0": {"loss_scale": 0, "unskipped": 1}}]
)
def test_scale_that_is_none_is_refused_with_its_place(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\['a'\]\['b'\]: loss_scaler0 has loss_scale"):
        converted({"model": MODEL, "a": {"b": state}}, "mpinit")


def test_missing_scale_is_reported() -> None:
    states = {"model": MODEL, "optimizer": OPTIMIZER, "config": {"scale": 2, "loss_scaler": {"kind": "none"}}}
    assert any("no loss scale found, under any key" in line for line in converted(states, "mpinit")[1])
