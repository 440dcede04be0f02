"""The tasks to train: each is a network, its data, its loss and its optimizer's rule."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import models

Batch = tuple[Tensor, Tensor]
Size = Mapping[str, int]
BATCHES: Final = 4
_CHARACTERS: Final = 128


@dataclass(frozen=True)
class Rule:
    """An optimizer by name and numbers; each contender makes it in its own way.

    Attributes:
        name: "sgd", "adam" or "adamw".
        form: "fused", "foreach" or "default", the one that torch chooses.
    """

    name: str
    lr: float
    momentum: float = 0.0
    form: str = "fused"


@dataclass(frozen=True)
class Task:
    """A task that was built for a size and a device: the argument of every contender.

    Attributes:
        model: float32, on the device, in training mode.
        batches: (inputs, target), used one after the other, again and again.
        loss: (model's output, target) -> scalar.
        rule: how the weights are updated.
        fixtures: tensors that belong to the benchmark and not to the training; they are not counted as memory.
    """

    model: nn.Module
    batches: list[Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    rule: Rule
    fixtures: Callable[[], list[Tensor]] = field(default=list)


@dataclass(frozen=True)
class TaskRow:
    """A task of any size.

    Attributes:
        title: the text in tables.
        sizes: "quick", "cpu" and "cuda" -> the numbers that ``build`` needs.
        build: (size, device) -> Task.
        optimizer_only: whether there is no network. Contenders that differ only in how they run a network are not
            measured then.
    """

    title: str
    sizes: Mapping[str, Size]
    build: Callable[[Size, torch.device], Task]
    optimizer_only: bool = False


_ADAM: Final = Rule("adam", 1e-3)
_ADAMW: Final = Rule("adamw", 1e-3)


def _supervised(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], rule: Rule, device: torch.device,
    make: Callable[[], Batch],
) -> Task:  # fmt: skip
    batches = [(inputs.to(device), target.to(device)) for inputs, target in (make() for _ in range(BATCHES))]
    return Task(model.to(device), batches, loss, rule)


def _launch(size: Size, device: torch.device, norms: bool = True, rule: Rule = _ADAM) -> Task:
    shape = size["batch"], size["width"]
    return _supervised(
        models.launch_bound(size["blocks"], size["width"], norms), F.mse_loss, rule, device,
        lambda: (torch.randn(shape), torch.randn(shape)),
    )  # fmt: skip


def _bandwidth(size: Size, device: torch.device, form: str = "fused", name: str = "adam", momentum: float = 0) -> Task:
    model = models.PresetGradients(size["tensors"], size["side"]).to(device)
    nothing = torch.zeros((), dtype=torch.long, device=device)
    return Task(
        model, [(nothing, nothing)], lambda output, target: output, Rule(name, 1e-3, momentum, form),
        lambda: [model._template, *model.sources.values()],
    )  # fmt: skip


def _wide(size: Size, device: torch.device) -> Task:
    shape = size["batch"], size["width"]
    return _supervised(
        models.wide(3, size["width"]), F.mse_loss, Rule("sgd", 1e-3), device,
        lambda: (torch.randn(shape), torch.randn(shape)),
    )  # fmt: skip


def _unet(size: Size, device: torch.device) -> Task:
    batch, side = size["batch"], size["side"]
    return _supervised(
        models.UNet(size["base"]), F.cross_entropy, _ADAM, device,
        lambda: (torch.randn(batch, 3, side, side), torch.randint(2, (batch, side, side))),
    )  # fmt: skip


def _bert(size: Size, device: torch.device) -> Task:
    shape = {name: size[name] for name in ("vocabulary", "width", "layers", "heads", "feedforward")}
    predictions = size["length"] // 6
    model = models.Encoder(models.EncoderConfig(**shape, positions=size["length"]), predictions)

    def make() -> Batch:
        tokens = torch.randint(size["vocabulary"], (size["batch"], size["length"]))
        return tokens, torch.randint(size["vocabulary"], (size["batch"] * predictions,))

    return _supervised(model, F.cross_entropy, Rule("adam", 1e-4), device, make)


def _resnet(size: Size, device: torch.device) -> Task:
    batch, side, classes = size["batch"], size["side"], size["classes"]
    return _supervised(
        models.resnet50(size["width"], classes), F.cross_entropy, Rule("sgd", 0.02, momentum=0.9), device,
        lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))),
    )  # fmt: skip


def _standard_library(characters: int) -> Tensor:
    """Read text that every machine with Python has, the source of its library's first modules, as ASCII codes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= characters:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:characters].clamp(max=_CHARACTERS - 1).long()


def _lstm(size: Size, device: torch.device) -> Task:
    batch, length = size["batch"], size["length"]
    codes = _standard_library(BATCHES * batch * length + 1)
    starts = iter(range(0, len(codes) - 1, batch * length))

    def make() -> Batch:
        window = codes[(start := next(starts)) : start + batch * length + 1]
        return window[:-1].view(batch, length), window[1:].clone()

    return _supervised(models.LanguageModel(_CHARACTERS, size["width"]), F.cross_entropy, _ADAM, device, make)


_BERT_BASE = {"vocabulary": 30522, "width": 768, "layers": 12, "heads": 12, "feedforward": 3072}
_BERT_SMALL = {"vocabulary": 2000, "width": 128, "layers": 4, "heads": 4, "feedforward": 512}
_BERT_TINY = {"vocabulary": 100, "width": 16, "layers": 2, "heads": 2, "feedforward": 32}

_LAUNCH_SIZES: Final[Mapping[str, Size]] = {
    "quick": {"blocks": 4, "width": 32, "batch": 4},
    "cpu": {"blocks": 40, "width": 32, "batch": 4},
    "cuda": {"blocks": 40, "width": 32, "batch": 4},
}
TASKS: Final[Mapping[str, TaskRow]] = {
    "launch": TaskRow(
        "launch-bound: 40 x [Linear 32, LayerNorm, ReLU], batch 4, Adam",
        _LAUNCH_SIZES,
        _launch,
    ),
    "bandwidth": TaskRow(
        "bandwidth-bound: the Adam step of 24 M parameters in 40 tensors, no network",
        {
            "quick": {"tensors": 4, "side": 384},
            "cpu": {"tensors": 40, "side": 768},
            "cuda": {"tensors": 40, "side": 768},
        },
        _bandwidth,
        optimizer_only=True,
    ),
    "launch_sgd": TaskRow(
        "launch-bound: 40 x [Linear 32, LayerNorm, ReLU], batch 4, SGD",
        _LAUNCH_SIZES,
        partial(_launch, rule=Rule("sgd", 1e-3, 0.9)),
    ),
    "launch_adamw": TaskRow(
        "launch-bound: 40 x [Linear 32, LayerNorm, ReLU], batch 4, AdamW",
        _LAUNCH_SIZES,
        partial(_launch, rule=_ADAMW),
    ),
    "bandwidth_adamw": TaskRow(
        "bandwidth-bound: the AdamW step of 16 M parameters in 40 tensors, no network",
        {
            "quick": {"tensors": 4, "side": 64},
            "cpu": {"tensors": 40, "side": 640},
            "cuda": {"tensors": 40, "side": 640},
        },
        partial(_bandwidth, name="adamw"),
        optimizer_only=True,
    ),
    "bandwidth_foreach": TaskRow(
        "bandwidth-bound: the foreach Adam step of 10 M parameters in 40 tensors, no network",
        {
            "quick": {"tensors": 4, "side": 384},
            "cpu": {"tensors": 40, "side": 512},
            "cuda": {"tensors": 40, "side": 512},
        },
        partial(_bandwidth, form="foreach"),
        optimizer_only=True,
    ),
    "bandwidth_sgd": TaskRow(
        "bandwidth-bound: the SGD step, with momentum, of 10 M parameters in 40 tensors, no network",
        {
            "quick": {"tensors": 4, "side": 384},
            "cpu": {"tensors": 40, "side": 512},
            "cuda": {"tensors": 40, "side": 512},
        },
        partial(_bandwidth, name="sgd", momentum=0.9),
        optimizer_only=True,
    ),
    "bandwidth_eager": TaskRow(
        "bandwidth-bound: the Adam step of 10 M parameters in 40 tensors, without native code",
        {
            "quick": {"tensors": 4, "side": 384},
            "cpu": {"tensors": 40, "side": 512},
            "cuda": {"tensors": 40, "side": 512},
        },
        _bandwidth,
        optimizer_only=True,
    ),
    **{
        f"native_{row}": TaskRow(
            f"{title}: the step of 20 M parameters in 40 tensors, no network",
            {
                "quick": {"tensors": 4, "side": 384},
                "cpu": {"tensors": 40, "side": 704},
                "cuda": {"tensors": 40, "side": 704},
            },
            partial(_bandwidth, form=form, name=name, momentum=0.9 if name == "sgd" else 0),
            optimizer_only=True,
        )
        for row, title, name, form in (
            ("sgd", "SGD with momentum", "sgd", "default"),
            ("adam", "Adam", "adam", "default"),
            ("adamw", "AdamW", "adamw", "default"),
            ("adamw_fused", "AdamW, `fused=True`", "adamw", "fused"),
        )
    },
    "memory": TaskRow(
        "bytes held for 42 M parameters in 40 tensors with Adam, no network",
        {
            "quick": {"tensors": 16, "side": 512},
            "cpu": {"tensors": 40, "side": 1024},
            "cuda": {"tensors": 40, "side": 1024},
        },
        _bandwidth,
        optimizer_only=True,
    ),
    "bandwidth_small": TaskRow(
        "the Adam step of 40 small tensors, 164,000 parameters, no network",
        {
            "quick": {"tensors": 4, "side": 16},
            "cpu": {"tensors": 40, "side": 64},
            "cuda": {"tensors": 40, "side": 64},
        },
        _bandwidth,
        optimizer_only=True,
    ),
    "o1_linear": TaskRow(
        "launch-bound without norms: 40 x [Linear 32, ReLU], batch 4, SGD",
        _LAUNCH_SIZES,
        partial(_launch, norms=False, rule=Rule("sgd", 1e-3)),
    ),
    "wide": TaskRow(
        "three wide Linear layers with ReLU, SGD",
        {
            "quick": {"width": 32, "batch": 8},
            "cpu": {"width": 1024, "batch": 64},
            "cuda": {"width": 4096, "batch": 512},
        },
        _wide,
    ),
    "bert": TaskRow(
        "BERT-shaped encoder, Adam",
        {
            "quick": _BERT_TINY | {"batch": 2, "length": 12},
            "cpu": _BERT_SMALL | {"batch": 4, "length": 48},
            "cuda": _BERT_BASE | {"batch": 16, "length": 128},
        },
        _bert,
    ),
    "unet": TaskRow(
        "U-Net with BatchNorm, Adam",
        {
            "quick": {"base": 2, "batch": 2, "side": 32},
            "cpu": {"base": 8, "batch": 2, "side": 64},
            "cuda": {"base": 32, "batch": 8, "side": 256},
        },
        _unet,
    ),
    "resnet": TaskRow(
        "ResNet-50-shaped CNN with BatchNorm, SGD with momentum",
        {
            "quick": {"width": 2, "classes": 4, "batch": 2, "side": 64},
            "cpu": {"width": 8, "classes": 100, "batch": 4, "side": 64},
            "cuda": {"width": 64, "classes": 1000, "batch": 32, "side": 224},
        },
        _resnet,
    ),
    "lstm": TaskRow(
        "LSTM language model on the standard library's source text, Adam",
        {
            "quick": {"width": 8, "batch": 2, "length": 8},
            "cpu": {"width": 128, "batch": 16, "length": 48},
            "cuda": {"width": 1024, "batch": 64, "length": 128},
        },
        _lstm,
    ),
}  # fmt: skip
