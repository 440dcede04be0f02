"""What O1 costs over torch.autocast with GradScaler on launch-bound networks, and what initialize and the import cost.

Each contender is a process of its own with one thread; they take turns, a block of steps at a time, and the ratio is
that of the medians over all blocks. Blocks are timed in CPU time: with one thread that is the wall clock's time, less
what other programs on the machine take. Exit status 1 if a figure is past its limit.

    python examples/benchmarks/o1_overhead.py [--rounds 120] [--steps 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIMITS = {"linear_relu": 1.03, "linear_norm_relu": 1.10}
INITIALIZE_LIMIT_MS = 50.0
IMPORT_LIMIT_S = 0.25
CONTENDERS = ("native", "o1")


def step_function(contender: str, workload: str) -> Callable[[], None]:
    """One training step of a contender on a workload."""
    import torch

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(40):
        layers.append(torch.nn.Linear(32, 32))
        if workload == "linear_norm_relu":
            layers.append(torch.nn.LayerNorm(32))
        layers.append(torch.nn.ReLU())
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(4, 32), torch.randn(4, 32)
    loss_of = torch.nn.functional.mse_loss
    if contender == "native":
        scaler = torch.amp.GradScaler("cpu")

        def native_step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return native_step

    import mpinit

    mpinit.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def o1_step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return o1_step


def serve(contender: str, workload: str) -> None:
    """Run a block of steps for each number read, and answer with the milliseconds per step."""
    import torch

    torch.set_num_threads(1)
    step = step_function(contender, workload)
    for _ in range(20):
        step()
    for line in sys.stdin:
        steps = int(line)
        start = time.process_time()
        for _ in range(steps):
            step()
        print((time.process_time() - start) / steps * 1e3, flush=True)


def compare(workload: str, rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds per step of both contenders, taking turns, and their ratio."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = {
        contender: subprocess.Popen(
            [sys.executable, __file__, "--serve", contender, workload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for contender in CONTENDERS
    }
    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    try:
        for turn in range(rounds):
            # Whoever goes first meets a machine that has just been idle: they swap.
            for contender in CONTENDERS if turn % 2 else reversed(CONTENDERS):
                times[contender].append(ask(processes[contender], steps))
    finally:
        for process in processes.values():
            process.communicate()
    medians = {contender: statistics.median(values) for contender, values in times.items()}
    quarters = statistics.quantiles([o1 / native for native, o1 in zip(times["native"], times["o1"], strict=True)])
    return {**medians, "ratio": medians["o1"] / medians["native"], "low": quarters[0], "high": quarters[2]}


def ask(process: subprocess.Popen[str], steps: int) -> float:
    """Let one contender run a block; milliseconds per step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measured_in_new_process(code: str) -> float:
    """What a snippet prints in a fresh interpreter, the median of five."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    answers = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout for _ in range(5)
    ]
    return statistics.median(map(float, answers))


INITIALIZE = """
import time, torch, mpinit
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(999)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert len(list(model.modules())) == 1000
start = time.perf_counter()
mpinit.initialize(model, optimizer, opt_level="O1", verbosity=0)
print((time.perf_counter() - start) * 1e3)
"""
IMPORT = "import torch, time; start = time.perf_counter(); import mpinit; print(time.perf_counter() - start)"


def main() -> int:
    """Measure, print, and say by the exit status whether all figures are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("CONTENDER", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return 0
    figures = {workload: compare(workload, arguments.rounds, arguments.steps) for workload in LIMITS}
    failed = report_ratios(figures)
    costs = {"initialize_ms": measured_in_new_process(INITIALIZE), "import_s": measured_in_new_process(IMPORT)}
    limits = {"initialize_ms": INITIALIZE_LIMIT_MS, "import_s": IMPORT_LIMIT_S}
    for name, cost in costs.items():
        print(f"{name:18} {cost:.3f}, limit {limits[name]}")
        failed = failed or cost > limits[name]
    if arguments.json:
        machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**machine, **costs, "steps": figures}, indent=2), encoding="utf-8")
    return int(failed)


def report_ratios(figures: dict[str, dict[str, float]]) -> bool:
    """Print the table; whether a ratio is past its limit."""
    for workload, figure in figures.items():
        print(
            f"{workload:18} native {figure['native']:.2f} ms, O1 {figure['o1']:.2f} ms, ratio {figure['ratio']:.3f} "
            f"(quartiles {figure['low']:.3f} to {figure['high']:.3f}), limit {LIMITS[workload]}"
        )
    return any(figure["ratio"] > LIMITS[workload] for workload, figure in figures.items())


if __name__ == "__main__":
    sys.exit(main())
