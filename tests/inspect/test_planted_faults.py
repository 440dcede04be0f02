"""A hundred planted faults are named, planted overflows are mended, and nothing is found in healthy models."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from models import CASES
from planted_faults import KINDS, Planted, planted

import mpinit

EXPECTED = {"overflow": "forward", "data": "data"}


def adam(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def name_it(fault: Planted) -> tuple[str | None, str | None]:
    """What the tools say: kind and place."""
    model, optimizer = fault.model, adam(fault.model)
    if fault.kind == "frozen":
        return "frozen", frozen_in(fault)
    words = {"loss_scale": 1.0} if fault.kind == "underflow" else {}
    found = mpinit.suggest(model, optimizer, fault.step, levels=("O2",), **words).finding
    return (None, None) if found is None else (found.kind, found.where)


def frozen_in(fault: Planted) -> str:
    """The parameters that stay where they are in plain bfloat16: foreseen without a step, and then measured."""
    model, optimizer = fault.model, adam(fault.model)
    mpinit.initialize(model, optimizer, "O3", cast_model_type="bf16", verbosity=0)
    foreseen = mpinit.audit(model, optimizer)
    assert "master_weights=True" in foreseen.advice
    mpinit.stalled(optimizer, start=True)
    for _ in range(3):
        optimizer.zero_grad()
        with mpinit.scale_loss(fault.step(model, optimizer), optimizer) as loss:
            loss.backward()
        optimizer.step()
    result = mpinit.stalled(optimizer)
    mpinit.undo(model)
    assert result is not None
    frozen = sorted(name for name, share in result.items() if share >= 0.9)
    assert all(foreseen.stuck[name] == 1.0 for name in frozen)
    return ",".join(frozen)


def is_named(fault: Planted, kind: str | None, where: str | None) -> bool:
    if fault.kind == "underflow":  # a parameter of the last module that the gradient should have come to
        return kind == "underflow" and where is not None and where.startswith(fault.where + ".")
    return kind == EXPECTED.get(fault.kind, fault.kind) and where == fault.where


def test_of_a_hundred_planted_faults_95_are_named_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    misses = []
    for fault in planted(100):
        kind, where = name_it(fault)
        if not is_named(fault, kind, where):
            misses.append(f"{fault}: expected {fault.where}, found {kind} in {where}")
    with capsys.disabled():
        print(f"\n{100 - len(misses)} of 100 planted faults named exactly; misses: {misses or 'none'}")
    assert len(misses) <= 5, misses


def test_every_kind_is_planted_in_every_network() -> None:
    counted = Counter((fault.kind, fault.network) for fault in planted(100))
    assert len(counted) == len(KINDS) * len(CASES)


@pytest.mark.parametrize("fault", list(planted(20, ("overflow",), seed=2)), ids=str)
def test_planted_overflows_are_mended_in_at_most_three_runs(fault: Planted) -> None:
    model = fault.model
    optimizer = adam(model)
    found = mpinit.suggest(model, optimizer, fault.step, levels=("O2",))
    assert found.level == "O2" and len(found.keep_fp32) == 1 and len(found.runs) <= 3, str(found)
    assert found.keep_fp32[0] == fault.where or fault.where.startswith(found.keep_fp32[0] + "."), str(found)
    reference = fault.step(model, None).item()
    mpinit.initialize(model, optimizer, "O2", **found.keywords, init_loss_scale=256.0, verbosity=0)
    loss = fault.step(model, None)
    with mpinit.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not mpinit.step_was_skipped(optimizer)
    assert loss.item() == pytest.approx(reference, rel=0.1, abs=0.02)


@pytest.mark.parametrize("network", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_is_found_in_healthy_models(network: str, seed: int) -> None:
    case = CASES[network]
    model, batch = case.build(seed), case.batches(seed + 1)[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mpinit.suggest(model, adam(model), lambda m, o: case.loss(m(batch[0]), batch[1]))
    assert (found.level, found.keep_fp32, found.findings) == ("O2", [], ()), str(found)
    assert len(found.runs) == 2
