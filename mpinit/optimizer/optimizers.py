"""The optimizers of a session, and the refusal of steps by others."""

import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..basics.bulk import ModuleEntries
from ..basics.dtypes import is_lower_precision
from ..basics.patching import UndoStack, undo_when_dropped
from ..basics.wrappers import unwrapped
from ..distributed.sharding import is_distributed, model_parameters
from ..masters.masters import IN_FLOAT32, Masters
from ..model.float32_values import Float32Values
from ..torch_internals.step_hooks import register_own_hook, remove_own_hook
from .gradient_state import cleared
from .gradients import Gradients
from .managed import ManagedOptimizer, Shared, check_own_step, patch
from .members import check_steps_its_groups
from .per_parameter import steps_per_parameter
from .state import with_wrapped, wrapped_by
from .step import creates_state_only


@dataclass(frozen=True, eq=False)
class Initialized:
    """The models and optimizers of one session, and its number and level, by which messages name it.

    Attributes:
        models, optimizers: those of ``initialize``, and the optimizers of ``add_optimizers``, as weak references.
    """

    number: int
    opt_level: str
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]

    def describe(self) -> str:
        """Return one line that names the session: its number, level, models and optimizers."""
        models = ", ".join(type(model).__name__ for model in self.models) or "no model"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "no optimizer"
        return f"session {self.number} ({self.opt_level}: {models}; {optimizers})"

    def parameters(self) -> dict[nn.Parameter, None]:
        """Return the models' parameters, each once."""
        return model_parameters(self.models)


