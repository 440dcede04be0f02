"""Frameworks that load, and that forget between tests what they keep for a process; every level.

All tests of this folder are long: ``make test-long`` installs the frameworks, ``make test`` does not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frameworks import LEVELS, is_installed, let_torchvision_load

let_torchvision_load()

FOLDER = Path(__file__).parent
# The framework that a file imports before its tests, which cannot skip then.
IMPORTS = {f"test_{name}.py": name for name in ("accelerate", "lightning", "timm", "transformers")}
IMPORTS["test_recipes.py"] = "transformers"
collect_ignore = [file for file, framework in IMPORTS.items() if not is_installed(framework)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what this folder has as long."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    if not is_installed("accelerate"):
        yield
        return
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"verbosity": 0, **LEVELS[request.param]}
