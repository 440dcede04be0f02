"""Final loss with encoded optimizer states beside float32 ones: python -m benchmarks.states --json FILE.

A CNN trains on scikit-learn's digits, a transformer and an LSTM on the standard library's source text. All train at O5
with split masters, from a few seeds each. The result is the loss on other data after the last step. ``--table FILE``
prints the table of measured losses. Lion is lion-pytorch's, if that is installed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import sys
import tarfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mpinit

STATES = ("float32", "bfloat16", "int8")
TEST_ROWS = 300
CONTEXT = 48
Data = tuple[Tensor, Tensor]
Measured = tuple[str, str, str, list[float]]
# task -> optimizer -> state -> the final loss for each seed.
Losses = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def lion(parameters: Any) -> torch.optim.Optimizer:
    make: Any = importlib.import_module("lion_pytorch").Lion
    made: Any = make(parameters, lr=5e-4)
    made.steps_per_parameter = True
    return made  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Lion": lion,
}


class Transformer(nn.Module):
    """A causal transformer of two layers, on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(128, 64), nn.Embedding(CONTEXT, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.places.weight.dtype)
        return self.head(self.layers(self.embedding(x) + self.places.weight[: x.shape[1]], mask=mask, is_causal=True))


class Lstm(nn.Module):
    """An LSTM of one layer, on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def digits() -> tuple[Data, Data]:
    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    return (x[:-TEST_ROWS], y[:-TEST_ROWS]), (x[-TEST_ROWS:], y[-TEST_ROWS:])


def text() -> tuple[Data, Data]:
    source = "".join(inspect.getsource(module) for module in (argparse, textwrap, tarfile))
    numbers = torch.tensor(list(source.encode("ascii", "replace")))
    rows = numbers[: len(numbers) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    x, y = rows[:, :-1], rows[:, 1:]
    return (x[:-TEST_ROWS], y[:-TEST_ROWS]), (x[-TEST_ROWS:], y[-TEST_ROWS:])


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Data, Data]], int]] = {
    "digits CNN": (cnn, digits, 64),
    "transformer": (Transformer, text, 16),
    "LSTM": (Lstm, text, 16),
}


def final_loss(task: str, optimizer_name: str, state: str, seed: int, steps: int) -> float:
    """Train once, and return the loss on the test data."""
    torch.manual_seed(seed)
    make, load, size = TASKS[task]
    (x, y), test_data = load()
    model = make()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    mpinit.initialize(model, optimizer, "O5", master_weights="split", optimizer_state=state)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 20) * max(0.02, 1 - s / steps))
    for _ in range(steps):
        rows = torch.randint(len(x), (size,))
        optimizer.zero_grad()
        with mpinit.scale_loss(_loss(model, x[rows], y[rows]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return _loss(model, *test_data).item()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def measured(tasks: Sequence[str], optimizers: Sequence[str], seeds: int, steps: int) -> Iterator[Measured]:
    """Yield the final losses of each task, optimizer and state, as soon as they are measured."""
    for task in tasks:
        for name in optimizers:
            for state in STATES:
                losses = [round(final_loss(task, name, state, seed, steps), 5) for seed in range(seeds)]
                yield task, name, state, losses


def table(losses: Losses) -> Iterator[str]:
    """Yield a row for each task and optimizer: the mean over the seeds, and the standard deviation."""
    yield f"| task | optimizer | {' | '.join(STATES)} |"
    yield "|---" * (2 + len(STATES)) + "|"
    for task, by_optimizer in losses.items():
        for name, by_state in by_optimizer.items():
            cells = [f"{statistics.mean(by_state[s]):.4f} ± {statistics.stdev(by_state[s]):.4f}" for s in STATES]
            yield f"| {task} | {name} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--optimizers", nargs="*", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--table", type=Path, help="print the table of what was measured before")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table(json.loads(options.table.read_text())["losses"])))
        return
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for task, name, state, losses in measured(options.tasks, options.optimizers, options.seeds, options.steps):
        found.setdefault(task, {}).setdefault(name, {})[state] = losses
        print(task, name, state, losses, file=sys.stderr, flush=True)
        if options.json:
            about = {"torch": torch.__version__, "seeds": options.seeds, "steps": options.steps}
            options.json.write_text(json.dumps({**about, "losses": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
