"""A session's optimizers: those it was set up with, those that came later, and what none of them steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..basics.patching import Undo, UndoStack
from ..basics.wrappers import unwrapped
from ..masters.per_parameter import check_steps_as_its_class
from ..masters.store import MasterStore
from ..masters.two_copies import NameOf, TwoCopies
from ..plan import Plan
from ..scaling.scaled_loss import TakesPart
from ..scaling.scaler import LossScaler
from ..torch_internals.backward_passes import around_backward, current_pass
from .bystanders import OtherParameters
from .control import OptimizerControl
from .gradient_release import Owners
from .ranks import Ranks
from .release_units import check_release
from .state import as_it_is, wrapped_by
from .switches import Switches


@final
class Controls:
    """What is kept for each of a session's optimizers, in their order.

    Args:
        models: the session's models.
        plan: what to do.
        store: where masters live.
        scalers: the session's loss scalers.
        name_of: a parameter's dotted name, for errors.
        original_values: what a weight was before it was cast without a master, where that is known.
        process_group: over which steps are one, beside what parameters are sharded over; None: nothing.

    Attributes:
        ranks: what is one over all ranks.
        bystanders: who knows of gradients that a scaled loss has left behind an optimizer's back.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        plan: Plan,
        store: MasterStore,
        scalers: Sequence[LossScaler],
        name_of: NameOf,
        original_values: Callable[[torch.Tensor], torch.Tensor | None],
        process_group: Any = None,
    ) -> None:
        self._models = models
        self._plan = plan
        self._store = store
        self._scalers = scalers
        self._name_of = name_of
        self._original_values = original_values
        self._of: dict[Optimizer, OptimizerControl] = {}
        self._loose: tuple[tuple[int, ...], list[nn.Parameter]] = ((-1,), [])
        # The backward pass of a GradScaler's loss that is running.
        self._pass = -1
        self._loss = torch.zeros(())
        self._owners: Owners = {}
        self.bystanders = OtherParameters(self._other_parameters)
        self.ranks = Ranks(
            *(models, store, scalers, self.all_copies, self._stepped, self._generation),
            process_group=process_group,
        )

    def __iter__(self) -> Iterator[OptimizerControl]:
        return iter(self._of.values())

    def of(self, optimizer: Optimizer) -> OptimizerControl:
        """What is kept for one of the session's optimizers, or for the one in a wrapper."""
        return self._of[optimizer if optimizer in self._of else unwrapped(optimizer, self._of.__contains__)]

    def has(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer is one of the session's."""
        return optimizer in self._of

    # -- coming and going ---------------------------------------------------------------------------------------

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Before anything is changed: whether these optimizers can be stepped as the plan says.

        Raises:
            ValueError: one of them cannot; the message says why and what to do.
        """
        if self._steps_in_parts():
            for each in [one for optimizer in optimizers for one in (optimizer, *wrapped_by(optimizer))]:
                check_steps_as_its_class(each)
        self._store.check_all(optimizers)
        if self._plan.gradient_release:
            check_release(optimizers, self.taken())

    def _steps_in_parts(self) -> bool:
        return self._store.steps_in_parts or self._store.states.steps_in_parts or self._plan.gradient_release

    def _check_again(self, optimizer: Optimizer) -> None:
        """:meth:`check` for one that is the session's and stepped in parts, whose groups have changed."""
        self._store.check_all([optimizer])
        if self._plan.gradient_release:
            check_release([optimizer], set())

    def take(self, optimizer: Optimizer, targets: Mapping[torch.Tensor, torch.dtype]) -> Undo:
        """Put masters into an optimizer while the session is set up, before anything is cast.

        Args:
            optimizer: the optimizer, changed in place.
            targets: the dtypes that parameters are about to be cast to.

        Returns:
            The undo of what was put on the optimizer; its groups are given up with the masters.
        """
        control = self._of[optimizer] = self._control(optimizer, targets)
        control.groups.put_masters()
        return control.install()

    def add(self, optimizer: Optimizer, undos: UndoStack) -> Undo:
        """:meth:`take` in a session whose weights are cast.

        Args:
            optimizer: the optimizer, changed in place.
            undos: what leaves the optimizer as it came, should the set-up fail.
        """
        undos.push(as_it_is(optimizer))
        undos.push(lambda: self._forget(optimizer))
        control = self._of[optimizer] = self._control(optimizer, {})
        control.groups.finish()
        control.groups.put_masters()
        undo = control.install()
        undos.push(undo)
        return undo

    def _control(self, optimizer: Optimizer, targets: Mapping[torch.Tensor, torch.dtype]) -> OptimizerControl:
        return OptimizerControl(
            *(optimizer, self._plan, self._store, targets, self._scalers, self.bystanders, self.ranks),
            name_of=self._name_of,
            original_values=self._original_values,
            owners=self._owners,
            switches=Switches(optimizer, partial(self._check_again, optimizer) if self._steps_in_parts() else None),
        )

    def _forget(self, optimizer: Optimizer) -> None:
        control = self._of.pop(optimizer, None)
        if control is not None:
            control.groups.leave()

    # -- a GradScaler's losses ----------------------------------------------------------------------------------

    def scaled(self, output: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
        """``output`` scaled; gradients that its backward pass leaves on weights are scaled until :meth:`unscale`."""
        scaled = scaler.scale(output)
        self._loss = output.detach()
        if scaled.requires_grad and not scaler.is_identity:
            around_backward(scaled, partial(self._before_backward, scaler), partial(self._after_backward, scaler))
        return scaled

    def _before_backward(self, scaler: LossScaler) -> None:
        # Several scaled tensors may be in one pass.
        if self._pass != current_pass():
            for control in self._of.values():
                control.scaled.before_backward(scaler)
            self.bystanders.before_backward([control.backward for control in self._of.values()], scaler)
            self._pass = current_pass()

    def _after_backward(self, scaler: LossScaler) -> None:
        if self._pass == current_pass():
            self._pass = -1
            self.bystanders.after_backward()
            for control in self._of.values():
                control.scaled.after_backward(scaler)

    def unscale(self, optimizer: Optimizer, scaler: LossScaler) -> bool:
        """Unscale and check an optimizer's gradients.

        Returns:
            Whether it has any.
        """
        own = self.of(optimizer)
        found = own.scaled.unscale(scaler, self._loss) or own.release.has_begun
        for other in self._of.values():
            if other is not own:
                other.scaled.note_sound(own.groups.model_params())
        return found

    # -- who is where -------------------------------------------------------------------------------------------

    def all_copies(self) -> list[TwoCopies]:
        """Every pair of the session, by who steps it."""
        return [*(control.groups.copies for control in self._of.values()), self._store.idle]

    def taken(self) -> set[int]:
        """The ids of the parameters that some optimizer has."""
        return {id(parameter) for control in self._of.values() for parameter in control.groups.model_params()}

    def _stepped(self) -> Iterator[nn.Parameter]:
        for control in self._of.values():
            yield from control.groups.model_params()

    def _generation(self) -> tuple[int, ...]:
        return tuple(control.groups.generation for control in self._of.values())

    def waiting(self) -> list[nn.Parameter]:
        """The models' trainable parameters that no optimizer has."""
        taken = self.taken()
        everything = dict.fromkeys(p for model in self._models for p in model.parameters())
        return [parameter for parameter in everything if parameter.requires_grad and id(parameter) not in taken]

    def _other_parameters(self, parts: Sequence[TakesPart]) -> Iterator[nn.Parameter]:
        """What a loss may reach without anybody unscaling it: the other optimizers' parameters, and nobody's."""
        for control in self._of.values():
            if control.backward not in parts:
                yield from control.groups.model_params()
        key = self._generation()
        if self._loose[0] != key:
            taken = self.taken()
            everything = dict.fromkeys(p for model in self._models for p in model.parameters())
            self._loose = key, [parameter for parameter in everything if id(parameter) not in taken]
        yield from self._loose[1]
