"""One launch of processes for what is selected of a file."""

import pytest
from processes import launch


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """What came of each test of the file."""
    here = (item for item in request.session.items if item.path == request.path)
    chosen = [item for item in here if not item.get_closest_marker("skip")]
    return launch(request.path, [item.callspec.params["name"] for item in chosen if "outcomes" in item.fixturenames])
