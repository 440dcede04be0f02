"""Tests on several processes: ``@ranks(2, case, ...)`` makes tests of a function that all ranks run together.

What pytest selects of a file runs in one launch, ``python processes.py FILE REPORT``, whose input names the tests. It
imports the file once and forks the ranks. No limit is on its total time: ranks that finish no test for much longer
than it takes to start are ended, which fails the test that they are in, and the tests after it run in new ones.
"""

import contextlib
import datetime
import faulthandler
import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import quick_process
import torch
import torch.distributed as dist

from mpinit import registry

Checks = dict[str, Callable[[], None]]


def ranks(
    count: int, *cases: Sequence[Any], long: Sequence[Any] = (), nightly: Sequence[Any] = ()
) -> Callable[[Callable[..., None]], Any]:
    """A test of the function on so many ranks for each tuple of arguments; ``long`` and ``nightly`` add to them."""

    def enter(check: Callable[..., None]) -> Any:
        checks: Checks = {}
        rows = []
        for mark, some in ((None, cases), (pytest.mark.long, long), (pytest.mark.nightly, nightly)):
            for case in some or ([()] if mark is None and not (long or nightly) else ()):
                words = [str(word).removeprefix("torch.").replace(" ", "_") for word in case]
                name = "-".join([check.__name__, *words])
                if name not in checks:
                    marks = [mark] if mark else []
                    rows.append(pytest.param(name, id="-".join(words) or f"{count}_ranks", marks=marks))
                checks[name] = functools.partial(check, *case)

        @pytest.mark.parametrize("name", rows)
        def test(name: str, outcomes: dict[str, str]) -> None:
            assert outcomes[name] == "ok", outcomes[name]

        test.checks, test.ranks = checks, count  # type: ignore[attr-defined]
        return test

    return enter


def launch(path: Path, names: list[str], *patience: str) -> dict[str, str]:
    """What came of each of the tests of a file, "ok" or what went wrong; how many seconds one may take, if given."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.json"
        launched = subprocess.run(
            [sys.executable, __file__, str(path), str(report), *patience],
            input=json.dumps(names),
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": folder},
            capture_output=True,
            text=True,
        )
        missing = f"never ran; the launch ended with {launched.returncode}: {launched.stderr[-3000:]}"
        return dict.fromkeys(names, missing) | read(report)


def read(report: Path) -> dict[str, str]:
    """The outcomes so far."""
    return json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


def main(path: Path, report: Path, *given: str) -> None:
    """Run what the input names."""
    start = time.perf_counter()
    quick_process.prepare()
    wanted = set(json.load(sys.stdin))
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    # What is slow to import or to start is so once, and not on every rank.
    torch.compile(torch.ones_like, backend="eager")(torch.ones(1))
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    patience = float(given[0]) if given else max(240.0, 80 * (time.perf_counter() - start))
    tests = [test for test in vars(module).values() if inspect.isfunction(test) and hasattr(test, "checks")]
    for count in sorted({test.ranks for test in tests}):
        checks = {name: run for test in tests if test.ranks == count for name, run in test.checks.items()}
        left = {name: run for name, run in checks.items() if name in wanted}
        while left:
            reason = fork(count, left, report, patience)
            outcomes = read(report)
            first, *others = [name for name in left if name not in outcomes] or [""]
            left = {name: left[name] for name in others}
            if first:
                report.write_text(json.dumps(outcomes | {first: reason}))


def fork(count: int, checks: Checks, report: Path, patience: float) -> str:
    """Run tests on so many ranks, as long as all of them live and go on; why they did not, and where each was then."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    quick_process.keep()
    timeout = datetime.timedelta(seconds=patience)
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            traces = open(f"{report}.{rank}", "w")  # noqa: SIM115 - open as long as the process lives
            faulthandler.enable(traces)
            faulthandler.register(signal.SIGUSR1, traces)
            try:
                run_all(checks, report, connect(rank, count, readable, writable, timeout), rank, count)
                status = 0
            except BaseException:
                traceback.print_exc(file=traces)
            finally:
                traces.flush()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    running, reasons = dict(enumerate(children)), []
    known, since = 0, time.monotonic()
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            del running[children.index(child)]
        elif len(read(report)) != known:
            known, since = len(read(report)), time.monotonic()
        else:
            time.sleep(0.05)
        if (child and status) or time.monotonic() - since > patience:
            what = f"rank {children.index(child)} ended with {os.waitstatus_to_exitcode(status)}" if child else ""
            reasons.append(what or f"no test was finished in {patience:.0f} s")
            for sent, wait in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):
                for other in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, sent)
                time.sleep(wait)
            since = time.monotonic()
    return "\n".join([*reasons, *(f"rank {rank}: {Path(f'{report}.{rank}').read_text()}" for rank in range(count))])


def connect(rank: int, count: int, readable: int, writable: int, timeout: datetime.timedelta) -> dist.Store:
    """A store that all ranks share: the first one's, which tells the others its port."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, is_master=True, timeout=timeout, wait_for_workers=False)
        os.write(writable, b"%8d" % store.port * (count - 1))
        return store
    return dist.TCPStore("127.0.0.1", int(os.read(readable, 8)), count, is_master=False, timeout=timeout)


def run_all(checks: Checks, report: Path, store: dist.Store, rank: int, count: int) -> None:
    """Run tests; after one that has failed, and may have left others waiting, with a process group of its own."""
    outcomes = read(report)
    for number, (name, run) in enumerate(checks.items()):
        if not dist.is_initialized():
            prefixed = dist.PrefixStore(f"group {number}", store)
            # Ranks that wait for another's collective say so, one after the other, before they are ended.
            timeout = store.timeout / 4
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=count, timeout=timeout)
        store.set(f"outcome {number} {rank}", outcome_of(run))
        all_of_them = [store.get(f"outcome {number} {other}").decode() for other in range(count)]
        outcomes[name] = "\n".join(outcome for outcome in all_of_them if outcome != "ok") or "ok"
        if rank == 0:
            written = report.with_suffix(".new")
            written.write_text(json.dumps(outcomes), encoding="utf-8")
            written.replace(report)
        if outcomes[name] != "ok":
            dist.destroy_process_group()
    store.set(f"done {rank}", "")
    if rank == 0:  # whose store it is
        store.wait([f"done {other}" for other in range(count)])


def outcome_of(run: Callable[[], None]) -> str:
    """ "ok", or what went wrong on this rank."""
    torch.manual_seed(0)
    try:
        run()
        said = "ok"
    except Exception:
        said = f"rank {dist.get_rank()}: {traceback.format_exc()}"
    for left_over in reversed(registry.live()):
        try:
            left_over.undo()
        except Exception:
            said = f"rank {dist.get_rank()}: {traceback.format_exc()}" if said == "ok" else said
    return said


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
