"""Objects with tensors as inputs: graphs, tensordicts, classes of torch's pytree, and those that are registered."""

import copy
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks import needs
from models import Parts, quietly
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils import _pytree

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Points:
    """Points in space with a number each."""

    def __init__(self, positions: Tensor, ids: Tensor) -> None:
        self.positions, self.ids = positions, ids


@pytest.fixture
def registered_in_pytree() -> Iterator[None]:
    _pytree.register_pytree_node(Points, lambda p: ([p.positions, p.ids], None), lambda parts, _: Points(*parts))
    yield
    _pytree.SUPPORTED_NODES.pop(Points)


@pytest.fixture
def registered() -> Iterator[None]:
    mpinit.register_input(Points, lambda points, dtype: Points(points.positions.to(dtype), points.ids))
    yield
    mpinit.register_input(Points, None)


def reader(level: str = "O2") -> Any:
    def forward(self: Any, points: Any) -> Any:
        assert points.positions.dtype is self.linear.weight.dtype and points.ids.dtype is torch.int64
        return self.linear(points.positions) + points.ids[:, None]

    torch.manual_seed(0)
    return Parts(forward, linear=nn.Linear(3, 2))


def points() -> Points:
    return Points(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(4))


@pytest.mark.parametrize("how", ["registered_in_pytree", "registered"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_objects_of_known_classes_are_cast(how: str, level: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(how)
    model, given = reader(), points()
    expected = model(given)
    quietly(model, level)
    before = given.positions
    for argument in (given, [given], {"points": given}):
        inner = model if argument is given else Parts(lambda self, nest: nest, linear=nn.Linear(2, 2))
        if argument is given:
            output = inner(argument)
            assert output.dtype is F32 and torch.allclose(output, expected, atol=0.05)
        assert given.positions is before and given.positions.dtype is F32


@pytest.mark.usefixtures("registered_in_pytree")
def test_writes_and_results_of_pytree_objects_reach_the_caller() -> None:
    def forward(self: Any, given: Any) -> Any:
        given.score = self.linear(given.positions)
        given.positions[0] = 7.0
        return given

    model, given = quietly(Parts(forward, linear=nn.Linear(3, 2))), points()
    before = given.positions.clone()
    returned = model(given)
    assert returned is given
    assert given.score.dtype is F32
    assert torch.equal(given.positions[1:], before[1:]) and given.positions[0].eq(7).all()


@pytest.mark.usefixtures("registered")
def test_registered_casts_include_subclasses_and_containers() -> None:
    class Cloud(Points):
        pass

    @dataclasses.dataclass
    class Batch:
        points: Points

    def forward(self: Any, batch: Batch) -> Points:
        assert batch.points.positions.dtype is F16
        return Points(self.linear(batch.points.positions), batch.points.ids)

    model, given = quietly(Parts(forward, linear=nn.Linear(3, 3))), points()
    assert model(Batch(Cloud(given.positions, given.ids))).positions.dtype is F32


def test_error_of_an_object_of_unknown_class_has_ways_out() -> None:
    model = quietly(Parts(lambda self, box: self.linear(box.x), linear=nn.Linear(3, 2)))
    with pytest.raises(RuntimeError, match=r"same dtype(.|\n)*mpinit\.register_input"):
        model(SimpleNamespace(x=torch.ones(1, 3)))


@pytest.mark.parametrize("cls", [3, Tensor, nn.Linear, "Points"])
def test_what_is_no_class_of_objects_is_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match="needs a class"):
        mpinit.register_input(cls, lambda value, dtype: value)
    with pytest.raises(TypeError, match="needs a function"):
        mpinit.register_input(Points, 3)  # type: ignore[arg-type]


def test_packed_sequences_give_float32s_numbers() -> None:
    def forward(self: Any, packed: Any) -> Any:
        assert packed.data.dtype is self.lstm.weight_ih_l0.dtype
        return pad_packed_sequence(self.lstm(packed)[0])[0]

    torch.manual_seed(0)
    model = Parts(forward, lstm=nn.LSTM(3, 4))
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    expected = model(packed)
    quietly(model)
    assert torch.allclose(model(packed), expected, atol=0.01)


def graphs() -> Any:
    data = needs("torch_geometric.data")
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    many = [data.Data(x=torch.randn(3, 4, generator=generator), edge_index=edges, y=torch.arange(3)) for _ in range(2)]
    return data, many


@pytest.mark.parametrize("kind", ["Data", "Batch", "HeteroData"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_graphs_of_torch_geometric_are_cast_in_floating_tensors(kind: str, level: str) -> None:
    data, many = graphs()
    if kind == "HeteroData":
        graph = data.HeteroData()
        graph["paper"].x, graph["paper", "cites", "paper"].edge_index = many[0].x, many[0].edge_index
    else:
        graph = many[0] if kind == "Data" else data.Batch.from_data_list(many)

    def forward(self: Any, graph: Any) -> Any:
        is_hetero = kind == "HeteroData"
        nodes = graph["paper"] if is_hetero else graph
        edges = (graph["paper", "cites", "paper"] if is_hetero else graph).edge_index
        assert nodes.x.dtype is self.linear.weight.dtype and edges.dtype is torch.int64
        hidden = self.linear(nodes.x)
        nodes.h = hidden.index_add(0, edges[1], hidden[edges[0]])
        return graph

    torch.manual_seed(0)
    model = Parts(forward, linear=nn.Linear(4, 2))
    nodes = graph["paper"] if kind == "HeteroData" else graph
    x = nodes.x
    twin = copy.copy(graph)
    plain = model(twin)
    expected = (plain["paper"] if kind == "HeteroData" else plain).h
    quietly(model, level)
    returned = model(graph)
    assert returned is graph and nodes.x is x and x.dtype is F32
    assert nodes.h.dtype is F32 and torch.allclose(nodes.h, expected, atol=0.1)


def test_graphs_without_floating_tensors_are_passed_as_they_are() -> None:
    data, _ = graphs()
    graph = data.Data(edge_index=torch.tensor([[0], [1]]), z=torch.arange(2))
    model = quietly(Parts(lambda self, given: self.table(given.z) * float(given is graph), table=nn.Embedding(2, 3)))
    assert model(graph).abs().sum() > 0


def test_tensordicts_are_cast() -> None:
    tensordict = needs("tensordict")
    given = tensordict.TensorDict({"x": torch.randn(2, 3), "n": {"ids": torch.arange(2)}}, batch_size=[2])

    def forward(self: Any, batch: Any) -> Any:
        assert batch["x"].dtype is F16 and batch["n", "ids"].dtype is torch.int64
        batch["y"] = self.linear(batch["x"])
        return batch

    model = quietly(Parts(forward, linear=nn.Linear(3, 2)))
    returned = model(given)
    assert given["x"].dtype is given["y"].dtype is returned["y"].dtype is F32


def test_batch_encodings_of_transformers_are_cast() -> None:
    transformers = needs("transformers")
    given = transformers.BatchEncoding({"pixels": torch.randn(2, 3), "ids": torch.arange(2)})
    model = quietly(Parts(lambda self, batch: self.linear(batch["pixels"]), linear=nn.Linear(3, 2)))
    assert model(given).dtype is F32 and given["pixels"].dtype is F32


def test_caches_of_transformers_stay_the_callers() -> None:
    transformers = needs("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4), 0)

    def forward(self: Any, x: Tensor, cache: Any) -> Any:
        cache.update(self.linear(x)[None, None], x[None, None], 0)
        return cache

    model = quietly(Parts(forward, linear=nn.Linear(4, 4)), "O5")
    assert model(torch.randn(2, 4), cache) is cache
    assert cache.get_seq_length() == 4
