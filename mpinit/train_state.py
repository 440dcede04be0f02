"""One object for ``torch.distributed.checkpoint``: a model, its optimizers and loss scalers, by parameter names."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from . import checkpoint, checks, registry
from .basics.logs import warn_user
from .basics.tables import counted
from .distributed.sharding import is_distributed, is_sharded, shard
from .in_float32 import float32_weights
from .model.shared_memory import storage_of
from .optimizer.initial_state import with_initial_state
from .optimizer.step import ManagedOptimizer
from .session import Session


@final
class TrainState:
    """The state of a training run to save, as a ``Stateful`` of ``torch.distributed.checkpoint``.

    The state has the weights in float32, with the masters' values, the optimizer's state, and the loss scales. Weights
    and optimizer state have the names of the model's parameters. The state is the same at every level, and with DDP,
    FSDP2 and tensor parallelism. So a checkpoint loads at another level, into another number of processes, and into
    plain torch. Plain torch's checkpoints load too: the keys are torch's, ``{"model": ..., "optim": ...}``.

    ``dcp.load`` reads into the tensors of the model themselves, as in plain torch. Before it reads, it refuses files
    with missing entries or other shapes. :meth:`load_state_dict` checks the whole state before it loads anything.

    Args:
        model: the model, also in a wrapper such as DistributedDataParallel or a compiled module.
        optimizer: its optimizer, or several. Default None: only weights are loaded and saved.
        options: ``torch.distributed.checkpoint.state_dict.StateDictOptions``. With ``full_state_dict=True,
            cpu_offload=True``, :meth:`state_dict` returns the full state on rank 0, on the CPU, and an empty one on
            other ranks. With ``broadcast_from_rank0=True`` too, :meth:`load_state_dict` loads rank 0's state on every
            rank. Default None.
        scalers: whether to load and save loss scales. Files that torch's ``get_state_dict`` wrote have none: pass
            False. Default True.

    Raises:
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.

    Example:
        >>> import copy, torch, mpinit
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = mpinit.initialize(model, optimizer, opt_level="O2")
        >>> state = mpinit.TrainState(model, optimizer)  # dcp.save({"train": state}, checkpoint_id="checkpoint")
        >>> saved = copy.deepcopy(state.state_dict())
        >>> saved["model"]["weight"].dtype
        torch.float32
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> state.load_state_dict(saved)  # dcp.load({"train": state}, checkpoint_id="checkpoint")
        >>> torch.equal(model.weight, saved["model"]["weight"].half())
        True
        >>> mpinit.undo(model)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        options: Any = None,
        scalers: bool = True,
    ) -> None:
        self._model: nn.Module = checks.as_list(model, nn.Module, "the model")[0]
        if model is not self._model:
            raise TypeError("a TrainState is of one model: make one for each, under a name of its own")
        listed = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Iterable) else optimizer
        self._optimizers: list[Optimizer] = checks.as_optimizers(listed)
        self._options = options
        self._scalers = scalers and len(self._optimizers) > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the present state.

        As in torch, tensors that are float32 in the model or optimizer are not copied: copy those that later steps must
        not change. For an optimizer without a step, the state has the zeros with which it will start, and a mark, with
        which a loaded optimizer starts as without a state. The optimizer itself does not change. To make the zeros, one
        copy of the weights is needed for a moment. If tensors are sharded, every rank has to call this. With
        DistributedDataParallel one rank is enough.

        Returns:
            ``{"model": {name: tensor}, "optim": {"state": {name: {...}}, "param_groups": [...]}, "scalers": tensor}``.
            Floating point weights are float32. "scalers" has a row for each loss: (number of losses, 4) in float64.
        """
        options, session = self._asked(), self._session()
        if session is not None:
            session.masters.follow_writes()
        unstepped = [index for index, optimizer in enumerate(self._optimizers) if not optimizer.state]
        state = self._named(options)
        if options.full_state_dict and options.cpu_offload and is_distributed() and torch.distributed.get_rank() > 0:
            return {}
        if self._scalers:
            state["scalers"] = checkpoint.scalers_as_rows(session, unstepped)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set weights, optimizers and loss scales.

        If tensors are sharded, or rank 0's state is broadcast, every rank has to call this.

        Args:
            state_dict: a result of :meth:`state_dict`, at any level. Or the result of torch's ``get_state_dict(model,
                optimizer)``, as a pair or under the keys ``"model"`` and ``"optim"`` (or ``"optimizer"``). Or three
                state dicts under ``"model"``, ``"optimizer"`` and ``"amp"``, as apex's scripts save them. Without
                scalers the present scales stay. With ``broadcast_from_rank0`` only rank 0's argument is used.

        Raises:
            TypeError: it is no mapping.
            ValueError: it does not fit. The message lists the differences, and nothing was changed.
            RuntimeError: gradients are scaled at the moment.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        options = self._asked()
        self._load_written_masters(state_dict)
        sent: list[Any] = [{}, None, [], None]
        from_rank0 = options.broadcast_from_rank0 and is_distributed()
        if not from_rank0 or torch.distributed.get_rank() == 0:
            try:
                checked = self._checked(state_dict, options)
                sent = [*checked, None]
            except (TypeError, ValueError, RuntimeError) as error:
                sent[-1] = error
        state, *verdict = sent
        if from_rank0:
            torch.distributed.broadcast_object_list(verdict, src=0)
        scalers, unstepped, refusal = verdict
        if refusal is not None:
            raise refusal
        for optimizer in self._optimizers:
            part, how = self._part_of(optimizer, state.get("optim", {}), options)
            with with_initial_state(optimizer, self._managed(optimizer)):
                absent = {} if from_rank0 else self._without_state(optimizer, part, options)
                if absent:
                    # torch raises for a trainable weight without an entry: it gets one, which is dropped again.
                    part = {**part, "state": {**part["state"], **{name: own for name, (_, own) in absent.items()}}}
                set_optimizer_state_dict(self._model, optimizer, part, options=how)
            for weight, _ in absent.values():
                optimizer.state.pop(weight, None)
        session = self._session()
        weights = list(self._model.parameters())
        models = [model for each in registry.live() if each.has_one_of(weights) for model in each.models]
        # With a full state torch copies straight into the 16-bit shards, so they are made float32 for that time.
        with float32_weights(models) if options.full_state_dict else contextlib.nullcontext():
            # A copy, because torch adds the names of wrappers to the state's keys.
            set_model_state_dict(self._model, dict(state.get("model", {})), options=options)
        for optimizer in self._optimizers if not options.ignore_frozen_params else ():
            self._load_frozen(optimizer, state.get("optim", {}), options)
        for index in unstepped:
            # Optimizers create their state in the first step. Some do not start from the state of a step without
            # gradients: NAdam has multiplied a product in it, and SGD applies dampening to it.
            self._optimizers[index].state.clear()
        if scalers is not None and session is not None:
            checkpoint.load_session_state(session, scalers)

    def _asked(self) -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        return self._options or StateDictOptions()

    def _session(self) -> Session | None:
        """Return the session of the optimizers, or None.

        Raises:
            ValueError: the optimizers belong to several sessions.
        """
        sessions = registry.sessions_of(self._optimizers)
        if len(sessions) > 1:
            named = " and ".join(session.describe() for session in sessions)
            raise ValueError(f"the optimizers belong to {named}: make a TrainState for the optimizers of each")
        return sessions[0] if sessions else None

    def _managed(self, optimizer: Optimizer) -> ManagedOptimizer | None:
        session = registry.of(optimizer)
        return None if session is None else session.managed.find(optimizer)

    def _load_written_masters(self, loaded: Any) -> None:
        """Round those masters into their weights to whose memory ``dcp.load`` has written."""
        session = self._session()
        weights = loaded.get("model") if isinstance(loaded, Mapping) else None
        if session is None or not isinstance(weights, Mapping):
            return
        memory = {storage_of(shard(each)) for each in weights.values() if isinstance(each, torch.Tensor)} - {0}
        for master in session.masters:
            if storage_of(shard(master.parameter)) in memory:
                session.masters.load(master, master.parameter.detach())

    def _named(self, options: Any) -> dict[str, Any]:
        """Return weights and optimizers' state, by names of parameters."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: dict[str, Any] = {"model": get_model_state_dict(self._model, options=options)}
        parts = [self._named_state(optimizer, options) for optimizer in self._optimizers]
        if parts:
            state["optim"] = parts[0]
        for part in parts[1:]:
            if options.flatten_optimizer_state_dict or not part:
                state["optim"].update(part)
            else:
                state["optim"]["state"].update(part["state"])
                state["optim"]["param_groups"] += part["param_groups"]
        return state

    def _named_state(self, optimizer: Optimizer, options: Any) -> Any:
        """Return an optimizer's state by names of parameters; before the first step, its initial state."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        try:
            with with_initial_state(optimizer, self._managed(optimizer)) as starts:
                state: Any = get_optimizer_state_dict(self._model, optimizer, options=options)
        except KeyError as error:
            raise ValueError(
                f"this {type(optimizer).__name__} steps parameters that {type(self._model).__name__} does not have, "
                "and a TrainState knows them by the model's names: pass the model that has them all"
            ) from error
        if starts:
            optimizer.state.clear()
        return state

    def _part_of(self, optimizer: Optimizer, optim: Any, options: Any) -> tuple[Any, Any]:
        """Return the part of a state for one optimizer, and the options to load it with.

        torch selects the part itself. For an optimizer without state, as SGD, it would raise for missing entries, so
        the part is selected here.
        """
        own = self._named_state(optimizer, _local_options(options))
        if options.flatten_optimizer_state_dict:
            keeps = any(key.startswith("state.") for key in own)
            part = {key: value for key, value in optim.items() if key.startswith("param_groups.")}
        else:
            keeps = len(own["state"]) > 0
            by_params = {frozenset(group["params"]): group for group in optim.get("param_groups", ())}
            groups = [by_params[frozenset(group["params"])] for group in own["param_groups"]] if by_params else []
            part = {"state": {}, "param_groups": groups}
        if keeps:
            return optim, options
        sent = [part]
        if options.broadcast_from_rank0 and is_distributed():
            torch.distributed.broadcast_object_list(sent, src=0)
        return sent[0], _local_options(options)

    def _without_state(self, optimizer: Optimizer, optim: Any, options: Any) -> dict[str, tuple[nn.Parameter, Any]]:
        """Find the weights that a state has in its groups, without an entry: unused ones, or just unfrozen ones.

        Returns:
            The name of a weight -> the weight, and its entry in the optimizer now.
        """
        if "param_groups" not in optim or "state" not in optim:
            return {}
        saved = {name for group in optim["param_groups"] for name in group["params"]} - optim["state"].keys()
        if not saved or not optim["state"]:
            return {}
        own = self._named_state(optimizer, options)
        names = [name for group in own["param_groups"] for name in group["params"]]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        pairs = zip(names, weights, strict=True)
        return {name: (weight, own["state"].get(name, {})) for name, weight in pairs if name in saved}

    def _load_frozen(self, optimizer: Optimizer, optim: Mapping[str, Any], options: Any) -> None:
        """Load the optimizer's state of frozen weights, which torch does not load: unfrozen, they would start without.

        The state is float32, because a 16-bit weight gets a float32 master when it is unfrozen.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if all(weight.requires_grad for weight in weights):
            return
        own = self._named_state(optimizer, replace(_local_options(options), flatten_optimizer_state_dict=False))
        names = [name for group in own["param_groups"] for name in group["params"]]
        frozen = {name: weight for name, weight in zip(names, weights, strict=True) if not weight.requires_grad}
        sent = [_states_of(optim, list(frozen))]
        if options.broadcast_from_rank0 and is_distributed():
            torch.distributed.broadcast_object_list(sent, src=0)
        not_loaded = []
        for name, state in sent[0].items():
            weight = frozen[name]
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            if any(value.shape == weight.shape and is_sharded(value) != is_sharded(weight) for value in tensors):
                not_loaded.append(name)
            else:
                optimizer.state[weight] = {key: _copied(value, weight) for key, value in state.items()}
        if not_loaded:
            warn_user(
                f"the optimizer's state of {', '.join(map(repr, not_loaded[:5]))} was not loaded: these weights are "
                "frozen and sharded, and it is not sharded. Load the state before the weights are frozen"
            )

    def _checked(self, loaded: Any, options: Any) -> tuple[dict[str, Any], Any, list[int]]:
        """Check a state that is about to be loaded.

        Returns:
            The state, the scalers' state or None, and the indices of the optimizers that had made no step.

        Raises:
            ValueError: anything does not fit.
        """
        state = _as_parts(loaded)
        own = self._named(_local_options(options))
        whole, strict = options.full_state_dict, options.strict and not options.ignore_frozen_params
        faults = [f"there is no {key!r}" for key in own if key not in state]
        if faults and not state and whole:
            faults = ["there is none on this rank: StateDictOptions(broadcast_from_rank0=True) uses rank 0's"]
        if "model" in state:
            faults += model_faults(own["model"], state["model"], strict, whole)
        if "optim" in own and "optim" in state:
            state["optim"] = _by_names(state["optim"], own["optim"])
            faults += optimizer_faults(own["optim"], state["optim"], options.strict, whole)
        session = self._session()
        if faults:
            raise ValueError(
                f"the state does not fit {'this model' if session is None else session.describe()}, and nothing was "
                f"loaded: {'; '.join(faults[:10])}{f'; and {len(faults) - 10} more' if len(faults) > 10 else ''}. Load "
                "it into the model and optimizer it was saved from, or with StateDictOptions(strict=False)"
            )
        scalers = state.get("scalers") if self._scalers else None
        unstepped = []
        if isinstance(scalers, torch.Tensor):
            unstepped = checkpoint.unstepped_of_rows(scalers)
            scalers = checkpoint.state_of_rows(scalers)
        if scalers is None or session is None:
            return state, None, unstepped
        return state, checkpoint.checked_state(session, scalers), unstepped


