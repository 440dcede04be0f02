"""The session of one ``initialize``: the order of its set-up, its undo, and its parts.

Patched forwards and patched optimizers keep their session alive. The session refers to modules and optimizers weakly,
and so does the registry to sessions. So a session is freed, with its masters, together with the last of its models and
optimizers.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from . import autocast
from .autocast import encoder_fast_path
from .autocast.thread_flags import thread_state
from .basics.dtypes import is_lower_precision
from .basics.logs import log
from .basics.modules import Names, modules_of
from .basics.patching import Undo, UndoStack, for_each
from .basics.tables import counted
from .basics.weak_references import WeakList, weak_call
from .config.plan import MasterWeightsMode, Plan
from .distributed.agreement import OPTIMIZERS
from .distributed.sharding import gather_in, reshard
from .masters.codecs.bfloat16 import BFloat16
from .masters.codecs.minifloat import Minifloat
from .masters.full import FullMasters
from .masters.masters import Master
from .masters.split import SplitMasters
from .masters.states import EncodedStates
from .model import casting, copies, forward, state_dict
from .model.precision_loss import warn_about_optimizer_eps
from .model.selection import Selection
from .model.writes import Writes
from .optimizer.guard import StepGuard
from .optimizer.members import Members, cast_states, parameters_of, trained_by, widen_states, with_wrapped
from .optimizer.optimizers import ManagedOptimizers, check_optimizers
from .optimizer.ranks import Ranks
from .optimizer.scaled_loss import Losses
from .optimizer.step import Shared
from .scaling.scaler import LossScaler
from .session_view import SessionView
from .torch_internals.compiling_with_gradients import hide_gradients

_IN_BLOCK: Final = (
    "mpinit.undo() was called inside of a torch.autocast block, whose end restores the casts of before the block: "
    "those of this session. Call it before or after the block"
)


class Session:
    """Everything that one ``initialize`` has set up.

    Attributes:
        members: the models and optimizers, by weak references, and the session's number and level.
        models, optimizers, number, opt_level: those of the members.
        plan, properties: the properties of the level, and the plan that follows from them.
        masters: the float32 masters of weights that are trained.
        casts: the casts of tensors, and the float32 numbers that 16-bit ones have.
        forwards: the casts around the models' forwards.
        writes: what is done about writes before forwards and steps.
        ranks: what it shares with the sessions of other processes.
        managed: the managed optimizers.
        view: the read interface.
        scalers, losses: a loss scaler for each ``loss_id``, and the scaling of losses by them.
    """

    def __init__(self, opt_level: str, plan: Plan, awaits: bool, process_group: Any) -> None:
        self.opt_level, self.plan, self.properties = opt_level, plan, plan.properties
        self.members = Members(opt_level)
        self.models, self.optimizers, self.number = self.members.models, self.members.optimizers, self.members.number
        self.is_live = False
        kind = SplitMasters if plan.masters is MasterWeightsMode.SPLIT else FullMasters
        self.masters: FullMasters | SplitMasters = kind(Names(self.models), plan.properties.grad_dtype)
        self.casts = casting.Casts(self.masters)
        self.copies = copies.Float32Copies(self.casts)
        self.writes = Writes(self.masters)
        self.scalers = [
            LossScaler(plan.loss_scale, loss_id, plan.properties.skip_nonfinite)
            for loss_id in range(plan.properties.num_losses)
        ]
        self.ranks = Ranks(self.members, self.masters, self.scalers, process_group)
        shared = Shared(plan, self.masters, self.writes, self.ranks, _encoded_states(plan), self.scalers)
        self.managed = ManagedOptimizers(self.members, shared, awaits)
        self.losses = Losses(self.managed, self.scalers)
        # A proxy, because a reference back to the session would keep both from being freed.
        self.view = SessionView(weakref.proxy(self))
        self._step_guard = StepGuard(self.masters, self.members, plan.makes_masters)
        self._undos = UndoStack()
        self._is_ending = False

    # -- set up and undo ----------------------------------------------------------------------------------------

    def apply(self, selection: Selection, optimizers: Sequence[Optimizer], failed: UndoStack) -> None:
        """Set everything up: members and ranks, then masters, then casts, then hooks; ``failed`` undoes it."""
        plan, push = self.plan, self._undos.push
        index = selection.index
        changes = selection.changes
        if changes or plan.masters is not MasterWeightsMode.NONE:
            failed.push(_restore_states(optimizers))
        failed.push(self._undos.unwind)
        failed.push(partial(setattr, self, "is_live", False))

        # The models and optimizers. Ranks compare their settings, before anything is changed.
        self.members.refer_to(index.models, optimizers)
        settings = {name: _format(value) for name, value in self.properties if name != "verbosity"}
        classes = [type(optimizer).__name__ for optimizer in optimizers]
        settings |= {"enabled": "True", "opt_level": _format(self.opt_level), OPTIMIZERS: _format(classes)}
        if not self.managed.awaits:
            settings["the number of optimizers"] = str(len(classes))
        trained = trained_by(optimizers)
        if self.managed.awaits:
            trained = list(dict.fromkeys([*trained, *(p for _, p in index.parameters if p.requires_grad)]))
        # With master_weights="model" the parameters themselves become float32, and stay so after the undo.
        in_model = plan.masters is MasterWeightsMode.IN_MODEL
        widened = [weight for weight in trained if in_model and is_lower_precision(weight.dtype)]
        self.ranks.watch([*changes, *widened], settings, self._undos)

        # Masters, of the weights that are trained. They have the memory of the weights until these are cast.
        push(self.masters.watched.end)
        push(weak_call(self._drop_masters))
        targets = dict(selection.targets)
        for weight in trained if plan.makes_masters else ():
            self.masters.add(weight, targets.get(weight, weight.dtype))
        self.ranks.check_shards()
        mastered = {id(master.weight) for master in self.masters}
        widen_states(optimizers, widened)
        targets |= dict.fromkeys(widened, torch.float32)

        # Casts, and with them the state of weights without masters. The undo restores FSDP's policies first, then
        # dtypes; RNNs and FSDP read their weights again at last.
        self.casts.note_16_bit(selection.came_in_16_bit)
        push(self.casts.widen_later_tensors)
        push(partial(casting.rebuild_flat_weights_of, self.models))
        if selection.gathered:
            push(gather_in(index.names, selection.gathered))
        if changes or widened or mastered:
            dtypes = {p: (p.dtype, dtype) for p, dtype in targets.items() if id(p) not in mastered and p.dtype != dtype}
            cast_states(optimizers, self._without_masters_to_come(dtypes), self._undos)
            push(self.casts.undo)
            self.casts.cast_models(index, targets, selection.clamped, widened)
        self.members.tensor_ids = index.tensor_ids()

        # Hooks of models: forwards, copies, state dicts.
        if changes:
            self.writes.buffers.list_buffers(index.named_modules)
        self.forwards = forward.patch_forwards(selection, plan, self.writes, self, self._undos)
        if selection.has_16_bit:
            push(partial(copies.remove_all, WeakList(optimizers)))
            for optimizer in optimizers:
                copies.set_methods(optimizer, self.copies)
            float32_state = state_dict.Float32State(self.casts, self.writes.entries, self.copies)
            push(float32_state.remove)
            float32_state.install(index.names)
            hide_gradients(self.models, self._undos)
        else:  # only these have patches, which a copy must not have
            patched = dict.fromkeys([*index.models, *(module for module, _ in selection.entry_points)])
            push(partial(copies.remove_all, WeakList(patched)))
            for module in patched:
                copies.set_methods(module, self.copies)

        # Hooks of torch's functions and of optimizers.
        if plan.properties.patch_torch_functions or selection.has_16_bit or selection.gathered:
            push(autocast.apply(plan, owner=self))
            push(autocast.wrap(self.models))
        if selection.bypasses_kept:
            known = weakref.ref(self)
            encoder_fast_path.keep_off(lambda: known() is not None, self._undos)
        for optimizer in optimizers:
            self.managed.add(optimizer, self._undos, owner=self)
            warn_about_optimizer_eps(optimizer, self.masters)
        if selection.has_16_bit or plan.skips:
            self._step_guard.install(self._undos)
        push(weak_call(self._drop_masters))  # the last undo runs first: weights may have got masters since

        if self.properties.verbosity > 0:
            words = ", ".join(f"{name}={value}" for name, value in self.view.settings().items())
            rounded = len(self.casts.rounded())
            if rounded:
                words += (
                    f"; {counted(rounded, 'weight has', 'weights have')} no master, and undo gives the rounded numbers"
                )
            if selection.declared:
                words += f"; float32, as the library lists them: {', '.join(selection.declared)}"
            log.info("%s: %s", self.describe(), words)
            names = [name for tensor, name in selection.came_in_16_bit.items() if isinstance(tensor, nn.Parameter)]
            if names:
                count, first = counted(len(names), "weight"), ", ".join(names[:3])
                log.info("%s: %s had a 16-bit dtype already, first %s", self.describe(), count, first)

    def begin(self) -> None:
        """Mark the session as live after its set-up, and drop the values that only a failed set-up would need."""
        self.is_live = True
        self.casts.finish()  # last, because the undo of an interrupted set-up needs the values that it drops

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
        self.masters.discard(master, torch.float32 if keeps_bits else master.original_dtype)

    def undo(self) -> None:
        """Undo everything that ``apply`` did, which ends the session.

        If a part of the undo raises, the other parts run all the same, and the error is raised at the end. Another call
        tries that part again.
        """
        if not self._is_ending:
            self.managed.check_idle("mpinit.undo()")
            is_o1 = self.properties.patch_torch_functions is True
            if is_o1 and thread_state.value.has_later_block():
                raise RuntimeError(_IN_BLOCK)
            reshard(modules_of(*self.models))
            # On the stack, which runs the other undos even if one of these raises.
            self._is_ending = True
        dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for p in self.members.parameters()}
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
        self.masters.follow_writes()
        check_optimizers(optimizers, self.plan)
        self.ranks.check_present()
        failed, undos = UndoStack(), UndoStack()
        with failed:
            for optimizer in optimizers:
                new = {id(p) for p in parameters_of([optimizer]) if self.masters.of(p) is None}
                failed.push(partial(self._discard, new))
                failed.push(_restore_states([optimizer]))
                failed.push(undos.unwind)
                self.managed.add(optimizer, undos, owner=self)
                warn_about_optimizer_eps(optimizer, self.masters)
                undos.push(partial(copies.remove_all, WeakList([optimizer])))
                copies.set_methods(optimizer, self.copies)
                original = self.casts.original_dtype
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

    # -- queries -----------------------------------------------------------------------------------------------

    def skips_step(self, optimizer: Optimizer) -> bool:
        """Skip an optimizer's next step now if its gradients overflowed, and return whether it was skipped."""
        return self.managed.find(optimizer).skips_step()

    def has_one_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any of these is a parameter of the models."""
        ids = {id(parameter) for parameter in self.members.parameters()}
        return any(id(p) in ids or self.masters.of(p) is not None for p in parameters)

    def describe(self) -> str:
        """Return one line that names the session: its number, level, models and optimizers."""
        return self.members.describe()


def _encoded_states(plan: Plan) -> EncodedStates | None:
    """Return the encoding of optimizer states; None where they are float32."""
    name = plan.properties.optimizer_state
    return None if name == "float32" else EncodedStates(Minifloat() if name == "int8" else BFloat16())


def _format(value: Any) -> str:
    """Format a keyword's value without memory addresses, which differ by rank."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format, value))}]"
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


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
