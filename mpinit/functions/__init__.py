"""O1: torch's functions cast their arguments, at native speed, and everything can be put back."""

from __future__ import annotations

from ..basics.patching import Undo, UndoStack
from ..plan import CastScope, Plan
from .engine import switch_thread_on
from .installation import INSTALLATION

__all__ = ["apply"]


def apply(plan: Plan, verbose: bool = False) -> Undo:
    """Make torch's functions follow the cast policy, and switch casts on for this thread where the plan says so.

    The engine is torch's own autocast; wrappers are put only around names that a device present does not have on its
    own list. They are shared by all live sessions: the namespaces are as they were when the last one is undone. An
    exception on the way, Ctrl-C at any line included, leaves everything as it was.

    Args:
        plan: what to do; called only where ``plan.patch_functions``.
        verbose: log the first cast of each kind, and how many there were, at the level DEBUG.

    Returns:
        The undo, to be called in the same thread; calling it again does nothing, or completes what was interrupted.

    Example:
        >>> from mpinit.settings.opt_levels import OPT_LEVELS
        >>> from mpinit.plan import make_plan
        >>> undo = apply(make_plan(OPT_LEVELS["O1"]))
        >>> undo()
    """
    undos = UndoStack()
    try:
        INSTALLATION.add(plan, verbose, undos)
        if plan.cast_scope is CastScope.THREAD:
            switch_thread_on(plan.function_dtype, undos)
        return undos.unwind
    except BaseException:
        undos.unwind()
        raise
