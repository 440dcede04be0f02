"""Patches of a module that are there as long as somebody needs them, whoever comes in between."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from mpinit.torch_internals.patches_on_import import PatchesOnImport


class Interrupting(ModuleType):
    """A module in which the garbage collector runs while a function is put back, and drops another who needed it."""

    patches: PatchesOnImport

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("one", "two") and self.patches is not None:
            self.patches.need_no_more("another")


def test_the_collector_may_take_patches_away_while_they_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Interrupting("interrupting")
    vars(module).update(patches=None, one=abs, two=max)
    monkeypatch.setitem(sys.modules, "interrupting", module)
    wrap = dict.fromkeys(("one", "two"), lambda inner, module: lambda *args: -inner(*args))
    patches = PatchesOnImport("interrupting", wrap)
    patches.need("me")
    assert (vars(module)["one"](-2), vars(module)["two"](1, 2)) == (-2, -2)
    vars(module)["patches"] = patches
    patches.need_no_more("me")
    assert (vars(module)["one"], vars(module)["two"]) == (abs, max)
    patches.need_no_more("me")
