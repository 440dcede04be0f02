"""The README's benchmark tables from committed results: ``python -m examples.benchmarks.readme_block --write``."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from .roster import ROSTER

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->\n"
CONTENDERS = ("fp32", "amp_bf16", "hand_bf16_unchecked", "o1_bf16", "o2_bf16", "o2_split", "o3_bf16")
KINDS = ("weights", "masters", "gradients", "states")


def block() -> str:
    """The text between the README's markers."""
    parts = []
    for path in sorted(RESULTS.glob("bench-*.json")):
        parts += speed(json.loads(path.read_text()), path)
    for path in sorted(RESULTS.glob("memory-*.json")):
        parts += memory(json.loads(path.read_text()), path)
    return "\n".join(parts) + "\n"


def where(results: dict[str, Any], path: Path) -> str:
    return f"{results['machine']}, torch {results['torch']} ([figures]({path.relative_to(ROOT)}))"


def speed(results: dict[str, Any], path: Path) -> list[str]:
    plot = path.with_suffix(".png").relative_to(ROOT)
    names = [name for name in CONTENDERS if any(one(w, name) for w in results["workloads"])]
    title = "Time of a step over float32's, bfloat16, median of the rounds"
    lines = [f"{title}; {where(results, path)}:", ""]
    lines.append("| workload | " + " | ".join(ROSTER[name].title for name in names) + " |")
    lines.append("|---" * (len(names) + 1) + "|")
    for workload in results["workloads"]:
        reference = one(workload, workload["reference"])
        cells = [ratio(one(workload, name), reference) for name in names]
        lines.append(f"| {workload['name']} | " + " | ".join(cells) + " |")
    return [*lines, "", f"![Time of a step by workload and contender, {results['machine']}]({plot})", ""]


def one(workload: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((c for c in workload["contenders"] if c["name"] == name and c["status"] == "ok"), None)


def ratio(contender: dict[str, Any] | None, reference: dict[str, Any] | None) -> str:
    if contender is None or reference is None:
        return "-"
    pairs = zip(contender["turns_ms"], reference["turns_ms"], strict=True)
    return f"{statistics.median(ours['total'] / theirs['total'] for ours, theirs in pairs):.2f}"


def memory(results: dict[str, Any], path: Path) -> list[str]:
    lines = [f"Bytes per parameter with Adam after backward; {where(results, path)}:", ""]
    lines += ["| | " + " | ".join((*KINDS, "sum")) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for contender in results["contenders"]:
        if contender["status"] == "ok":
            sizes = [contender["memory"]["after_backward"][kind] / contender["parameters"] for kind in KINDS]
            cells = " | ".join(f"{size:.0f}" for size in (*sizes, sum(sizes)))
            lines.append(f"| {ROSTER[contender['name']].title} | {cells} |")
    return [*lines, ""]


def replaced(text: str) -> str:
    """``text`` with what stands between the markers made anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + block() + END + rest.split(END)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into README.md instead of printing them")
    if parser.parse_args().write:
        readme = ROOT / "README.md"
        readme.write_text(replaced(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(block())


if __name__ == "__main__":
    main()
