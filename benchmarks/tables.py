"""README's and the documentation's tables, from committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from . import charts, growth_figures, loop_figures
from .comparisons import COMPARISONS, Comparison
from .estimate import CONTROL_LIMITS, Estimate, seconds
from .footprint import KINDS
from .growth import AXES
from .results import ROOT, Results, measurable, read
from .roster import BY_TYPE
from .suite import title_of, workloads

RESULTS: Final = Path(__file__).parent / "results"
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "reference" / "benchmarks.md"
HOW_TO: Final = ROOT / "docs" / "how-to" / "memory.md"
STATES: Final = ROOT / "docs" / "explanation" / "optimizer-states.md"
CHECKPOINT: Final = ROOT / "docs" / "how-to" / "sixteen-bit-checkpoint.md"
PAGES: Final = (README, PAGE, HOW_TO, STATES, CHECKPOINT)
FINETUNED: Final = ROOT / "examples" / "results" / "finetune_16bit_checkpoint.json"
NOT_MEASURABLE: Final = "not measurable here"
NOT_THERE: Final = "Not measured yet."
_IN_README: Final = ("amp_bf16", "hand_bf16", "o1_bf16", "o2_bf16", "o2_split", "o3_bf16")
_WORKLOADS_IN_README: Final = ("launch", "bandwidth", "bert", "resnet")
_MEMORY_IN_README: Final = ("fp32", "o2_bf16", "o2_split", "o2_int8", "o2_released", "bitsandbytes")
_LESS_MEMORY: Final = (
    *("fp32", "o2_bf16", "o2_split", "o2_split_bf16", "o2_int8", "o2_released", "torchao", "bitsandbytes"),
)
_ENCODED: Final = ("o2_split", "o2_split_bf16", "o2_int8")
_MARKED: Final = re.compile(r"(<!-- benchmarks (\w+): begin -->\n).*?(<!-- benchmarks \w+: end -->)", re.S)
All = Mapping[str, Results]


def load(folder: Path, size: str = "full") -> dict[str, Results]:
    """Return the results of one machine, in the suite's order."""
    rows = workloads(size)
    return {
        name: read(folder / f"{name}.json", row) for name, row in rows.items() if (folder / f"{name}.json").exists()
    }


