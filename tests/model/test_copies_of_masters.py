"""Copies of a model and its optimizer: their own weights, the masters' bits, no session.

Below the public face: the registry shows that a copy has no session.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward, iterate
from models import CASES, KINDS, Case, level_arguments, masters_of, start, step, through_file, train
from torch import nn

import mpinit
from mpinit import registry


@pytest.mark.parametrize("kind", KINDS)
def test_copy_of_model_or_part_has_masters_bits_and_no_session(kind: str) -> None:
    model, optimizer = start(kind)
    step(model, optimizer)
    for part in (model, model.first):
        twin = copy.deepcopy(part)
        assert {type(tensor) for tensor in twin.parameters()} == {nn.Parameter}
        assert {tensor.dtype for tensor in twin.parameters()} == {torch.float32}
        assert all(torch.equal(twin.state_dict()[name], value) for name, value in part.state_dict().items())
        assert next(twin.half().parameters()).dtype is torch.float16, "a copy may be converted"
    twin = copy.deepcopy(model)
    assert not twin.frozen.requires_grad
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    mpinit.initialize(twin, optimizer, "O2")
    step(twin, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_moving_average_of_state_dicts_is_one_of_the_masters(kind: str) -> None:
    model, optimizer = start(kind)
    step(model, optimizer)
    average = copy.deepcopy(model)
    expected = masters_of(model)
    for _ in range(5):
        step(model, optimizer)
        mean = average.state_dict()
        for name, value in model.state_dict().items():
            mean[name].lerp_(value, 0.1) if value.is_floating_point() else mean[name].copy_(value)
        for name, master in masters_of(model).items():
            # In float64: what is left between the two is the average's own rounding.
            expected[name] = expected[name].double() * 0.9 + master.double() * 0.1
    for name, parameter in average.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].float(), rtol=2e-6, atol=2e-7)
    model.load_state_dict(average.state_dict())
    assert torch.equal(masters_of(model)["first.weight"], average.first.weight)


def test_tied_weights_stay_tied_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert twin[0].weight is twin[1].weight
        assert twin[0].weight.dtype is torch.float32


def test_a_module_with_a_deepcopy_of_its_own() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            twin = Own(self.in_features, self.out_features)
            twin.weight = copy.deepcopy(self.weight, memo)
            twin.bias = copy.deepcopy(self.bias, memo)
            return twin

    model = nn.Sequential(Own(3, 3), nn.Linear(3, 3))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
    twin = copy.deepcopy(model)
    assert type(twin[0]) is Own
    assert torch.equal(twin[0].weight, model.state_dict()["0.weight"])


LEVELS = ["O0", "O1", "O2", "O3"]
LEVEL_AND_DTYPE = [("O0", torch.float32)] + [(o, d) for o in LEVELS[1:] for d in (torch.float16, torch.bfloat16)]
NETWORKS = ("cnn", "lstm", "transformer", "unet")


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: through_file(model, weights_only=False),
    "copy of a copy": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


def initialised(network: str, level: str, dtype: torch.dtype, **more: Any) -> tuple[Case, nn.Module, Any]:
    case = CASES[network]
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpinit.initialize(model, optimizer, **level_arguments(level, dtype), **more)
    return case, model, optimizer


@pytest.mark.parametrize(("level", "dtype"), LEVEL_AND_DTYPE)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_runs_its_own_weights(way: str, level: str, dtype: torch.dtype) -> None:
    case, model, optimizer = initialised("cnn", level, dtype, keep_fp32="head" if level in ("O2", "O3") else None)
    train(model, optimizer, case.batches(2), case.loss)
    model.eval()
    x = next(case.data())[0]
    twin = COPIES[way](model)
    expected = model(x)
    assert type(twin) is type(model)
    reference = case.build().eval()
    reference.load_state_dict(model.state_dict())
    with mpinit.disable_casts() if level == "O1" else contextlib.nullcontext():
        assert torch.equal(twin(x), reference(x))
    torch.testing.assert_close(twin(x), expected, atol=0.05, rtol=0.05)
    assert torch.equal(twin.forward(x), twin(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
    assert torch.equal(model(x), expected), "the original does not notice"
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", COPIES)
def test_copy_has_float32_state_dict_of_its_own_and_no_session(way: str, level: str) -> None:
    case, model, optimizer = initialised("cnn", level, torch.float16)
    twin = COPIES[way](model)
    frozen = {name: value.clone() for name, value in twin.state_dict().items()}
    assert all(value.dtype is torch.float32 for value in frozen.values() if value.is_floating_point())
    weights = dict(twin.named_parameters())
    assert all(torch.equal(frozen[name], weight.float()) for name, weight in weights.items())
    train(model, optimizer, case.batches(2), case.loss)
    assert all(torch.equal(frozen[name], value) for name, value in twin.state_dict().items())
    twin.load_state_dict(model.state_dict())
    twin.load_state_dict(model.state_dict(), assign=True)
    assert registry.of(twin) is None
    assert registry.of(model) is not None
    for parameter in twin.parameters():
        assert type(parameter) is nn.Parameter


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_a_plain_list_of_models_keeps_what_is_shared(level: str) -> None:
    _, model, _ = initialised("transformer", level, torch.float16)
    first, second = copy.deepcopy([model, model.layer])
    assert first.layer is second


@pytest.mark.parametrize("level", [level for level in LEVELS if level not in ("O0", "O1", "O4")])
def test_data_parallel_is_refused_when_it_makes_its_replicas(level: str) -> None:
    _, model, _ = initialised("cnn", level, torch.float16)
    with pytest.raises(RuntimeError, match=r"DataParallel makes copies of .* use DistributedDataParallel"):
        model._replicate_for_data_parallel()
    mpinit.undo(model)
    assert type(model._replicate_for_data_parallel()) is type(model)


# Each network at each level, in one 16-bit type or the other: that one a graph has as a constant, whatever is compiled.
# Each of both twice in every run.
COMPILED = [
    pytest.param(
        *(network, level, (torch.float16, torch.bfloat16)[(i + j) % 2] if level != "O0" else torch.float32),
        marks=() if (i - j) % 4 < 2 else pytest.mark.nightly,
    )
    for i, network in enumerate(NETWORKS)
    for j, level in enumerate(LEVELS)
]


@pytest.mark.long
@pytest.mark.parametrize(("network", "level", "dtype"), COMPILED)
def test_torch_compile_in_one_graph(network: str, level: str, dtype: torch.dtype) -> None:
    case, model, _ = initialised(network, level, dtype)
    x, y = case.batches(1)[0]
    if network == "lstm":  # which is compiled step by step
        x, y = x[:, :3], y[:, :3]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.eval()
    expected = model(x)
    with torch._dynamo.config.patch(allow_rnn=True):
        got = compiled(x)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)
    case.loss(got.float(), y).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_model_trains_and_does_not_recompile(level: str) -> None:
    case, model, optimizer = initialised("cnn", level, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(compiled, optimizer, case.batches(6), case.loss)
    case, model, optimizer = initialised("cnn", level, torch.bfloat16)
    assert losses == pytest.approx(train(model, optimizer, case.batches(6), case.loss), abs=0.05)


@pytest.mark.long
def test_a_model_compiled_before_initialize_follows_it() -> None:
    torch._dynamo.reset()
    case = CASES["cnn"]
    model = case.build()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = next(case.data())[0]
    compiled(x)
    mpinit.initialize(model, opt_level="O3", cast_model_outputs="fp16")
    assert compiled(x).dtype is torch.float16


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("more", [{}, {"master_weights": "split"}, {"optimizer_state": "int8"}], ids=str)
def test_optimizer_that_is_copied_with_its_model_steps_copy(more: dict[str, Any], first: str) -> None:
    """Compare with the original in plain torch, after undo."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    mpinit.initialize(model, optimizer, "O5", **more)
    for _ in range(2):
        iterate(model(torch.ones(2, 16)).square().mean(), optimizer)
    if first == "model":
        twin, trainer = copy.deepcopy((model, optimizer))
    else:
        trainer, twin = copy.deepcopy((optimizer, model))
    step(twin, trainer)
    mpinit.undo(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, optimizer)
    for mine, other, old in zip(twin.parameters(), model.parameters(), before, strict=True):
        assert torch.equal(mine, other) and not torch.equal(mine, old)


