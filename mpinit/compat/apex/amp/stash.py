"""What scripts do on an initialised optimizer before they load a checkpoint, or after they wrote to its masters."""

from collections import deque
from functools import partial
from typing import Any, NoReturn

from torch.optim import Optimizer

from .... import amp as mp


class AmpStash:
    """``optimizer._amp_stash``, of which scripts set :attr:`lazy_init_called`.

    Attributes:
        lazy_init_called: whether there are masters; they exist from ``initialize`` on.
    """

    lazy_init_called = True

    def __getattr__(self, name: str) -> NoReturn:
        """Say where apex's lists of parameters are."""
        raise AttributeError(
            f"_amp_stash.{name} is not part of the apex that mpinit provides: optimizer.param_groups has the model's "
            "own parameters, and amp.master_params(optimizer), in the same order, what the optimizer steps for each"
        )


def attach(optimizer: Optimizer) -> None:
    """Put ``_amp_stash`` and the methods around it on an optimizer; harmless where they are there already."""
    target: Any = optimizer
    target._amp_stash = AmpStash()
    target._amp_lazy_init = target._lazy_init_maybe_master_weights = _do_nothing
    target._master_params_to_model_params = partial(_settle, optimizer)


def _do_nothing() -> None:
    """Masters are there since ``initialize``."""


def _settle(optimizer: Optimizer) -> None:
    """Masters that were given out and written to are rounded into their weights where they are asked for again."""
    deque(mp.master_params(optimizer), maxlen=0)
