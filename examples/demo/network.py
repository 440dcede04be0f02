"""A small convolutional network with BatchNorm, the layer that mixed precision has to treat with care."""

from __future__ import annotations

from torch import nn


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def digits_net(width: int) -> nn.Sequential:
    """Three blocks, one pooling step in between, and a linear head for ten classes."""
    return nn.Sequential(
        block(1, width),
        block(width, 2 * width),
        nn.MaxPool2d(2),
        block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )
