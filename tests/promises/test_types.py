"""What type checkers say of uses of the public functions: nothing of right ones, and something of each wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from mpinit.amp import initialize
from mpinit.settings.keywords import Keywords
from mpinit.settings.opt_levels import OPT_LEVELS
from mpinit.settings.properties import Properties

USES = Path(__file__).parent / "typed"
ROOT = Path(__file__).parents[2]


def complaints(checker: str, file: Path, cache: Path) -> set[int]:
    """The lines of ``file`` in which ``checker`` finds an error."""
    command = {
        "mypy": ["mypy", "--strict", "--no-error-summary", f"--cache-dir={cache}"],
        "pyright": ["pyright", f"--pythonpath={sys.executable}"],
    }[checker]
    done = subprocess.run([sys.executable, "-m", *command, str(file)], cwd=ROOT, capture_output=True, text=True)
    # pyright is a program for node, which its package fetches when it is first run.
    if checker == "pyright" and not re.search(r"^\d+ errors?, ", done.stdout, re.MULTILINE):
        pytest.skip(f"pyright does not start here: {(done.stderr or done.stdout).strip()[-200:]}")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(rf"{file.name}:(\d+):.*? error:? ", done.stdout)
    assert bool(found) is bool(done.returncode), done.stdout + done.stderr
    return set(map(int, found))


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_right_uses_and_refuse_wrong_ones(checker: str, tmp_path: Path) -> None:
    assert complaints(checker, USES / "right.py", tmp_path) == set()
    wrong = USES / "wrong.py"
    lines = wrong.read_text(encoding="utf-8").splitlines()
    assert complaints(checker, wrong, tmp_path) == {n for n, line in enumerate(lines, 1) if line.endswith("  # wrong")}


def test_every_property_and_keyword_is_spelt_out_for_type_checkers() -> None:
    own = set(initialize.__kwdefaults__) - Properties.model_fields.keys()
    assert set(Keywords.__annotations__) == own | Properties.model_fields.keys()
    assert list(get_type_hints(initialize)) is not None
    assert tuple(OPT_LEVELS) == ("O0", "O1", "O2", "O3", "O4", "O5")
