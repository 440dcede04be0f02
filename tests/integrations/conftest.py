"""Frameworks that load, and that forget between tests what they keep for a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from frameworks import let_torchvision_load

let_torchvision_load()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
