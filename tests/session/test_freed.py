"""Models and optimizers that are dropped without undo: they, the session and its masters are freed at once.

Below the public face: the registry shows that no session is left.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import WAYS
from torch import nn

import mpinit
from mpinit import registry

LEVELS = WAYS | {
    "kept parts": {"opt_level": "O5", "keep_fp32": [nn.LayerNorm], "entry_points": ["encode"]},
}


class Net(nn.Module):
    """A part of its own, buffers, an LSTM's flat weights, a frozen weight and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.batch_norm: nn.Module = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.last = nn.Linear(4, 2)
        self.last.bias.requires_grad_(False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.batch_norm(self.norm(self.first(x)))
        return encoded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.lstm(self.encode(x)[:, None])[0][:, 0])
        return output


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def step(model: Any, optimizer: Any) -> None:
    with mpinit.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def in_float32(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    with mpinit.float32_weights(model):
        model.state_dict()


def fail(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))


def scheduled(model: Any, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer)
    mpinit.scheduler_step(scheduler)


def with_scaler(model: Any, optimizer: Any) -> None:
    scaler = mpinit.GradScaler(optimizer)
    scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def copied(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    copy.deepcopy(model)(torch.ones(2, 4))


def saved(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    entries = model.state_dict()
    model.load_state_dict(entries)
    optimizer.load_state_dict(optimizer.state_dict())


def asked_for_masters(model: Any, optimizer: Any) -> None:
    step(model, optimizer)
    nn.utils.clip_grad_norm_(list(mpinit.master_params(optimizer)), 1.0)
    step(model, optimizer)


def add_another(model: Any, optimizer: Any) -> None:
    mpinit.add_optimizers(torch.optim.SGD(model.first.parameters(), lr=0.1))
    step(model, optimizer)


USES: dict[str, Callable[[Any, Any], None]] = {
    "nothing": lambda model, optimizer: None,
    "steps": lambda model, optimizer: [step(model, optimizer) for _ in range(3)] and None,
    **{
        function.__name__: function
        for function in (
            in_float32,
            fail,
            scheduled,
            with_scaler,
            copied,
            saved,
            asked_for_masters,
            add_another,
        )
    },
}


def made(level: str) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, eps=1e-3)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return model, optimizer


def known(model: nn.Module, optimizer: Any) -> dict[str, weakref.ref[Any]]:
    """Refer weakly to all that is to be freed."""
    session = registry.session_of(model)
    found: dict[str, Any] = {"session": session, "model": model, "optimizer": optimizer}
    found |= dict(model.named_modules()) | dict(model.named_parameters())
    found |= {f"master {index}": master.parameter for index, master in enumerate(session.masters)}
    found |= {f"state {index}": each["exp_avg"] for index, each in enumerate(optimizer.state.values())}
    return {name: weakref.ref(each) for name, each in found.items()}


def living(references: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.filterwarnings("ignore:casts to 16 bits lose")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_dropped_without_undo_is_freed_without_collector(level: str, use: str) -> None:
    # What torch imports and compiles once holds frames, and these hold the first optimizer.
    warm = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    warm.step()
    model, optimizer = made(level)
    USES[use](model, optimizer)
    references = known(model, optimizer)
    del model, optimizer, warm
    assert living(references) == []


@pytest.mark.parametrize("level", LEVELS)
def test_optimizer_dropped_is_freed_and_its_model_trains_on(level: str) -> None:
    model, optimizer = made(level)
    step(model, optimizer)
    freed = weakref.ref(optimizer)
    del optimizer
    assert freed() is None
    assert "no optimizer" in mpinit.describe(model)
    another = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, eps=1e-3)
    mpinit.add_optimizers(another)
    step(model, another)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def trained_in_a_list(level: str, keeps: bool) -> list[torch.Tensor]:
    """Train two models, initialised as one list of modules, that is kept or freed after the call."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    container = nn.ModuleList(models)
    optimizer = torch.optim.AdamW([p for p in container.parameters() if p.requires_grad], lr=0.1, eps=1e-3)
    asked = {name: value for name, value in LEVELS[level].items() if name != "entry_points"}
    mpinit.initialize(container, optimizer, **asked)
    known, kept = weakref.ref(container), container if keeps else None
    del container
    assert known() is kept
    for _ in range(2):
        loss = sum(model(torch.ones(2, 4)).square().mean() for model in models)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mpinit.undo(optimizer)
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:casts to 16 bits lose")
@pytest.mark.parametrize("level", LEVELS)
def test_models_in_a_list_train_alike_after_the_list_was_freed(level: str) -> None:
    assert all(map(torch.equal, trained_in_a_list(level, keeps=True), trained_in_a_list(level, keeps=False)))


def test_a_method_that_was_kept_alone_says_what_to_keep() -> None:
    model, optimizer = made("O5")
    forward, stepping = model.forward, optimizer.step
    del model, optimizer
    with pytest.raises(ReferenceError, match="keep the model as long as its methods"):
        forward(torch.ones(2, 4))
    with pytest.raises(ReferenceError, match="keep it as long as its methods"):
        stepping()


def tensors_of(shape: tuple[int, ...]) -> int:
    return sum(type(each) in (torch.Tensor, nn.Parameter) and each.shape == shape for each in gc.get_objects())


@pytest.mark.parametrize("level", ["O2", "O3", "split"])
def test_copies_whose_data_was_used_are_freed_with_the_model(level: str) -> None:
    shape = (37, 41)
    model: Any = nn.Linear(41, 37)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    model.state_dict()
    for each in mpinit.master_params(optimizer):
        each.data.mul_(2.0)
    model.weight.data.mul_(2.0)
    with mpinit.scale_loss(model(torch.ones(2, 41)).float().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert tensors_of(shape) > 0
    del model, optimizer, each, loss
    assert tensors_of(shape) == 0


@pytest.mark.parametrize("level", ["O2", "split"])
def test_replaced_parameters_are_freed_with_their_masters(level: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpinit.initialize(model, optimizer, **LEVELS[level])

    def step() -> None:
        optimizer.zero_grad()
        with mpinit.scale_loss(model(torch.ones(2, 4)).float().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()

    def replace() -> list[weakref.ref[Any]]:
        old = [*model[1].parameters()]
        known = [weakref.ref(each) for each in (*old, *[*mpinit.master_params(optimizer)][2:])]
        model[1] = nn.Linear(4, 2).to(old[0].dtype)
        optimizer.param_groups[0]["params"][2:] = list(model[1].parameters())
        for weight in old:
            optimizer.state.pop(weight, None)
        return known

    gone = []
    for _ in range(5):
        step()
        gone += replace()
    step()
    gc.collect()
    assert [each() for each in gone] == [None] * 20


@pytest.mark.filterwarnings("ignore:the eps=")
@pytest.mark.parametrize("level", LEVELS)
def test_parts_that_are_replaced_are_freed(level: str) -> None:
    """Trained and frozen parameters, buffers and masters. The undo gives float32 all the same."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    step(model, optimizer)
    list(mpinit.master_params(optimizer))
    model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name in ("last", "batch_norm"):
        part: nn.Module = getattr(model, name)
        tensors |= {f"{name}.{key}": each for key, each in [*part.named_parameters(), *part.named_buffers()]}
    of = {name: registry.session_of(model).masters.of(each) for name, each in tensors.items()}
    tensors |= {f"master of {name}": master.parameter for name, master in of.items() if master is not None}
    references = {name: weakref.ref(each) for name, each in tensors.items()}
    model.last = nn.Linear(4, 2).to(model.last.weight.dtype)
    model.batch_norm = nn.Identity()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    del tensors, of, part
    step(model, optimizer)
    gc.collect()
    assert living(references) == []
    mpinit.undo(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
