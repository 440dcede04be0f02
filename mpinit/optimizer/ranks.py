"""The agreement of several processes: on settings, float32 values, whether a step is done, and loss scales."""

import enum
import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..basics.patching import Undo, UndoStack, for_each
from ..distributed.agreement import Group, agree, check_same, device_for, groups_of, meshes_of, ranks_agree, union
from ..distributed.replicas import (
    WRAPPERS,
    Event,
    broadcast,
    delayed_by,
    hooks_of,
    is_joining,
    reduce_in_float32,
    reduced_by,
    refuse_training,
    synced_by,
    syncs_when_made,
)
from ..distributed.sharding import fsdp1_refusal, has_other_processes, is_distributed, is_sharded
from ..model.boundary import ForwardGuard
from ..model.casting import TensorCasts
from ..scaling.scaler import LossScaler
from ..torch_internals.running import current_pass
from .gradient_state import agreed
from .gradients import Gradients
from .members import Members
from .unreduced import UnreducedGradients

# Compared beside the keywords.
OPTIMIZERS: Final = "the optimizer's class"
# The names under which wrappers register a model.
_INSIDE_FSDP1: Final = "_fsdp_wrapped_module"
_INSIDE: Final = frozenset({"module", _INSIDE_FSDP1})
# The settings that may differ between the stages of a pipeline.
_OF_A_STAGE: Final = frozenset({"keep_fp32", "keep_inputs", "entry_points", "keep_batchnorm_fp32", OPTIMIZERS})

_NOT_TIED: Final = (
    "there are {} other processes, and mpinit cannot know whether they train the same model: the model is in no "
    "DistributedDataParallel, and is not sharded. If you average gradients by hand, pass process_group="
    "torch.distributed.group.WORLD to mpinit.initialize; without it an overflow on one rank would be skipped there "
    "alone, and the scales would differ. If every process trains a model of its own, pass process_group="
    "torch.distributed.new_subgroups(group_size=1)[0]"
)
_INSIDE_BACKWARD: Final = (
    "optimizer.step() was called inside of backward(), and gradients are added up over ranks when that is over: every "
    "rank would step by its own. Call it after backward(), or train in one process"
)
_NOT_LOADED: Final = (
    "the loss scales of this rank were loaded after its model was wrapped in DistributedDataParallel, and not all "
    "other ranks have loaded the same: the gradients that they reduce together carry different scales. Load on every "
    "rank, or one state for all of them, by mpinit.TrainState with StateDictOptions(broadcast_from_rank0=True)"
)


class WrapperStatus(enum.Enum):
    """The status of a DistributedDataParallel in a session."""

    AGREED = "its ranks have agreed"
    PENDING = "its ranks agree at the first step"
    OF_OTHERS = "it reduces no gradients of the session's models"


class Wrappers:
    """The DistributedDataParallel wrappers around the models of a session.

    Attributes:
        changed: the ids of the parameters whose dtype the session has changed.
    """

    def __init__(self, guard: ForwardGuard) -> None:
        self.changed: set[int] = set()
        self._guard = guard
        self._status: weakref.WeakKeyDictionary[Any, WrapperStatus] = weakref.WeakKeyDictionary()

    def mark(self, wrapper: Any, status: WrapperStatus) -> None:
        """Set the status of a wrapper."""
        self._status[wrapper] = status

    def with_status(self, *statuses: WrapperStatus) -> list[Any]:
        """List wrappers in the order in which they were found, which is the same on all ranks."""
        return [wrapper for wrapper, status in self._status.items() if status in statuses]

    def is_of_models(self, wrapper: Any) -> bool:
        """Return whether a DistributedDataParallel reduces gradients of the models."""
        return not self._guard.parameters().keys().isdisjoint([*reduced_by(wrapper), *delayed_by(wrapper)])

    def is_around(self, wrapper: Any) -> bool:
        """Return whether a DistributedDataParallel is one around the models, and remember one that is older.

        Raises:
            RuntimeError: it was made before ``mpinit.initialize``, for parameters of another dtype.
        """
        status = self._status.get(wrapper)
        if status is not None:
            return status is not WrapperStatus.OF_OTHERS
        if self.changed and any(id(p) in self.changed for p in (*reduced_by(wrapper), *delayed_by(wrapper))):
            name = type(wrapper).__name__
            raise RuntimeError(
                f"this {name} was made before mpinit.initialize, and has recorded the parameters' dtypes: it would not "
                "reduce the gradients of 16-bit weights, and every rank would train by itself. Call mpinit.initialize "
                f"first and wrap the model in {name} afterwards"
            )
        known = self.is_of_models(wrapper)
        self._status[wrapper] = WrapperStatus.PENDING if known else WrapperStatus.OF_OTHERS
        return known


