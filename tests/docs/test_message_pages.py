"""The pages of messages: every error and warning in the code is on one, and every row of the other is in the code."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import messages  # noqa: E402

ROWS = re.findall(r"^\| (`.+?`(?:, `.+?`)*)", (ROOT / "docs/reference/messages.md").read_text("utf-8"), re.MULTILINE)
BEGINNINGS = [text for row in ROWS for text in re.findall(r"`(.+?)`", row)]

# What is raised with a text that was made elsewhere, or that names a thing alone as Python's own errors do.
WITHOUT_A_TEXT = {
    "cli/convert.py: _take_scales: ValueError",
    "cli/explain.py: load: ValueError",
    "compat/apex/amp/frontend.py: load_state_dict: ValueError",
    "settings/properties.py: build: ValueError",
    "settings/resolve.py: _level_of: ValueError",
    "settings/resolve.py: _read_toml: OSError",
    "initialization.py: initialize: with_traceback",
    "settings/resolve.py: read_settings: ValueError",
}


@functools.cache
def collected() -> list[messages.Message]:
    """The messages of the code, which takes a second."""
    return messages.collect()


def sites() -> set[str]:
    """Modules and functions that raise or warn, and yield no message to the page."""
    found = set()
    for path in sorted(messages.PACKAGE.rglob("*.py")):
        names = messages.names_of(path)
        for scope in messages.functions_of(messages.parsed(path)):
            for kind, argument in messages.raised(scope):
                if not any(map(messages.says_something, messages.texts(argument, names.inside(scope)))):
                    found.add(f"{path.relative_to(messages.PACKAGE).as_posix()}: {scope.name}: {kind}")
    return found


def test_every_error_and_warning_has_a_text_on_the_page() -> None:
    assert sites() == WITHOUT_A_TEXT


def test_every_room_with_messages_has_a_heading() -> None:
    rooms = {room for names in messages.ROOMS.values() for room in names}
    assert {message.module.split("/")[0] for message in collected()} <= rooms
    assert len(collected()) > 200


def pattern(text: str) -> str:
    """What a row shows, as a search in the messages: its dots and numbers stand for anything."""
    return ".*?".join(
        re.escape(part) for part in re.split(r"\.\.\.|\b\d+\b|\bAdam\b|\bDistributedDataParallel\b", text)
    )


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_row_of_the_explained_ones_is_a_message_of_the_code(beginning: str) -> None:
    assert any(re.search(pattern(beginning), message.text.replace("`", "")) for message in collected())


def test_the_explained_ones_are_found() -> None:
    assert len(BEGINNINGS) >= 20


def test_pages_are_made_of_the_tree_that_the_generator_lies_in(tmp_path: Path) -> None:
    (tmp_path / "mpinit.py").write_text("raise AssertionError('the package of another tree')\n", "utf-8")
    made = "import runpy, sys; print(runpy.run_path(sys.argv[1], run_name='generate')['mpinit'].__file__)"
    paths = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", made, str(ROOT / "docs/generate.py")]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, cwd=tmp_path, check=False)
    assert found.stdout.strip() == str(ROOT / "mpinit/__init__.py"), found.stderr
