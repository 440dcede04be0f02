"""Results of a workload, kept as a pyperf suite: ``python -m pyperf stats``, ``check`` and ``compare_to`` read them.

A benchmark is a contender, a run one process, and a run's metadata are its facts. What is missing, and why, stands in
the metadata of every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyperf

from . import machine
from .estimate import Estimate, Rounds, holds, ratio
from .suite import Workload

ROOT: Final = Path(__file__).resolve().parents[1]
MISSING: Final = "missing "
LEAST_PROCESSES: Final = 5
# What only reads results can change without making them stale.
_READERS: Final = (
    "tables.py",
    "charts.py",
    "comparisons.py",
    "growth_figures.py",
    "loop_figures.py",
    "states.py",
    "engines.py",
)


class Results:
    """The processes of one workload, as they come and as they are read again."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload
        self.runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in workload.contenders}
        self.missing: dict[str, str] = {}
        self.common: dict[str, Any] = {}

    def add(self, contender: str, number: int, answer: Mapping[str, Any]) -> None:
        """One process has answered; a contender that failed once takes no further part."""
        for word in ("unavailable", "failed"):
            if word in answer:
                self.missing[contender] = f"{word}: {answer[word]}"
                return
        self.runs[contender].append({**answer, "round": number})

    def rounds(self, contender: str) -> Rounds:
        """Values by round; none where the contender is missing."""
        if contender in self.missing:
            return {}
        return {run["round"]: run["values"] for run in self.runs.get(contender, [])}

    def facts(self, contender: str) -> dict[str, Any]:
        """What the first process said besides its times."""
        runs = self.runs.get(contender, [])
        return dict(runs[0]["facts"]) if runs and contender not in self.missing else {}

    def fact(self, contender: str, name: str) -> list[float]:
        """One fact of every process."""
        return [run["facts"][name] for run in self.runs.get(contender, []) if name in run["facts"]]

    def ratio(self, above: str, below: str) -> Estimate | None:
        """None where either has no part here."""
        one, other = self.rounds(above), self.rounds(below)
        return ratio(one, other) if one.keys() & other.keys() else None

    def controls(self) -> dict[tuple[str, str], Estimate]:
        """What should be 1; empty where a control itself is missing, and then nothing holds."""
        found = {(one, other): self.ratio(other, one) for one, other in self.workload.controls}
        return {pair: estimate for pair, estimate in found.items() if estimate is not None}

    def is_measurable(self) -> bool:
        """Whether every control is there, in enough processes, and holds: otherwise no number is shown."""
        controls = self.controls()
        enough = all(len(self.rounds(name)) >= LEAST_PROCESSES for pair in controls for name in pair)
        return enough and len(controls) == len(self.workload.controls) and all(map(holds, controls.values()))

    def write(self, path: Path) -> None:
        """As a pyperf suite."""
        missing = {MISSING + contender: reason for contender, reason in self.missing.items()}
        benchmarks = []
        for contender, runs in self.runs.items():
            if runs and contender not in self.missing:
                common = {**self.common, **missing, "name": contender, "unit": "second"}
                benchmarks.append(pyperf.Benchmark([_as_pyperf(run, common) for run in runs]))
        if benchmarks:
            path.parent.mkdir(parents=True, exist_ok=True)
            pyperf.BenchmarkSuite(benchmarks).dump(str(path), compact=True, replace=True)


def _as_pyperf(run: Mapping[str, Any], common: Mapping[str, Any]) -> pyperf.Run:
    own = {"loops": run["loops"], "round": run["round"], "wall_s": run["wall_s"]}
    facts = {f"fact {name}": value for name, value in run["facts"].items()}
    return pyperf.Run(run["values"], metadata={**common, **own, **facts}, collect_metadata=False)


def read(path: Path, workload: Workload) -> Results:
    """What :meth:`Results.write` wrote."""
    results = Results(path.stem, workload)
    for benchmark in pyperf.BenchmarkSuite.load(str(path)).get_benchmarks():
        for run in benchmark.get_runs():
            metadata = run.get_metadata()
            facts = {name.removeprefix("fact "): m for name, m in metadata.items() if name.startswith("fact ")}
            own = {name: metadata[name] for name in ("loops", "round", "wall_s")}
            results.runs.setdefault(benchmark.get_name(), []).append({**own, "values": run.values, "facts": facts})
            others = {name: value for name, value in metadata.items() if name not in own and name not in facts}
        for name, value in others.items():
            if name.startswith(MISSING):
                results.missing[name.removeprefix(MISSING)] = value
            elif not name.startswith("fact ") and name not in ("name", "unit"):
                results.common[name] = value
    return results


def measurable(found: Mapping[str, Results]) -> dict[str, Results]:
    """Those whose controls hold, so that only figures are shown; all of them where no controls do."""
    return {name: results for name, results in found.items() if results.is_measurable()} or dict(found)


def folder(device: str, size: str) -> Path:
    """Where this machine's results are: beside the suite, those of a quick run out of the way."""
    name = machine.slug(f"{device} {machine.name(device)}")
    return ROOT / "runs" / "benchmarks" / name if size == "quick" else Path(__file__).parent / "results" / name


def fingerprint() -> str:
    """Of all that figures depend on here: results of other sources are not gone on with."""
    digest = hashlib.sha256()
    sources = [*sorted((ROOT / "mpinit").rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    for source in sources:
        if source.name not in _READERS:
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
