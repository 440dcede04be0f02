"""What mpinit keeps for one optimizer, and the methods it puts on it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.patching import Undo, UndoStack, set_attribute
from ..masters.store import MasterStore
from ..masters.two_copies import NameOf
from ..plan import Plan
from ..scaling.scaler import LossScaler
from ..torch_internals.optimizer_state_by_name import show_weights
from .backward import BackwardPass
from .bystanders import OtherParameters
from .gradient_cycle import GradientCycle
from .gradient_release import GradientRelease, Owners
from .halves import FIRST, SECOND, Halves
from .observers import Observer
from .overflow_log import OverflowLog
from .parameter_groups import ParameterGroups
from .parts import show_states
from .ranks import Ranks
from .scaled_gradients import ScaledGradients
from .state_by_name import StateByName
from .step import Step
from .step_counts import StepCounts
from .switches import Switches


@final
class OptimizerControl:
    """One optimizer's groups, gradient cycle, backward passes and steps.

    The optimizer stays the object it was; what changes are entries of its parameter groups and a few of its methods.

    Args:
        optimizer: the optimizer, changed in place.
        plan: what to do.
        store: where masters live.
        targets: the dtypes that parameters are about to be cast to.
        scalers: the session's loss scalers.
        bystanders: who knows of gradients that are still scaled.
        ranks: what is one over all ranks.
        name_of: a parameter's dotted name, for errors.
        original_values: what a weight was before it was cast without a master, where that is known.
        owners: who steps a parameter inside of backward passes.
        switches: its options.

    Attributes:
        groups: its parameters.
        release: its steps inside of backward passes.
        backward: its part in scaled backward passes.
        observers: who is told of its backward passes and steps.
        overflows: what is known of its last overflow.
        scaled: its part in those whose gradients are unscaled later.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        plan: Plan,
        store: MasterStore,
        targets: Mapping[torch.Tensor, torch.dtype],
        scalers: Sequence[LossScaler],
        bystanders: OtherParameters,
        ranks: Ranks,
        name_of: NameOf,
        original_values: Callable[[torch.Tensor], torch.Tensor | None],
        owners: Owners,
        switches: Switches,
    ) -> None:
        self.optimizer = optimizer
        self.groups = ParameterGroups(optimizer, store, targets, name_of, bystanders, original_values)
        self._ranks = ranks
        self._switches = switches
        self._cycle = GradientCycle()
        self.observers: list[Observer] = []
        self.overflows = OverflowLog(self.groups, name_of)
        self.backward = BackwardPass(self.groups, self._cycle, self.observers, self.overflows)
        self.scaled = ScaledGradients(self.groups, self._cycle, self.backward, name_of)
        self._inner_zero_grad: Callable[..., None] = optimizer.zero_grad
        self._inner_add_param_group: Callable[[dict[str, Any]], None] = optimizer.add_param_group
        self._inner_step: Callable[..., Any] = optimizer.step
        scales = not all(scaler.is_identity for scaler in scalers)
        self._step = Step(
            *(self.groups, self._cycle, self.backward, bystanders, ranks, plan, scales, name_of, self._inner_step),
            observers=self.observers,
            overflows=self.overflows,
        )
        bucket_bytes = plan.split_bucket_bytes if plan.gradient_release else 0
        self.release = GradientRelease(self.groups, self._step, self.backward.clear, bucket_bytes, owners, name_of)
        self._by_name = StateByName(self.groups, self._cycle, self.backward, self._step)
        self._halves = Halves(self.groups, self._step, plan.scaling.dynamic, optimizer.zero_grad)
        own = getattr(self._inner_zero_grad, "__func__", None)
        self._zeroes_as_torch_does = own is torch.optim.Optimizer.zero_grad
        self._takes_set_to_none, self._sets_to_none = _set_to_none_of(self._inner_zero_grad)
        self._active = True

    @property
    def counts(self) -> StepCounts:
        """Steps done and skipped."""
        return self._step.counter.read()

    def skips_step(self) -> bool:
        """Skip a step here and now where gradients overflowed; False where it is to be done, or skips by itself."""
        return self._step.skips()

    @property
    def overflowed(self) -> bool:
        """Whether the gradients that are there overflowed, so that the next step is skipped. Waits for the device."""
        return self._active and self._step.overflowed()

    def gradient_holders(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[nn.Parameter]:
        """The parameters whose ``.grad`` the next step uses, in the groups' order, with weights and masters agreeing.

        With split masters these are the weights, whose numbers can be looked at.

        Args:
            parameters: only those that stand for these weights, in their order.
        """
        self.release.check_looking("mpinit.master_params (or mpinit.clip_grad_norm_)")
        self.groups.refresh()
        self.groups.copies.look_at_both()
        self.groups.copies.look_at_trained()
        self._step.check_gradients()
        yield from self.groups.gradient_holders(parameters)

    def before_forward(self) -> None:
        """Let weights follow what was written to masters."""
        if self._active:
            self.groups.refresh()
            self.groups.copies.look_at_masters()
            self.groups.copies.look_at_trained(of_masters=True)
            self.release.follow()

    def part_in_backward(self, delays: bool) -> BackwardPass:
        """:attr:`backward`, for a scaled backward pass that is to begin.

        Args:
            delays: others of the same step are to follow.

        Raises:
            RuntimeError: there may be but one, by ``gradient_release``.
        """
        self.release.check_backward(delays)
        self._switches.look()
        return self.backward

    def broadcast(self, src: int, group: Any) -> None:
        """Give all ranks the parameters of the rank ``src`` of a process group (None: the default one)."""
        self.groups.refresh()
        self._ranks.send(self.groups.copies.pairs, self.groups.plain, src, group)

    def follow_masters(self) -> None:
        """Round every master into its weight, written to or not."""
        for pair in self.groups.copies.pairs:
            pair.follow_master()
        self.groups.copies.note_all()

    def check_closed(self, what: str, instead: str) -> None:
        """Refuse what must not happen while gradients are scaled.

        Raises:
            RuntimeError: they are.
        """
        self._cycle.check_closed(what, instead)

    # -- the methods --------------------------------------------------------------------------------------------

    def install(self) -> Undo:
        """Put the methods on the optimizer; the undo puts back what stood there, and hands through what it cannot."""
        optimizer, control = self.optimizer, self

        def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            return control.step(closure, *args, **kwargs)

        def zero_grad(self: Any, set_to_none: bool = control._sets_to_none) -> None:
            control.zero_grad(set_to_none)

        def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
            control.add_param_group(param_group)

        if hasattr(self._inner_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        methods: list[Any] = [step, zero_grad, add_param_group]
        methods += [self._followed(name) for name in _methods_that_may_write(optimizer)]
        with UndoStack() as undos:
            undos.push(self._deactivate)
            undos.push(show_weights(self._by_name))
            undos.push(show_states(self.groups))
            # Wrappers that were never initialised as optimizers have no hooks.
            if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
                undos.push(optimizer.register_state_dict_pre_hook(self._drop_what_reading_left).remove)
            for function in methods:
                # Bound, because learning-rate schedulers reach for ``optimizer.step.__func__``.
                method = types.MethodType(function, optimizer)
                name = function.__name__
                undos.push(_revert_if_ours(optimizer, name, method, set_attribute(optimizer, name, method)))
            self.release.follow()
        return undos.unwind

    def _drop_what_reading_left(self, optimizer: Optimizer) -> None:
        """``optimizer.state[weight]`` makes an empty entry, which torch's ``state_dict()`` then knows no place for."""
        for pair in self.groups.copies.pairs:
            if pair.model_param in optimizer.state and not optimizer.state[pair.model_param]:
                del optimizer.state[pair.model_param]

    def _deactivate(self) -> None:
        self._active = False
        self.release.end()

    def _followed(self, name: str) -> Callable[..., Any]:
        """A method of the optimizer's own, after which weights follow what it wrote to masters."""
        inner = getattr(self.optimizer, name)
        control = self
        half = {FIRST: self._halves.first, SECOND: self._halves.second}.get(name)

        @functools.wraps(getattr(inner, "__func__", inner))
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(half, inner) if half is not None and control._active else inner
            result = run(*args, **kwargs)
            # Where a step calls it, all masters are rounded when that is over.
            if not control.groups.show_a_part():
                control.before_forward()
            return result

        method.__name__ = name
        return method

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's ``step``."""
        if not self._active:
            return self._inner_step(*((closure, *args) if closure is not None else args), **kwargs)
        self._switches.look()
        self.release.check_arguments(closure, args, kwargs)
        if self.release.has_begun:
            return self.release.finish()
        result = self._step(closure, *args, **kwargs)
        self.release.reset()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's ``zero_grad``, for weights and masters."""
        copies = self.groups.copies
        if self.groups.show_a_part():
            # Of the other parts there are gradients still, which are not in the groups.
            self._clear_as_it_does(set_to_none)
            return
        if self._active:
            self.release.before_clearing()
            copies.look_at_masters()
            if set_to_none and self._zeroes_as_torch_does:
                self.backward.clear()
                return
            self.groups.refresh()
            copies.look_at_gradients()
        self._clear_as_it_does(set_to_none)
        if self._active:
            copies.look_at_gradients()
            self._cycle.cleared()

    def _clear_as_it_does(self, set_to_none: bool) -> None:
        self._inner_zero_grad(*((set_to_none,) if self._takes_set_to_none else ()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's ``add_param_group``, with masters for 16-bit parameters."""
        if self._active:
            self._cycle.check_closed("optimizer.add_param_group()", "move it before or after the with-block")
        self._inner_add_param_group(param_group)
        if self._active:
            try:
                self._switches.look()
            except ValueError:
                self.optimizer.param_groups.pop()
                raise
            self.groups.take_in_new_group()
            self.release.follow()


def _set_to_none_of(zero_grad: Callable[..., None]) -> tuple[bool, bool]:
    """Whether a ``zero_grad`` takes ``set_to_none``, and what it does without."""
    parameters = inspect.signature(zero_grad).parameters
    given = parameters.get("set_to_none")
    takes = given is not None or any(p.kind is p.VAR_POSITIONAL or p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes, given is None or bool(given.default)


def _methods_that_may_write(optimizer: Optimizer) -> list[str]:
    """Public methods that torch's optimizers do not have: ``eval()`` of schedule-free kinds, a first step of two."""
    known = set(dir(Optimizer))
    names = dict.fromkeys(name for cls in type(optimizer).__mro__ for name in vars(cls))
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in known
        and inspect.isfunction(getattr(type(optimizer), name, None))
        and not isinstance(inspect.getattr_static(type(optimizer), name), staticmethod)
    ]


def _revert_if_ours(optimizer: Any, name: str, method: Any, revert: Undo) -> Undo:
    def undo() -> None:
        # A scheduler built later has wrapped our method: pulling it away would take the scheduler's wrapper too.
        # It stays, and hands through to what was there before.
        if vars(optimizer).get(name) is method:
            revert()

    return undo
