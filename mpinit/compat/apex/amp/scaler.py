"""LossScaler under apex's names, over mpinit's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ....plan import ScalingRule
from ....scaling.scaler import LossScaler as CoreScaler

# mpinit's own limit where none is given: below it a scale's reciprocal is no float32.
_NO_MINIMUM = torch.finfo(torch.float32).tiny


class LossScaler:
    """A loss scaler whose private attributes scripts read and write.

    Args:
        loss_scale: "dynamic", or the static scale.
        init_scale: the first dynamic scale.
        scale_factor: the factor of both moves.
        scale_window: good steps between growths.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.

    Example:
        >>> LossScaler("dynamic").loss_scale()
        65536.0
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = False

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        dynamic = loss_scale == "dynamic"
        self._core = CoreScaler(
            ScalingRule(
                dynamic=dynamic,
                init_scale=min(max_loss_scale, init_scale) if dynamic else float(loss_scale),
                growth_factor=scale_factor,
                backoff_factor=1 / scale_factor,
                growth_interval=scale_window,
                hysteresis=1,
                min_scale=_NO_MINIMUM if min_loss_scale is None else min_loss_scale,
                max_scale=max_loss_scale,
                max_consecutive_skips=64,
            )
        )
        self._overflowed = False

    @classmethod
    def over(cls, core: CoreScaler) -> LossScaler:
        """A view of a session's scaler: nothing is copied.

        Args:
            core: the session's scaler.

        Returns:
            The view.
        """
        view = cls.__new__(cls)
        view._core = core
        view._overflowed = False
        return view

    @property
    def core(self) -> CoreScaler:
        """mpinit's own scaler behind this one."""
        return self._core

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._core.rule.dynamic

    @property
    def _loss_scale(self) -> float:
        return self._core.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        core = self._core
        core.set_scale(float(value))
        if not core.rule.dynamic:
            # A rule that starts at 1 never scales; this one does from now on.
            core.rule = dataclasses.replace(core.rule, init_scale=float(value))

    @property
    def _unskipped(self) -> int:
        return self._core.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._core.unskipped = int(value)

    @property
    def _scale_seq_len(self) -> int:
        return self._core.rule.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._core.rule = dataclasses.replace(self._core.rule, growth_interval=int(value))

    @property
    def _min_loss_scale(self) -> float | None:
        low = self._core.rule.min_scale
        return None if low == _NO_MINIMUM else low

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        low = _NO_MINIMUM if value is None else float(value)
        self._core.rule = dataclasses.replace(self._core.rule, min_scale=low)

    @property
    def _max_loss_scale(self) -> float:
        return self._core.rule.max_scale

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        self._core.rule = dataclasses.replace(self._core.rule, max_scale=float(value))

    @property
    def _has_overflow(self) -> bool:
        return self._overflowed

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflowed = bool(value)

    def loss_scale(self) -> float:
        """The scale in force."""
        return self._core.loss_scale()

    def clear_overflow_state(self) -> None:
        """Forget the outcome of earlier checks."""
        self._overflowed = False

    def update_scale(self) -> bool:
        """Move a dynamic scale by what was found since the last update.

        Returns:
            Whether an overflow was found, so that the step is to be skipped.
        """
        core = self._core
        core.note(torch.tensor(1.0 if self._overflowed else 0.0, device="cpu"))
        # Not told from the scale going down: at its lower limit it does not.
        overflowed = core.noted_overflow
        core.update()
        self._overflowed = False
        return overflowed
