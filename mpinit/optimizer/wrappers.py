"""The DistributedDataParallel wrappers around the models of a session."""

import enum
import weakref
from typing import Any

from ..distributed.replicas import delayed_by, reduced_by
from ..model.boundary import ForwardGuard


class WrapperStatus(enum.Enum):
    """The status of a DistributedDataParallel in a session."""

    AGREED = "its ranks have agreed"
    PENDING = "its ranks agree at the end of the first backward pass, or at the first step"
    OF_OTHERS = "it reduces no gradients of the session's models"


class Wrappers:
    """The DistributedDataParallel wrappers around the models of a session.

    Attributes:
        changed: the ids of the parameters whose dtype the session has changed.
    """

    def __init__(self, guard: ForwardGuard, changed: set[int]) -> None:
        self.changed = changed
        self._guard = guard
        self._status: weakref.WeakKeyDictionary[Any, WrapperStatus] = weakref.WeakKeyDictionary()

    def mark(self, wrapper: Any, status: WrapperStatus) -> None:
        """Set the status of a wrapper."""
        self._status[wrapper] = status

    def with_status(self, *statuses: WrapperStatus) -> list[Any]:
        """List wrappers in the order in which they were found, which is the same on all ranks."""
        return [wrapper for wrapper, status in self._status.items() if status in statuses]

    def is_of_models(self, wrapper: Any) -> bool:
        """Return whether a DistributedDataParallel reduces gradients of the models."""
        return not self._guard.parameters().keys().isdisjoint([*reduced_by(wrapper), *delayed_by(wrapper)])

    def is_around(self, wrapper: Any) -> bool:
        """Return whether a DistributedDataParallel is one around the models, and remember one that is older.

        Raises:
            RuntimeError: it was made before ``mpinit.initialize``, for parameters of another dtype.
        """
        status = self._status.get(wrapper)
        if status is not None:
            return status is not WrapperStatus.OF_OTHERS
        if self.changed and any(id(p) in self.changed for p in (*reduced_by(wrapper), *delayed_by(wrapper))):
            name = type(wrapper).__name__
            raise RuntimeError(
                f"this {name} was made before mpinit.initialize, and has recorded the parameters' dtypes: it would not "
                "reduce the gradients of 16-bit weights, and every rank would train by itself. Call mpinit.initialize "
                f"first and wrap the model in {name} afterwards"
            )
        known = self.is_of_models(wrapper)
        self._status[wrapper] = WrapperStatus.PENDING if known else WrapperStatus.OF_OTHERS
        return known
