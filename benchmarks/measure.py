"""Measure workloads in fresh processes that take turns, and write each workload's figures into a JSON file."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import time
import traceback
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

import mpinit

from .cases import Workload, workloads

RESULTS: Final = Path(__file__).parent / "results"
ROUNDS: Final = 7
# A turn is short, because a core of a shared machine changes its speed several times a second.
TURN_SECONDS: Final = {"cpu": 0.012, "cuda": 0.06}
# Where the loop by hand over itself is not within these, nothing is written.
CONTROL: Final = (0.98, 1.02)


def _answer(pipe: Any, workload: Workload, name: str, device: str) -> None:
    """Run the child process: prepare a case, then time a turn for each number that arrives; None ends it."""
    torch.set_num_threads(1)
    try:
        case = workload.case(name, device)
        pipe.send(case.seconds(1) if workload.turns else 0.0)
        while (count := pipe.recv()) is not None:
            pipe.send(case.seconds(count))
        pipe.send(case.facts() | {"machine": _machine(device)})
    except Exception:
        traceback.print_exc()
        pipe.send(None)
    finally:
        pipe.close()
        os._exit(0)  # without the interpreter's end, which an accelerator's runtime may not survive after a fork


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def measure(name: str, workload: Workload, device: str, rounds: int, turns: int) -> dict[str, Any]:
    """Measure a workload.

    In a round each way has a process of its own, forked from this one, which has run no operation of torch. The
    processes take turns in random order, so that all see the same changes of the machine.

    Returns:
        The figures: for each way, for each round, the seconds of its turns; and its facts.
    """
    # Before the forks: importing these takes seconds of each process that compiles or makes an optimizer. A pool of
    # processes for compilations would not survive a fork.
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    import torch._inductor.compile_fx

    context = get_context(workload.start)
    seconds: dict[str, list[list[float]]] = {way: [] for way in workload.names}
    facts: dict[str, dict[str, Any]] = {}
    for _ in range(rounds if workload.turns else 1):
        pipes, counts, processes, slowest = {}, {}, [], 1e-6
        for way in workload.names:
            pipe, other = context.Pipe()
            process = context.Process(target=_answer, args=(other, workload, way, device))
            process.start()
            other.close()
            once = _received(pipe, way)
            if once is not None:
                pipes[way], counts[way] = pipe, max(1, round(TURN_SECONDS[device] / max(once, 1e-6)))
                seconds[way].append([])
                slowest = max(slowest, once)
            processes.append(process)
        # At most about a second for each way: a float16 iteration of a large network lasts long on a CPU.
        for _ in range(min(turns, max(3, int(1 / slowest))) if turns > 3 else turns):
            for way in random.sample(list(pipes), len(pipes)):
                pipes[way].send(counts[way])
                seconds[way][-1].append(float(f"{pipes[way].recv():.4g}"))
        for way, pipe in pipes.items():
            pipe.send(None)
            facts[way] = pipe.recv()
        for process in processes:
            process.join()
    machines = [found.pop("machine") for found in facts.values()]
    facts = facts.get("all", facts)
    return {
        "workload": name,
        "device": device,
        "machine": machines[0] if machines else "",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "mpinit": mpinit.__version__,
        "seconds": {way: found for way, found in seconds.items() if any(found)},
        "facts": {way: found for way, found in facts.items() if found},
    }


def _received(pipe: Any, way: str) -> float | None:
    try:
        once: float | None = pipe.recv()
    except EOFError:
        once = None
    if once is None:
        print(f"  {way} cannot be measured here")
    return once


def run(names: Iterable[str], device: str, rounds: int, quick: bool, folder: Path | None = None) -> Path:
    """Measure workloads one after the other; return the folder of their files."""
    found = {name: each for name, each in workloads(quick).items() if each.only in ("", device)}
    unknown = set(names) - set(found)
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not measured on {device}; there are {', '.join(found)}")
    folder = folder or RESULTS / device
    folder.mkdir(parents=True, exist_ok=True)
    unquiet = []
    for name in names or found:
        begin, turns = time.perf_counter(), found[name].turns
        result = measure(name, found[name], device, rounds, min(turns, 2) if quick else turns)
        pair = control_of(result)
        said = "" if pair is None else f", control {ratio(result, *pair)[0]:.3f}"
        if is_quiet(result) or quick:
            (folder / f"{name}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
        else:
            unquiet.append(name)
            said += ": not written, the machine is not quiet"
        print(f"{name}: {time.perf_counter() - begin:.0f} s{said}", flush=True)
    if unquiet:
        raise SystemExit(f"run again: python -m benchmarks run {' '.join(unquiet)}")
    return folder


def control_of(result: dict[str, Any]) -> tuple[str, str] | None:
    """Return the two ways of a result that do the same work."""
    for name in result["seconds"]:
        way, plus, extra = name.partition("+")
        if way.endswith("_again"):
            return name, f"{way.removesuffix('_again')}{plus}{extra}"
    return None


def is_quiet(result: dict[str, Any]) -> bool:
    """Return whether the control of a result is near 1, so that its ratios mean something."""
    pair = control_of(result)
    return pair is None or CONTROL[0] <= ratio(result, *pair)[0] <= CONTROL[1]


def ratio(result: dict[str, Any], way: str, other: str) -> tuple[float, float, float]:
    """Return the time of a way over another's: the median of the rounds, the lowest and the highest.

    Of a round it is the median over its turns, each compared with the other's same turn.
    """
    both = zip(result["seconds"][way], result["seconds"][other], strict=True)
    rounds = [statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in both]
    return statistics.median(rounds), min(rounds), max(rounds)


def fastest(result: dict[str, Any], way: str) -> float:
    """Return the seconds of a way: the median over rounds of the fastest turn."""
    return statistics.median(min(turns) for turns in result["seconds"][way])
