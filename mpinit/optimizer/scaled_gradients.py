"""Gradients that stay scaled from a backward pass until somebody asks for them, as torch.amp.GradScaler's do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple, final

import torch

from ..basics.logs import log
from ..masters.two_copies import NameOf
from ..scaling.scaler import LossScaler
from ..torch_internals.devices import is_read_freely
from ..torch_internals.parameter_watching import TENSOR_GRAD
from .backward import BackwardPass
from .gradient_cycle import GradientCycle, any_of
from .parameter_groups import ParameterGroups
from .unscaling import unscale_, unscale_and_check_


class _Raised(NamedTuple):
    """A gradient that was not scaled, scaled for the time of a backward pass that may add to it."""

    weight: torch.Tensor
    scaled: torch.Tensor
    version: int
    before: torch.Tensor


@final
class ScaledGradients:
    """One optimizer's part in backward passes whose gradients are unscaled later.

    From the first of these passes on what is on the weights is scaled, and autograd adds to it. A gradient that was
    there before, and is not, takes part where the pass reaches it, and is left as it was where not.

    Args:
        groups: the optimizer's parameters.
        cycle: the state of its gradients.
        backward: tells whoever watches.
        name_of: a parameter's dotted name, for errors.
    """

    def __init__(self, groups: ParameterGroups, cycle: GradientCycle, backward: BackwardPass, name_of: NameOf) -> None:
        self._groups = groups
        self._cycle = cycle
        self._backward = backward
        self._name_of = name_of
        # Gradients that are known not to be scaled, by their weight's id. Known weakly: they may be large.
        self._sound: dict[int, weakref.ref[torch.Tensor]] = {}
        self._raised: list[_Raised] = []

    @property
    def are_scaled(self) -> bool:
        """Whether there are gradients that a backward pass has left scaled."""
        return self._cycle.look_for_scaled(self._weights())

    def _weights(self) -> list[torch.Tensor]:
        return [*self._groups.copies.weights, *self._groups.plain]

    def _is_sound(self, weight: torch.Tensor) -> bool:
        known = self._sound.get(id(weight))
        return known is not None and weight.grad is not None and known() is weight.grad

    # -- around a backward pass ---------------------------------------------------------------------------------

    @torch.no_grad()
    def before_backward(self, scaler: LossScaler) -> None:
        """A backward pass of a loss that ``scaler`` has scaled begins.

        Raises:
            RuntimeError: a ``scale_loss`` block is open, or gradients are scaled by another scaler.
        """
        cycle = self._cycle
        cycle.check_closed("backward() of a loss that a GradScaler has scaled", "use the one or the other")
        self._groups.refresh()
        cycle.look_for_scaled(self._weights())
        self._check_scaler(scaler)
        if cycle.scaled_by is None:
            self._groups.copies.look_at_gradients()
            sound = [weight for weight in self._weights() if weight.grad is not None]
            if not sound:
                cycle.forget_overflow()
            self._sound.clear()
        else:
            sound = [weight for weight in self._weights() if self._sound and self._is_sound(weight)]
        self._raised = [_raise(weight, scaler) for weight in sound]

    def after_backward(self, scaler: LossScaler) -> None:
        """It has ended: what it reached is scaled."""
        raised, self._raised = self._raised, []
        for weight, scaled, version, before in raised:
            if weight.grad is scaled and scaled._version == version:
                TENSOR_GRAD.__set__(weight, before)
                self._sound[id(weight)] = weakref.ref(before)
            else:
                self._sound.pop(id(weight), None)
        if self._cycle.scaled_by is None and any(
            weight.grad is not None and not self._is_sound(weight) for weight in self._weights()
        ):
            self._cycle.scaled_by = scaler
        # Masters show them too, so that whoever clears those has cleared both.
        if self._cycle.scaled_by is not None and self._groups.store.adds_up_natively():
            self._groups.copies.look_at_gradients()

    # -- unscaling ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def unscale(self, scaler: LossScaler, loss: torch.Tensor) -> bool:
        """Unscale and check every gradient but those that are known not to be scaled.

        One that somebody has assigned is taken for scaled, as torch.amp.GradScaler does.

        Args:
            scaler: what the loss was scaled by.
            loss: the last loss that was, without its graph: for whoever watches.

        Returns:
            Whether there was any gradient.

        Raises:
            RuntimeError: gradients are scaled by another scaler, or came from elsewhere than from a scaled loss.
        """
        groups, cycle = self._groups, self._cycle
        cycle.check_closed("unscale_()", "move it after the with-block")
        groups.refresh()
        cycle.look_for_scaled(self._weights())
        self._check_scaler(scaler)
        if cycle.scaled_by is None and not scaler.is_identity:
            self._check_source()
        held = groups.copies.look_at_gradients()
        for parameter in groups.plain:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        weights, gradients = self._weights(), [*held, *(parameter.grad for parameter in groups.plain)]
        present = [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
        sound = [gradient for weight, gradient in present if self._is_sound(weight)]
        self._unscale([gradient for weight, gradient in present if not self._is_sound(weight)], sound, scaler)
        self._sound = {id(weight): weakref.ref(gradient) for weight, gradient in present}
        cycle.scaled_by, cycle.saw_unscaling = None, True
        self._tell(loss, scaler)
        return bool(present)

    def _unscale(self, scaled: list[torch.Tensor], sound: list[torch.Tensor], scaler: LossScaler) -> None:
        if not scaler.rule.dynamic:
            if not scaler.is_identity:
                unscale_(scaled, scaler.inverse_scale())
            return
        inverse = self._backward.inverse_scale(scaler)
        checks = [unscale_and_check_(scaled, inverse), unscale_and_check_(sound, torch.ones_like(inverse))]
        found_inf = any_of(checks)
        self._cycle.found(found_inf)
        if found_inf is not None:
            scaler.note(found_inf)

    def _tell(self, loss: torch.Tensor, scaler: LossScaler) -> None:
        found_inf = self._cycle.found_inf
        read = found_inf is not None and is_read_freely(found_inf.device)
        overflowed = scaler.rule.dynamic and read and found_inf is not None and found_inf.item() > 0
        worst = self._backward.tell_of_backward(loss, scaler, overflowed)
        if overflowed:
            said = "" if worst is None else f"; worst: {worst}"
            log.info(
                "Gradient overflow: the next optimizer.step() is skipped; loss scale %s%s", scaler.loss_scale(), said
            )

    def note_sound(self, weights: Iterable[torch.Tensor]) -> None:
        """Another optimizer that shares weights has unscaled their gradients."""
        mine = {id(weight) for weight in self._weights()}
        for weight in weights:
            if id(weight) in mine and weight.grad is not None:
                self._sound[id(weight)] = weakref.ref(weight.grad)

    def give_up(self) -> None:
        """The session ends: gradients are nobody's business any more, and not scaled."""
        scaler = self._cycle.scaled_by
        if scaler is not None:
            weights = [weight for weight in self._weights() if weight.grad is not None]
            unscale_([w.grad for w in weights if w.grad is not None and not self._is_sound(w)], scaler.inverse_scale())
            self._cycle.scaled_by = None

    # -- refusing -----------------------------------------------------------------------------------------------

    def _check_scaler(self, scaler: LossScaler) -> None:
        if self._cycle.scaled_by not in (None, scaler):
            raise RuntimeError(
                f"the gradients of {type(self._groups.optimizer).__name__} are scaled by the scale of another loss: "
                "call unscale_(optimizer) of the GradScaler whose scaled loss left them, before backward() of this one"
            )

    def _check_source(self) -> None:
        if self._cycle.saw_scale_loss:
            raise RuntimeError(
                "gradients that came through mpinit.scale_loss are unscaled already: call optimizer.step(), or "
                "optimizer.zero_grad() before the first backward() of scaler.scale(loss)"
            )
        stray = self._groups.copies.left_by_backward()
        if stray is not None and not self._is_sound(stray.model_param):
            raise RuntimeError(
                f"parameter {self._name_of(stray.model_param)!r} has a gradient of a loss that was not scaled: call "
                "scaler.scale(loss).backward() instead of loss.backward()"
            )


def _raise(weight: torch.Tensor, scaler: LossScaler) -> _Raised:
    before = weight.grad
    assert before is not None
    wide = before.to(torch.promote_types(before.dtype, torch.float32))
    # Where ranks exchange gradients in the weight's own type, that is the type in which they add up.
    scaled = (wide * scaler.scale_now().to(before.device)).to(weight.grad_dtype or weight.dtype)
    TENSOR_GRAD.__set__(weight, scaled)
    return _Raised(weight, scaled, scaled._version, before)
