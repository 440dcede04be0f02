"""The handles of the old interface."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .... import amp as mp
from .... import registry
from ._sessions import unwrapped
from .opt import OptimWrapper


class UnknownModels(torch.nn.Module):
    """Stands for the models of ``amp.init``, which is not told what they are."""


class AmpHandle:
    """The handle of patched functions.

    Args:
        model: a model of the session that patched them; held, because the session lives as long as its models do.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def is_active(self) -> bool:
        """Whether functions are patched."""
        return registry.of(self._model) is not None

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @property
    def has_cache(self) -> bool:
        """Always true: casts of weights are kept for the length of a forward."""
        return True

    @property
    def verbose(self) -> bool:
        """Whether casts are logged."""
        session = registry.of(self._model)
        return session is not None and session.verbosity > 1

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        """Put torch's functions back."""
        if self.is_active():
            mp.undo(self._model)

    def scale_loss(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> AbstractContextManager[torch.Tensor]:
        """As ``amp.scale_loss``, for an optimizer that was never initialised.

        Args:
            loss: the loss.
            optimizer: the optimizer; known from then on.
            loss_id: which of its losses it is.

        Returns:
            A context manager that yields the scaled loss.
        """
        self.adopt(optimizer, loss_id + 1)
        return mp.scale_loss(loss, unwrapped(optimizer), loss_id)

    def adopt(self, optimizer: Any, num_losses: int) -> None:
        """Give an optimizer its own loss scalers, where it has none yet."""
        session = registry.of(self._model)
        if session is not None and registry.of(unwrapped(optimizer)) is None:
            with warnings.catch_warnings():
                # There is no model for its parameters to belong to: that is how this interface works.
                warnings.simplefilter("ignore", UserWarning)
                mp.initialize(
                    [], [optimizer], opt_level="O0", loss_scale=session.properties.loss_scale, num_losses=num_losses
                )

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer whose losses take turns.

        Args:
            optimizer: the optimizer.
            num_loss: how many losses are scaled between two steps.

        Returns:
            The wrapper, whose ``scale_loss(loss)`` knows which loss it is.
        """
        self.adopt(optimizer, num_loss)
        return OptimWrapper(optimizer, self, num_loss)


class NoOpHandle:
    """The handle where nothing is patched."""

    has_cache = False
    verbose = False
    _is_active = False

    def is_active(self) -> bool:
        """Never."""
        return False

    def _clear_cache(self) -> None:
        """Nothing to clear."""

    def _deactivate(self) -> None:
        """Nothing to put back."""

    def scale_loss(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> AbstractContextManager[torch.Tensor]:
        """A context manager that yields the loss as it is."""
        return nullcontext(loss)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer without scaling anything."""
        return OptimWrapper(optimizer, self, num_loss)
