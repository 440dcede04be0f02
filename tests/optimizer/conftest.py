"""Which of the law's cases are known to fail: they have to be struck off the list when they pass."""

from __future__ import annotations

import pytest
from law_open import NOT_RUN, is_open_case


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the open cases to fail."""
    for item in items:
        if item.path.name.startswith("test_law_") and is_open_case(item.name):
            runs = not item.name.startswith(NOT_RUN)
            item.add_marker(pytest.mark.xfail(strict=True, run=runs, reason="issue 10: not so yet"))
