"""Holding Ctrl-C back while two things that belong together are written."""

import signal
import threading
from types import FrameType
from typing import Any


class InterruptsHeld:
    """Inside the block Ctrl-C is noted and answered at the end, in the main thread; other threads never see one."""

    __slots__ = ("_before", "_noted")

    def __enter__(self) -> None:
        self._noted: list[tuple[int, FrameType | None]] = []
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            for number, frame in self._noted[:1]:
                self._before(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))
