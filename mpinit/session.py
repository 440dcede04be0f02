"""The session of one ``initialize``: what it set up, and the way back.

The optimizers' methods and the models' forwards keep theirs alive; the registry knows them weakly.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from . import functions
from .basics.dtypes import LOWER_PRECISION, is_lower_precision
from .basics.modules import ModelIndex, Names, modules_of
from .basics.patching import Undo, UndoStack, for_each
from .basics.wrappers import unwrapped
from .distributed.sharding import gather_in, is_distributed, reshard
from .masters.codecs.bfloat16 import BFloat16
from .masters.codecs.codec import Codec
from .masters.codecs.minifloat import Minifloat
from .masters.full import FullMasters
from .masters.masters import IN_FLOAT32, Master
from .masters.split import SplitMasters
from .masters.states import EncodedStates
from .model import casting, forward, selection, state_dict
from .model.float32_values import Float32Values
from .model.shared_memory import check_memory
from .optimizer.gradient_state import cleared, loss_reached_none
from .optimizer.gradients import Gradients
from .optimizer.managed import ManagedOptimizer, Shared, count_by_hooks, patch
from .optimizer.members import Members, check_steps_its_groups
from .optimizer.overflow_log import OverflowLog
from .optimizer.per_parameter import steps_per_parameter
from .optimizer.ranks import OPTIMIZERS, Ranks
from .optimizer.scaled_loss import ScaledLoss, Unscaled
from .optimizer.state import cast_state, cast_states, with_wrapped, wrapped_by
from .plan import MasterWeightsMode, Plan
from .scaling.scaler import LossScaler
from .settings.resolve import Settings
from .torch_internals import encoder_fast_path
from .torch_internals.compiling_with_gradients import hide_gradients
from .torch_internals.step_hooks import check_steps

_numbers = itertools.count()
_TOLD: Final = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
_IS_PATCHED: Final = operator.attrgetter("is_patched")
_FLOATS: Final = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of one ``initialize`` beside models and optimizers, resolved."""

    opt_level: str
    plan: Plan
    settings: Settings


