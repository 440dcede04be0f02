"""The networks that the workloads train: built from sizes, with random weights, by torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def launch_bound(blocks: int, width: int, norms: bool = True) -> nn.Module:
    """Make a network of many layers that are so small that most of the time is the cost of calling operations."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(width, width), *([nn.LayerNorm(width)] if norms else []), nn.ReLU()]
    return nn.Sequential(*layers)


def wide(layers: int, width: int) -> nn.Module:
    """Make the network of PyTorch's mixed precision recipe: wide linear layers with ReLU between them."""
    hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, width))


# A loss scale of 2**16 is inf in float16. So the scale is divided by this number before it is cast, and the gradients
# made beforehand are multiplied by it.
_PRESCALE = 2.0**8


class _PresetGradient(torch.autograd.Function):
    """A function whose backward returns a gradient made beforehand for its weight, times the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor, loss: Tensor) -> Tensor:
        ctx.source = source
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.source * (incoming[0] / _PRESCALE).to(ctx.source.dtype), incoming[0]


class PresetGradients(nn.Module):
    """Weights without a network, so that a training step is mainly the optimizer's step.

    Backward returns gradients that were made beforehand: one for each dtype, for all weights, so that they need little
    memory. It reaches one weight after the other, as in a network, and writes each gradient once.
    """

    def __init__(self, tensors: int, side: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(side, side) * 0.02 for _ in range(tensors))
        self._template = torch.randn(side, side) * 1e-3 * _PRESCALE
        self.sources: dict[torch.dtype, Tensor] = {}

    def forward(self, unused: Tensor) -> Tensor:
        first = self.weights[0]
        if first.dtype not in self.sources:
            self.sources = {first.dtype: self._template.to(first)}
        loss = first.flatten()[:1024].detach().float().square().mean()
        for weight in self.weights:
            loss = _PresetGradient.apply(self.sources[first.dtype], weight, loss)  # type: ignore[no-untyped-call]
        return loss


class _ConvNormReLU(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, relu: bool = True) -> None:
        layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]
        super().__init__(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class UNet(nn.Module):
    """U-Net with four steps down and up; ``base=32`` gives 7.8 M parameters."""

    def __init__(self, base: int, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(self._pair, [channels, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[-2::-1])
        self.merge = nn.ModuleList(self._pair(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(base, classes, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(_ConvNormReLU(inputs, outputs, 3), _ConvNormReLU(outputs, outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, stage in enumerate(self.down):
            x = stage(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat((skip, up(x)), dim=1))
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class EncoderConfig:
    """Shape of an encoder; the defaults are BERT-base's."""

    vocabulary: int = 30522
    width: int = 768
    layers: int = 12
    heads: int = 12
    feedforward: int = 3072
    positions: int = 512
    dropout: float = 0.1


class Encoder(nn.Module):
    """A transformer encoder with a tied masked-word head over the first ``predictions`` positions."""

    def __init__(self, config: EncoderConfig, predictions: int) -> None:
        super().__init__()
        self.predictions = predictions
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.positions, config.width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.feedforward, config.dropout, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU(), nn.LayerNorm(config.width))
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.dropout(self.norm(self.words(tokens) + self.places(places))))
        picked = self.transform(hidden[:, : self.predictions])
        return F.linear(picked, self.words.weight, self.bias).flatten(0, 1)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            _ConvNormReLU(inputs, width, 1),
            _ConvNormReLU(width, width, 3, stride),
            _ConvNormReLU(width, outputs, 1, relu=False),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _ConvNormReLU(inputs, outputs, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(width: int, classes: int) -> nn.Module:
    """Make a CNN shaped like ResNet-50; ``width=64, classes=1000`` is ResNet-50 itself (25.6 M parameters)."""
    layers: list[nn.Module] = [_ConvNormReLU(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, width * 2**stage, 2 if stage and not block else 1))
            inputs = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class LanguageModel(nn.Module):
    """A two-layer LSTM that predicts the next character."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden).flatten(0, 1)
        return logits
