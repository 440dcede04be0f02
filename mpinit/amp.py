"""The functions users call: ``from mpinit import amp`` reads as scripts have always read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import checkpoint, checks, registry
from .autocast.registration import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .autocast.thread_flags import disable_casts
from .basics.input_classes import register_input
from .basics.tables import counted
from .config.loss_scale import DynamicLossScale
from .config.properties import OPT_LEVELS, Properties
from .distributed.float32_allreduce import float32_allreduce_hook
from .distributed.norms import clip_grad_norm_ as clip_norm_
from .grad_scaler import GradScaler
from .in_float32 import float32_weights
from .initialization import add_optimizers, initialize, undo
from .masters.arithmetic import Arithmetic, Sample, compiled_for
from .masters.law import samples_of_split
from .masters.split import SplitMasters
from .optimizer.scaled_loss import ScaledLoss, Unscaled
from .session import Session
from .train_state import TrainState

__all__ = [
    "OPT_LEVELS",
    "DynamicLossScale",
    "GradScaler",
    "Properties",
    "TrainState",
    "add_optimizers",
    "clip_grad_norm_",
    "compile_steps",
    "describe",
    "disable_casts",
    "float32_allreduce_hook",
    "float32_weights",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "loss_scale",
    "master_params",
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
]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> ScaledLoss | Unscaled:
    """Context manager around the backward pass: scales the loss, then unscales and checks the gradients.

    Gradients are ``parameter.grad`` of the model's own parameters, before and after. Those that are there on entry are
    multiplied by the scale, so that autograd adds to them. On exit all are unscaled; with full masters they are float32
    then, unless the scale is 1. If one is inf or nan, the next ``optimizer.step()`` is skipped, and a dynamic scale
    backs off. After an exception in the body gradients are unscaled too; what ``backward()`` had added by then stays,
    as in plain torch.

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
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).mean(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> next(mpinit.master_params(optimizer)).grad.dtype
        torch.float32
        >>> mpinit.undo(optimizer)
    """
    session, many = None, []
    if isinstance(optimizers, Optimizer):
        session, many = registry.own(optimizers), [optimizers]
    if session is None:
        session, many = _shared(optimizers)
    if session is None:
        return Unscaled(loss)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}{_hint_of_loss(loss)}")
    return session.losses.scaled(loss, many, loss_id, delay_unscale or delay_overflow_check)


def _hint_of_loss(loss: Any) -> str:
    """Return a hint for a value that was passed in place of a loss, or ""."""
    if isinstance(loss, (float, int)) or hasattr(loss, "dtype"):
        return ": pass the loss itself, without .item() or .numpy(), whose gradients are computed from it"
    return ": pass the loss of this output, output.loss" if hasattr(loss, "loss") else ""


def _shared(optimizers: Any) -> tuple[Session | None, list[Optimizer]]:
    listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    if any(isinstance(item, nn.Module) for item in listed):
        raise TypeError(
            "optimizers must be a torch.optim.Optimizer, or a list or tuple of them; got a model: scale_loss needs the "
            "optimizer whose gradients this backward pass computes, as mpinit.scale_loss(loss, optimizer)"
        )
    many = list(dict.fromkeys(checks.as_optimizers(optimizers)))
    return registry.shared_session(many), many


def master_params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that ``optimizer.step()`` updates, in float32, with the gradients that it uses.

    Between steps an optimizer's groups contain the model's own parameters, and a step uses their ``grad``, so that
    clipping over these does as well. The masters are the same objects in every iteration: a list of them can be kept.
    After each backward pass a master's ``grad`` is its weight's; assigning it is an error. If you write to a master, it
    is rounded into its weight at the next forward or step.

    Args:
        optimizer: an initialised optimizer (or, where disabled, any).

    Yields:
        Float32 masters where there are any, the weights themselves otherwise (with ``master_weights="split"`` too,
        whose masters are in memory only while a step runs), in the groups' order.

    Raises:
        RuntimeError: gradients are scaled at the moment; a ``float32_weights`` block is open; or a weight and its
            master were changed, differently.
        TypeError: ``optimizer`` is not an optimizer.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> [(tuple(p.shape), p.dtype) for p in mpinit.master_params(optimizer)]
        [((2, 4), torch.float32), ((2,), torch.float32)]
        >>> mpinit.undo(model)
    """
    session = registry.of(optimizer)
    if session is None:
        groups = getattr(optimizer, "param_groups", None)
        if groups is None:
            raise TypeError(
                f"masters and gradients are those of one optimizer: pass it, not {type(optimizer).__name__}"
            )
        for group in groups:
            yield from group["params"]
        return
    yield from session.managed.find(optimizer).master_params()


def clip_grad_norm_(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    process_group: Any = None,
) -> torch.Tensor:
    """Clip the gradients that the next step will use by their total norm, in place; shards of all ranks count.

    The norm is computed in float32, also of 16-bit gradients (O3, O5, split masters). torch's function computes it in
    the gradients' dtype: in float16 a norm above 65,504 is inf, and all gradients become 0.

    Args:
        optimizer: an initialised optimizer.
        max_norm, norm_type, error_if_nonfinite, foreach: as in ``torch.nn.utils.clip_grad_norm_``.
        process_group: the ranks that have the other pipeline stages of the same model, whose gradients count too.
            Default None: the parameters of this process. Shards of FSDP2 and tensor parallelism count in any case.

    Returns:
        The total norm before clipping, of unscaled gradients, as a 0-dimensional float32 tensor on their device.

    Raises:
        RuntimeError: the norm is inf or nan and ``error_if_nonfinite`` is True.
        ValueError: a ``norm_type`` of 0 or below, with parameters of several processes.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5")
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> mpinit.clip_grad_norm_(optimizer, max_norm=1.0)
        tensor(2.)
        >>> next(mpinit.master_params(optimizer)).grad.norm().round(decimals=3)
        tensor(1.)
        >>> mpinit.undo(model)
    """
    session = registry.of(optimizer)
    # ``weight.grad`` is what a step uses: masters are not needed.
    managed = None if session is None else session.managed.find(optimizer)
    parameters = list(master_params(optimizer)) if managed is None else managed.gradients_to_clip()
    return clip_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach, process_group)


