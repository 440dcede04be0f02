"""The functions that begin, extend and end sessions: ``initialize``, ``add_optimizers``, ``undo``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_overloads, overload

import torch
from torch import nn
from torch.optim import Optimizer

from . import checks, registry
from .basics.logs import log
from .basics.patching import UndoStack, for_each, undo_dropped
from .basics.tables import counted
from .plan import make_plan
from .session import Request, Session
from .settings.keywords import Config, Dtype, KeepFp32, KeepInputs, Level
from .settings.resolve import read_settings, resolve
from .settings.spellings import DEFAULT_LEVEL

# One of them, or a list or tuple: objects are returned with the type that they were passed with.
Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])


@overload
def initialize(
    models: Models,
    optimizers: None = None,
    opt_level: Level = "O1",
    *,
    enabled: bool | str | None = True,
    await_optimizers: bool | str | None = False,
    num_losses: int | str | None = 1,
    config: Config = None,
    verbosity: int | str | None = 1,
    process_group: Any = None,
    cast_model_type: Dtype | Literal[False] | None = None,
    patch_torch_functions: bool | str | None = None,
    patch_torch_functions_type: Dtype | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split", "model", "True", "False"] | None = None,
    loss_scale: float | Literal["dynamic"] | str | None = None,
    cast_model_outputs: Dtype | None = None,
    keep_fp32: KeepFp32 | Sequence[KeepFp32] | None = (),
    keep_inputs: KeepInputs | Sequence[KeepInputs] | None = (),
    entry_points: str | Sequence[str] | None = (),
    cast_policy: Literal["torch", "apex"] | None = "torch",
    cast_scope: Literal["thread", "model"] | None = "thread",
    allow_banned: bool | str | None = False,
    init_loss_scale: float | str | None = 65536.0,
    growth_factor: float | str | None = 2.0,
    backoff_factor: float | str | None = 0.5,
    growth_interval: int | str | None = 2000,
    hysteresis: int | str | None = 1,
    min_loss_scale: float | str | None = None,
    max_loss_scale: float | str | None = 16777216.0,
    max_consecutive_skips: int | str | None = 64,
    skip_nonfinite: bool | str | None = None,
    optimizer_state: Literal["float32", "bfloat16", "int8"] | torch.dtype | None = "float32",
    grad_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
    split_bucket_bytes: int | str | None = 67108864,
) -> Models: ...


@overload
def initialize(
    models: Models,
    optimizers: Optimizers,
    opt_level: Level = "O1",
    *,
    enabled: bool | str | None = True,
    await_optimizers: bool | str | None = False,
    num_losses: int | str | None = 1,
    config: Config = None,
    verbosity: int | str | None = 1,
    process_group: Any = None,
    cast_model_type: Dtype | Literal[False] | None = None,
    patch_torch_functions: bool | str | None = None,
    patch_torch_functions_type: Dtype | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split", "model", "True", "False"] | None = None,
    loss_scale: float | Literal["dynamic"] | str | None = None,
    cast_model_outputs: Dtype | None = None,
    keep_fp32: KeepFp32 | Sequence[KeepFp32] | None = (),
    keep_inputs: KeepInputs | Sequence[KeepInputs] | None = (),
    entry_points: str | Sequence[str] | None = (),
    cast_policy: Literal["torch", "apex"] | None = "torch",
    cast_scope: Literal["thread", "model"] | None = "thread",
    allow_banned: bool | str | None = False,
    init_loss_scale: float | str | None = 65536.0,
    growth_factor: float | str | None = 2.0,
    backoff_factor: float | str | None = 0.5,
    growth_interval: int | str | None = 2000,
    hysteresis: int | str | None = 1,
    min_loss_scale: float | str | None = None,
    max_loss_scale: float | str | None = 16777216.0,
    max_consecutive_skips: int | str | None = 64,
    skip_nonfinite: bool | str | None = None,
    optimizer_state: Literal["float32", "bfloat16", "int8"] | torch.dtype | None = "float32",
    grad_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
    split_bucket_bytes: int | str | None = 67108864,
) -> tuple[Models, Optimizers]: ...


def initialize(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    opt_level: Level = DEFAULT_LEVEL,
    *others: Any,
    **keywords: Any,
) -> Any:
    """Make models and their optimizers train in mixed precision, in place.

    Keywords override the configuration, which overrides the level. A keyword of None counts as not passed.

    Args:
        models: a module, or a list or tuple of modules; not yet wrapped in DistributedDataParallel or the like.
        optimizers: an optimizer, a list or tuple, or None (inference, or an optimizer of your own).
        opt_level: "O0" (float32), "O1" (patched functions, default), "O2" (16-bit weights, float32 masters), "O3"
            (16-bit throughout), "O4" and "O5" (O1 and O2 in bfloat16).
        enabled: False makes this and every other function of mpinit a no-op for these objects. Default True.
        await_optimizers: whether optimizers are added later, by :func:`add_optimizers`. Until then every trainable
            weight keeps its float32 values. Default False.
        num_losses: number of losses that have a scaler each (``loss_id`` of :func:`scale_loss`). Default 1.
        config: a TOML file's path or a mapping with the same keys. Keywords override it, and it overrides the level.
            Default None.
        verbosity: 0: no log lines; 1 and above: one line at level INFO. Default 1.
        process_group: a process group (of ``torch.distributed``) of ranks that step together although they do not share
            gradients: pipeline stages, models sharded over different meshes, gradients that are averaged by hand. All
            of them skip a step if one overflowed. Default None: the ranks over which parameters are sharded, or to
            which DistributedDataParallel leaves some parameters.
        cast_model_type: dtype that the model's floating parameters, buffers and inputs are cast to; None: no cast. As a
            keyword, False means no cast, and None the level's value.
        patch_torch_functions: whether torch functions cast their arguments (O1).
        patch_torch_functions_type: the 16-bit dtype that these functions run in. Default float16.
        keep_batchnorm_fp32: whether BatchNorm stays float32 in a 16-bit model; None at O0 and O1, whose models are
            float32.
        master_weights: True: the optimizer steps float32 masters of 16-bit weights. "split": the same, bit for bit,
            stored as the bfloat16 weight and a 16-bit remainder. "model": the model's parameters stay float32, the
            optimizer steps them, and forwards use 16-bit casts of them. False or None: the optimizer steps the 16-bit
            weights. A weight is its master rounded to nearest: ties to even with True and "model", away from zero with
            "split".
        loss_scale: "dynamic", or a static number above 0.
        cast_model_outputs: dtype of the model's floating outputs. Default None: float32.
        keep_fp32: modules that stay float32: module types, dotted names (wildcards allowed) or predicates ``(name,
            module) -> bool``. A name that matches no module is a name of parameters or buffers. These tensors stay
            float32 in a 16-bit module, whose code must cast them. ``"@router_gates"``, ``"@rotary_tables"``,
            ``"@small_eps_norms"`` and ``"@final_heads"`` are recipes: docs/how-to/model.md.
        keep_inputs: arguments of the models' forwards and entry points that are not cast, such as a loss's targets:
            names (wildcards allowed) or predicates ``(name, value) -> bool``. Positional arguments have the names of
            the signature. A model with a lambda here cannot be pickled.
        entry_points: methods besides ``forward`` that you call from outside, such as "forward_features" or
            "backbone.forward_features". Their inputs and outputs are cast like those of ``forward``. "head.forward" of
            a module inside: its inputs are cast for callers inside of the model, too.
        cast_policy: "torch" (PyTorch's CUDA autocast lists on every device) or the stricter "apex". Default "torch".
        cast_scope: "thread": casts are on in the calling thread. "model": only inside initialised models' forward.
            Default "thread".
        allow_banned: run functions that the cast policy bans in float16. Default False.
        init_loss_scale: the first scale of dynamic scaling. Default 2**16.
        growth_factor: the scale is multiplied by this after ``growth_interval`` good steps. Default 2.
        backoff_factor: the scale is multiplied by this on overflow. Default 0.5.
        growth_interval: number of good steps before the scale grows. Default 2,000.
        hysteresis: the scale backs off at this many overflows. Default 1.
        min_loss_scale: lower limit of a dynamic scale. Default None: no limit.
        max_loss_scale: upper limit of a dynamic scale. Default 2**24.
        max_consecutive_skips: ``step()`` raises after this many skipped steps in a row. Default 64.
        skip_nonfinite: whether to skip a step whose gradients contain inf or nan, on all ranks, also without a dynamic
            loss scale. Weights, optimizer states and schedulers (``scheduler_step``) do not change. Default None: only
            if it costs no device sync: on a CPU and with fused optimizers, but not at O0. The third skip in a row
            warns, and ``max_consecutive_skips`` applies.
        optimizer_state: format of the optimizer's state between steps: "float32" (the optimizer's own), "bfloat16" or
            "int8" (1 byte per number, and 4 per 128 numbers), rounded stochastically. Only for optimizers that update
            each parameter by itself. Default "float32". See docs/explanation/optimizer-states.md.
        grad_dtype: dtype of gradients on 16-bit weights that have masters. torch.float32: from the first backward pass
            on, 2 bytes per parameter more with split masters. Default None: float32 with full masters. With split
            masters bfloat16 after one backward pass, and float32 when a second one is added before a step. In a process
            group they have the weights' dtype, as buckets of DistributedDataParallel do.
        reduce_dtype: torch.float32: DistributedDataParallel sums 16-bit gradients over ranks in float32, a bucket at a
            time, and rounds the mean once. This sends twice the bytes and needs one float32 bucket. Default None: in
            the gradients' dtype. For FSDP2, set ``MixedPrecisionPolicy(reduce_dtype=...)``.
        split_bucket_bytes: float32 bytes that ``master_weights="split"`` and ``optimizer_state`` materialise at a time.
            Default 64 MiB; on a CPU at most 16 MiB, because larger buckets are slower there.

    Returns:
        The same objects, as one object, list or tuple as they were passed; only the models if ``optimizers`` is None.

    Raises:
        ValueError: bad or contradicting values, or objects that cannot be initialised. Nothing was changed.
        TypeError: arguments that are no modules or optimizers.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
        (torch.float16, torch.float32)
        >>> mpinit.undo(model)
    """
    if others:
        raise TypeError(
            "initialize() has three positional arguments: models, optimizers and opt_level. The others are keywords, "
            "such as enabled=True, which is the third argument of apex"
        )
    model_list = checks.as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else checks.as_optimizers(optimizers)
    settings, chosen, from_config = read_settings(keywords)
    level, props = resolve(opt_level, chosen, from_config)
    checks.check_free(model_list, optimizer_list)
    undo_dropped()
    if settings.enabled:
        plan = make_plan(props)
        index, names_in_16_bit = checks.check(model_list, optimizer_list, plan, settings.await_optimizers)
        checks.check_process_group(settings.process_group, index, plan)
        session = Session(model_list, optimizer_list, Request(level, plan, settings))
        failed = UndoStack()
        try:
            session.apply(index, failed)
            registry.add(session)
            _announce(session, names_in_16_bit)
            registry.enable([*model_list, *optimizer_list])
            session.begin()
        except BaseException:
            failed.unwind()
            raise
    else:
        registry.disable(model_list, optimizer_list)
    return models if optimizers is None else (models, optimizers)


def _signature() -> inspect.Signature:
    """Return the signature that ``inspect.signature``, ``help`` and notebooks show: that of the second overload."""
    full = inspect.signature(get_overloads(initialize)[-1])
    models, optimizers, *others = full.parameters.values()
    shown = [
        models.replace(annotation="nn.Module | Sequence[nn.Module]"),
        optimizers.replace(default=None, annotation="Optimizer | Sequence[Optimizer] | None"),
    ]
    return full.replace(parameters=[*shown, *others], return_annotation="Models | tuple[Models, Optimizers]")


vars(initialize)["__signature__"] = _signature()


def _announce(session: Session, names_in_16_bit: list[str]) -> None:
    """Log in one line what was set up, and in another which weights were 16-bit already."""
    if session.verbosity < 1:
        return
    words = ", ".join(f"{name}={value}" for name, value in session.view.settings().items())
    log.info("%s: %s", session.describe(), words)
    if names_in_16_bit:
        first = ", ".join(names_in_16_bit[:3])
        log.info(
            "%s: %s had a 16-bit dtype already, first %s",
            session.describe(),
            counted(len(names_in_16_bit), "weight"),
            first,
        )


def add_optimizers(optimizers: Optimizers) -> Optimizers:
    """Add optimizers made after :func:`initialize`, with masters, as ``initialize(model, optimizer)`` does.

    At any time, also between steps: a second optimizer may come much later, and one for a part of the weights. Which
    session it joins depends on its parameters. The model may have been moved, compiled or wrapped in the meantime
    (in DistributedDataParallel, for instance); ``fully_shard`` comes before :func:`initialize`.

    Args:
        optimizers: an optimizer over parameters of initialised models, or a list or tuple of them. An empty list: no
            more are going to be added, and weights without one lose their float32 values. A master made for such a
            weight later starts from its 16-bit values.

    Returns:
        The same objects, as they were passed.

    Raises:
        RuntimeError: the parameters are of no initialised model, or of several sessions; or an empty list was passed
            and more than one session waits. Nothing was changed.
        ValueError: an optimizer that is initialised already, or cannot be stepped with masters of the session's kind.
        TypeError: arguments that are no optimizers.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O5", await_optimizers=True)
        >>> optimizer = mpinit.add_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model.weight.dtype, next(mpinit.master_params(optimizer)).dtype
        (torch.bfloat16, torch.float32)
        >>> mpinit.undo(model)
    """
    listed = checks.as_optimizers(optimizers)
    checks.check_free([], listed)
    if not listed:
        for awaiting in registry.sessions_awaiting_optimizers():
            awaiting.managed.drop_unclaimed_masters()
        return optimizers
    sessions: dict[Session, list[Optimizer]] = {}
    off: list[Optimizer] = []
    for optimizer in listed:
        session = registry.session_for(optimizer)
        (off if session is None else sessions.setdefault(session, [])).append(optimizer)
    with UndoStack() as undos:
        for joined, members in sessions.items():
            undos.push(joined.add_optimizers(members))
    for joined, members in sessions.items():
        joined.finish_adding(members)
        registry.add(joined)
    registry.enable(listed)
    registry.disable([], off)
    return optimizers


def undo(owners: nn.Module | Optimizer | Sequence[nn.Module | Optimizer]) -> None:
    """Undo what :func:`initialize` did: float32 weights (from the masters, bit for bit), functions, methods.

    Args:
        owners: a model or optimizer, or a list or tuple of them; everything initialised together is undone together.

    Raises:
        ValueError: an object that is not initialised (any more).
        RuntimeError: at O1 or O4 it was called inside of a ``torch.autocast`` block that began after ``initialize``.
        Exception: a part of it has failed. Everything else was undone; call it again for the part that failed.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> before = model.weight.detach().clone()
        >>> model = mpinit.initialize(model, opt_level="O2")
        >>> mpinit.undo(model)
        >>> model.weight.dtype, torch.equal(model.weight, before)
        (torch.float32, True)
    """
    listed = [registry.unwrapped(owner) for owner in (owners if isinstance(owners, (list, tuple)) else [owners])]
    found: dict[Session, None] = {}
    for owner in listed:
        session = registry.of(owner)
        if session is not None:
            found[session] = None
        elif owner not in registry.disabled:
            raise ValueError(
                f"this {type(owner).__name__} is not initialised, so there is nothing to undo: one undo is enough "
                "for all that was initialised in the same call"
            )
    try:
        for_each(Session.undo, sorted(found, key=lambda session: -session.number))
    finally:
        registry.enable(listed)
    undo_dropped()
