"""The Lightning plug in Fabric, beside the same loop written with mpinit alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import same_bits
from lightning.fabric import Fabric
from lightning_runs import LARGE, MARKS, clip_norm
from loops import Batch, batches, mlp
from torch.nn.functional import mse_loss

import mpinit
from mpinit.integrations.lightning import MixedPrecision

pytestmark = MARKS


def fabric_of(**precision: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision(verbosity=0, **precision)])


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    model = mlp(batchnorm=True)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    mpinit.add_optimizers(optimizer)
    return model, optimizer


def loop(fabric: Fabric, model: Any, optimizer: Any, data: list[Batch]) -> None:
    for number, (x, y) in enumerate(data):
        if number % 2 == 0:
            optimizer.zero_grad()
        fabric.backward(mse_loss(model(x), y))
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()


def test_fabric_has_the_bits_of_a_loop_by_hand(level: dict[str, Any]) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision(**level)])
    model, optimizer = set_up(fabric)
    data = batches(8)
    loop(fabric, model, optimizer, data)
    other = mlp(batchnorm=True)
    bare = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
    mpinit.initialize(other, bare, **level)
    for number, (x, y) in enumerate(data):
        if number % 2 == 0:
            bare.zero_grad()
        with mpinit.scale_loss(mse_loss(other(x), y), bare) as scaled_loss:
            scaled_loss.backward()
        if number % 2:
            clip_norm(bare)
            bare.step()
    assert same_bits(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("precision", [{"opt_level": "O5"}, LARGE], ids=["O5", "overflowing"])
def test_fabric_resumes_to_the_bit(precision: dict[str, Any], tmp_path: Path) -> None:
    data = batches(24)
    whole = fabric_of(**precision)
    model, optimizer = set_up(whole)
    loop(whole, model, optimizer, data)
    half = fabric_of(**precision)
    first, first_optimizer = set_up(half)
    loop(half, first, first_optimizer, data[:12])
    state = {"model": first, "optimizer": first_optimizer, "precision": half.strategy.precision}
    half.save(tmp_path / "half.ckpt", state)
    rest = fabric_of(**precision)
    second, second_optimizer = set_up(rest)
    state = {"model": second, "optimizer": second_optimizer, "precision": rest.strategy.precision}
    rest.load(tmp_path / "half.ckpt", state)
    loop(rest, second, second_optimizer, data[12:])
    assert same_bits(second.state_dict(), model.state_dict())
    assert rest.strategy.precision.state_dict() == whole.strategy.precision.state_dict()


def test_fabric_refuses_an_optimizer_that_was_not_added() -> None:
    for name in ("O2", "O5"):
        fabric = fabric_of(opt_level=name)
        model = mlp()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(4, 6)).sum())
        with pytest.raises(RuntimeError, match=r"mpinit\.add_optimizers"):
            optimizer.step()


def test_a_loss_of_two_sessions_is_refused_where_it_is_scaled() -> None:
    fabric = fabric_of(opt_level="O2")
    (first, _), (second, _) = set_up(fabric), set_up(fabric)
    with pytest.raises(ValueError, match="one initialize call"):
        fabric.backward(first(torch.ones(4, 6)).sum() + second(torch.ones(4, 6)).sum())


def test_several_sessions_are_no_trouble_where_nothing_is_scaled() -> None:
    fabric, plain = fabric_of(opt_level="O5"), [mlp(batchnorm=True), mlp(batchnorm=True)]
    (first, one), (second, other), x = set_up(fabric), set_up(fabric), batches(1)[0][0]
    bare = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3) for model in plain]
    mpinit.initialize(plain, bare, opt_level="O5", verbosity=0)
    for _ in range(3):
        fabric.backward((first(x) * second(x)).mean())
        (plain[0](x) * plain[1](x)).mean().backward()
        for optimizer in (one, other, *bare):
            optimizer.step()
            optimizer.zero_grad()
    assert same_bits(first.state_dict(), plain[0].state_dict())
    assert same_bits(second.state_dict(), plain[1].state_dict())


def test_fabric_takes_what_the_caller_initialised() -> None:
    models = [mlp(0), mlp(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    mpinit.initialize(models, optimizers, opt_level="O2", verbosity=0)
    fabric = fabric_of()
    (first, one), (second, other) = (fabric.setup(*both) for both in zip(models, optimizers, strict=True))
    before = [p.clone() for model in models for p in model.parameters()]
    fabric.backward(first(torch.ones(4, 6)).mean() + second(torch.ones(4, 6)).mean())
    one.step()
    other.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, (p for m in models for p in m.parameters()), strict=True))
