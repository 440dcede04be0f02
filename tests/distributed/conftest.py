"""One launch of processes for what is selected of a file."""

import pytest
from processes import launch


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return "ok" or the error of each test of the file."""
    here = (item for item in request.session.items if item.path == request.path)
    chosen = [item for item in here if not item.get_closest_marker("skip") and "outcomes" in item.fixturenames]
    return launch(request.path, {item.callspec.params["name"]: item.function.ranks for item in chosen})
