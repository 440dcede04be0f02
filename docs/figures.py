"""Figures and numbers of the explanations, from real runs: ``python docs/figures.py`` writes them.

Between the marks of a page stands what a run has come to; a test compares, and another draws the picture.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import mpinit

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stamps  # noqa: E402

EXPLANATION: Final = ROOT / "docs" / "explanation"
PICTURE: Final = ROOT / "docs" / "_static" / "gradients.png"
# The loss scale that training usually begins with.
SCALE: Final = 2.0**16
FINE_TUNING_RATE: Final = 1e-5
_MARKED: Final = re.compile(r"(<!-- figures (\w+): begin -->\n).*?(<!-- figures \w+: end -->)", re.S)
# The level's columns; bfloat16 at O3, where Adam in float16 is not worth training with.
_LEVELS: Final[Mapping[str, dict[str, Any]]] = {
    "O0": {"opt_level": "O0"},
    "O1, O4": {"opt_level": "O4"},
    "O2, O5": {"opt_level": "O5"},
    "O3": {"opt_level": "O3", "cast_model_type": "bfloat16"},
}


class _Attention(nn.Module):
    """A matrix product and a softmax, which say what they get and give, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.seen: dict[str, set[torch.dtype]] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.linear(x)
        softmax = torch.softmax(product, -1)
        normed = self.norm(product)
        self._record_bits("inputs of the model", x)
        self._record_bits("matrix products, convolutions", product)
        self._record_bits("softmax, norms", softmax, normed)
        for tensor in (product, softmax, normed):
            tensor.register_hook(lambda gradient: self._record_bits("gradients in the backward pass", gradient))
        return product, softmax * normed

    def _record_bits(self, what: str, *tensors: Tensor) -> None:
        self.seen.setdefault(what, set()).update(tensor.dtype for tensor in tensors)


def levels() -> str:
    """Tabulate the bits of each kind of tensor at each level, and the bytes of all tensors."""
    columns = {title: _measured(asked) for title, asked in _LEVELS.items()}
    rows = [f"| | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for what in next(iter(columns.values())):
        rows.append(f"| {what} | {' | '.join(column[what] for column in columns.values())} |")
    return "\n".join(rows) + "\n"


def _measured(asked: dict[str, Any]) -> dict[str, str]:
    model = _Attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, **asked)
    outputs = _step_but_for_clearing(model, optimizer)
    weight = model.linear.weight
    (stepped,) = (p for p in mpinit.master_params(optimizer) if p.dim() == 2)
    cells = {
        "weights between steps": {weight.dtype},
        "what the optimizer steps": {stepped.dtype},
        "inputs of the model": model.seen["inputs of the model"],
        "matrix products, convolutions": model.seen["matrix products, convolutions"],
        "softmax, norms": model.seen["softmax, norms"],
        "outputs of the model": {output.dtype for output in outputs},
        "gradients in the backward pass": model.seen["gradients in the backward pass"],
        "gradients that the step uses": {stepped.grad.dtype if stepped.grad is not None else torch.float32},
        "state dict": {model.state_dict()["linear.weight"].dtype},
    }
    bits = {what: " and ".join(str(dtype.itemsize * 8) for dtype in _ascending(found)) for what, found in cells.items()}
    mpinit.undo(model)
    return bits


