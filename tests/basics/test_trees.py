"""trees: floating tensors are cast wherever they hide; everything else keeps its identity, type and order.

Below the public face: ``cast_tree`` is called on random containers, without a model around them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpinit.basics.trees import cast_tree

HALF = torch.float16


class Pair(NamedTuple):
    left: Any
    right: Any


class PickyTuple(tuple[Any, ...]):
    """A tuple whose constructor does not take its items."""

    note: str

    def __new__(cls, left: Any, right: Any) -> PickyTuple:
        made = super().__new__(cls, (left, right))
        made.note = "kept"
        return made


class NotedList(list[Any]):
    note = ""


class NotedDict(dict[str, Any]):
    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note


class OwnMapping(MutableMapping[str, Any]):
    """A mapping over a dict of its own, whose constructor takes none."""

    def __init__(self) -> None:
        self._items: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclasses.dataclass
class Batch:
    x: Any
    n: int = 1
    late: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBatch:
    x: Any
    n: int = 1


def floats() -> torch.Tensor:
    return torch.ones(2)


LEAVES = [
    torch.ones(2, dtype=torch.int64),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, dtype=HALF),
    np.ones(2),
    "text",
    None,
    1.5,
    torch.Size([1, 2]),
    object(),
    torch.nn.Linear(1, 1),
    Batch,
    {1, 2},
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_non_floating_values_keep_their_identity(leaf: Any) -> None:
    assert cast_tree(leaf, HALF) is leaf
    for box in ([leaf], (leaf,), {"a": leaf}, Pair(leaf, leaf), Batch(leaf), collections.OrderedDict(a=leaf)):
        assert cast_tree(box, HALF) is box


def filled(box: Any, value: Any) -> Any:
    box["z"], box["a"] = value, 3
    return box


CONTAINERS = {
    "list": lambda x: [x, 3],
    "tuple": lambda x: (x, 3),
    "dict": lambda x: {"z": x, "a": 3},
    "namedtuple": lambda x: Pair(x, 3),
    "picky tuple": lambda x: PickyTuple(x, 3),
    "list subclass": lambda x: NotedList([x, 3]),
    "defaultdict": lambda x: filled(collections.defaultdict(list), x),
    "UserDict": lambda x: collections.UserDict(z=x, a=3),
    "dict subclass": lambda x: filled(NotedDict("kept"), x),
    "own mapping": lambda x: filled(OwnMapping(), x),
    "dataclass": lambda x: Batch(x, 3),
    "frozen dataclass": lambda x: FrozenBatch(x, 3),
}


def parts(box: Any) -> list[Any]:
    if isinstance(box, Mapping):
        return list(box.values())
    if dataclasses.is_dataclass(box):
        return [box.x, box.n]  # type: ignore[attr-defined]
    return list(box)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_container_keeps_its_type_and_the_original_is_untouched(make: Any) -> None:
    tensor = floats()
    box = make(tensor)
    cast = cast_tree(box, HALF)
    assert cast is not box
    assert type(cast) is type(box)
    assert parts(cast)[0].dtype is HALF
    assert parts(cast)[1] == 3
    assert parts(box)[0] is tensor
    if isinstance(box, Mapping):
        assert list(cast) == ["z", "a"]


def test_attributes_beside_the_items_are_kept() -> None:
    noted = NotedList([floats()])
    noted.note = "kept"
    made = filled(NotedDict("kept"), floats())
    default = filled(collections.defaultdict(list), floats())
    for box in (noted, made, PickyTuple(floats(), 1)):
        assert cast_tree(box, HALF).note == "kept"
    assert cast_tree(default, HALF).default_factory is list


def test_results_of_torch_functions_are_walked() -> None:
    result = torch.max(torch.ones(2, 2), dim=0)
    cast = cast_tree(result, HALF)
    assert type(cast) is type(result)
    assert cast.values.dtype is HALF
    assert cast.indices is result.indices


def test_packed_sequences_are_walked() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([floats(), torch.ones(1)])
    cast = cast_tree([packed], HALF)[0]
    assert cast.data.dtype is HALF
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)


def test_an_object_of_another_class_is_left_alone() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x = floats()

        def to(self, dtype: torch.dtype) -> None:
            raise ValueError(dtype)

    box = Graph()
    assert cast_tree(box, HALF) is box
    assert box.x.dtype is torch.float32


leaves = st.sampled_from(["float", "int", "text"]).map(
    lambda kind: {"float": torch.ones(1), "int": torch.arange(2), "text": "text"}[kind]
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Batch, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


def flat(tree: Any) -> Iterator[Any]:
    """The leaves of a tree and the types of its containers, depth first: what a cast must not reorder."""
    if not isinstance(tree, (dict, list, tuple, Batch)):
        yield tree
        return
    yield type(tree)
    yield from tree if isinstance(tree, dict) else ()
    for value in parts(tree)[: 1 if isinstance(tree, Batch) else None]:
        yield from flat(value)


@given(trees, st.sampled_from([torch.float16, torch.bfloat16]))
def test_any_tree_keeps_its_shape_and_its_other_leaves(tree: Any, dtype: torch.dtype) -> None:
    before = list(flat(tree))
    cast = cast_tree(tree, dtype)
    after = list(flat(cast))
    assert len(before) == len(after)
    has_float = False
    for old, new in zip(before, after, strict=True):
        if isinstance(old, torch.Tensor) and old.is_floating_point():
            has_float = True
            assert new.dtype is dtype
            assert old.dtype is torch.float32
        else:
            assert new is old
    assert (cast is tree) == (not has_float)
    assert cast_tree(cast, dtype) is cast
