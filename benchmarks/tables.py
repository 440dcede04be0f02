"""README's and the documentation's tables, from committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from . import charts, engines, growth_figures, loop_figures, states
from .comparisons import COMPARISONS, Comparison
from .estimate import CONTROL_LIMITS, Estimate, seconds
from .footprint import KINDS
from .growth import AXES
from .loops import loop_rows
from .results import ROOT, Results, measurable, read
from .roster import BY_TYPE
from .suite import title_of, workloads

RESULTS: Final = Path(__file__).parent / "results"
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "reference" / "benchmarks.md"
HOW_TO: Final = ROOT / "docs" / "how-to" / "memory.md"
STATES: Final = ROOT / "docs" / "explanation" / "optimizer-states.md"
CHECKPOINT: Final = ROOT / "docs" / "how-to" / "sixteen-bit-checkpoint.md"
HOME: Final = ROOT / "docs" / "index.md"
COMPILE: Final = ROOT / "docs" / "how-to" / "compile.md"
PAGES: Final = (README, HOME, PAGE, HOW_TO, STATES, CHECKPOINT, COMPILE)
FINETUNED: Final = ROOT / "examples" / "results" / "finetune_16bit_checkpoint.json"
BYTES_OF_A_REMAINDER: Final = 2
NOT_MEASURABLE: Final = "not measurable here"
NOT_THERE: Final = "Not measured yet."
_IN_SHORT: Final = ("amp_bf16", "hand_bf16", "o1_bf16", "o2_bf16", "o2_split", "o3_bf16")
_WORKLOADS_IN_SHORT: Final = ("lstm", "unet", "bert", "resnet", "wide", "launch", "bandwidth")
_MEMORY_IN_README: Final = ("fp32", "o2_bf16", "o2_split", "o2_int8", "o2_released", "bitsandbytes")
_LESS_MEMORY: Final = (
    *("fp32", "o2_bf16", "o2_split", "o2_split_bf16", "o2_int8", "o2_released", "torchao", "bitsandbytes"),
)
_SPLIT: Final = ("o2_split", "o2_split_bf16", "o2_int8", "o2_released")
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


def shown(head: list[str], rows: list[list[str]], asked: All) -> str:
    """Return a table, and the names of the workloads that are not in it because their controls do not hold."""
    parts = [table(head, rows)] if rows else []
    without = [name for name, results in asked.items() if not results.is_measurable()]
    if without:
        limits = f"a control is not within {list(CONTROL_LIMITS)}"
        parts.append(f"Left out, {NOT_MEASURABLE} ({limits}): {', '.join(without)}.")
    return "\n\n".join(parts) or NOT_THERE


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
    asked = _with_contenders(found, BY_TYPE[dtype], "training")
    rows = measurable(asked)
    names = [name for name in ("fp32_again", "o0", *BY_TYPE[dtype]) if any(r.rounds(name) for r in rows.values())]
    cells = [[title_of(name), *(relative(row, name, "fp32") for row in rows.values())] for name in names]
    if not cells:
        return shown([], [], asked)
    picture = _link(charts.training_path(folder, dtype), PAGE)
    return f"{shown(['', *rows], cells, asked)}\n\n![Time of a step over float32's, {dtype}]({picture})"


def on_gpus(folders: list[Path]) -> str:
    """Tabulate the steps that were measured on GPUs: times over float32's and over the hand-written loop's, kernels."""
    parts = []
    for folder in folders:
        found = {name: each for name, each in load(folder).items() if each.workload.kind == "training"}
        if not found or not folder.name.startswith("cuda"):
            continue
        parts.append(f"{where(found)}:")
        for name, results in measurable(found).items():
            rows = []
            for contender in results.workload.contenders:
                by_hand = "hand_fp16" if contender in BY_TYPE["float16"] else "hand_bf16"
                if results.rounds(contender) and contender not in ("fp32", "fp32_again"):
                    kernels = f"{results.facts(contender).get('kernels', '-')}"
                    ratios = (relative(results, contender, reference) for reference in ("fp32", by_hand))
                    rows.append([title_of(contender), *ratios, kernels])
            parts.append(table([f"{name}: {results.workload.title}", "over float32", "over by hand", "kernels"], rows))
        parts.append(shown([], [], found))
        parts.append("Bytes per parameter there, with Adam:")
        parts.append(memory(load(folder)))
    return "\n\n".join(part for part in parts if part != NOT_THERE) or NOT_THERE


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
            sizes = [facts[f"bytes_{kind}"] / facts["parameters"] for kind in KINDS]
            peak = f"{facts['peak_bytes'] / facts['parameters']:.1f}" if "peak_bytes" in facts else "-"
            title = f"{title_of(name)} fp16" if name in BY_TYPE["float16"] else title_of(name)
            rows.append([title, *(f"{size:.1f}" for size in sizes), f"{sum(sizes):.1f}", peak])
    return table(["", *KINDS, "sum", "peak of a step"], rows)


def less_memory(found: All) -> str:
    """Tabulate the ways to save memory, and state the part of a bucket's buffer in the split rows."""
    text, results = memory(found, _LESS_MEMORY), found.get("memory")
    split = [results.facts(name) for name in _LESS_MEMORY if name in _SPLIT and results.facts(name)] if results else []
    if not split:
        return text
    count = split[0]["parameters"]
    others = [sum(facts[f"bytes_{kind}"] for kind in KINDS if kind != "masters") / count for facts in split]
    sums = ", ".join(f"{size + BYTES_OF_A_REMAINDER:.1f}" for size in others)
    bucket = split[0]["bytes_masters"] / count - BYTES_OF_A_REMAINDER
    remarks = (
        f"The model has {count / 1e6:.0f} M parameters.",
        f"The masters of the split rows include the buffer of one bucket, up to {bucket:.1f} bytes per parameter here.",
        f"It does not grow with the model; without it the sums are {sums}.",
    )
    return "\n".join([text, "", *remarks])


