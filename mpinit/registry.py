"""Which session an object belongs to: the only process-wide state about sessions, known weakly."""

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .basics import wrappers
from .basics.weak_set import WeakIdSet
from .session import Session

# By identity: a module may define == over its tensors.
_owners: MutableMapping[Any, weakref.ref[Session]] = WeakIdKeyDictionary()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()

# Optimizers and models that initialize(enabled=False) was called on: everything is a no-op for them.
disabled: WeakIdSet[Any] = WeakIdSet()


def add(session: Session) -> None:
    """Take a session in whose ``apply`` is done; it leaves by being undone or dropped."""
    for owner in (*with_their_insides(session.models), *session.optimizers):
        _owners[owner] = weakref.ref(session)
    _sessions.add(session)


def with_their_insides(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Models, and those in the wrappers among them (a compiled model's own module): either stands for the other."""
    for model in models:
        yield from wrappers.with_all_inside(model)


def disable(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """From here on everything is a no-op for these."""
    disabled.update([*with_their_insides(models), *optimizers])


def enable(owners: Iterable[Any]) -> None:
    """No longer; nor for what is around one of them, or inside."""
    models = {owner for owner in owners if isinstance(owner, nn.Module)}
    around = [each for each in disabled if isinstance(each, nn.Module) and models & set(with_their_insides([each]))]
    disabled.difference_update([*owners, *with_their_insides(around), *with_their_insides(models)])


def unwrapped(given: Any) -> Any:
    """The initialised (or disabled) optimizer or model inside of whatever is around it; see :mod:`.basics.wrappers`."""
    return wrappers.unwrapped(given, _is_known)


def _is_known(owner: Any) -> bool:
    try:
        return owner in _owners or owner in disabled
    except TypeError:
        return False


def of(owner: Any) -> Session | None:
    """The live session of a model or optimizer, or of the one in a wrapper; None where there is none."""
    owners = wrappers.with_all_inside(owner) if isinstance(owner, nn.Module) else [unwrapped(owner)]
    return next((session for session in map(own, owners) if session is not None), None)


def own(owner: Any) -> Session | None:
    """:func:`of` for what was given to ``initialize`` itself: wrappers are not looked into, which takes time."""
    try:
        reference = _owners.get(owner)
    except TypeError:
        return None
    session = None if reference is None else reference()
    return session if session is not None and session.is_live else None


def sessions_of(owners: Iterable[Any], scaled: bool = False) -> list[Session]:
    """The live sessions of models or optimizers, each once; others are passed over."""
    found = [session for session in dict.fromkeys(map(of, owners)) if session is not None]
    return [session for session in found if not (scaled and all(scaler.is_identity for scaler in session.scalers))]


def live() -> list[Session]:
    """The live sessions, oldest first."""
    return sorted((session for session in _sessions if session.is_live), key=lambda session: session.number)


def session_of(optimizer: Any) -> Session:
    """The live session of an optimizer or model; a RuntimeError that lists the sessions where it has none."""
    session = of(optimizer)
    if session is None:
        known = "; ".join(session.describe() for session in live()) or "there are none"
        first = "mpinit.initialize" + (", or to mpinit.add_optimizers," if any(each.awaits for each in live()) else "")
        raise RuntimeError(
            f"this {type(optimizer).__name__} was not initialised: pass it to {first} first. Live sessions: {known}"
        )
    return session


def session_for(optimizer: Optimizer) -> Session | None:
    """The live session whose models' parameters a new optimizer has; None where those models are disabled."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sessions = [session for session in live() if session.holds_one_of(parameters)]
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


def the_one_that_waits() -> list[Session]:
    """The live session in which weights wait for an optimizer; none where there is none."""
    waiting = [session for session in live() if session.awaits]
    if len(waiting) > 1:
        named = "; ".join(session.describe() for session in waiting)
        raise RuntimeError(
            f"which session is meant? Optimizers are awaited by {named}: "
            "add the optimizers of all but one, or call mpinit.undo on those that are done with"
        )
    return waiting


def shared_session(optimizers: list[Optimizer]) -> Session | None:
    """The session that all the optimizers share; None where they are disabled, or there is none to speak of."""
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
    """The optimizer's session, or without one the only live session; None where disabled."""
    if optimizer is not None:
        return None if unwrapped(optimizer) in disabled else session_of(optimizer)
    sessions = live()
    if len(sessions) == 1:
        return sessions[0]
    if not sessions and len(disabled):
        return None
    known = "; ".join(session.describe() for session in sessions) or "none: call mpinit.initialize first"
    raise RuntimeError(f"which session is meant? Give an optimizer of it. Live sessions: {known}")
