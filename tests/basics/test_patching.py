"""patching: reverting puts back exactly what stood there, in reverse, whatever raises on the way.

Below the public face: ``UndoStack`` has to be right at every line of an interruption, which public calls cannot
reach.
"""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interruptions import interrupt, places

from mpinit.basics.patching import UndoStack


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers()), max_size=20))
def test_any_sequence_of_patches_unwinds_to_the_start(patches: list[tuple[str, int | None]]) -> None:
    """Check that the undo restores the attribute ``a``, and deletes ``b`` and ``c``, which did not exist."""
    before = object()
    box = types.SimpleNamespace(a=before)
    stack = UndoStack()
    for name, value in patches:
        stack.set_attribute(box, name, value)
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
            stack.set_attribute(box, "a", number + 1)
            stack.set_attribute(box, "b", number)
        return stack, box

    for where in places(boxes()[0].unwind, "basics/"):
        stack, box = boxes()
        interrupt(where, stack.unwind)
        stack.unwind()
        assert vars(box) == {"a": 0}, f"interrupted at {where}"
