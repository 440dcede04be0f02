"""Frameworks that load, and that forget between tests what they keep for a process; every level."""

from collections.abc import Iterator
from typing import Any

import pytest
from frameworks import LEVELS, let_torchvision_load

let_torchvision_load()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"verbosity": 0, **LEVELS[request.param]}
