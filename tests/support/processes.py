"""Tests on several processes: ``@ranks(2, case, ...)`` makes tests of a function that all ranks run together.

Each rank has a host, ``python processes.py RANK FD REPORT``, which imports torch once and lives as long as the process
that runs the tests. It has a ``PYTHONHASHSEED`` of its own, as on several machines: a set has another order on each
rank. For the tests that pytest selects of a file, each host forks a child, which imports the file and runs them. There
is no limit on the total time. Ranks that finish no test for much longer than a host needs to start are ended. That
fails the test that they are in, and the tests after it run in new children.
"""

import atexit
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
from typing import Any, NoReturn

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


# The hosts of this process, by rank, and the folder of their files.
_hosts: list["Host"] = []


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    atexit.register(stop_hosts)  # runs first
    return Path(folder.name)


def stop_hosts() -> None:
    """Stop all hosts; the next launch starts others."""
    while _hosts:
        _hosts.pop().stop()


def launch(path: Path, counts: dict[str, int], patience: float | None = None) -> dict[str, str]:
    """Run tests of a file, and return for each "ok" or an error.

    Args:
        path: the file.
        counts: the names of the tests, and for each the number of its ranks.
        patience: how many seconds a test may last. Default: much longer than a host needs to start.
    """
    report = _folder() / "outcomes.json"
    report.unlink(missing_ok=True)
    missing = "never ran"
    try:
        for count in sorted(set(counts.values())):
            while len(_hosts) < count:
                _hosts.append(Host(len(_hosts), report))
            started = max(host.patience() for host in _hosts[:count])
            waits = started if patience is None else patience
            left = [name for name in counts if counts[name] == count]
            while left:
                reason = run_on(_hosts[:count], path, left, report, waits)
                outcomes = read(report)
                first, *left = [name for name in left if name not in outcomes] or [""]
                if first:
                    report.write_text(json.dumps(outcomes | {first: reason}))
    except EOFError:
        missing = f"never ran; a host ended: {[host.errors.read_text()[-3000:] for host in _hosts]}"
        stop_hosts()
    except BaseException:
        stop_hosts()
        raise
    return dict.fromkeys(counts, missing) | read(report)


def read(report: Path) -> dict[str, str]:
    """Return the outcomes so far."""
    return json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}


def launch_ending(path: Path, name: str, count: int, patience: float) -> list[str]:
    """Run a test whose ranks end their processes by :func:`end_with`; return the words of each, "" if it hangs."""
    words = [_folder() / f"end {rank}" for rank in range(count)]
    for each in words:
        each.unlink(missing_ok=True)
    launch(path, {name: count}, patience)
    return [each.read_text(encoding="utf-8") if each.exists() else "" for each in words]


def end_with(words: str) -> NoReturn:
    """End the process of this rank, as a script ends: the connections to the other ranks are closed."""
    Path(os.environ["TMPDIR"], f"end {dist.get_rank()}").write_text(words, encoding="utf-8")
    os._exit(0)


class Host:
    """The process that forks the children of one rank.

    Attributes:
        errors: a file of what it wrote.
    """

    def __init__(self, rank: int, report: Path) -> None:
        self._patience: float | None = None
        self.errors = report.with_suffix(f".{rank}.log")
        readable, writable = os.pipe()
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(rank), str(writable), str(report)],
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

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._answers)

    def patience(self) -> float:
        """Return how many seconds a test may last; wait until the process has started."""
        if self._patience is None:
            self._patience = float(self.answer())
        return self._patience

    def answer(self, timeout: float | None = None) -> Any:
        """Return its next answer; None after the timeout."""
        while b"\n" not in self._line:
            if timeout is not None and not select.select([self._answers], [], [], timeout)[0]:
                return None
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise EOFError
            self._line += more
        line, _, self._line = self._line.partition(b"\n")
        return json.loads(line)

    def ask(self, *what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


def run_on(hosts: list[Host], path: Path, names: list[str], report: Path, patience: float) -> str:
    """Run tests on a rank for each host, until one ends or waits too long; return why, and the stack of each then."""
    port = report.with_suffix(".port")
    port.unlink(missing_ok=True)
    for host in hosts:
        host.ask(str(path), len(hosts), names, patience)
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


def main(rank: int, answers: int, report: Path) -> None:
    """Import what most tests need, then fork a child for each line of the input."""
    start = time.perf_counter()
    quick_process.prepare()
    # What is slow to import or to start is so once, and not in every child.
    importlib.import_module("engines")
    torch.compile(torch.ones_like, backend="eager")(torch.ones(1))
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    with open(answers, "w", encoding="utf-8") as replies:

        def reply(what: Any) -> None:
            replies.write(json.dumps(what) + "\n")
            replies.flush()

        reply(max(240.0, 80 * (time.perf_counter() - start)))
        for line in sys.stdin:
            path, count, names, patience = json.loads(line)
            child = fork(Path(path), names, report, rank, count, patience)
            reply(child)
            reply(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def fork(path: Path, names: list[str], report: Path, rank: int, count: int, patience: float) -> int:
    """Run tests of a file as one rank of several in a child, and return the number of the child."""
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
        sys.path.insert(0, str(path.parent))
        module = importlib.import_module(path.stem)
        quick_process.keep()
        tests = [test for test in vars(module).values() if inspect.isfunction(test) and hasattr(test, "checks")]
        checks = {name: run for test in tests for name, run in test.checks.items()}
        store = connect(rank, count, report.with_suffix(".port"), datetime.timedelta(seconds=patience))
        run_all({name: checks[name] for name in names}, report, store, rank, count)
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
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