def _as_parts(loaded: Any) -> dict[str, Any]:
    """Return a state under the names of :meth:`TrainState.state_dict`."""
    if isinstance(loaded, tuple) and len(loaded) == 2:
        loaded = dict(zip(("model", "optim"), loaded, strict=True))
    if not isinstance(loaded, Mapping):
        raise TypeError(
            f"a state is a mapping such as TrainState.state_dict() returns, or what torch's get_state_dict did, not "
            f"{type(loaded).__name__}"
        )
    state = dict(loaded)
    for before, now in (("optimizer", "optim"), ("amp", "scalers")):
        if before in state and now not in state:
            state[now] = state.pop(before)
    unknown = [key for key in state if key not in ("model", "optim", "scalers")]
    if unknown:
        raise ValueError(
            f"a state has 'model', 'optim' and 'scalers'; nothing was loaded, because this one has "
            f"{', '.join(map(repr, unknown[:5]))}: pass the part that TrainState.state_dict() returned"
        )
    return state


def _by_names(loaded: Any, own: Mapping[str, Any]) -> Any:
    """Rename the parameters of an ``optimizer.state_dict()``, which numbers them in the order of its groups."""
    groups = loaded.get("param_groups") if isinstance(loaded, Mapping) else None
    if not isinstance(groups, list) or "param_groups" not in own:
        return loaded
    numbers, names = ([each["params"] for each in one] for one in (groups, own["param_groups"]))
    if list(map(len, numbers)) != list(map(len, names)) or not all(
        isinstance(n, int) for each in numbers for n in each
    ):
        return loaded
    named = dict(zip(chain(*numbers), chain(*names), strict=True))
    return {
        "state": {named[number]: state for number, state in loaded["state"].items()},
        "param_groups": [group | {"params": each} for group, each in zip(groups, names, strict=True)],
    }


