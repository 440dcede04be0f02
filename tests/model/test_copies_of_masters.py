"""Copies of initialised models: float32 models with the masters' bits, which are nobody's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from averaged_nets import KINDS, Net, masters_of, start, step
from torch import Tensor, nn

import mpinit


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_a_float32_model(kind: str) -> None:
    model, optimizer = start(kind)
    step(model, optimizer)
    for part in (model, model.first):
        twin = copy.deepcopy(part)
        assert {tensor.dtype for tensor in twin.parameters()} == {torch.float32}
        assert all(torch.equal(twin.state_dict()[name], value) for name, value in part.state_dict().items())
    model.eval()
    twin = copy.deepcopy(model)
    plain = Net().eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(twin(x), plain(x))
    assert torch.equal(twin(x.half()), plain(x.half().float()))
    assert not twin.frozen.requires_grad
    assert twin.norm.weight is not model.norm.weight
    twin.half()
    assert twin.first.weight.dtype is torch.float16, "a copy is nobody's"


@pytest.mark.parametrize("kind", KINDS)
def test_what_of_a_copy_goes_into_files_is_ordinary(kind: str) -> None:
    model, _ = start(kind)
    average = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor}
    for twin in (pickle.loads(pickle.dumps(average)), copy.deepcopy(pickle.loads(pickle.dumps(average)))):
        assert {type(parameter) for parameter in twin.parameters()} == {nn.Parameter}
        assert all(map(torch.equal, twin.parameters(), average.parameters()))
    again = copy.deepcopy(average)
    with torch.no_grad():
        again.first.weight.zero_()
        again.last.weight.copy_(model.state_dict()["last.weight"])
    assert average.first.weight.any()
    assert torch.equal(again.last.weight, masters_of(model)["last.weight"])
    for name, value in average.state_dict().items():
        assert copy.deepcopy(value).equal(loaded[name])


def test_a_copy_trains_and_can_be_initialised_itself() -> None:
    model, _ = start("O5")
    twin = copy.deepcopy(model)
    assert type(twin.first.weight) is nn.Parameter
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    twin(torch.randn(4, 8)).square().mean().backward()
    before = twin.first.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(twin.first.weight, before)
    mpinit.initialize(twin, optimizer, "O2", verbosity=0)
    step(twin, optimizer)
    mpinit.undo(twin)
    assert twin.first.weight.dtype is torch.float32


# torch 2.11's compiler reads it of every tensor that it goes on with after a break of the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_copy_compiles() -> None:
    model, _ = start("O5")
    twin = copy.deepcopy(model).eval()
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    compiled = torch.compile(twin, backend="aot_eager")
    torch.testing.assert_close(compiled(x), twin(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x))


def test_tied_weights_stay_tied_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5", verbosity=0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight.dtype is torch.float32


def test_a_copy_at_o3_is_16_bit_as_the_model_is() -> None:
    model = Net()
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O3", verbosity=0)
    twin = copy.deepcopy(model)
    assert type(twin.first.weight) is nn.Parameter
    assert twin.first.weight.dtype is torch.float16


def test_a_module_with_a_deepcopy_of_its_own() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            twin = Own(self.in_features, self.out_features)
            twin.weight = copy.deepcopy(self.weight, memo)
            twin.bias = copy.deepcopy(self.bias, memo)
            return twin

    model = nn.Sequential(Own(3, 3), nn.Linear(3, 3))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5", verbosity=0)
    twin = copy.deepcopy(model)
    assert type(twin[0]) is Own
    assert torch.equal(twin[0].weight, model.state_dict()["0.weight"])
