"""A resumed run of a model whose forward writes to state is the uninterrupted run, to the bit."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LEVELS
from states_by_name import assert_same
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import mpinit

Pair = tuple[Any, Optimizer]


class Average(nn.Module):
    """Counts its forwards, and subtracts a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.full((), 250.0))
        self.mean = nn.Buffer(torch.full((8,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.01)
        return x - self.mean


def plain(seed: int = 0) -> Pair:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), Average(), nn.Linear(8, 32), nn.Linear(32, 1))
    return model, SGD(model.parameters(), lr=0.01)


def initialized(kind: str, seed: int = 0) -> Pair:
    model, optimizer = plain(seed)
    mpinit.initialize(model, optimizer, **LEVELS[kind])
    return model, optimizer


def train(pair: Pair, first: int, last: int) -> Pair:
    model, optimizer = pair
    for step in range(first, last):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return pair


def through_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def by_state_dicts(pair: Pair, kind: str) -> Pair:
    saved = through_file({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()})
    model, optimizer = initialized(kind, 7)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def before_initialize(pair: Pair, kind: str) -> Pair:
    """Load plain numbers, as safetensors has them, and the names from mpinit's state."""
    own = {name: value.clone() for name, value in pair[0].state_dict().items()}
    saved = through_file({"model": own, "mpinit": mpinit.state_dict(pair[1])})
    model, optimizer = plain(7)
    model.load_state_dict(saved["model"])
    mpinit.initialize(model, optimizer, **LEVELS[kind])
    mpinit.load_state_dict(saved["mpinit"], optimizer)
    return model, optimizer


def by_train_state(pair: Pair, kind: str) -> Pair:
    saved = through_file(mpinit.TrainState(*pair).state_dict())
    fresh = initialized(kind, 7)
    mpinit.TrainState(*fresh).load_state_dict(saved)
    return fresh


@pytest.mark.parametrize("kind", ["O2", "O5", "split", "model"])
@pytest.mark.parametrize("resume", [by_state_dicts, before_initialize, by_train_state])
def test_run_that_is_resumed_often_is_the_uninterrupted_run(resume: Callable[[Pair, str], Pair], kind: str) -> None:
    expected, _ = train(initialized(kind), 0, 9)
    pair = train(initialized(kind), 0, 3)
    assert pair[0][1].count.dtype is torch.float32
    for step in (3, 6):
        pair = resume(pair, kind)
        assert pair[0][1].count.dtype is torch.float32
        train(pair, step, step + 3)
    assert_same(pair[0].state_dict(), expected.state_dict(), dtype=None)


def test_state_loads_where_nothing_can_be_kept() -> None:
    saved = by_train_state(train(initialized("O5"), 0, 2), "O5")
    names = mpinit.state_dict(saved[1])
    assert names["float32_modules"] == ["1"]
    for level in ("O0", "O4"):
        model, optimizer = initialized(level)
        model.load_state_dict(saved[0].state_dict())
        mpinit.load_state_dict(names, optimizer)
        assert "float32_modules" not in mpinit.state_dict(optimizer)
        train((model, optimizer), 0, 1)


def test_names_of_modules_in_several_models_are_distinct() -> None:
    def both() -> tuple[list[Any], Optimizer]:
        models = [plain()[0], nn.Sequential(nn.Identity(), *plain(1)[0])]
        models[0][1].eval()
        optimizer = SGD([p for model in models for p in model.parameters()], lr=0.01)
        mpinit.initialize(models, optimizer, "O5")
        return models, optimizer

    models, optimizer = both()
    with mpinit.scale_loss(sum(model(torch.ones(2, 4)).mean() for model in models), optimizer) as loss:
        loss.backward()
    optimizer.step()
    state = mpinit.state_dict(optimizer)
    assert state["float32_modules"] == ["models[1].2"]
    models, optimizer = both()
    mpinit.load_state_dict(state, optimizer)
    assert [model[at].count.dtype for at, model in enumerate(models, 1)] == [torch.bfloat16, torch.float32]
