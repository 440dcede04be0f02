"""Gradients of many backward passes with split masters: sums over blocks are float32's, and all by ``grad_dtype``.

Below the public face: the masters show when their gradients become float32.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import batches, bytes_held, mlp, mse, same
from session_device import device
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import mpinit
from mpinit import registry
from mpinit.masters.split import SplitMasters

pytestmark = pytest.mark.device

COUNT = 700


def split(make: Callable[[Any], Optimizer] | None = None, **more: Any) -> tuple[nn.Sequential, Optimizer]:
    model = mlp()
    optimizer = (make or (lambda p: SGD(p, lr=1e-3)))(model.parameters())
    mpinit.initialize(model, optimizer, opt_level="O5", master_weights="split", **more)
    return model, optimizer


def scaled(model: nn.Module, optimizer: Optimizer, batch: Any, **more: Any) -> None:
    with mpinit.scale_loss(mse(model, batch), optimizer, **more) as scaled_loss:
        scaled_loss.backward()


WAYS: dict[str, Callable[[nn.Module, Optimizer, Any], None]] = {
    "scale_loss": scaled,
    "delay_unscale": lambda model, optimizer, batch: scaled(model, optimizer, batch, delay_unscale=True),
}
KINDS: dict[str, dict[str, Any]] = {
    "by default": {},
    "asked": {"grad_dtype": torch.float32},
    "dynamic": {"loss_scale": mpinit.DynamicLossScale(init=1024.0)},
}


def single(batch: Any, **more: Any) -> list[torch.Tensor]:
    """The bfloat16 gradients of one backward pass, in float64."""
    model, optimizer = split(**more)
    scaled(model, optimizer, batch)
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def error(model: nn.Module, expected: list[torch.Tensor]) -> float:
    found = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:optimizer.step.. uses gradients that did not come through")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_sum_of_many_equal_passes(way: str, kind: str) -> None:
    """Compare the sum with float32's: in bfloat16 half of it was missing."""
    batch = batches(1)[0]
    model, optimizer = split(**KINDS[kind])
    for _ in range(COUNT):
        WAYS[way](model, optimizer, batch)
    assert error(model, [COUNT * g for g in single(batch, **KINDS[kind])]) < 1e-4
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


class Biases(nn.Module):
    """Layers of which a pass uses only the biases: of all of them, or of the last layer after the first."""

    def __init__(self, in_turns: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(8)])
        self.in_turns, self.calls = in_turns, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = [layer.bias for layer in self.layers]
        used = [used[-1 if self.calls >= 400 else 0]] if self.in_turns else used
        self.calls += 1
        return x + torch.stack(used).sum(0)


@pytest.mark.parametrize("which", ["frozen", "unused", "in turns"])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_sum_of_equal_passes_in_which_few_weights_have_gradients(which: str, has_stepped: bool) -> None:
    model = Biases(which == "in turns").to(device())
    optimizer = SGD(model.parameters(), lr=0.0)
    mpinit.initialize(model, optimizer, opt_level="O5", master_weights="split")
    for layer in model.layers if which == "frozen" else ():
        layer.weight.requires_grad_(False)
    if has_stepped:
        model(torch.ones(1, 2, device=device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.calls = 0
    for _ in range(800):
        loss = model(torch.ones(1, 2, device=device())).sum() * 1.001
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.full((2,), 400.0 if which == "in turns" else 800.0, device=device())
    assert len(found) == (2 if which == "in turns" else 8)
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=0.005, atol=0)


def test_sum_of_random_passes_in_several_cycles() -> None:
    """Clear gradients in place and by None, and step, between cycles of 64 passes."""
    for set_to_none in (True, False):
        model, optimizer = split()
        for cycle in range(3):
            data = batches(64, seed=cycle)
            expected: list[torch.Tensor] | None = None
            for batch in data:
                twin, by_itself = split()
                twin.load_state_dict(model.state_dict())
                scaled(twin, by_itself, batch)
                one = [p.grad.double() for p in twin.parameters() if p.grad is not None]
                expected = one if expected is None else [a + b for a, b in zip(expected, one, strict=True)]
                mpinit.undo(twin)
            for batch in data:
                scaled(model, optimizer, batch)
            assert expected is not None
            # Of the second pass, where gradients were cleared in place, the sum is rounded to bfloat16 once.
            assert error(model, expected) < (1e-4 if set_to_none or cycle == 0 else 4e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=0.01)])
