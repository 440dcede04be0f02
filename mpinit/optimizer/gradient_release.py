"""Parameters stepped inside of backward passes: a bucket as soon as its gradients are final, which are freed then.

Autograd's node of a parameter runs once a pass, when everything has been added up that the pass brings to it and
nothing will read the parameter for a gradient any more. So its gradient is final, and the parameter free to be
written to. A step is then done in parts, as with split masters and encoded states, of which all but the last are done
before ``step()`` is called; what an optimizer counts it counts once. ``step()`` does what is left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from ..basics.logs import log
from ..basics.user_warnings import warn_user
from ..distributed.sharding import has_other_processes
from ..masters.parts import Numbers
from ..masters.two_copies import NameOf
from ..torch_internals.backward_passes import current_pass, is_nested
from ..torch_internals.devices import is_capturing
from ..torch_internals.gradient_clipping import listen_to_clipping, stop_listening_to_clipping
from ..torch_internals.parameter_watching import TENSOR_GRAD
from ..torch_internals.running import in_backward
from ..torch_internals.step_hooks import StepHooks
from . import release_texts as texts
from .parameter_groups import ParameterGroups
from .release_units import Unit, units_of
from .step import Step

Owners = dict[int, "weakref.ref[GradientRelease]"]


@final
class GradientRelease:
    """What one optimizer's steps have done ahead, inside of backward passes.

    Args:
        groups: its parameters.
        step: its step.
        clear: drops every gradient.
        bucket_bytes: float32 bytes stepped at a time; 0: nothing is ever stepped ahead.
        owners: who steps a parameter ahead, by its id; one for all of a session's optimizers.
        name_of: a parameter's dotted name, for errors.
    """

    def __init__(
        self,
        groups: ParameterGroups,
        step: Step,
        clear: Callable[[], None],
        bucket_bytes: int,
        owners: Owners,
        name_of: NameOf,
    ) -> None:
        self._groups = groups
        self._step = step
        self._clear = clear
        self._bucket_bytes = bucket_bytes
        self._owners = owners
        self._name_of = name_of
        self._key = (-1, 0)
        self._units: list[Unit] = []
        self._unit_of: dict[int, Unit] = {}
        self._handles: dict[int, RemovableHandle] = {}
        # Of the step that has begun: its pass while that runs, what was stepped, and what waits for step().
        self._pass = -1
        self._is_off = False
        self._stepped: set[int] = set()
        self._left: set[int] = set()
        self._numbers: Numbers | None = None
        self._hooks: StepHooks | None = None
        self._options: list[dict[str, Any]] = []

    @property
    def has_begun(self) -> bool:
        """Whether parameters were stepped since the last ``step()``."""
        return len(self._stepped) > 0

    # -- whose gradients ----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Have the parameters that are in the groups now stepped ahead; cheap where they are known.

        Raises:
            RuntimeError: there are other processes, or another optimizer has one of the parameters.
        """
        if not self._bucket_bytes or in_backward():
            return
        if has_other_processes():
            raise RuntimeError(texts.OTHER_PROCESSES)
        key = self._groups.generation, len(self._groups.copies.clamped)
        if key == self._key:
            return
        units = units_of(self._groups, self._bucket_bytes, self._name_of)
        members = {id(weight): (weight, unit) for unit in units for weight in unit.weights}
        self._own(members)
        self._units, self._unit_of = units, {number: unit for number, (_, unit) in members.items()}
        for number in self._handles.keys() - members.keys():
            self._handles.pop(number).remove()
        hook = _Hook(weakref.ref(self))
        for number, (weight, _) in members.items():
            if number not in self._handles and weight.requires_grad:
                follow: Any = weight.register_post_accumulate_grad_hook
                self._handles[number] = follow(hook)
        if self._key[0] < 0:
            listen_to_clipping(self)
        self._key = key

    def _disown(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._owners.pop(number, None)

    def _own(self, members: dict[int, tuple[torch.Tensor, Unit]]) -> None:
        for number, (weight, _) in members.items():
            owner = self._owners.get(number)
            if owner is not None and owner() not in (None, self):
                raise RuntimeError(f"{self._name_of(weight)!r} is {texts.TWO_OPTIMIZERS}")
        self._disown(self._unit_of.keys() - members.keys())
        self._owners.update(dict.fromkeys(members, weakref.ref(self)))

    def end(self) -> None:
        """The session is over: gradients stay where they arrive."""
        if self.has_begun:
            log.warning("undo: %s", self._what_was_done())
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._disown(self._unit_of)
        stop_listening_to_clipping(self)
        self._bucket_bytes = 0
        self.reset()

    # -- inside of a backward pass ------------------------------------------------------------------------------

    def arrived(self, weight: torch.Tensor) -> None:
        """Autograd has added to a gradient all that this pass brings to it.

        Raises:
            RuntimeError: the gradient is not final, or it is one of another backward pass since the last step.
        """
        if self._pass != current_pass() and not self._begin(weight):
            return
        unit = self._unit_of.get(id(weight))
        if self._is_off or unit is None or id(weight) in self._left:
            return
        if unit.is_complete_with(weight):
            self._step_ahead(unit)

    def _begin(self, weight: torch.Tensor) -> bool:
        """Whether a gradient is one of a pass that steps ahead; what a nested pass brings waits for ``step()``."""
        if is_nested():
            if id(weight) in self._stepped:
                raise RuntimeError(texts.came_again(self._name_of(weight)))
            self._left.add(id(weight))
            return False
        if self.has_begun:
            if id(weight) in self._stepped:
                TENSOR_GRAD.__set__(weight, None)
            raise RuntimeError(self._second_pass())
        if weight.grad is not None and weight.grad.requires_grad:
            raise RuntimeError(texts.CREATE_GRAPH)
        if is_capturing():
            raise RuntimeError(texts.CAPTURING)
        if has_other_processes():
            raise RuntimeError(texts.OTHER_PROCESSES)
        self._pass = current_pass()
        # Groups that somebody has changed since the forward are looked at in step().
        self._is_off = not self._groups.is_as_seen()
        for unit in self._units:
            unit.begin()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._pass_ended, self._pass))
        return True

    def _step_ahead(self, unit: Unit) -> None:
        groups = self._groups
        if self._numbers is None or self._hooks is None:
            hooks = StepHooks(groups.optimizer)
            if hooks.before((), {}) != ((), {}):
                raise RuntimeError(texts.HOOK_ARGUMENTS)
            groups.copies.look_at_weights()
            groups.copies.look_at_trained()
            self._hooks, self._numbers = hooks, Numbers(groups.optimizer)
        else:
            self._numbers.put_back()
        self._stepped.update(unit.arrived)
        with unit.alone(), self._hooks:
            self._step.part(unit.copies)

    def _pass_ended(self, number: int) -> None:
        if number != self._pass:
            return
        for unit in self._units:
            if unit.arrived:
                self._step_ahead(unit)
            unit.end()
        self._pass = -1
        self._options = self._options_now()

    # -- between backward and step ------------------------------------------------------------------------------

    def check_backward(self, delays: bool) -> None:
        """Before a backward pass that ``scale_loss`` announces.

        Args:
            delays: others of the same step are to follow.

        Raises:
            RuntimeError: others are, or this is one.
        """
        if delays and self._bucket_bytes:
            raise RuntimeError(texts.DELAYS)
        if self.has_begun:
            raise RuntimeError(self._second_pass())

    def check_looking(self, what: str) -> None:
        """Refuse what looks at all gradients, or changes them, where some are gone.

        Raises:
            RuntimeError: some are.
        """
        if self.has_begun:
            raise RuntimeError(texts.looks(what, len(self._stepped)))

    def clipping_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Torch is about to clip the gradients of these.

        Raises:
            RuntimeError: some of these are gone.
        """
        if self.has_begun and any(id(parameter) in self._unit_of for parameter in parameters):
            self.check_looking("torch.nn.utils.clip_grad_norm_ or clip_grad_value_")

    def before_clearing(self) -> None:
        """Before ``zero_grad()``, which ends a step that a failed backward pass has left half done, with a warning.

        Raises:
            RuntimeError: all of the pass was stepped, and ``step()`` has not been called.
        """
        if self.has_begun and self._pass == -1:
            raise RuntimeError(texts.cleared(self._what_was_done()))
        if self.has_begun:
            warn_user(f"{self._what_was_done()}. It stays half done; the gradients that are left are dropped")
        self.reset()

    def reset(self) -> None:
        """Nothing is stepped ahead any more."""
        self._pass = -1
        self._stepped.clear()
        self._left.clear()
        self._numbers = self._hooks = None
        for unit in self._units:
            unit.begin()

    # -- the step -----------------------------------------------------------------------------------------------

    def check_arguments(self, closure: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse what a step that has begun cannot be given any more.

        Raises:
            RuntimeError: there is an argument.
        """
        if self._bucket_bytes and closure is not None:
            raise RuntimeError(texts.CLOSURE)
        if self._bucket_bytes and (args or kwargs):
            raise RuntimeError(texts.ARGUMENTS)

    def finish(self) -> None:
        """The rest of a step that has begun, and what comes once a step.

        Raises:
            RuntimeError: the backward pass has failed, or options were changed since.
        """
        if self._pass != -1:
            raise RuntimeError(f"optimizer.step() was called, but {self._what_was_done()}. {texts.WAY_ON}")
        self._check_options()
        step, groups = self._step, self._groups
        step.prepare("optimizer.step()")
        groups.copies.look_at_gradients()
        assert self._numbers is not None and self._hooks is not None, "begun with the first part"
        if not groups.are_without_gradients():
            self._numbers.put_back()
            with self._hooks:
                step.part(groups.copies)
        self._clear()
        step.count_done()
        hooks = self._hooks
        self.reset()
        hooks.after((), {})
        groups.copies.look_at_both()
        self.follow()
        step.tell_observers()

    def _options_now(self) -> list[dict[str, Any]]:
        kinds = (bool, int, float, str, tuple, type(None))
        return [
            {k: v for k, v in group.items() if isinstance(v, kinds)} for group in self._groups.optimizer.param_groups
        ]

    def _check_options(self) -> None:
        for before, now in zip(self._options, self._options_now(), strict=False):
            for key in before:
                if now.get(key) != before[key]:
                    raise RuntimeError(texts.changed(key, before[key], now.get(key)))

    def _what_was_done(self) -> str:
        return texts.done(len(self._stepped), len(self._unit_of), self._pass != -1)

    def _second_pass(self) -> str:
        return texts.second_pass(self._what_was_done(), self._pass != -1)


class _Hook:
    """:meth:`GradientRelease.arrived` for a weight; a weight holds its hooks, and a hook holds nothing."""

    __slots__ = ("_release",)

    def __init__(self, release: weakref.ref[GradientRelease]) -> None:
        self._release = release

    def __call__(self, weight: torch.Tensor) -> None:
        release = self._release()
        if release is not None:
            release.arrived(weight)
