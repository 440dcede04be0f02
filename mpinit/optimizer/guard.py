"""The refusal of steps that mpinit does not run: of optimizers that were never initialised, or of a kept ``step``."""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from ..basics.dtypes import is_lower_precision
from ..basics.patching import UndoStack, undo_when_dropped
from ..masters.masters import Masters
from .hooks import register_check, remove_check
from .members import Members, parameters_of, wrapped_by
from .step import ManagedOptimizer

_BESIDE: Final = (
    "{}.step was not called through the attribute `optimizer.step`, which mpinit.initialize has replaced: this method "
    "was read or compiled before, or is that of the class or of an optimizer inside. It would update 16-bit weights "
    "without their masters, or with inf and nan. Call optimizer.step() of the optimizer that mpinit.initialize was "
    "called with, and read or compile it after mpinit.initialize"
)


@dataclass(eq=False)
class StepGuard:
    """The check before every step of the process that mpinit does not run.

    Attributes:
        masters: the session's masters.
        members: the session's models.
        has_masters: whether an optimizer that was never initialised is refused if it would step 16-bit weights.
    """

    masters: Masters
    members: Members
    has_masters: bool = True

    def install(self, undos: UndoStack) -> None:
        """Check every optimizer of the process before it steps, for as long as the session lives."""
        known = weakref.ref(self)

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            guard = known()
            if guard is not None:
                guard.check(optimizer)

        undos.push(undo_when_dropped(self, partial(remove_check, check)))
        register_check(check)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse the step of an optimizer with 16-bit weights or a loss scale of this session.

        Raises:
            RuntimeError: the optimizer belongs to no session, or the call is not that of its ``step`` attribute.
        """
        managed = _managed(optimizer)
        if managed is not None:
            if not managed.params.is_open and managed.shared.masters is self.masters:
                managed.params.sync()
                if managed.params.masters or managed.shared.states is not None or managed.shared.plan.skips:
                    raise RuntimeError(_BESIDE.format(type(optimizer).__name__))
            return
        if not self.has_masters or any(map(_managed, wrapped_by(optimizer))):
            return  # an optimizer that wraps a managed one calls that one's step
        for parameter in parameters_of([optimizer]):
            is_narrow = parameter.requires_grad and is_lower_precision(parameter.dtype)
            if is_narrow and (self.masters.of(parameter) is not None or self._is_in_models(parameter)):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} steps {self.masters.names.of(parameter)!r}, which "
                    "mpinit.initialize has cast to 16 bit, and would not update its float32 master: pass the "
                    "optimizer to mpinit.initialize, or call mpinit.add_optimizers(optimizer) before its first step"
                )

    def _is_in_models(self, parameter: nn.Parameter) -> bool:
        # The id alone may be that of a parameter that was replaced and freed since.
        return id(parameter) in self.members.tensor_ids and parameter in self.members.parameters()


def _managed(optimizer: Optimizer) -> ManagedOptimizer | None:
    """Return the managed optimizer of an optimizer with patched methods; None after its session was undone."""
    managed: ManagedOptimizer | None = getattr(vars(optimizer).get("step"), "managed", None)
    return managed if managed is not None and managed.is_patched and managed.reference() is optimizer else None
