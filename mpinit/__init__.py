"""Apex-style mixed precision for today's PyTorch: one-line initialisation, fp32 masters, loss scaling.

Example:
    >>> import torch, mpinit
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> mpinit.undo(model)
"""

from __future__ import annotations

from . import amp
from .amp import (
    OPT_LEVELS,
    Properties,
    clip_grad_norm_,
    describe,
    disable_casts,
    float_function,
    half_function,
    initialize,
    load_state_dict,
    loss_scale,
    master_params,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    scheduler_step,
    state_dict,
    step_counts,
    step_was_skipped,
    undo,
)

__version__ = "0.1.0"

__all__ = [
    "OPT_LEVELS",
    "Properties",
    "__version__",
    "amp",
    "clip_grad_norm_",
    "describe",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "install_as_apex",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "scheduler_step",
    "state_dict",
    "step_counts",
    "step_was_skipped",
    "undo",
]


def install_as_apex() -> None:
    """Let ``from apex import amp`` and its kin, in this process, find mpinit's own equivalents."""
    # Imported here so that importing mpinit does not pay for the compatibility layer.
    from .compat import install_as_apex as install

    install()
