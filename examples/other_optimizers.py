"""Muon, SOAP and Shampoo from a package, beside AdamW: bfloat16 weights alone, and with split float32 masters at O5.

A small network learns scikit-learn's handwritten digits from the same start with the same batches three times for each
optimizer: in float32, in bfloat16 without masters (O3), and at O5 with split masters. None of them knows of mpinit:
while it steps, it finds float32 parameters and gradients in its groups. The table has the loss on held-out digits, and
how far the weights have ended from those of float32, as a share of the way that those went. The rates are those of the
packages, but for Shampoo's, whose own of 0.001 learns little in this time. To run it: ``pip install "mpinit[demo]"
pytorch-optimizer``, then ``python examples/other_optimizers.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from demo.digits_data import load_digits
from pytorch_optimizer import SOAP, Muon, Shampoo
from torch import nn

import mpinit

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the matrix between the first and the last layer; for the rest it does as AdamW."""
    others = [p for name, p in model.named_parameters() if name != "2.weight"]
    hidden = [model.get_parameter("2.weight")]
    return Muon([{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}])


OPTIMIZERS: dict[str, Maker] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "Muon": muon,
    "SOAP": lambda model: SOAP(model.parameters()),
    "Shampoo": lambda model: Shampoo(model.parameters(), lr=0.1),
}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"opt_level": "O0"},
    "bfloat16 alone": {"opt_level": "O3", "cast_model_type": "bfloat16"},
    "O5 split": {"opt_level": "O5", "master_weights": "split"},
}


def train(make: Maker, way: dict[str, Any], steps: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The loss on held-out digits, and the weights before and after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    digits = load_digits()
    model, optimizer = mpinit.initialize(model, make(model), **way)
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(len(digits.train_images), (128,), generator=order)
        loss = nn.functional.cross_entropy(model(digits.train_images[batch].flatten(1)), digits.train_labels[batch])
        optimizer.zero_grad()
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(digits.test_images.flatten(1)), digits.test_labels)
    # The state dict of an initialised model is float32: the masters' numbers where there are masters.
    end = torch.cat([value.float().flatten() for value in model.state_dict().values()])
    return loss.item(), start, end


def main() -> None:
    """Train every optimizer in every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(f"{'':10}{'float32':>10}{'bfloat16 alone':>24}{'O5 split':>24}")
    for name, make in OPTIMIZERS.items():
        results = {way: train(make, words, steps) for way, words in WAYS.items()}
        loss, start, aim = results["float32"]
        row = f"{name:10}{loss:10.4f}"
        for way in ("bfloat16 alone", "O5 split"):
            loss, _, end = results[way]
            row += f"{loss:14.4f}{float((end - aim).norm() / (aim - start).norm()):9.1%}"
        print(row)


if __name__ == "__main__":
    main()