def _local_options(options: Any) -> Any:
    """Return the same options for local shards, without gathering."""
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _states_of(optim: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the states of some weights by their names, from a state that is flattened or not."""
    if "param_groups" in optim:
        states = optim.get("state", {})
        return {name: dict(states[name]) for name in names if isinstance(states.get(name), Mapping)}
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in optim.items():
        weight, _, entry = key.removeprefix("state.").rpartition(".")
        if key.startswith("state.") and weight in found:
            found[weight][entry] = value
    return {name: state for name, state in found.items() if state}


def _copied(value: Any, weight: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == weight.shape:
        return value.detach().to(weight.device, copy=True)
    return copy.deepcopy(value)


_NAMED: Final = 5


def model_faults(own: Mapping[str, Any], loaded: Any, strict: bool, whole: bool) -> list[str]:
    """List the reasons why a model's state cannot be loaded."""
    if not isinstance(loaded, Mapping):
        return [f"the model's state is a {type(loaded).__name__}, not a mapping of names"]
    faults = []
    if strict:
        faults += _named("the model's state lacks", [name for name in own if name not in loaded])
        faults += _named("the model has no", [name for name in loaded if name not in own])
    for name, mine in own.items():
        faults += _tensor_faults(repr(name), mine, loaded.get(name), whole)
    return faults


def optimizer_faults(own: Mapping[str, Any], loaded: Any, strict: bool, whole: bool) -> list[str]:
    """List the reasons why the optimizers' state cannot be loaded."""
    if not isinstance(loaded, Mapping):
        return [f"the optimizer's state is a {type(loaded).__name__}, not a mapping"]
    if "state" not in own:
        missing = [key for key in own if key not in loaded and (strict or key.startswith("param_groups."))]
        faults = _named("the optimizer's state lacks", missing)
        for key, mine in own.items():
            faults += _tensor_faults(repr(key), mine, loaded.get(key), whole)
        return faults
    if not isinstance(loaded.get("state"), Mapping) or not isinstance(loaded.get("param_groups"), list):
        return ["the optimizer's state has no 'state' and 'param_groups'"]
    faults = [*_group_faults(own["param_groups"], loaded["param_groups"])]
    if strict:
        # A weight in a saved group had no entry where it was saved: no step has used it.
        had_none = {name for group in loaded["param_groups"] for name in group["params"]} if loaded["state"] else set()
        absent = [name for name in own["state"] if name not in loaded["state"] and name not in had_none]
        faults += _named("the optimizer's state has none for", absent)
        faults += _unwanted(own, loaded)
    return [*faults, *_entry_faults(own, loaded, whole)]


def _group_faults(own: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> Iterator[str]:
    """Find groups that no saved group matches: torch matches by names, and silently drops their learning rate."""
    found = [set(group.get("params", ())) for group in loaded]
    for index, group in enumerate(own):
        names = set(group["params"])
        if names not in found:
            sizes = ", ".join(str(len(each)) for each in found) or "none"
            yield (
                f"no group of the optimizer's state has the {counted(len(names), 'parameter')} of group {index} "
                f"({', '.join(group['params'][:2])} first; groups saved: {sizes} parameters)"
            )


def _unwanted(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[str]:
    for index, group in enumerate(own["param_groups"]):
        kept = [name for name in group["params"] if loaded["state"].get(name)]
        if kept and not any(name in own["state"] for name in group["params"]):
            keys = ", ".join(map(str, loaded["state"][kept[0]]))
            yield f"the optimizer's state has {keys} for {kept[0]!r}, and here group {index} keeps nothing"


def _entry_faults(own: Mapping[str, Any], loaded: Mapping[str, Any], whole: bool) -> Iterator[str]:
    for name, entries in own["state"].items():
        theirs = loaded["state"].get(name, {})
        for key, mine in entries.items() if isinstance(theirs, Mapping) else ():
            # Tensors have to be there. Single numbers may be missing.
            if theirs and isinstance(mine, torch.Tensor) and mine.dim() > 0 and key not in theirs:
                yield f"the optimizer's state of {name!r} has no {key!r}, but {', '.join(map(str, theirs))}"
            yield from _tensor_faults(f"{key!r} of {name!r}", mine, theirs.get(key), whole)


def _tensor_faults(what: str, mine: Any, loaded: Any, whole: bool) -> Iterator[str]:
    # A single number, such as a count of steps, is kept as one or as a tensor.
    if not isinstance(mine, torch.Tensor) or loaded is None or mine.dim() == 0:
        return
    if not isinstance(loaded, torch.Tensor):
        yield f"{what} is a {type(loaded).__name__}, not a tensor"
    elif mine.shape != loaded.shape:
        yield f"{what} has the shape {tuple(loaded.shape)}, and here {tuple(mine.shape)}"
    elif is_sharded(loaded) and not is_sharded(mine):
        yield f"{what} is sharded, and here it is not: gather it with options=StateDictOptions(full_state_dict=True)"
    elif is_sharded(mine) and not is_sharded(loaded) and not whole:
        yield f"{what} is sharded here, and not in the state: load with options=StateDictOptions(full_state_dict=True)"


def _named(fault: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{fault} {', '.join(map(repr, names[:_NAMED]))}{more}"]
