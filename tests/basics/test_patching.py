"""patching: reverting puts back exactly what stood there, in reverse, whatever raises on the way."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpinit.basics.patching import UndoStack, set_attribute


def test_an_own_attribute_comes_back_as_the_same_object() -> None:
    before = object()
    box = types.SimpleNamespace(a=before)
    revert = set_attribute(box, "a", 2)
    assert box.a == 2
    revert()
    assert box.a is before


def test_an_absent_attribute_is_deleted_again() -> None:
    box = types.SimpleNamespace()
    revert = set_attribute(box, "a", None)
    assert box.a is None
    revert()
    assert not hasattr(box, "a")


def test_an_inherited_attribute_is_not_copied_down() -> None:
    class Base:
        def forward(self) -> str:
            return "base"

    class Child(Base):
        pass

    child = Child()
    for owner in (Child, child):
        revert = set_attribute(owner, "forward", lambda *_: "patched")
        assert child.forward() == "patched"
        revert()
        assert "forward" not in vars(owner)
        assert child.forward() == "base"


def test_descriptors_of_a_class_come_back_unbound() -> None:
    class Owner:
        @staticmethod
        def still() -> int:
            return 1

        @classmethod
        def of_class(cls) -> type:
            return cls

    for name in ("still", "of_class"):
        before = vars(Owner)[name]
        set_attribute(Owner, name, lambda: None)()
        assert vars(Owner)[name] is before


def test_none_is_a_value_like_any_other() -> None:
    box = types.SimpleNamespace(a=None)
    set_attribute(box, "a", 1)()
    assert vars(box) == {"a": None}


def test_reverting_after_somebody_deleted_it_does_not_raise() -> None:
    module = torch.nn.Linear(1, 1)
    revert = set_attribute(module, "forward", lambda x: x)
    del module.forward
    revert()
    assert "forward" not in vars(module)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers()), max_size=20))
def test_any_sequence_of_patches_unwinds_to_the_start(patches: list[tuple[str, int]]) -> None:
    box = types.SimpleNamespace(a=0)
    stack = UndoStack()
    for name, value in patches:
        stack.push(set_attribute(box, name, value))
    assert len(stack) == len(patches)
    stack.unwind()
    assert vars(box) == {"a": 0}
    assert len(stack) == 0


def test_undos_run_last_in_first_out_and_only_once() -> None:
    order: list[int] = []
    stack = UndoStack()
    for number in range(3):
        stack.push(lambda number=number: order.append(number))  # type: ignore[misc]
    stack.unwind()
    stack.unwind()
    assert order == [2, 1, 0]


def test_every_undo_runs_and_the_first_error_is_the_one_raised() -> None:
    order: list[str] = []

    def fail(name: str) -> None:
        order.append(name)
        raise RuntimeError(name)

    stack = UndoStack()
    stack.push(lambda: order.append("last"))
    stack.push(lambda: fail("second"))
    stack.push(lambda: fail("first"))
    with pytest.raises(RuntimeError, match="first"):
        stack.unwind()
    assert order == ["first", "second", "last"]
    assert len(stack) == 0
