"""``master_weights="model"``: casts made in one call of native code are those of torch's operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import equal_tensors
from torch import nn
from weights_in_forward import BF16, F32

import mpinit
from mpinit.torch_internals import float32_gradients
from mpinit.torch_internals.float32_gradients import casts_with_float32_gradients
from mpinit.torch_internals.one_pass import NativeCode


@pytest.fixture(scope="module")
def native() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPINIT_NATIVE", raising=False)
        module = NativeCode().wait()
    if module is None:
        pytest.skip("no C++ compiler here")
    return module


@pytest.fixture(params=["torch", "native"])
def casts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function, by either."""
    module = request.getfixturevalue("native") if request.param == "native" else None
    monkeypatch.setattr(float32_gradients, "NATIVE", SimpleNamespace(get=lambda: module))
    return casts_with_float32_gradients


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    dense = [torch.randn(8, 8).t(), torch.randn(3, 1).expand(3, 4), torch.randn(()), torch.randn(0, 3), torch.randn(5)]
    return [nn.Parameter(each, requires_grad=index != 4) for index, each in enumerate(dense)]


def test_they_have_the_numbers_and_the_layout_of_to(casts: Any) -> None:
    given = weights()
    for cast, weight in zip(casts(given, BF16), given, strict=True):
        expected = weight.to(BF16)
        assert cast.dtype is BF16 and torch.equal(cast, expected)
        assert cast.stride() == expected.stride()
        assert cast.requires_grad == weight.requires_grad
        assert cast.data_ptr() == 0 or cast.data_ptr() != weight.data_ptr()


def test_gradients_of_several_uses_add_up_in_float32(casts: Any) -> None:
    weight = nn.Parameter(torch.tensor([256.0]))
    (cast,) = casts([weight], BF16)
    (cast * 256 + cast).backward()
    assert weight.grad is not None and weight.grad.dtype is F32 and weight.grad.item() == 257


def test_a_weight_without_a_gradient_has_none_and_others_get_theirs(casts: Any) -> None:
    given = weights()
    made = casts(given, BF16)
    (made[0].sum() * 2 + made[2]).backward()
    assert given[1].grad is None and given[4].grad is None
    assert given[0].grad is not None and given[0].grad.eq(2).all() and given[2].grad == 1


def test_second_derivatives(casts: Any) -> None:
    weight = nn.Parameter(torch.tensor([3.0]))
    (cast,) = casts([weight], BF16)
    (first,) = torch.autograd.grad(cast.pow(3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert (first.item(), second.item()) == (27, 18)


def test_hooks_of_the_weight_see_the_whole_gradient(casts: Any) -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    (cast,) = casts([weight], BF16)
    (cast.sum() + cast.sum()).backward()
    assert [each.tolist() for each in seen] == [[2, 2], [4, 4]]


def test_each_node_stands_for_so_many_numbers(casts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_gradients, "_NUMBERS_AT_A_TIME", 10)
    made = casts([nn.Parameter(torch.ones(4)) for _ in range(5)], BF16)
    nodes = [made[0].grad_fn, made[2].grad_fn, made[4].grad_fn]
    assert [cast.grad_fn for cast in made] == [nodes[0], nodes[0], nodes[1], nodes[1], nodes[2]]
    assert len(set(nodes)) == 3


class Other(nn.Parameter):
    """A class that has casts of its own."""


def test_what_is_not_a_plain_parameter_is_left_to_its_own_cast(casts: Any) -> None:
    computed = nn.Parameter(torch.ones(2)) * 2
    computed.__class__ = nn.Parameter
    with torch.inference_mode():
        without_versions = nn.Parameter(torch.ones(2))
    sparse = nn.Parameter(torch.eye(2).to_sparse())
    plain = nn.Parameter(torch.ones(3))
    made = casts([Other(torch.ones(2)), computed, plain, without_versions, sparse], BF16)
    assert [cast is None for cast in made] == [True, True, False, True, True]
    assert made[2].grad_fn is not None


def test_without_gradients_nothing_is_recorded(casts: Any) -> None:
    with torch.no_grad():
        assert not any(cast.requires_grad for cast in casts(weights(), BF16))
    assert casts([], BF16) == []


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
def test_a_backward_pass_that_is_compiled(casts: Any) -> None:
    weight = nn.Parameter(torch.tensor([256.0]))
    (cast,) = casts([weight], BF16)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        (cast * 256 + cast).backward()
    assert weight.grad is not None and weight.grad.item() == 257


def test_models_train_alike_by_both(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for module in (None, native):
        monkeypatch.setattr(float32_gradients, "NATIVE", SimpleNamespace(get=lambda module=module: module))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True))
        optimizer = torch.optim.Adam(model.parameters())
        mpinit.initialize(model, optimizer, "O5", master_weights="model", verbosity=0)
        for index in range(6):
            tokens = torch.arange(12).view(2, 6).add(index) % 16
            with mpinit.scale_loss(model(tokens)[0].pow(2).mean(), optimizer) as loss:
                loss.backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        states.append(mpinit.undo(model) or model.state_dict())
    assert equal_tensors(*states)
