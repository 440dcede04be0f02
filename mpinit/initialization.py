"""The functions that begin, extend and end sessions: ``initialize``, ``add_optimizers``, ``undo``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, Literal, Never, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from . import checks, registry
from .basics.patching import UndoStack, for_each, undo_dropped
from .config.loss_scale import DynamicLossScale
from .config.plan import CastPolicy, make_plan
from .config.properties import KeptInputs, KeptModules, Properties
from .config.reading import DEFAULT_LEVEL, NO_PROPERTIES, PROPERTIES, Config, check_names, resolve
from .distributed.ddp import compare_disabled
from .distributed.sharding import is_distributed
from .pretrained import save_in_float32
from .session import Session

# One of them, or a list or tuple: objects are returned with the type that they were passed with.
Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])
Level = Literal["O0", "O1", "O2", "O3", "O4", "O5"] | str
Dtype = torch.dtype | Literal["float16", "fp16", "half", "bfloat16", "bf16", "float32", "fp32", "float"]
Others = ParamSpec("Others")


class _Initialize(Protocol[Others]):
    """For type checkers: what comes back from :func:`initialize`; its other parameters are those of its definition."""

    @overload
    def __call__(
        self, models: Models, optimizers: None = None, *args: Others.args, **kwargs: Others.kwargs
    ) -> Models: ...
    @overload
    def __call__(
        self, models: Models, optimizers: Optimizers, *args: Others.args, **kwargs: Others.kwargs
    ) -> tuple[Models, Optimizers]: ...


def _returns_as_passed(function: Callable[Concatenate[Any, Any, Others], Any]) -> _Initialize[Others]:
    known: Any = function
    typed: _Initialize[Others] = known
    return typed


@_returns_as_passed  # type: ignore[arg-type]  # mypy wants positional-only parameters where others have any name
def initialize(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    opt_level: Level = DEFAULT_LEVEL,
    *,
    enabled: bool = True,
    cast_model_type: Dtype | Literal[False] | None = None,
    patch_torch_functions: bool | Literal["model"] | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split", "model"] | None = None,
    loss_scale: float | str | DynamicLossScale | None = None,
    cast_model_outputs: Dtype | None = None,
    num_losses: int | None = None,
    verbosity: int | None = None,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = None,
    patch_torch_functions_type: Dtype | None = None,
    keep_fp32: KeptModules | Sequence[KeptModules] | None = None,
    compute_fp32: KeptModules | Sequence[KeptModules] | None = None,
    keep_inputs: KeptInputs | Sequence[KeptInputs] | None = None,
    entry_points: str | Sequence[str] | None = None,
    skip_nonfinite: bool | None = None,
    optimizer_state: Literal["float32", "bfloat16", "int8"] | None = None,
    grad_dtype: Dtype | None = None,
    await_optimizers: bool = False,
    process_group: Any = None,
    config: Config = None,
    **others: Never,
) -> Any:
    """Make models and their optimizers train in mixed precision, in place.

    Keywords override ``config``, which overrides the level. A keyword of None counts as not passed.

    Args:
        models: a module, or a list or tuple of modules; not yet wrapped in DistributedDataParallel or the like.
        optimizers: an optimizer, a list or tuple. None for inference, or if :func:`add_optimizers` gets them later.
        opt_level: "O0" (float32), "O1" (torch functions cast, default), "O2" (16-bit weights, float32 masters), "O3"
            (16-bit throughout), "O4" and "O5" (O1 and O2 in bfloat16).
        enabled: False makes this and all other functions of mpinit do nothing for these objects.
        cast_model_type: dtype of the model's floating parameters, buffers and inputs; False: no cast.
        patch_torch_functions: whether torch functions cast their arguments; "model": only in these models' forward.
        keep_batchnorm_fp32: whether BatchNorm stays float32 in a 16-bit model.
        master_weights: True: the optimizer steps float32 masters of 16-bit weights. "split": the same, stored as the
            bfloat16 weight and 16 more bits. "model": the parameters are float32, forwards use 16-bit casts of them.
        loss_scale: "dynamic", a :class:`DynamicLossScale`, or a fixed number.
        cast_model_outputs: dtype of the model's floating outputs. Default float32.
        num_losses: number of losses with a scale each (``loss_id`` of :func:`scale_loss`). Default 1.
        verbosity: 0: no line at level INFO about what was set up. Default 1.
        min_loss_scale, max_loss_scale: limits of a dynamic scale. Default: those of the DynamicLossScale.
        patch_torch_functions_type: the 16-bit dtype that torch functions run in. Default float16.
        keep_fp32: modules that stay float32: types, dotted names (wildcards allowed) or predicates ``(name, module) ->
            bool``. A name that matches no module is one of parameters or buffers.
        compute_fp32: modules that compute in float32 and return float32, with 16-bit weights. Entries as above.
        keep_inputs: arguments of forward that are not cast, such as targets: names or predicates ``(name, value)``.
        entry_points: methods that you call besides forward, such as "forward_features" or "backbone.features".
        skip_nonfinite: True: a step checks the gradients it is about to use, at any loss scale, and is skipped if one
            is inf or nan. Default False: only a dynamic scale skips.
        optimizer_state: what state is stored as between steps: "float32" (default), "bfloat16" or "int8".
        grad_dtype: torch.float32: gradients of 16-bit weights are float32 already in the backward pass. Default None:
            16-bit as autograd makes them; they become float32 where they are used.
        await_optimizers: True: optimizers are passed to :func:`add_optimizers` later, so every trainable weight gets a
            master now.
        process_group: ranks that must skip a step together though their gradients differ, such as pipeline stages.
        config: a TOML file's path, or a mapping with the names of these keywords and "opt_level".
        **others: none; a keyword that does not exist is refused, with the nearest name.

    Returns:
        The same objects, as one object, list or tuple as they were passed; only the models if ``optimizers`` is None.

    Raises:
        ValueError: bad or contradicting values, or objects that cannot be initialised. Nothing was changed.
        TypeError: arguments that are no modules or optimizers.
        RuntimeError: it was called at O1 or O4 in inference mode.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
        (torch.float16, torch.float32)
        >>> mpinit.undo(model)
    """
    arguments = locals()  # all of them: nothing else has a name yet
    check_names(others, "initialize() has no keyword", also=NO_PROPERTIES)
    return start(
        models,
        optimizers,
        opt_level,
        {name: arguments[name] for name in PROPERTIES},
        config=config,
        enabled=enabled,
        await_optimizers=await_optimizers,
        process_group=process_group,
    )


def _outside_inference_mode(properties: Iterable[Properties] = ()) -> AbstractContextManager[Any]:
    """Return a block outside of inference mode: weights and masters that are made in it cannot be trained.

    Only where there is such a mode to leave, because the end of the block restores the autocast flags of its beginning.

    Raises:
        RuntimeError: it is inference mode, whose end would restore the flags of O1 and O4, too.
    """
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    if any(each.patch_torch_functions is True for each in properties):
        raise RuntimeError(
            "O1 and O4 switch the casts of this thread, and the end of torch.inference_mode() would switch them back: "
            'call mpinit outside of that block, or initialize with patch_torch_functions="model"'
        )
    return torch.inference_mode(False)


def start(
    models: Any,
    optimizers: Any,
    opt_level: Any,
    properties: Mapping[str, Any],
    *,
    config: Config = None,
    enabled: bool = True,
    await_optimizers: bool = False,
    process_group: Any = None,
    cast_policy: CastPolicy = "torch",
) -> Any:
    """Do what :func:`initialize` does. Only the apex face sets ``cast_policy``."""
    model_list = checks.as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else checks.as_optimizers(optimizers)
    if not (model_list or optimizer_list):  # a stage of a pipeline may have an optimizer alone
        raise ValueError("models is an empty list: pass the modules to train")
    for name, value in (("enabled", enabled), ("await_optimizers", await_optimizers)):
        if not isinstance(value, bool):  # "False" of a command line would be true
            raise TypeError(f"{name} must be True or False, not {value!r}")
    level, props = resolve(opt_level, properties, config)
    checks.check_free(model_list, optimizer_list)
    undo_dropped()
    if enabled:
        plan = make_plan(props, cast_policy)
        selection = checks.check(model_list, optimizer_list, plan, await_optimizers, process_group)
        session = Session(level, plan, await_optimizers, process_group)
        failed = UndoStack()
        with _outside_inference_mode([props]):
            try:
                session.apply(selection, optimizer_list, failed)
                registry.add(session)
                if selection.has_16_bit:
                    save_in_float32(session)
                session.begin()
            except BaseException:
                failed.unwind()
                raise
    else:
        if is_distributed():
            compare_disabled(model_list, process_group)
        registry.disable(model_list, optimizer_list)
    return models if optimizers is None else (models, optimizers)


def add_optimizers(optimizers: Optimizers) -> Optimizers:
    """Add optimizers made after :func:`initialize`, with masters, as ``initialize(model, optimizer)`` does.

    At any time, also between steps: a second optimizer may come much later, and one for a part of the weights. Which
    session it joins depends on its parameters. The model may have been moved, compiled or wrapped in the meantime
    (in DistributedDataParallel, for instance); ``fully_shard`` comes before :func:`initialize`.

    Args:
        optimizers: an optimizer over parameters of initialised models, or a list or tuple of them.

    Returns:
        The same objects, as they were passed.

    Raises:
        RuntimeError: the parameters are of no initialised model, or of several sessions. Nothing was changed.
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
    sessions: dict[Session, list[Optimizer]] = {}
    off: list[Optimizer] = []
    for optimizer in listed:
        session = registry.session_for(optimizer)
        (off if session is None else sessions.setdefault(session, [])).append(optimizer)
    with _outside_inference_mode(), UndoStack() as undos:
        for joined, members in sessions.items():
            undos.push(joined.add_optimizers(members))
    for joined in sessions:
        registry.add(joined)
    registry.disable([], off)
    return optimizers


def undo(owners: nn.Module | Optimizer | Sequence[nn.Module | Optimizer]) -> None:
    """Undo what :func:`initialize` did: weights become their float32 masters, bit for bit, and all patches go.

    A weight that has no master, because it is frozen or in no optimizer, keeps its 16-bit rounding.

    Args:
        owners: a model or optimizer, or a list or tuple of them; everything initialised together is undone together.

    Raises:
        ValueError: an object that is not initialised (any more).
        RuntimeError: it was called in a ``scale_loss`` or ``float32_weights`` block, or at O1 or O4 in a
            ``torch.autocast`` block that began after ``initialize``, or in inference mode.
        Exception: a part of it has failed. Everything else was undone; call it again for the part that failed.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> before = model.weight.detach().clone()
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
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
            whole = registry.whole_of(owner)
            nothing = "not initialised, so there is nothing to undo: one undo() reverts a whole initialize() call"
            raise ValueError(f"this {type(owner).__name__} is {whole or nothing}")
    try:
        with _outside_inference_mode(session.properties for session in found):
            for_each(Session.undo, sorted(found, key=lambda session: -session.number))
    finally:
        registry.enable(listed)
    undo_dropped()
