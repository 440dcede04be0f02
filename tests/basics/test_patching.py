"""patching: reverting puts back exactly what stood there, in reverse, whatever raises on the way."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interruptions import Interrupted, count_lines, interrupt_at

from mpinit.basics.patching import UndoStack, set_attribute


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


def test_reverting_after_somebody_deleted_it_does_not_raise() -> None:
    module = torch.nn.Linear(1, 1)
    revert = set_attribute(module, "forward", lambda x: x)
    del module.forward
    revert()
    assert "forward" not in vars(module)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers()), max_size=20))
def test_any_sequence_of_patches_unwinds_to_the_start(patches: list[tuple[str, int | None]]) -> None:
    """The ``a`` that is there is itself again, whatever it is; the ``b`` and ``c`` that are not are deleted."""
    before = object()
    box = types.SimpleNamespace(a=before)
    stack = UndoStack()
    for name, value in patches:
        stack.push(set_attribute(box, name, value))
    assert len(stack) == len(patches)
    stack.unwind()
    assert vars(box) == {"a": before}
    assert len(stack) == 0


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
    assert order == ["first", "first", "second", "second", "last"], "what fails is tried twice"
    assert len(stack) == 2, "and kept for the next time"


def test_an_undo_that_failed_runs_again_when_asked_again() -> None:
    failures, order = iter([True, True, False]), []

    def fails_twice() -> None:
        order.append("failing")
        if next(failures):
            raise RuntimeError("not yet")

    stack = UndoStack()
    stack.push(lambda: order.append("old"))
    stack.push(fails_twice)
    with pytest.raises(RuntimeError, match="not yet"):
        stack.unwind()
    stack.unwind()
    assert order == ["failing", "failing", "old", "failing"]
    assert len(stack) == 0


def test_unwinding_interrupted_at_any_line_goes_on_where_it_was() -> None:
    def boxes() -> tuple[UndoStack, types.SimpleNamespace]:
        stack, box = UndoStack(), types.SimpleNamespace(a=0)
        for number in range(3):
            stack.push(set_attribute(box, "a", number + 1))
            stack.push(set_attribute(box, "b", number))
        return stack, box

    stack, _ = boxes()
    lines = count_lines(stack.unwind)
    for line in range(lines):
        stack, box = boxes()
        with pytest.raises(Interrupted):
            interrupt_at(line, stack.unwind)
        stack.unwind()
        assert vars(box) == {"a": 0}, f"interrupted at line {line}"


def test_the_way_back_is_on_the_stack_before_anything_changes() -> None:
    first = UndoStack()
    for line in range(count_lines(lambda: first.set_attribute(types.SimpleNamespace(a=1), "a", 2))):
        box, stack = types.SimpleNamespace(a=1), UndoStack()
        with pytest.raises(Interrupted):
            interrupt_at(line, lambda stack=stack, box=box: stack.set_attribute(box, "a", 2))
        stack.unwind()
        assert vars(box) == {"a": 1}, f"interrupted at line {line}"
