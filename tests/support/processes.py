"""Tests on several processes: ``@ranks(2, case, ...)`` makes tests of a function that all ranks run together.

What pytest selects of a file runs in one launch: a process for each rank, ``python processes.py FILE REPORT RANK FD``,
with a ``PYTHONHASHSEED`` of its own, as on several machines: a set has another order on each rank. It imports the file
once and forks its rank. No limit is on the total time: ranks that finish no test for much longer than it takes to start
are ended, which fails the test that they are in, and the tests after it run in new ones.
"""

import contextlib
import datetime
import faulthandler
import functools
import importlib
import inspect
import json
import os
import select
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
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        report = Path(folder) / "outcomes.json"
        hosts = [stack.enter_context(Host(0, path, report))]
        try:
            counts, waits = hosts[0].answer()
            for count in sorted({counts[name] for name in names}):
                while len(hosts) < count:
                    hosts.append(stack.enter_context(Host(len(hosts), path, report)))
                for host in hosts[:count]:
                    host.is_ready or host.answer()
                left = [name for name in counts if name in names and counts[name] == count]
                while left:
                    reason = run_on(hosts[:count], left, report, float(patience[0]) if patience else waits)
                    outcomes = read(report)
                    first, *left = [name for name in left if name not in outcomes] or [""]
                    if first:
                        report.write_text(json.dumps(outcomes | {first: reason}))
            missing = "never ran"
        except EOFError:
            missing = f"never ran; a process ended: {[host.errors.read_text()[-3000:] for host in hosts]}"
        return dict.fromkeys(names, missing) | read(report)


def read(report: Path) -> dict[str, str]:
    """The outcomes so far."""
    return json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


class Host:
    """A process for one rank, whose sets have an order of their own; it imports the file once, and forks each run.

    Attributes:
        is_ready: whether the file is imported.
        errors: a file of what it wrote.
    """

    def __init__(self, rank: int, path: Path, report: Path) -> None:
        self.is_ready = False
        self.errors = report.with_suffix(f".{rank}.log")
        readable, writable = os.pipe()
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(path), str(report), str(rank), str(writable)],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TMPDIR": str(report.parent), "PYTHONHASHSEED": str(rank + 1)},
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(writable,),
                text=True,
            )
        os.close(writable)
        self._answers, self._line = readable, b""

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._answers)

    def answer(self, timeout: float | None = None) -> Any:
        """The next thing that it says; None after the timeout."""
        while b"\n" not in self._line:
            if timeout is not None and not select.select([self._answers], [], [], timeout)[0]:
                return None
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise EOFError
            self._line += more
        self.is_ready = True
        line, _, self._line = self._line.partition(b"\n")
        return json.loads(line)

    def ask(self, *what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


def run_on(hosts: list[Host], names: list[str], report: Path, patience: float) -> str:
    """Run tests on so many ranks, as long as all of them live and go on; why they did not, and where each was then."""
    port = report.with_suffix(".port")
    port.unlink(missing_ok=True)
    for host in hosts:
        host.ask(len(hosts), names, patience)
    children = [host.answer() for host in hosts]
    running, reasons = dict(enumerate(children)), []
    known, since = 0, time.monotonic()
    while running:
        ended = {rank: hosts[rank].answer(0.0) for rank in running}
        ended = {rank: status for rank, status in ended.items() if status is not None}
        for rank in ended:
            del running[rank]
        if len(read(report)) != known:
            known, since = len(read(report)), time.monotonic()
        elif not ended:
            time.sleep(0.05)
        failed = {rank: status for rank, status in ended.items() if status}
        if failed or time.monotonic() - since > patience:
            whats = [f"rank {rank} ended with {status}" for rank, status in failed.items()]
            reasons += whats or [f"no test was finished in {patience:.0f} s"]
            for sent, wait in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):
                for other in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, sent)
                time.sleep(wait)
            since = time.monotonic()
    traces = [report.with_suffix(f".{rank}.traces") for rank in range(len(hosts))]
    return "\n".join([*reasons, *(f"rank {rank}: {trace.read_text()}" for rank, trace in enumerate(traces))])


def main(path: Path, report: Path, rank: int, answers: int) -> None:
    """Import the file, then fork a run of the tests for each line of the input."""
    start = time.perf_counter()
    quick_process.prepare()
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    # What is slow to import or to start is so once, and not in every run.
    torch.compile(torch.ones_like, backend="eager")(torch.ones(1))
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    tests = [test for test in vars(module).values() if inspect.isfunction(test) and hasattr(test, "checks")]
    counts = {name: test.ranks for test in tests for name in test.checks}
    checks = {name: run for test in tests for name, run in test.checks.items()}
    with open(answers, "w", encoding="utf-8") as replies:

        def reply(what: Any) -> None:
            replies.write(json.dumps(what) + "\n")
            replies.flush()

        reply((counts, max(240.0, 80 * (time.perf_counter() - start))))
        for line in sys.stdin:
            count, names, patience = json.loads(line)
            child = fork({name: checks[name] for name in names}, report, rank, count, patience)
            reply(child)
            reply(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def fork(checks: Checks, report: Path, rank: int, count: int, patience: float) -> int:
    """Run tests as one rank of so many in a child, whose number is returned."""
    sys.stdout.flush()
    quick_process.keep()
    child = os.fork()
    if child:
        return child
    status = 1
    traces = report.with_suffix(f".{rank}.traces").open("w")
    faulthandler.enable(traces)
    faulthandler.register(signal.SIGUSR1, traces)
    try:
        store = connect(rank, count, report.with_suffix(".port"), datetime.timedelta(seconds=patience))
        run_all(checks, report, store, rank, count)
        status = 0
    except BaseException:
        traceback.print_exc(file=traces)
    finally:
        traces.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def connect(rank: int, count: int, port: Path, timeout: datetime.timedelta) -> dist.Store:
    """A store that all ranks share: the first one's, which writes its port into a file for the others."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, is_master=True, timeout=timeout, wait_for_workers=False)
        written = port.with_suffix(".new")
        written.write_text(str(store.port))
        written.replace(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), count, is_master=False, timeout=timeout)


def run_all(checks: Checks, report: Path, store: dist.Store, rank: int, count: int) -> None:
    """Run tests; after one that has failed, and may have left others waiting, with a process group of its own."""
    outcomes = read(report)
    for number, (name, run) in enumerate(checks.items()):
        if not dist.is_initialized():
            prefixed = dist.PrefixStore(f"group {number}", store)
            # Ranks that wait for another's collective say so, one after the other, before they are ended.
            timeout = store.timeout / 4
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=count, timeout=timeout)
            # No rank may end its process while another still connects to it, nor rank 0 while another still waits for
            # that: its process has the store.
            store.set(f"connected {number} {rank}", "")
            store.wait([f"connected {number} {other}" for other in range(count)])
            store.set(f"begins {number} {rank}", "")
            if rank == 0:
                store.wait([f"begins {number} {other}" for other in range(count)])
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
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
