"""A transformer on the standard library's own text that stops training in float16: found, explained and mended.

Its activation is written out, as in many models: x / (1 + exp(-1.702 x)). Below x = -6.5 that exponential is inf in
float16. The forward pass doesn't show it, x / inf is 0 as it should be, and the loss looks well; the backward pass
multiplies inf by 0: more and more steps are skipped, in the end all of them. The run asks mpinit why
(``overflow_report``, ``watch_overflow``), keeps that activation in float32 and goes on from the same weights.

Prints a table and writes a plot to runs/why_did_my_step_skip/. Takes less than a minute on an idle CPU core.
"""

from __future__ import annotations

import argparse
import ast
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import mpinit

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 24, 4
VOCABULARY = 128
# So many skipped steps in a row are no search for a scale any more.
PATIENCE = 10


class QuickGelu(nn.Module):
    """x * sigmoid(1.702 x), written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-1.702 * x))


class Block(nn.Module):
    """Attention behind a norm and a feed-forward net, each added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu = QuickGelu()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(self.gelu(self.up(x)))


class Transformer(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.embedding(characters) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> Tensor:
    """The source of a few modules of the standard library, a number for each character."""
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, ast, logging))
    return torch.tensor(list(source.encode("ascii", "replace")), dtype=torch.long)


def batches(steps: int) -> list[Tensor]:
    """The same batches for every run: windows of one character more than the context."""
    characters, places = text(), torch.Generator().manual_seed(0)
    starts = torch.randint(len(characters) - CONTEXT - 1, (steps, BATCH), generator=places)
    return [torch.stack([characters[start : start + CONTEXT + 1] for start in row]) for row in starts.tolist()]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """The cross entropy of the next character."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class Run:
    """What a run did: step, loss, scale, and whether it was skipped."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped_at: int | None = None


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(run: Run, model: Any, optimizer: Any, data: list[Tensor], first: int = 0) -> None:
    """Train until the data ends, or until nothing but skipped steps comes; the gradients of the last step are left."""
    in_a_row = 0
    for number, batch in enumerate(tqdm(data[first:], desc=f"{run.name:<26}", leave=True), first):
        optimizer.zero_grad()
        loss, scale = loss_of(model, batch), mpinit.loss_scale(optimizer)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        skipped = mpinit.step_was_skipped(optimizer)
        run.rows.append({"step": number + 1, "loss": loss.item(), "scale": scale, "skipped": skipped})
        in_a_row = in_a_row + 1 if skipped else 0
        if in_a_row == PATIENCE:
            run.stopped_at = number
            break


def examine(model: Any, optimizer: Any, batch: Tensor) -> list[str]:
    """Ask why the step was skipped, in the order in which one would, and return what to keep in float32."""
    print("\n1. mpinit.overflow_report(optimizer): which gradients are bad, from what a skipped step has left\n")
    report = mpinit.overflow_report(optimizer)
    lines = str(report).splitlines()
    print("\n".join([*lines[:5], "  ...", lines[-1]]))
    print("\n2. mpinit.watch_overflow(model): the first operation that computed inf or nan\n")
    with mpinit.watch_overflow(model) as watch:
        loss_of(model, batch)
    print(watch)
    # Every block has the same activation: the others' would overflow later.
    kept = [re.sub(r"\d+", "*", watch.first_module or "")]
    print(f"\n3. mpinit.initialize(model, optimizer, 'O2', keep_fp32={kept})")
    return kept


def table(runs: list[Run]) -> str:
    lines = [f"{'run':<28}{'steps':>6}{'skipped':>9}{'loss':>8}{'scale':>13}"]
    for run in runs:
        done = [row for row in run.rows if not row["skipped"]]
        mean = sum(row["loss"] for row in done[-10:]) / max(len(done[-10:]), 1)
        skipped = len(run.rows) - len(done)
        lines.append(f"{run.name:<28}{len(done):>6}{skipped:>9}{mean:>8.3f}{run.rows[-1]['scale']:>13.3g}")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for run, color in zip(runs, ("#8c8c8c", "#c44e52", "#4c72b0"), strict=True):
        steps = [row["step"] for row in run.rows]
        done = [row for row in run.rows if not row["skipped"]]
        upper.plot([row["step"] for row in done], [row["loss"] for row in done], color=color, lw=1.5, label=run.name)
        if run.name != "float32":
            lower.plot(steps, [row["scale"] for row in run.rows], color=color, lw=1.5, drawstyle="steps-post")
        skips = [row["step"] for row in run.rows if row["skipped"]]
        lower.plot(skips, [row["scale"] for row in run.rows if row["skipped"]], "x", color=color, ms=5)
        if run.stopped_at is not None:
            upper.axvline(run.stopped_at + 1, color="#333333", lw=0.9, ls=":")
            place = run.stopped_at + 1, 0.92
            words: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            upper.annotate("asked why", place, xytext=(4, 0), fontsize=9, **words)
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    upper.set_title("A float16 transformer that skips ever more of its steps, and its cure", loc="left")
    lower.set_yscale("log", base=2)
    lower.set_ylabel("loss scale (x: skipped)")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/why_did_my_step_skip"), help="folder for plot and table")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a network this small gains nothing from more
    logging.getLogger("mpinit").setLevel(logging.ERROR)
    data = batches(options.steps)
    reference, broken, mended = Run("float32"), Run("O2, float16"), Run("O2, float16, mended")

    model, optimizer = mpinit.initialize(*build(), "O0")
    train(reference, model, optimizer, data)

    model, optimizer = mpinit.initialize(*build(), "O2")
    train(broken, model, optimizer, data)
    if broken.stopped_at is None:
        raise SystemExit("no overflow in so few steps: give --steps more")
    kept = examine(model, optimizer, data[broken.stopped_at])

    mpinit.undo(model)
    mpinit.initialize(model, optimizer, "O2", keep_fp32=kept)
    print()
    train(mended, model, optimizer, data, first=broken.stopped_at + 1)

    text = table([reference, broken, mended])
    print(f"\n{text}\n")
    draw([reference, broken, mended], options.out / "loss_and_scale.png")
    (options.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(f"Plot: {options.out / 'loss_and_scale.png'}")


if __name__ == "__main__":
    main()