def test_unpickled_optimizer_has_unpickled_model_s_weights() -> None:
    """Check that it has no session, and can be passed to ``initialize`` with its model."""
    model = nn.Linear(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5")
    twin, trainer = pickle.loads(pickle.dumps((model, optimizer)))
    with (
        pytest.raises(RuntimeError, match="SGD was not initialised"),
        mpinit.scale_loss(twin(torch.ones(2, 16)).square().mean(), trainer),
    ):
        pass
    mpinit.initialize(twin, trainer, "O5")
    backward(twin(torch.ones(2, 16)).square().mean(), trainer)
    before = twin.state_dict()["weight"].clone()
    trainer.step()
    assert not torch.equal(twin.state_dict()["weight"], before)
    assert torch.equal(model.state_dict()["weight"], before), "the original does not notice"


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
@pytest.mark.parametrize(("way", "masters"), [("deepcopy", "split"), ("deepcopy", "model"), ("pickle", "model")])
def test_copied_optimizer_steps_as_torch_s_own(way: str, masters: str, encoding: str) -> None:
    """Compare ten steps of the copy with those of an optimizer that has loaded the float32 state dict."""
    torch.manual_seed(0)
    model = nn.Linear(64, 80)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mpinit.initialize(model, optimizer, "O5", master_weights=masters, optimizer_state=encoding)
    for _ in range(3):
        iterate(model(torch.ones(2, 64)).square().mean(), optimizer)
    pair = (model, optimizer)
    twin, trainer = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    reference = nn.Linear(64, 80)
    reference.load_state_dict(model.state_dict())
    by_hand = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    by_hand.load_state_dict(optimizer.state_dict())
    for network, its_optimizer in ((twin, trainer), (reference, by_hand)):
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            its_optimizer.step()
    assert all(map(torch.equal, twin.parameters(), reference.parameters()))
    assert {type(value) for state in trainer.state.values() for value in state.values()} == {torch.Tensor}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("masters", [True, "split", "model"])
def test_converted_copy_computes_as_a_plain_module_of_its_dtype(masters: Any, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model.eval(), optimizer, "O5", master_weights=masters, keep_fp32=[nn.LayerNorm])
    twin = COPIES[way](model).to(dtype)
    reference = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval().to(dtype)
    reference.load_state_dict(twin.state_dict())
    x = torch.randn(4, 8).to(dtype)
    assert twin(x).dtype == dtype and torch.equal(twin(x), reference(x))
    assert model(x.float()).dtype == torch.float32, "the original still casts"


def test_unpickled_model_initialised_is_copied_and_converted() -> None:
    """Check that its deep copies have the masters' values, and that its conversion is refused until the undo."""
    model = nn.Linear(8, 4)
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
    twin = pickle.loads(pickle.dumps(model))
    mpinit.initialize(twin, torch.optim.SGD(twin.parameters(), lr=0.1), "O5")
    with torch.no_grad(), mpinit.float32_weights(twin):
        twin.weight.fill_(1.001)
    copied = copy.deepcopy(twin)
    assert copied.weight.dtype == torch.float32 and (copied.weight == 1.001).all()
    with pytest.raises(RuntimeError, match="cannot be converted"):
        twin.half()
    mpinit.undo(twin)
    x = torch.ones(2, 8)
    assert torch.equal(twin.double()(x.double()), twin.weight.new_full((2, 8), 1.0) @ twin.weight.T + twin.bias)