def state_dict(optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return the loss scalers' state as plain values. Save it beside the state dicts of the model and the optimizer.

    Args:
        optimizer: an optimizer of the session. Default None: the only live session.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``; with ``"scales": False`` if losses are not
        scaled; empty if mpinit is disabled.

    Raises:
        RuntimeError: None was passed and there is not exactly one live session; the message lists them.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> mpinit.state_dict(optimizer)
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    return {} if session is None else checkpoint.session_state(session)


def load_state_dict(state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
    """Load the loss scalers' state from :func:`state_dict`, or from a ``torch.amp.GradScaler``.

    A static scale does not change. A dynamic scale becomes the saved one. If the saved run did not scale losses, as at
    O0 or O5, a dynamic scale is kept, with a warning.

    Args:
        state: the state.
        optimizer: an optimizer of the session. Default None: the only live session.

    Raises:
        ValueError: the state does not fit; the message lists the differences, and nothing was changed.
        RuntimeError: as in :func:`state_dict`.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}, optimizer)
        >>> mpinit.loss_scale(optimizer)
        1024.0
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    if session is not None:
        checkpoint.load_session_state(session, state)


def loss_scale(optimizer: Optimizer, loss_id: int = 0) -> float:
    """Return the number that :func:`scale_loss` multiplies the loss by. For a dynamic scale this is a device sync.

    Args:
        optimizer: an initialised optimizer.
        loss_id: the number of the loss, below ``num_losses``. Default 0.

    Returns:
        The scale; 1.0 if losses are not scaled or mpinit is disabled.

    Raises:
        RuntimeError: the optimizer is not initialised.
        ValueError: there is no such ``loss_id``.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> mpinit.loss_scale(optimizer)
        65536.0
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    return 1.0 if session is None else session.losses.scaler(loss_id).loss_scale()


def step_was_skipped(optimizer: Optimizer) -> bool:
    """Return whether the last ``optimizer.step()`` was skipped because a gradient was inf or nan.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        True or False; False before the first step and where mpinit is disabled.

    Raises:
        RuntimeError: the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum() * float("inf"), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
        >>> mpinit.step_was_skipped(optimizer), mpinit.step_counts(optimizer), mpinit.loss_scale(optimizer)
        (True, (0, 1), 32768.0)
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    return session is not None and session.managed.find(optimizer).skips.counter.read().consecutive > 0


def step_counts(optimizer: Optimizer) -> tuple[int, int]:
    """Return how many steps were done and how many were skipped since the optimizer was initialised.

    Args:
        optimizer: an initialised optimizer.

    Returns:
        (done, skipped); (0, 0) where mpinit is disabled.

    Raises:
        RuntimeError: the optimizer is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5")
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> mpinit.step_counts(optimizer)
        (1, 0)
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    if session is None:
        return 0, 0
    counts = session.managed.find(optimizer).skips.counter.read()
    return counts.good, counts.skipped


def compile_steps(optimizer: Optimizer) -> None:
    """Compile the arithmetic that split masters and encoded states add to steps, by torch.compile's inductor.

    Steps have the same results, bit for bit, in less time. The functions are compiled once for each device that has
    weights now, which takes some seconds; their results are compared with those of torch's operations on samples. The
    optimizer's own code is not compiled. Applies to all optimizers that were initialised together, until
    :func:`undo`; weights that are moved to another device later are stepped without it.

    Args:
        optimizer: an initialised optimizer, with ``master_weights="split"`` or an ``optimizer_state`` of fewer bytes.

    Raises:
        RuntimeError: the optimizer is not initialised; or there is no compiler for a device, or its results differ.
            Steps are as they were before.
        ValueError: masters and states are plain float32 tensors, so there is nothing to compile.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5", master_weights="split")
        >>> mpinit.compile_steps(optimizer)  # doctest: +SKIP
        >>> mpinit.undo(model)
    """
    session = registry.session_meant(optimizer)
    if session is None:
        return
    masters, states = session.masters, session.managed.shared.states
    parts: list[tuple[Arithmetic, list[Sample]]] = []
    if isinstance(masters, SplitMasters):
        parts.append((masters.run, samples_of_split()))
    if states is not None:
        parts.append((states.run, states.codec.samples()))
    if not parts:
        raise ValueError(
            f"{session.describe()} has float32 masters and states, and there is nothing to compile: compile_steps is "
            'for master_weights="split", optimizer_state="int8" and optimizer_state="bfloat16"'
        )
    devices = {weight.device for managed in session.managed for weight in managed.params.parameters()}
    compiled = [(run, compiled_for(device, samples)) for run, samples in parts for device in devices]
    for run, functions in compiled:
        run.add(functions)


def scheduler_step(scheduler: Any, *args: Any) -> None:
    """Call ``scheduler.step(*args)``, unless the optimizer's last step was skipped.

    Args:
        scheduler: a learning-rate scheduler; its optimizer may be initialised or not.
        *args: arguments of its ``step``, such as the metric of ``ReduceLROnPlateau``.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        >>> with mpinit.scale_loss(model(torch.ones(1, 4)).sum() * float("inf"), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()  # skipped
        >>> mpinit.scheduler_step(scheduler); scheduler.get_last_lr()
        [0.1]
        >>> mpinit.undo(model)
    """
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None:
        raise TypeError(
            f"scheduler_step needs a scheduler with its optimizer in .optimizer, not {type(scheduler).__name__}"
        )
    if registry.of(optimizer) is None or not step_was_skipped(optimizer):
        scheduler.step(*args)


def describe(owner: Any) -> str:
    """Describe how a model or optimizer was initialised, and its steps: properties, steps done and skipped, scales.

    :func:`mpinit.audit` lists where its numbers are, and in which dtypes.

    Args:
        owner: an initialised model or optimizer.

    Returns:
        A few lines of text. Scales and counters are read off the device.

    Raises:
        RuntimeError: it is not initialised.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O3")
        >>> print(mpinit.describe(model).splitlines()[1])
          cast_model_type = torch.float16
        >>> mpinit.undo(model)
    """
    owner = registry.unwrapped(owner)
    return "mixed precision is disabled" if owner in registry.disabled else _described(registry.session_of(owner))


def _described(session: Session) -> str:
    lines = [session.describe(), *(f"  {name} = {value}" for name, value in session.view.settings().items())]
    for index, optimizer in enumerate(session.optimizers):
        done, skipped, in_a_row = session.view.counts(optimizer)
        lines.append(
            f"optimizer {index}, {type(optimizer).__name__}: {counted(done, 'step')} done, {skipped} "
            f"skipped, {in_a_row} of them in a row just now"
        )
    lines += [
        f"loss {index}: scale {scaler.loss_scale():g}, "
        f"{counted(scaler.unskipped, 'good backward pass', 'good backward passes')} since it moved"
        for index, scaler in enumerate(session.scalers)
    ]
    return "\n".join(lines)
