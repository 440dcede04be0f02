"""timm: the scaler that its training scripts call, over a session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import amp, registry
from . import require

NativeScaler: Any = require("timm").utils.NativeScaler


@final
class Scaler(NativeScaler):  # type: ignore[misc]
    """Stands for ``timm.utils.NativeScaler`` in loops, resumed runs and ``CheckpointSaver(amp_scaler=...)``.

    ``ModelEmaV3`` and the other averages of timm are float32, copied from an initialised model, and average its state
    dict, which holds the masters; ``ModelEmaV3(exclude_buffers=True)`` reads the parameters, which are 16-bit: update
    it inside of ``mpinit.float32_weights(model)``.

    Args:
        optimizer: initialised.

    Raises:
        RuntimeError: it is not initialised.

    Example:
        >>> import torch, mpinit
        >>> from mpinit.integrations.timm import Scaler
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
        >>> scaler = Scaler(optimizer)
        >>> scaler(model(torch.ones(1, 4)).sum(), optimizer, clip_grad=1.0, parameters=model.parameters())
        >>> scaler.state_dict()["scale"]
        128.0
        >>> mpinit.undo(model)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._scaler = amp.GradScaler(optimizer)  # timm's own makes torch's

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[nn.Parameter] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Backward, and where ``need_update`` clip and step.

        Args:
            loss: a floating tensor, divided by the number of micro-batches already.
            optimizer: initialised.
            clip_grad: what to clip to; None: gradients stay as they are.
            clip_mode: "norm", "value", or "agc", which clips a gradient by the norm of its float32 master.
            parameters: whose gradients to clip; None: all that ``optimizer`` steps.
            create_graph: for optimizers that differentiate the gradients again.
            need_update: False: more micro-batches of this step follow. The scale moves once for all of them.

        Raises:
            RuntimeError: ``optimizer`` is not initialised.
        """
        masters = _masters(optimizer, parameters)
        super().__call__(loss, optimizer, clip_grad, clip_mode, masters, create_graph, need_update)


def _masters(optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None) -> Iterator[nn.Parameter]:
    """Looked up when gradients are clipped, and unscaled."""
    session = registry.of(optimizer)
    if session is None or parameters is None:
        return amp.master_params(optimizer) if parameters is None else iter(parameters)
    given: Any = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return session.managed(optimizer).master_params(given)
