"""Small models with a planted fault, and healthy ones: what ``python docs/measure.py diagnoses`` tries the tools on.

The truth about each is measured, not assumed: a healthy one trains at O2 and O5 as in float32, a faulty one does not
train at O2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, WORDS, LENGTH, ROWS = 32, 4, 40, 12, 8
Batch = tuple[Any, ...]
Function = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Example:
    """A model, its data and its loss.

    Attributes:
        name: of the model and what is in it.
        build: makes the model.
        batches: makes so many batches from a seed.
        loss: of a model and a batch.
        culprits: what a tool may name as the place, exactly or as a pattern; empty for a healthy model.
        kind: of the fault: "overflow", "mask", "underflow", "precision", "buffer", "input", "forced", "float32",
            "data" or "weights"; "" for a healthy model.
        optimizer: makes the optimizer.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[int, int], list[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    culprits: tuple[str, ...] = ()
    kind: str = ""
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(default=lambda p: torch.optim.AdamW(p, lr=2e-3))

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make the model and its optimizer, the same each time."""
        torch.manual_seed(0)
        model = self.build()
        return model, self.optimizer(model.parameters())


class Function1(nn.Module):
    """A function of a tensor, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# -- parts ------------------------------------------------------------------------------------------------------------


class RmsNorm(nn.Module):
    """A root-mean-square norm, written out."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Attention(nn.Module):
    """Attention over keys that are no padding."""

    def __init__(self, width: int, mask: float | None, scale: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask, self.scale = mask, scale

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ (k * self.scale).transpose(-1, -2) / (math.sqrt(width / HEADS) * self.scale**2)
        if self.mask is not None:
            scores = scores + padding[:, None, None].to(scores.dtype) * self.mask
        else:
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)
        return self.out(mixed)


class Block(nn.Module):
    """Attention and a feed-forward net behind norms."""

    def __init__(self, parts: Mapping[str, Any], plant: Callable[[], nn.Module]) -> None:
        super().__init__()
        norm = parts.get("norm", nn.LayerNorm)
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attn = Attention(WIDTH, parts.get("mask"), parts.get("scale", 1.0))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act: nn.Module = parts.get("act", nn.GELU)()
        self.plant = plant()
        self.dropout = nn.Dropout(parts.get("dropout", 0.0))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), padding)
        return self.plant(x + self.dropout(self.down(self.act(self.up(self.norm2(x))))))


class Transformer(nn.Module):
    """Predicts the next word; padding is word 0."""

    def __init__(self, plant: Callable[[], nn.Module] = nn.Identity, at: int | None = None, **parts: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=parts.get("padding_idx"))
        plants = [plant if at in (None, index) else nn.Identity for index in range(3)]
        self.blocks = nn.ModuleList(Block(parts, each) for each in plants)
        self.norm: nn.Module = parts.get("norm", nn.LayerNorm)(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        if parts.get("tied"):
            self.head.weight = self.embedding.weight
        self.checkpointed = bool(parts.get("checkpointed"))

    def forward(self, words: Tensor) -> Tensor:
        padding, x = words == 0, self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, padding, use_reentrant=False) if self.checkpointed else block(x, padding)
        return self.head(self.norm(x))


class Net(nn.Module):
    """A chain of parts with names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.names = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class First(nn.Module):
    """The first result of a recurrent net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


class Denoiser(nn.Module):
    """Takes noise off images, at a timestep that a sinusoidal table encodes in float32."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.largest = largest
        self.time, self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        rates = 2.0 ** torch.arange(-4, 4, device=x.device)
        angles = timestep[:, None].float() * rates
        encoded = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        return self.last(F.silu(self.first(x) + self.time(encoded)))


class Additive(nn.Module):
    """Attention over a float mask that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attn, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        scores = (self.attn(hidden) @ hidden.transpose(-1, -2)) / WIDTH + mask
        return self.last(scores.softmax(-1) @ hidden).mean(1)


# -- faults -----------------------------------------------------------------------------------------------------------


def squares(x: Tensor, size: float) -> Tensor:
    """Normalise by squares that leave float16's range."""
    y = x * size
    return y / (y.square().mean(-1, keepdim=True) + 1.0).sqrt()


def exponentials(x: Tensor, size: float) -> Tensor:
    """Compute a softmax over channels without subtracting the largest number."""
    e = torch.exp(x.tanh() + size)
    return x * e / e.sum(-1, keepdim=True) * x.shape[-1]


def long_sum(x: Tensor, size: float) -> Tensor:
    """Compute a mean that is summed before it is divided."""
    total = (x.abs().clamp(max=4.0) * size).sum()
    return x * (total / total.detach())


def quick_gelu(x: Tensor, size: float) -> Tensor:
    """Compute an activation with an exponential."""
    return x / (1 + torch.exp(-size * x))


def digits_lost(x: Tensor, size: float) -> Tensor:
    """Add a large number and subtract it again."""
    return (x + size) - size


def in_half(x: Tensor, size: float) -> Tensor:
    """Compute a norm in float16 at every level."""
    energy = (x.half() * size).square().mean()
    return x / (1 + energy.to(x.dtype))


def log_of_zero(x: Tensor, size: float) -> Tensor:
    """Multiply a logarithm of 0 in float32 by 0."""
    nothing = (x - x).detach().float()
    return x + (torch.log(nothing) * nothing).to(x.dtype)


class _Small(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def vanishing(x: Tensor, size: float) -> Tensor:
    """Multiply the gradient by a small number."""
    return _Small.apply(x, size)  # type: ignore[no-any-return, no-untyped-call]


class Table(nn.Module):
    """Multiplies by a buffer that float16 cannot represent, and divides again."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([size]))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.table * (1 / self.size))


class LossInside(nn.Module):
    """A model that returns its own loss, times a factor that float16 cannot represent."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body, self.factor = Net(first=nn.Linear(16, WIDTH), act=nn.Tanh(), last=nn.Linear(WIDTH, 4)), factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.body(x) - y) * self.factor).square().mean()


# -- data -------------------------------------------------------------------------------------------------------------


def words(count: int, seed: int, padded: int = 0, whole: bool = False) -> list[Batch]:
    """Sequences that count on by a step of their own; ``padded`` positions at the end, and one sequence whole."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start = torch.randint(WORDS - 1, (ROWS, 1), generator=chance)
        step = torch.randint(1, 4, (ROWS, 1), generator=chance)
        text = (start + step * torch.arange(LENGTH + 1)) % (WORDS - 1) + 1
        if padded:
            text[:, -padded:] = 0
        if whole:
            text[0] = 0
        found.append((text[:, :-1], text[:, 1:]))
    return found


def vectors(count: int, seed: int, targets: int = 4) -> list[Batch]:
    """Vectors, and a fixed function of each."""
    fixed = torch.randn(16, targets, generator=torch.Generator().manual_seed(99)) / 4
    chance = torch.Generator().manual_seed(seed)
    xs = [torch.randn(32, 16, generator=chance) for _ in range(count)]
    return [(x, torch.tanh(x @ fixed)) for x in xs]


def images(count: int, seed: int) -> list[Batch]:
    """Images with a bright quarter, and which one it is."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x, y = 0.3 * torch.randn(16, 1, 8, 8, generator=chance), torch.randint(4, (16,), generator=chance)
        for image, quarter in zip(x, y.tolist(), strict=True):
            image[0, 4 * (quarter // 2) :, 4 * (quarter % 2) :][:4, :4] += 1.0
        found.append((x, y))
    return found


def series(count: int, seed: int) -> list[Batch]:
    """Noisy waves, and their next values."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        phase = 6.3 * torch.rand(8, 1, generator=chance)
        wave = torch.sin(phase + 0.5 * torch.arange(13))[..., None]
        found.append((wave[:, :-1].contiguous(), wave[:, 1:].contiguous()))
    return found


def noised(count: int, seed: int, largest: float = 1000.0) -> list[Batch]:
    """Vectors at a timestep; the target moves with the timestep's fraction."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(32, 16, generator=chance)
        timestep = (torch.rand(32, generator=chance) * 100).floor() / 100 * 6.28 + largest
        found.append((x, timestep, 0.5 * x + torch.cos(timestep)[:, None]))
    return found


def with_mask(count: int, seed: int, lowest: float = -1e9) -> list[Batch]:
    """Sets of vectors with a float mask, and a function of those that are not masked."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(8, 6, 16, generator=chance)
        mask = torch.zeros(8, 1, 6)
        mask[:, :, 4:] = lowest
        found.append((x, mask, x[:, :4, :4].mean(1)))
    return found


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten(), ignore_index=0)


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(*batch[:-1]).float(), batch[-1])


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch)


# -- the faulty -------------------------------------------------------------------------------------------------------


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def _adam_with_small_eps(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-3, eps=1e-16)


def _function(function: Function, size: float) -> Callable[[], nn.Module]:
    return lambda: Function1(functools.partial(function, size=size))


def _spread(plant: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    """Plant a part into networks of five kinds, behind one of their parts."""

    def chain(**parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: Net(**{name: make() for name, make in parts.items()})

    linear = functools.partial(nn.Linear, WIDTH, WIDTH)
    return {
        "mlp": chain(first=lambda: nn.Linear(16, WIDTH), plant=plant, act=nn.Tanh, last=lambda: nn.Linear(WIDTH, 4)),
        "deep mlp": chain(
            first=lambda: nn.Linear(16, WIDTH),
            act=nn.GELU,
            second=linear,
            plant=plant,
            last=lambda: nn.Linear(WIDTH, 4),
        ),
        "lstm": chain(
            lstm=lambda: First(nn.LSTM(1, WIDTH, batch_first=True)), plant=plant, last=lambda: nn.Linear(WIDTH, 1)
        ),
        "cnn": chain(
            conv=lambda: nn.Conv2d(1, 8, 3, padding=1),
            plant=plant,
            norm=lambda: nn.BatchNorm2d(8),
            act=nn.ReLU,
            flat=nn.Flatten,
            last=lambda: nn.Linear(512, 4),
        ),
    }


_DATA: Final[Mapping[str, tuple[Any, Any]]] = {
    "mlp": (vectors, squared),
    "deep mlp": (vectors, squared),
    "lstm": (series, squared),
    "cnn": (images, classified),
}
_PLANTS: Final[Mapping[str, tuple[Function, float, str]]] = {
    "a hand-written norm": (squares, 4000.0, "overflow"),
    "a softmax without its largest": (exponentials, 11.5, "overflow"),
    "a mean summed first": (long_sum, 2000.0, "overflow"),
    "digits lost": (digits_lost, 6000.0, "precision"),
    "a vanishing gradient": (vanishing, 1e-11, "underflow"),
}


def faulty() -> Iterator[Example]:
    """Yield the models with a planted fault."""
    for title, (function, size, kind) in _PLANTS.items():
        for network, build in _spread(_function(function, size)).items():
            batches, loss = _DATA[network]
            at = ("plant",) if kind != "underflow" else ("first*", "second*", "lstm*", "conv*")
            # Small gradients count for an optimizer whose eps is smaller.
            make = _adam_with_small_eps if kind == "underflow" else _adamw
            yield Example(f"{network}, {title}", build, batches, loss, at, kind, make)
    padded = functools.partial(words, padded=3)
    whole = functools.partial(words, padded=3, whole=True)
    tiny = functools.partial(RmsNorm, eps=1e-12)
    norms = ("blocks.*.norm1", "blocks.*.norm2", "norm")

    def language(name: str, culprits: tuple[str, ...], kind: str, data: Any = padded, **parts: Any) -> Example:
        return Example(f"transformer, {name}", functools.partial(Transformer, **parts), data, next_word, culprits, kind)

    yield language("RMSNorm with eps 1e-12 and a zero row", norms, "overflow", norm=tiny, padding_idx=0)
    yield language("mask of -1e9, a row masked whole", ("blocks.*.attn",), "mask", whole, mask=-1e9)
    yield language("scores before their scale", ("blocks.*.attn",), "overflow", scale=300.0)
    for index in (0, 1, 2):
        gelu = _function(quick_gelu, 8.0)
        yield language(
            f"gelu written out in block {index}", (f"blocks.{index}.plant",), "overflow", plant=gelu, at=index
        )
    norm = _function(squares, 4000.0)
    yield language("hand-written norms in all blocks", ("blocks.*.plant",), "overflow", plant=norm)
    yield language("digits lost in block 1", ("blocks.1.plant",), "precision", plant=_function(digits_lost, 6e3), at=1)
    yield Example("loss times 400 inside", functools.partial(LossInside, 400.0), vectors, own_loss, ("",), "overflow")
    table = _spread(functools.partial(Table, 1e7))
    for network in ("mlp", "lstm"):
        yield Example(f"{network}, a table of 1e7", table[network], *_DATA[network], ("plant.table", "plant"), "buffer")
    late = functools.partial(noised, largest=6000.0)
    yield Example("denoiser, timesteps", lambda: Denoiser(6000.0), late, squared, ("timestep",), "input")
    for title, function, kind in (("in float16", in_half, "forced"), ("a logarithm of 0", log_of_zero, "float32")):
        for network in ("mlp", "cnn"):
            build = _spread(_function(function, 8000.0))[network]
            yield Example(f"{network}, {title}", build, *_DATA[network], ("plant",), kind)
    yield Example("mlp, nan in the data", _spread(nn.Identity)["mlp"], _spoiled, squared, ("",), "data")
    yield Example("mlp, nan in a weight", _with_nan, vectors, squared, ("last.weight",), "weights")


def _spoiled(count: int, seed: int) -> list[Batch]:
    found = vectors(count, seed)
    for x, _ in found:
        x[0, 0] = float("nan")
    return found


def _with_nan() -> nn.Module:
    model = _spread(nn.Identity)["mlp"]()
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")  # type: ignore[union-attr, index, operator]
    return model


# -- the healthy ------------------------------------------------------------------------------------------------------


def healthy() -> Iterator[Example]:
    """Yield models that train at O2 and O5 as in float32."""
    padded = functools.partial(words, padded=3)
    rms = functools.partial(RmsNorm, eps=1e-5)
    for name, data, parts in (
        ("LayerNorm, -inf mask", padded, {}),
        ("RMSNorm eps 1e-5, padding_idx", padded, {"norm": rms, "padding_idx": 0}),
        ("mask of -1e9 that leaves a key", padded, {"mask": -1e9}),
        ("no padding", words, {}),
        ("dropout 0.1", padded, {"dropout": 0.1}),
        ("tied head", padded, {"tied": True}),
        ("SiLU", padded, {"act": nn.SiLU}),
        ("checkpointed", padded, {"checkpointed": True}),
    ):
        yield Example(f"transformer, {name}", functools.partial(Transformer, **parts), data, next_word)
    activations = {
        "tanh": nn.Tanh,
        "relu": nn.ReLU,
        "gelu": nn.GELU,
        "softplus": nn.Softplus,
        "hardswish": nn.Hardswish,
    }
    for name, act in activations.items():
        yield Example(f"mlp, {name}", _mlp(act), vectors, squared)
    normed = {
        "LayerNorm": functools.partial(nn.LayerNorm, WIDTH),
        "BatchNorm": functools.partial(nn.BatchNorm1d, WIDTH),
        "GroupNorm": functools.partial(nn.GroupNorm, 4, WIDTH),
        "F.normalize": lambda: Function1(lambda x: 5 * F.normalize(x, dim=-1)),
        "softmax over channels": lambda: Function1(lambda x: x.softmax(-1) * WIDTH),
        "dropout": functools.partial(nn.Dropout, 0.2),
        "a norm of zero rows": lambda: Function1(lambda x: x + torch.linalg.vector_norm(x * 0, dim=-1, keepdim=True)),
        "clamped logarithm": lambda: Function1(lambda x: x.abs().clamp(min=1e-3).log()),
        "masked by the type's lowest": lambda: Function1(_masked),
    }
    for name, part in normed.items():
        yield Example(f"mlp, {name}", _spread(part)["mlp"], vectors, squared)
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam(p, lr=2e-3),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
        "AdamW at 1e-5": lambda p: torch.optim.AdamW(p, lr=1e-5),
    }
    for name, make in optimizers.items():
        yield Example(f"mlp, {name}", _mlp(nn.Tanh), vectors, squared, optimizer=make)
    yield Example("lstm", _spread(nn.Identity)["lstm"], series, squared)
    yield Example(
        "gru", lambda: Net(net=First(nn.GRU(1, 32, batch_first=True)), last=nn.Linear(32, 1)), series, squared
    )
    yield Example("cnn, BatchNorm", _spread(nn.Identity)["cnn"], images, classified)
    yield Example("cnn, large loss", _spread(nn.Identity)["cnn"], images, lambda m, b: classified(m, b) * 3000)
    yield Example("mlp, small loss", _mlp(nn.Tanh), vectors, lambda m, b: squared(m, b) * 1e-4)
    yield Example("denoiser, timesteps up to 6", lambda: Denoiser(0.0), functools.partial(noised, largest=0.0), squared)
    yield Example("float mask of -1e4", Additive, functools.partial(with_mask, lowest=-1e4), squared)


def _masked(x: Tensor) -> Tensor:
    mask = torch.arange(x.shape[-1], device=x.device) > 20
    return x + x.masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1)


def _mlp(act: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(first=nn.Linear(16, WIDTH), act=act(), second=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 4))
