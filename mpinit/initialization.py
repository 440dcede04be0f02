"""The functions that begin, extend and end sessions: ``initialize``, ``add_optimizers``, ``undo``."""

from collections.abc import Sequence
from typing import Any, TypeVar, Unpack, overload

from torch import nn
from torch.optim import Optimizer

from . import checks, registry
from .basics.logs import log
from .basics.patching import UndoStack, for_each
from .basics.tables import counted
from .plan import make_plan
from .session import Request, Session
from .settings.keywords import Keywords, Level
from .settings.resolve import read_settings, resolve
from .settings.spellings import DEFAULT_LEVEL

# One of them, or a list or tuple: what is given comes back with its type.
Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])


@overload
def initialize(
    models: Models, optimizers: None = None, opt_level: Level = "O1", **keywords: Unpack[Keywords]
) -> Models: ...


@overload
def initialize(
    models: Models, optimizers: Optimizers, opt_level: Level = "O1", **keywords: Unpack[Keywords]
) -> tuple[Models, Optimizers]: ...


def initialize(models: Any, optimizers: Any = None, opt_level: str = DEFAULT_LEVEL, **keywords: Any) -> Any:
    """Make models and their optimizers train in mixed precision, in place.

    Args:
        models: a module, or a list or tuple of modules; not yet wrapped in DistributedDataParallel or the like.
        optimizers: an optimizer, a list or tuple, or None (inference, or an optimizer of your own).
        opt_level: "O0" (float32), "O1" (patched functions, default), "O2" (16-bit weights, float32 masters), "O3"
            (16-bit throughout), "O4" and "O5" (O1 and O2 in bfloat16).
        enabled: False makes this and every other function of mpinit a no-op for these objects.
        await_optimizers: whether optimizers come later, by :func:`add_optimizers`: until then every trainable weight
            keeps its float32 values.
        cast_model_type: dtype of parameters, buffers and inputs; False: don't cast.
        patch_torch_functions: whether torch functions cast their arguments (O1).
        patch_torch_functions_type: the 16-bit dtype they run in. Default float16.
        keep_batchnorm_fp32: whether BatchNorm stays float32 in a 16-bit model.
        master_weights: True, False, "model" (float32 outside of forwards) or "split": see :class:`Properties`.
        loss_scale: "dynamic" or a positive number. Default the level's; 1.0 where the 16-bit type is bfloat16.
        cast_model_outputs: dtype of floating outputs. Default float32.
        keep_fp32: module types, dotted names with wildcards (of modules, or else of parameters and buffers), or a
            predicate (name, module) -> bool: left in float32.
        num_losses: how many losses have a scaler of their own (``loss_id`` of :func:`scale_loss`).
        min_loss_scale, max_loss_scale: limits of dynamic scaling. Default none and 2**24.
        config: a TOML file's path or a mapping with the same keys; keywords beat it, it beats the level.
        verbosity: 0 nothing, 1 and above one log line. :func:`mpinit.explain` says what O1 casts.
        process_group: a process group (of ``torch.distributed``) of ranks whose steps are one, though their
            gradients are not: pipeline stages, models sharded over different meshes, gradients that are averaged by
            hand. All of them skip a step where one overflowed. Default: the ranks that parameters are sharded
            over, or that DistributedDataParallel leaves some parameters to.
        **keywords: those above, and any other field of :class:`Properties`.

    Returns:
        The objects given, as one object, a list or a tuple as they were; only the models where ``optimizers`` is None.

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
    model_list = checks.as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else checks.as_optimizers(optimizers)
    settings, given, from_config = read_settings(keywords)
    level, props = resolve(opt_level, given, from_config)
    checks.check_free(model_list, optimizer_list)
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


def _announce(session: Session, names_in_16_bit: list[str]) -> None:
    """Log in one line what was set up, and in another which weights were 16-bit already."""
    if session.verbosity < 1:
        return
    words = ", ".join(f"{name}={value}" for name, value in session.settings().items())
    log.info("%s: %s", session.describe(), words)
    if names_in_16_bit:
        first = ", ".join(names_in_16_bit[:3])
        log.info("%s: %s came in 16-bit, first %s", session.describe(), counted(len(names_in_16_bit), "weight"), first)


def add_optimizers(optimizers: Optimizers) -> Optimizers:
    """Add optimizers made after :func:`initialize`, with masters, as ``initialize(model, optimizer)`` does.

    At any time, also between steps: a second optimizer may come much later, and one for a part of the weights. Which
    session it joins depends on its parameters. The model may have been moved, compiled or wrapped in the meantime
    (DistributedDataParallel, say); ``fully_shard`` comes before :func:`initialize`.

    Args:
        optimizers: an optimizer over parameters of initialised models, or a list or tuple of them. An empty list: no
            more are going to be added, and weights without one lose their float32 values. A master made for such a
            weight later starts from its 16-bit values.

    Returns:
        The objects given, as given.

    Raises:
        RuntimeError: the parameters are of no initialised model, or of several sessions; or an empty list was given
            and more than one session waits. Nothing was changed.
        ValueError: an optimizer that is initialised already, or cannot be stepped with masters of the session's kind.
        TypeError: arguments that are no optimizers.

    Example:
        >>> import torch, mpinit
        >>> model = mpinit.initialize(torch.nn.Linear(4, 2), opt_level="O5", await_optimizers=True, verbosity=0)
        >>> optimizer = mpinit.add_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model.weight.dtype, next(mpinit.master_params(optimizer)).dtype
        (torch.bfloat16, torch.float32)
        >>> mpinit.undo(model)
    """
    given = checks.as_optimizers(optimizers)
    checks.check_free([], given)
    if not given:
        for awaiting in registry.sessions_awaiting_optimizers():
            awaiting.managed.drop_unclaimed_masters()
        return optimizers
    sessions: dict[Session, list[Optimizer]] = {}
    off: list[Optimizer] = []
    for optimizer in given:
        session = registry.session_for(optimizer)
        (off if session is None else sessions.setdefault(session, [])).append(optimizer)
    with UndoStack() as undos:
        for joined, members in sessions.items():
            undos.push(joined.add_optimizers(members))
    for joined, members in sessions.items():
        joined.finish_adding(members)
        registry.add(joined)
    registry.enable(given)
    registry.disable([], off)
    return optimizers


def undo(owners: nn.Module | Optimizer | Sequence[nn.Module | Optimizer]) -> None:
    """Take back what :func:`initialize` did: float32 weights (from the masters, bit for bit), functions, methods.

    Args:
        owners: a model or optimizer, or a list or tuple of them; everything initialised together is undone together.

    Raises:
        ValueError: an object that is not initialised (any more).
        Exception: a part of it has failed. Everything else was taken back; call it again for the part that failed.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> before = model.weight.detach().clone()
        >>> model = mpinit.initialize(model, opt_level="O2", verbosity=0)
        >>> mpinit.undo(model)
        >>> model.weight.dtype, torch.equal(model.weight, before)
        (torch.float32, True)
    """
    given = [registry.unwrapped(owner) for owner in (owners if isinstance(owners, (list, tuple)) else [owners])]
    found: dict[Session, None] = {}
    for owner in given:
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
        registry.enable(given)
