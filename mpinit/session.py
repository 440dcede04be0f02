"""The session of one ``initialize``: the order of its set-up, its undo, and its parts.

Patched forwards and patched optimizers keep their session alive. The session refers to modules and optimizers weakly,
and so does the registry to sessions. So a session is freed, with its masters, together with the last of its models and
optimizers.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from . import autocast
from .autocast import encoder_fast_path
from .autocast.thread_flags import thread_state
from .basics.dtypes import LOWER_PRECISION, is_lower_precision
from .basics.modules import ModelIndex, Names, modules_of
from .basics.patching import Undo, UndoStack, for_each
from .basics.weak_references import Models, WeakList, weak_call
from .config.plan import MasterWeightsMode, Plan
from .distributed.sharding import gather_in, reshard
from .masters.codecs.bfloat16 import BFloat16
from .masters.codecs.minifloat import Minifloat
from .masters.full import FullMasters
from .masters.masters import IN_FLOAT32, Master
from .masters.split import SplitMasters
from .masters.states import EncodedStates
from .model import casting, copies, forward, selection, state_dict
from .model.boundary import ForwardGuard
from .model.float32_values import Float32Values
from .model.shared_memory import check_memory
from .model.written_buffers import WrittenBuffers
from .optimizer.guard import StepGuard, parameters_of
from .optimizer.optimizers import Initialized, ManagedOptimizers, trained_by
from .optimizer.ranks import OPTIMIZERS, Ranks
from .optimizer.scaled_loss import Losses
from .optimizer.state import cast_states, widen_state, with_wrapped
from .optimizer.step import Shared
from .scaling.scaler import LossScaler
from .session_view import SessionView
from .torch_internals.compiling_with_gradients import hide_gradients

_numbers = itertools.count()
_IN_BLOCK: Final = (
    "mpinit.undo() was called inside of a torch.autocast block, whose end restores the casts of before the block: "
    "those of this session. Call it before or after the block"
)


@dataclass(frozen=True, eq=False)
class Request:
    """The resolved arguments of one ``initialize``, without models and optimizers."""

    opt_level: str
    plan: Plan
    await_optimizers: bool = False
    process_group: Any = None


class Session:
    """Everything that one ``initialize`` has set up.

    Attributes:
        opt_level, properties, plan: the level, its properties, and the plan that follows from them.
        number: the number of the session in this process.
        models, optimizers: the objects of ``initialize``, and the optimizers of ``add_optimizers``, as weak references.
        verbosity: 0: nothing is logged.
        selection: the modules that stay float32 and the tensors that are cast, as :meth:`apply` has found them.
        values, masters: the float32 values of 16-bit tensors, and the masters among them.
        forwards: the casts around the models' forwards.
        forward_guard, step_guard: the checks before forwards, and before steps of optimizers that are not managed.
        ranks: what it shares with the sessions of other processes.
        managed: the managed optimizers.
        view: the read interface.
        scalers, losses: a loss scaler for each ``loss_id``, and the scaling of losses by them.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], request: Request) -> None:
        plan = request.plan
        self.opt_level, self.plan, self.properties = request.opt_level, plan, plan.properties
        self.number = next(_numbers)
        self.models, self.optimizers = Models(models), WeakList(optimizers)
        self.verbosity = plan.properties.verbosity
        self.is_live = False
        self.masters = _masters(plan, Names(self.models))
        self.values = Float32Values(self.models, self.masters)
        self.copies = copies.Float32Copies(None)
        written = WrittenBuffers()
        self.forward_guard = ForwardGuard(self.models, self.values, self.optimizers, written)
        self.step_guard = StepGuard(self.masters, plan.makes_masters)
        self.scalers = [
            LossScaler(plan.loss_scale, loss_id, plan.properties.skip_nonfinite)
            for loss_id in range(plan.properties.num_losses)
        ]
        self.ranks = Ranks(self.forward_guard, self.scalers, request.process_group)
        shared = Shared(plan, self.values, self.ranks, _encoded_states(plan), self.scalers)
        initialized = Initialized(self.number, self.opt_level, self.models, self.optimizers)
        self.managed = ManagedOptimizers(initialized, shared, request.await_optimizers)
        self.losses = Losses(self.managed, self.scalers)
        # A proxy, because a reference back to the session would keep both from being freed.
        self.view = SessionView(weakref.proxy(self))
        self._undos = UndoStack()
        self._is_ending = False

    # -- set up and undo ----------------------------------------------------------------------------------------

    def apply(self, index: ModelIndex, failed: UndoStack) -> None:
        """Apply the plan. If anything raises, ``failed`` undoes everything done so far, newest first."""
        selected = self.selection = selection.select(index, self.plan)
        if selected.changes:
            check_memory(index, selected.targets)
        self.managed.check(self.optimizers)
        if selected.changes or self.plan.makes_masters:
            failed.push(_restore_states(self.optimizers))
        failed.push(self._undos.unwind)
        failed.push(partial(setattr, self, "is_live", False))
        self._apply(index)
        # After the casts, which replace buffers.
        self.forward_guard.tensor_ids = self.step_guard.tensor_ids = index.tensor_ids()

    def begin(self) -> None:
        """Mark the session as live after its set-up, and drop the values that only a failed set-up would need."""
        self.is_live = True
        changes, self.selection = self.selection.changes, self.selection.without_tensors()
        if changes:
            self.values.casts.finish()  # last, because the undo of an interrupted set-up needs the values that it drops

    def _apply(self, index: ModelIndex) -> None:
        plan, push, selected = self.plan, self._undos.push, self.selection
        push(self.masters.stop_watching)
        targets = dict(selected.targets)
        self.forward_guard.has_float32_values = selected.has_16_bit or plan.makes_masters
        if plan.cast_model and is_lower_precision(plan.model_dtype):
            self.forward_guard.warns_of_inputs = self.verbosity > 0
            push(casting.LaterTensors(self.models, index, plan.model_dtype, self.masters).widen)
        self.forwards = forward.patch_forwards(index, selected, plan, self, self.forward_guard, self._undos)
        if selected.kept and encoder_fast_path.is_bypassed(selected.kept, index.names):
            known = weakref.ref(self)
            encoder_fast_path.keep_off(lambda: known() is not None, self._undos)
        if selected.has_16_bit:
            unchanged = [
                id(tensor) for _, tensor in (*index.parameters, *index.buffers) if tensor.dtype in LOWER_PRECISION
            ]
            self.copies = copies.Float32Copies(self.values, frozenset(unchanged))
            for optimizer in self.optimizers:
                copies.set_on_optimizer(optimizer, self.copies, self._undos)
        push(partial(copies.remove_all, self.models))
        copies.set_methods(index.names, self.copies, refuses_conversion=selected.has_16_bit)
        if selected.has_16_bit:
            float32_state = state_dict.Float32State(self.values, self.copies)
            push(float32_state.remove)
            float32_state.install(self.models, index.names)
            hide_gradients(self.models, self._undos)
        if plan.properties.patch_torch_functions:
            push(autocast.apply(plan, owner=self))
            push(autocast.wrap(self.models))
        push(partial(casting.rebuild_flat_weights_of, self.models))
        if selected.gathered:
            push(gather_in(index.names, selected.gathered))
        widened = self._make_masters(index, targets) if plan.masters is not MasterWeightsMode.NONE else []
        # Late, because without masters no undo can restore the bits that a cast drops.
        if selected.changes or len(self.masters) > 0:
            self._cast(index, targets)
        if selected.changes:
            self.forward_guard.written.list_buffers(index.named_modules)
        self.ranks.watch([*selected.changes, *widened], self._settings_to_compare(), self._undos)
        for optimizer in self.optimizers:
            self.managed.add(optimizer, self._undos, owner=self)
        if selected.has_16_bit or plan.skips:
            self.step_guard.install(self._undos)
        push(weak_call(self._drop_masters))  # the last undo runs first: weights may have got masters since

    def _settings_to_compare(self) -> dict[str, str]:
        """Return the settings that have to be the same on all ranks, as text."""
        settings = {name: _format(value) for name, value in self.properties if name != "verbosity"}
        classes = [type(optimizer).__name__ for optimizer in self.optimizers]
        return {
            "enabled": "True",
            "opt_level": _format(self.opt_level),
            **settings,
            **({} if self.managed.awaits else {"the number of optimizers": str(len(classes))}),
            OPTIMIZERS: _format(classes),
        }

    def _make_masters(self, index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype]) -> list[nn.Parameter]:
        """Make masters of the weights that are trained, before anything is cast.

        Returns:
            The weights that were 16-bit and are float32 now, because with ``master_weights="model"`` parameters are.
        """
        trained = trained_by(self.optimizers)
        if self.managed.awaits:
            known = set(map(id, trained))
            weights = dict.fromkeys([p for _, p in index.parameters])
            trained += [p for p in weights if p.requires_grad and id(p) not in known]
        self._undos.push(weak_call(self._drop_masters))
        if self.plan.makes_masters:
            for weight in trained:
                self.masters.add(weight, targets.get(weight, weight.dtype))
        in_model = self.plan.masters is MasterWeightsMode.IN_MODEL
        widened = [weight for weight in trained if is_lower_precision(weight.dtype)] if in_model else []
        if widened:
            self._widen(widened)
        return widened

    def _widen(self, weights: Sequence[nn.Parameter]) -> None:
        """Convert weights to float32 for ``master_weights="model"``; only a failed set-up converts them back."""
        original_dtypes = {weight: weight.dtype for weight in weights}

        known = weakref.ref(self)

        def narrow() -> None:
            session = known()
            for weight, dtype in original_dtypes.items() if session is None or not session.is_live else ():
                casting.convert(weight, dtype)

        self._undos.push(narrow)
        for optimizer in with_wrapped(self.optimizers):
            for weight in weights:
                widen_state(optimizer.state.get(weight))
        for weight in weights:
            casting.convert(weight, torch.float32)

    def _cast(self, index: ModelIndex, targets: dict[torch.Tensor, torch.dtype]) -> None:
        mastered: list[torch.Tensor] = [master.weight for master in self.masters]
        ids = set(map(id, mastered))
        others = {tensor: dtype for tensor, dtype in targets.items() if id(tensor) not in ids}
        casts = {tensor: (tensor.dtype, dtype) for tensor, dtype in others.items() if dtype != tensor.dtype}
        cast_states(self.optimizers, self._without_masters_to_come(casts), self._undos)
        trained = {p for p in parameters_of(self.optimizers) if id(p) not in ids and p.requires_grad}
        self.values.casts = casting.TensorCasts(others, trained)
        self._undos.push(self.values.casts.undo)
        to_16_bit = {weight: targets.get(weight, weight.dtype) for weight in mastered}
        casting.check_range(index, to_16_bit)
        self.values.casts.apply(index)
        # These casts need no undo of their own, because _drop_masters() restores the weights.
        for master in self.masters:
            self.masters.cast(master, to_16_bit[master.weight])
        casting.rebuild_flat_weights(index.names)

    def _without_masters_to_come(self, casts: dict[Any, Any]) -> dict[Any, Any]:
        """Leave out frozen parameters that get a master when they are unfrozen: their optimizer state stays float32."""
        if self.plan.masters is MasterWeightsMode.NONE:
            return casts
        return {tensor: dtypes for tensor, dtypes in casts.items() if not isinstance(tensor, nn.Parameter)}

    def _drop_masters(self) -> None:
        """Write the masters' values into their weights, and drop the masters. May be called again."""
        for_each(self._restore, list(self.masters))
        if isinstance(self.masters, SplitMasters):
            self.masters.buffers.clear()

    def _restore(self, master: Master) -> None:
        # A weight that was 16-bit before becomes float32, to keep its master's bits. After a failed set-up it becomes
        # 16-bit again.
        keeps_bits = self.is_live and is_lower_precision(master.original_dtype)
        self.masters.restore(master, torch.float32 if keeps_bits else master.original_dtype)
        self.masters.discard(master)

    def undo(self) -> None:
        """Undo everything that ``apply`` did, which ends the session.

        If a part of the undo raises, the other parts run all the same, and the error is raised at the end. Another call
        tries that part again.
        """
        if not self._is_ending:
            if self.masters.are_in_model:
                raise RuntimeError(IN_FLOAT32.format("mpinit.undo()"))
            is_o1 = self.properties.patch_torch_functions is True
            if is_o1 and thread_state.value.has_later_block():
                raise RuntimeError(_IN_BLOCK)
            reshard([module for model in self.models for module in modules_of(model)])
            # On the stack, which runs the other undos even if one of these raises.
            self._is_ending = True
        dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for p in self.managed.initialized.parameters()}
        try:
            self._undos.unwind()
            self.ranks.end(dtypes)
        except Exception as error:
            if len(self._undos):
                error.add_note(
                    f"mpinit.undo has undone the rest of {self.describe()}: call it again for what has failed"
                )
            raise
        finally:
            # Undos that have raised stay on the stack for the next call.
            self.is_live = len(self._undos) > 0

    def when_undone(self, undo: Undo) -> None:
        """Run ``undo`` when the session is undone, to reverse a change of an object of a framework."""
        self._undos.push(undo)

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object of a framework, until the session is undone."""
        self._undos.set_attribute(owner, name, value)

    # -- optimizers that are added later ------------------------------------------------------------------------

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> Undo:
        """Add optimizers of weights that are cast already.

        Returns:
            The undo of the addition. It is valid only until anything else is done with the session.
        """
        self.managed.check_idle("mpinit.add_optimizers()")
        self.managed.check(optimizers)
        self.forward_guard.check_present()
        failed, undos = UndoStack(), UndoStack()
        with failed:
            for optimizer in optimizers:
                new = {id(p) for p in parameters_of([optimizer]) if self.masters.of(p) is None}
                failed.push(partial(self._discard, new))
                failed.push(_restore_states([optimizer]))
                failed.push(undos.unwind)
                self.managed.add(optimizer, undos, owner=self)
                copies.set_on_optimizer(optimizer, self.copies, undos)
                original = self.values.casts.original_dtype
                casts: dict[Any, Any] = {p: (original(p), p.dtype) for p in parameters_of([optimizer])}
                casts = {p: dtypes for p, dtypes in casts.items() if dtypes[0] != dtypes[1]}
                cast_states([optimizer], self._without_masters_to_come(casts), undos)
                failed.push(partial(self.optimizers.remove, optimizer))
                self.optimizers.append(optimizer)
        self._undos.push(undos.unwind)
        failed.push(partial(self._undos.discard, undos.unwind))
        return failed.unwind

    def _discard(self, ids: set[int]) -> None:
        for master in self.masters:
            if id(master.weight) in ids:
                self.masters.discard(master)

    def finish_adding(self, optimizers: Sequence[Optimizer]) -> None:
        """Drop the float32 values that the undo of :meth:`add_optimizers` would need."""
        for optimizer in optimizers:
            self.values.casts.mark_trained(self.managed.find(optimizer).parameters())

    # -- queries -----------------------------------------------------------------------------------------------

    def skips_step(self, optimizer: Optimizer) -> bool:
        """Skip an optimizer's next step now if its gradients overflowed, and return whether it was skipped."""
        return self.managed.find(optimizer).skips_step()

    def has_one_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any of these is a parameter of the models."""
        ids = {id(parameter) for parameter in self.managed.initialized.parameters()}
        return any(id(p) in ids or self.masters.of(p) is not None for p in parameters)

    def describe(self) -> str:
        """Return one line that names the session: its number, level, models and optimizers."""
        return self.managed.initialized.describe()


def _encoded_states(plan: Plan) -> EncodedStates | None:
    """Return the encoding of optimizer states; None where they are float32."""
    name = plan.properties.optimizer_state
    return None if name == "float32" else EncodedStates(Minifloat() if name == "int8" else BFloat16())


def _format(value: Any) -> str:
    """Format a keyword's value without memory addresses, which differ by rank."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format, value))}]"
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def _masters(plan: Plan, names: Names) -> FullMasters | SplitMasters:
    if plan.masters is MasterWeightsMode.SPLIT:
        return SplitMasters(names, plan.properties.grad_dtype)
    return FullMasters(names, plan.properties.grad_dtype)


def _restore_states(optimizers: Sequence[Optimizer]) -> Undo:
    """Return an undo that restores the state which optimizers, and those that they wrap, have now."""
    states: list[Any] = [each.state for each in with_wrapped(optimizers)]
    states += [entries for state in states for entries in state.values() if isinstance(entries, dict)]
    as_now = [(state, dict(state)) for state in states]

    def restore() -> None:
        for state, before in as_now:
            state.clear()
            state.update(before)

    return restore
