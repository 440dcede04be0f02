"""Reports change nothing in a training, and find planted faults.

Below the public face: the registry shows that no session is left.
"""

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from loops import backward, batches, iterate, mlp, mse, start
from models import CASES, Parts
from planted_faults import Planted, planted
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import mpinit
from mpinit import registry

LEVELS = [None, "O0", "O1", "O2", "O3"]


def net() -> Parts:
    """With dropout, running statistics and a buffer."""
    body = mlp(dropout=0.3, batchnorm=True)
    mask = nn.Buffer(torch.tensor(-1e4))
    return Parts(lambda self, x: self.body(x) + (self.mask * 0).to(x.dtype), body=body, mask=mask)


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that could have been changed, in copies, with the identity of what must stay the same object."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    entries = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "tensors": {name: (id(t), t.dtype, t.detach().clone()) for name, t in tensors.items()},
        "gradients": [
            (id(p.grad), None if p.grad is None else p.grad.clone()) for p in [*model.parameters(), *entries]
        ],
        "masters": [(id(p), p.detach().clone()) for p in entries],
        "state": [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in entries],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "attributes": [sorted(vars(module)) for module in model.modules()] + [sorted(vars(optimizer))],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), m.training)
            for m in model.modules()
        ],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),
        "torch": (
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()),
            *(torch.nn.functional.linear, torch.Tensor.__add__, torch.is_autocast_cache_enabled()),
            *(_get_current_dispatch_mode(), len(registry.live())),
        ),
        "loss scale": mpinit.loss_scale(optimizer) if registry.of(optimizer) else None,
        "counts": mpinit.step_counts(optimizer) if registry.of(optimizer) else None,
        "log": logging.getLogger("mpinit").level,
    }


def same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), where
    elif isinstance(one, np.ndarray):
        assert (one == other).all(), where
    else:
        assert one == other, where


def build(level: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    if level is None:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mse(model, batches(1)[0]).backward()
        optimizer.step()
        return model, optimizer
    # In plain float16 Adam divides by an epsilon of 0.
    optimizer = start(model, level, make=None if level == "O3" else lambda p: torch.optim.Adam(p, lr=0.01))
    for batch in batches(2):
        iterate(mse(model, batch), optimizer)
    return model, optimizer


def whole_step(model: Any, optimizer: Any) -> torch.Tensor:
    """A step as a training loop has it."""
    loss = mse(model, batches(1)[0])
    iterate(loss, optimizer)
    return loss


@pytest.mark.parametrize("level", [*LEVELS, "O4", "O5"])
def test_audit_fidelity_and_explain_change_nothing(level: str | None) -> None:
    model, optimizer = build(level)
    model.body[2].eval()
    before, x = picture(model, optimizer), batches(1)[0][0]
    mpinit.audit(model, optimizer)
    mpinit.fidelity(model, x)
    mpinit.explain(model, x, loss=torch.sum)
    for tool in (mpinit.fidelity, mpinit.explain):
        with pytest.raises(RuntimeError):
            tool(model, torch.ones(2, 7))
    same(picture(model, optimizer), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_reports_change_nothing(level: str) -> None:
    model, optimizer = build(level)
    backward(mse(model, batches(1)[0]) * float("inf"), optimizer)
    if level in ("O1", "O2"):
        optimizer.step()
    before = picture(model, optimizer)
    mpinit.overflow_report(optimizer)
    same(picture(model, optimizer), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_watched_run_has_the_same_bits(level: str) -> None:
    """Training goes on to the same bits."""
    pictures = []
    for watched in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        model, optimizer = build(level)
        if watched:
            with mpinit.watch_overflow(model):
                whole_step(model, optimizer)
        else:
            whole_step(model, optimizer)
        taken = picture(model, optimizer)
        pictures.append(taken)
        mpinit.undo(model)
    plain, other = pictures
    for name in ("tensors", "gradients", "masters"):
        same(other[name], _without_ids(plain[name], other[name]), name)
    for name in ("state", "groups", "attributes", "hooks", "torch", "loss scale", "counts"):
        same(other[name], plain[name], name)
    same(other["random"][0], plain["random"][0], "random")


def _without_ids(plain: Any, other: Any) -> Any:
    """The plain run's tensors under the identities of the other's."""
    if isinstance(plain, dict):
        return {name: (other[name][0], *plain[name][1:]) for name in plain}
    return [(o[0], *p[1:]) for p, o in zip(plain, other, strict=True)]


EXPECTED = {"overflow": "forward", "forced": "forward"}


def adam(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


@pytest.mark.parametrize("fault", list(planted(60)), ids=str)
def test_watch_overflow_names_planted_faults(fault: Planted) -> None:
    model, optimizer = mpinit.initialize(
        fault.model, adam(fault.model), "O2", loss_scale=mpinit.DynamicLossScale(init=256.0)
    )
    with mpinit.watch_overflow(model) as watch:
        backward(fault.step(model), optimizer)
    assert watch.first is not None and watch.kind == EXPECTED.get(fault.kind, fault.kind), str(watch)
    where = watch.first.operation if fault.kind == "weights" else watch.first_module
    assert where == fault.where, str(watch)


@pytest.mark.parametrize("fault", list(planted(8, ("frozen",))), ids=str)
def test_audit_foresees_weights_that_do_not_move(fault: Planted) -> None:
    """Each norm and gain at 1.0 in plain bfloat16."""
    model, optimizer = fault.model, adam(fault.model)
    mpinit.initialize(model, optimizer, "O3", cast_model_type="bf16")
    foreseen = mpinit.audit(model, optimizer)
    assert "master_weights=True" in foreseen.advice
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    meant = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for _ in range(3):
        iterate(fault.step(model), optimizer)
        for name, parameter in model.named_parameters():
            meant[name] |= parameter.grad != 0
    stayed = {name: p == before[name] for name, p in model.named_parameters()}
    frozen = sorted(n for n in stayed if meant[n].any() and stayed[n][meant[n]].double().mean() >= 0.9)
    assert ",".join(frozen) == fault.where and all(foreseen.stuck[name] == 1.0 for name in frozen)


@pytest.mark.parametrize("network", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_is_found_in_healthy_models(network: str, seed: int) -> None:
    case = CASES[network]
    model, batch = case.build(seed), case.batches(seed + 1)[-1]
    model, optimizer = mpinit.initialize(model, adam(model), "O2", loss_scale=mpinit.DynamicLossScale(init=256.0))
    with mpinit.watch_overflow(model) as watch:
        backward(case.loss(model(batch[0]), batch[1]), optimizer)
    assert watch.first is None and "no overflow in this batch" in str(watch)
