"""What float32 masters are for: the trained network, saved in bfloat16, is tuned for digits one pixel lower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import mpinit

from .digits_data import Digits
from .network import digits_net
from .progress import Progress
from .training import Run as Notes
from .training import Schedule, accuracy_of, one_step

# A rate of fine-tuning: most steps are smaller than half of the last place of a bfloat16 weight.
RATE, EPOCHS = 1e-4, 6
WAYS: Mapping[str, dict[str, Any]] = {
    "float32": {"opt_level": "O0"},
    "bfloat16, no masters": {"opt_level": "O3", "cast_model_type": "bf16"},
    "bfloat16, O5": {"opt_level": "O5"},
    "bfloat16, O5 split": {"opt_level": "O5", "master_weights": "split"},
}


@dataclass(frozen=True)
class Tuned:
    """The result of one way to train: test loss and accuracy, the share of unmoved weights, bytes per parameter."""

    way: str
    loss: float
    accuracy: float
    unmoved: float
    bytes_each: float


def lowered(digits: Digits) -> Digits:
    """The images moved down by one pixel."""
    move = {
        name: torch.roll(getattr(digits, name), shifts=1, dims=2).index_fill(2, torch.tensor([0]), 0.0)
        for name in ("train_images", "test_images")
    }
    return replace(digits, **move)


def tune(way: str, saved: Mapping[str, torch.Tensor], digits: Digits, schedule: Schedule) -> Tuned:
    """Load what was saved, and train on at a small rate."""
    torch.manual_seed(0)
    order = torch.Generator().manual_seed(1)
    model = digits_net(schedule.width)
    model.load_state_dict(saved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    mpinit.initialize(model, optimizer, **WAYS[way])
    epochs = min(EPOCHS, schedule.epochs)
    notes = Notes(way)
    steps = len(digits.train_images) // schedule.batch_size
    with Progress(f"{way:20}", epochs, steps) as progress:
        for _ in range(epochs):
            for images, labels in digits.batches(schedule.batch_size, order):
                one_step(notes, model, optimizer, images, labels)
                progress.step()
            progress.epoch(loss=f"{notes.losses[-1]:.4f}")
    bytes_each = sum(mpinit.audit(model, optimizer).bytes_per_parameter["now"].values())
    after = model.state_dict()  # float32, of the masters where there are any
    names = [name for name, _ in model.named_parameters()]
    still = sum(int((after[name].float() == saved[name].float()).sum()) for name in names)
    loss, accuracy = accuracy_of(model, digits)
    mpinit.undo(model)
    return Tuned(way, loss, accuracy, still / sum(saved[name].numel() for name in names), bytes_each)


def in_bfloat16(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state as most checkpoints are published."""
    state = model.state_dict()
    return {name: value.bfloat16().float() if value.is_floating_point() else value for name, value in state.items()}


def tuned_table(found: Sequence[Tuned]) -> tuple[tuple[str, ...], ...]:
    """Headings, and one row for each way."""
    head = ("fine-tuned in", "test loss", "weights that never moved", "bytes per parameter")
    return (head, *((t.way, f"{t.loss:.4f}", f"{100 * t.unmoved:.1f} %", f"{t.bytes_each:.0f}") for t in found))
