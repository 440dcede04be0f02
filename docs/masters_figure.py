"""What masters are worth: a run, its table, its sentence and its picture.

``python docs/masters_figure.py measure`` trains, and writes docs/measured/masters.json; without "measure" the pages are
written from that file. All ways train one small transformer on the source of Python's standard library.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from demo.stdlib_text import LENGTH, Writer, load_text  # noqa: E402

import mpinit  # noqa: E402

MEASURED: Final = ROOT / "docs" / "measured" / "masters.json"
PICTURE: Final = ROOT / "docs" / "_static" / "masters.png"
BATCH: Final = 8
FINE_TUNING_RATE: Final = 1e-5
_MARKED: Final = re.compile(r"(<!-- figures (\w+): begin -->\n).*?(<!-- figures \w+: end -->)", re.S)


@functools.cache
def _text() -> Tensor:
    return load_text().long()


def batches(steps: int, seed: int) -> Iterator[Tensor]:
    """Draw random pieces of the text, one byte longer than the model's input."""
    text, chance = _text(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=chance)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the mean cross entropy of the next byte, in float32."""
    logits = model(batch[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def _trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Writer(96, 3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(400, seed=0):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def checkpoint() -> Writer:
    """Return the model after 400 steps in float32, with weights rounded to bfloat16, as in published checkpoints."""
    model = Writer(96, 3, 4)
    model.load_state_dict(_trained())
    return model.bfloat16().float()


def _nearest(values: Tensor, bits: int) -> Tensor:
    """Round float32 numbers to a number of bits, to nearest."""
    rest = 32 - bits
    whole = values.view(torch.int32)
    return ((whole + (1 << (rest - 1))) >> rest << rest).view(torch.float32)


def _stochastic(values: Tensor, chance: torch.Generator) -> Tensor:
    """Round float32 numbers to bfloat16, stochastically."""
    noise = torch.randint(1 << 16, values.shape, generator=chance, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) >> 16 << 16).view(torch.float32)


def _by_hand(model: nn.Module, rate: float, steps: int, rounded: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Train bfloat16 weights with float32 masters, which ``rounded`` rounds after each step."""
    model.bfloat16()
    weights = list(model.parameters())
    kept = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(kept, lr=rate)
    for batch in batches(steps, seed=4):
        model.zero_grad()
        loss_of(model, batch).backward()
        for own, weight in zip(kept, weights, strict=True):
            own.grad = None if weight.grad is None else weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for own, weight in zip(kept, weights, strict=True):
                own.copy_(rounded(own))
                weight.copy_(own)
    return [own.detach() for own in kept]


def _plain(model: nn.Module, rate: float, steps: int, dtype: torch.dtype) -> list[Tensor]:
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in batches(steps, seed=4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [p.detach().float() for p in model.parameters()]


def _ours(model: nn.Module, rate: float, steps: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    for batch in batches(steps, seed=4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    mpinit.undo(model)
    return [p.detach() for p in model.parameters()]


def measured() -> dict[str, Any]:
    """Measure how much of the progress of 200 float32 steps remains with fewer bits, at four learning rates."""
    steps, chance = 200, torch.Generator().manual_seed(0)
    ways: dict[str, Callable[[nn.Module, float], list[Tensor]]] = {
        "float32": lambda model, rate: _plain(model, rate, steps, torch.float32),
        "bfloat16 alone": lambda model, rate: _plain(model, rate, steps, torch.bfloat16),
        "bfloat16, stochastic rounding": lambda m, rate: _by_hand(m, rate, steps, lambda v: _stochastic(v, chance)),
        "24 bits": lambda model, rate: _by_hand(model, rate, steps, lambda values: _nearest(values, 24)),
        "32 bits exact (O5, split)": lambda model, rate: _ours(model, rate, steps),
    }
    unseen = list(batches(24, seed=5))

    def evaluated(weights: list[Tensor]) -> float:
        model = checkpoint()
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), weights, strict=True):
                parameter.copy_(values)
            return sum(float(loss_of(model, batch).double()) for batch in unseen) / len(unseen)

    before = evaluated([p.detach() for p in checkpoint().parameters()])
    rows = []
    for rate in (1e-4, 1e-5, 1e-6, 1e-7):
        gains = {name: before - evaluated(way(checkpoint(), rate)) for name, way in ways.items()}
        kept = {name: round(gain / gains["float32"], 3) for name, gain in gains.items() if name != "float32"}
        rows.append({"rate": rate, "float32 takes off": float(f"{gains['float32']:.3g}"), "kept": kept})
    return {"torch": torch.__version__, "steps": steps, "loss before": round(before, 4), "rows": rows}


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    return rows


def _whole(share: float) -> str:
    return f"{share:.0%}".replace("-0%", "0%")


def worth() -> str:
    """Tabulate the progress of training with fewer bits of each weight."""
    found = _rows()
    ways = list(found[0]["kept"])
    rows = [f"| rate | float32 takes off the loss | {' | '.join(ways)} |", f"|---|---|{'---|' * len(ways)}"]
    for row in found:
        kept = " | ".join(_whole(row["kept"][way]) for way in ways)
        rows.append(f"| {row['rate']:g} | {row['float32 takes off']:g} | {kept} |")
    return "\n".join(rows) + "\n"


def worth_in_short() -> str:
    """Return the row of the rate at which most people fine-tune, as a sentence."""
    row = next(row for row in _rows() if row["rate"] == FINE_TUNING_RATE)
    alone, *_, ours = row["kept"].values()
    with_masters = "all of it" if ours >= 0.995 else f"{ours:.0%}"
    return (
        f"At a learning rate of 1e-5, plain bfloat16 weights learn {100 * alone:.0f} % of what float32 learns in 200 "
        f"steps; with masters, {with_masters}.\n"
    )


def draw_worth(path: Path) -> None:
    """Plot the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes, rows = figure.subplots(), _rows()
    for way, color in zip(rows[0]["kept"], ("#b3261e", "#dd8452", "#8c8c8c", "#4c72b0"), strict=True):
        kept = [100 * row["kept"][way] for row in rows]
        axes.plot([row["rate"] for row in rows], kept, marker="o", label=way, color=color)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("learning rate of AdamW")
    axes.set_ylabel("of what float32 takes off the loss, %")
    axes.axhline(100, color="#cccccc", zorder=0)
    axes.legend(fontsize=8, framealpha=0.9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


MADE: Final[Mapping[str, Callable[[], str]]] = {"worth": worth, "worth_in_short": worth_in_short}
PAGES: Final[Mapping[str, Path]] = {
    "worth": ROOT / "docs" / "explanation" / "masters.md",
    "worth_in_short": ROOT / "docs/how-to/sixteen-bit-checkpoint.md",
}


def main() -> None:
    """Measure if asked; write the pages and the picture."""
    if sys.argv[1:] == ["measure"]:
        MEASURED.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    for path in PAGES.values():
        text = path.read_text(encoding="utf-8")
        made = _MARKED.sub(lambda mark: f"{mark[1]}\n{MADE[mark[2]]()}\n{mark[3]}", text)
        path.write_text(made, encoding="utf-8")
    draw_worth(PICTURE)


if __name__ == "__main__":
    main()
