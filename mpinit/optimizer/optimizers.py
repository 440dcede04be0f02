"""The optimizers of a session."""

import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Final

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..basics.dtypes import is_lower_precision
from ..basics.patching import UndoStack
from ..basics.wrappers import unwrapped
from ..config.plan import MasterWeightsMode, Plan
from ..torch_internals.fused_sgd import steps_16_bit_wrongly
from .gradients import Gradients
from .members import Members, widen_state, wrapped_by
from .methods import patch
from .per_parameter import steps_per_parameter
from .step import FIXED_SCALE, ManagedOptimizer, Shared

_STEPS_COPIES: Final = (
    "ZeroRedundancyOptimizer steps an optimizer of its own over the model's 16-bit weights, and would not "
    "update float32 masters where they are. To shard masters and optimizer states over ranks call "
    "torch.distributed.fsdp.fully_shard(model) before the optimizer is made (FSDP2), and pass the optimizer "
    "inside it, without ZeroRedundancyOptimizer; or keep that, over float32 parameters, with "
    "master_weights=\"model\" or opt_level='O1'"
)


_FUSED_SGD: Final = (
    "torch's fused SGD steps only some of the numbers of 16-bit parameters on a CPU (torch 2.11 to 2.13), and the "
    "optimizer would step such parameters, without masters: pass fused=False to SGD, or use opt_level='O2' or 'O5'"
)


class ManagedOptimizers:
    """The managed optimizers of a session.

    Attributes:
        members: the models and optimizers of the session.
        shared: the parts of the session that its optimizers use.
        awaits: whether optimizers are expected to be added.
    """

    def __init__(self, members: Members, shared: Shared, awaits: bool) -> None:
        self.members = members
        self.shared = shared
        self.awaits = awaits
        # Compared by identity, without optimizers that were freed.
        self._managed: MutableMapping[Optimizer, ManagedOptimizer] = WeakIdKeyDictionary()
        # The generations of the optimizers' parameters for which ``shared.unowned`` was listed.
        self._generations: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[ManagedOptimizer]:
        return iter(self._managed.values())

    def find(self, optimizer: Optimizer) -> ManagedOptimizer:
        """Return the managed optimizer of an optimizer, or of the optimizer inside a wrapper.

        Raises:
            TypeError: the optimizer does not belong to the session.
        """
        known = self._managed.get(optimizer)
        if known is None:
            known = self._managed.get(unwrapped(optimizer, self._managed.__contains__))
        if known is None:
            raise TypeError(
                f"{type(optimizer).__name__} is no optimizer of {self.members.describe()}: pass the optimizer that "
                "mpinit.initialize or mpinit.add_optimizers was called with"
            )
        return known

    # -- added and forgotten --------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer, undos: UndoStack, owner: object) -> None:
        """Patch the methods of an optimizer.

        Args:
            undos: the undos of the call.
            owner: an object that the optimizer's methods keep alive.
        """
        undos.push(partial(_remove, weakref.ref(self), weakref.ref(optimizer)))
        managed = self._managed[optimizer] = ManagedOptimizer(optimizer, self.shared)
        managed.params.sync()
        for holder in managed.params.groups.holders():
            for weight in managed.params.mastered:
                widen_state(holder.state.get(weight))
        patch(managed, undos, owner)

    def remove(self, optimizer: Optimizer) -> None:
        """Drop the record of an optimizer."""
        self._managed.pop(optimizer, None)

    # -- parameters and gradients ---------------------------------------------------------------------------------

    def all_gradients(self, own: Sequence[ManagedOptimizer], with_others: bool) -> list[Gradients]:
        """List the gradients of the optimizers ``own``, and all others that a loss may reach."""
        found = [managed.gradients for managed in own]
        # With the optimizers, none of which is freed meanwhile.
        every = list(self._managed.items()) if with_others else []
        others = [managed for _, managed in every if managed not in own]
        for managed in [*own, *others]:
            managed.params.sync()
        if not with_others:
            return found
        unowned, generations = self.shared.unowned, tuple([managed.params.generation for _, managed in every])
        if self._generations != generations:
            stepped = {id(weight) for _, managed in every for weight in managed.params.weights}
            weights = [p for p in self.members.parameters() if id(p) not in stepped]
            masters = [master for master in map(self.shared.masters.of, weights) if master is not None]
            mastered = [master.weight for master in masters]
            unowned.set_weights(weights, mastered, mastered)
            self._generations = generations
        return [*found, *(managed.gradients for managed in others), *([unowned] if unowned.weights else [])]

    def check_idle(self, what: str) -> None:
        """Refuse to do ``what`` during a backward pass or a step, or while weights are float32."""
        self.shared.masters.refuse_inside_block(what)
        for managed in self:
            if managed.params.is_open:
                raise RuntimeError(f"{what} was called inside of optimizer.step(): move it before or after the step")
            managed.check_outside(what, "move it before or after the with-block")


def _remove(known: weakref.ref[ManagedOptimizers], reference: weakref.ref[Optimizer]) -> None:
    optimizers, optimizer = known(), reference()
    if optimizers is not None and optimizer is not None:
        optimizers.remove(optimizer)


def check_optimizers(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse optimizers that do not work with the plan's masters, encoded states or loss scale."""
    stored = plan.properties.optimizer_state
    has_16_bit = plan.cast_model and is_lower_precision(plan.model_dtype)
    steps_16_bit = has_16_bit and plan.masters is MasterWeightsMode.NONE
    for optimizer in optimizers:
        # A sharpness-aware one, whose two half steps use two losses.
        if plan.is_dynamic and all(hasattr(optimizer, name) for name in ("first_step", "second_step")):
            raise ValueError(FIXED_SCALE.format(type(optimizer).__name__))
        for each in (optimizer, *wrapped_by(optimizer)) if plan.makes_masters else ():
            if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(each).__mro__):
                raise ValueError(_STEPS_COPIES)
        if steps_16_bit and steps_16_bit_wrongly(optimizer):
            raise ValueError(_FUSED_SGD)
        if stored != "float32" and not steps_per_parameter(optimizer):
            raise ValueError(
                f'optimizer_state="{stored}" decodes a bucket of parameters at a time, and '
                f"mpinit does not know whether {type(optimizer).__name__} updates each parameter by itself. Use "
                'optimizer_state="float32"; or set optimizer.steps_per_parameter = True if it does, and keeps no '
                "copies of weights"
            )
