"""Results of a workload, kept as a pyperf suite: ``python -m pyperf stats``, ``check`` and ``compare_to`` read them.

A benchmark is a contender, a run is one process, and a run's metadata are its facts. The metadata of every run also has
the contenders that could not be measured, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyperf

from . import machine
from .estimate import Estimate, Rounds, is_within_limits, ratio
from .suite import Workload

ROOT: Final = Path(__file__).resolve().parents[1]
MISSING: Final = "missing "
LEAST_PROCESSES: Final = 5
# Files that only read results: a change of these does not make results stale.
_READERS: Final = (
    "tables.py",
    "charts.py",
    "stamps.py",
    "comparisons.py",
    "growth_figures.py",
    "loop_figures.py",
    "states.py",
    "engines.py",
)


class Results:
    """The results of one workload: the runs of each contender, and the contenders that are missing."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload
        self.runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in workload.contenders}
        self.missing: dict[str, str] = {}
        self.common: dict[str, Any] = {}

    def add(self, contender: str, number: int, answer: Mapping[str, Any]) -> None:
        """Add the answer of one process; a contender that failed once is left out from then on."""
        for word in ("unavailable", "failed"):
            if word in answer:
                self.missing[contender] = f"{word}: {answer[word]}"
                return
        self.runs[contender].append({**answer, "round": number})

    def rounds(self, contender: str) -> Rounds:
        """Return the values by round; none where the contender is missing."""
        if contender in self.missing:
            return {}
        return {run["round"]: run["values"] for run in self.runs.get(contender, [])}

    def facts(self, contender: str) -> dict[str, Any]:
        """Return the facts of the first process."""
        runs = self.runs.get(contender, [])
        return dict(runs[0]["facts"]) if runs and contender not in self.missing else {}

    def fact(self, contender: str, name: str) -> list[float]:
        """Return one fact of every process."""
        return [run["facts"][name] for run in self.runs.get(contender, []) if name in run["facts"]]

    def ratio(self, above: str, below: str) -> Estimate | None:
        """Return the ratio of times; None where either contender is missing."""
        one, other = self.rounds(above), self.rounds(below)
        return ratio(one, other) if one.keys() & other.keys() else None

    def controls(self) -> dict[tuple[str, str], Estimate]:
        """Return the ratios that have to be 1; a control with a missing contender is left out."""
        found = {(one, other): self.ratio(other, one) for one, other in self.workload.controls}
        return {pair: estimate for pair, estimate in found.items() if estimate is not None}

    def is_measurable(self) -> bool:
        """Return whether every control has enough processes and is within the limits; else no figure is shown."""
        controls = self.controls()
        enough = all(len(self.rounds(name)) >= LEAST_PROCESSES for pair in controls for name in pair)
        return enough and len(controls) == len(self.workload.controls) and all(map(is_within_limits, controls.values()))

    def write(self, path: Path) -> None:
        """Write a pyperf suite."""
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
    """Read a file of :meth:`Results.write`."""
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
    """Return the results whose controls hold."""
    return {name: results for name, results in found.items() if results.is_measurable()}


def folder(device: str, size: str) -> Path:
    """Return the folder of this machine's results: beside the suite, or in ``runs`` for a quick run."""
    name = machine.slug(f"{device} {machine.name(device)}")
    return ROOT / "runs" / "benchmarks" / name if size == "quick" else Path(__file__).parent / "results" / name


def fingerprint() -> str:
    """Hash all sources that figures depend on: results of other sources are measured again."""
    digest = hashlib.sha256()
    sources = [*sorted((ROOT / "mpinit").rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    for source in sources:
        if source.name not in _READERS:
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
