"""The invariants that other libraries test of split masters and low-bit optimizer states.

They are those of TransformerEngine's remainders (``store_param_remainders``), of error correction in flashoptim
(``test_ecc_invariants.py``) and HeavyBall (``test_ecc_cpu.py``), and of torchao's low-bit optimizers.

Below the public face: the codecs are tried on the numbers of those tests.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

import mpinit
from mpinit.masters.codecs.bfloat16 import BFloat16
from mpinit.masters.codecs.encoded import EncodedState
from mpinit.masters.codecs.minifloat import Minifloat

# All numbers of one exponent.
MANTISSAS = torch.arange(1 << 23, dtype=torch.int32)


def split_of(values: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with split masters that was set to some numbers, and these as they are read back."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(values))
    optimizer = AdamW(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    with mpinit.float32_weights(model), torch.no_grad():
        model.weight.copy_(values)
    return model, model.state_dict()["weight"]


def floats(exponent: int, mantissas: torch.Tensor, negative: bool) -> torch.Tensor:
    """Return float32 numbers by their exponent (-127: of denormal ones) and mantissas."""
    bits = mantissas + ((exponent + 127) << 23)
    return (bits | (-(1 << 31) if negative else 0)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("negative", [False, True])
def test_every_mantissa_comes_back(negative: bool) -> None:
    """Error correction by 16 bits leaves up to 32 of these off there; a remainder leaves none."""
    values = floats(0, MANTISSAS, negative)
    model, found = split_of(values)
    assert torch.equal(found, values)
    # Never worse than the cast, and exact where the cast is.
    error, of_cast = (found - values).abs(), (values.bfloat16().float() - values).abs()
    assert bool((error <= of_cast).all())
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == 2 * values.numel()


@pytest.mark.parametrize("negative", [False, True])
def test_every_exponent_comes_back(negative: bool) -> None:
    """Check denormal numbers too, for which error correction is wrong thousands of times: those below 4.6e-41 are 0."""
    some = MANTISSAS[:: (1 << 12) + 1]
    values = torch.cat([floats(exponent, some, negative) for exponent in range(-127, 128)])
    values = values[values.bfloat16().isfinite()]
    expected = torch.where(values.bfloat16() == 0, values * 0, values)
    assert torch.equal(split_of(values)[1].view(torch.int32), expected.view(torch.int32))


def test_small_updates_do_not_drift() -> None:
    """Apply a small update 100 times, and compare with float32, bit for bit."""
    chance = torch.Generator().manual_seed(42)
    values = torch.randn(1024, generator=chance)
    model, _ = split_of(values)
    for _ in range(100):
        noise = 1e-4 * torch.randn(1024, generator=chance)
        values = values + noise
        with mpinit.float32_weights(model), torch.no_grad():
            model.weight.add_(noise)
    assert torch.equal(model.state_dict()["weight"], values)


@pytest.mark.parametrize("kind", [True, "split"])
def test_masters_are_float32s_adam_and_weights_their_roundings(kind: Any) -> None:
    """Step bfloat16 weights as TransformerEngine's test does, with gradients of their own type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).bfloat16()
    reference = copy.deepcopy(model).float()
    options: dict[str, Any] = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer, by_hand = Adam(model.parameters(), **options), Adam(reference.parameters(), **options)
    mpinit.initialize(model, optimizer, "O5", master_weights=kind)
    for _ in range(50):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            gradient = torch.randn(ours.shape).bfloat16()
            ours.grad = gradient.to(torch.float32 if kind is True else torch.bfloat16)
            theirs.grad = gradient.float()
        optimizer.step()
        by_hand.step()
    for key, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key])
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if kind is True:
            assert torch.equal(ours.detach(), theirs.detach().bfloat16())
        else:  # half away from zero
            bits = (theirs.detach().view(torch.int32) + 0x8000) >> 16
            assert torch.equal(ours.detach().view(torch.int16).to(torch.int32), bits)


@pytest.mark.parametrize(("codec", "least"), [(Minifloat(), 0.999), (BFloat16(), 0.99999)], ids=["int8", "bfloat16"])
@pytest.mark.parametrize("moment", ["first", "second"])
def test_codes_point_where_the_moments_do(codec: Any, least: float, moment: str) -> None:
    """Compare directions: flashoptim requires a cosine of 0.9999; int8 has 0.9994."""
    torch.manual_seed(0)
    values = torch.randn(1 << 16) * torch.rand(1 << 16)
    values = values if moment == "first" else values.square()
    found = EncodedState.of(values, codec).float()
    assert float(torch.cosine_similarity(found, values, 0)) > least


@pytest.mark.parametrize("state", ["int8", "bfloat16"])
def test_training_with_low_bit_states_resumes(state: Any) -> None:
    """Save in the middle and go on in new objects: the loss goes on falling from where it was."""
    torch.manual_seed(0)
    data, target = torch.randn(32, 128), torch.randn(32, 64)

    def started() -> tuple[nn.Module, AdamW]:
        model = nn.Linear(128, 64)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        mpinit.initialize(model, optimizer, "O5", optimizer_state=state)
        return model, optimizer

    def train(model: nn.Module, optimizer: AdamW, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(data) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = started()
    first = train(model, optimizer, 50)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, its = started()
    again.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    second = train(again, its, 50)
    assert second[0] < first[-1] and second[-1] < 0.5 * first[0]
    assert max(abs(a - b) / b for a, b in zip(second, train(model, optimizer, 50), strict=True)) < 0.05
