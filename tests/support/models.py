"""Tiny real models on real data, deterministic: what the tests of whole training runs share."""

import argparse
import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from session_device import placed
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import mpinit

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
VOCABULARY = 128


class Cnn(nn.Module):
    """Convolutions and BatchNorm on 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.BatchNorm2d(4)
        )
        self.head = nn.Linear(4 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.features(x)).flatten(1))


class Lstm(nn.Module):
    """A language model on characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


class Encoder(nn.Module):
    """A one-layer transformer encoder on characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)))


class UNet(nn.Module):
    """One level down, one up, and the skip connection between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], dim=1))


Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def _images() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # slow to import, and not every user of this file wants it

    digits = load_digits()
    return torch.tensor(digits.images / 16.0, dtype=torch.float32)[:, None], torch.tensor(digits.target)


@functools.cache
def _characters() -> Tensor:
    text = Path(argparse.__file__).read_text(encoding="utf-8").encode("ascii", "replace")
    return torch.tensor(list(text), dtype=torch.long)


def digits(batch: int = 16) -> Iterator[Batch]:
    """Handwritten digits and what they are."""
    images, labels = _images()
    for start in range(0, len(images) - batch, batch):
        yield images[start : start + batch], labels[start : start + batch]


def noisy_digits(batch: int = 4) -> Iterator[Batch]:
    """Handwritten digits with their pixels disturbed, and without."""
    disturb = torch.Generator().manual_seed(1)
    for images, _ in digits(batch):
        yield images + 0.1 * torch.randn(images.shape, generator=disturb), images


def text(batch: int = 4, length: int = 8) -> Iterator[Batch]:
    """Source text of the standard library, and the same one character on."""
    characters = _characters()
    for start in range(0, len(characters) - batch * length - 1, batch * length):
        part = characters[start : start + batch * length + 1]
        yield part[:-1].view(batch, length), part[1:].view(batch, length)


def _characters_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """A model with its data and its loss."""

    network: Callable[[], nn.Module]
    data: Callable[[], Iterator[Batch]]
    loss: Loss

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = placed(self.network())
        return model

    def batches(self, count: int) -> list[Batch]:
        return [placed(batch) for batch, _ in zip(self.data(), range(count), strict=False)]


CASES = {
    "cnn": Case(Cnn, digits, F.cross_entropy),
    "lstm": Case(Lstm, text, _characters_loss),
    "transformer": Case(Encoder, text, _characters_loss),
    "unet": Case(UNet, noisy_digits, F.mse_loss),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.005),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.005, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.02),
}


class Parts(nn.Module):
    """A module of the given parts, whose forward is a function that gets the module first."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


# initialize's keywords for a level, and for its other kinds of masters.
# Every way to train, with what `initialize` does by itself; LEVELS below have a scale that does not overflow at once.
WAYS: dict[str, dict[str, Any]] = {
    **{level: {"opt_level": level} for level in mpinit.OPT_LEVELS},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O5", "master_weights": "model"},
    "int8": {"opt_level": "O5", "optimizer_state": "int8"},
}


def ways(*names: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Some of the ways, with keywords for each."""
    return {name: WAYS[name] | more for name in names}


LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1", "loss_scale": mpinit.DynamicLossScale(init=1024.0)},
    "O2": {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=1024.0)},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O2", "master_weights": "model", "loss_scale": mpinit.DynamicLossScale(init=1024.0)},
    "int8": {"opt_level": "O5", "optimizer_state": "int8"},
}


def first_scale(keywords: Mapping[str, Any]) -> float:
    """The first loss scale that keywords of one of :data:`LEVELS` set."""
    rule = keywords.get("loss_scale", 1.0)
    return rule.init if isinstance(rule, mpinit.DynamicLossScale) else float(rule)


def dynamic(level: str, **numbers: Any) -> dict[str, Any]:
    """The keyword that gives a level's dynamic loss scale these numbers; none where the level's scale is fixed."""
    is_dynamic = mpinit.OPT_LEVELS[level].loss_scale == "dynamic"
    return {"loss_scale": mpinit.DynamicLossScale(**numbers)} if is_dynamic else {}


def level_arguments(level: str, dtype: torch.dtype) -> dict[str, Any]:
    """initialize's keywords for a level in a 16-bit type, quiet; at O0 the type does not matter."""
    keywords: dict[str, Any] = {"opt_level": level}
    if level == "O1":
        keywords["patch_torch_functions_type"] = dtype
    elif level != "O0":
        keywords["cast_model_type"] = dtype
    return keywords


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """SGD on all parameters of all ``models``."""
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr)


def quietly(model: nn.Module, level: str = "O2", **keywords: Any) -> nn.Module:
    """``model``, initialised with an optimizer that trains all of it."""
    mpinit.initialize(model, sgd(model), level, **keywords)
    return model


def prepared(case: Case) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A model, a batch for it, and the loss of what it makes of that."""
    x, y = case.batches(1)[0]
    return case.build(), x, lambda output: case.loss(output, y)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], loss_of: Loss, scale: Any = None
) -> list[float]:
    """The loop mpinit is made for; returns the losses."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        with (scale or mpinit.scale_loss)(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# The same loop in plain torch.
train_plainly = functools.partial(train, scale=lambda loss, optimizer: contextlib.nullcontext(loss))


def cast_by_hand(model: nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> nn.Module:
    """A 16-bit model the way one writes it oneself: ``.to(dtype)``, then BatchNorm back to float32."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(dtype)
    for name, module in model.named_modules():
        if keep_batchnorm and isinstance(module, _BatchNorm):
            module.float()
            module.load_state_dict({key: before[f"{name}.{key}"] for key in module.state_dict()})
    return model


@contextlib.contextmanager
def sums_in_float32() -> Iterator[None]:
    """By hand: gradients of tables in 16 bits on a CPU are added in float32, and rounded once."""
    embedding = torch.embedding

    def look_up(table: Tensor, *args: Any) -> Tensor:
        return embedding(table.float() if table.device.type == "cpu" else table, *args).to(table.dtype)

    torch.embedding = look_up  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.embedding = embedding


def through_file(thing: Any, weights_only: bool = True) -> Any:
    """Saved by torch, and loaded again."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def equal_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two state dicts hold the same names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


KINDS = ("O2", "O5", "split")


class Net(nn.Module):
    """Weights that get masters, a frozen one, BatchNorm that stays float32, and a 16-bit buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("mean", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.frozen
        return self.last(x - self.mean.to(x.dtype))


def start(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[kind])
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    names = {name for name, _ in model.named_parameters()}
    return {name: value.clone() for name, value in model.state_dict().items() if name in names}
