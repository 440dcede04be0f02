"""O1: installing the casts and putting everything back, thread by thread, in models of every kind.

Below the public face: casts are switched on without a model.
"""

import copy
import importlib
import inspect
import itertools
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, LOWER, Initialize, StartCasts, in_thread, o1_plan, product_dtype
from models import Parts
from torch import nn
from torch.autograd import backward, grad
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves
from undo_snapshots import differences, end_dropped_sessions, namespace

import mpinit
from mpinit.autocast import apply
from mpinit.autocast.thread_flags import is_on


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_last_undo_of_several_sessions_restores_torch(order: tuple[int, ...]) -> None:
    end_dropped_sessions()
    before = namespace()
    undos = [
        apply(o1_plan()),
        apply(o1_plan(patch_torch_functions_type=BF16, cast_policy="apex")),
        apply(o1_plan(patch_torch_functions="model")),
    ]
    for count, index in enumerate(order):
        assert differences(before, namespace()), count
        undos[index]()
        undos[index]()  # undoing twice does nothing
    assert differences(before, namespace()) == []


def test_dtype_in_force_is_that_of_latest_session_not_undone(start_casts: StartCasts) -> None:
    first, second = start_casts(), start_casts(patch_torch_functions_type=BF16)
    assert product_dtype() is BF16
    second()
    assert product_dtype() is HALF
    first()
    assert product_dtype() is FP32


def test_wrappers_have_the_names_of_their_functions(start_casts: StartCasts) -> None:
    documentation, signature = torch.exp.__doc__, inspect.signature(torch.autograd.backward)
    start_casts()
    assert torch.exp.__doc__ == documentation
    assert inspect.signature(torch.autograd.backward) == signature
    for function in (torch.exp, torch.Tensor.exp, F.softplus, torch.bilinear, torch.special.softmax):
        assert pickle.loads(pickle.dumps(function)) is function


def test_thread_scope_covers_only_the_calling_thread(start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions="model")
    assert (is_on(), product_dtype(), torch.is_autocast_cache_enabled()) == (False, FP32, True)
    start_casts()
    assert in_thread(lambda: (is_on(), product_dtype())) == (False, FP32)
    assert is_on()
    assert not torch.is_autocast_cache_enabled()


def test_undo_in_another_thread_warns(caplog: pytest.LogCaptureFixture) -> None:
    end_dropped_sessions()
    before = namespace()
    undo = apply(o1_plan())
    with caplog.at_level(logging.WARNING, "mpinit"):
        in_thread(undo)
    assert "call mpinit.undo in the thread that called mpinit.initialize" in caplog.text
    assert is_on()
    apply(o1_plan())()  # the next session of this thread, undone, takes the lost one with it
    assert differences(before, namespace()) == []


