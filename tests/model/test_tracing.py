"""Traces of initialised models: torch.jit.trace with its own check, TensorBoard's graphs, ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from torch import nn

import mpinit

LEVELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{level: (level, {}) for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "split": ("O5", {"master_weights": "split"}),
    "model": ("O5", {"master_weights": "model"}),
}
# torch.jit.trace is deprecated in newer versions; LSTM and TransformerEncoder warn of their own Python branches.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`?torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def started(network: str, level: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = CASES[network].build()
    name, more = LEVELS[level]
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, verbosity=0, **more)
    return model.eval(), next(CASES[network].data())[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("network", ["cnn", "unet", "lstm"])  # torch's check fails for a plain TransformerEncoderLayer
def test_the_first_trace_of_a_model_passes_torch_s_check(network: str, level: str) -> None:
    model, x = started(network, level)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("level", LEVELS)
def test_a_write_before_a_trace_counts_and_is_in_no_graph(level: str) -> None:
    model, x = started("cnn", level)
    with torch.no_grad():
        bias = model.state_dict()["head.bias"]
        bias.add_(1)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert torch.equal(model.head.bias, bias.to(model.head.bias.dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_tensorboard_adds_the_graph_of_a_model(level: str, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model, x = started("cnn", level)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        writer.add_graph(model, x)
    assert list(tmp_path.iterdir())
