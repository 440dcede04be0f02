"""Apex-style mixed precision for today's PyTorch: one-line initialisation, fp32 masters, loss scaling.

Example:
    >>> import torch, mpinit
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
    >>> with mpinit.scale_loss(model(torch.ones(1, 4)).mean(), optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> mpinit.undo(model)
"""

from . import amp
from .amp import (
    OPT_LEVELS,
    DynamicLossScale,
    GradScaler,
    Properties,
    TrainState,
    add_optimizers,
    clip_grad_norm_,
    describe,
    disable_casts,
    float32_allreduce_hook,
    float32_weights,
    float_function,
    half_function,
    initialize,
    load_state_dict,
    loss_scale,
    master_params,
    promote_function,
    register_float_function,
    register_half_function,
    register_input,
    register_promote_function,
    scale_loss,
    scheduler_step,
    state_dict,
    step_counts,
    step_was_skipped,
    undo,
)
from .compat import install_as_apex
from .inspect.audit import audit
from .inspect.explain import explain
from .inspect.fidelity import fidelity
from .inspect.overflow import overflow_report, watch_overflow

__version__ = "0.4.0"

__all__ = [
    "OPT_LEVELS",
    "DynamicLossScale",
    "GradScaler",
    "Properties",
    "TrainState",
    "__version__",
    "add_optimizers",
    "amp",
    "audit",
    "clip_grad_norm_",
    "describe",
    "disable_casts",
    "explain",
    "fidelity",
    "float32_allreduce_hook",
    "float32_weights",
    "float_function",
    "half_function",
    "initialize",
    "install_as_apex",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "overflow_report",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_input",
    "register_promote_function",
    "scale_loss",
    "scheduler_step",
    "state_dict",
    "step_counts",
    "step_was_skipped",
    "undo",
    "watch_overflow",
]