class ManagedOptimizers:
    """The managed optimizers of a session.

    Attributes:
        initialized: the models and optimizers of the session.
        shared: the parts of the session that its optimizers use.
        awaits: whether optimizers are expected to be added.
    """

    def __init__(self, initialized: Initialized, shared: Shared, awaits: bool) -> None:
        self.initialized = initialized
        self.shared = shared
        self.awaits = awaits
        # Compared by identity, without optimizers that were freed.
        self._managed: MutableMapping[Optimizer, ManagedOptimizer] = WeakIdKeyDictionary()
        # The gradients of parameters that no optimizer has; valid for these generations of the optimizers' members, and
        # as long as the models have the same modules and parameters.
        self._unowned: tuple[tuple[int, ...], Gradients | None] = (), None
        self._modules: ModuleEntries | None = None

    def __iter__(self) -> Iterator[ManagedOptimizer]:
        return iter(self._managed.values())

    def patched(self) -> list[ManagedOptimizer]:
        """List those whose methods are patched."""
        return [managed for managed in self if managed.is_patched]

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
                f"{type(optimizer).__name__} is no optimizer of {self.initialized.describe()}: pass the optimizer that "
                "mpinit.initialize or mpinit.add_optimizers was called with"
            )
        return known

    # -- added and forgotten --------------------------------------------------------------------------------------

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that do not work with the session's masters or encoded states."""
        states = self.shared.states
        for optimizer in optimizers:
            if self.shared.plan.makes_masters:
                for each in (optimizer, *wrapped_by(optimizer)):
                    check_steps_its_groups(each)
            if states is not None and not steps_per_parameter(optimizer):
                raise ValueError(
                    f'optimizer_state="{states.codec.name}" decodes a bucket of parameters at a time, and '
                    f"mpinit does not know whether {type(optimizer).__name__} updates each parameter by itself. Use "
                    'optimizer_state="float32"; or set optimizer.steps_per_parameter = True if it does, and keeps no '
                    "copies of weights"
                )

    def add(self, optimizer: Optimizer, has_16_bit: bool, undos: UndoStack, owner: object) -> None:
        """Patch the methods of an optimizer, or only count its steps by hooks if that is enough.

        Args:
            optimizer: the optimizer.
            has_16_bit: whether the models have 16-bit tensors.
            undos: the undos of the call.
            owner: an object that the optimizer's methods or hooks keep alive.
        """
        reference, known = weakref.ref(optimizer), weakref.ref(self)
        undos.push(partial(_remove, known, reference))
        weakref.finalize(optimizer, _remove_freed, known).atexit = False
        # Only torch's own optimizers are known to run their hooks in a step, and once.
        is_known = type(optimizer).__module__.startswith("torch.optim.")
        managed = self._managed[optimizer] = ManagedOptimizer(reference, self.shared)
        if has_16_bit or not (is_known and self.shared.plan.needs_no_patched_step):
            self._patch(managed, undos, owner)
        else:
            count_by_hooks(managed, optimizer, undos, owner)

    def _patch(self, managed: ManagedOptimizer, undos: UndoStack, owner: object) -> None:
        managed.members.sync_groups()
        patch(managed, self.shared.states, undos, owner)
        if self._unowned[1] is not None:
            managed.gradients.adopt(self._unowned[1])

    def patch_steps(self, undos: UndoStack, owner: object) -> None:
        """Patch optimizers that were not patched yet, because their losses are going to be scaled."""
        for managed in self:
            if not managed.is_patched:
                with UndoStack() as patches:
                    self._patch(managed, patches, owner)
                undos.push(patches.unwind)

    def remove(self, optimizer: Optimizer | None) -> None:
        """Drop the records of an optimizer, and of optimizers that were freed."""
        members = self.shared.members[:]
        managed = None if optimizer is None else self._managed.pop(optimizer, None)
        if managed is not None:
            gone = {id(vars(managed).get("members"))}
        else:
            known = {id(vars(managed).get("members")) for managed in self}
            gone = {id(each) for each in members if id(each) not in known}
        # One at a time, because an optimizer may be freed at any of these lines, which calls this, too.
        for each in members:
            if id(each) in gone and _discard(each, self.shared.members):
                for master in each.masters:
                    master.optimizers -= 1

    # -- parameters and gradients ---------------------------------------------------------------------------------

    def awaited_weights(self) -> list[nn.Parameter]:
        """List the models' trainable parameters that no optimizer has yet; empty if no optimizer is awaited."""
        stepped = {id(p) for p in parameters_of([*self._managed])}
        weights = self.initialized.parameters() if self.awaits else ()
        return [weight for weight in weights if weight.requires_grad and id(weight) not in stepped]

    def drop_unclaimed_masters(self) -> None:
        """Stop awaiting optimizers: masters of weights that no optimizer has are dropped."""
        self.awaits = False
        masters, casts = self.shared.values.masters, self.shared.values.casts
        stepped = {id(weight) for members in self.shared.members[:] for weight in members.weights}
        unclaimed = [master for master in masters if id(master.weight) not in stepped]
        for master in unclaimed:
            masters.values(master)
            masters.discard(master)
            casts.adopt(master.weight, master.original_dtype)
        casts.mark_trained([master.weight for master in unclaimed])

    def gradients_beside(self, own: Sequence[ManagedOptimizer]) -> list[Gradients]:
        """List the gradients that a loss may reach, besides those of the optimizers ``own``."""
        for members in self.shared.members[:]:
            members.sync_groups()
        (known, unowned), key = self._unowned, tuple([members.generation for members in self.shared.members[:]])
        if unowned is None or known != key or self._modules is None or not self._modules.are_as_seen():
            # First, because another thread may change a module while the parameters are listed.
            self._modules = ModuleEntries([module for model in self.initialized.models for module in model.modules()])
            stepped = {id(weight) for members in self.shared.members[:] for weight in members.weights}
            weights = [p for p in self.initialized.parameters() if id(p) not in stepped]
            before, unowned = unowned, Gradients(weights, self.shared.values.masters)
            if before is not None:
                unowned.adopt(before)
            self._unowned = key, unowned
        others = [managed.gradients for managed in self if managed not in own]
        return [*others, unowned] if unowned.weights else others

    def check_idle(self, what: str) -> None:
        """Refuse to do ``what`` during a backward pass or a step, or while weights are float32."""
        values, unowned = self.shared.values, self._unowned[1]
        if values.masters.are_in_model:
            raise RuntimeError(IN_FLOAT32.format(what))
        values.apply_writes()
        for managed in self.patched():
            if managed.scope.is_open:
                raise RuntimeError(f"{what} was called inside of optimizer.step(): move it before or after the step")
            managed.gradients.check_unscaled(what, "move it before or after the with-block")
        if unowned is not None:
            unowned.check_unscaled(what, "move it before or after the with-block")


def _remove(known: weakref.ref[ManagedOptimizers], reference: weakref.ref[Optimizer]) -> None:
    optimizers = known()
    if optimizers is not None:
        optimizers.remove(reference())


def _discard(item: object, items: list[Any]) -> bool:
    """Remove an item from a list, and return whether it was there."""
    try:
        items.remove(item)
    except ValueError:
        return False
    return True


def _remove_freed(known: weakref.ref[ManagedOptimizers]) -> None:
    optimizers = known()
    if optimizers is not None:
        optimizers.remove(None)


