"""Shared set-up: a quick process, fixed seeds, no casts of an earlier test, what a marker means, O1 by fixture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import quick_process
import torch
from casts import Initialize, StartCasts, o1_plan
from torch import nn

import mpinit
from mpinit import functions, registry
from mpinit.basics.patching import Undo
from mpinit.functions import installation
from mpinit.torch_internals import native_autocast

hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

quick_process.prepare()

# Child processes of tests share the same modules.
_SUPPORT = str(Path(__file__).parent / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SUPPORT, os.environ.get("PYTHONPATH"))))


# Workers take whole files, in this order and then by name: what takes long is begun early, and all end together.
LONGEST_FIRST = (
    *("distributed/test_distributed.py", "promises/test_law.py", "distributed/test_distributed_example.py"),
    *("compat/test_running.py", "docs/test_examples.py", "functions/test_functions_compile.py"),
    *("model/test_wrappers.py", "benchmarks/test_benchmarks.py", "cli/test_commands.py"),
    *("promises/test_copies.py", "optimizer/test_compiled_step.py", "promises/test_failure.py"),
    *("integrations/test_lightning.py", "promises/test_random_loops.py", "masters/test_optimizer_states.py"),
    *("promises/test_resume.py", "promises/test_parity.py", "inspect/test_planted_faults.py"),
    *("functions/test_interrupted.py", "promises/test_compiled_training.py", "functions/test_functions_rows.py"),
    *("integrations/test_transformers.py", "docs/test_site.py", "docs/test_docstrings.py"),
    *("masters/test_codecs.py", "masters/test_peak_memory.py", "model/test_calls_from_outside.py"),
    *("functions/test_operators.py", "optimizer/test_gradient_release.py", "promises/test_reversibility.py"),
    *("promises/test_failing_initialize.py", "optimizer/test_arriving_gradients.py", "optimizer/test_law_weights.py"),
    *("integrations/test_timm.py", "grad_scaler/test_recipes.py", "torch_internals/test_compiled_kernel.py"),
    *("model/test_averages.py", "model/test_copies_of_masters.py", "model/test_casting.py"),
    *("masters/test_split_masters.py", "optimizer/test_accumulation.py"),
)


def place_of(item: pytest.Item) -> int:
    """Where the item's file comes in ``LONGEST_FIRST``."""
    name = item.path.relative_to(Path(__file__).parent).as_posix() if Path(__file__).parent in item.path.parents else ""
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; ``gpu`` tests skipped where there is no CUDA device, ``nightly`` ones unless asked for."""
    items.sort(key=place_of)
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    not_tonight = pytest.mark.skip(reason="a long run; select it with -m nightly")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "nightly" in item.keywords and "nightly" not in config.option.markexpr:
            item.add_marker(not_tonight)


def pytest_collection_finish() -> None:
    """Modules and tests."""
    quick_process.keep()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    registered = list(installation.REGISTERED)
    yield
    for left_over in reversed(registry.live()):
        left_over.undo()
    # The examples in docstrings register functions too, torch.cumsum among them.
    installation.REGISTERED[:] = registered
    native_autocast.this.thread.follow_ended()
    native_autocast.set_flags(dict.fromkeys(native_autocast.device_types(), False))


@pytest.fixture
def initialize() -> Iterator[Initialize]:
    """``mpinit.initialize`` at O1, undone at the end in the order in which sessions must be."""
    models: list[nn.Module] = []

    def run(model: nn.Module, optimizer: Any = None, **overrides: Any) -> Any:
        models.append(model)
        return mpinit.initialize(model, optimizer, opt_level="O1", verbosity=0, **overrides)

    yield run
    for model in reversed(models):
        mpinit.undo(model)


@pytest.fixture
def start_casts() -> Iterator[StartCasts]:
    """O1's casts alone, without a session; called twice, twice as deep."""
    undos: list[Undo] = []

    def run(verbose: bool = False, **overrides: Any) -> Undo:
        undos.append(functions.apply(o1_plan(**overrides), verbose))
        return undos[-1]

    yield run
    for undo in reversed(undos):
        undo()
