"""The tables of README and the pages: each block between marks is made from the committed results.

A block without results is empty. A file is written only where its control was near 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from .cases import workloads
from .measure import RESULTS, control_of, fastest, ratio
from .ways import EXTRAS, WAYS, by_title

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FINETUNED: Final = ROOT / "examples" / "results" / "finetune_16bit_checkpoint.json"
MARKED: Final = re.compile(r"(<!-- benchmarks (\w+): begin -->\n).*?(<!-- benchmarks \2: end -->)", re.S)
DEVICES: Final = {"cpu": "CPU", "cuda": "CUDA"}
SHORT: Final = ("launch_bf16", "launch_fp16")
Result = dict[str, Any]


def read(device: str, name: str) -> Result | None:
    """Return a committed result; None where there is none."""
    path = RESULTS / device / f"{name}.json"
    found: Result | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown; empty without rows."""
    head, lines = list(head), [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) if lines else ""


def _cell(result: Result, way: str, other: str, short: bool = False) -> str:
    if way not in result["seconds"] or other not in result["seconds"]:
        return "-"
    middle, low, high = ratio(result, way, other)
    return f"{middle:.2f}" if short else f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def iterations(
    device: str, names: Iterable[str] = ("launch_bf16", "launch_fp16", "plain", "weights"), ways: Iterable[str] = ()
) -> str:
    """Tabulate whole iterations, of mpinit in some ways or in all, over torch.amp and over the loop by hand.

    The loop by hand over torch.amp shows how much faster than torch.amp masters can be on the machine.
    """
    rows = []
    for name in names:
        if (result := read(device, name)) is not None:
            title = workloads()[name].title
            for way in result["seconds"]:
                if WAYS[way].amp and (not ways or way in ways):
                    cells = [_cell(result, way, other) for other in (WAYS[way].by_hand, WAYS[way].amp)]
                    if set(cells) != {"-"}:
                        rows.append([title, WAYS[way].title, f"{1e3 * fastest(result, way):.2f}", *cells])
    return table(["iteration", "way", "ms", "over the loop by hand", "over torch.amp"], rows)


def loops(device: str) -> str:
    """Tabulate loops with clipping, accumulation, schedulers and averages over the same loops by hand and with amp."""
    rows = []
    for name in (each for each in workloads() if each.startswith("loops_")):
        if (result := read(device, name)) is not None:
            for way in result["seconds"]:
                level, _, extra = way.partition("+")
                if extra and WAYS[level].is_ours:
                    other = f"{WAYS[level].by_hand}+{EXTRAS[extra][0]}"
                    rows.append([EXTRAS[extra][1], WAYS[level].title, _cell(result, way, other)])
    return table(["an iteration with", "mpinit", "over the loop by hand"], rows)


def steps(device: str) -> str:
    """Tabulate steps with split masters and encoded states over O5's."""
    result = read(device, "steps")
    ways = [way for way in workloads()["steps"].names if not way.startswith("o5")] if result else []
    rows = []
    for way in ways:
        assert result is not None
        is_here = way in result["seconds"]
        ms = f"{1e3 * fastest(result, way):.2f}" if is_here else "-"
        rows.append([by_title(way), ms, _cell(result, way, "o5") if is_here else "no compiler on this machine"])
    return table(["a step of", "ms", "over the step of O5"], rows)


def compiled(device: str) -> str:
    """Tabulate compiled iterations over compiled torch.amp."""
    result = read(device, "compiled")
    rows = []
    for way in result["seconds"] if result else ():
        assert result is not None
        if WAYS[way].amp:
            facts, cell = result["facts"][way], _cell(result, way, WAYS[way].amp)
            rows.append([WAYS[way].title, cell, str(facts["graphs"]), str(facts["breaks"])])
    return table(["compiled", "over torch.amp", "graphs", "graph breaks"], rows)


def setting_up(device: str) -> str:
    """Tabulate the time of ``initialize`` and of the import."""
    result, imported = read(device, "initialize"), read(device, "import")
    ways = [way for way in result["seconds"] if not way.endswith("_again")] if result else []
    rows = [[f"`initialize` of 1,000 modules, {way}", f"{1e3 * fastest(result, way):.1f} ms"] for way in ways if result]
    if imported:
        rows.append(["`import mpinit` after `import torch`", f"{1e3 * fastest(imported, 'mpinit'):.0f} ms"])
    return table(["", "time"], rows)


def memory(device: str, names: Iterable[str] = ()) -> str:
    """Tabulate bytes per parameter by kind, and the peak."""
    result = read(device, "memory")
    rows = []
    for way, facts in (result or {"facts": {}})["facts"].items():
        if not names or way in names:
            sizes = [facts[kind] / facts["parameters"] for kind in ("weights", "masters", "gradients", "states")]
            cells = [f"{size:.1f}" for size in (*sizes, sum(sizes), facts["peak"] / facts["parameters"])]
            rows.append([by_title(way) if not WAYS[way].is_ours else f"mpinit {WAYS[way].title}", *cells])
    return table(["", "weights", "masters", "gradients", "states", "sum", "peak of a step"], rows)


