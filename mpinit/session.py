"""The session of one ``initialize``: its plan, scalers, optimizers and undo stack, found again from any of them.

Sessions are independent of one another. The optimizers' patched methods and the models' patched forwards keep theirs
alive; the registry only knows them weakly.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from . import functions
from .basics.patching import Undo, UndoStack
from .distributed.sharding import reshard
from .masters.full import FullMasters
from .masters.split import SplitMasters
from .model import casting, forward, selection, state_dict
from .optimizer.control import OptimizerControl
from .optimizer.state import cast_states
from .optimizer.step import Stepper
from .plan import Masters, Plan
from .scaling.scaler import LossScaler
from .settings.properties import Properties
from .torch_internals import encoder_fast_path
from .torch_internals.compiling_with_gradients import hide_gradients

_dropped: list[Undo] = []
_numbers = itertools.count()


class Session:
    """What one ``initialize`` set up.

    Attributes:
        opt_level, properties, plan: what was asked for, and what that came to.
        models, optimizers: the objects given.
        selection: which modules stay float32 and which tensors are cast, as of ``apply``.
        scalers: one loss scaler for each ``loss_id``.
        verbosity: how much is logged.
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
        self._controls: dict[Optimizer, OptimizerControl] = {}
        self._steppers: dict[Optimizer, Stepper] = {}
        self._undos = UndoStack()
        self._casts = casting.TensorCasts([], {}, ())
        self._names: dict[torch.Tensor, str] | None = None

    # -- set up and undo ----------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Carry the plan out. If anything raises, everything done so far is undone, newest first."""
        while _dropped:
            _dropped.pop()()
        try:
            self._apply()
        except BaseException:
            self._undos.unwind()
            raise
        self.is_live = True

    def _apply(self) -> None:
        plan, push = self.plan, self._undos.push
        selected = self.selection = selection.select(self.models, plan)
        targets = dict(selected.targets)
        push(forward.patch_forwards(selected, plan, self))
        if encoder_fast_path.is_bypassed(selected.kept, self.models):
            encoder_fast_path.keep_off(lambda: True, self._undos)
        if selected.holds_16_bit:
            float32_state = state_dict.Float32State(self._find_master, self._load_master, self._has_masters)
            push(float32_state.remove)
            float32_state.install(self.models)
            push(hide_gradients(self, _weights))
        if plan.patch_functions:
            push(_undone_when_dropped(self, functions.apply(plan, verbose=self.verbosity > 1)))
        push(functools.partial(casting.rebuild_flat_weights, self.models))
        for optimizer in self.optimizers:
            self._take_optimizer(optimizer, targets)
        # Last, because it is what cannot be taken back bit for bit where there are no masters.
        self._cast(targets)
        for control in self._controls.values():
            control.targets = {}
            control.store.settle()
        self._casts.settle()

    def _take_optimizer(self, optimizer: Optimizer, targets: dict[torch.Tensor, torch.dtype]) -> None:
        split = self.plan.masters is Masters.SPLIT
        store = SplitMasters(optimizer, self.plan.split_bucket_bytes) if split else FullMasters()
        control = OptimizerControl(optimizer, self.plan, store, targets)
        control.scalers = self.scalers
        self._controls[optimizer] = control
        self._undos.push(control.restore_parameters)
        control.put_masters()
        stepper = self._steppers[optimizer] = Stepper(control, self.name_of)
        self._undos.push(stepper.install())

    def _cast(self, targets: dict[torch.Tensor, torch.dtype]) -> None:
        pairs = [(control.store, pair) for control in self._controls.values() for pair in control.store.pairs]
        mastered = {pair.model_param for _, pair in pairs}
        others = {tensor: dtype for tensor, dtype in targets.items() if tensor not in mastered}
        self._undos.push(cast_states(self.optimizers, others))
        trained = {p for opt in self.optimizers for g in opt.param_groups for p in g["params"] if p.requires_grad}
        self._casts = casting.TensorCasts(self.models, others, trained)
        self._undos.push(self._casts.undo)
        self._casts.apply()
        # Without an undo of its own: giving up a master restores its weight.
        for store, pair in pairs:
            store.cast_weight(pair, targets.get(pair.model_param, pair.model_param.dtype))
        casting.rebuild_flat_weights(self.models)

    def undo(self) -> None:
        """Take back everything ``apply`` did; the session ends."""
        reshard(self.models)
        for control in self._controls.values():
            control.refresh()
            control.store.adopt_external_writes()
            # Before weights are cast back: half of a split master is the weight, also of one that was added later.
            control.restore_parameters()
        self.is_live = False
        self._undos.unwind()

    # -- looking things up --------------------------------------------------------------------------------------

    def controller_of(self, optimizer: Optimizer) -> OptimizerControl:
        """What is kept for one of the session's optimizers."""
        return self._controls[optimizer]

    def stepper_of(self, optimizer: Optimizer) -> Stepper:
        """The step counters of one of the session's optimizers."""
        return self._steppers[optimizer]

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
            many = len(self.models) > 1
            self._names = {
                tensor: f"models[{index}].{name}" if many else name
                for index, model in enumerate(self.models)
                for name, tensor in model.named_parameters()
            }
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)} outside of the models")

    def _find_master(self, weight: torch.Tensor) -> torch.Tensor | None:
        for control in self._controls.values():
            pair = control.store.pair_of(weight)
            if pair is not None:
                control.store.adopt_if_written(pair)
                return control.store.values(pair)
        return self._casts.original_values(weight)

    def _has_masters(self) -> bool:
        return any(control.store.pairs for control in self._controls.values())

    def _load_master(self, weight: torch.Tensor, values: torch.Tensor) -> bool:
        loaded = False
        for control in self._controls.values():
            pair = control.store.pair_of(weight)
            if pair is not None:
                control.store.load(pair, values)
                loaded = True
        if not loaded:
            self._casts.load(weight, values)
        return loaded

    def describe(self) -> str:
        """One line that names the session: its number, level, models and optimizers."""
        models = ", ".join(type(model).__name__ for model in self.models) or "no model"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "no optimizer"
        return f"session {self.number} ({self.opt_level}: {models}; {optimizers})"


def _weights(session: Session) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(model.parameters() for model in session.models)


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
