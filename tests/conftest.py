"""Shared set-up: one thread, fixed seeds, no casts left on by the test before, and what a marker means."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from mpinit import native_autocast, session
from mpinit.functions import user_functions

hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device; run ``nightly`` ones only when asked for by name."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    not_tonight = pytest.mark.skip(reason="a long run; select it with -m nightly")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "nightly" in item.keywords and "nightly" not in config.option.markexpr:
            item.add_marker(not_tonight)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    registered = list(user_functions.REGISTERED)
    yield
    for left_over in reversed(session.live()):
        left_over.undo()
    user_functions.REGISTERED[:] = registered
    native_autocast.set_flags(dict.fromkeys(native_autocast.device_types(), False))
