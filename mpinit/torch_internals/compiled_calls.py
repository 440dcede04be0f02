"""Where calls of compiled functions and models begin: nothing that Python does by itself runs inside of them.

torch 2.11 to 2.13: every call that comes from outside of compiled code asks ``_callback_from_stance`` of
``torch._dynamo.eval_frame`` what is to be compiled, with tracing off. Can go when torch.compile has a hook for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from .listeners import Listeners

_here = threading.local()


@contextmanager
def own_call() -> Iterator[None]:
    """Around a call of compiled code of the library's own, in the middle of a step: nobody is told."""
    before, _here.is_own = getattr(_here, "is_own", False), True
    try:
        yield
    finally:
        _here.is_own = before


def _saying_that_it_begins(callback_from_stance: Callable[..., Any], listeners: Iterable[Any]) -> Callable[..., Any]:
    def tell_and_ask(callback: Any) -> Any:
        # None or False where compiled code is left, or something runs that is not to be compiled.
        if callable(callback) and not getattr(_here, "is_own", False) and not torch.compiler.is_compiling():
            for listener in listeners:
                listener.compiled_call_begins()
        return callback_from_stance(callback)

    return tell_and_ask


# Their ``compiled_call_begins()`` is called.
compiled_calls: Final = Listeners("torch._dynamo.eval_frame", "_callback_from_stance", _saying_that_it_begins)
