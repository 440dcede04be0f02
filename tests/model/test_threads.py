"""Forwards of one model in several threads: they work, but for `master_weights="model"`, which refuses a second one."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import LEVELS
from torch import Tensor, nn

import mpinit

THREADS, ROUNDS = 4, 25
SHARED = [level for level in LEVELS if level != "model"]
INPUTS = [torch.randn(3, 4, generator=torch.Generator().manual_seed(index)) for index in range(THREADS)]


class Meeting(nn.Module):
    """Lets forwards meet: each waits here until all threads are inside."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier: list[threading.Barrier] = []

    def forward(self, x: Tensor) -> Tensor:
        for barrier in self.barrier:
            barrier.wait(30)
        return x


class Net(nn.Module):
    """A norm that stays float32, an RNN, a meeting, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.meeting, self.last = Meeting(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(self.norm(self.first(x)).unsqueeze(0))[0].squeeze(0)
        return self.last(self.meeting(y))


def in_threads(run: Callable[[int], Any]) -> list[Any]:
    """Run a function in each thread; an error is in the place of what it returned."""
    found: list[Any] = [None] * THREADS

    def call(index: int) -> None:
        try:
            found[index] = run(index)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def initialized(level: str, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return optimizer


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("level", SHARED)
def test_evaluation_in_threads_has_the_bits_of_one_thread(level: str, mode: Callable[[], Any]) -> None:
    model = Net().eval()
    optimizer = initialized(level, model)
    with torch.no_grad():
        expected = [model(x) for x in INPUTS]
    model.meeting.barrier.append(threading.Barrier(THREADS))

    def evaluate(index: int) -> list[Tensor]:
        with mode():
            return [model(INPUTS[index]) for _ in range(ROUNDS)]

    for found, one in zip(in_threads(evaluate), expected, strict=True):
        assert isinstance(found, list), found
        assert all(torch.equal(each, one) for each in found)
    # Training goes on as if nothing had been evaluated.
    model.meeting.barrier.clear()
    assert all(parameter.is_leaf for parameter in model.parameters())
    with mpinit.scale_loss(model(INPUTS[0]).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(model(INPUTS[0]), expected[0])


# At O1 and O4 a part that is called by itself has the casts of the thread, and another thread has none.
@pytest.mark.parametrize("level", [level for level in SHARED if level not in ("O1", "O4")])
def test_parts_and_the_whole_are_evaluated_in_threads(level: str) -> None:
    """Some threads call a part, some the model, and they begin and end in any order."""
    model = Net().eval()
    initialized(level, model)
    calls: list[Callable[[Tensor], Tensor]] = [model, model.first, model, lambda x: model.norm(model.first(x))]
    with torch.no_grad():
        expected = [call(x) for call, x in zip(calls, INPUTS, strict=True)]

    def evaluate(index: int) -> list[Tensor]:
        with torch.no_grad():
            return [calls[index](INPUTS[index]) for _ in range(4 * ROUNDS)]

    for found, one in zip(in_threads(evaluate), expected, strict=True):
        assert isinstance(found, list), found
        assert all(torch.equal(each, one) for each in found)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_a_second_thread_is_refused_with_casts_in_the_model() -> None:
    model = Net()
    initialized("model", model)
    model.meeting.barrier.append(threading.Barrier(THREADS))

    def train(index: int) -> None:
        model(INPUTS[index])

    model.meeting.barrier[0] = threading.Barrier(1)
    inside, go_on = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        inside.set()
        go_on.wait(30)

    handle = model.meeting.register_forward_pre_hook(wait)
    first = threading.Thread(target=train, args=(0,), daemon=True)
    first.start()
    assert inside.wait(30)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match=r"runs in another thread.*copy of its own"):
            model(INPUTS[1])
    go_on.set()
    first.join(30)
    handle.remove()
    model(INPUTS[1])
