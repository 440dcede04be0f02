"""State dicts of initialised models: float32 with the masters' bits going out, and bit for bit coming in."""

from __future__ import annotations

import pytest
import torch
from models import CASES, DTYPES, OPTIMIZERS, Case, equal_tensors, level_arguments, train
from state_dicts import MASTERS, saved
from torch import Tensor, nn

import mpinit

LEVELS = ["O0", "O1", "O2", "O3"]


def trained(kind: str, network: str = "cnn") -> tuple[Case, nn.Module, torch.optim.Optimizer]:
    case = CASES[network]
    model = case.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    mpinit.initialize(model, optimizer, verbosity=0, **MASTERS[kind])
    train(model, optimizer, case.batches(3), case.loss)
    return case, model, optimizer


def noise(model: nn.Module) -> dict[str, Tensor]:
    """A float32 state that no 16-bit weight can hold."""
    return {
        name: torch.rand_like(value) + 0.1 if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("network", CASES)
def test_float32_at_every_level(network: str, level: str, dtype: str) -> None:
    model = CASES[network].build()
    plain = {name: (value.dtype, value.shape) for name, value in model.state_dict().items()}
    mpinit.initialize(model, OPTIMIZERS["sgd"](model.parameters()), **level_arguments(level, DTYPES[dtype]))
    for part, prefix in [(model, ""), *((child, f"{name}.") for name, child in model.named_children())]:
        state = part.state_dict(prefix=prefix)
        assert {name: (value.dtype, value.shape) for name, value in state.items()} == {
            name: kind for name, kind in plain.items() if name.startswith(prefix)
        }
    assert saved(model.state_dict()).keys() == plain.keys()


def test_the_metadata_and_class_stay_and_keep_vars_gives_the_parameters_themselves() -> None:
    model = CASES["cnn"].build()
    before = model.state_dict()
    mpinit.initialize(model, opt_level="O2", verbosity=0)
    after = model.state_dict()
    assert type(after) is type(before)
    assert after._metadata == before._metadata  # type: ignore[attr-defined]
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight


@pytest.mark.parametrize("kind", MASTERS)
def test_it_holds_the_masters_bits(kind: str) -> None:
    _, model, optimizer = trained(kind)
    state = model.state_dict()
    for name, weight in model.named_parameters():
        assert state[name].dtype is torch.float32
        assert torch.equal(state[name].to(weight.dtype), weight) or kind == "bf16 split"
        if weight.dtype is not torch.float32:
            assert not torch.equal(state[name], weight.float()), "more bits than the weight has"
    if kind != "bf16 split":
        holders = [parameter.detach() for parameter in mpinit.master_params(optimizer)]
        assert all(torch.equal(state[n], h) for (n, _), h in zip(model.named_parameters(), holders, strict=True))
    head = model.head.state_dict()
    assert all(torch.equal(head[name], state[f"head.{name}"]) for name in head)
    mpinit.undo(model)
    assert equal_tensors(dict(model.state_dict()), dict(state)), "undo gives the model the same bits"


@pytest.mark.parametrize("kind", MASTERS)
def test_loading_a_part_sets_its_masters(kind: str) -> None:
    _, model, optimizer = trained(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    part = {name: torch.rand_like(value) for name, value in model.head.state_dict().items()}
    model.head.load_state_dict(part)
    model.load_state_dict({"features.0.bias": torch.full((4,), 1 / 3)}, strict=False)
    optimizer.zero_grad()
    optimizer.step()
    expected = before | {f"head.{name}": value for name, value in part.items()}
    expected["features.0.bias"] = torch.full((4,), 1 / 3)
    assert equal_tensors(dict(model.state_dict()), expected)


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("fault", ["shape", "missing", "unexpected"])
def test_a_state_that_does_not_fit_is_refused_and_what_fitted_is_not_stale(fault: str, kind: str) -> None:
    _, model, optimizer = trained(kind)
    state = noise(model)
    if fault == "shape":
        state["head.weight"] = torch.zeros(2, 2)
    elif fault == "missing":
        del state["head.weight"]
    else:
        state["more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"head\.weight|more"):
        model.load_state_dict(state)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    optimizer.step()
    assert equal_tensors(dict(model.state_dict()), after), "weights and masters agree on what was loaded"


PARTIAL: dict[str, dict[str, object]] = {
    **MASTERS,
    "model": {"opt_level": "O5", "master_weights": "model"},
    "O3": {"opt_level": "O3"},
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", PARTIAL)
def test_what_is_written_to_a_state_dict_is_loaded(kind: str, trains: bool) -> None:
    """The loop that loads what fits: ``own = model.state_dict(); own[name].copy_(value)``."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    model.register_buffer("table", torch.randn(4))
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    mpinit.initialize(model, optimizers, verbosity=0, **PARTIAL[kind])
    loaded = noise(model)
    if kind == "O3" and trains:  # what is trained has 16 bits there and no more
        loaded = {name: value.half().float() for name, value in loaded.items()}

    def load() -> None:
        own = model.state_dict()
        for name, value in loaded.items():
            own[name].copy_(value)

    x = torch.ones(1, 4)
    load()
    output = model(x)
    assert equal_tensors(dict(model.state_dict()), loaded)
    copied = {name: value.clone() for name, value in loaded.items()}
    model.load_state_dict(copied)
    assert torch.equal(model(x), output)
    load()
    other = {name: torch.zeros_like(value) for name, value in loaded.items()}
    model.load_state_dict(other)
    model(x)
    assert equal_tensors(dict(model.state_dict()), other), "what is loaded later counts"
