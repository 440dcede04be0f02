"""Checkpoints loaded at another level or dtype, from other people's files, and ones that do not fit."""

import copy
import warnings
from typing import Any

import loops
import pytest
import torch
from torch import nn

import mpinit


@pytest.mark.parametrize("load_first", [False, True])
def test_checkpoint_goes_from_level_to_level_to_the_bit(load_first: bool) -> None:
    model, optimizer = loops.started("O2", make=loops.adam)
    loops.train(model, optimizer, loops.batches(3))
    reference = loops.mlp()
    plain = loops.adam(reference.parameters())
    loops.load(copy.deepcopy(loops.save(model, optimizer)), reference, plain)
    for level, dtype in (("O1", torch.float16), ("O2", torch.bfloat16), ("O0", torch.float16), ("O2", torch.float16)):
        checkpoint = copy.deepcopy(loops.save(model, optimizer))
        model = loops.mlp(seed=4)
        optimizer = loops.adam(model.parameters())
        if load_first:
            loops.load(checkpoint, model, optimizer)
        mpinit.initialize(model, optimizer, **loops.keywords(level, dtype))
        if not load_first:
            loops.load(checkpoint, model, optimizer)
        loops.same(loops.masters(optimizer), reference.parameters())
        loops.same(loops.states(optimizer), loops.states(plain))
        loops.same(model.state_dict().values(), checkpoint["model"].values())
    loops.train(model, optimizer, loops.batches(1))
    loops.follow(model, optimizer)


def test_o3_checkpoint_keeps_16_bit_values() -> None:
    model, optimizer = loops.started()
    loops.train(model, optimizer, loops.batches(3))
    checkpoint = copy.deepcopy(model.state_dict())
    target, _ = loops.started("O3")
    target.load_state_dict(checkpoint)
    loops.same(target.parameters(), [value.half() for value in checkpoint.values()])


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_plain_torch_checkpoint_resumes(level: str) -> None:
    reference, data = loops.mlp(), loops.batches(6)
    plain = loops.momentum(reference.parameters())
    loops.train_plainly(reference, plain, data[:3])
    checkpoint = copy.deepcopy({"model": reference.state_dict(), "optimizer": plain.state_dict()})
    model = loops.mlp(seed=4)
    optimizer = loops.start(model, level)
    loops.load(checkpoint, model, optimizer)
    loops.same(loops.masters(optimizer), checkpoint["model"].values())
    loops.train(model, optimizer, data[3:])
    loops.train_plainly(reference, plain, data[3:])
    expected = [parameter.detach() for parameter in reference.parameters()]
    torch.testing.assert_close(loops.masters(optimizer), expected, rtol=0.02, atol=0.01)


def test_states_of_other_scalers_load() -> None:
    ours = {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 7}}
    for state in (ours, torch.amp.GradScaler("cpu", init_scale=128.0).state_dict() | {"_growth_tracker": 7}):
        _, optimizer = loops.started()
        mpinit.load_state_dict(state, optimizer)
        assert mpinit.loss_scale(optimizer) == 128.0
        assert mpinit.state_dict(optimizer) == ours


def test_16_bit_checkpoint_rebuilds_masters_with_one_warning() -> None:
    source = loops.mlp(seed=4).half()
    checkpoint = source.state_dict()
    model = nn.Sequential(loops.mlp(), nn.Linear(3, 3))
    optimizer = loops.start(model)
    with pytest.warns(UserWarning, match=r"4 weights.*0\.weight, .*masters were rebuilt") as caught:
        model[0].load_state_dict(checkpoint)
    assert len(caught) == 1 and caught[0].filename == __file__
    loops.same(loops.masters(optimizer)[:4], [value.float() for value in checkpoint.values()])
    loops.same([p.detach() for p in model[0].parameters()], checkpoint.values())
    with pytest.warns(UserWarning, match=r"0\.0\.weight, 0\.0\.bias, 0\.3\.weight first") as caught:
        model.load_state_dict({name: value.half() for name, value in model.state_dict().items()})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(model.state_dict())