def test_torch_functions_bound_by_users_modules_before_are_named(
    start_casts: StartCasts, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from torch import exp, add\nfrom torch.nn.functional import softplus as soft, linear, softmax\n"
    (tmp_path / "early_importer.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("early_importer")
    try:
        with caplog.at_level(logging.WARNING, "mpinit"):
            start_casts()
            start_casts()
    finally:
        del sys.modules["early_importer"]
    # linear and add need no wrapper, and softmax looks the method up when it is called.
    assert sorted(record.getMessage().partition(" was imported")[0] for record in caplog.records) == [
        "early_importer.exp",
        "early_importer.soft",
    ]
    assert "call it as torch.exp, or import it after initialize" in caplog.text
    x = torch.ones(2, dtype=HALF)
    assert (module.exp(x).dtype, module.softmax(x, -1).dtype) == (HALF, FP32)


def grad_dtype_seen_in_backward(run: Callable[[torch.Tensor], Any]) -> list[bool]:
    """Whether casts were on in each backward formula that ran."""
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(is_on())
            return upstream

    run(Spy.apply(torch.ones(2, requires_grad=True)).sum())
    assert seen
    return seen


@pytest.mark.parametrize(
    "run",
    [
        lambda loss: loss.backward(),
        lambda loss: torch.autograd.backward(loss),
        lambda loss: torch.autograd.backward([loss], [torch.ones(())]),
        lambda loss: torch.autograd.grad(loss, _leaf_of(loss)),
        lambda loss: backward(loss),
        lambda loss: grad(loss, _leaf_of(loss)),
    ],
    ids=["Tensor.backward", "autograd.backward", "lists", "autograd.grad", "bound before", "grad bound before"],
)
def test_casts_are_off_while_the_engine_runs(run: Callable[..., Any], start_casts: StartCasts) -> None:
    start_casts()
    assert grad_dtype_seen_in_backward(run) == [False]
    assert is_on()
    with pytest.raises(RuntimeError):
        torch.ones(2).sum().backward()
    assert is_on()


def _leaf_of(loss: torch.Tensor) -> torch.Tensor:
    node: Any = loss.grad_fn
    while not hasattr(node, "variable"):
        node = node.next_functions[0][0]
    return node.variable


NO_LONGER_SUPPORTED = pytest.mark.filterwarnings("ignore:`torch.jit.script` is")


class Scriptable(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x) + x.exp() + x**2 + F.softmax(x, -1) + F.softplus(x) + torch.bilinear(x, x, x[None], None)
        return y + F.layer_norm(x, [2]) + F.interpolate(x[None], scale_factor=1.0)[0]


@NO_LONGER_SUPPORTED
def test_torchscript_and_tracers_accept_wrappers(start_casts: StartCasts) -> None:
    x = torch.rand(2, 2)
    plain = Scriptable()(x)
    undo = start_casts(patch_torch_functions="model")
    wrapper, table = torch.exp, torch.jit._builtins._get_builtin_table()
    assert table[id(wrapper)] == "aten::exp"
    scripted = torch.jit.script(Scriptable())
    assert torch.equal(scripted(x), plain)
    assert torch.equal(torch.fx.symbolic_trace(Scriptable())(x), plain)
    assert torch.equal(torch.export.export(Scriptable(), (x,)).module()(x), plain)
    undo()
    assert id(wrapper) not in table
    assert table[id(torch.exp)] == "aten::exp"


@NO_LONGER_SUPPORTED
def test_forward_mode_derivatives(start_casts: StartCasts) -> None:
    """Compute forward-mode derivatives: torch scripts decompositions for them, which call the wrapped names."""
    x = torch.rand(3)
    want = torch.func.hessian(lambda x: (x.exp() * x).sum())(x)
    start_casts()
    torch.testing.assert_close(torch.func.hessian(lambda x: (x.exp() * x).sum())(x), want)
    matrix = torch.rand(2, 2)
    product, tangent = torch.func.jvp(lambda x: (x @ x).exp(), (matrix,), (matrix,))
    assert (product.dtype, tangent.dtype) == (FP32, FP32)


def test_casts_log_nothing_and_wrap_no_native_one(start_casts: StartCasts, caplog: pytest.LogCaptureFixture) -> None:
    linear = F.linear
    with caplog.at_level(logging.DEBUG, "mpinit"):
        undo = start_casts()
        assert F.linear is linear
        F.linear(torch.ones(2, 2), torch.ones(2, 2)).exp()
        undo()
    assert not caplog.records


def floating(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in tree_leaves(tree)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def packed() -> PackedSequence:
    return pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 2]))


def attention() -> nn.Module:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return Parts(lambda self, x: self.layer(x, x, x, need_weights=False)[0], layer=layer)


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
    "attention": (attention, lambda: (torch.randn(1, 3, 8),), "lower"),
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
@pytest.mark.parametrize("make", [attention, MODELS["transformer_layer"][0]], ids=["attention", "transformer_layer"])
def test_evaluation_avoids_the_encoder_fast_path(
    make: Callable[[], nn.Module], lower: torch.dtype, initialize: Initialize
) -> None:
    """Check that the fused path, which would run norms in 16 bits, is off with casts and on without them."""
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