def machines() -> list[Path]:
    """Return the folders of results, CPUs first."""
    return sorted(
        (path for path in RESULTS.iterdir() if path.is_dir()), key=lambda path: (path.name[:3] != "cpu", path)
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def where(found: All) -> str:
    """Return machine and version of the workload that was measured last."""
    common = max((results.common for results in found.values()), key=lambda common: str(common["date"]))
    return f"{common['machine']}, {common['cores']} cores, torch {common['torch']}"


def relative(results: Results, contender: str, reference: str) -> str:
    """Return a cell: the ratio with its interval, or the reason for its absence."""
    if not results.rounds(contender):
        return "-"
    if not results.is_measurable():
        return NOT_MEASURABLE
    # Where the reference itself took no part there is nothing to compare with.
    return str(results.ratio(contender, reference) or "-")


def training(found: All, folder: Path, dtype: str) -> str:
    """Tabulate the time of a step over float32's."""
    rows = _with_contenders(found, BY_TYPE[dtype], "training")
    if not rows:
        return NOT_THERE
    names = [name for name in ("fp32_again", "o0", *BY_TYPE[dtype]) if any(r.rounds(name) for r in rows.values())]
    cells = [[title_of(name), *(relative(row, name, "fp32") for row in rows.values())] for name in names]
    picture = _link(charts.training_path(folder, dtype), PAGE)
    return f"{table(['', *rows], cells)}\n\n![Time of a step over float32's, {dtype}]({picture})"


def _with_contenders(found: All, names: tuple[str, ...], kind: str) -> dict[str, Results]:
    return {
        key: results
        for key, results in found.items()
        if results.workload.kind == kind and any(results.rounds(name) for name in names)
    }


def memory(found: All, names: tuple[str, ...] = ()) -> str:
    """Tabulate bytes per parameter with Adam, held after backward by kind, and the peak of whole steps."""
    results, rows = found.get("memory"), []
    if results is None:
        return NOT_THERE
    for name in names or results.workload.contenders:
        facts = results.facts(name)
        if facts:
            held = [facts[f"bytes_{kind}"] / facts["parameters"] for kind in KINDS]
            peak = f"{facts['peak_bytes'] / facts['parameters']:.1f}" if "peak_bytes" in facts else "-"
            title = f"{title_of(name)} fp16" if name in BY_TYPE["float16"] else title_of(name)
            rows.append([title, *(f"{size:.1f}" for size in held), f"{sum(held):.1f}", peak])
    return table(["", *KINDS, "sum", "peak of a step"], rows)


def encoded(found: All) -> str:
    """Tabulate the time of a step with split masters and encoded states over full masters and float32 states."""
    rows = [
        [results.workload.title, *(relative(results, name, "o2_bf16") for name in _ENCODED)]
        for results in found.values()
        if results.workload.kind in ("training", "pairs") and set(_ENCODED) <= set(results.workload.contenders)
    ]
    return table(["", "split", 'split, "bfloat16"', 'split, "int8"'], rows) if rows else NOT_THERE


_NATIVE: Final = {
    "full masters": ("o2_eager", "o2_bf16"),
    "split masters": ("o2_split_eager", "o2_split"),
    "split masters, int8 states": ("o2_int8_eager", "o2_int8"),
    "control: float32 over itself": ("fp32_again", "fp32"),
}


def native_code(folders: list[Path]) -> str:
    """Time of a step without native code over one with it, from the first machine that has measured it."""
    for folder in folders:
        found = {name: results for name, results in load(folder).items() if results.workload.kind == "native"}
        if found:
            rows = [
                [
                    results.workload.title.partition(":")[0],
                    *(relative(results, *pair) for pair in _NATIVE.values()),
                ]
                for results in found.values()
            ]
            return f"{table(['', *_NATIVE], rows)}\n\n{where(found)}, one thread."
    return NOT_THERE


def pieces(found: All) -> str:
    """Tabulate nanoseconds a number of the pieces of a step."""
    results = found.get("pieces")
    if results is None:
        return NOT_THERE
    rows = []
    for name in results.workload.contenders:
        if results.rounds(name) and not name.endswith(" again"):
            each = seconds(results.rounds(name)).times(1e9 / results.facts(name)["numbers"])
            cell = f"{each.median:.1f} [{each.low:.1f}, {each.high:.1f}]"
            rows.append([name, cell if results.is_measurable() else NOT_MEASURABLE])
    return table(["piece", "ns a number"], rows)


def pairs(found: All) -> str:
    """Tabulate the pairs that have a goal."""
    rows = [_pair(comparison, found) for comparison in COMPARISONS if comparison.workload in found]
    return table(["", "workload", "measured", "goal", ""], rows) if rows else NOT_THERE


def _pair(comparison: Comparison, found: All) -> list[str]:
    results, verdict = found[comparison.workload], ""
    if not results.is_measurable():
        measured = NOT_MEASURABLE
    else:
        estimate = comparison.estimate(results)
        measured = "-" if estimate is None else f"{estimate}{comparison.unit}"
        if estimate is not None:
            verdict = "met" if comparison.is_met_by(estimate.median) else "not met"
    return [comparison.title, comparison.workload, measured, comparison.goals, verdict]


def loops(found: All) -> str:
    """Tabulate the time of loops with extras over the same loop written by hand."""
    rows = loop_figures.rows(found, NOT_MEASURABLE)
    return table(loop_figures.HEAD, rows) if rows else NOT_THERE


def setting_up(found: All) -> str:
    """Tabulate milliseconds of ``initialize`` and of imports."""
    rows = []
    for results in found.values():
        if results.workload.kind in ("initialize", "import"):
            for name in results.workload.contenders:
                if results.rounds(name) and not name.endswith("_again"):
                    cell = _milliseconds(results, seconds(results.rounds(name)))
                    rows.append([results.workload.title, name, cell])
    return table(["", "", "ms"], rows) if rows else NOT_THERE


def _milliseconds(results: Results, estimate: Estimate) -> str:
    if not results.is_measurable():
        return NOT_MEASURABLE
    return "{:.3g} [{:.3g}, {:.3g}]".format(*(1e3 * x for x in (estimate.median, estimate.low, estimate.high)))


def compiled(found: All) -> str:
    """Tabulate time over torch.amp's compiled step, graphs, breaks and recompilations."""
    results, rows = found.get("compiled"), []
    if results is None:
        return NOT_THERE
    for name in results.workload.contenders:
        if results.rounds(name):
            reference = "amp_fp16" if name in BY_TYPE["float16"] else "amp_bf16"
            facts = [str(max(results.fact(name, fact))) for fact in ("graphs", "graph_breaks", "recompilations")]
            dtype = (
                "float16" if name in BY_TYPE["float16"] else "bfloat16" if name in BY_TYPE["bfloat16"] else "float32"
            )
            rows.append([title_of(name), dtype, relative(results, name, reference), *facts])
    return table(["", "", "time over torch.amp's", "graphs", "graph breaks", "recompilations"], rows)


def growth(found: All, folder: Path) -> str:
    """Tabulate slopes, and the cost of one at the largest size."""
    rows = []
    for axis in AXES:
        results = found.get(f"grow_{axis}")
        if results is not None:
            rows.append(growth_figures.row(results, NOT_MEASURABLE))
    if not rows:
        return NOT_THERE
    head = ["grows", "from, to", "slope of a step", "slope of initialize", "a step at the end, ms", "of which each, µs"]
    picture = _link(charts.growth_path(folder), PAGE)
    return f"{table([*head, 'memory at the end, MB'], rows)}\n\n![Cost as it grows]({picture})"


def controls(found: All) -> str:
    """Tabulate every control, and whether it held."""
    rows = []
    for name, results in found.items():
        number = max((len(runs) for runs in results.runs.values()), default=0)
        for (one, other), estimate in results.controls().items():
            held = "yes" if results.is_measurable() else "no"
            rows.append([name, f"{title_of(other)} / {title_of(one)}", str(estimate), str(number), held])
    low, high = CONTROL_LIMITS
    return table(["workload", "control", "ratio", "processes", f"all within [{low}, {high}]"], rows)


def missing(found: All) -> str:
    """Tabulate missing contenders with their reasons, each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, results in found.items():
        for contender, reason in results.missing.items():
            reasons.setdefault((contender, reason), []).append(name)
    rows = [[title_of(who), ", ".join(names), why.replace("|", "/")] for (who, why), names in reasons.items()]
    return table(["", "workloads", "reason"], rows) if rows else "Every contender took part."


def finetuned(path: Path = FINETUNED) -> str:
    """Tabulate the results of the example that fine-tunes a 16-bit checkpoint."""
    result = json.loads(path.read_text(encoding="utf-8"))
    head = [
        "",
        "final loss",
        "best loss",
        "weights that never moved",
        "norm weights moved by",
        "bytes a parameter",
        "time",
    ]
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
    return "\n".join([table(head, rows), "", remark, *gained])


def finetuned_in_short() -> str:
    """Tabulate README's columns of the fine-tuning example."""
    rows = []
    for way in json.loads(FINETUNED.read_text(encoding="utf-8"))["ways"]:
        unmoved, size = f"{way['weights that never moved, %']:.1f} %", f"{way['bytes a parameter']:.1f}"
        rows.append([way["way"], f"{way['final loss']:.4f}", unmoved, size])
    return table(["", "final loss", "weights that never moved", "bytes a parameter"], rows)


def readme(found: All, folder: Path) -> str:
    """Return README's tables."""
    some = measurable({name: found[name] for name in _WORKLOADS_IN_README if name in found})
    rows = _with_contenders(some, _IN_README, "training")
    names = [name for name in _IN_README if any(results.rounds(name) for results in rows.values())]
    cells = [[key, *(relative(results, name, "fp32") for name in names)] for key, results in rows.items()]
    return "\n".join(
        [
            f"Time of a step over float32's, bfloat16, with 95 % intervals over processes; {where(found)}:",
            "",
            table(["workload", *map(title_of, names)], cells),
            "",
            f"![Time of a step over float32's]({_link(charts.training_path(folder, 'bfloat16'), README)})",
            "",
            "Bytes per parameter with Adam, after backward by kind, and at the peak of a step:",
            "",
            memory(found, _MEMORY_IN_README),
        ]
    )


def _link(target: Path, page: Path) -> str:
    up = [".."] * (len(page.relative_to(ROOT).parts) - 1)
    return "/".join([*up, *target.relative_to(ROOT).parts])


def blocks(found: All, folder: Path) -> dict[str, Callable[[], str]]:
    """Return the maker of each block by the name of its marks."""
    return {
        "readme": lambda: readme(found, folder),
        "machine": lambda: where(found),
        "bfloat16": lambda: training(found, folder, "bfloat16"),
        "float16": lambda: training(found, folder, "float16"),
        "memory": lambda: memory(found),
        "less_memory": lambda: memory(found, _LESS_MEMORY),
        "encoded": lambda: encoded(found),
        "pieces": lambda: pieces(found),
        "native_code": lambda: native_code(machines()),
        "pairs": lambda: pairs(found),
        "loops": lambda: loops(found),
        "setting_up": lambda: setting_up(found),
        "compiled": lambda: compiled(found),
        "growth": lambda: growth(found, folder),
        "controls": lambda: controls(found),
        "missing": lambda: missing(found),
        "finetuned": finetuned,
        "finetuned_in_short": finetuned_in_short,
    }


def replaced(text: str, folder: Path) -> str:
    """Return ``text`` with every block between marks made anew."""
    made = blocks(load(folder), folder)
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{made[mark[2]]()}\n\n{mark[3]}", text)


def write() -> None:
    """Write every table and plot anew, from the first machine's results."""
    folder = machines()[0]
    for path in PAGES:
        path.write_text(replaced(path.read_text(encoding="utf-8"), folder), encoding="utf-8")
    charts.draw(load(folder), folder)


def summary(folder: Path, size: str) -> str:
    """Return all tables of a folder, for the screen."""
    found = load(folder, size)
    parts = [where(found), controls(found), missing(found), encoded(found)]
    kinds = {results.workload.kind for results in found.values()}
    if "training" in kinds:
        parts += [_training_for_the_screen(found, dtype) for dtype in BY_TYPE]
    if "memory" in kinds:
        parts.append(memory(found))
    if "native" in kinds:
        parts.append(native_code([folder]))
    if "pieces" in kinds:
        parts.append(pieces(found))
    if "compiled" in kinds:
        parts.append(compiled(found))
    if kinds & {"initialize", "import"}:
        parts.append(setting_up(found))
    if "growth" in kinds:
        parts.append(growth(found, RESULTS).partition("\n\n!")[0])
    if "loops" in kinds:
        parts.append(loops(found))
    return "\n\n".join([*parts, pairs(found), f"results in {folder}"])


def _training_for_the_screen(found: All, dtype: str) -> str:
    return training(found, RESULTS, dtype).partition("\n\n!")[0]
