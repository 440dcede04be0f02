"""The functions users call: ``from mpinit import amp`` reads as scripts have always read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import checkpoint, checks, registry
from .functions.registration import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .inspect.describe import announce
from .inspect.describe import describe as describing
from .plan import make_plan
from .scaling.scaled_loss import ScaledLoss, Unscaled
from .session import Session
from .settings.opt_levels import OPT_LEVELS
from .settings.properties import Properties
from .settings.resolve import (
    DEFAULT_LEVEL,
    DEFAULT_LIMIT,
    DEFAULT_ONE,
    Config,
    Default,
    is_enabled,
    read_settings,
    resolve,
)
from .torch_internals.native_autocast import disable_casts

__all__ = [
    "OPT_LEVELS",
    "Properties",
    "clip_grad_norm_",
    "describe",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
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


def initialize(
    models: Any,
    optimizers: Any = None,
    opt_level: str = DEFAULT_LEVEL,
    *,
    enabled: bool = True,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    patch_torch_functions_type: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    keep_fp32: Any = None,
    num_losses: int = DEFAULT_ONE,
    min_loss_scale: Any = None,
    max_loss_scale: Any = DEFAULT_LIMIT,
    config: Config = None,
    verbosity: int = DEFAULT_ONE,
    **more: Any,
) -> Any:
    """Make models and their optimizers train in mixed precision, in place.

    Args:
        models: a module, or a list or tuple of modules; not yet wrapped in DistributedDataParallel or the like.
        optimizers: an optimizer, a list or tuple, or None (inference, or an optimizer of your own).
        opt_level: "O0" (float32), "O1" (patched functions, default), "O2" (16-bit weights, float32 masters), "O3"
            (16-bit throughout), "O4" and "O5" (O1 and O2 in bfloat16).
        enabled: False makes this and every other function of mpinit a no-op for these objects.
        cast_model_type: dtype of parameters, buffers and inputs; False: don't cast.
        patch_torch_functions: whether torch functions cast their checks.
        patch_torch_functions_type: the 16-bit dtype they run in. Default float16.
        keep_batchnorm_fp32: whether BatchNorm stays float32 in a 16-bit model.
        master_weights: True, False, or "split" (bfloat16 only): see :class:`Properties`.
        loss_scale: "dynamic" or a positive number. Default the level's; 1.0 where the 16-bit type is bfloat16.
        cast_model_outputs: dtype of floating outputs. Default float32.
        keep_fp32: module types, dotted names with wildcards (of modules, or else of parameters and buffers), or a
            predicate (name, module) -> bool: left in float32.
        num_losses: how many losses have a scaler of their own (``loss_id`` of :func:`scale_loss`).
        min_loss_scale, max_loss_scale: limits of dynamic scaling. Default none and 2**24.
        config: a TOML file's path or a mapping with the same keys; keywords beat it, it beats the level.
        verbosity: 0 nothing, 1 one log line, 2 every first-seen cast of O1 at debug level.
        **more: any other field of :class:`Properties`.

    Returns:
        The objects given, as given: one object, a list or a tuple; only the models where ``optimizers`` is None.

    Raises:
        ValueError: bad or contradicting values, or objects that cannot be initialised. Nothing was changed.
        TypeError: arguments that are no modules or optimizers.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
        (torch.float16, torch.float32)
        >>> mpinit.undo(model)
    """
    given = {key: value for key, value in locals().items() if key in Properties.model_fields} | more
    if isinstance(given["max_loss_scale"], Default):
        given["max_loss_scale"] = None
    model_list = checks.as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else checks.as_list(optimizers, Optimizer, "optimizers")
    on, settings = is_enabled(enabled), read_settings(config, num_losses, verbosity)
    resolved = resolve(opt_level, given, settings.pop("config"))
    if on:
        _set_up(model_list, optimizer_list, resolved, **settings)
        registry.disabled.difference_update([*model_list, *optimizer_list])
    else:
        checks.check_free(model_list, optimizer_list)
        registry.disabled.update([*model_list, *optimizer_list])
    return models if optimizers is None else (models, optimizers)


def _set_up(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    resolved: tuple[str, Properties],
    num_losses: int,
    verbosity: int,
) -> None:
    level, props = resolved
    plan = make_plan(props)
    checks.check(models, optimizers, props, plan)
    came_in_16_bit = checks.names_in_16_bit(models)
    session = Session(models, optimizers, level, props, plan, num_losses, verbosity)
    session.apply()
    registry.add(session)
    announce(session, came_in_16_bit)


def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> ScaledLoss | Unscaled:
    """Context manager around the backward pass: scales the loss, then unscales and checks the gradients.

    On exit the gradients of the optimizers' parameters are unscaled, float32 (on the masters where there are any),
    and added to what was accumulated before. After an inf or nan the next ``optimizer.step()`` does nothing and a
    dynamic scale backs off. After an exception in the body the gradients are what they were before it (where the
    scale is fixed at 1 and nothing is to be unscaled, what ``backward()`` had added by then stays, as in plain torch).

    Args:
        loss: a floating tensor.
        optimizers: the optimizer, or a list of those, whose gradients this backward pass computes.
        loss_id: which of the session's ``num_losses`` scalers to use.
        model: ignored; accepted because scripts pass it.
        delay_unscale: more backward passes of the same step follow: the scale moves once for all of them.
        delay_overflow_check: the scale moves at the next backward pass or step instead of here.

    Yields:
        ``loss.float() * scale``.

    Raises:
        RuntimeError: an optimizer that was not initialised.
        ValueError: no such ``loss_id``, or optimizers of different sessions.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> next(mpinit.master_params(optimizer)).grad.dtype
        torch.float32
        >>> mpinit.undo(optimizer)
    """
    many = [optimizers] if isinstance(optimizers, Optimizer) else checks.as_list(optimizers, Optimizer, "optimizers")
    many = list(dict.fromkeys(many))
    session = registry.shared_session(many)
    if session is None:
        return Unscaled(loss)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}")
    return session.scaled(loss, many, loss_id, delay_unscale or delay_overflow_check)


def master_params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """The parameters whose gradients ``optimizer.step()`` will use: what to clip or look at.

    Args:
        optimizer: an initialised optimizer (or, where disabled, any).

    Yields:
        Float32 masters where there are any, the weights themselves otherwise (with ``master_weights="split"`` too,
        whose weights carry the gradients), in the groups' order.
    """
    session = registry.of(optimizer)
    if session is None:
        for group in optimizer.param_groups:
            yield from group["params"]
        return
    yield from session.controller_of(optimizer).gradient_holders()


def clip_grad_norm_(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the norm of all gradients the next step will use, in place; right at every level.

    Args:
        optimizer: an initialised optimizer.
        max_norm, norm_type, error_if_nonfinite, foreach: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The total norm before clipping, of unscaled gradients: a 0-dimensional tensor on their device.
    """
    return torch.nn.utils.clip_grad_norm_(master_params(optimizer), max_norm, norm_type, error_if_nonfinite, foreach)


