"""O1 through initialize: models of every kind, threads, teachers, weight casts, checkpointing, transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts import FP32, LOWER, Initialize
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves

import mpinit


def floating(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in tree_leaves(tree)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def packed() -> PackedSequence:
    return pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 2]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


# (make the model, make its arguments, the dtype of its floating outputs: "lower" or float32)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], str]] = {
    "conv": (lambda: nn.Conv2d(2, 3, 3), lambda: (torch.randn(1, 2, 5, 5),), "lower"),
    "lstm": (lambda: nn.LSTM(3, 4), lambda: (torch.randn(4, 2, 3),), "lower"),
    "lstm_deep_bidirectional": (
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        lambda: (torch.randn(2, 4, 3), (torch.randn(4, 2, 4), torch.randn(4, 2, 4))),
        "lower",
    ),
    "rnn_relu_deep": (lambda: nn.RNN(3, 4, 2, nonlinearity="relu"), lambda: (torch.randn(4, 2, 3),), "lower"),
    "lstm_projected": (lambda: nn.LSTM(3, 4, proj_size=2), lambda: (torch.randn(4, 2, 3),), "lower"),
    "lstm_packed_with_state": (
        lambda: nn.LSTM(3, 4),
        lambda: (packed(), (torch.randn(1, 2, 4), torch.randn(1, 2, 4))),
        "lower",
    ),
    "gru_packed": (lambda: nn.GRU(3, 4, bidirectional=True), lambda: (packed(),), "lower"),
    "lstm_cell": (lambda: nn.LSTMCell(3, 4), lambda: (torch.randn(2, 3),), "lower"),
    "attention": (Attention, lambda: (torch.randn(1, 3, 8),), "lower"),
    "transformer_layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
        lambda: (torch.randn(1, 3, 8),),
        "float32",
    ),
    "bilinear_lower": (
        lambda: nn.Bilinear(3, 3, 2),
        lambda: (torch.randn(2, 3).half(), torch.randn(2, 3).half()),
        "float32",
    ),
    "batch_norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)),
        lambda: (torch.randn(2, 2, 2, 2),),
        "lower",
    ),
}


@LOWER
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_models_of_every_kind_train_and_evaluate(name: str, lower: torch.dtype, initialize: Initialize) -> None:
    make, inputs, expected = MODELS[name]
    model, args = make(), inputs()
    reference = copy.deepcopy(model)
    initialize(model, patch_torch_functions_type=lower)
    wanted = lower if expected == "lower" else FP32
    for training in (True, False):
        model.train(training)
        reference.train(training)
        with torch.set_grad_enabled(training):
            outputs = floating(model(*args))
        assert [output.dtype for output in outputs] == [wanted] * len(outputs)
        if name != "bilinear_lower":  # float32 has no way to run that one
            with mpinit.disable_casts():
                plain = floating(reference(*args))
            for output, value in zip(outputs, plain, strict=True):
                torch.testing.assert_close(output.float(), value, rtol=0.1, atol=0.05)
        if training:
            sum(output.float().square().sum() for output in outputs).backward()  # type: ignore[union-attr]
            assert all(p.dtype is FP32 and p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())


@LOWER
@pytest.mark.parametrize("make", [Attention, MODELS["transformer_layer"][0]], ids=["attention", "transformer_layer"])
def test_evaluation_computes_what_training_does_although_torch_has_a_fast_path(
    make: Callable[[], nn.Module], lower: torch.dtype, initialize: Initialize
) -> None:
    """The fused path of evaluation would run norms in 16 bits; without casts it is taken as ever."""
    model, x = make(), torch.randn(2, 3, 8)
    initialize(model, patch_torch_functions_type=lower)
    training = model.train()(x)
    model.eval()
    with torch.no_grad():
        assert not torch.backends.mha.get_fastpath_enabled()
        evaluation = model(x)
        with mpinit.disable_casts():
            assert torch.backends.mha.get_fastpath_enabled()
            torch.testing.assert_close(model(x), training.float(), rtol=0.1, atol=0.05)
    assert evaluation.dtype is training.dtype
    torch.testing.assert_close(evaluation, training, rtol=1e-2, atol=1e-2)
