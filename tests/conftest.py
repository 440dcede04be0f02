"""Shared set-up: a quick process, fixed seeds, no casts of an earlier test, what a marker means, O1 by fixture."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import processes
import pytest
import quick_process
import session_device
import torch
from casts import Initialize, StartCasts, o1_plan
from torch import nn
from undo_snapshots import end_dropped_sessions

import mpinit
from mpinit import autocast, registry
from mpinit.autocast import installation, thread_flags
from mpinit.basics.patching import Undo, undo_dropped

hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

quick_process.prepare()

# Child processes of tests share the same modules.
_SUPPORT = str(Path(__file__).parent / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SUPPORT, os.environ.get("PYTHONPATH"))))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device sim``, or ``cuda``: run what is marked ``device`` there; without it, everything on the CPU."""
    parser.addoption("--device", choices=("cpu", "sim", "cuda"), default="cpu")


def pytest_configure(config: pytest.Config) -> None:
    """The device is there before any test, and before any backward pass."""
    session_device.choose(config.option.device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``nightly`` tests are left out unless asked for; off the CPU all but those for devices, on it ``gpu`` ones."""
    on_cpu = config.option.device == "cpu"
    left_out = [
        item
        for item in items
        if ("nightly" in item.keywords and "nightly" not in config.option.markexpr)
        or not (on_cpu or item.keywords.keys() & {"device", "gpu"})
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if "gpu" in item.keywords and on_cpu:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator: pytest --device sim, or --device cuda"))


def pytest_collection_finish() -> None:
    """Modules and tests."""
    quick_process.keep()


@pytest.fixture(autouse=True, scope="module")
def _quick_collector() -> None:
    """What earlier files have imported and compiled makes ``gc.collect()`` no slower in this one."""
    quick_process.keep()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    if installation.INSTALLATION.original(torch, "log") is not torch.log:
        end_dropped_sessions()
    undo_dropped()
    torch.manual_seed(0)
    registered = list(installation.REGISTERED)
    yield
    for left_over in reversed(registry.live()):
        left_over.undo()
    # The examples in docstrings register functions too, torch.cumsum among them.
    installation.REGISTERED[:] = registered
    thread_flags.thread_state.value.restore_after_ended_session()
    for device in thread_flags.device_types():
        torch.set_autocast_enabled(device, False)


@pytest.fixture
def initialize() -> Iterator[Initialize]:
    """``mpinit.initialize`` at O1, undone at the end in the order in which sessions must be."""
    models: list[nn.Module] = []

    def run(model: nn.Module, optimizer: Any = None, **overrides: Any) -> Any:
        models.append(model)
        return mpinit.initialize(model, optimizer, opt_level="O1", **overrides)

    yield run
    for model in reversed(models):
        mpinit.undo(model)


@pytest.fixture
def start_casts() -> Iterator[StartCasts]:
    """O1's casts alone, without a session; called twice, twice as deep."""
    undos: list[Undo] = []

    def run(**overrides: Any) -> Undo:
        undos.append(autocast.apply(o1_plan(**overrides)))
        return undos[-1]

    yield run
    for undo in reversed(undos):
        undo()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return "ok" or the error of each test of a file that runs in several processes, by one launch of them."""
    here = (item for item in request.session.items if item.path == request.path)
    chosen = [item for item in here if not item.get_closest_marker("skip") and "outcomes" in item.fixturenames]
    return processes.launch(request.path, {item.callspec.params["name"]: item.function.ranks for item in chosen})
