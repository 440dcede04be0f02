"""The sessions of the process, and the objects that belong to each, by weak references: no other state is global."""

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .basics import wrappers
from .basics.weak_references import WeakIdSet
from .session import Session

# Compared by identity, because a module may define == over its tensors.
_owners: MutableMapping[Any, weakref.ref[Session]] = WeakIdKeyDictionary()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()

# Optimizers and models that initialize(enabled=False) was called on: everything is a no-op for them.
disabled: WeakIdSet[Any] = WeakIdSet()


def add(session: Session) -> None:
    """Register a session that is set up, until it is undone or freed."""
    owners = [*with_their_insides(session.models), *session.optimizers]
    for owner in owners:
        _owners[owner] = weakref.ref(session)
    _sessions.add(session)
    enable(owners)


def with_their_insides(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Iterate over models, and those inside of wrappers (a compiled model's own module)."""
    for model in models:
        yield from wrappers.iter_unwrapped(model)


def disable(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Make every function a no-op for these objects."""
    for owner in (*optimizers, *with_their_insides(models)):
        disabled.add(owner)


def enable(owners: Iterable[Any]) -> None:
    """Reverse :func:`disable`, also for the wrappers of these objects and the models inside of them."""
    models = {owner for owner in owners if isinstance(owner, nn.Module)}
    around = [each for each in disabled if isinstance(each, nn.Module) and models & set(with_their_insides([each]))]
    for owner in (*owners, *with_their_insides(around), *with_their_insides(models)):
        disabled.discard(owner)


def unwrapped(owner: Any) -> Any:
    """Return the initialised (or disabled) optimizer or model inside of wrappers; see :mod:`.basics.wrappers`."""
    return wrappers.unwrapped(owner, _is_known)


def _is_known(owner: Any) -> bool:
    try:
        return owner in _owners or owner in disabled
    except TypeError:
        return False


def of(owner: Any) -> Session | None:
    """Return the live session of a model or optimizer, or of the one in a wrapper; None where there is none."""
    owners = wrappers.iter_unwrapped(owner) if isinstance(owner, nn.Module) else [unwrapped(owner)]
    return next((session for session in map(own, owners) if session is not None), None)


def own(owner: Any) -> Session | None:
    """Return the live session of an argument of ``initialize`` itself: faster than :func:`of`, without wrappers."""
    try:
        reference = _owners.get(owner)
    except TypeError:
        return None
    session = None if reference is None else reference()
    return session if session is not None and session.is_live else None


def sharing(module: nn.Module) -> Session | None:
    """Return the live session of a model, of a part of one, or of a module that contains one; None if there is none.

    Raises:
        ValueError: the module has parameters of several sessions.
    """
    found = all_sharing(module)
    if len(found) > 1:
        raise ValueError(
            f"this {type(module).__name__} contains models of several sessions: pass the model of one. The sessions: "
            f"{'; '.join(session.describe() for session in found)}"
        )
    return found[0] if found else None


def all_sharing(module: nn.Module) -> list[Session]:
    """List the live sessions of a model, of the model that a module is a part of, or of the models in a module."""
    session = of(module)
    if session is not None:
        return [session]
    parameters = list(module.parameters())
    return [session for session in live() if session.has_one_of(parameters) or _is_part(module, session)]


def _is_part(module: nn.Module, session: Session) -> bool:
    return any(module is part for model in session.models for part in model.modules())


def whole_of(part: Any) -> str:
    """Describe the initialised model that a module is a part of, for a message; "" if there is none."""
    session = next((each for each in live() if isinstance(part, nn.Module) and _is_part(part, each)), None)
    return "" if session is None else f"a part of an initialised model: pass the whole model of {session.describe()}"


def sessions_of(owners: Iterable[Any], scaled: bool = False) -> list[Session]:
    """List the live sessions of models or optimizers, each once; objects without one are not listed."""
    found = [session for session in dict.fromkeys(map(of, owners)) if session is not None]
    return [session for session in found if session.view.scales_losses or not scaled]


def live() -> list[Session]:
    """List the live sessions, oldest first."""
    return sorted((session for session in _sessions if session.is_live), key=lambda session: session.number)


def session_of(optimizer: Any) -> Session:
    """Return the live session of an optimizer or model.

    Raises:
        RuntimeError: it has none.
        TypeError: it is neither.
    """
    session = of(optimizer)
    if session is None:
        known = "; ".join(session.describe() for session in live()) or "there are none"
        name = type(optimizer).__name__
        if not isinstance(optimizer, nn.Module) and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"pass an initialised model or optimizer, not {name}. Live sessions: {known}")
        if whole := whole_of(optimizer):
            raise RuntimeError(f"this {name} is {whole}")
        raise RuntimeError(
            f"this {name} was not initialised: pass it to mpinit.initialize, or to mpinit.add_optimizers, first. Live "
            f"sessions: {known}"
        )
    return session


def session_for(optimizer: Optimizer) -> Session | None:
    """Return the live session of the models whose parameters a new optimizer has; None where they are disabled."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sessions = [session for session in live() if session.has_one_of(parameters)]
    if len(sessions) == 1:
        return sessions[0]
    name = type(optimizer).__name__
    if sessions:
        raise RuntimeError(
            f"the parameters of this {name} belong to several sessions, and an optimizer steps in one: "
            f"{'; '.join(session.describe() for session in sessions)}. Make one for the parameters of each"
        )
    ids = {id(p) for model in disabled if isinstance(model, nn.Module) for p in model.parameters()}
    if any(id(parameter) in ids for parameter in parameters):
        return None
    known = "; ".join(session.describe() for session in live()) or "there are none"
    raise RuntimeError(
        f"none of the parameters of this {name} belongs to an initialised model: call mpinit.initialize(model, "
        "await_optimizers=True) before mpinit.add_optimizers, and make the optimizer from the parameters that the "
        f"model has then (fully_shard replaces them: call it first). Live sessions: {known}"
    )


def shared_session(optimizers: list[Optimizer]) -> Session | None:
    """Return the session that all the optimizers share; None where they are disabled, or no single session is live."""
    owning = [of(optimizer) for optimizer in optimizers]
    if not owning:
        sessions = live()
        return sessions[0] if len(sessions) == 1 else None
    if owning[0] is None or any(session is not owning[0] for session in owning):
        if all(unwrapped(optimizer) in disabled for optimizer in optimizers):
            return None
        named = " and ".join(dict.fromkeys(session_of(optimizer).describe() for optimizer in optimizers))
        raise ValueError(f"one loss cannot be scaled by {named} at once: pass their optimizers to one initialize call")
    return owning[0]


def session_meant(optimizer: Optimizer | None) -> Session | None:
    """Return the optimizer's session, or without an optimizer the only live session; None where it is disabled."""
    if optimizer is not None:
        return None if unwrapped(optimizer) in disabled else session_of(optimizer)
    sessions = live()
    if len(sessions) == 1:
        return sessions[0]
    if not sessions and len(disabled):
        return None
    known = "; ".join(session.describe() for session in sessions) or "none: call mpinit.initialize first"
    raise RuntimeError(f"which session is meant? Pass an optimizer of it. Live sessions: {known}")
