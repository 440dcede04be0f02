"""One object for ``torch.distributed.checkpoint``: a model, its optimizers and loss scalers, by parameter names."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from . import checkpoint, checks, registry
from .distributed.sharding import is_distributed, is_sharded
from .in_float32 import float32_weights
from .optimizer.members import parameters_of, with_wrapped
from .session import Session

_KEYS: Final = ("model", "optim", "initial", "scalers")


@final
class TrainState:
    """The state of a training run to save, as a ``Stateful`` of ``torch.distributed.checkpoint``.

    The state has the weights in float32, with the masters' values, the optimizer's state, and the loss scales. Weights
    and optimizer state have the names of the model's parameters. The state is the same at every level, and with DDP,
    FSDP2 and tensor parallelism. So a checkpoint loads at another level, into another number of processes, and into
    plain torch. Plain torch's checkpoints load too: the keys are torch's, ``{"model": ..., "optim": ...}``.

    ``dcp.load`` reads into the float32 tensors of the model and optimizer themselves, as in plain torch. Before it
    reads, it refuses files with missing entries or other shapes. :meth:`load_state_dict` checks the whole state before
    it loads anything.

    Args:
        model: the model, also in a wrapper such as DistributedDataParallel or a compiled module.
        optimizer: its optimizer, or several. Default None: only weights are loaded and saved.
        options: ``torch.distributed.checkpoint.state_dict.StateDictOptions``. With ``full_state_dict=True,
            cpu_offload=True``, :meth:`state_dict` returns the full state on rank 0, on the CPU, and an empty one on
            other ranks. With ``broadcast_from_rank0=True`` too, :meth:`load_state_dict` loads rank 0's state on every
            rank. Default None.
        scalers: whether to load and save loss scales, and which state is initial. Files that torch's
            ``get_state_dict`` wrote have neither: pass False. Default True.

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
        not change. For trained weights without optimizer state, because they were not used yet, "optim" has what a step
        with gradients and learning rates of 0 makes, and "initial" names it: the optimizer itself gets none of it, nor
        does one that loads the state. If tensors are sharded, every rank has to call this. With DistributedDataParallel
        one rank is enough.

        Returns:
            ``{"model": {name: tensor}, "optim": {"state": {name: {...}}, "param_groups": [...]}}``, and a list of names
            under "initial". Floating point weights are float32. "scalers" has a row for each loss: (number of losses,
            4) in float64.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        options, session = self._asked(), self._session()
        with self._with_state() as made:
            state: dict[str, Any] = {"model": get_model_state_dict(self._model, options=options)}
            if self._optimizers:
                state["optim"] = self._named(self._optimizers, options)
        if options.full_state_dict and options.cpu_offload and is_distributed() and torch.distributed.get_rank() > 0:
            return {}
        if self._scalers:
            state["initial"] = made
            state["scalers"] = checkpoint.scalers_as_rows(session)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set weights, optimizers and loss scales.

        A weight of the optimizer that has no state in ``state_dict``, or is named under "initial", has none afterwards.
        If tensors are sharded, or rank 0's state is broadcast, every rank has to call this.

        Args:
            state_dict: a result of :meth:`state_dict`, at any level. Or the results of torch's ``get_state_dict(model,
                optimizer)`` under the keys ``"model"`` and ``"optim"``: without ``"scalers"`` the present loss scales
                stay. With ``broadcast_from_rank0`` only rank 0's argument is used.

        Raises:
            TypeError: it is no mapping.
            ValueError: it does not fit. The message lists the differences, and nothing was changed.
            RuntimeError: gradients are scaled at the moment.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        options = self._asked()
        # The same options for this process's parts by names, without gathering.
        of_parts = replace(
            options,
            full_state_dict=False,
            cpu_offload=False,
            broadcast_from_rank0=False,
            flatten_optimizer_state_dict=False,
        )
        from_rank0 = options.broadcast_from_rank0 and is_distributed()
        with self._with_state():
            own_model = get_model_state_dict(self._model, options=of_parts)
            own = [self._named([optimizer], of_parts) for optimizer in self._optimizers]
        state: dict[str, Any] = {}
        parts: Sequence[dict[str, Any]] = [{} for _ in own]
        scalers = refusal = None
        if not from_rank0 or torch.distributed.get_rank() == 0:
            try:
                parts, scalers = self._checked(state_dict, own_model, own, options)
                state = dict(state_dict)
            except (TypeError, ValueError, RuntimeError) as error:
                refusal = error
        if from_rank0:
            scalers, refusal = _of_rank0([scalers, refusal])
        if refusal is not None:
            raise refusal
        for optimizer, mine, part in zip(self._optimizers, own, parts, strict=True):
            _load(optimizer, mine, part, options.ignore_frozen_params, from_rank0)
        weights = list(self._model.parameters())
        models = [model for each in registry.live() if each.has_one_of(weights) for model in each.models]
        # With a full state torch copies straight into the 16-bit shards, so they are made float32 for that time.
        with float32_weights(models) if options.full_state_dict else contextlib.nullcontext():
            # A copy, because torch adds the names of wrappers to the state's keys.
            set_model_state_dict(self._model, dict(state.get("model", {})), options=options)
        session = self._session()
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

    @contextlib.contextmanager
    def _with_state(self) -> Iterator[list[str]]:
        """Complete the optimizers' state by what a step with gradients and learning rates of 0 makes.

        So it has the same keys whether or not a weight was used. At the end optimizers, weights and gradients are as
        before.

        Yields:
            What the optimizers do not have, by torch's names: ``state.NAME`` of a weight, also where none was made, and
            ``param_groups.NAME.KEY`` of a group, with the name of its first weight.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        lacking: dict[Optimizer, list[nn.Parameter]] = {}
        for optimizer in self._optimizers:
            missing = [weight for weight in parameters_of([optimizer]) if not optimizer.state.get(weight)]
            # Without the list of what was made a state is as torch's, which makes it for all weights or for none.
            if missing and (self._scalers or not optimizer.state):
                lacking[optimizer] = missing
        groups = [group for optimizer in lacking for group in optimizer.param_groups]
        holders = with_wrapped([*lacking])
        kept = [{key: state for key, state in holder.state.items() if state != {}} for holder in holders]
        # Some optimizers count their steps in their groups or attributes, under names that the first step adds.
        counted = [*groups, *(group for holder in holders for group in holder.param_groups), *map(vars, holders)]
        before = [dict(each) for each in counted]

        def restore() -> None:
            for each, entries in zip(counted, before, strict=True):
                each.clear()
                each.update(entries)
            for holder, states in zip(holders, kept, strict=True):
                holder.state.update(states)

        gradients = [(weight, weight.grad) for weight in parameters_of(lacking)]
        made: list[str] = []
        try:
            with torch.inference_mode(False):  # a step reads version counters, which inference tensors do not have
                for weight, _ in gradients:
                    weight.grad = None
                for holder in holders:
                    holder.state.clear()
                for optimizer, missing in lacking.items():
                    _create_state(optimizer, missing)
                named = self._named([*lacking], StateDictOptions()) if lacking else {"state": {}, "param_groups": []}
                names = chain.from_iterable(group["params"] for group in named["param_groups"])
                absent = {id(weight) for missing in lacking.values() for weight in missing}
                made += [f"state.{name}" for name, (p, _) in zip(names, gradients, strict=True) if id(p) in absent]
                added = [
                    {key: group[key] for key in group.keys() - old.keys()}
                    for group, old in zip(groups, before, strict=False)
                ]
                for group, more in zip(named["param_groups"], added, strict=True):
                    made += [f"param_groups.{group['params'][0]}.{key}" for key in more if group["params"]]
                restore()
                for group, more in zip(groups, added, strict=True):
                    group.update(more)
                yield made
        finally:
            for holder in holders:
                holder.state.clear()
            restore()
            for weight, gradient in gradients:
                weight.grad = gradient

    def _named(self, optimizers: Sequence[Optimizer], options: Any) -> Any:
        """Return the state of optimizers by names of parameters."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        try:
            return get_optimizer_state_dict(self._model, optimizers, options=options)
        except KeyError as error:
            for optimizer in optimizers:
                other = next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None)
                if other is not None:
                    raise ValueError(
                        f"this {type(optimizer).__name__} keeps state of no parameter, under {other!r}, and "
                        "a TrainState knows state by the names of parameters: save optimizer.state_dict() instead"
                    ) from error
            raise ValueError(
                f"this {type(optimizers[0]).__name__} steps parameters that {type(self._model).__name__} does not "
                "have, and a TrainState knows them by the model's names: pass the model that has them all"
            ) from error

    def _checked(
        self, state: Mapping[str, Any], own_model: Mapping[str, Any], own: Sequence[Mapping[str, Any]], options: Any
    ) -> tuple[list[dict[str, Any]], Any]:
        """Check a state that is about to be loaded.

        Returns:
            The part of each optimizer, and the scalers' state or None.

        Raises:
            TypeError: it is no mapping.
            ValueError: anything does not fit.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"a state is a mapping such as TrainState.state_dict() returns, not {type(state).__name__}: put what "
                "torch's get_state_dict returned under the keys 'model' and 'optim'"
            )
        whole, strict = options.full_state_dict, options.strict and not options.ignore_frozen_params
        expected = ("model", "optim") if own else ("model",)
        faults = [f"there is no {key!r}" for key in expected if key not in state]
        faults += _listed("a state has no", [key for key in state if key not in _KEYS])
        if faults and not state and whole:
            faults = ["there is none on this rank: StateDictOptions(broadcast_from_rank0=True) uses rank 0's"]
        if "model" in state:
            faults += _model_faults(own_model, state["model"], strict, whole)
        initial = state.get("initial", ())
        if not isinstance(initial, (list, tuple)):
            faults.append(f"'initial' is a {type(initial).__name__}, not a list of names")
        parts = []
        for optimizer, mine in zip(self._optimizers, own, strict=True) if "optim" in state else ():
            part, found = _part_of(mine, state["optim"])
            if "initial" in state and not found:
                names = chain.from_iterable(group["params"] for group in mine["param_groups"])
                trained = {name for name, p in zip(names, parameters_of([optimizer]), strict=True) if p.requires_grad}
                unread = trained - part["state"].keys() - {name.removeprefix("state.") for name in initial}
                if options.strict:
                    faults += _listed(_UNREAD.format(type(optimizer).__name__), sorted(unread))
                _drop_initial(part, set(initial))
            parts.append(part)
            faults += found or _entry_faults(mine, part, whole)
        session = self._session()
        if faults:
            raise ValueError(
                f"the state does not fit {'this model' if session is None else session.describe()}, and nothing was "
                f"loaded: {'; '.join(faults[:10])}{f'; and {len(faults) - 10} more' if len(faults) > 10 else ''}. Load "
                "it into the model and optimizer it was saved from, or with StateDictOptions(strict=False)"
            )
        rows = state.get("scalers")
        if rows is None or not self._scalers:
            return parts, None
        scalers = checkpoint.scalers_of_rows(rows)
        return parts, None if session is None else checkpoint.checked_state(session, scalers)


def _create_state(optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> None:
    """Make an optimizer's state for weights that are trained, by a step without hooks; the caller restores all else.

    One gradient stays: torch's functions make no state while there is one.
    """
    for holder in with_wrapped([optimizer]):
        vars(holder).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        for each in (vars(holder), *holder.param_groups):
            each.update({key: value.clone() for key, value in each.items() if type(value) is torch.Tensor})
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    trained = [weight for weight in weights if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if trained and (closure is None or closure.default is not closure.empty):  # LBFGS makes no step without a closure
        accelerator = torch.accelerator.current_accelerator()
        devices = {weight.device for weight in weights if accelerator and weight.device.type == accelerator.type}
        with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"):
            optimizer.step()
    for weight in trained:
        weight.grad = None
    weights[0].grad = torch.zeros_like(weights[0], dtype=weights[0].grad_dtype)


def _of_rank0(values: list[Any]) -> list[Any]:
    """Return rank 0's values on all ranks."""
    sent = list(values)
    torch.distributed.broadcast_object_list(sent, src=0)
    return sent


