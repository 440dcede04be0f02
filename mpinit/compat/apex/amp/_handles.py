"""The handle of patched functions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from .... import amp as mp
from ... import _core


class AmpHandle:
    """Says whether functions are patched, and puts them back.

    Args:
        model: a model of the session that patched them; held, because the session lives as long as its models do.
    """

    has_cache = True

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def is_active(self) -> bool:
        """Whether functions are patched."""
        return _core.session_of(self._model) is not None

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        """Put torch's functions back."""
        if self.is_active():
            mp.undo(self._model)

    def scale_loss(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Raise the RuntimeError that says what takes its place."""
        raise RuntimeError(
            "a handle of amp.init scales no losses here: leave amp.init out, call model, optimizer = "
            "amp.initialize(model, optimizer, opt_level='O1', num_losses=...), and scale each loss with "
            "amp.scale_loss(loss, optimizer, loss_id=...)"
        )

    wrap_optimizer = scale_loss


class NoOpHandle:
    """The handle where nothing is patched."""

    has_cache = False
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

    wrap_optimizer = AmpHandle.wrap_optimizer
