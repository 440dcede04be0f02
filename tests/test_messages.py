"""What users do wrong, and the error or warning that answers: its type, and two words that lead to the way out.

Texts may be reworded. A row fails if the call is accepted, if another error comes, or if the way out is missing.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import mpinit

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.ones(3, 4)


class Net(nn.Module):
    """A model with a norm, a method beside forward, and an argument beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.features(x))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def pair(level: str = "O5", **keywords: Any) -> tuple[Net, torch.optim.Optimizer]:
    """An initialised model and its optimizer."""
    model = Net()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, **keywords)
    return model, optimizer


def initialize(*args: Any, **keywords: Any) -> Any:
    """Initialise a fresh model, or what is passed."""
    model = Net()
    return mpinit.initialize(*(args or (model, sgd(model))), **keywords)


def backward(model: nn.Module, optimizer: Any) -> None:
    with mpinit.scale_loss(model(X).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()


# -- initialize: models and optimizers --------------------------------------------------------------------------------


def twice() -> None:
    model, _ = pair()
    mpinit.initialize(model, sgd(model), "O5")


def same_optimizer_twice() -> None:
    _, optimizer = pair()
    mpinit.initialize(Net(), optimizer, "O5")


def shared_module() -> None:
    model, _ = pair()
    initialize(nn.Sequential(model.layer, nn.Linear(4, 4)), opt_level="O5")


def strange_optimizer() -> None:
    initialize(Net(), sgd(Net()), "O5")


def wrapped_optimizer() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = Net()
    mpinit.initialize(model, Wrapper(sgd(model)), "O5")  # type: ignore[call-overload]


def lazy_module() -> None:
    initialize(nn.Sequential(nn.LazyLinear(3)), opt_level="O2")


def o1_in_inference_mode() -> None:
    with torch.inference_mode():
        mpinit.initialize(nn.Linear(2, 2), opt_level="O1")


def made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Net()
    initialize(model, opt_level="O2")


def scripted() -> None:
    initialize(torch.jit.trace(nn.Linear(4, 4), X), opt_level="O2")


def shared_memory() -> None:
    model = nn.Linear(4, 4)
    model.view = nn.Parameter(model.weight.detach()[:2])
    initialize(model, opt_level="O2")


def shared_with_kept() -> None:
    model = Net()
    model.head.weight = model.norm.weight = nn.Parameter(torch.ones(4))  # type: ignore[assignment]
    initialize(model, opt_level="O2")


MODELS: dict[str, tuple[Callable[[], Any], type[BaseException], str, str]] = {
    "model is text": (lambda: initialize("model"), TypeError, "torch.nn.Module", "str"),
    "model is None": (lambda: initialize(None), TypeError, "torch.nn.Module", "NoneType"),
    "model is a class": (lambda: initialize(nn.Linear), TypeError, "class Linear", "object"),
    "model is parameters": (lambda: initialize(Net().parameters()), TypeError, "model.parameters()", "model itself"),
    "model is a state dict": (lambda: initialize(Net().state_dict()), TypeError, "state_dict()", "object"),
    "swapped": (lambda: initialize(sgd(Net()), Net()), TypeError, "SGD", "swapped"),
    "optimizer is text": (lambda: initialize(Net(), "adam"), TypeError, "Optimizer", "str"),
    "optimizer is parameters": (
        lambda: initialize(Net(), list(Net().parameters())),
        TypeError,
        "Parameter",
        "optimizer",
    ),
    "optimizer is wrapped": (wrapped_optimizer, TypeError, "SGD", "Wrapper"),
    "optimizer of another model": (strange_optimizer, ValueError, "SGD", "model"),
    "a model twice": (lambda: initialize([NET, NET], None, "O2"), ValueError, "twice", "Net"),
    "an optimizer twice": (lambda: initialize(NET, [OPTIMIZER] * 2, "O2"), ValueError, "twice", "SGD"),
    "initialised already": (twice, ValueError, "mpinit.undo", "Net"),
    "its optimizer was": (same_optimizer_twice, ValueError, "mpinit.undo", "SGD"),
    "a part of it was": (shared_module, ValueError, "mpinit.undo", "session"),
    "no models": (lambda: initialize([]), ValueError, "empty", "modules"),
    "a scheduler": (lambda: initialize(NET, StepLR(OPTIMIZER, 1)), TypeError, "StepLR", "Pass the SGD"),
    "an optimizer's class": (lambda: initialize(NET, torch.optim.Adam), TypeError, "class Adam", "object"),
    "the level second": (lambda: initialize(NET, "O5"), TypeError, "optimizers", "str"),
    "lazy": (lazy_module, ValueError, "lazy", "forward"),
    "casts in inference mode": (o1_in_inference_mode, RuntimeError, "inference_mode", "patch_torch_functions"),
    "float64": (lambda: initialize(Net().double(), opt_level="O5"), ValueError, "float64", "model.float()"),
    "inference tensors": (made_in_inference_mode, ValueError, "inference_mode", "no_grad"),
    "scripted": (scripted, ValueError, "ScriptModule", "torch.jit.trace"),
    "memory is shared": (shared_memory, ValueError, "memory", "view"),
    "fourth positional": (lambda: initialize(NET, OPTIMIZER, "O2", True), TypeError, "initialize()", "positional"),
    "O1 on 16-bit weights": (lambda: initialize(Net().half(), opt_level="O1"), UserWarning, "float32", "O2"),
}
NET = Net()
OPTIMIZER = sgd(NET)

# -- initialize: keywords ---------------------------------------------------------------------------------------------

KEYWORDS: dict[str, tuple[dict[str, Any], type[BaseException], str, str]] = {
    "misspelled": ({"opt_levle": "O2"}, ValueError, "opt_levle", "opt_level"),
    "unknown": ({"zzz": 1}, ValueError, "zzz", "loss_scale"),
    "growth_interval": ({"growth_interval": 100}, ValueError, "growth_interval", "DynamicLossScale"),
    "init_loss_scale": ({"init_loss_scale": 2.0}, ValueError, "init_loss_scale", "DynamicLossScale"),
    "max_consecutive_skips": ({"max_consecutive_skips": 3}, ValueError, "max_consecutive_skips", "DynamicLossScale"),
    "dtype": ({"dtype": BF16}, ValueError, "cast_model_type", "O5"),
    "half_dtype": ({"half_dtype": BF16}, ValueError, "cast_model_type", "O5"),
    "level o2": ({"opt_level": "o2"}, ValueError, "o2", "'O2'"),
    "level 02": ({"opt_level": "02"}, ValueError, "02", "'O2'"),
    "level 2": ({"opt_level": 2}, ValueError, "2", "'O2'"),
    "level O9": ({"opt_level": "O9"}, ValueError, "O9", "'O5'"),
    "level bf16": ({"opt_level": "bf16"}, ValueError, "'O5'", "'O4'"),
    "level True": ({"opt_level": True}, ValueError, "enabled", "level"),
    "scale below 0": ({"loss_scale": -1.0}, ValueError, "loss_scale", "dynamic"),
    "scale of nan": ({"loss_scale": float("nan")}, ValueError, "loss_scale", "nan"),
    "scale of 0": ({"loss_scale": 0}, ValueError, "loss_scale", "2**-126"),
    "scale is a class": ({"loss_scale": mpinit.DynamicLossScale}, ValueError, "loss_scale", "DynamicLossScale(...)"),
    "scale is torch's": ({"loss_scale": torch.amp.GradScaler("cpu")}, ValueError, "loss_scale", "DynamicLossScale"),
    "minimum of 0": ({"min_loss_scale": 0.0}, ValueError, "min_loss_scale", "2**-126"),
    "scale is a word": ({"loss_scale": "auto"}, ValueError, "loss_scale", "dynamic"),
    "16-bit weights at O1": ({"opt_level": "O1", "cast_model_type": FP16}, ValueError, "cast_model_type", "O1"),
    "masters at O1": ({"opt_level": "O1", "master_weights": True}, ValueError, "master_weights", "O1"),
    "norms at O1": ({"opt_level": "O1", "keep_batchnorm_fp32": False}, ValueError, "keep_batchnorm_fp32", "O1"),
    "split in float16": ({"opt_level": "O2", "master_weights": "split"}, ValueError, "split", "bfloat16"),
    "masters is a word": ({"opt_level": "O2", "master_weights": "splitt"}, ValueError, "master_weights", "split"),
    "dtype is a word": ({"opt_level": "O2", "cast_model_type": "float17"}, ValueError, "float17", "float16"),
    "no losses": ({"num_losses": 0}, ValueError, "num_losses", "1"),
    "kept name": ({"opt_level": "O2", "keep_fp32": "hedd"}, ValueError, "hedd", "head"),
    "kept number": ({"opt_level": "O2", "keep_fp32": 3}, ValueError, "keep_fp32", "name"),
    "kept module": ({"opt_level": "O2", "keep_fp32": Net().head}, ValueError, "Linear", "name"),
    "entry point is a method": ({"opt_level": "O2", "entry_points": Net().features}, ValueError, "'features'", "name"),
    "entry point": ({"opt_level": "O2", "entry_points": "featurs"}, ValueError, "featurs", "features"),
    "kept input": ({"opt_level": "O2", "keep_inputs": "target"}, ValueError, "target", "targets"),
    "states": ({"opt_level": "O5", "optimizer_state": "int4"}, ValueError, "optimizer_state", "int8"),
    "a group without ranks": ({"process_group": 1}, ValueError, "process_group", "init_process_group"),
    "config is missing": ({"config": "nowhere.toml"}, FileNotFoundError, "nowhere.toml", "file"),
    "config is a number": ({"config": 3}, TypeError, "config", "TOML"),
    "config has a fault": ({"config": {"opt_levle": "O2"}}, ValueError, "opt_levle", "opt_level"),
    "several faults": (
        {"opt_level": "O2", "num_losses": -1, "verbosity": "much"},
        ValueError,
        "num_losses",
        "verbosity",
    ),
}
SCALES: dict[str, tuple[dict[str, Any], str]] = {
    "grows by less": ({"growth_factor": 0.5}, "growth_factor"),
    "backs off upwards": ({"backoff_factor": 2.0}, "backoff_factor"),
    "never grows": ({"growth_interval": 0}, "growth_interval"),
    "minimum above": ({"min": 8.0, "max": 4.0}, "max"),
    "begins outside": ({"init": 2.0**30}, "init"),
    "below 0": ({"init": -1.0}, "init"),
    "hysteresis": ({"hysteresis": 0}, "hysteresis"),
}

# -- losses, gradients and steps --------------------------------------------------------------------------------------


def loss_swapped() -> None:
    _, optimizer = pair()
    mpinit.scale_loss(optimizer, torch.ones(()))  # type: ignore[arg-type]


def model_for_optimizer() -> None:
    model, _ = pair()
    mpinit.scale_loss(torch.ones(()), model)  # type: ignore[arg-type]


def without_with() -> None:
    model, optimizer = pair()
    mpinit.scale_loss(model(X).sum(), optimizer).backward()  # type: ignore[attr-defined]


def nested_blocks() -> None:
    model, optimizer = pair("O2")
    with mpinit.scale_loss(model(X).sum(), optimizer), mpinit.scale_loss(model(X).sum(), optimizer):
        pass


def step_in_block() -> None:
    model, optimizer = pair("O2")
    with mpinit.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()


def unscaled_backward_in_block() -> None:
    model, optimizer = pair("O2")
    loss = model(X).sum()
    with mpinit.scale_loss(loss, optimizer):
        loss.backward()


def backward_after_block() -> None:
    model, optimizer = pair("O2")
    with mpinit.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        pass
    scaled_loss.backward()
    optimizer.step()


def no_such_loss() -> None:
    model, optimizer = pair("O2")
    mpinit.scale_loss(model(X).sum(), optimizer, loss_id=3)


def plain_backward() -> None:
    model, optimizer = pair("O2")
    model(X).sum().backward()
    optimizer.step()


def awaited() -> None:
    model = Net()
    mpinit.initialize(model, opt_level="O2", await_optimizers=True)
    mpinit.scale_loss(model(X).sum(), sgd(model)).__enter__()


def other_optimizer() -> None:
    model, _ = pair("O5")
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    other.step()


def uninitialised_optimizer() -> None:
    backward(Net(), sgd(Net()))


def undo_in_block() -> None:
    model, optimizer = pair("O2")
    with mpinit.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        mpinit.undo(model)


def forgot_backward() -> None:
    model, optimizer = pair("O2")
    with mpinit.scale_loss(model(X).sum(), optimizer):
        pass
    optimizer.step()


def both_scalers() -> None:
    model, optimizer = pair("O2")
    scaler = mpinit.GradScaler(optimizer)
    scaler.scale(model(X).sum()).backward()
    with mpinit.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


def freeze_midway() -> None:
    model, optimizer = pair("O2")
    model.requires_grad_(False)
    with mpinit.scale_loss(model(X).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


LOOPS: dict[str, tuple[Callable[[], Any], type[BaseException], str, str]] = {
    "loss and optimizer swapped": (loss_swapped, TypeError, "loss", "swapped"),
    "a model for an optimizer": (model_for_optimizer, TypeError, "optimizer", "model"),
    "scale_loss without with": (without_with, AttributeError, "with", "scale_loss"),
    "blocks in each other": (nested_blocks, RuntimeError, "scale_loss", "block"),
    "a step in the block": (step_in_block, RuntimeError, "block", "after"),
    "loss.backward() in the block": (unscaled_backward_in_block, RuntimeError, "scaled_loss", "backward()"),
    "backward after the block": (backward_after_block, RuntimeError, "block", "backward()"),
    "loss_id": (no_such_loss, ValueError, "loss_id", "num_losses"),
    "plain backward at O2": (plain_backward, UserWarning, "scale_loss", "scaled"),
    "optimizers are awaited": (awaited, RuntimeError, "add_optimizers", "optimizer"),
    "another optimizer's step": (other_optimizer, RuntimeError, "add_optimizers", "SGD"),
    "an optimizer that was never": (uninitialised_optimizer, RuntimeError, "initialise", "initialize"),
    "undo in the block": (undo_in_block, RuntimeError, "undo", "after"),
    "no backward pass": (forgot_backward, UserWarning, "step() does nothing", "gradient"),
    "a number for a loss": (lambda: mpinit.scale_loss(3.0, pair()[1]), TypeError, "tensor", "item()"),  # type: ignore[arg-type]
    "a scheduler's optimizer": (lambda: mpinit.scheduler_step(OPTIMIZER), TypeError, "scheduler", "SGD"),
    "clip what": (lambda: mpinit.clip_grad_norm_(1.0, OPTIMIZER), TypeError, "optimizer", "float"),  # type: ignore[arg-type]
    "clip parameters": (
        lambda: mpinit.clip_grad_norm_(NET.parameters(), 1.0),  # type: ignore[arg-type]
        TypeError,
        "optimizer",
        "generator",
    ),
    "a name for a function": (lambda: mpinit.half_function("linear"), TypeError, "callable", "register"),  # type: ignore[arg-type]
    "no such function": (lambda: mpinit.register_half_function(torch, "matmull"), ValueError, "matmull", "'matmul'"),
    "two scalers": (both_scalers, RuntimeError, "GradScaler", "scale_loss"),
    "all is frozen": (freeze_midway, RuntimeError, "grad", "element 0"),
}

# -- weights, masters and states --------------------------------------------------------------------------------------


def other_data(data: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model, _ = pair()
        own = model.layer.weight.data
        model.layer.weight.data = data
        try:
            model(X)
        finally:
            model.layer.weight.data = own

    return run


def gradient_of_a_master() -> None:
    model, optimizer = pair()
    (master, *_) = mpinit.master_params(optimizer)
    backward(model, optimizer)
    master.grad = torch.ones_like(master)
    optimizer.step()


def loss_of_masters() -> None:
    model, optimizer = pair()
    (master, *_) = mpinit.master_params(optimizer)
    with mpinit.scale_loss(model(X).sum() + master.square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


def written_entry() -> None:
    model, _ = pair()
    entries = model.state_dict()
    entries["layer.weight"].zero_()
    model(X)


def block(change: Callable[[Net], Any]) -> Callable[[], None]:
    def run() -> None:
        model, _ = pair()
        with mpinit.float32_weights(model):
            change(model)

    return run


def with_pair(call: Callable[[Net], Any]) -> None:
    model, optimizer = pair()
    call(model)
    del optimizer


def float32(what: Any) -> None:
    with mpinit.float32_weights(what):
        pass


def replace(model: Net) -> None:
    model.layer.weight = nn.Parameter(torch.ones(4, 4))


def tie(model: Net) -> None:
    model.head.weight = model.norm.weight  # type: ignore[assignment]


def step_inside() -> None:
    model, optimizer = pair()
    backward(model, optimizer)
    with mpinit.float32_weights(model):
        optimizer.step()


def scale_inside() -> None:
    model, optimizer = pair()
    with mpinit.float32_weights(model):
        mpinit.scale_loss(model(X).sum(), optimizer).__enter__()


def undo_inside() -> None:
    model, _ = pair()
    with mpinit.float32_weights(model):
        mpinit.undo(model)


def shallow_copy() -> None:
    model, _ = pair()
    copy.copy(model)(X)


def convert_initialised() -> None:
    model, _ = pair()
    model.half()


def assign_state() -> None:
    model, _ = pair()
    model.load_state_dict(model.state_dict(), assign=True)


def state_of_16_bits() -> None:
    model, _ = pair()
    model.load_state_dict({k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()})


def scaler_state_is_text() -> None:
    _, optimizer = pair("O2")
    mpinit.load_state_dict("state", optimizer)  # type: ignore[arg-type]


def scaler_state_does_not_fit() -> None:
    _, optimizer = pair("O2", num_losses=2)
    mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}, optimizer)


def train_state_is_text() -> None:
    mpinit.TrainState(*pair()).load_state_dict("state")  # type: ignore[arg-type]


def train_state_of_another_model() -> None:
    state = mpinit.TrainState(*pair()).state_dict()
    other = nn.Linear(4, 4)
    optimizer = sgd(other)
    mpinit.initialize(other, optimizer, "O5")
    mpinit.TrainState(other, optimizer).load_state_dict(state)


def added_later() -> None:
    model, optimizer = pair("O1")
    model.more = nn.Linear(2, 2)
    model.layer = nn.Linear(4, 4)
    backward(model, optimizer)
    optimizer.step()


def which_session() -> None:
    kept = [pair("O2"), pair("O2")]
    mpinit.state_dict()
    del kept


WEIGHTS: dict[str, tuple[Callable[[], Any], type[BaseException], str, str]] = {
    "data of another dtype": (other_data(torch.ones(4, 4)), RuntimeError, "copy_()", "layer.weight"),
    "data of another shape": (other_data(torch.ones(2, 4, dtype=BF16)), RuntimeError, "copy_()", "layer.weight"),
    "a gradient of a master": (gradient_of_a_master, RuntimeError, "weight", "grad"),
    "a loss of masters": (loss_of_masters, RuntimeError, "weight", "master"),
    "an entry of a state dict": (written_entry, UserWarning, "load_state_dict", "layer.weight"),
    "replaced inside": (block(replace), RuntimeError, "layer.weight", "block"),
    "tied inside": (block(tie), RuntimeError, "weight", "block"),
    "frozen inside": (block(lambda model: model.layer.requires_grad_(False)), RuntimeError, "requires_grad", "block"),
    "hooked inside": (block(lambda m: m.layer.weight.register_hook(lambda g: g)), RuntimeError, "hook", "block"),
    "a step inside": (step_inside, RuntimeError, "float32_weights", "step"),
    "a scaled loss inside": (scale_inside, RuntimeError, "float32_weights", "scale_loss"),
    "undo inside": (undo_inside, RuntimeError, "float32_weights", "undo"),
    "a shallow copy": (shallow_copy, RuntimeError, "copy.deepcopy", "shallow"),
    "half()": (convert_initialised, RuntimeError, "float16", "keep_fp32"),
    "assign=True": (assign_state, RuntimeError, "assign", "mpinit.initialize"),
    "a state of 16 bits": (state_of_16_bits, UserWarning, "16-bit", "master"),
    "a scaler's state is text": (scaler_state_is_text, TypeError, "mapping", "state_dict()"),
    "a scaler's state is short": (scaler_state_does_not_fit, ValueError, "num_losses=2", "nothing was loaded"),
    "a TrainState is text": (train_state_is_text, TypeError, "mapping", "TrainState"),
    "a TrainState of another": (train_state_of_another_model, ValueError, "nothing was loaded", "layer.weight"),
    "a layer was replaced": (added_later, UserWarning, "mpinit.initialize", "layer.weight"),
    "which session": (which_session, RuntimeError, "optimizer", "sessions"),
    "undo of a plain model": (lambda: mpinit.undo(Net()), ValueError, "Net", "not initialised"),
    "undo of text": (lambda: mpinit.undo("model"), ValueError, "str", "not initialised"),  # type: ignore[arg-type]
    "undo of a part": (lambda: with_pair(lambda m: mpinit.undo(m.layer)), ValueError, "part", "whole model"),
    "float32 of a part": (lambda: with_pair(lambda m: float32(m.layer)), RuntimeError, "part", "whole model"),
    "float32 of parameters": (lambda: with_pair(lambda m: float32(m.parameters())), TypeError, "model", "generator"),
    "float32 of a plain model": (lambda: float32(Net()), RuntimeError, "not initialised", "Net"),
    "the state of a dict": (lambda: mpinit.state_dict({}), TypeError, "optimizer", "dict"),  # type: ignore[arg-type]
    "masters of nothing": (lambda: next(mpinit.master_params(None)), TypeError, "optimizer", "NoneType"),  # type: ignore[arg-type]
    "masters of a list": (lambda: next(mpinit.master_params([OPTIMIZER])), TypeError, "one optimizer", "list"),  # type: ignore[arg-type]
    "an audit of parameters": (lambda: mpinit.audit(NET, list(NET.parameters())), TypeError, "Optimizer", "Parameter"),
    "a watch of an optimizer": (lambda: mpinit.watch_overflow(OPTIMIZER).__enter__(), TypeError, "module", "SGD"),  # type: ignore[arg-type]
    "masters of a model": (lambda: next(mpinit.master_params(pair()[0])), TypeError, "Net", "optimizer"),  # type: ignore[arg-type]
    "counts of a plain optimizer": (lambda: mpinit.step_counts(sgd(NET)), RuntimeError, "initialise", "SGD"),
    "a report of a plain one": (lambda: mpinit.overflow_report(sgd(NET)), RuntimeError, "initialise", "SGD"),
    "an audit of an optimizer": (lambda: mpinit.audit(sgd(NET)), TypeError, "module", "SGD"),  # type: ignore[arg-type]
    "add_optimizers of a model": (lambda: mpinit.add_optimizers(Net()), TypeError, "Optimizer", "Net"),  # type: ignore[arg-type]
    "register_input of an object": (lambda: mpinit.register_input(3, None), TypeError, "class", "register_input"),  # type: ignore[call-overload]
}


def check(call: Callable[[], Any], kind: type[BaseException], *words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning) if issubclass(kind, Warning) else warnings.simplefilter("ignore")
        with pytest.raises(kind) as caught:
            call()
    missing = [word for word in words if word.lower() not in str(caught.value).lower()]
    assert not missing, f"{missing} not in: {caught.value}"


ROWS = MODELS | LOOPS | WEIGHTS


@pytest.mark.parametrize("name", ROWS)
def test_wrong_call_is_answered_with_the_way_out(name: str) -> None:
    check(*ROWS[name])


@pytest.mark.parametrize("name", KEYWORDS)
def test_wrong_keyword_is_answered_with_the_way_out(name: str) -> None:
    keywords, kind, *words = KEYWORDS[name]
    model = Net()
    check(lambda: mpinit.initialize(model, sgd(model), **keywords), kind, *words)
    assert model.layer.weight.dtype is torch.float32, "nothing was changed"


@pytest.mark.parametrize("name", SCALES)
def test_wrong_loss_scale_is_refused_at_construction(name: str) -> None:
    keywords, word = SCALES[name]
    check(lambda: mpinit.DynamicLossScale(**keywords), ValueError, word)


FILES: dict[str, tuple[bytes, str, str]] = {
    "not TOML": (b"opt_level = ", "f.toml", "TOML"),
    "not UTF-8": (b"\xff\xfe", "UTF-8", "f.toml"),
    "misspelled": (b'opt_levle = "O2"', "opt_levle", "opt_level"),
    "a table that is none": (b"[opt_level]\nx = 1", "opt_level", "O2"),
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_configuration_file_is_named(name: str, tmp_path: Path) -> None:
    content, *words = FILES[name]
    (tmp_path / "f.toml").write_bytes(content)
    check(lambda: initialize(config=tmp_path / "f.toml"), ValueError, *words)
