"""Every operation that torch dispatches, and the places of operations in the order of the autograd graph.

The numbers that autograd gives its nodes rise in the order in which a forward pass makes them; none of it is public.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What stands in for the number of a node that has none, accumulating a leaf's gradient.
_NO_NUMBER: Final = 2**63

Run = Callable[[], Any]


@final
class OperationsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every operation of this thread, and of backward passes it starts, goes through ``around``.

    That is called with the operation, its arguments and a function that runs it, and returns the operation's result.
    """

    def __init__(self, around: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Run], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        return self._around(func, args, named, lambda: func(*args, **named))


def next_number() -> int:
    """The number that the next node of the graph is going to have."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


class Node(NamedTuple):
    """A node of the graph: its name, its number, and the tensor whose gradient it accumulates where it does that."""

    name: str
    number: int
    leaf: torch.Tensor | None


def running_node() -> Node | None:
    """The node whose backward runs in this thread; None outside of every backward pass."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr()
    return Node(type(node).__name__, number, getattr(node, "variable", None) if number >= _NO_NUMBER else None)


def order_of_leaves(result: torch.Tensor, at_most: int = 20_000) -> dict[torch.Tensor, int]:
    """In which order a backward pass from ``result`` comes to the leaves, also where that pass is over.

    Each leaf that requires gradients with a number; the lower, the earlier. Empty where the graph says nothing, or
    has more than ``at_most`` nodes.
    """
    found: dict[torch.Tensor, int] = {}
    if result.grad_fn is None:
        return found
    seen: set[Any] = {result.grad_fn}
    waiting: list[Any] = [(result.grad_fn, 0)]
    while waiting:
        node, user = waiting.pop()
        number = node._sequence_nr()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[leaf] = min(found.get(leaf, 0), -user)
        for child, _ in node.next_functions:
            if child is None:
                continue
            is_leaf = hasattr(child, "variable")
            if is_leaf or child not in seen:
                seen.add(child)
                waiting.append((child, number if number < _NO_NUMBER else user))
        if len(seen) > at_most:
            return {}
    return found
