"""Traces of initialised models: torch.jit.trace with its own check, TensorBoard's graphs, ONNX files."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import needs
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
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, **more)
    return model.eval(), next(CASES[network].data())[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("network", ["cnn", "unet", "lstm"])  # torch's check fails for a plain TransformerEncoderLayer
def test_the_first_trace_of_a_model_passes_torch_s_check(network: str, level: str) -> None:
    model, x = started(network, level)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("level", LEVELS)
def test_tensorboard_adds_the_graph_of_a_model(level: str, tmp_path: Path) -> None:
    needs("tensorboard")
    tensorboard = needs("torch.utils.tensorboard")
    model, x = started("cnn", level)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        writer.add_graph(model, x)
    assert list(tmp_path.iterdir())


def onnx_file(model: nn.Module, x: torch.Tensor, dynamo: bool) -> bytes:
    """Export a model, with torch's own warnings of deprecated calls left out."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), file, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
    return file.getvalue()


def check_of_onnx(model: nn.Module, x: torch.Tensor, way: str | None, dynamo: bool) -> None:
    """Check that onnxruntime runs the file of a model, made in a way that limits.md names (None: any)."""
    runtime = needs("onnxruntime")
    needs("onnxscript")
    expected = model(x).float().detach()

    def check(file: bytes) -> None:
        session = runtime.InferenceSession(file)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found).float(), expected, atol=0.02, rtol=0.02)

    if way is None:
        check(onnx_file(model, x, dynamo))
    if way == "float32_weights":
        with mpinit.float32_weights(model):
            check(onnx_file(model, x, dynamo))
    mpinit.undo(model)
    check(onnx_file(model, x, dynamo))


EXPORTERS = pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.long)])


@EXPORTERS
@pytest.mark.parametrize("level", LEVELS)
def test_onnxruntime_runs_a_file_of_convolutions(level: str, dynamo: bool) -> None:
    model, x = started("cnn", level)
    check_of_onnx(model, x, {"O0": None, "O1": "undo", "O4": "undo"}.get(level, "float32_weights"), dynamo)


@EXPORTERS
@pytest.mark.parametrize(("level", "way"), [("O1", None), ("O2", None), ("O4", "undo"), ("O5", "float32_weights")])
def test_onnxruntime_runs_a_file_of_linear_layers(level: str, way: str | None, dynamo: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    check_of_onnx(model.eval(), torch.randn(2, 8), way, dynamo)


@pytest.mark.long
def test_exported_program_makes_onnx_file_that_its_weights_allow() -> None:
    runtime = needs("onnxruntime")
    needs("onnxscript")
    model, x = started("cnn", "O5")
    with mpinit.float32_weights(model):
        expected = model(x).detach()
        program = torch.export.export(model, (x,))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, (), file, dynamo=True, verbose=False)
    session = runtime.InferenceSession(file.getvalue())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)


PROGRAMS = [("cnn", "O1", False), ("cnn", "O5", False), ("linear", "O1", True), ("linear", "O2", True)]


@pytest.mark.long
@pytest.mark.parametrize(("network", "level", "runs"), [*PROGRAMS, ("linear", "O5", False)])
def test_exported_16_bit_file_is_right_or_refused_by_onnxruntime(network: str, level: str, runs: bool) -> None:
    runtime = needs("onnxruntime")
    needs("onnxscript")
    if network == "linear":
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
        model, x = model.eval(), torch.randn(2, 8)
    else:
        model, x = started(network, level)
    expected = model(x).detach()
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), expected)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, (), file, dynamo=True, verbose=False)
    if not runs:
        with pytest.raises(Exception, match="ONNXRuntimeError"):
            runtime.InferenceSession(file.getvalue())
        return
    session = runtime.InferenceSession(file.getvalue())
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-3, rtol=2e-3)
