"""The session of one ``initialize``: its plan, scalers, optimizers and undo stack, found again from any of them.

The optimizers' patched methods and the models' patched forwards keep theirs alive; the registry knows them weakly.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import functions
from .basics.dtypes import is_lower_precision
from .basics.logs import log
from .basics.patching import Undo, UndoStack
from .distributed.sharding import gather_in, reshard
from .masters.in_model import MastersInModel
from .masters.kinds import store_for
from .masters.pairs import cast_with_gradient
from .model import casting, forward, selection, state_dict
from .model.forward_weights import renew_casts
from .optimizer.control import OptimizerControl
from .optimizer.controls import Controls
from .optimizer.state import cast_states
from .optimizer.waiting import WaitingWeights
from .plan import Masters, Plan
from .scaling.scaled_loss import ScaledLoss
from .scaling.scaler import LossScaler
from .torch_internals import encoder_fast_path
from .torch_internals.compiling_with_gradients import hide_gradients

if TYPE_CHECKING:
    from .settings.properties import Properties

_dropped: list[Undo] = []
_numbers = itertools.count()


class Session:
    """What one ``initialize`` set up.

    Attributes:
        opt_level, properties, plan: what was asked for, and what that came to.
        models, optimizers: the objects given.
        selection: which modules stay float32 and which tensors are cast, as of ``apply``.
        scalers: one loss scaler for each ``loss_id``.
        verbosity, tensor_ids: how much is logged; the ids of the models' parameters and buffers as of ``apply``.
        waiting: the weights that keep their float32 values for optimizers that come later.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        opt_level: str,
        properties: Properties,
        plan: Plan,
        num_losses: int,
        verbosity: int,
        awaits: bool = False,
        process_group: Any = None,
    ) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.opt_level = opt_level
        self.properties = properties
        self.plan = plan
        self.verbosity = verbosity
        self.scalers = [LossScaler(plan.scaling) for _ in range(num_losses)]
        self.number = next(_numbers)
        self.is_live = False
        self.tensor_ids: frozenset[int] = frozenset()
        self._store = store_for(plan, scales=not all(scaler.is_identity for scaler in self.scalers))
        self._controls = Controls(
            *(self.models, plan, self._store, self.scalers, self.name_of),
            original_values=lambda weight: self._casts.original_values(weight),
            process_group=process_group,
        )
        self.waiting = WaitingWeights(awaits, self._controls, self._store, self.name_of)
        self._undos = UndoStack()
        self._casts = casting.TensorCasts([], {}, ())
        self._float32_state: state_dict.Float32State | None = None
        self._is_ending = False
        self._names: dict[torch.Tensor, str] | None = None

    # -- set up and undo ----------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Carry the plan out. If anything raises, everything done so far is undone, newest first."""
        while _dropped:
            _dropped.pop()()
        self._controls.check(self.optimizers)
        try:
            self._apply()
        except BaseException:
            self._undos.unwind()
            raise
        self.tensor_ids = selection.ids_of_tensors(self.models)  # after the casts: they replace buffers
        self.is_live = True

    def _apply(self) -> None:
        plan, push = self.plan, self._undos.push
        selected = self.selection = selection.select(self.models, plan)
        targets = dict(selected.targets)
        in_model = self._store if isinstance(self._store, MastersInModel) else None
        push(forward.patch_forwards(selected, plan, self, self.before_forward).undo)
        if in_model is not None:
            push(in_model.narrow)
            for optimizer in self.optimizers:
                push(optimizer.register_step_post_hook(_renew_casts).remove)
        if encoder_fast_path.is_bypassed(selected.kept, self.models):
            encoder_fast_path.keep_off(lambda: True, self._undos)
        if selected.holds_16_bit:
            float32_state = self._float32_state = state_dict.Float32State(
                self._find_master, self._load_master, self._has_masters
            )
            push(float32_state.remove)
            float32_state.install(self.models)
            push(hide_gradients(self, _weights))
        if plan.patch_functions:
            push(_undone_when_dropped(self, functions.apply(plan, verbose=self.verbosity > 1)))
        push(functools.partial(casting.rebuild_flat_weights, self.models))
        push(gather_in(self.models, selected.gathered))
        push(self._give_masters_up)
        for optimizer in self.optimizers:
            push(self._controls.take(optimizer, targets))
        push(_undone_when_dropped(self, self._controls.ranks.watch()))
        push(self.waiting.end)
        self.waiting.keep(targets)
        # Last, because it is what cannot be taken back bit for bit where there are no masters.
        self._cast(targets)
        for control in self._controls:
            control.groups.finish()
        self._store.finish_idle()
        self._casts.settle()
        push(self._give_masters_up)  # first to be undone: weights may have got masters later

    def _cast(self, targets: dict[torch.Tensor, torch.dtype]) -> None:
        weights: list[torch.Tensor] = [pair.model_param for pair in self._store.pairs]
        mastered = set(map(id, weights))
        others = {tensor: dtype for tensor, dtype in targets.items() if id(tensor) not in mastered}
        casts = {tensor: (tensor.dtype, dtype) for tensor, dtype in others.items() if dtype != tensor.dtype}
        self._undos.push(cast_states(self.optimizers, casts))
        trained = {p for control in self._controls for p in control.groups.plain if p.requires_grad}
        self._casts = casting.TensorCasts(self.models, others, trained)
        self._undos.push(self._casts.undo)
        to_16_bit = {weight: targets.get(weight, weight.dtype) for weight in weights}
        beyond = casting.out_of_range(to_16_bit)
        self._casts.apply(beyond)
        # Without an undo of its own: giving up a master restores its weight.
        for pair, dtype in zip(self._store.pairs, to_16_bit.values(), strict=True):
            cast_with_gradient(pair, dtype, clamps=bool(beyond) and pair.model_param in beyond)
        casting.rebuild_flat_weights(self.models)

    def _give_masters_up(self) -> None:
        """Weights get their masters' bits, and their places in the optimizers back; called again it goes on."""
        for pair in self._store.pairs:
            # A 16-bit weight keeps its master's bits, unless the set-up failed: then it is left as it came.
            keeps_bits = self.is_live and is_lower_precision(pair.came_in)
            pair.restore(torch.float32 if keeps_bits else pair.came_in)
        of_master = {id(pair.master_param): pair.model_param for pair in self._store.pairs}
        for control in self._controls:
            control.groups.restore_weights(of_master)
        self._store.close()

    def undo(self) -> None:
        """Take back everything ``apply`` did; the session ends. Interrupted, it can be called again and goes on."""
        if not self._is_ending:
            if self._float32_state is not None:
                self._float32_state.take_writes()
            reshard(self.models)
            for control in self._controls:
                control.backward.abandon_backward()
                control.scaled.give_up()
            self.waiting.bring_along()
            differing = [name for copies in self._controls.all_copies() for name in copies.end()]
            if differing:
                log.warning(
                    "undo: %s and their float32 masters had been written to, differently; the masters' numbers count, "
                    "and gradients that differed are gone",
                    ", ".join(differing),
                )
            self._is_ending = True
        dtypes = {weight: weight.dtype for weight in _weights(self)}
        try:
            self._undos.unwind()
            self._controls.ranks.leave(dtypes)
        finally:
            # What has failed and could not be done again is kept for the next call.
            self.is_live = len(self._undos) > 0

    def when_undone(self, undo: Undo) -> None:
        """Take something back with the session: what a framework was given because of it."""
        self._undos.push(undo)

    def before_forward(self) -> None:
        """A model is about to be run: its weights follow what was written to their masters."""
        if self._float32_state is not None:
            self._float32_state.take_writes()
        # A process group may have been set up since, and DDP has made buckets of the weights' own type then.
        self._store.adds_up_natively()
        self._controls.ranks.before_forward()
        for control in self._controls:
            control.before_forward()

    # -- optimizers that come later -----------------------------------------------------------------------------

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> Undo:
        """Take in optimizers over weights that are cast already.

        Returns:
            What leaves them as they came; only for when nothing has happened since.

        Raises:
            RuntimeError: gradients are scaled at the moment.
            ValueError: one of the optimizers cannot be stepped with masters of the session's kind.
        """
        for control in self._controls:
            control.check_closed("mpinit.add_optimizers()", "move it before or after the with-block")
        self._controls.check(optimizers)
        self._controls.ranks.check_present()
        self.waiting.bring_along()
        failed, undos = UndoStack(), UndoStack()
        with failed:
            for optimizer in optimizers:
                undos.push(self._controls.add(optimizer, failed))
                plain: list[torch.Tensor] = [*self._controls.of(optimizer).groups.plain]
                casts = {p: (self._casts.came_in(p), p.dtype) for p in plain if self._casts.came_in(p) != p.dtype}
                undos.push(cast_states([optimizer], casts))
                failed.push(functools.partial(self.optimizers.remove, optimizer))
                self.optimizers.append(optimizer)
        self._undos.push(undos.unwind)
        failed.push(functools.partial(self._undos.forget, undos.unwind))
        return failed.unwind

    def settle_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing of :meth:`add_optimizers` is going to be taken back: let go of what that would need."""
        for optimizer in optimizers:
            self._casts.leave_to_optimizers(self._controls.of(optimizer).groups.plain)
        self.waiting.note_taken()
        self._controls.ranks.got_optimizers()

    def let_waiting_go(self) -> None:
        """No optimizer is going to come for the weights that wait."""
        self.waiting.let_go(self._casts)

    # -- looking things up --------------------------------------------------------------------------------------

    def controller_of(self, optimizer: Optimizer) -> OptimizerControl:
        """What is kept for one of the session's optimizers."""
        return self._controls.of(optimizer)

    def scaled(self, loss: torch.Tensor, optimizers: Sequence[Optimizer], loss_id: int, delay: bool) -> ScaledLoss:
        """The context of a backward pass of ``loss``.

        Raises:
            ValueError: there is no loss ``loss_id``.
            RuntimeError: no optimizer has been added yet.
        """
        if self.waiting.awaits and not self.optimizers:
            raise RuntimeError(f"{self.describe()} awaits its optimizers: call mpinit.add_optimizers(optimizer) first")
        parts = [self._controls.of(optimizer).part_in_backward(delay) for optimizer in optimizers]
        return ScaledLoss(loss, self.scaler(loss_id), parts, self._controls.bystanders, delay)

    def scaled_output(self, output: torch.Tensor, loss_id: int) -> torch.Tensor:
        """``output`` times the scale of a loss; gradients of its backward pass stay scaled until :meth:`unscale`."""
        return self._controls.scaled(output, self.scaler(loss_id))

    def unscale(self, optimizer: Optimizer, loss_id: int) -> bool:
        """Unscale and check an optimizer's gradients; whether it has any."""
        return self._controls.unscale(optimizer, self.scaler(loss_id))

    def scaler(self, loss_id: int) -> LossScaler:
        """The scaler of a loss.

        Raises:
            ValueError: there is no such loss.
        """
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise ValueError(
                f"loss_id={loss_id!r}, but this session was initialised with num_losses={len(self.scalers)}: "
                f"loss_id goes from 0 to {len(self.scalers) - 1}; give initialize a larger num_losses"
            )
        return self.scalers[loss_id]

    def name_of(self, parameter: torch.Tensor) -> str:
        """A parameter's dotted name in its model, with the model's index where there are several."""
        if self._names is None or parameter not in self._names:
            self._names = {
                tensor: f"models[{index}].{name}" if len(self.models) > 1 else name
                for index, model in enumerate(self.models)
                for name, tensor in model.named_parameters()
            }
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)} outside of the models")

    def _has_masters(self) -> bool:
        return len(self._store.pairs) > 0 or self.plan.masters is Masters.IN_MODEL

    def _find_master(self, weight: torch.Tensor) -> torch.Tensor | None:
        pair = self._store.pairs.of(weight)
        if pair is None or not self.is_live:
            return self._casts.original_values(weight)
        if not pair.holders:
            pair.follow_device()
        for copies in pair.holders or (self._store.idle,):
            copies.look_at_weight(pair)
        return pair.values()

    def _load_master(self, weight: torch.Tensor, values: torch.Tensor) -> bool:
        pair = self._store.pairs.of(weight)
        if pair is None:
            self._casts.load(weight, values)
            return False
        if not pair.holders:
            pair.follow_device()
        pair.load(values)
        self._store.idle.note_one(pair)  # for whoever holds it
        return True

    def holds_one_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any of these is a parameter of the models, or stands for one."""
        ids = {id(parameter) for model in self.models for parameter in model.parameters()}
        return any(id(p) in ids or self._store.pairs.of(p) is not None for p in parameters)

    def describe(self) -> str:
        """One line that names the session: its number, level, models and optimizers."""
        models = ", ".join(type(model).__name__ for model in self.models) or "no model"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "no optimizer"
        return f"session {self.number} ({self.opt_level}: {models}; {optimizers})"


def _weights(session: Session) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(model.parameters() for model in session.models)


def _renew_casts(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    renew_casts()


def _undone_when_dropped(session: Session, undo: Undo) -> Undo:
    """``undo``, which also happens, at the next ``initialize``, where the session is dropped without one.

    Not in the moment it is dropped: the garbage collector comes at any time, in any thread.
    """
    finalizer = weakref.finalize(session, _dropped.append, undo)
    finalizer.atexit = False

    def undo_now() -> None:
        finalizer.detach()
        undo()

    return undo_now
