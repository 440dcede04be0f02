"""Processes of their own that answer requests, forked from one that has torch imported and so at work at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import IO, Any

from .contenders import Unavailable

PACKAGE = __package__ or "examples.benchmarks"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What every contender needs and nothing that patches; mpinit is left for those who use it to import.
_PRELOADED = ["torch", "torch._dynamo", f"{PACKAGE}.child", f"{PACKAGE}.init_child"]
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"

Answer = dict[str, Any]


class Dropped(Exception):
    """A worker that takes no further part.

    Attributes:
        status: "unavailable" (it has no part here) or "failed".
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Worker:
    """The parent's end of a process that makes one object and answers by its methods."""

    def __init__(self, make: Callable[..., Any], patience_s: float = 240.0, **arguments: Any) -> None:
        self._patience_s = patience_s
        self._log: IO[str] = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 (closed by stop)
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
        context: Any = multiprocessing.get_context(_METHOD)
        context.set_forkserver_preload(_PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._log.name, make, arguments))
        self._process.start()
        theirs.close()

    def ask(self, do: str, **request: Any) -> Answer:
        """Call a method there and wait for what it returns; raise Dropped where that does not come."""
        try:
            self._connection.send((do, request))
            if not self._connection.poll(self._patience_s):
                raise Dropped("failed", f"no answer within {self._patience_s:.0f} s when asked to {do}")
            answer: Answer = self._connection.recv()
        except (EOFError, OSError):
            raise Dropped("failed", f"the process ended while asked to {do}: {self._last_words()}") from None
        for status in ("unavailable", "failed"):
            if status in answer:
                raise Dropped(status, answer[status])
        return answer

    def _last_words(self) -> str:
        self._process.join()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.exitcode}"

    def stop(self) -> None:
        """Hang up, and end the process if it does not go by itself; a second time does nothing."""
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.close()


def once(
    make: Callable[..., Any], do: str, request: Mapping[str, Any] = MappingProxyType({}), **arguments: Any
) -> Answer:
    """One answer of one method, from a process that ends with it."""
    worker = Worker(make, **arguments)
    try:
        return worker.ask(do, **request)
    finally:
        worker.stop()


def _serve(connection: Connection[Any, Any], log: str, make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """The process: answer until the parent hangs up; what goes wrong is an answer too."""
    with open(log, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    subject = make(**arguments)
    while True:
        try:
            do, request = connection.recv()
        except EOFError:
            return
        connection.send(_answer(subject, do, request))


def _answer(subject: Any, do: str, request: dict[str, Any]) -> Answer:
    try:
        answer: Answer = getattr(subject, do)(**request)
        return answer
    except Unavailable as reason:
        return {"unavailable": str(reason)}
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return {"failed": f"{type(error).__name__}: {first_line}"}
