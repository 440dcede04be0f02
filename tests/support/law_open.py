"""What the law asks for and is not so yet, in issue 10's words; the list shrinks to nothing."""

from __future__ import annotations

import os

from law_world import Setup

# (the beginning of a kind of action's or of a look's name, "split", "full", "none" or "any" masters): what is wrong.
OPEN: dict[tuple[str, str], str] = {
    ("see:groups", "split"): "whoever iterates over param_groups, split masters included",
}


def masters_of(setup: Setup) -> str:
    """ "split", "full" or "none"."""
    return "split" if setup.splits else ("full" if setup.has_masters else "none")


def is_open(kind: str, setup: Setup) -> bool:
    """Whether this kind of action, or look, is known to go wrong with this set-up."""
    if os.environ.get("LAW_OPEN"):
        return False
    return any(kind.startswith(name) and where in ("any", masters_of(setup)) for name, where in OPEN)
