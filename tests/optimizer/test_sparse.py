"""Sparse gradients: embeddings with SparseAdam and SGD, where float32 weights and where masters stand behind them."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import HALVES, backward, gradients, keywords, masters, plain_sgd, same, start
from models import Parts
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import mpinit


@pytest.fixture(autouse=True)
def _opt_out_of_checks() -> Iterator[None]:
    # torch warns, once a process, where it was not said whether sparse tensors are to be checked.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        yield


OPTIMIZERS: dict[str, Any] = {
    "sparse adam": lambda p: SparseAdam(list(p), lr=0.01),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "loss_scale": mpinit.DynamicLossScale(init=256.0)},
    "O2": {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=256.0)},
    "split": {"opt_level": "O5", "master_weights": "split"},
}


def bag() -> Any:
    """A bag of words: a sparse embedding under a dense head."""
    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(10, 4, sparse=True), "head": nn.Linear(4, 2)}
    return Parts(lambda self, words: self.head(self.embedding(words).mean(1)), **parts)


def words(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 7, (3, 5), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).pow(2).mean()


def optimizers_of(model: Any, name: str) -> list[Optimizer]:
    return [OPTIMIZERS[name](model.embedding.parameters()), SGD(model.head.parameters(), lr=0.1)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "model"])
def test_sparse_embeddings_train_like_float32(level: str, dtype: torch.dtype, name: str) -> None:
    model, reference = bag(), bag()
    optimizers, plain = optimizers_of(model, name), optimizers_of(reference, name)
    more = {"master_weights": "model"} if level == "model" else {}
    mpinit.initialize(model, optimizers, **keywords("O2" if more else level, dtype), **more)
    for batch in words(6):
        for one in (*optimizers, *plain):
            one.zero_grad()
        backward(loss_of(model, batch), optimizers)
        loss_of(reference, batch).backward()
        found = gradients(optimizers[0])[0]
        assert found is not None and found.is_sparse and found.dtype == torch.float32
        for one in (*optimizers, *plain):
            one.step()
    tolerance = 0.0 if level == "O0" else 0.02
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=tolerance, atol=tolerance)
    untouched = slice(7, None)
    assert torch.equal(model.state_dict()["embedding.weight"][untouched], bag().embedding.weight[untouched])
    assert torch.equal(model.embedding.weight.detach(), masters(optimizers[0])[0].to(model.embedding.weight.dtype))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_accumulate(level: str) -> None:
    model, reference = bag(), bag()
    optimizers = optimizers_of(model, "sgd")
    mpinit.initialize(model, optimizers, **keywords(level))
    for batch in words(3):
        backward(loss_of(model, batch), optimizers)
        loss_of(reference, batch).backward()
    found, expected = gradients(optimizers[0])[0], reference.embedding.weight.grad
    assert found is not None and expected is not None
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=0.02, atol=0.002)


@pytest.mark.parametrize("name", ["sparse adam", "sgd"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_a_sparse_gradient_skips(level: str, name: str) -> None:
    model = bag()
    optimizers = optimizers_of(model, name)
    mpinit.initialize(model, optimizers, **keywords(level))
    before = masters(optimizers[0])
    backward(loss_of(model, words(1)[0]) * float("inf"), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    same(masters(optimizers[0]), before)
    assert all(mpinit.step_was_skipped(optimizer) for optimizer in optimizers)
    assert mpinit.loss_scale(optimizers[0]) == 512.0


def test_many_hits_of_one_row_add_up_in_float32() -> None:
    model = nn.EmbeddingBag(2, 1, sparse=True, mode="sum")
    optimizer = start(model, "O2", torch.bfloat16, plain_sgd, loss_scale=1.0)
    for _ in range(3):
        backward(model(torch.zeros(1, 100, dtype=torch.long)).sum(), optimizer)
    found = gradients(optimizer)[0]
    assert found is not None and found.to_dense().tolist() == [[300.0], [0.0]]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("setting", ["O1", "O2", "split"])
def test_norm_of_sparse_and_empty_gradients_is_clipped(setting: str, norm_type: float) -> None:
    arguments = SETTINGS[setting]
    model, reference = (
        Parts(lambda self, x: self.bag(x) + self.empty.sum(), bag=bag(), empty=nn.Parameter(torch.zeros(0, 3)))
        for _ in range(2)
    )
    optimizer = plain_sgd(model.parameters())
    mpinit.initialize(model, optimizer, **arguments)
    for batch in words(2):
        backward(model(batch).float().square().mean(), optimizer)
        reference(batch).square().mean().backward()
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in reference.parameters()]
    expected = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in dense]), norm_type)
    norm = mpinit.clip_grad_norm_(optimizer, 0.1, norm_type)
    torch.testing.assert_close(norm, expected, rtol=0.01, atol=0.0)
    for parameter, gradient in zip(model.parameters(), dense, strict=True):
        assert parameter.grad is not None
        ours = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        torch.testing.assert_close(ours.float(), gradient * (0.1 / expected), rtol=0.03, atol=1e-4)
