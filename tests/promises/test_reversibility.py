"""Everything has an undo: snapshot, initialize, train or fail, undo, and nothing is different."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, OPTIMIZERS, train, train_plainly
from torch import Tensor, nn

import mpinit
from mpinit import registry, session
from mpinit.masters import full
from mpinit.model import casting, copies, forward, state_dict
from mpinit.optimizer import control
from mpinit.torch_internals import native_autocast

KINDS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O1 apex policy": {"opt_level": "O1", "cast_policy": "apex"},
    "O1 model scope": {"opt_level": "O1", "cast_scope": "model"},
    "O2": {"opt_level": "O2"},
    "O2 and a float32 head": {"opt_level": "O2", "keep_fp32": "head"},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5 split": {"opt_level": "O5", "master_weights": "split"},
}
KEEPS_EVERY_BIT = ("O0", "O1", "O4")
NAMESPACES = (
    torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.autograd, torch._C._nn,
    torch.nn.Module, torch.nn.Parameter, torch.nn.Linear, torch.nn.LSTM, torch.nn.RNNBase, torch.nn.BatchNorm2d,
    torch.nn.MultiheadAttention, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam,
)  # fmt: skip


# -- snapshots --------------------------------------------------------------------------------------------------------


def namespace() -> dict[str, Any]:
    """torch as it stands: what every name refers to, and the state of autocast."""
    seen: dict[str, Any] = {
        f"{owner.__name__}.{name}": id(value)
        for owner in NAMESPACES
        for name, value in vars(owner).items()
        if not name.startswith("__")
    }
    for device in native_autocast.device_types():
        seen[f"autocast {device}"] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    seen["autocast cache"] = torch.is_autocast_cache_enabled()
    return seen


def structure_of_model(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks and forwards of every module; identity, class and dtypes of every tensor."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not isinstance(value, (dict, list))}
        seen[name] = type(module), {key: id(value) for key, value in own.items()}, module.forward.__func__
        for key, value in vars(module).items():
            if isinstance(value, dict):
                seen[f"{name}: {key}"] = {inner: id(held) for inner, held in value.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        gradient = None if tensor.grad is None else tensor.grad.dtype
        seen[f"tensor {name}"] = type(tensor), tensor.dtype, tensor.requires_grad, vars(tensor), gradient
        seen[f"tensor {name}"] += (tensor.shape, tensor.stride(), tensor.is_leaf)
        if tensor.requires_grad:
            # torch cannot set grad_dtype back to "the tensor's own"; None, which takes any gradient, is the nearest.
            seen[f"grad_dtype {name}"] = tensor.grad_dtype in (None, tensor.dtype)
    return seen


def structure_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes, methods, groups and the dtypes of the state."""
    seen: dict[str, Any] = {
        key: id(value)
        for key, value in vars(optimizer).items()
        if key not in ("step", "zero_grad", "add_param_group", "_opt_called")
    }
    for name in ("step", "zero_grad", "add_param_group"):
        method = getattr(optimizer, name)
        seen[name] = (
            name in vars(optimizer),
            getattr(method, "__func__", method),
            getattr(method, "__self__", optimizer),
        )
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        seen[f"group {index}"] = id(group), id(group["params"]), [id(p) for p in group["params"]], options
    seen["state"] = {
        id(parameter): {key: getattr(value, "dtype", type(value)) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    return seen


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every number there is."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        found |= {f"state {index} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    different = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    assert not {key: both for key, both in different.items() if both[0] != both[1]}


def assert_same_bits(before: dict[str, Tensor], after: dict[str, Tensor], rounded: Callable[[str], bool]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype is after[name].dtype, name
        if rounded(name) and value.is_floating_point():
            torch.testing.assert_close(after[name], value, rtol=2.0**-7, atol=1e-6)
        else:
            assert torch.equal(after[name], value), name


def set_up(network: str = "cnn", optimizer: str = "sgd", warm: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of its training: with a frozen part, gradients and optimizer state."""
    case = CASES[network]
    model = case.build()
    next(model.parameters()).requires_grad_(False)
    trainer = OPTIMIZERS[optimizer](model.parameters())
    if warm:
        train_plainly(model, trainer, case.batches(2), case.loss)
    return model, trainer


def rounds(kind: str, model: nn.Module) -> Callable[[str], bool]:
    """What undo can only give back as the 16-bit numbers it had become: trained weights without masters, gradients."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if kind in KEEPS_EVERY_BIT or kind.startswith("O1"):
        return lambda name: False
    if kind == "O3":
        return lambda name: name in trained or name.startswith("gradient")
    return lambda name: name.startswith("gradient")


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("network", "optimizer"), [("cnn", "sgd"), ("lstm", "adam"), ("transformer", "adamw_fused")])
def test_undo_without_training_leaves_no_trace(network: str, optimizer: str, kind: str) -> None:
    model, trainer = set_up(network, optimizer)
    torch_before = namespace()
    before = structure_of_model(model), structure_of_optimizer(trainer), values(model, trainer)
    mpinit.initialize(model, trainer, verbosity=0, **KINDS[kind])
    mpinit.undo(model)
    assert_same(torch_before, namespace())
    assert_same(before[0], structure_of_model(model))
    assert_same(before[1], structure_of_optimizer(trainer))
    assert_same_bits(before[2], values(model, trainer), rounds(kind, model))


@pytest.mark.parametrize("kind", KINDS)
def test_undo_after_training_gives_the_masters_bits_to_the_model(kind: str) -> None:
    model, optimizer = set_up()
    torch_before = namespace()
    before = structure_of_model(model), structure_of_optimizer(optimizer)
    mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    train(model, optimizer, CASES["cnn"].batches(3), CASES["cnn"].loss)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(optimizer)
    assert_same(torch_before, namespace())
    changed = {name: value for name, value in structure_of_model(model).items() if name.endswith(": _buffers")}
    assert_same(before[0] | (changed if kind == "O3" else {}), structure_of_model(model))
    assert_same(before[1], structure_of_optimizer(optimizer))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in trained.items())
    losses = train_plainly(model, optimizer, CASES["cnn"].batches(2), CASES["cnn"].loss)
    assert all(loss == loss for loss in losses), "and trains on in plain torch"


# What raises, at which call of it, and when: before its work, or having done it.
PHASES: dict[str, tuple[Any, str, int, str]] = {
    "the forwards": (forward, "patch_forwards", 1, "before"),
    "a second forward": (forward, "_patch_forward", 2, "before"),
    "the end of a second forward": (forward, "_patch_forward", 2, "after"),
    "a second module's state hook": (copies, "put_on", 2, "before"),
    "the end of the state hooks": (state_dict.Float32State, "install", 1, "after"),
    "a second master": (full.FullPair, "__init__", 2, "before"),
    "the end of a second master": (full.FullPair, "__init__", 2, "after"),
    "the optimizer's second method": (control, "set_attribute", 2, "before"),
    "the optimizer's states": (session, "cast_states", 1, "before"),
    "the casts": (casting.TensorCasts, "apply", 1, "before"),
    "a second cast": (casting, "_replace_data", 2, "before"),
    "the end of a second cast": (casting, "_replace_data", 2, "after"),
    "the end of the casts": (casting.TensorCasts, "apply", 1, "after"),
    "a second weight": (full.FullPair, "cast", 2, "before"),
    "the end of a second weight": (full.FullPair, "cast", 2, "after"),
    "the flat weights": (casting, "rebuild_flat_weights", 1, "before"),
    "the last thing": (full.FullMasters, "finish", 1, "before"),
    "the very end": (full.FullMasters, "finish", 1, "after"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["O1", "O2 and a float32 head", "O3", "O5 split"])
def test_a_failure_in_any_phase_leaves_no_trace(kind: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, call, when = PHASES[phase]
    model, optimizer = set_up("cnn", "adam")
    before = structure_of_model(model), structure_of_optimizer(optimizer), values(model, optimizer)
    original, calls = getattr(owner, name), itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if number == call and when == "before":
            raise ZeroDivisionError(phase)
        result = original(*args, **kwargs)
        if number == call:
            raise ZeroDivisionError(phase)
        return result

    torch_before = namespace()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        try:
            mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
            reached = False
            mpinit.undo(model)
        except ZeroDivisionError:
            reached = True
    assert reached or kind != "O2 and a float32 head", "the phase exists"
    assert_same(torch_before, namespace())
    assert_same(before[0], structure_of_model(model))
    assert_same(before[1], structure_of_optimizer(optimizer))
    rounded = rounds(kind, model) if not reached else lambda name: name.startswith("gradient") and kind != "O3"
    assert_same_bits(before[2], values(model, optimizer), rounded)
    assert registry.of(model) is None
    assert registry.of(optimizer) is None
    assert not registry.live()
    mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    train(model, optimizer, CASES["cnn"].batches(1), CASES["cnn"].loss)


@pytest.mark.parametrize("kind", KINDS)
def test_initialize_again_after_undo_at_any_other_level(kind: str) -> None:
    model, optimizer = set_up()
    case = CASES["cnn"]
    for other in (kind, "O2", kind, "O1", kind):
        mpinit.initialize(model, optimizer, verbosity=0, **KINDS[other])
        losses = train(model, optimizer, case.batches(1), case.loss)
        assert losses[0] == losses[0]
        mpinit.undo(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize(
    ("one", "two"), [("O1", "O1"), ("O1", "O4"), ("O2", "O1"), ("O2", "O5"), ("O1 apex policy", "O1")]
)
def test_two_sessions_are_undone_in_any_order(one: str, two: str, first_out: int) -> None:
    torch_before = namespace()
    pairs = [set_up("cnn"), set_up("transformer")]
    before = [(structure_of_model(model), structure_of_optimizer(optimizer)) for model, optimizer in pairs]
    for (model, optimizer), kind in zip(pairs, (one, two), strict=True):
        mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    for (model, optimizer), network in zip(pairs, ("cnn", "transformer"), strict=True):
        train(model, optimizer, CASES[network].batches(1), CASES[network].loss)
    mpinit.undo(pairs[first_out][0])
    other, network = pairs[1 - first_out], ("cnn", "transformer")[1 - first_out]
    train(*other, CASES[network].batches(1), CASES[network].loss)
    mpinit.undo(other[1])
    assert_same(torch_before, namespace())
    for (model, optimizer), (structure, groups) in zip(pairs, before, strict=True):
        assert_same(structure, structure_of_model(model))
        assert_same(groups, structure_of_optimizer(optimizer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_built_before_and_after(when: str, kind: str) -> None:
    model, optimizer = set_up(warm=False)
    case = CASES["cnn"]
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        before = structure_of_optimizer(optimizer)
    mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    first = optimizer.param_groups[0]["lr"]
    for rounds_done in range(1, 4):
        if rounds_done == 3:
            mpinit.undo(model)
            train_plainly(model, optimizer, case.batches(1), case.loss)
        else:
            train(model, optimizer, case.batches(1), case.loss)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == first * 0.5**rounds_done
    if when == "before":
        after = structure_of_optimizer(optimizer)
        assert_same(
            {key: before[key] for key in ("step", "zero_grad")}, {key: after[key] for key in ("step", "zero_grad")}
        )


@pytest.mark.parametrize("kind", ["O2", "O5 split"])
def test_dtypes_that_came_in_go_out(kind: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64))
            self.coarse = nn.Parameter(torch.full((3,), 0.1, dtype=torch.bfloat16))
            self.register_buffer("wide", torch.ones(3, dtype=torch.float64))

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    mpinit.undo(model)
    assert model.wide.dtype is torch.float64
    assert model.fine.dtype is torch.float64
    assert model.coarse.dtype is torch.float32, "what was 16-bit keeps its master's bits"


@pytest.mark.parametrize("kind", ["O2", "O3", "O5", "O5 split"])
def test_all_of_it_inside_of_an_autocast_block(kind: str) -> None:
    level, *split = kind.split()
    model = nn.Sequential(nn.Linear(70, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("table", torch.linspace(0, 1, 300))
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keywords = {"master_weights": "split"} if split else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mpinit.initialize(model, optimizer, level, verbosity=0, **keywords)
        saved = model.state_dict()
        mpinit.undo(model)
    for name, value in model.state_dict().items():
        if level != "O3" or name in ("table", "0.weight"):
            assert torch.equal(value, before[name]) and torch.equal(saved[name], before[name]), name


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.Adam], ids=["SGD", "Adam"]
)
def test_state_stepped_in_place_is_not_undone(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Optimizers change their state where it lies; what no step has reached comes back with every bit."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizer = make(model.parameters())
    x = torch.randn(4, 3)
    sum(layer(x).sum() for layer in model).backward()
    optimizer.step()
    states = optimizer.state.items()
    before = {p: {key: value.clone() for key, value in state.items() if value.dim()} for p, state in states}
    mpinit.initialize(model, optimizer, "O3", verbosity=0)
    optimizer.zero_grad()
    model[0](x).square().sum().backward()
    optimizer.step()
    stepped = {p: {key: optimizer.state[p][key].clone() for key in entries} for p, entries in before.items()}
    mpinit.undo(model)
    for parameter in model[0].parameters():
        for key, value in stepped[parameter].items():
            assert value.dtype is torch.float16
            assert not torch.equal(value.float(), before[parameter][key])
            torch.testing.assert_close(optimizer.state[parameter][key], value.float(), rtol=2e-3, atol=1e-7)
    for parameter in model[1].parameters():
        for key, value in before[parameter].items():
            assert torch.equal(optimizer.state[parameter][key], value)
