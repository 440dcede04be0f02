"""One run of a user's step on copies of model and optimizer, at a level, with everything looked at."""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import checks, registry
from ..basics.dtypes import is_lower_precision
from ..model.forward import take_off_copy
from ..optimizer.observers import Observer
from ..plan import make_plan
from ..scaling.scaler import LossScaler
from ..session import Session
from ..settings.resolve import resolve
from ..torch_internals.native_autocast import CastsOff
from .faults import FaultFinder
from .numbers import floating_tensors, sample_of
from .untouched import set_random_state

UserStep = Callable[[Any, Any], Any]
_HOOKS = "_hooks"


@dataclass
class Trial:
    """What a run gave.

    Attributes:
        finder: what was seen of operations.
        loss: the loss, a number.
        inputs: samples of the model's inputs.
        outputs: (module's name, number of its call) -> samples of its results, in the order in which they ended.
        gradients: parameter's dotted name -> its unscaled gradient in float32; only of those that have one.
        damaged_buffers: names of buffers that the level's type cannot hold, with an error above one part in a hundred.
    """

    finder: FaultFinder
    loss: float = math.nan
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    damaged_buffers: list[str] = field(default_factory=list)


def run_trial(
    model: nn.Module, optimizer: Optimizer, step: UserStep, random: list[Any], level: str, keywords: Mapping[str, Any]
) -> Trial:
    """Run ``step`` once.

    Args:
        model, optimizer: copied; nothing happens to them.
        step: ``step(model, optimizer)`` gives the loss of one batch.
        random: the state of the random numbers to begin with.
        level, keywords: what the copies are initialised with.
    """
    clone = float32_copy(model)
    twin = copy_of_optimizer(optimizer, model, clone)
    before = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
    with CastsOff(), _initialised(clone, twin, level, keywords) as session:
        trial = Trial(FaultFinder(clone))
        recorder = _Recorder(clone, session, twin, trial)
        trial.finder = FaultFinder(clone, recorder.module_seen)
        trial.damaged_buffers = _damaged(before, dict(clone.named_buffers()))
        trial.finder.look_at_weights()
        set_random_state(random)
        with _kept_from_running(model), trial.finder.trace, torch.enable_grad():
            loss = step(clone, twin)
            if not recorder.was_run:
                raise ValueError(
                    "step(model, optimizer) did not run the model it was given: it has to use its arguments"
                )
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(
                    f"step(model, optimizer) must return the loss, a tensor of one number, not {loss!r:.80}"
                )
            if not trial.finder.went_backward and loss.requires_grad:
                with session.scaled(loss, [twin], 0, False) as scaled_loss:
                    scaled_loss.backward()  # type: ignore[no-untyped-call]
        trial.loss = float(loss.detach())
        if not trial.gradients:
            recorder.take_gradients()
    return trial


@final
class _Recorder(Observer):
    """Samples of activations while they are there, and the gradients of the last backward pass."""

    def __init__(self, model: nn.Module, session: Session, optimizer: Optimizer, trial: Trial) -> None:
        self._names = dict(model.named_parameters())
        self._calls: dict[str, int] = defaultdict(int)
        self._control = session.controller_of(optimizer)
        self._control.observers.append(self)
        self._trial = trial
        self.was_run = False

    def module_seen(self, name: str, tree: Any, is_output: bool) -> None:
        if is_output:
            key = name, self._calls[name]
            self._calls[name] += 1
            self._trial.outputs[key] = [sample_of(tensor) for tensor in floating_tensors(tree)]
        elif not name:
            if not self.was_run:
                self._trial.inputs = [sample_of(tensor) for tensor in floating_tensors(tree)]
            self.was_run = True

    def backward_ended(self, loss: torch.Tensor, scaler: LossScaler) -> None:
        self.take_gradients()

    def step_ended(self, skipped: bool | torch.Tensor) -> None:
        return

    def take_gradients(self) -> None:
        """Copy what the next step would use."""
        pairs = self._control.groups.store.pairs
        for name, parameter in self._names.items():
            pair = pairs.of(parameter)
            gradient = parameter.grad if pair is None else pair.readable_param.grad
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self._trial.gradients[name] = dense.detach().to(torch.float32, copy=True)


@contextmanager
def _kept_from_running(model: nn.Module) -> Iterator[None]:
    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError(
            "step(model, optimizer) ran the model given to mpinit.suggest and not the copy that it was called with: "
            "let it use its arguments. Nothing was changed"
        )

    guard = model.register_forward_pre_hook(refuse, prepend=True)
    try:
        yield
    finally:
        guard.remove()


@contextmanager
def _initialised(model: nn.Module, optimizer: Optimizer, level: str, keywords: Mapping[str, Any]) -> Iterator[Session]:
    name, props = resolve(level, keywords)
    plan = make_plan(props)
    with warnings.catch_warnings():
        # Of the copies' set-up; the user has had, or will have, those about the model itself.
        warnings.simplefilter("ignore")
        checks.check([model], [optimizer], props, plan)
        session = Session([model], [optimizer], name, props, plan, num_losses=1, verbosity=0)
        session.apply()
    registry.add(session)
    try:
        yield session
    finally:
        session.undo()


def _damaged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    damaged = []
    for name, buffer in after.items():
        old = before.get(name)
        if old is None or not is_lower_precision(buffer.dtype) or old.dtype == buffer.dtype:
            continue
        finite = torch.isfinite(old)
        difference = (buffer.double() - old.double())[finite].abs()
        if bool((difference > 0.01 * old.double()[finite].abs()).any()):
            damaged.append(name)
    return damaged


def float32_copy(model: nn.Module) -> nn.Module:
    """A copy with float32 parameters: the masters' numbers where there are masters."""
    clone = copy.deepcopy(model)
    take_off_copy(clone)
    for tensor in clone.parameters():
        if is_lower_precision(tensor.dtype):
            # On a copy of ours alone, so that torch's own way in is taken.
            tensor.data = tensor.detach().float()
    for parameter in clone.parameters():
        parameter.grad = None
    for module in clone.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_lower_precision(buffer.dtype):
                module._buffers[name] = buffer.float()
    return clone


def copy_of_optimizer(optimizer: Optimizer, model: nn.Module, clone: nn.Module) -> Optimizer:
    """The same optimizer with the same state over a copy's parameters, without what ``initialize`` put on it.

    Raises:
        ValueError: it has parameters that are not the model's.
    """
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    copies = dict(zip(model.parameters(), clone.parameters(), strict=True))
    memo: dict[int, Any] = {id(optimizer): twin}
    session = registry.of(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            pair = None if session is None else session.controller_of(optimizer).groups.store.pairs.of(parameter)
            weight = parameter if pair is None else pair.model_param
            if weight not in copies:
                raise ValueError(
                    "the optimizer has a parameter that is not the model's: mpinit.suggest needs a model that holds "
                    "all parameters, a Module around model and loss for instance"
                )
            memo[id(parameter)] = memo[id(weight)] = copies[weight]
    for name, value in vars(optimizer).items():
        if isinstance(value, types.MethodType) or hasattr(value, "__wrapped__"):
            continue  # what initialize or a scheduler put there
        setattr(twin, name, OrderedDict() if name.endswith(_HOOKS) else copy.deepcopy(value, memo))
    for parameter, state in twin.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and is_lower_precision(value.dtype) and value.shape == parameter.shape:
                state[key] = value.float()
    return twin