@pytest.mark.parametrize("clips", [False, True])
def test_step_uses_the_float32_sum(make: Any, clips: bool) -> None:
    model, optimizer = split(make)
    reference = mlp()
    reference.load_state_dict(model.state_dict())
    by_hand = make(reference.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for batch in batches(8):
            scaled(model, optimizer, batch)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        if clips:
            mpinit.clip_grad_norm_(optimizer, 0.5)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        by_hand.step()
        same(model.state_dict().values(), reference.state_dict().values())


def test_asked_for_plain_passes_add_up_in_float32() -> None:
    batch = batches(1)[0]
    model, optimizer = split(grad_dtype=torch.float32)
    for _ in range(COUNT):
        mse(model, batch).backward()
    assert error(model, [COUNT * g for g in single(batch)]) < 1e-4
    optimizer.step()


def test_one_pass_a_step_keeps_bfloat16() -> None:
    """Leave the memory of gradients as it was: also after a skipped step, in evaluations, and cleared in place."""
    for set_to_none in (True, False):
        # By default nothing waits for a device to know that gradients are nan.
        model, optimizer = split(skip_nonfinite=True)
        for number, batch in enumerate(batches(6)):
            loss = mse(model, batch)
            optimizer.zero_grad(set_to_none)
            (loss * float("nan") if number == 2 else loss).backward()
            optimizer.step()
            with torch.no_grad():
                mse(model, batch)
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
        assert mpinit.step_counts(optimizer) == (5, 1)


def test_grad_dtype_float32_adds_uses_and_passes_in_float32() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, device=device()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum() + (self.weight / 512).sum()

    model = Twice()
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", grad_dtype="float32")
    model(torch.ones(1, device=device())).backward()
    assert model.weight.grad is not None and model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 1 + 1 / 512
    optimizer.step()
    mpinit.undo(model)
    assert model.weight.grad is not None and model.weight.grad.dtype is torch.float32


def test_gradients_in_a_buffer_of_the_users_stay_there() -> None:
    model, optimizer = split()
    weight = model[0].weight
    buffer = torch.zeros(weight.numel(), dtype=torch.bfloat16, device=weight.device)
    weight.grad = buffer.view_as(weight)
    for _ in range(2):
        scaled(model, optimizer, batches(1)[0])
    assert torch.equal(weight.grad, buffer.view_as(weight)) and bool(buffer.any())
    assert weight.grad.data_ptr() == buffer.data_ptr()


def test_what_cannot_be_is_refused() -> None:
    for asked, match in (
        ({"opt_level": "O3", "grad_dtype": "float32"}, "contradicts master_weights=False"),
        ({"opt_level": "O5", "grad_dtype": "float16"}, "is neither torch.float32 nor None"),
    ):
        model = mlp()
        with pytest.raises(ValueError, match=match):
            mpinit.initialize(model, SGD(model.parameters(), lr=0.1), **asked)  # type: ignore[arg-type]
        assert model[0].weight.dtype is torch.float32


def test_undo_frees_the_memory_of_steps() -> None:
    """Also where a scheduler keeps the patched method of the optimizer."""
    model, optimizer = split()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mse(model, batches(1)[0]).backward()
    optimizer.step()
    session = registry.of(model)
    assert session is not None and isinstance(session.masters, SplitMasters)
    (buffer,) = [weakref.ref(each) for each in session.masters.buffers.values()]
    assert buffer() is not None
    mpinit.undo(model)
    gc.collect()
    assert buffer() is None and scheduler.optimizer is optimizer and session.masters is not None


@pytest.mark.parametrize(("width", "kept"), [(64, 8), (1400, 8), (1500, 0)])
def test_bytes_a_number_that_a_step_keeps_until_undo(width: int, kept: int) -> None:
    """Keep a buffer of float32 masters and gradients, 8 bytes a number, if it has at most 16 MiB; undo frees it."""
    gc.collect()
    before, numbers = bytes_held(), width * width
    model = nn.Linear(width, width, bias=False, device=device())
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    found = []
    for _ in range(2):
        with mpinit.scale_loss(model(torch.ones(1, width, device=device())).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del scaled_loss
        found.append((bytes_held() - before) / numbers)
    mpinit.undo(model)
    gc.collect()
    found.append((bytes_held() - before) / numbers)
    weight, remainder, float32 = 2, 2, 4
    expected = [weight + remainder + kept, weight + remainder + kept, float32]
    assert found == pytest.approx(expected, abs=2_000 / numbers), "up to 2,000 bytes are scalars"