def encoded(found: All) -> str:
    """Tabulate the time of a step with split masters and encoded states over full masters and float32 states."""
    asked = {
        name: results
        for name, results in found.items()
        if results.workload.kind in ("training", "pairs") and set(_ENCODED) <= set(results.workload.contenders)
    }
    rows = [
        [results.workload.title, *(relative(results, name, "o2_bf16") for name in _ENCODED)]
        for results in measurable(asked).values()
    ]
    return shown(["", "split", 'split, "bfloat16"', 'split, "int8"'], rows, asked)


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
                for results in measurable(found).values()
            ]
            return f"{shown(['', *_NATIVE], rows, found)}\n\n{where(found)}, one thread."
    return NOT_THERE


def pieces(found: All) -> str:
    """Tabulate nanoseconds per number of the pieces of a step; nothing where they could not be measured."""
    results = found.get("pieces")
    if results is None or not results.is_measurable():
        return ""
    rows = []
    for name in results.workload.contenders:
        if results.rounds(name) and not name.endswith(" again"):
            each = seconds(results.rounds(name)).times(1e9 / results.facts(name)["numbers"])
            rows.append([name, f"{each.median:.1f} [{each.low:.1f}, {each.high:.1f}]"])
    return f"The pieces of such a step, one by one, in one thread:\n\n{table(['piece', 'ns per number'], rows)}"


def pairs(found: All) -> str:
    """Tabulate the pairs that have a goal."""
    asked = {
        comparison.workload: found[comparison.workload] for comparison in COMPARISONS if comparison.workload in found
    }
    there = measurable(asked)
    rows = [_pair(comparison, there[comparison.workload]) for comparison in COMPARISONS if comparison.workload in there]
    return shown(["", "workload", "measured", "goal", ""], [row for row in rows if row[2] != "-"], asked)


def _pair(comparison: Comparison, results: Results) -> list[str]:
    estimate, verdict, measured = comparison.estimate(results), "", "-"
    if estimate is not None:
        measured = f"{estimate}{comparison.unit}"
        verdict = "met" if comparison.is_met_by(estimate.median) else "not met"
    return [comparison.title, comparison.workload, measured, comparison.goals, verdict]


