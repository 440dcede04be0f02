"""The smallest useful script: a regression trained at O2, saved, and resumed.

Run it with ``python examples/minimal.py [opt_level]``; it needs no data and takes a second.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import mpinit


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Fit y = sum of x on random points; return the last loss."""
    last = 0.0
    for _ in range(steps):
        x = torch.randn(64, 8)
        y = x.sum(dim=1, keepdim=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        last = loss.item()
    return last


def build(opt_level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, in mixed precision from here on."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mpinit.initialize(model, optimizer, opt_level=opt_level)
    return model, optimizer


def main() -> None:
    opt_level = sys.argv[1] if len(sys.argv) > 1 else "O2"
    torch.manual_seed(0)
    model, optimizer = build(opt_level)
    first, then = train(model, optimizer, 1), train(model, optimizer, 200)
    print(f"{opt_level}: loss {first:.3f} -> {then:.3f}, loss scale {mpinit.loss_scale(optimizer):g}")

    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "mpinit": mpinit.state_dict(optimizer)}
    mpinit.undo([model, optimizer])  # the first run is over; at O1 its casts would stay on in this thread
    model, optimizer = build(opt_level)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    mpinit.load_state_dict(saved["mpinit"], optimizer)
    print(f"resumed: loss {train(model, optimizer, 100):.3f}")


if __name__ == "__main__":
    main()
