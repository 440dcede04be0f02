"""The operations that torch dispatches, and the order of nodes in the autograd graph.

Autograd numbers its nodes in the order in which a forward pass creates them. The numbers are not public.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# AccumulateGrad nodes have no number of their own in the order of the forward; theirs are at least this.
_NO_NUMBER: Final = 2**63

Run = Callable[[], Any]


class OperationsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that calls ``around`` for every operation of this thread and of the backward passes that it starts.

    Args:
        around: called with the operation, its arguments, its keyword arguments, and a function that runs it. It
            returns the operation's result.
    """

    def __init__(self, around: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Run], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            # Autograd saves the 2.0 of loss * 2.0 as a tensor, which this mode receives as the Python number, and no
            # kernel accepts that. In torch 2.11 to 2.13.
            return args[0]
        return self._around(func, args, named, lambda: func(*args, **named))


def next_number() -> int:
    """Return the number of the next node of the graph."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


class Node(NamedTuple):
    """A node of the graph: its name, its number, and the leaf whose gradient it accumulates, or None."""

    name: str
    number: int
    leaf: torch.Tensor | None


def running_node() -> Node | None:
    """Return the node whose backward runs in this thread; None outside of a backward pass."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr()
    return Node(type(node).__name__, number, getattr(node, "variable", None) if number >= _NO_NUMBER else None)


def order_of_leaves(result: torch.Tensor, at_most: int = 20_000) -> dict[torch.Tensor, int]:
    """Compute the order in which a backward pass from ``result`` reaches the leaves, also after that pass.

    Returns:
        Each leaf that requires gradients -> a number; lower numbers are reached earlier. Empty if the graph has no
        leaves, or more than ``at_most`` nodes.
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