class Ranks:
    """The agreement of a session with the sessions of other processes.

    Sessions agree on three things: the settings; the float32 values of the 16-bit tensors that a wrapper broadcasts;
    and the loss scales. They agree at these times:

    - when a model is wrapped in DistributedDataParallel, and again after ``join()``;
    - at the end of ``initialize``, if parameters are sharded or there is a ``process_group``;
    - at the first step, under a wrapper that broadcasts nothing or is older than the session.

    In every step they agree on overflow, if gradients may differ by rank.

    Attributes:
        guard: what is checked before a forward of the models.
        is_first_step: whether no step was checked yet.
        reduces_in_float32: whether DistributedDataParallel averages 16-bit gradients in float32.
    """

    def __init__(
        self,
        guard: ForwardGuard,
        scalers: Sequence[LossScaler],
        members: list[Members],
        process_group: Group | None,
    ) -> None:
        self.guard = guard
        self._masters = guard.masters
        self._scalers = scalers
        self._members = members
        self._process_group = process_group
        self._groups: tuple[tuple[int, ...], list[Group]] | None = None
        self._casts: TensorCasts | None = None
        self._settings: Mapping[str, str] = {}
        self.reduces_in_float32 = False
        # The wrapper whose __init__ runs, and the versions of its tensors before that broadcasts some of them.
        self._making: tuple[Any, dict[int, int]] | None = None
        self._wrappers = Wrappers(guard)
        self._passes = [0] * len(scalers)
        # When scales were made one, by the sender's clock, steps since then, and how often they had been loaded.
        self._since, self._steps, self._loads = 0.0, 0, 0
        self.is_first_step = True

    @functools.cached_property
    def unreduced(self) -> UnreducedGradients:
        """The gradients that FSDP2 has not reduced yet; ``fully_shard`` is called before ``initialize``."""
        return UnreducedGradients(self.guard.models)

    def watch(
        self, changed: Iterable[torch.Tensor], casts: TensorCasts | None, settings: Mapping[str, str], undos: UndoStack
    ) -> None:
        """Compare the settings of all ranks, and from here on follow DistributedDataParallel around the models."""
        self._wrappers.changed, self._casts, self._settings = set(map(id, changed)), casts, settings
        known = weakref.ref(self)

        def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            ranks = known()
            if ranks is not None and submodule is not None and name in _INSIDE and is_distributed():
                ranks._on_wrapping(module, name, submodule)

        def on_event(event: Event, wrapper: Any) -> None:
            ranks = known()
            if ranks is not None:
                ranks._on_event(event, wrapper)

        removals: list[Undo] = []
        weakref.finalize(self, _call_all, removals).atexit = False
        undos.push(functools.partial(_call_all, removals))
        removals.append(register_module_module_registration_hook(on_registration).remove)
        removals.append(WRAPPERS.add(on_event))
        if is_distributed():
            check_same(settings, {}, groups_of(meshes_of(self.guard.parameters())))
            alike = {name: value for name, value in settings.items() if name not in _OF_A_STAGE}
            check_same(alike, {}, groups_of([], self._process_group))

    def _on_wrapping(self, wrapper: nn.Module, name: str, module: nn.Module) -> None:
        if name == _INSIDE_FSDP1:
            own = {id(part) for model in self.guard.models for part in model.modules()}
            if any(id(part) in own for part in module.modules()):
                raise RuntimeError(fsdp1_refusal("a model of mpinit.initialize"))
        elif isinstance(wrapper, nn.parallel.DistributedDataParallel) and self._wrappers.is_of_models(wrapper):
            self.guard.check_present()
            if syncs_when_made(wrapper):
                self._check_same_under(wrapper)
            self._making = weakref.ref(wrapper), {id(tensor): _version_of(tensor) for tensor in _tensors_of(module)}

    def _on_event(self, event: Event, wrapper: Any) -> None:
        if event is Event.MADE:
            making, self._making = self._making, None
            if making is not None and making[0]() is wrapper:
                self._on_made(wrapper, making[1])
        elif event is Event.JOINED:
            if wrapper in self._wrappers.with_status(WrapperStatus.AGREED):
                self._send(wrapper, synced_by(wrapper), wrapper._authoritative_rank)
                self._send_scales(wrapper, wrapper._authoritative_rank)
        elif self._wrappers.is_around(wrapper) and self.reduces_in_float32:
            reduce_in_float32(wrapper)

    def _on_made(self, wrapper: Any, versions: Mapping[int, int]) -> None:
        # A broadcast writes on every rank, also on the one that sends.
        now = [(tensor, _version_of(tensor)) for tensor in _tensors_of(wrapper.module)]
        sent = [tensor for tensor, version in now if versions.get(id(tensor), version) != version]
        self._send(wrapper, sent, 0)
        if not syncs_when_made(wrapper):
            self._wrappers.mark(wrapper, WrapperStatus.PENDING)
            return
        self._send_scales(wrapper, 0)
        self._wrappers.mark(wrapper, WrapperStatus.AGREED)
        self._groups = None

    def _unite(self, wrapper: Any) -> None:
        """Agree under a wrapper at the first step."""
        self._check_same_under(wrapper)
        if syncs_when_made(wrapper):
            self._send(wrapper, synced_by(wrapper), 0)
        self._send_scales(wrapper, 0)
        self._wrappers.mark(wrapper, WrapperStatus.AGREED)
        self._groups = None

    def _check_same_under(self, wrapper: Any) -> None:
        names = {id(parameter): name for model in self.guard.models for name, parameter in model.named_parameters()}
        parameters = {
            names.get(id(p), f"parameter {index}"): f"{tuple(p.shape)} {p.dtype}"
            + (" with a float32 master" if self._masters.of(p) is not None else "")
            for index, p in enumerate([*reduced_by(wrapper), *delayed_by(wrapper)])
        }
        check_same(self._settings, parameters, [wrapper.process_group])

    @torch.no_grad()
    def _send(self, wrapper: Any, tensors: Sequence[torch.Tensor], src: int) -> None:
        """Send one rank's float32 values of 16-bit tensors to all others: masters, frozen weights, and buffers."""
        group, masters = wrapper.process_group, self._masters
        found = [master for master in map(masters.of, tensors) if master is not None]
        for index, sent in broadcast([functools.partial(masters.values, master) for master in found], src, group):
            masters.load(found[index], sent)
        if self._casts is not None:
            ids = set(map(id, tensors))
            rounded = [tensor for tensor in self._casts.with_more_bits() if id(tensor) in ids]
            values = [functools.partial(self._values_of, tensor) for tensor in rounded]
            for index, sent in broadcast(values, src, group):
                rounded[index].copy_(sent)
                self._casts.load(rounded[index], sent)

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        values = None if self._casts is None else self._casts.original_values(tensor)
        return (tensor if values is None else values).detach().float()

    @torch.no_grad()
    def _send_scales(self, wrapper: Any, src: int) -> None:
        """Send one rank's loss scales to all others.

        Ranks average scaled gradients; one that was resumed by itself, or joined early, has another scale.
        """
        group = wrapper.process_group
        for scaler in self._scalers:
            if scaler.rule.dynamic:
                counters = torch.cat([scaler.counters(), scaler.counters().new_tensor([time.time()])])
                there = counters.to(device_for(group, counters.device))
                torch.distributed.broadcast(there, group=group, group_src=src)
                scaler.load_counters(there[:-1])
                self._since = float(there[-1])
        self._steps, self._loads = 0, sum(scaler.loaded_count for scaler in self._scalers)

    def before_step(self) -> None:
        """Let ranks agree under wrappers that have not agreed yet. All ranks call it before a step.

        Raises:
            RuntimeError: a backward pass is running, or parameters were replaced. With a dynamic scale also: it is
                unknown which other processes train the same model, or scales were loaded on some ranks only.
        """
        if current_pass() != -1 and has_other_processes():
            raise RuntimeError(_INSIDE_BACKWARD)
        if self.is_first_step:
            self.guard.check_present()
            self.guard.log_emulation()
            self.is_first_step = False
        for wrapper in sorted(
            (each for each in self._wrappers.with_status(WrapperStatus.PENDING) if not is_joining(each)),
            key=lambda w: len(reduced_by(w)),
        ):
            self._unite(wrapper)
        self._steps += 1
        if has_other_processes() and not self._groups_to_agree_over() and self._scalers[0].rule.dynamic:
            self._check_same_scales()

    def _check_same_scales(self) -> None:
        if not self._wrappers.with_status(WrapperStatus.AGREED, WrapperStatus.PENDING):
            raise RuntimeError(_NOT_TIED.format(torch.distributed.get_world_size() - 1))
        loads = sum(scaler.loaded_count for scaler in self._scalers)
        if loads != self._loads:
            text = f"mpinit {self._since} {self._steps}: {[scaler.state_dict() for scaler in self._scalers]}"
            for wrapper in (each for each in self._wrappers.with_status(WrapperStatus.AGREED) if not is_joining(each)):
                if not ranks_agree(text, wrapper.process_group):
                    raise RuntimeError(_NOT_LOADED)
            self._loads = loads

    def _stepped(self) -> list[nn.Parameter]:
        for members in self._members:
            if members.generation == 0:
                members.sync_groups()  # of an optimizer to which nothing was done yet
        return [weight for members in self._members for weight in members.weights]

    def united(self, names: Sequence[str]) -> list[str]:
        """Return the names that any rank of those that train the same model passes; all of them call it at one step."""
        if not is_distributed():
            return list(names)
        wrappers = [
            each.process_group for each in self._wrappers.with_status(WrapperStatus.AGREED) if not is_joining(each)
        ]
        groups = groups_of(meshes_of(self.guard.parameters()), self._process_group, *wrappers)
        return union(names, groups)

    def end(self, dtypes: dict[torch.Tensor, torch.dtype]) -> None:
        """Refuse to train with wrappers whose parameters have another dtype than ``dtypes``, those of before."""
        changed = {id(parameter) for parameter, dtype in dtypes.items() if parameter.dtype != dtype}
        for wrapper in self._wrappers.with_status(WrapperStatus.AGREED, WrapperStatus.PENDING):
            if any(id(parameter) in changed for parameter in reduced_by(wrapper)):
                refuse_training(wrapper)

    def agree(self, gradients: Gradients, pending: list[LossScaler]) -> None:
        """Replace what checks found by what all ranks found, in one collective a group, and update the scales.

        Where gradients are the same on all ranks, under DistributedDataParallel with one loss, nothing is sent.

        Args:
            gradients: of the optimizer that is about to step.
            pending: the scalers to update. Those that are due on other ranks are added.

        Raises:
            RuntimeError: ranks that reduce gradients together have scaled them for different losses.
        """
        if is_distributed() and self._scalers[0].rule.skips:
            groups = self._groups_to_agree_over()
            if groups:
                self._agree_over(groups, gradients, pending)
        for scaler in pending:
            scaler.update()

    def _agree_over(self, groups: Sequence[Group], gradients: Gradients, pending: list[LossScaler]) -> None:
        found_inf, scalers = gradients.state.found_inf, self._scalers
        device = found_inf.device if found_inf is not None else scalers[0].device
        zero, one = (torch.full((), value, dtype=torch.float32, device=device) for value in (0.0, 1.0))
        # One vector, of which the largest numbers over all ranks are reduced: whether these gradients overflowed; for
        # each scaler whether its losses' gradients did, and whether its scale is updated at this step, not by a
        # GradScaler; and the numbers that have to be the same, with both signs, which gives the smallest, too.
        found = [zero if found_inf is None else found_inf]
        found += [zero if scaler.found_inf is None else scaler.found_inf.to(device) for scaler in scalers]
        due = [one if scaler in pending else zero for scaler in scalers]
        passes = self._passes_since()
        same = torch.cat([torch.stack([scaler.scale_now().to(device) for scaler in scalers]), passes.to(device)])
        reduced = agree(torch.cat([torch.stack([*found, *due]), same, -same]), groups)
        all_found, all_due, most, least = torch.split(reduced, [len(found), len(due), len(same), len(same)])
        differ = most != -least
        if len(passes) > 0:
            _check_passes(differ[len(scalers) :].tolist())
        # After a scale was loaded on one rank alone, DDP has added up gradients of two scales.
        gradients.apply(agreed, torch.maximum(all_found[0], differ[: len(scalers)].any().float()))
        for index, scaler in enumerate(scalers):
            scaler.copy_scale(-least[index])
            if scaler.found_inf is None:
                # A device sync, for a loss that this rank has not scaled since the last update.
                if all_due[index].item() == 0:
                    continue
                pending.append(scaler)
            scaler.found_inf = all_found[index + 1].to(scaler.device)

    def _passes_since(self) -> torch.Tensor:
        """Return how often each of several losses was scaled since the last step; empty where ranks may differ.

        The stages of a pipeline, which share a process group, may: they reduce no gradients together.
        """
        before, self._passes = self._passes, [scaler.scaled_count for scaler in self._scalers]
        counts = [now - then for now, then in zip(self._passes, before, strict=True)]
        return torch.tensor(counts if len(counts) > 1 and self._process_group is None else [], dtype=torch.float32)

    def _groups_to_agree_over(self) -> list[Group]:
        """List the groups over which overflow is agreed on: those of all parameters, with a gradient or without."""
        wrappers = [wrapper for wrapper in self._wrappers.with_status(WrapperStatus.AGREED) if not is_joining(wrapper)]
        key = (*(members.generation for members in self._members), len(wrappers))
        if self._groups is None or self._groups[0] != key:
            stepped = self._stepped()
            reduced = {id(parameter) for wrapper in wrappers for parameter in reduced_by(wrapper)}
            differ = len(self._scalers) > 1 or any(id(p) not in reduced and not is_sharded(p) for p in stepped)
            # Its gradients are those of a part of the ranks.
            local = [wrapper for wrapper in wrappers if "post_localSGD_hook" in hooks_of(wrapper)]
            found = [wrapper.process_group for wrapper in (wrappers if differ else local)]
            # PostLocalSGDOptimizer counts its steps on every rank.
            averagers: list[Any] = [getattr(members.optimizer, "averager", None) for members in self._members]
            averagers = [each if hasattr(each, "process_group") else None for each in averagers]
            found += [each.process_group for each in averagers if each is not None]
            if local and None in averagers:
                _check_averages_masters(self._members)
            found.sort(key=lambda group: str(group.group_name))
            self._groups = key, groups_of(meshes_of(stepped), self._process_group, *found)
        return self._groups[1]


def _call_all(removals: Sequence[Undo]) -> None:
    for_each(lambda remove: remove(), removals)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _check_averages_masters(optimizers: Sequence[Members]) -> None:
    """Refuse a hook of DistributedDataParallel after which models are averaged without their masters."""
    if any(members.masters for members in optimizers):
        raise RuntimeError(
            "DistributedDataParallel has a post_localSGD_hook, and what is to average the models over ranks would "
            "average their 16-bit weights, and leave the float32 masters apart: make PostLocalSGDOptimizer("
            "optimizer, averager) first, and give that to mpinit.initialize and mpinit.scale_loss"
        )


def _check_passes(parted: Sequence[bool]) -> None:
    if any(parted):
        losses = " and ".join(f"loss_id={index}" for index, differs in enumerate(parted) if differs)
        raise RuntimeError(
            f"in this step ranks have scaled {losses} a different number of times, and the gradients that they reduce "
            "together would carry different scales: call mpinit.scale_loss with the same loss_id on all ranks. Where "
            "every rank trains a task of its own, use one loss scale for all (num_losses=1)"
        )
