"""How far weights beside large gradients move with 8-bit states of mpinit, torchao and bitsandbytes.

In a virtual environment of its own, with torch and mpinit:

    pip install --no-deps torchao==0.18.0 bitsandbytes==0.50.2
    python -m benchmarks.int8_elsewhere

A Linear of 256 inputs and 64 outputs, Adam with lr=1e-3, 200 steps: either every second input is 1,000 times as small
as the others, or one input of 256 is 1,000 times as large. Printed is how far the weights of small inputs move.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

import mpinit


def moved(make: Callable[[Any], Any], one_is_large: bool, **given: Any) -> float:
    """Train, and return the mean distance that weights of small inputs have moved."""
    torch.manual_seed(0)
    model, target = nn.Linear(256, 64), torch.randn(64, 256)
    before = model.weight.detach().clone()
    scale, small = torch.ones(256), torch.ones(256, dtype=torch.bool)
    if one_is_large:
        scale[:], scale[7], small[7], small[128:] = 0.03, 30.0, False, False
    else:
        scale[1::2], small[::2] = 1e-3, False
    optimizer = make(model.parameters())
    if given:
        mpinit.initialize(model, optimizer, "O5", verbosity=0, **given)
    for _ in range(200):
        x = torch.randn(32, 256)
        optimizer.zero_grad()
        (model(x * scale).float() - x @ target.t()).square().mean().backward()
        optimizer.step()
    return float((model.state_dict()["weight"].float() - before).abs()[:, small].mean())


def elsewhere() -> dict[str, Callable[[Any], Any]]:
    """Return the optimizers of other packages that are installed."""
    found: dict[str, Callable[[Any], Any]] = {}
    try:
        from torchao.optim import Adam8bit

        found[f"torchao {version('torchao')}"] = lambda parameters: Adam8bit(parameters, lr=1e-3)
    except ImportError as error:
        print(f"torchao is left out: {error}")
    try:
        import bitsandbytes

        name = f"bitsandbytes {version('bitsandbytes')}"
        found[name] = lambda parameters: bitsandbytes.optim.Adam8bit(parameters, lr=1e-3)
    except (ImportError, PackageNotFoundError) as error:
        print(f"bitsandbytes is left out: {error}")
    return found


def main() -> None:
    """Print one row for each way."""

    def adam(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=1e-3)

    ways: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
        "float32": (adam, {}),
        "mpinit, int8": (adam, {"optimizer_state": "int8"}),
        **{name: (make, {}) for name, make in elsewhere().items()},
    }
    print("| states | every second input is small | one input is large |\n| --- | --- | --- |")
    for name, (make, given) in ways.items():
        try:
            row = [f"{moved(make, one_is_large, **given):.4f}" for one_is_large in (False, True)]
        except Exception as error:
            row = [f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", ""]
        print(f"| {name} | {row[0]} | {row[1]} |")


if __name__ == "__main__":
    main()