def _step_but_for_clearing(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    outputs: tuple[Tensor, ...] = model(torch.randn(8, 64))
    with mpinit.scale_loss(sum(output.float().square().mean() for output in outputs), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return outputs


def _ascending(dtypes: set[torch.dtype]) -> list[torch.dtype]:
    return sorted(dtypes, key=lambda dtype: dtype.itemsize)


def gradients(steps: int = 300) -> Tensor:
    """Compute all gradients of a small CNN after some steps on handwritten digits, in float32."""
    sys.path.insert(0, str(ROOT / "examples"))
    from demo.digits_data import load_digits
    from demo.network import digits_net

    torch.manual_seed(0)
    digits, model = load_digits(), digits_net(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mpinit.initialize(model, optimizer, "O0", loss_scale=SCALE)
    chance, done = torch.Generator().manual_seed(0), 0
    while True:
        for images, labels in digits.batches(64, chance):
            optimizer.zero_grad()
            with mpinit.scale_loss(nn.functional.cross_entropy(model(images), labels), optimizer) as scaled_loss:
                scaled_loss.backward()
            done += 1
            if done == steps:
                found = [p.grad.flatten() for p in mpinit.master_params(optimizer) if p.grad is not None]
                mpinit.undo(model)
                return torch.cat(found)
            optimizer.step()


def lost() -> str:
    """Return the share of the gradients that each 16-bit dtype loses, as a block of text."""
    return f"```text\n{description_of(gradients())}\n```\n"


def _exponents(found: Tensor) -> Tensor:
    return torch.frexp(found[found != 0]).exponent - 1


def description_of(found: Tensor) -> str:
    """Describe the shares of gradients that are lost, by dtype and scale."""
    exponents = _exponents(found)
    lines = [f"{found.numel():,} gradients, {int((found == 0).sum()):,} of them 0"]
    # Exponents of the smallest subnormal and the smallest normal number of a type, and of the first beyond it.
    for dtype, scale, ends in (
        ("float16", 1.0, (-24, -14, 16)),
        ("float16", SCALE, (-24, -14, 16)),
        ("bfloat16", 1.0, (-133, -126, 128)),
    ):
        subnormal, normal, end = (edge - math.log2(scale) for edge in ends)
        small, gone, inf = (
            float(each.double().mean()) for each in (exponents < normal, exponents < subnormal, exponents >= end)
        )
        lines.append(
            f"  {dtype} at scale {scale:g}: {small:.1%} below the smallest normal number, {gone:.1%} become 0, "
            f"{inf:.1%} inf"
        )
    return "\n".join([*lines, f"  scale for float16: {2.0 ** (13 - int(exponents.max())):g}"])


def draw(found: Tensor, path: Path) -> None:
    """Plot gradients by exponent, with the range of float16 shaded, at scale 1 and at the usual one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    bins, total = Counter(_exponents(found).tolist()), found.numel()
    exponents = sorted(bins)
    # Exponents of float16's smallest subnormal, smallest normal and largest number.
    subnormal, normal, largest = -24, -14, 15
    for number, (scale, color) in enumerate(((1.0, "#4c72b0"), (SCALE, "#dd8452"))):
        shift = math.log2(scale)
        band = {"ymin": 0.5 * number, "ymax": 0.5 * (number + 1), "color": color, "lw": 0}
        axes.axvspan(normal - shift, largest + 1 - shift, alpha=0.22, label=f"float16 at scale {scale:g}", **band)
        axes.axvspan(subnormal - shift, normal - shift, alpha=0.1, label="  subnormal there", **band)
    heights = [100 * bins[exponent] / total for exponent in exponents]
    axes.bar(exponents, heights, width=0.85, align="edge", color="#333333", zorder=3)
    axes.set_xlim(min([*exponents, subnormal - math.log2(SCALE)]) - 3, max([*exponents, largest]) + 3)
    axes.set_xlabel("exponent of the gradient: log2 of its magnitude")
    axes.set_ylabel("share of all gradients, %")
    axes.set_title(f"{total:,} gradients, {(found == 0).double().mean():.1%} of them 0", loc="left")
    axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={stamps.KEY: stamps.of_text(description_of(found))})


def _measured_by(name: str) -> Any:
    """Read a result of ``python docs/measure.py``."""
    return json.loads(_measured_text(name))


def _measured_text(name: str) -> str:
    return (ROOT / "docs" / "measured" / f"{name}.json").read_text(encoding="utf-8")


def audited() -> str:
    """Tabulate the audit's predictions beside the measured steps."""
    found = _measured_by("audit")
    by_name: dict[str, dict[float, dict[str, Any]]] = {}
    for row in found["rows"]:
        by_name.setdefault(row["optimizer"], {})[row["rate"]] = row
    rates = list(next(iter(by_name.values())))
    rows = [f"| foreseen / measured | {' | '.join(f'lr {rate:g}' for rate in rates)} |", f"|---{'|---' * len(rates)}|"]
    for name, at in by_name.items():
        cells = (f"{at[rate]['foreseen']:.1%} / {at[rate]['measured']:.1%}" for rate in rates)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    errors = (f"{100 * found[f'{which} error']:.1f}" for which in ("median", "mean", "largest"))
    rows.append("\nThe two differ by {} points in the median, {} on average and {} at most.".format(*errors))
    return "\n".join(rows) + "\n"


def served() -> str:
    """Tabulate the difference between the trained and the served model, by level."""
    rows = [
        "| | mean difference of log-probabilities | largest | sequences with a ratio beyond 1.2 | they part first in |",
        "|---|---|---|---|---|",
    ]
    for row in _measured_by("fidelity")["rows"]:
        beyond = f"{row['sequences beyond a ratio of 1.2']} of {row['sequences']}"
        first = "nowhere" if row["first module"] is None else f"`{row['first module']}`"
        rows.append(f"| {row['way']} | {row['mean']:g} | {row['largest']:g} | {beyond} | {first} |")
    return "\n".join(rows) + "\n"


def skipping() -> str:
    """Tabulate the cost of the check of gradients."""
    rows = ["| AdamW at O5 | time of a step with the check, over one without |", "|---|---|"]
    rows += [f"| {row['network']} | {row['ratio']:.3f} |" for row in _measured_by("skipping")["rows"]]
    return "\n".join(rows) + "\n"


def _whole(share: float) -> str:
    return f"{share:.0%}".replace("-0%", "0%")


def worth() -> str:
    """Tabulate the progress of training with fewer bits of each weight."""
    found = _measured_by("masters")
    ways = list(found["rows"][0]["kept"])
    rows = [f"| rate | float32 takes off the loss | {' | '.join(ways)} |", f"|---|---|{'---|' * len(ways)}"]
    for row in found["rows"]:
        kept = " | ".join(_whole(row["kept"][way]) for way in ways)
        rows.append(f"| {row['rate']:g} | {row['float32 takes off']:g} | {kept} |")
    return "\n".join(rows) + "\n"


def worth_in_short() -> str:
    """Return the row of the rate at which most people fine-tune, as a sentence."""
    row = next(row for row in _measured_by("masters")["rows"] if row["rate"] == FINE_TUNING_RATE)
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
    axes, rows = figure.subplots(), _measured_by("masters")["rows"]
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
    figure.savefig(path, dpi=120, metadata={stamps.KEY: stamps.of_text(_measured_text("masters"))})


MADE: Final[Mapping[str, Callable[[], str]]] = {
    "levels": levels,
    "lost": lost,
    "audited": audited,
    "served": served,
    "skipping": skipping,
    "worth": worth,
    "worth_in_short": worth_in_short,
}


def replaced(text: str) -> str:
    """Return ``text`` with all parts between marks generated again."""
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{MADE[mark[2]]()}\n{mark[3]}", text)


def main() -> int:
    """Write the pages and the picture."""
    for path in sorted([*EXPLANATION.glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md"), ROOT / "README.md"]):
        path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw(gradients(), PICTURE)
    draw_worth(PICTURE.with_name("masters.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
