"""CONTRIBUTING: every room, file and name it sends people to exists, and it is one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpinit.plan
from mpinit.basics import user_warnings
from mpinit.scaling import scaler

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"\b(?:mpinit|tests|configs)/[\w/.]*|\b[A-Z]+\.md\b", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_every_room_and_file_exists(path: str) -> None:
    target = ROOT / path.rstrip(".")
    assert target.is_dir() if path.endswith("/") else target.exists()


def test_every_name_exists() -> None:
    assert {"Masters", "warn_user"} <= set(re.findall(r"`(\w+)`", TEXT))
    assert mpinit.plan.Masters and user_warnings.warn_user and scaler.Scaling


def test_every_room_of_the_house_is_on_the_map() -> None:
    package = ROOT / "mpinit"
    rooms = {p.name for p in package.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert not {room for room in rooms if f"mpinit/{room}/" not in TEXT}


def test_it_is_one_page_and_the_readme_leads_to_it() -> None:
    assert len(TEXT.splitlines()) <= 75
    assert "](CONTRIBUTING.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
