"""Nothing non-finite gets in where the loss scale does not move, and nothing else is different."""

import copy
import functools
from typing import Any

import pytest
import torch
from loops import backward, batches, masters, mlp, mse, poison, same, started
from models import LEVELS
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import mpinit

WAYS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O2, static": {"opt_level": "O2", "loss_scale": 128.0},
    "O3": {"opt_level": "O3", "cast_model_type": "bf16"},
    "model": {"opt_level": "O5", "master_weights": "model"},
    **{level: LEVELS[level] for level in ("O4", "O5", "split", "int8")},
}


def pair(way: dict[str, Any], fused: bool = False, **more: Any) -> tuple[nn.Module, Optimizer]:
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    mpinit.initialize(model, optimizer, **{"skip_nonfinite": True} | way | more)
    return model, optimizer


def one(model: nn.Module, optimizer: Optimizer, batch: Any, scales: bool, bad: str = "") -> None:
    optimizer.zero_grad()
    loss = mse(model, batch)
    if bad:
        loss = loss * float("nan") if bad == "nan in all" else poison(loss, next(model.parameters()))
    backward(loss, optimizer) if scales else loss.backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    states = [v for p in model.parameters() for v in optimizer.state[p].values() if torch.is_tensor(v)]
    return [t.detach().clone() for t in (*model.parameters(), *masters(optimizer), *states)]


@pytest.mark.parametrize("bad", ["inf in one gradient", "nan in all"])
@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_bad_batch_changes_nothing(way: str, fused: bool, scales: bool, bad: str) -> None:
    if "loss_scale" in WAYS[way] and not scales:
        pytest.skip("a plain backward pass with a static scale is warned of")
    data, ends = batches(5), []

    for has_bad in (False, True):
        model, optimizer = pair(WAYS[way], fused)
        scheduler = StepLR(optimizer, 1, gamma=0.9)
        for number, batch in enumerate(data):
            if has_bad and number == 2:
                before = everything(model, optimizer)
                one(model, optimizer, batch, scales, bad)
                assert mpinit.step_was_skipped(optimizer)
                mpinit.scheduler_step(scheduler)
                same(everything(model, optimizer), before)
            one(model, optimizer, batch, scales)
            mpinit.scheduler_step(scheduler)
        assert mpinit.step_counts(optimizer) == (5, has_bad)
        ends.append([*everything(model, optimizer), torch.tensor(scheduler.get_last_lr())])
        mpinit.undo(model)
    if way != "int8":  # which is rounded at random
        same(ends[0], ends[1])


@pytest.mark.parametrize("way", ["O2, static", "O4", "O5", "split", "model"])
def test_skip_nonfinite_changes_no_finite_step(way: str) -> None:
    ends = []
    for skips in (True, False):
        model, optimizer = pair(WAYS[way], skip_nonfinite=skips)
        for batch in batches(6):
            one(model, optimizer, batch, scales=True)
        ends.append(everything(model, optimizer))
        mpinit.undo(model)
    same(ends[0], ends[1])


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_a_fixed_scale_skips_nothing_by_default(level: str) -> None:
    model, optimizer = pair({"opt_level": level, "skip_nonfinite": None})
    one(model, optimizer, batches(1)[0], False, "nan in all")
    assert mpinit.step_counts(optimizer) == (1, 0)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())


def test_gradients_clipped_or_written_count_as_they_are_at_step() -> None:
    model, optimizer = pair(WAYS["O5"])
    mse(model, batches(1)[0]).backward()
    model[0].weight.grad[0, 0] = float("nan")
    mpinit.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    for p in model.parameters():
        p.grad.nan_to_num_()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 1)


def test_third_skip_in_a_row_is_warned_of_too_many_are_an_error() -> None:
    model, optimizer = pair(WAYS["O5"])
    step = functools.partial(one, model, optimizer, batches(1)[0], False)
    for bad in ("one", "one", "", "one", "one"):
        step(bad)
    with pytest.warns(UserWarning, match=r"3 steps in a row were skipped.*'0'.*skip_nonfinite=False"):
        step("one")
    assert mpinit.overflow_report(optimizer).parameters == ("0.weight",)
    for _ in range(60):
        step("one")
    with pytest.raises(RuntimeError, match=r"64 steps in a row were skipped.*in 0\.weight: "):
        step("one")


def test_an_optimizer_that_evaluates_the_loss_itself_is_put_back() -> None:
    model, optimizer = started("O5", make=lambda p: LBFGS(p, lr=0.1, max_iter=3), skip_nonfinite=True)
    batch, calls = batches(1)[0], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(1)
        loss = mse(model, batch)
        loss = loss * float("inf") if len(calls) == 5 else loss
        loss.backward()
        return loss

    optimizer.step(closure)
    before, state = masters(optimizer), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step(closure)
    assert mpinit.step_counts(optimizer) == (1, 1)
    same(masters(optimizer), before)
    assert optimizer.state_dict()["state"].keys() == state.keys()