class Session:
    """What one ``initialize`` set up.

    Attributes:
        opt_level, properties, plan: what was asked for, and what that came to.
        models, optimizers: the objects given.
        selection: which modules stay float32 and which tensors are cast, as of ``apply``.
        scalers: one loss scaler for each ``loss_id``.
        masters: the float32 masters of 16-bit weights.
        names: of the models' parameters.
        verbosity, tensor_ids: how much is logged; the ids of the models' parameters and buffers as of ``apply``.
        awaits: whether optimizers are expected to come.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], request: Request) -> None:
        plan = request.plan
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.opt_level, self.properties, self.plan = request.opt_level, plan.properties, plan
        settings = request.settings
        self.verbosity, self.awaits = settings.verbosity, settings.await_optimizers
        self.scalers = [LossScaler(plan.scaling, loss_id) for loss_id in range(settings.num_losses)]
        self.number = next(_numbers)
        self.is_live = False
        self.tensor_ids: frozenset[int] = frozenset()
        self.names = Names(self.models)
        self.masters = (SplitMasters if plan.masters is MasterWeightsMode.SPLIT else FullMasters)(self.names)
        self.values = Float32Values(self.models, self.masters)
        codec: Codec = Minifloat() if self.properties.optimizer_state == "int8" else BFloat16()
        self._states = None if self.properties.optimizer_state == "float32" else EncodedStates(codec)
        self._managed: dict[Optimizer, ManagedOptimizer] = {}
        self._members: list[Members] = []
        self.ranks = Ranks(self.models, self.masters, self.scalers, self._members, settings.process_group)
        self._undos = UndoStack()
        # The gradients of parameters that no optimizer has, for some generations of the optimizers' members.
        self._unowned: tuple[tuple[int, ...], Gradients | None] = (), None
        self._is_ending = False

    @property
    def _makes_masters(self) -> bool:
        return self.plan.masters in (MasterWeightsMode.FULL, MasterWeightsMode.SPLIT)

    # -- set up and undo ----------------------------------------------------------------------------------------

    def apply(self, index: ModelIndex, failed: UndoStack) -> None:
        """Carry the plan out. ``failed`` undoes everything done so far, newest first, if anything raises."""
        selected = self.selection = selection.select(index, self.plan)
        if selected.changes:
            check_memory(index, selected.targets)
        self._check(self.optimizers)
        if selected.changes or self._makes_masters:
            failed.push(_states_as_they_are(self.optimizers))
        failed.push(self._undos.unwind)
        failed.push(functools.partial(setattr, self, "is_live", False))
        self._apply(index)
        self.tensor_ids = index.tensor_ids()  # after the casts, which replace buffers

    def begin(self) -> None:
        """Mark the session as live after its set-up, and drop what only a failed set-up needs."""
        self.is_live = True
        changes, self.selection = self.selection.changes, self.selection.without_tensors()
        if changes:
            self.values.casts.finish()  # last, because an interrupted set-up needs what it drops

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        """Whether these optimizers can be stepped as the plan says."""
        for optimizer in optimizers:
            if self._makes_masters:
                for each in (optimizer, *wrapped_by(optimizer)):
                    check_steps_its_groups(each)
            if self._states is not None and not steps_per_parameter(optimizer):
                raise ValueError(
                    f'optimizer_state="{self._states.codec.name}" decodes a bucket of parameters at a time, and '
                    f"nothing is known of how {type(optimizer).__name__} updates them and of what it keeps: use "
                    'optimizer_state="float32", or set optimizer.steps_per_parameter = True if it updates each '
                    "parameter by itself and keeps no copies of weights"
                )

    def _apply(self, index: ModelIndex) -> None:
        plan, push, selected = self.plan, self._undos.push, self.selection
        targets = dict(selected.targets)
        self.forwards = forward.patch_forwards(index, selected, plan, self, self.before_forward, self._undos)
        if selected.kept and encoder_fast_path.is_bypassed(selected.kept, index.names):
            encoder_fast_path.keep_off(lambda: True, self._undos)
        if selected.holds_16_bit:
            float32_state = state_dict.Float32State(self.values, plan.masters is MasterWeightsMode.IN_MODEL)
            push(float32_state.remove)
            float32_state.install(self.models, index.names)
            hide_gradients(self, _weights, self._undos)
        if plan.properties.patch_torch_functions:
            push(functions.apply(plan, owner=self))
        push(functools.partial(casting.rebuild_flat_weights_of, self.models))
        if selected.gathered:
            push(gather_in(index.names, selected.gathered))
        if plan.masters is not MasterWeightsMode.NONE:
            self._make_masters(index, targets)
        # Late, because it is what cannot be taken back bit for bit where there are no masters.
        if selected.changes or len(self.masters) > 0:
            self._cast(index, targets)
        self.ranks.reduces_in_float32 = self.properties.reduce_dtype is torch.float32
        self.ranks.watch(selected.changes, self.values.casts if selected.changes else None, self._words(), self._undos)
        for optimizer in self.optimizers:
            self._add(optimizer, self._undos)
        if self._makes_masters:
            check_steps(self, Session._check_step, self._undos)
        push(self._give_masters_up)  # first to be undone: weights may have got masters later

    def _words(self) -> dict[str, str]:
        """What was asked for, as it has to be on all ranks."""
        said = {"opt_level": _said(self.opt_level), **{name: _said(value) for name, value in self.properties}}
        classes = [type(optimizer).__name__ for optimizer in self.optimizers]
        return said | {"num_losses": str(len(self.scalers)), OPTIMIZERS: _said(classes)}

    def _make_masters(self, index: ModelIndex, targets: Mapping[torch.Tensor, torch.dtype]) -> None:
        """Masters of the weights that are trained, before anything is cast."""
        stepped = dict.fromkeys(_parameters_of(with_wrapped(self.optimizers)))
        trained = [parameter for parameter in stepped if parameter.requires_grad]
        if self.awaits:
            known = set(map(id, trained))
            weights = dict.fromkeys([p for _, p in index.parameters])
            trained += [p for p in weights if p.requires_grad and id(p) not in known]
        self._undos.push(self._give_masters_up)
        if self._makes_masters:
            for weight in trained:
                self.masters.add(weight, targets.get(weight, weight.dtype))
        elif self.plan.masters is MasterWeightsMode.IN_MODEL:
            self._widen([weight for weight in trained if is_lower_precision(weight.dtype)])

    def _widen(self, weights: Sequence[nn.Parameter]) -> None:
        """Weights that are their own masters are float32 for good, once the set-up has succeeded."""
        came_in = {weight: weight.dtype for weight in weights}

        def narrow() -> None:
            for weight, dtype in came_in.items() if not self.is_live else ():
                casting.convert(weight, dtype)

        self._undos.push(narrow)
        _widen_states(self.optimizers, came_in)
        for weight in weights:
            casting.convert(weight, torch.float32)

    def _cast(self, index: ModelIndex, targets: dict[torch.Tensor, torch.dtype]) -> None:
        mastered: list[torch.Tensor] = [master.weight for master in self.masters]
        ids = set(map(id, mastered))
        others = {tensor: dtype for tensor, dtype in targets.items() if id(tensor) not in ids}
        casts = {tensor: (tensor.dtype, dtype) for tensor, dtype in others.items() if dtype != tensor.dtype}
        cast_states(self.optimizers, casts, self._undos)
        _widen_states(self.optimizers, {w: w.dtype for w in mastered if w.dtype in LOWER_PRECISION})
        trained = {p for p in _parameters_of(self.optimizers) if id(p) not in ids and p.requires_grad}
        self.values.casts = casting.TensorCasts(others, trained)
        self._undos.push(self.values.casts.undo)
        to_16_bit = {weight: targets.get(weight, weight.dtype) for weight in mastered}
        beyond = casting.out_of_range(to_16_bit)
        self.values.casts.apply(index, beyond)
        # Without an undo of its own: giving up a master restores its weight.
        for master in self.masters:
            self.masters.cast(master, to_16_bit[master.weight], clamps=bool(beyond) and master.weight in beyond)
        casting.rebuild_flat_weights(index.names)

    def _add(self, optimizer: Optimizer, undos: UndoStack) -> None:
        undos.push(functools.partial(self._forget, optimizer))
        # Only of torch's own optimizers it is known that a step runs their hooks, and once.
        is_known = type(optimizer).__module__.startswith("torch.optim.")
        is_patched = not (is_known and self.plan.leaves_steps_alone) or self.selection.holds_16_bit
        shared = Shared(self.plan, self.values, self.ranks, self._states, self._members)
        managed = self._managed[optimizer] = ManagedOptimizer(optimizer, shared)
        if is_patched:
            self._patch(managed, undos)
        else:
            count_by_hooks(managed, undos)

    def _patch(self, managed: ManagedOptimizer, undos: UndoStack) -> None:
        managed.members.sync_groups()
        patch(managed, self._states, undos)
        if self._unowned[1] is not None:
            managed.gradients.adopt(self._unowned[1])

    def _patched(self) -> list[ManagedOptimizer]:
        return [managed for managed in self._managed.values() if managed.is_patched]

    def patch_steps(self) -> None:
        """Patch optimizers that were left as they are, because losses of theirs are going to be scaled."""
        for managed in self._managed.values():
            if not managed.is_patched:
                with UndoStack() as undos:
                    self._patch(managed, undos)
                self._undos.push(undos.unwind)

    def _remove_optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers[:] = [each for each in self.optimizers if each is not optimizer]

    def _forget(self, optimizer: Optimizer) -> None:
        self._managed.pop(optimizer, None)
        self._members[:] = [members for members in self._members if members.optimizer is not optimizer]

    def _give_masters_up(self) -> None:
        """Weights get their masters' bits; called again it goes on."""
        for_each(self._restore, list(self.masters))

    def _restore(self, master: Master) -> None:
        # A 16-bit weight keeps its master's bits, unless the set-up failed: then it is left as it came.
        keeps_bits = self.is_live and is_lower_precision(master.original_dtype)
        self.masters.restore(master, torch.float32 if keeps_bits else master.original_dtype)
        self.masters.discard(master)

    def undo(self) -> None:
        """Take back everything ``apply`` did; the session ends.

        Where a part of it raises the others are taken back all the same, and the error is raised at the end. Called
        again it tries that part again.
        """
        if not self._is_ending:
            if self.masters.are_in_model:
                raise RuntimeError(IN_FLOAT32.format("mpinit.undo()"))
            self.values.apply_writes()
            reshard([module for model in self.models for module in modules_of(model)])
            # On the stack, which goes on with the rest where one of them raises.
            self._undos.push(self.values.close)
            for managed in self._patched():
                self._undos.push(managed.gradients.end)
            self._is_ending = True
        dtypes: dict[torch.Tensor, torch.dtype] = {weight: weight.dtype for weight in _weights(self)}
        try:
            self._undos.unwind()
            self.ranks.leave(dtypes)
        except Exception as error:
            if len(self._undos):
                error.add_note(
                    f"mpinit.undo has taken back the rest of {self.describe()}: call it again for what has failed"
                )
            raise
        finally:
            # What has failed and could not be done again is kept for the next call.
            self.is_live = len(self._undos) > 0

    def when_undone(self, undo: Undo) -> None:
        """Take something back with the session: what a framework was given because of it."""
        self._undos.push(undo)

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of what belongs to a framework, for as long as the session lives."""
        self._undos.set_attribute(owner, name, value)

    def before_forward(self) -> None:
        """A model is about to be run: its weights are what was done to masters that were given out."""
        is_among_others = is_distributed()
        if is_among_others:
            # A process group may have been set up since, and DDP has made buckets of the weights' own type then.
            first = next(iter(self.masters), None)
            if first is not None and first.weight.grad_dtype is not None:
                for master in self.masters:
                    self.masters.set_gradient_dtype(master)
        if is_among_others or self.ranks.to_be_checked:
            for managed in self._managed.values():
                managed.list_members()
            self.ranks.before_forward()
        self.values.apply_writes()

    # -- optimizers that come later -----------------------------------------------------------------------------

    def add_optimizers(self, optimizers: Sequence[Optimizer]) -> Undo:
        """Take in optimizers over weights that are cast already.

        Returns:
            What leaves them as they came; only for when nothing has happened since.
        """
        self.check_idle("mpinit.add_optimizers()")
        self._check(optimizers)
        self.ranks.check_present()
        failed, undos = UndoStack(), UndoStack()
        with failed:
            for optimizer in optimizers:
                new = {id(p) for p in _parameters_of([optimizer]) if self.masters.of(p) is None}
                failed.push(functools.partial(self._discard, new))
                mastered = [p for p in _parameters_of(with_wrapped([optimizer])) if p.requires_grad]
                came_in: dict[Any, torch.dtype] = {
                    p: p.dtype for p in mastered if self._makes_masters and is_lower_precision(p.dtype)
                }
                failed.push(_states_as_they_are([optimizer]))
                failed.push(undos.unwind)
                self._add(optimizer, undos)
                plain = [p for p in _parameters_of([optimizer]) if p not in came_in]
                casts: dict[Any, Any] = {
                    p: (self.values.casts.original_dtype(p), p.dtype)
                    for p in plain
                    if self.values.casts.original_dtype(p) != p.dtype
                }
                cast_states([optimizer], casts, undos)
                _widen_states([optimizer], came_in)
                failed.push(functools.partial(self._remove_optimizer, optimizer))
                self.optimizers.append(optimizer)
        self._undos.push(undos.unwind)
        failed.push(functools.partial(self._undos.forget, undos.unwind))
        return failed.unwind

    def _discard(self, ids: set[int]) -> None:
        for master in self.masters:
            if id(master.weight) in ids:
                self.masters.discard(master)

    def settle_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing of :meth:`add_optimizers` is going to be taken back: let go of what that would need."""
        for optimizer in optimizers:
            self.values.casts.mark_trained(self.managed(optimizer).parameters())

    def waiting_weights(self) -> list[nn.Parameter]:
        """The models' trainable parameters that no optimizer has, where one is expected to come."""
        stepped = {id(p) for p in _parameters_of([*self._managed])}
        weights = dict.fromkeys(_weights(self)) if self.awaits else ()
        return [weight for weight in weights if weight.requires_grad and id(weight) not in stepped]

    def let_waiting_go(self) -> None:
        """No optimizer is going to come for the weights that wait: they are 16-bit and nothing else from here on."""
        self.awaits = False
        stepped = {id(weight) for members in self._members for weight in members.weights}
        waiting = [master for master in self.masters if id(master.weight) not in stepped]
        for master in waiting:
            self.masters.values(master)
            self.masters.discard(master)
            self.values.casts.adopt(master.weight, master.original_dtype)
        self.values.casts.mark_trained([master.weight for master in waiting])

    def _check_step(self, optimizer: Optimizer) -> None:
        """Refuse that an optimizer which was never initialised steps 16-bit weights."""
        if _is_managed(optimizer) or any(map(_is_managed, wrapped_by(optimizer))):
            return  # it is one of a session's, or has one inside that steps for it
        for parameter in _parameters_of([optimizer]):
            known = self.masters.of(parameter) is not None or id(parameter) in self.tensor_ids
            if known and parameter.requires_grad and is_lower_precision(parameter.dtype):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} steps {self.names.of(parameter)!r}, which mpinit.initialize has "
                    "cast to 16 bit, and would leave its float32 master behind: give the optimizer to "
                    "mpinit.initialize, or call mpinit.add_optimizers(optimizer) before its first step"
                )

    def check_idle(self, what: str) -> None:
        """Refuse what must not happen in the middle of a backward pass or a step, or while weights are float32."""
        if self.masters.are_in_model:
            raise RuntimeError(IN_FLOAT32.format(what))
        self.values.apply_writes()
        for managed in self._patched():
            if managed.scope.is_open:
                raise RuntimeError(f"{what} was called inside of optimizer.step(): move it before or after the step")
            managed.gradients.check_unscaled(what, "move it before or after the with-block")
        if self._unowned[1] is not None:
            self._unowned[1].check_unscaled(what, "move it before or after the with-block")

    # -- looking things up --------------------------------------------------------------------------------------

    def managed(self, optimizer: Optimizer) -> ManagedOptimizer:
        """Return what is kept for one of the session's optimizers, or for the one in a wrapper."""
        known = self._managed.get(optimizer)
        if known is None:
            known = self._managed.get(unwrapped(optimizer, self._managed.__contains__))
        if known is None:
            raise TypeError(
                f"{type(optimizer).__name__} is no optimizer of {self.describe()}: give the optimizer that "
                "mpinit.initialize or mpinit.add_optimizers was given"
            )
        return known

    def members(self) -> list[Members]:
        """List what is known of the groups of each optimizer."""
        return list(self._members)

    def overflow_log(self, optimizer: Optimizer) -> OverflowLog:
        """Return the record of an optimizer's last overflow."""
        return self.managed(optimizer).skips.log

    def scaled(
        self, loss: torch.Tensor, optimizers: Sequence[Optimizer], loss_id: int, delay: bool
    ) -> ScaledLoss | Unscaled:
        """Return the context of a backward pass of ``loss``."""
        if self.awaits and not self.optimizers:
            raise RuntimeError(f"{self.describe()} awaits its optimizers: call mpinit.add_optimizers(optimizer) first")
        scaler = self.scaler(loss_id)
        own = list(map(self.managed, optimizers))
        if self._managed and not any(map(_IS_PATCHED, own or self._managed.values())):
            if self.masters.are_in_model:
                raise RuntimeError(IN_FLOAT32.format("mpinit.scale_loss"))
            # The first step warns where the loss has reached no parameter.
            for managed in own if "step" in self.ranks.to_be_checked else ():
                managed.gradients.apply(loss_reached_none, scaler)
            return Unscaled(loss if loss.dtype in _FLOATS else loss.float())
        others = [] if scaler.is_identity else self._other_gradients(own)
        return ScaledLoss(loss, scaler, own, others, delay)

    def _other_gradients(self, own: Sequence[ManagedOptimizer]) -> list[Gradients]:
        """Return the gradients that a loss may reach beside those of some optimizers."""
        for members in self._members:
            members.sync_groups()
        (known, unowned), key = self._unowned, tuple([members.generation for members in self._members])
        if unowned is None or known != key:
            stepped = {id(weight) for members in self._members for weight in members.weights}
            weights = [p for p in dict.fromkeys(_weights(self)) if id(p) not in stepped]
            before, unowned = unowned, Gradients(weights, self.masters)
            if before is not None:
                unowned.adopt(before)
            self._unowned = key, unowned
        others = [managed.gradients for managed in self._managed.values() if managed not in own]
        return [*others, unowned] if unowned.weights else others

    def scaled_output(self, output: torch.Tensor, loss_id: int) -> torch.Tensor:
        """Return ``output`` times a loss scale; gradients of its backward pass stay scaled until :meth:`unscale`."""
        scaler = self.scaler(loss_id)
        scaled = scaler.scale(output)
        if scaled.requires_grad and not scaler.is_identity:
            for managed in self._patched():
                managed.checks.expect_scaled(scaler)
        return scaled

    def unscale(self, optimizer: Optimizer, loss_id: int) -> bool:
        """Unscale and check an optimizer's gradients, and return whether there are any."""
        own = self.managed(optimizer)
        others = [each.gradients for each in self._managed.values() if each is not own]
        # A weight may have several optimizers: its gradient is unscaled once.
        done = {id(g) for gradients in others if not gradients.state.is_scaled for g in gradients.present()}
        return own.checks.unscale(self.scaler(loss_id), done)

    def forget_unreached(self) -> None:
        """Forget that gradients were to be scaled by a GradScaler, where its losses have left none."""
        for managed in self._patched():
            gradients = managed.gradients
            if gradients.state.is_scaled and not gradients.state.is_open and not gradients.present():
                gradients.apply(cleared)

    def scaler(self, loss_id: int) -> LossScaler:
        if not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise ValueError(
                f"loss_id={loss_id!r}, but this session was initialised with num_losses={len(self.scalers)}: "
                f"loss_id goes from 0 to {len(self.scalers) - 1}; give initialize a larger num_losses"
            )
        return self.scalers[loss_id]

    def holds_one_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any of these is a parameter of the models."""
        ids = {id(parameter) for parameter in _weights(self)}
        return any(id(p) in ids or self.masters.of(p) is not None for p in parameters)

    def describe(self) -> str:
        """One line that names the session: its number, level, models and optimizers."""
        models = ", ".join(type(model).__name__ for model in self.models) or "no model"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "no optimizer"
        return f"session {self.number} ({self.opt_level}: {models}; {optimizers})"

    def settings(self) -> dict[str, Any]:
        """The properties to tell of: the levels' five, and how states are kept where that is not as usual."""
        chosen = [] if self._states is None else ["optimizer_state"]
        return {name: getattr(self.properties, name) for name in (*_TOLD, *chosen)}


def _said(value: Any) -> str:
    """A keyword's value in words, without addresses."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_said, value))}]"
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def _is_managed(optimizer: Optimizer) -> bool:
    return getattr(vars(optimizer).get("step"), "is_managed", False)


def _weights(session: Session) -> Iterator[nn.Parameter]:
    return itertools.chain.from_iterable(model.parameters() for model in session.models)


def _parameters_of(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def _widen_states(optimizers: Sequence[Optimizer], came_in: Mapping[Any, torch.dtype]) -> None:
    """State in the type of 16-bit weights becomes float32, as their masters are."""
    for each in with_wrapped(optimizers):
        for parameter, state in each.state.items():
            if parameter in came_in:
                cast_state(state, parameter.shape, came_in[parameter], torch.float32)


def _states_as_they_are(optimizers: Sequence[Optimizer]) -> Undo:
    """A way back to the state of optimizers and those they wrap, as it is now."""
    states: list[Any] = [each.state for each in with_wrapped(optimizers)]
    states += [entries for state in states for entries in state.values() if isinstance(entries, dict)]
    as_now = [(state, dict(state)) for state in states]

    def restore() -> None:
        for state, before in as_now:
            state.clear()
            state.update(before)

    return restore
