"""Batches of other libraries' kinds: their integers are never cast, and their floats are."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inputs import F16, F32, Moving, X, at_o2
from torch import Tensor, nn


class AnyTo(Moving):
    """Hands on whatever ``to`` is given, integers included."""

    def to(self, *args: Any, **kwargs: Any) -> AnyTo:
        return AnyTo(self.x.to(*args, **kwargs), self.ids.to(*args, **kwargs))


class InPlaceTo(Moving):
    def to(self, *args: Any, **kwargs: Any) -> InPlaceTo:
        self.x, self.ids = self.x.to(*args, **kwargs), self.ids.to(*args, **kwargs)
        return self


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: a mapping that moves in place."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Linked(Moving):
    """Knows itself."""

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        super().__init__(x, ids)
        self.whole = self


BATCHES = {
    "to a device": Moving,
    "to anything": AnyTo,
    "to in place": InPlaceTo,
    "an encoding": lambda x, ids: Encoding(x=x, ids=ids),
    "linked": Linked,
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batchs_integers_are_never_cast_and_its_floats_are(kind: str) -> None:
    ids = torch.arange(40_000, 40_004)  # beyond what float16 can hold
    batch = BATCHES[kind](X.clone(), ids)
    seen: list[Any] = []

    def forward(linear: nn.Module, given: Any) -> Tensor:
        seen.extend([type(given), given.x.dtype, given.ids])
        return linear(given.x)

    assert at_o2(forward)(batch).dtype is F32
    assert seen == [type(batch), F16, ids] and seen[2] is ids
    assert batch.x.dtype is F32 and torch.equal(batch.x, X) and batch.ids is ids


def test_an_object_without_attributes_that_says_it_takes_a_dtype_converts_itself() -> None:
    class Opaque:
        __slots__ = ()
        dtype = F32

        def to(self, dtype: torch.dtype) -> Any:
            return SimpleNamespace(dtype=dtype)

    assert at_o2(lambda linear, box: box.dtype)(Opaque()) is F16


class Store(MutableMapping[str, Any]):
    """As torch_geometric keeps a graph's tensors: a mapping that knows its graph."""

    def __init__(self, parent: Any, key: str | None) -> None:
        self.__dict__["_mapping"], self.__dict__["_parent"], self._key = {}, parent, key

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __copy__(self) -> Store:
        twin = Store(self._parent, self._key)
        twin._mapping.update(self._mapping)
        return twin


class Graph:
    """As torch_geometric's Data: attributes are entries of a store, and ``to`` moves in place."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__["_store"] = Store(self, None)
        self._store.update(entries)

    def __getattr__(self, name: str) -> Any:
        if name == "_store":
            raise AttributeError(name)
        try:
            return self._store[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value

    def __delattr__(self, name: str) -> None:
        del self._store[name]

    def __copy__(self) -> Graph:
        twin = Graph.__new__(Graph)
        twin.__dict__["_store"] = copy.copy(self._store)
        twin._store.__dict__["_parent"] = twin
        return twin

    @property
    def stores(self) -> list[Store]:
        return [self._store]

    def to(self, device: Any) -> Graph:
        for key, value in self._store.items():
            self._store[key] = value.to(device=device)
        return self


def through_a_graph(graph: Any) -> None:
    edges = graph.edge_index

    def forward(linear: nn.Module, given: Any) -> Any:
        assert type(given) is type(graph)
        assert given.x.dtype is F16 and given.edge_index is edges
        given.out = linear(given.x)
        del given.extra
        return given.out

    out = at_o2(forward)(graph)
    assert out.dtype is graph.out.dtype is F32
    assert torch.equal(graph.x, X) and graph.edge_index is edges and not hasattr(graph, "extra")


def test_a_graph_that_keeps_its_tensors_in_stores() -> None:
    through_a_graph(Graph(x=X.clone(), edge_index=torch.tensor([[0], [0]]), extra=torch.ones(1)))


def test_torch_geometrics_own_graphs() -> None:
    data = pytest.importorskip("torch_geometric.data")
    parts = {"x": X.clone(), "edge_index": torch.tensor([[0], [0]]), "extra": torch.ones(1)}
    through_a_graph(data.Data(**parts))
    batch = data.Batch.from_data_list([data.Data(**parts), data.Data(**parts)])
    seen: list[Any] = []
    at_o2(lambda linear, b: seen.extend([b.x.dtype, b.batch.dtype, b.num_graphs, b[1].x.dtype]))(batch)
    assert seen == [F16, torch.int64, 2, F16] and batch.x.dtype is F32
    hetero = data.HeteroData()
    hetero["a"].x, hetero["a", "to", "a"].edge_index = X.clone(), torch.tensor([[0], [0]])

    def forward(linear: nn.Module, graph: Any) -> None:
        graph["a"].y = linear(graph["a"].x)
        graph["b"].z = graph["a"].y

    at_o2(forward)(hetero)
    assert hetero["a"].x.dtype is hetero["a"].y.dtype is hetero["b"].z.dtype is F32
    assert hetero["a", "to", "a"].edge_index.dtype is torch.int64


def test_trees_that_hold_themselves() -> None:
    items: list[Any] = [X.clone()]
    items.append(items)
    box: dict[str, Any] = {"items": items, "x": X.clone()}
    box["box"] = box

    def forward(linear: nn.Module, given: dict[str, Any]) -> Any:
        assert given["box"] is given and given["items"][1] is given["items"]
        assert given["x"].dtype is given["box"]["items"][1][0].dtype is F16
        given["y"] = linear(given["x"])
        return given

    returned = at_o2(forward)(box)
    assert box["y"].dtype is F32 and box["box"] is box and box["items"][1] is items
    assert returned["x"].dtype is F32 and returned["box"] is returned
