"""Sessions and optimizers that the garbage collector frees while torch or mpinit iterates over what it knows of them.

The collector may run at any line. Here it runs inside of the first hook. A hook that is removed at once would change
the dict that torch iterates over.

Below the public face: a list of a session that no public call reads while the collector runs, and a slow undo.
"""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import ways
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks as module_hooks
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mpinit
from mpinit import registry
from mpinit.basics.patching import undo_when_dropped
from mpinit.optimizer.params import OptimizerParams

LEVELS = ways("O0", "O1", "O2", "O3", "O4", "O5", "split", "model")


def collect(*_: Any) -> None:
    """Run the garbage collector; a hook of any kind."""
    gc.collect()


@pytest.fixture(params=[register_module_module_registration_hook, register_optimizer_step_pre_hook], autouse=True)
def _collecting_hook(request: pytest.FixtureRequest) -> Iterator[None]:
    handle = request.param(collect)
    yield
    handle.remove()


def made(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Initialise a model in a cycle of references, which only the collector frees, and an optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    model.itself = [model]  # type: ignore[assignment]
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    with mpinit.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_is_freed_inside_of_a_hook(level: str) -> None:
    gc.disable()
    try:
        step(*made(level))
        container = nn.Sequential(nn.Linear(4, 4))
        plain = torch.optim.SGD(container.parameters(), lr=0.1)
        container(torch.ones(2, 4)).sum().backward()
        plain.step()
        before = container[0].weight.clone()
        plain.step()
        assert not torch.equal(container[0].weight, before)
        model, optimizer = made(level)
        step(model, optimizer)
        mpinit.undo(model)
    finally:
        gc.enable()
    assert (list(module_hooks.values()) + list(step_hooks.values())) == [collect]


@pytest.fixture
def _group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("level", ["O2", "split"])
def test_a_session_is_freed_in_the_constructor_of_a_wrapper(level: str) -> None:
    gc.disable()
    try:
        for _ in range(3):
            model, optimizer = made(level)
            step(DistributedDataParallel(model), optimizer)
            del model, optimizer
    finally:
        gc.enable()


def test_optimizer_is_freed_while_optimizers_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find all others in the list, which gets shorter meanwhile."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizers: list[Any] = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    mpinit.initialize(model, optimizers, "O5")
    for index in range(3):
        step(model, optimizers[index])
    found: list[Any] = []

    def sync(params: OptimizerParams) -> None:
        found.append(params)
        if len(found) == 2:
            del optimizers[0]
            gc.collect()

    monkeypatch.setattr(OptimizerParams, "sync", sync)
    session = registry.of(model)
    assert session is not None
    session.managed.all_gradients([], with_others=True)
    gc.collect()
    assert len(found) == 3 and len(list(session.managed)) == 2


def test_masters_stay_while_any_optimizer_has_the_weight() -> None:
    """Of three optimizers of one weight one is undone, one is freed, and the last gets another weight."""
    weight = nn.Linear(4, 4)
    model = nn.ModuleList([weight])
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    optimizers: list[Any] = [torch.optim.SGD(weight.parameters(), lr=0.1) for _ in range(2)]
    mpinit.initialize(model, optimizers, "O5", await_optimizers=True)
    optimizers.append(torch.optim.SGD(weight.parameters(), lr=0.1))
    mpinit.add_optimizers(optimizers[2])
    for optimizer in optimizers:
        step(model, optimizer)
    session = registry.of(model)
    assert session is not None
    session.managed.remove(optimizers[0])
    del optimizers[0], optimizers[0], optimizer
    gc.collect()
    assert len(session.masters) == 2 and len(list(session.managed)) == 1
    model[0] = nn.Linear(4, 4).to(torch.bfloat16)
    optimizers[0].param_groups[0]["params"][:] = model[0].parameters()
    step(model, optimizers[0])
    assert [id(master.weight) for master in session.masters] == [id(p) for p in model[0].parameters()]


def test_threads_that_initialize_together_undo_drops_once() -> None:
    calls: list[int] = []

    class Owner:
        """An object that is dropped."""

    def undo() -> None:
        calls.append(1)
        time.sleep(0.2)

    owner = Owner()
    undo_when_dropped(owner, undo)
    del owner
    models = [nn.Linear(4, 4) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for model in list(pool.map(lambda model: mpinit.initialize(model, opt_level="O2"), models)):
            mpinit.undo(model)
    assert calls == [1]