def state_dict(optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The loss scalers' state, plain numbers: save it beside the model's and the optimizer's state dicts.

    Args:
        optimizer: of the session meant; None: the only live one.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``; empty where disabled.

    Raises:
        RuntimeError: None was given and there is not exactly one live session; the message lists them.
    """
    session = registry.session_meant(optimizer)
    return {} if session is None else checkpoint.session_state(session)


def load_state_dict(state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
    """Set the loss scalers from a state of :func:`state_dict` (or of a ``torch.amp.GradScaler``), all of them or none.

    A static scale stays what was asked for, whatever was saved; a dynamic one goes on from the saved one.

    Args:
        state: the state.
        optimizer: of the session meant; None: the only live one.

    Raises:
        ValueError: the state does not fit; the message lists the differences, and nothing was changed.
        RuntimeError: as in :func:`state_dict`.
    """
    session = registry.session_meant(optimizer)
    if session is not None:
        checkpoint.load_session_state(session, state)


def loss_scale(optimizer: Optimizer, loss_id: int = 0) -> float:
    """The scale that :func:`scale_loss` uses for this optimizer's loss; 1.0 where disabled."""
    session = registry.session_meant(optimizer)
    return 1.0 if session is None else session.scaler(loss_id).loss_scale()


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Whether the last ``optimizer.step()`` was skipped because of an overflow."""
    session = registry.session_meant(optimizer)
    return session is not None and session.controller_of(optimizer).counts.consecutive > 0


def step_counts(optimizer: Optimizer) -> tuple[int, int]:
    """How many steps were done and how many skipped since initialisation; (0, 0) where disabled."""
    session = registry.session_meant(optimizer)
    if session is None:
        return 0, 0
    counts = session.controller_of(optimizer).counts
    return counts.good, counts.skipped


def describe(owner: Any) -> str:
    """What mpinit does to a model or optimizer and how it fares: level, dtypes, masters, scales, skipped steps.

    Args:
        owner: an initialised model or optimizer.

    Returns:
        A few lines of text.

    Raises:
        RuntimeError: it is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O3", verbosity=0)
        >>> print(mpinit.describe(model).splitlines()[6])
        model 0, Linear: 10 float16 parameters
        >>> mpinit.undo(model)
    """
    return "mixed precision is disabled" if owner in registry.disabled else describing(registry.session_of(owner))


def scheduler_step(scheduler: Any, *args: Any) -> None:
    """``scheduler.step(*args)``, unless the optimizer's last step was skipped."""
    optimizer = scheduler.optimizer
    if registry.of(optimizer) is None or not step_was_skipped(optimizer):
        scheduler.step(*args)


def undo(owners: Any) -> None:
    """Take back what :func:`initialize` did: float32 weights (from the masters, bit for bit), functions, methods.

    Args:
        owners: a model or optimizer, or a list or tuple of them; everything initialised together is undone together.

    Raises:
        ValueError: an object that is not initialised (any more).
    """
    given: Sequence[Any] = list(owners) if isinstance(owners, (list, tuple)) else [owners]
    found: dict[Session, None] = {}
    for owner in given:
        session = registry.of(owner)
        if session is not None:
            found[session] = None
        elif owner not in registry.disabled:
            raise ValueError(f"this {type(owner).__name__} is not initialised, so there is nothing to undo")
    for session in sorted(found, key=lambda session: -session.number):
        session.undo()
    registry.disabled.difference_update(given)