def loops_of(folders: list[Path]) -> dict[str, Results]:
    """Return the loops of the machine that has measured most of them."""
    found = [{name: each for name, each in load(folder).items() if name in loop_rows()} for folder in folders]
    return max(found, key=len, default={})


def loops(asked: All) -> str:
    """Tabulate the time of loops with extras over the same loop written by hand."""
    rows = shown(loop_figures.HEAD, loop_figures.rows(measurable(asked)), asked)
    return f"{rows}\n\n{where(asked)}, one thread." if asked else rows


def setting_up(found: All) -> str:
    """Tabulate milliseconds of ``initialize`` and of imports."""
    asked = {name: results for name, results in found.items() if results.workload.kind in ("initialize", "import")}
    rows = [
        [results.workload.title, name, _milliseconds(seconds(results.rounds(name)))]
        for results in measurable(asked).values()
        for name in results.workload.contenders
        if results.rounds(name) and not name.endswith("_again")
    ]
    return shown(["", "", "ms"], rows, asked)


def _milliseconds(estimate: Estimate) -> str:
    return "{:.3g} [{:.3g}, {:.3g}]".format(*(1e3 * x for x in (estimate.median, estimate.low, estimate.high)))


def compiled(found: All) -> str:
    """Tabulate time over torch.amp's compiled step, graphs, breaks and recompilations."""
    asked = {name: results for name, results in found.items() if name == "compiled"}
    results, rows = measurable(asked).get("compiled"), []
    if results is None:
        return shown([], [], asked)
    for name in results.workload.contenders:
        if results.rounds(name):
            reference = "amp_fp16" if name in BY_TYPE["float16"] else "amp_bf16"
            facts = [str(max(results.fact(name, fact))) for fact in ("graphs", "graph_breaks", "recompilations")]
            dtype = (
                "float16" if name in BY_TYPE["float16"] else "bfloat16" if name in BY_TYPE["bfloat16"] else "float32"
            )
            rows.append([title_of(name), dtype, relative(results, name, reference), *facts])
    return table(["", "", "time over torch.amp's", "graphs", "graph breaks", "recompilations"], rows)


def compiled_in_short(found: All) -> str:
    """State the time of a compiled step at O4 and O5 over that of compiled ``torch.amp``."""
    results = found.get("compiled")
    if results is None or not results.is_measurable():
        return ""
    o4, o5 = (relative(results, name, "amp_bf16") for name in ("o1_bf16", "o2_bf16"))
    return (
        f"The time of a compiled bfloat16 step, divided by that of compiled `torch.amp`, is {o4} at O4 and {o5} at O5."
    )


def growth(found: All, folder: Path) -> str:
    """Tabulate slopes, and the cost of one at the largest size."""
    asked = {f"grow_{axis}": found[f"grow_{axis}"] for axis in AXES if f"grow_{axis}" in found}
    rows = [growth_figures.row(results) for results in measurable(asked).values()]
    head = ["grows", "from, to", "slope of a step", "slope of initialize", "a step at the end, ms", "each of them, µs"]
    text = shown([*head, "memory at the end, MB"], rows, asked)
    return f"{text}\n\n![Cost as it grows]({_link(charts.growth_path(folder), PAGE)})" if rows else text


def controls(found: All) -> str:
    """Tabulate every control, and whether all controls of its workload are within the limits."""
    rows = []
    for name, results in found.items():
        number = max((len(runs) for runs in results.runs.values()), default=0)
        for (one, other), estimate in results.controls().items():
            is_within = "yes" if results.is_measurable() else "no"
            rows.append([name, f"{title_of(other)} / {title_of(one)}", str(estimate), str(number), is_within])
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
        "bytes per parameter",
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


_WAYS: Final = {
    "bf16-loaded, plain": "plain bfloat16",
    "bf16-loaded, mpinit O5 split": "**mpinit O5, split masters**",
    "bf16-loaded, mpinit O5": "mpinit O5, full masters",
    "float32-loaded": "float32",
}


