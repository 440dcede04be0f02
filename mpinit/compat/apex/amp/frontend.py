"""initialize, state_dict and load_state_dict with apex's signatures."""

import warnings
from collections import OrderedDict, deque
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

from torch.optim import Optimizer

from .... import amp as mp
from ....basics.logs import log
from ... import _core
from ._amp_state import _amp_state, training_session

Properties = mp.Properties
opt_levels = mp.OPT_LEVELS
_NOT_PROPERTIES = ("models", "optimizers", "enabled", "opt_level")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: Any = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    patch_torch_functions_type: Any = None,
) -> Any:
    """Initialise models and optimizers for mixed precision, as :func:`mpinit.initialize` does.

    Args:
        models: a model, or a list of models.
        optimizers: an optimizer, a list of optimizers, or None. Default None.
        enabled: False: do nothing and return the arguments. Default True.
        opt_level: "O0" to "O3"; also "O4" and "O5", which are O1 and O2 in bfloat16. Default "O1".
        verbosity: 0 to 2; False is 0, and True is 1. Default 1.
        patch_torch_functions_type: the 16-bit dtype of functions at O1 and O4. Only ROCm's apex has it, as the argument
            before ``keep_batchnorm_fp32``: pass it by name.
        cast_model_type and the others: as in :func:`mpinit.initialize`, in apex's order. Default None: the level's.

    Returns:
        The same objects as in the arguments: ``models``, or ``(models, optimizers)`` unless ``optimizers`` is None.

    Raises:
        RuntimeError: there is no such level.
    """
    keywords = {name: value for name, value in locals().items() if name not in _NOT_PROPERTIES}
    _amp_state.disabled = not enabled
    _amp_state.verbosity = keywords["verbosity"] = int(verbosity) if isinstance(verbosity, bool) else verbosity
    if not enabled:
        return models if optimizers is None else (models, optimizers)
    if not isinstance(opt_level, str) or opt_level not in opt_levels:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}. Options are {', '.join(map(repr, opt_levels))}. "
            "The prefix O is the letter O, not the number zero"
        )
    _core.resolve(opt_level, keywords)  # arguments that are refused end no session
    many, own = (list(each) if isinstance(each, (list, tuple)) else [each] for each in (models, optimizers))
    own = [optimizer for optimizer in own if optimizer is not None]
    _end_earlier_sessions(many, own)
    with warnings.catch_warnings():
        if _amp_state.allow_incoming_model_not_fp32:
            warnings.simplefilter("ignore", UserWarning)
        result = _core.start(models, optimizers, opt_level, keywords, cast_policy="apex")
    for optimizer in own:
        attach(optimizer)
    if own:
        _share_scalers(_core.session_of(own[0]))
    return result


def _end_earlier_sessions(models: list[Any], optimizers: list[Any]) -> None:
    """End the earlier session of models that are initialised again, as scripts do between two phases of training.

    A session goes on if one of its optimizers is passed again or one of its models is not. Then mpinit's own error
    follows, which names the way out.
    """
    for model in models:
        earlier = _core.session_of(model)
        if earlier is None or any(optimizer in earlier.optimizers for optimizer in optimizers):
            continue
        if all(any(own is model for model in models) for own in earlier.models):
            log.info("%s is initialised again: its earlier session ends", type(model).__name__)
            mp.undo(model)


def _share_scalers(session: Any) -> None:
    """Make earlier sessions of this face use a session's loss scalers: apex has one list of scalers."""
    for earlier in _core.live_sessions():
        if earlier.optimizers and earlier.view.cast_policy == "apex":
            earlier.scalers[:] = session.scalers


def state_dict(destination: MutableMapping[str, Any] | None = None) -> MutableMapping[str, Any]:
    """Return the loss scalers' state: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    It is empty if amp is disabled, and no model or optimizer was initialised before.

    Args:
        destination: a mapping to fill and return. Default None: a new one.
    """
    saved: MutableMapping[str, Any] = OrderedDict() if destination is None else destination
    if not _amp_state.has_no_scalers:
        for index, scaler in enumerate(_amp_state.loss_scalers):
            saved[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return saved


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load a state that :func:`state_dict` returned. If the number of losses differs, load the first ones.

    Args:
        state_dict: the saved state.

    Raises:
        RuntimeError: it has other keys, or a scaler's state is not valid.
    """
    if _amp_state.has_no_scalers:
        return
    session = training_session()
    saved = [value for key, value in state_dict.items() if "loss_scaler" in key]
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    in_use = mp.state_dict(owner := (*session.optimizers, *session.models)[0])
    if len(saved) != len(in_use):
        log.warning("the saved amp state has %d loss scalers, and %d are in use", len(saved), len(in_use))
    try:
        if unexpected:
            raise ValueError("; ".join(f"unexpected key {key!r}" for key in unexpected))
        mp.load_state_dict(in_use | dict(zip(in_use, saved, strict=False)), owner)
    except ValueError as error:
        raise RuntimeError(
            f"Error(s) in loading state_dict: {error}. Pass load_state_dict what amp.state_dict() returned"
        ) from None


class AmpStash:
    """The object at ``optimizer._amp_stash``; scripts set its :attr:`lazy_init_called`.

    Attributes:
        lazy_init_called: whether masters exist. Always True here: ``initialize`` makes them.
    """

    lazy_init_called = True

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError that names the replacement of apex's lists of parameters."""
        raise AttributeError(
            f"_amp_stash.{name} is not part of the apex that mpinit provides: optimizer.param_groups has the model's "
            "own parameters, and amp.master_params(optimizer), in the same order, what the optimizer steps for each"
        )


def attach(optimizer: Optimizer) -> None:
    """Set ``_amp_stash`` and apex's private methods on an optimizer. A second call does no harm."""
    target: Any = optimizer
    target._amp_stash = AmpStash()
    target._amp_lazy_init = target._lazy_init_maybe_master_weights = lambda: None
    # Calling master_params() rounds masters that a script has written to into their weights.
    target._master_params_to_model_params = lambda: deque(mp.master_params(optimizer), maxlen=0)
