"""Instructions of an iteration by mpinit and of the same one by hand: ``python -m benchmarks.instructions``.

callgrind, a part of valgrind, counts the instructions of a process. The load of the machine does not change the count
of a loop, as it changes its time. The count does not include waiting for memory, so only launch-bound loops are
counted. valgrind has no AVX-512.

It needs valgrind, a C compiler, and ``ATEN_CPU_CAPABILITY=avx2 python -m mpinit build-native``. It writes the figures
and the table of the page about benchmarks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .results import ROOT

RESULT: Final = ROOT / "benchmarks" / "results" / "instructions.json"
PAGE: Final = ROOT / "docs" / "reference" / "benchmarks.md"
_MARKED: Final = re.compile(r"(<!-- instructions: begin -->\n).*?(<!-- instructions: end -->)", re.S)

# How many iterations are counted, after how many that are not.
COUNTED: Final = 10
WARM_UP: Final = 5
# Tasks of which a loop without extras is counted; the extras are counted with the last one.
TASKS_COUNTED: Final = ("launch_sgd", "launch", "launch_adamw")
NOT_NATIVE: Final = ", without native code"
_REQUESTS: Final = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void dump(void) { CALLGRIND_DUMP_STATS; }
"""


def names_of(task: str) -> list[str]:
    """List the loops of a task, of each level: by hand and by mpinit, and without extras some more."""
    from .loops import EXTRAS, LEVELS

    extras = [name for name in EXTRAS if name != "checkpoint"] if task == TASKS_COUNTED[-1] else ["none"]
    found: list[str] = []
    for key in ("o2", "o5"):
        level = LEVELS[key]
        found += level.contenders(tuple(extras), has_network=False)
        found += [f"{level.amp}+none", *(f"{way}+none{NOT_NATIVE}" for way in level.ours)]
    return found


def count_all() -> dict[str, Any]:
    """Count every loop in a process that callgrind runs."""
    valgrind = shutil.which("valgrind")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if valgrind is None or compiler is None:
        sys.exit("benchmarks.instructions needs valgrind and a C compiler")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requests.c").write_text(_REQUESTS, encoding="utf-8")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "requests.so", folder / "requests.c"], check=True)
        callgrind = [valgrind, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/%p.out"]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        subprocess.run(
            [*callgrind, "--quiet", sys.executable, "-m", "benchmarks.instructions", "--in-callgrind", name],
            check=True, env=os.environ | environment,
        )  # fmt: skip
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        counts = {
            task: {name: _count_of(folder, pid) for name, pid in pids.items()} for task, pids in facts["pids"].items()
        }
    version = subprocess.run([valgrind, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    return {"torch": facts["torch"], "valgrind": version, "native code": facts["native code"], "counts": counts}


def _count_of(folder: Path, pid: int) -> int:
    """Return the instructions of an iteration, from the second file that a process has dumped."""
    text = (folder / f"{pid}.out.2").read_text(encoding="utf-8")
    found = re.search(r"^(?:summary|totals): (\d+)", text, re.M)
    assert found is not None, "callgrind wrote no sum"
    return round(int(found[1]) / COUNTED)


def count_in_callgrind(folder: Path) -> None:
    """Run every loop in a process of its own, forked from this one; write their numbers to ``facts.json``."""
    import torch

    from mpinit.torch_internals.native import describe_native

    native = describe_native()
    if native != "built":
        sys.exit(f"native code is {native}: run ATEN_CPU_CAPABILITY=avx2 python -m mpinit build-native")
    requests = ctypes.CDLL(str(folder / "requests.so"))
    requests.start()
    # callgrind translates code when it first runs; processes that are forked have what was translated here.
    for name in ("hand_fp16+none", "o2_fp16+none"):
        case = _built(TASKS_COUNTED[-1], name)
        case.step()
    pids = {task: {name: _fork(requests, task, name) for name in names_of(task)} for task in TASKS_COUNTED}
    facts = {"torch": torch.__version__, "native code": native, "pids": pids}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _fork(requests: Any, task: str, name: str) -> int:
    print(task, name, flush=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _run(requests, task, name)
            status = 0
        finally:
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(f"{task} {name} failed")
    return pid


def _built(task: str, name: str) -> Any:
    from .loops import LoopTraining
    from .tasks import TASKS

    case = LoopTraining(task, name, TASKS[task].sizes["cpu"], "cpu")
    case.build()
    return case


def _run(requests: Any, task: str, name: str) -> None:
    from mpinit.torch_internals.native import use_native

    if name.endswith(NOT_NATIVE):
        use_native(None)
    case = _built(task, name.removesuffix(NOT_NATIVE))
    for _ in range(WARM_UP):
        case.iteration()
    gc.collect()
    gc.disable()
    requests.dump()
    for _ in range(COUNTED // case.work.iterations):
        case.step()
    requests.dump()


# -- the table -----------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Return the table in Markdown: millions of instructions by hand, and ratios to that."""
    head = ["an iteration with", "optimizer", "level", "by hand", "torch.amp", "mpinit", "mpinit split"]
    head += [column + NOT_NATIVE for column in head[-2:]]
    lines = [head, ["---"] * len(head), *_rows(result["counts"])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _rows(counts: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    from .loops import EXTRAS, LEVELS
    from .tasks import TASKS

    for task, found in counts.items():
        for extra in EXTRAS:
            for key in ("o2", "o5"):
                level, counterpart = LEVELS[key], EXTRAS[extra].counterpart or extra
                by_hand = found.get(f"{level.by_hand}+{counterpart}")
                if by_hand is None or f"{level.ours[0]}+{extra}" not in found:
                    continue
                full, split = (*level.ours, "")[:2]
                names = [f"{level.amp}+{extra}", f"{full}+{extra}", f"{split}+{extra}"]
                names += [name + NOT_NATIVE for name in names[1:]]
                ratios = [f"{found[name] / by_hand:.2f}" if name in found else "-" for name in names]
                optimizer = TASKS[task].title.rpartition(", ")[2]
                yield [EXTRAS[extra].title, optimizer, level.title, f"{by_hand / 1e6:.1f} M", *ratios]


def replaced(text: str, result: dict[str, Any]) -> str:
    """Return the page with the table made anew."""
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{table(result)}\n{mark[2]}", text)


def main() -> int:
    """Count, and write the figures and the page."""
    if "--in-callgrind" in sys.argv:
        count_in_callgrind(Path(sys.argv[-1]))
        return 0
    RESULT.write_text(json.dumps(count_all(), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
