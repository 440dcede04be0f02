"""The autocast state inside the forward of an initialised model, whichever state the caller has."""

import contextlib
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch

from ..basics.logs import warn_user
from ..basics.running import current_pass
from .thread_flags import (
    State,
    ThreadAutocast,
    is_on,
    open_autocast_blocks,
    present_state,
    set_state,
    thread_state,
    traced,
)

P = ParamSpec("P")
T = TypeVar("T")


class ForwardCasts:
    """A context manager that sets the autocast state around the forward of an initialised model.

    One object can be used for several models and threads, and can be nested. On exit the state is restored. Cached
    weight casts are dropped when the thread's outermost block ends, so that none outlives an update of its weight.

    Without a dtype, the model's forward has no casts: those of other sessions are off inside. Casts of the user's own
    ``torch.autocast`` block stay on; ``is_16_bit``, where weights are, warns of that once.

    With a dtype, the flag of each device is on inside, with this dtype, unless the user switched casts off: by
    :func:`disable_casts` (the weight-cast cache is off too), or by a ``torch.autocast`` block of this thread. In a
    backward pass such a block restores the state of the forward that is computed again, and does not count.

    torch.compile cannot trace a context manager that was made outside the compiled function. Use :meth:`run` where the
    forward may be traced.
    """

    __slots__ = ("dtype", "has_trained", "is_16_bit")

    def __init__(self, dtype: torch.dtype | None, is_16_bit: bool = False) -> None:
        self.dtype = dtype
        self.is_16_bit = is_16_bit
        self.has_trained = False

    def __enter__(self) -> None:
        thread, state, dtype = thread_state.value, present_state(), self.dtype
        before, caching = state
        if dtype is None:
            depth = open_autocast_blocks()
            thread.forwards.append((state, depth, depth))
            set_state(_without_sessions(thread, state, depth))
            if self.is_16_bit and not self.has_trained and is_on():
                self.has_trained = True
                self._warn(_TWO_KINDS)
            return
        depth = torch.autocast_increment_nesting()
        # Outside is no block, the forward of a model without casts, or a block that a recomputation restores.
        is_in_plain = bool(thread.forwards) and thread.forwards[-1][1:] == (depth - 1, depth - 1)
        switches_on = caching and (depth == 1 or is_in_plain or current_pass() != -1)
        any_on = False
        for device, on, dtype_before in before:
            if not on and switches_on:
                torch.set_autocast_enabled(device, True)
                on = True
            any_on = any_on or on
            if dtype_before is not dtype:
                torch.set_autocast_dtype(device, dtype)
                if depth > 1:
                    torch.clear_autocast_cache()  # torch's cache is keyed by the weight, not by the dtype
        torch.set_autocast_cache_enabled(any_on)
        thread.forwards.append((state, depth - 1, depth))
        if not self.has_trained and torch.is_grad_enabled():
            self.has_trained = True
            outside = thread.forwards[-2][2] if len(thread.forwards) > 1 else 0
            if not any_on and depth - 1 > outside:
                self._warn(_SWITCHED_OFF)

    def _warn(self, text: str) -> None:
        try:
            warn_user(text)
        except Warning:  # where warnings are errors
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        thread = thread_state.value
        state = thread.forwards.pop()[0]
        if self.dtype is not None:
            depth = torch.autocast_decrement_nesting()
            if depth == 0 or not thread.forwards or any(found is not self.dtype for _, _, found in state[0]):
                torch.clear_autocast_cache()
        set_state(state)
        if thread.has_ended:
            thread.restore_after_ended_session()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` inside this block; torch.compile(fullgraph=True) traces it."""
        if self.dtype is None and not is_on():
            return function(*args, **kwargs)
        with _traced_forward(self.dtype) if torch.compiler.is_compiling() else self:
            return function(*args, **kwargs)


# Where the first forward of a training runs in such a block, as ``autocast(enabled=args.amp)``.
_SWITCHED_OFF: Final = (
    "this forward runs inside a torch.autocast(..., enabled=False) block, which switches O1's and O4's casts off, "
    "so it computes in float32. Remove the block (a library's loop may open one because of its own amp=False), or "
    "use a level with 16-bit weights, such as opt_level='O5'. To switch casts off on purpose, use "
    "mpinit.disable_casts()"
)
_TWO_KINDS: Final = (
    "this forward of a model with 16-bit weights runs inside of a torch.autocast block, which casts again: softmax, "
    "norms and sums to float32, and what keep_fp32 keeps in float32 to 16 bits. Remove the block, or use "
    "opt_level='O4' (bfloat16) or 'O1' (float16), whose weights are float32 and whose casts are those of the block"
)


def _without_sessions(thread: ThreadAutocast, state: State, depth: int) -> State:
    """Compute the state as it would be without any session: that of a ``torch.autocast`` block, or casts off."""
    for found, outside, inside in reversed(thread.forwards):
        if inside != depth:
            break
        state, depth = found, outside
    if depth == 0:
        return thread.base or state
    if state[1] or current_pass() == -1:
        return state
    # In a backward pass the block restores the casts of the original forward, and these were a session's.
    return thread.base or ([(device, False, dtype) for device, _, dtype in state[0]], True)


def _traced_forward(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Return :class:`ForwardCasts` for torch.compile, which cannot read the nesting of torch.autocast blocks.

    The cache is off inside: the compiler merges equal casts itself, and a block in the graph that switches the flag off
    is then treated as the user's choice. A flag that is on is treated as a session's inside a forward with casts, and
    also while the cache is off. That includes a user's own block in a thread with a live session.
    """
    caching = torch.is_autocast_cache_enabled()
    if dtype is not None:
        return traced(caching or is_on(), dtype)
    if caching and not thread_state.value.forwards:
        return contextlib.nullcontext()
    return traced(False, caching=True)