def count_by_hooks(managed: ManagedOptimizer, optimizer: Optimizer, undos: UndoStack, owner: object) -> None:
    """Count the steps of an optimizer by torch's hooks, without patching methods; the hooks keep ``owner`` alive."""
    begun: list[Any] = []
    shared = managed.shared

    def before(optimizer: Any, *_: Any) -> None:
        begun.clear()
        if managed.is_patched or (not optimizer.state and creates_state_only(optimizer)):
            return
        if shared.values.masters.are_in_model:
            raise RuntimeError(IN_FLOAT32.format(f"{type(optimizer).__name__}.step()"))
        if managed.gradients.state.scaler is not None:
            managed.gradients.apply(cleared)
            if not any(parameter.grad is not None for parameter in managed.parameters()):
                managed.checks.warn_no_gradient()
        if shared.ranks.is_first_step or is_distributed():
            managed.list_members()
            shared.ranks.before_step(managed.members.weights)
        begun.append(optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        if begun:
            begun.clear()
            managed.skips.count_stepped(optimizer)

    before.owner = owner  # type: ignore[attr-defined]

    undos.push(optimizer.register_step_pre_hook(before).remove)
    undos.push(optimizer.register_step_post_hook(after).remove)


@dataclass(eq=False)
class StepGuard:
    """The refusal of steps that mpinit does not run: of optimizers that were never initialised, or of a kept ``step``.

    Attributes:
        values: the session's float32 values.
        has_masters: whether an optimizer that was never initialised is refused if it would step 16-bit weights.
        tensor_ids: the ids of the models' parameters and buffers, after the casts.
    """

    values: Float32Values
    has_masters: bool = True
    tensor_ids: frozenset[int] = frozenset()

    @property
    def masters(self) -> Masters:
        """The session's masters."""
        return self.values.masters

    def install(self, undos: UndoStack) -> None:
        """Check every optimizer of the process before it steps, for as long as the session lives."""
        known = weakref.ref(self)

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            guard = known()
            if guard is not None:
                guard.check(optimizer)

        undos.push(undo_when_dropped(self, partial(remove_own_hook, check)))
        register_own_hook(check)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a step that mpinit does not run, of an optimizer with 16-bit weights or a loss scale of this session.

        Raises:
            RuntimeError: the optimizer belongs to no session, or the call is not that of its ``step`` attribute.
        """
        managed = _managed(optimizer)
        if managed is not None:
            if not managed.scope.is_open and managed.shared.values is self.values:
                check_own_step(managed)
            return
        if any(map(_managed, wrapped_by(optimizer))):
            return  # an optimizer that wraps a managed one calls that one's step
        self._check_not_of_block(optimizer)
        if not self.has_masters:
            return
        for parameter in parameters_of([optimizer]):
            is_narrow = parameter.requires_grad and is_lower_precision(parameter.dtype)
            if is_narrow and (self.masters.of(parameter) is not None or self._is_in_models(parameter)):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} steps {self.masters.names.of(parameter)!r}, which "
                    "mpinit.initialize has cast to 16 bit, and would not update its float32 master: pass the "
                    "optimizer to mpinit.initialize, or call mpinit.add_optimizers(optimizer) before its first step"
                )

    def _check_not_of_block(self, optimizer: Optimizer) -> None:
        """Refuse to step float32 parameters of a block after it, where their weights have the gradients."""
        blocks = self.values.block_parameters
        if blocks is None or self.masters.are_in_model:
            return
        for parameter in parameters_of([optimizer]):
            weight = blocks.narrow.get(id(parameter))
            if weight is not None and parameter.grad is None and weight.grad is not None:
                raise RuntimeError(
                    f"this {type(optimizer).__name__} steps {self.masters.names.of(weight)!r} as it was inside `with "
                    "mpinit.float32_weights(...)`, and the model's own parameter has the gradient: make the optimizer "
                    "after the block, of model.parameters(), and call mpinit.add_optimizers(optimizer)"
                )

    def _is_in_models(self, parameter: nn.Parameter) -> bool:
        # The id alone may be that of a parameter that was replaced and freed since.
        models = self.masters.names.models
        return id(parameter) in self.tensor_ids and any(parameter is p for model in models for p in model.parameters())


def _managed(optimizer: Optimizer) -> ManagedOptimizer | None:
    """Return the managed optimizer of an optimizer with patched methods; None after its session was undone."""
    managed: ManagedOptimizer | None = getattr(vars(optimizer).get("step"), "managed", None)
    return managed if managed is not None and managed.is_patched and managed.reference() is optimizer else None


def parameters_of(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """List the parameters in the groups of optimizers."""
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def trained_by(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """List the trainable parameters in the groups of optimizers and of those that they wrap, each once."""
    return [p for p in dict.fromkeys(parameters_of(with_wrapped(optimizers))) if p.requires_grad]