def _part_of(own: Mapping[str, Any], optim: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the part of a state for one optimizer, by names of parameters, and the reasons why there is none.

    Args:
        own: the optimizer's state now, by names.
        optim: states of several optimizers by names, flattened or not.
    """
    if isinstance(optim, Mapping) and any(str(key).startswith("param_groups.") for key in optim):
        optim = _unflattened(own, optim)
    elif not (isinstance(optim, Mapping) and isinstance(optim.get("state"), Mapping) and "param_groups" in optim):
        return {}, ["the optimizer's state has no 'state' and 'param_groups'"]
    groups, states = optim["param_groups"], optim["state"]
    names = [group["params"] for group in own["param_groups"]]
    saved = {frozenset(group["params"]): group for group in groups}
    faults = [
        # torch matches groups by their names, and silently drops the learning rate of one that does not match.
        f"no group of the optimizer's state has the {len(each)} parameters of group {index} ({', '.join(each[:2])} "
        f"first; groups saved: {', '.join(str(len(group)) for group in saved) or 'none'} parameters)"
        for index, each in enumerate(names)
        if frozenset(each) not in saved
    ]
    # Flattened, a state in a dict of the optimizer's has a name below its parameter's.
    nested = [key for key in states if any(str(key).startswith(f"{name}.") for name in chain(*names))]
    faults += _listed("flattened states in dicts are not loaded:", nested)
    if faults:
        return {}, faults
    return {
        "state": {name: states[name] for name in chain(*names) if name in states},
        "param_groups": [{**saved[frozenset(each)], "params": each} for each in names],
    }, []


def _drop_initial(part: dict[str, Any], initial: Set[str]) -> None:
    """Drop what a step without gradients has made, so that the optimizer makes it in its first step.

    Some optimizers would not go on from it: NAdam has multiplied a product in it, and SGD applies dampening to it.
    """
    part["state"] = {name: each for name, each in part.get("state", {}).items() if f"state.{name}" not in initial}
    part["param_groups"] = [
        {key: value for key, value in group.items() if f"param_groups.{group['params'][0]}.{key}" not in initial}
        for group in part.get("param_groups", ())
    ]


def _unflattened(own: Mapping[str, Any], optim: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of ``flatten_optimizer_state_dict=True`` as the one without, for the weights of one optimizer."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in optim.items():
        part, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        found[part].setdefault(name, {})[entry] = value
    groups = [(group["params"], found["param_groups"].get(group["params"][0])) for group in own["param_groups"]]
    return {
        "state": found["state"],
        "param_groups": [{**entries, "params": names} for names, entries in groups if entries is not None],
    }


def _load(
    optimizer: Optimizer, own: Mapping[str, Any], part: Mapping[str, Any], ignores_frozen: bool, from_rank0: bool
) -> None:
    """Load an optimizer's state by names, of whole tensors or of the shards that this process has.

    Args:
        own: the optimizer's state now, by names.
        part: the state. With ``from_rank0`` only rank 0's is used.
        ignores_frozen: whether frozen weights keep the state that they have.
    """
    names = list(chain.from_iterable(group["params"] for group in own["param_groups"]))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    groups: list[dict[str, Any]] = part.get("param_groups", [])
    loaded: dict[str, Any] = part.get("state", {})
    present = list(loaded)
    if from_rank0:
        groups, present = _of_rank0([groups, present])
    numbered: dict[int, Any] = {}
    for index, (name, weight) in enumerate(zip(names, weights, strict=True)):
        entries = loaded.get(name, {})
        if ignores_frozen and not weight.requires_grad:
            entries = own["state"].get(name, {})
        elif from_rank0 and name in present:
            # One weight after another: the whole state may not fit into a process's memory.
            (entries,) = _of_rank0([{key: _on_cpu(value) for key, value in entries.items()}])
        if not entries:
            continue
        likes = own["state"].get(name, {})
        numbered[index] = {key: _sharded_as(value, likes.get(key, weight)) for key, value in entries.items()}
    first = 0
    for group in groups:
        group["params"] = list(range(first, first := first + len(group["params"])))
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _sharded_as(value: Any, like: Any) -> Any:
    """Return this process's shards of a whole tensor, if another tensor of the same shape is sharded."""
    if not (isinstance(value, torch.Tensor) and is_sharded(like)) or is_sharded(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor, so nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


_NAMED: Final = 5
_UNREAD: Final = (
    "dcp.load could not read the state that {0} had where this was saved, because a {0} without a step does not show "
    "its keys (save TrainState.state_dict() by torch.save instead), of"
)


def _model_faults(own: Mapping[str, Any], loaded: Any, strict: bool, whole: bool) -> list[str]:
    """List the reasons why a model's state cannot be loaded."""
    if not isinstance(loaded, Mapping):
        return [f"the model's state is a {type(loaded).__name__}, not a mapping of names"]
    faults = []
    if strict:
        faults += _listed("the model's state lacks", [name for name in own if name not in loaded])
        faults += _listed("the model has no", [name for name in loaded if name not in own])
    for name, mine in own.items():
        faults += _tensor_faults(repr(name), mine, loaded.get(name), whole)
    return faults


def _entry_faults(own: Mapping[str, Any], part: Mapping[str, Any], whole: bool) -> Iterator[str]:
    """Find states of single weights that cannot be loaded. A weight without one was not used where it was saved."""
    for name, theirs in part["state"].items():
        for key, mine in own["state"].get(name, {}).items():
            # Tensors have to be there. Single numbers may be missing.
            if isinstance(mine, torch.Tensor) and mine.dim() > 0 and theirs and key not in theirs:
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


def _listed(fault: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{fault} {', '.join(map(repr, names[:_NAMED]))}{more}"]