def finetuned_in_short() -> str:
    """Tabulate README's columns of the fine-tuning example."""
    ways = {way["way"]: way for way in json.loads(FINETUNED.read_text(encoding="utf-8"))["ways"]}
    rows = []
    for name, title in _WAYS.items():
        loss, size = f"{ways[name]['final loss']:.4f}", f"{ways[name]['bytes a parameter']:.0f}"
        rows.append([title, loss, f"{ways[name]['weights that never moved, %']:.1f} %", size])
    return table(["fine-tuned from bfloat16", "final loss", "weights that never moved", "bytes per parameter"], rows)


def in_short(found: All) -> str:
    """Tabulate the figures that most readers look for: time of a step over float32's in bfloat16."""
    asked = {name: found[name] for name in _WORKLOADS_IN_SHORT if name in found}
    rows = _with_contenders(measurable(asked), _IN_SHORT, "training")
    names = [name for name in _IN_SHORT if any(results.rounds(name) for results in rows.values())]
    cells = [[results.workload.title, *(_median(results, name) for name in names)] for results in rows.values()]
    return shown(["", *map(title_of, names)], cells, {})


def _median(results: Results, contender: str) -> str:
    estimate = results.ratio(contender, "fp32")
    return "-" if estimate is None else f"{estimate.median:.2f}"


def _link(target: Path, page: Path) -> str:
    up = [".."] * (len(page.relative_to(ROOT).parts) - 1)
    return "/".join([*up, *target.relative_to(ROOT).parts])


def blocks(found: All, folder: Path) -> dict[str, Callable[[], str]]:
    """Return the maker of each block by the name of its marks."""
    return {
        "in_short": lambda: in_short(found),
        "memory_in_short": lambda: memory(found, _MEMORY_IN_README),
        "compiled_in_short": lambda: compiled_in_short(found),
        "machine": lambda: f"Measured on {where(found)}.",
        "bfloat16": lambda: training(found, folder, "bfloat16"),
        "float16": lambda: training(found, folder, "float16"),
        "memory": lambda: memory(found),
        "less_memory": lambda: less_memory(found),
        "encoded": lambda: encoded(found),
        "native_code": lambda: native_code(machines()),
        "pairs": lambda: pairs({**found, **loops_of(machines())}),
        "loops": lambda: loops(loops_of(machines())),
        "setting_up": lambda: setting_up(found),
        "compiled": lambda: compiled(found),
        "growth": lambda: growth(found, folder),
        "gpu": lambda: on_gpus(machines()),
        "controls": lambda: controls({**found, **loops_of(machines())}),
        "missing": lambda: missing(found),
        "finetuned": finetuned,
        "finetuned_in_short": finetuned_in_short,
    }


def replaced(text: str, folder: Path) -> str:
    """Return ``text`` with every block between marks made anew."""
    made = blocks(load(folder), folder)
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{made[mark[2]]()}\n\n{mark[3]}", text)


def replaced_states(text: str) -> str:
    """Return the page of optimizer states with its table of losses made anew."""
    losses = json.loads((RESULTS / "states-cpu.json").read_text(encoding="utf-8"))["losses"]
    before, _, rest = text.partition("<!-- states -->\n")
    rows = "\n".join(states.table(losses))
    return f"{before}<!-- states -->\n{rows}\n<!-- end of states -->{rest.partition('<!-- end of states -->')[2]}"


def write() -> None:
    """Write every table and plot anew, from the first machine's results."""
    folder = machines()[0]
    for path in PAGES:
        _rewrite(path, replaced(path.read_text(encoding="utf-8"), folder))
    _rewrite(STATES, replaced_states(STATES.read_text(encoding="utf-8")))
    measured = json.loads(engines.RESULT.read_text(encoding="utf-8"))
    _rewrite(engines.PAGE, engines.with_table(engines.PAGE.read_text(encoding="utf-8"), measured))
    charts.draw(load(folder), folder)


def _rewrite(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def summary(folder: Path, size: str) -> str:
    """Return all tables of a folder, for the screen."""
    found = load(folder, size)
    if not found:
        return f"no results in {folder}"
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
        parts.append(loops({name: each for name, each in found.items() if name in loop_rows()}))
    return "\n\n".join([*parts, pairs(found), f"results in {folder}"])


def _training_for_the_screen(found: All, dtype: str) -> str:
    return training(found, RESULTS, dtype).partition("\n\n!")[0]
