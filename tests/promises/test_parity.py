"""Twenty steps of real training at every level, against plain torch and against loops written by hand."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import (
    CASES,
    DTYPES,
    OPTIMIZERS,
    Case,
    cast_by_hand,
    equal_tensors,
    level_arguments,
    sums_in_float32,
    train,
    train_plainly,
)
from torch import Tensor, nn

import mpinit

pytestmark = [
    pytest.mark.device,
    # On CUDA torch has this for nn.LSTM().bfloat16() too, because RNNBase.flatten_parameters excludes bfloat16.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]

STEPS = 20
NETWORKS = ("cnn", "lstm", "transformer")

# How far a loss may be from float32's at the same step: what rounding the weights and the arithmetic to 11 (float16)
# or 8 (bfloat16) bits does to losses that start at 2.3 (cnn) or 4.9 (text).
TOLERANCE = {"fp16": 0.02, "bf16": 0.15}

Trained = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def _same_kernels_each_time() -> Iterator[None]:
    # Not by assignment, which torch refuses once a module of its own tests was imported in this process.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


@functools.cache
def in_float32(network: str, optimizer: str) -> Trained:
    case = CASES[network]
    model = case.build()
    losses = train_plainly(model, OPTIMIZERS[optimizer](model.parameters()), case.batches(STEPS), case.loss)
    return losses, model.state_dict()


def with_mpinit(network: str, optimizer: str, level: str, dtype: torch.dtype, **more: Any) -> Trained:
    case = CASES[network]
    model = case.build()
    trainer = OPTIMIZERS[optimizer](model.parameters())
    mpinit.initialize(model, trainer, **level_arguments(level, dtype), **more)
    losses = train(model, trainer, case.batches(STEPS), case.loss)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(model)
    return losses, state


@sums_in_float32()
def by_hand(
    case: Case,
    make: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    masters: bool,
    grad_dtype: torch.dtype | None = None,
) -> Trained:
    """O2 (with masters) or O3 (without) the way one writes it without a library."""
    model = case.build()
    stand_ins = {name: p.detach().clone() for name, p in model.named_parameters()}
    cast_by_hand(model, dtype, keep_batchnorm=masters)
    if masters:
        pairs = [(p, nn.Parameter(stand_ins[name]) if p.dtype == dtype else p) for name, p in model.named_parameters()]
    else:
        pairs = [(p, p) for p in model.parameters()]
    for weight, _ in pairs:
        # A weight used several times (each of an LSTM's steps) adds its gradients up, in its own dtype by default.
        weight.grad_dtype = grad_dtype if masters else weight.dtype
    optimizer = make([master for _, master in pairs])
    scale = 2.0**16 if masters and dtype is torch.float16 else 1.0
    losses = []
    for x, y in case.batches(STEPS):
        model.zero_grad()
        x = x.to(dtype) if x.is_floating_point() else x
        loss = case.loss(model(x).float(), y)
        (loss * scale).backward()
        losses.append(loss.item())
        if masters and not finite(model):
            scale /= 2
            continue
        if masters:
            for weight, master in pairs:
                master.grad = weight.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for weight, master in pairs:
                weight.copy_(master)
    state = dict(model.state_dict()) | {
        name: master.detach() for (name, _), (_, master) in zip(model.named_parameters(), pairs, strict=True)
    }
    return losses, {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def finite(model: nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_o0_is_plain_torch_bit_for_bit(network: str, optimizer: str) -> None:
    losses, state = with_mpinit(network, optimizer, "O0", torch.float32)
    expected_losses, expected_state = in_float32(network, optimizer)
    assert losses == expected_losses
    assert equal_tensors(state, expected_state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("network", NETWORKS)
def test_o1_losses_are_those_of_float32_within_tolerance(network: str, dtype: str, optimizer: str) -> None:
    losses, state = with_mpinit(network, optimizer, "O1", DTYPES[dtype])
    expected, _ = in_float32(network, optimizer)
    assert losses == pytest.approx(expected, abs=TOLERANCE[dtype])
    assert losses != expected, "something did run in 16 bit"
    assert all(value.dtype is torch.float32 for value in state.values() if value.is_floating_point())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_with_and_without_masters_it_is_a_loop_by_hand(level: str, network: str, dtype: str, optimizer: str) -> None:
    # Without masters some of these diverge in float16, by hand as well, unless their steps are skipped.
    more = {"skip_nonfinite": False} if level == "O3" else {}
    losses, state = with_mpinit(network, optimizer, level, DTYPES[dtype], **more)
    expected_losses, expected_state = by_hand(CASES[network], OPTIMIZERS[optimizer], DTYPES[dtype], level == "O2")
    assert losses == pytest.approx(expected_losses, abs=0, nan_ok=True)
    assert all(torch.equal(value.nan_to_num(), expected_state[name].nan_to_num()) for name, value in state.items())
    if level == "O2":
        assert losses == pytest.approx(in_float32(network, optimizer)[0], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_gradients_asked_for_add_up_within_graph(dtype: str) -> None:
    losses, state = with_mpinit("lstm", "adam", "O2", DTYPES[dtype], grad_dtype=torch.float32)
    expected, masters = by_hand(CASES["lstm"], OPTIMIZERS["adam"], DTYPES[dtype], True, torch.float32)
    assert losses == expected
    assert equal_tensors(state, masters)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_references_train(network: str) -> None:
    losses, _ = in_float32(network, "adam")
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.2
