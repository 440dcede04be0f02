"""An interpreter that forks itself for each contender: python -m benchmarks.interpreter [--native] [MODULE ...].

It reads a request from each line of stdin, and writes the answers to a line of stdout. A forked process does not need
to import torch and other modules. Within a round all contenders have the same memory addresses and the same hash seed;
from round to round these differ. With --native, mpinit's native code is loaded before the forks, if it is built.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import torch

from .case import Case, Unavailable
from .footprint import trim_heap
from .pieces import has_native_code
from .suite import workloads

Answer = dict[str, Any]


class Forked:
    """A forked process that measures one contender, as the interpreter sees it: a socket and a process id."""

    def __init__(self, others: Iterable[Forked], patience_s: float, **words: str) -> None:
        self._patience_s = patience_s
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by end)
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            for other in others:
                other.close_copy()
            for stream in (1, 2):
                os.dup2(self._log.fileno(), stream)
            with theirs.makefile("rw") as line:
                answer_as(line, **words)
            sys.stderr.flush()
            os._exit(0)
        theirs.close()
        ours.settimeout(patience_s)
        self._descriptor, self._line = ours.fileno(), ours.makefile("rw")

    def send(self, request: Answer) -> None:
        """Send a request. The first one is answered when the contender is prepared."""
        # If the process has ended, receive() reports that.
        with contextlib.suppress(OSError):
            self._line.write(json.dumps(request) + "\n")
            self._line.flush()

    def receive(self) -> Answer:
        """Wait for the answer to the last request."""
        try:
            return json.loads(self._line.readline())  # type: ignore[no-any-return]
        except TimeoutError:
            return {"failed": f"no answer within {self._patience_s:.0f} s"}
        except (OSError, ValueError):
            self._log.seek(0)
            last = (self._log.read().strip().splitlines() or ["nothing"])[-1]
            return {"failed": f"the process ended; its last line of output: {last}"}

    def close_copy(self) -> None:
        """Close the copy of the socket that a later fork has inherited."""
        os.close(self._descriptor)

    def end(self) -> None:
        """Kill the process."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._log.close()


def serve(preloaded: Sequence[str], native: bool) -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for module in preloaded:
        importlib.import_module(module)
    if native:
        has_native_code()
    gc.collect()
    gc.freeze()
    # Memory that was freed here and is used again in a fork would be copied page by page.
    trim_heap()
    processes: dict[str, Forked] = {}
    for line in sys.stdin:
        print(json.dumps(_answers(processes, json.loads(line))), file=answers, flush=True)
    for forked in processes.values():
        forked.end()


def _answers(processes: dict[str, Forked], request: Answer) -> dict[str, Answer]:
    """Return the answer of each contender to a request; ``at_once`` of them work on it at the same time."""
    found: dict[str, Answer] = {}
    waiting = list(request["contenders"])
    while waiting:
        batch, waiting = waiting[: request["at_once"]], waiting[request["at_once"] :]
        if "start" in request:
            words = request["start"]
            for who in batch:
                processes[who] = Forked(list(processes.values()), **words, contender=who)
        for who in batch:
            processes[who].send(request)
        for who in batch:
            found[who] = processes[who].receive()
            if "seconds" not in found[who] and "once" not in found[who]:
                processes.pop(who).end()
    return found


def answer_as(line: TextIO, workload: str, contender: str, size: str, device: str) -> None:
    """Run the forked process: prepare the case, time its turns, send its facts. An error is an answer too."""
    case: Case | None = None
    for request in map(json.loads, line):
        try:
            if case is None:
                row = workloads(size)[workload]
                case = row.make(contender, size, device)
                answer: Answer = prepared(case, row.repeat_s)
            else:
                answer = (
                    turn(case, request["turn"], request["untimed"])
                    if "turn" in request
                    else {"facts": case.facts(request["first"])}
                )
        except Unavailable as reason:
            answer = {"unavailable": str(reason)}
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            first_line = (str(error).strip() or "no message").splitlines()[0]
            answer = {"failed": f"{type(error).__name__}: {first_line}"}
        line.write(json.dumps(answer) + "\n")
        line.flush()


def prepared(case: Case, repeat_s: float) -> Answer:
    """Prepare the case; return the time of one repetition, or 0 if no repetition may come before the timed ones."""
    case.prepare()
    return {"once": 0.0 if repeat_s == 0 else case.seconds(1)}


def turn(case: Case, loops: int, untimed: int) -> Answer:
    """Return the time of one repetition, after untimed ones that fill the caches again."""
    if untimed:
        case.seconds(untimed)
    begin = time.perf_counter()
    seconds = case.seconds(loops) / loops
    return {"seconds": seconds, "wall_s": (time.perf_counter() - begin) / loops}


if __name__ == "__main__":
    words = sys.argv[1:]
    serve([word for word in words if word != "--native"], "--native" in words)