def launches() -> str:
    """Tabulate operations, host reads and copies of an iteration on the simulated device."""
    forms = {form: read("cpu", f"launches_{form}") for form in ("fused", "foreach")}
    rows = []
    for way in WAYS:
        found = [(result or {"facts": {}})["facts"].get(way) for result in forms.values()]
        if any(found):
            cells = [str(facts[kind]) if facts else "-" for facts in found for kind in ("launches", "reads", "copies")]
            rows.append([WAYS[way].title, *cells])
    return table(["", *(f"{what}, {form}" for form in forms for what in ("launches", "reads", "copies"))], rows)


def controls(device: str) -> str:
    """List the controls: the time of the loop by hand, or of torch.amp, over itself."""
    results = [result for name in workloads() if (result := read(device, name)) is not None]
    said = [f"{r['workload']} {ratio(r, *pair)[0]:.3f}" for r in results if (pair := control_of(r)) is not None]
    return f"Controls: {', '.join(said)}." if said else ""


_SECTIONS: Final[Mapping[str, tuple[Callable[[str], str], str]]] = {
    "Iterations": (
        iterations,
        "*Launch-bound*: 40 x [Linear 32, LayerNorm, ReLU], batch 4: the time is the cost of calling operations. *16 M "
        "weights*: 40 x [Linear 640, ReLU], batch 4: the time is that of reading and writing memory. AdamW, fused.",
    ),
    "Loops": (loops, "The launch-bound network. The loop by hand does the same to its float32 masters."),
    "Steps with less memory": (
        steps,
        "The step alone, of AdamW on 16 M weights, from 16-bit gradients to 16-bit weights.",
    ),
    "Compiled training": (compiled, "Model and loss as one compiled function, of three linear layers with ReLU."),
    "Setting up": (setting_up, ""),
    "Memory": (
        memory,
        "Bytes per parameter with AdamW, for 16 M weights: by kind between backward and step, each storage once; and "
        "the most that the process had allocated in an iteration.",
    ),
}


def figures() -> str:
    """Return all sections of the page of benchmarks, for each device that was measured."""
    parts = []
    for device, name in DEVICES.items():
        made = {title: (make(device), text) for title, (make, text) in _SECTIONS.items()}
        if not any(text for text, _ in made.values()):
            continue
        first = next(path for path in sorted((RESULTS / device).glob("*.json")))
        about = json.loads(first.read_text(encoding="utf-8"))
        machine = f"Measured on {about['machine']}, {about['cores']} cores, torch {about['torch']}."
        parts += [f"## On {'a ' if device == 'cpu' else ''}{name}", machine]
        for title, (text, said) in made.items():
            if text:
                parts += [f"### {title}, {name}", *([said] if said else []), text]
        parts += [controls(device)] if controls(device) else []
    return "\n\n".join(parts)


def finetuned() -> str:
    """Tabulate the results of the example that fine-tunes a 16-bit checkpoint."""
    return finetuned_from(FINETUNED)


def finetuned_from(path: Path) -> str:
    """Tabulate a file of the example."""
    result = json.loads(path.read_text(encoding="utf-8"))
    columns = ("final loss", "best loss", "weights that never moved", "norm weights moved by", "bytes per parameter")
    rows = [
        [
            *(way["way"], f"{way['final loss']:.4f}", f"{way['best loss']:.4f}"),
            *(f"{way['weights that never moved, %']:.1f} %", f"{way['norm weights moved by']:.5f}"),
            *(f"{way['bytes a parameter']:.1f}", f"{way['seconds']} s"),
        ]
        for way in result["ways"]
    ]
    gained = [f"- {way['way']}: {way['of what float32 gained, %']} %" for way in result["ways"][1:]]
    before, most = f"{result['loss before']:.4f}", f"{result['gained by float32']:.4f}"
    remark = f"Loss before fine-tuning: {before} (float32-loaded). Of what float32 gained ({most}):"
    return "\n".join([table(["", *columns, "time"], rows), "", remark, *gained])


_FINETUNED_WAYS: Final = {
    "bf16-loaded, plain": "plain bfloat16",
    "bf16-loaded, mpinit O5 split": "**mpinit O5, split masters**",
    "bf16-loaded, mpinit O5": "mpinit O5, full masters",
    "float32-loaded": "float32",
}


def finetuned_in_short() -> str:
    """Tabulate README's columns of the fine-tuning example."""
    ways = {way["way"]: way for way in json.loads(FINETUNED.read_text(encoding="utf-8"))["ways"]}
    rows = []
    for name, title in _FINETUNED_WAYS.items():
        loss, size = f"{ways[name]['final loss']:.4f}", f"{ways[name]['bytes a parameter']:.0f}"
        rows.append([title, loss, f"{ways[name]['weights that never moved, %']:.1f} %", size])
    return table(["fine-tuned from bfloat16", "final loss", "weights that never moved", "bytes per parameter"], rows)


MADE: Final[Mapping[str, Callable[[], str]]] = {
    "figures": figures,
    "iterations_in_short": lambda: iterations("cpu", SHORT, ("o2", "o5", "split")),
    "memory_in_short": lambda: memory("cpu", ("fp32", "o5", "split", "split_int8")),
    "launches": launches,
    "finetuned": finetuned,
    "finetuned_in_short": finetuned_in_short,
}


def replaced(text: str) -> str:
    """Return a page with all its blocks made anew."""

    def block(mark: re.Match[str]) -> str:
        made = MADE[mark[2]]()
        return f"{mark[1]}\n{made}\n\n{mark[3]}" if made else f"{mark[1]}{mark[3]}"

    return MARKED.sub(block, text)


def write() -> None:
    """Write all pages that have blocks."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := replaced(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