def test_16_bit_values_without_masters_need_no_warning() -> None:
    for level in ("O0", "O1", "O3"):
        model, _ = loops.started(level)
        given = loops.mlp(seed=4).half().state_dict()
        model.load_state_dict(given)
        loops.same(model.state_dict().values(), [value.float() for value in given.values()])


def saved_at(level: str) -> dict[str, Any]:
    model, optimizer = loops.started(level, num_losses=2)
    loops.train(model, optimizer, loops.batches(2))
    return mpinit.state_dict(optimizer)


@pytest.mark.parametrize("source", ["O0", "O5", "O3"])
def test_dynamic_scale_ignores_the_scale_of_an_unscaled_run(source: str) -> None:
    state = saved_at(source)
    model, optimizer = loops.started("O2", num_losses=2, loss_scale=mpinit.DynamicLossScale(init=4096.0))
    with pytest.warns(UserWarning, match="where losses were not scaled.* stays 4096") as caught:
        mpinit.load_state_dict(state, optimizer)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert mpinit.loss_scale(optimizer) == 4096.0
    loops.train(model, optimizer, loops.batches(1))
    assert mpinit.step_counts(optimizer) == (1, 0)


def test_resume_keeps_unscaled_runs_unscaled_and_restores_scales() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unscaled = loops.start(loops.mlp(), "O5", num_losses=2)
        mpinit.load_state_dict(saved_at("O0"), unscaled)
        mpinit.load_state_dict(saved_at("O2"), unscaled)
        assert mpinit.loss_scale(unscaled) == 1.0
        dynamic = loops.start(loops.mlp(), "O2", loss_scale=mpinit.DynamicLossScale(init=4096.0))
        fallen = {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}  # a dynamic scale, as far down as it may go
        mpinit.load_state_dict(fallen, dynamic)
        assert mpinit.state_dict(dynamic) == fallen
        mpinit.load_state_dict(mpinit.state_dict(loops.start(loops.mlp(), "O2", loss_scale=128.0)), dynamic)
        assert mpinit.loss_scale(dynamic) == 128.0


@pytest.mark.parametrize("mode", [True, "split"])
def test_strict_false_is_honoured(mode: Any) -> None:
    (model, _), other = loops.started("O2", torch.bfloat16, master_weights=mode), loops.mlp(seed=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state: dict[str, Any] = {"0.weight": other[0].weight.detach(), "stranger": torch.ones(1)}
    result = model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["stranger"] and "0.bias" in result.missing_keys
    loops.same(model.state_dict().values(), [state["0.weight"], *list(before.values())[1:]])
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key"):
        model.load_state_dict(state)


SCALER = {"loss_scale": 8.0, "unskipped": 1}


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ({}, ["loss_scaler0 is missing", "loss_scaler1 is missing", "num_losses=2"]),
        ({"loss_scaler0": SCALER}, ["loss_scaler1 is missing"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": SCALER, "loss_scaler2": SCALER}, ["'loss_scaler2' is not known"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": {"loss_scale": 8.0}}, ["loss_scaler1 has no 'unskipped'"]),
        ({"loss_scaler0": {"loss_scale": float("inf"), "unskipped": 0}, "loss_scaler1": SCALER}, ["loss_scale=inf"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": {"loss_scale": 8.0, "unskipped": -1}}, ["unskipped=-1"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": SCALER | {"scales": 1}}, ["scales=1, not True or False"]),
        ({"loss_scaler0": SCALER, "loss_scaler1": 8.0}, ["loss_scaler1 is 8.0, not a mapping"]),
        (torch.amp.GradScaler("cpu").state_dict(), ["loss_scaler1 is missing"]),
    ],
)
def test_a_state_that_does_not_fit_says_why_and_changes_nothing(state: dict[str, Any], parts: list[str]) -> None:
    _, optimizer = loops.started(num_losses=2)
    before = mpinit.state_dict(optimizer)
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        mpinit.load_state_dict(state, optimizer)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert mpinit.state_dict(optimizer) == before
