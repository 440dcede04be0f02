"""The agreement of several processes: on settings, float32 values, whether a step is done, and loss scales."""

import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..basics.patching import UndoStack, undo_when_dropped
from ..distributed.agreement import Group, check_same, device_for, groups_of, meshes_of, ranks_agree
from ..distributed.replicas import (
    WRAPPERS,
    Event,
    broadcast,
    delayed_by,
    is_joining,
    reduced_by,
    refuse_training,
    synced_by,
    syncs_when_made,
)
from ..distributed.sharding import fsdp1_refusal, has_other_processes, is_distributed
from ..distributed.stages import Stages
from ..model.boundary import ForwardGuard
from ..model.casting import TensorCasts
from ..scaling.scaler import LossScaler
from ..torch_internals.running import current_pass
from .members import Members
from .overflow_agreement import OverflowAgreement
from .unreduced import UnreducedGradients
from .wrappers import Wrappers, WrapperStatus

# The key of a setting that ranks compare in addition to the keywords.
OPTIMIZERS: Final = "the optimizer's class"
# The names under which DistributedDataParallel and FSDP1 register the model inside them.
_INSIDE_FSDP1: Final = "_fsdp_wrapped_module"
_INSIDE: Final = frozenset({"module", _INSIDE_FSDP1})
# The settings that may differ between the stages of a pipeline.
_OF_A_STAGE: Final = frozenset({"keep_fp32", "keep_inputs", "entry_points", "keep_batchnorm_fp32", OPTIMIZERS})

_UNKNOWN_PROCESSES: Final = (
    "there are {} other processes, and mpinit cannot know whether they train the same model: the model is in no "
    "DistributedDataParallel, and is not sharded. If you average gradients by hand, pass process_group="
    "torch.distributed.group.WORLD to mpinit.initialize; without it an overflow on one rank would be skipped there "
    "alone, and the scales would differ. If every process trains a model of its own, pass process_group="
    "torch.distributed.new_subgroups(group_size=1)[0]"
)
_INSIDE_BACKWARD: Final = (
    "optimizer.step() was called inside of backward(), and gradients are reduced over ranks at its end: every rank "
    "would step with gradients of its own. Call it after backward(), or train in one process"
)
_NO_OPTIMIZER: Final = (
    "this rank had no optimizer when mpinit.initialize was called with a process_group, so the other ranks do not wait "
    "for it to agree on overflow. Pass the optimizer to initialize, or await_optimizers=True and add it later"
)
_OTHER_SCALES: Final = (
    "the loss scales of this rank were loaded, set, or lowered after an overflow, and not all other ranks have done "
    "the same: the gradients that DistributedDataParallel reduces together carry different scales. Load or set them on "
    "every rank, or load one state for all of them, by mpinit.TrainState with "
    "StateDictOptions(broadcast_from_rank0=True). If you step with gradients that are not reduced (after no_sync(), or "
    "after a forward of the module inside of the wrapper), pass process_group=torch.distributed.group.WORLD to "
    "mpinit.initialize: ranks then skip such steps together"
)


class Ranks:
    """The agreement of a session with the sessions of other processes.

    Sessions agree on three things: the settings; the float32 values of the 16-bit tensors that a wrapper broadcasts;
    and the loss scales. They agree at these times:

    - in the constructor of a DistributedDataParallel around a model, and again after ``join()``;
    - at the end of ``initialize``, if parameters are sharded or there is a ``process_group``;
    - at the end of the first backward pass, or in the first step, if the constructor broadcasts nothing
      (``init_sync=False``), or ran before ``initialize``.

    :attr:`overflow` agrees on overflow, where gradients may differ by rank.

    Attributes:
        guard: the checks before each forward of the models.
        is_first_step: whether :meth:`before_step` was not called yet.
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
        self._casts: TensorCasts | None = None
        self._settings: Mapping[str, str] = {}
        # The wrapper whose __init__ runs, and the versions of its tensors before that broadcasts some of them.
        self._making: tuple[Any, dict[int, int]] | None = None
        # Ids of the parameters whose dtype the session has changed.
        self._changed: set[int] = set()
        # The last broadcast of scales: its time on the sending rank, the number of comparisons since, and how often
        # scales had been changed on this rank by then.
        self._since, self._comparisons, self._changes = 0.0, 0, 0
        self.is_first_step = True

    @functools.cached_property
    def unreduced(self) -> UnreducedGradients:
        """The gradients that FSDP2 has not reduced yet; ``fully_shard`` is called before ``initialize``."""
        return UnreducedGradients(self.guard.models)

    @functools.cached_property
    def _wrappers(self) -> Wrappers:
        # Made where there is a process group.
        return Wrappers(self.guard, self._changed)

    @functools.cached_property
    def overflow(self) -> OverflowAgreement:
        """The agreement on overflow; made where there is a process group."""
        return OverflowAgreement(self.guard, self._scalers, self._members, self._wrappers, Stages(self._process_group))

    def watch(
        self,
        changed: Iterable[torch.Tensor],
        casts: TensorCasts | None,
        settings: Mapping[str, str],
        trains: bool,
        undos: UndoStack,
    ) -> None:
        """Compare the settings of all ranks, and from here on follow DistributedDataParallel around the models.

        Args:
            trains: whether this rank has an optimizer, or expects one.
        """
        self._changed, self._casts, self._settings = set(map(id, changed)), casts, settings
        known = weakref.ref(self)

        def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            ranks = known()
            if ranks is not None and submodule is not None and name in _INSIDE and is_distributed():
                ranks._on_wrapping(module, name, submodule)

        def on_event(event: Event, wrapper: Any, output: Any) -> None:
            ranks = known()
            if ranks is not None:
                ranks._on_event(event, wrapper, output)

        registered = UndoStack()
        undos.push(undo_when_dropped(self, registered.unwind))
        registered.push(register_module_module_registration_hook(on_registration).remove)
        registered.push(WRAPPERS.add(on_event))
        if is_distributed():
            check_same(settings, {}, groups_of(meshes_of(self.guard.parameters())))
            alike = {name: value for name, value in settings.items() if name not in _OF_A_STAGE}
            check_same(alike, {}, groups_of([], self._process_group))
            self.overflow.stages.compare(self.guard.parameters(), trains)
            self.overflow.follow_shards(registered)

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

    def _on_event(self, event: Event, wrapper: Any, output: Any) -> None:
        if event is Event.MADE:
            making, self._making = self._making, None
            if making is not None and making[0]() is wrapper:
                self._on_made(wrapper, making[1])
        elif event is Event.JOINED:
            if wrapper in self._wrappers.with_status(WrapperStatus.AGREED):
                self._send(wrapper, synced_by(wrapper), wrapper._authoritative_rank)
                self._send_scales(wrapper, wrapper._authoritative_rank)
        elif event is Event.RETURNED:
            if self._wrappers.is_around(wrapper) and not self.overflow.stages.are_named:
                self.overflow.verdicts.after_forward_of_wrapper(output)
        elif self._wrappers.is_around(wrapper) and event is Event.CALLED:
            # Loops with a GradScaler compare in the step, and this rank may have omitted it.
            self._check_same_scales()
            self.overflow.before_forward_of_wrapper(wrapper)

    def _on_made(self, wrapper: Any, versions: Mapping[int, int]) -> None:
        # DistributedDataParallel has broadcast the tensors whose version has changed, also on the sending rank.
        now = [(tensor, _version_of(tensor)) for tensor in _tensors_of(wrapper.module)]
        sent = [tensor for tensor, version in now if versions.get(id(tensor), version) != version]
        self._send(wrapper, sent, 0)
        if not syncs_when_made(wrapper):
            self._wrappers.mark(wrapper, WrapperStatus.PENDING)
            return
        self._send_scales(wrapper, 0)
        self._wrappers.mark(wrapper, WrapperStatus.AGREED)

    def _agree_under(self, wrapper: Any) -> None:
        """Agree under a wrapper whose constructor could not, at the end of a backward pass or in the first step."""
        self._check_same_under(wrapper)
        if syncs_when_made(wrapper):
            self._send(wrapper, synced_by(wrapper), 0)
        self._send_scales(wrapper, 0)
        self._wrappers.mark(wrapper, WrapperStatus.AGREED)

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

        Ranks average scaled gradients, so the scales have to be equal. They differ after one rank was resumed alone, or
        ended early in ``join()``.
        """
        group = wrapper.process_group
        for scaler in self._scalers:
            if scaler.is_dynamic:
                counters = torch.cat([scaler.counters(), scaler.counters().new_tensor([time.time()])])
                there = counters.to(device_for(group, counters.device))
                torch.distributed.broadcast(there, group=group, group_src=src)
                scaler.load_counters(there[:-1])
                self._since = float(there[-1])
        self._comparisons, self._changes = 0, self._changed_count()

    def before_step(self) -> None:
        """Let ranks agree under wrappers that have not agreed yet. All ranks call it before a step.

        Raises:
            RuntimeError: a backward pass is running, or parameters were replaced. With a dynamic scale also: it is
                unknown which other processes train the same model, or scales were changed on some ranks only, or this
                rank of a ``process_group`` had no optimizer in ``initialize``.
        """
        if current_pass() != -1 and has_other_processes():
            raise RuntimeError(_INSIDE_BACKWARD)
        if self.is_first_step:
            self.guard.check_present()
            self.is_first_step = False
        if not is_distributed():
            return
        self.agree_under_pending()
        self.overflow.check_averages_masters()
        if self.overflow.stages.are_without_this_rank and self._scalers[0].skips:
            raise RuntimeError(_NO_OPTIMIZER)
        known = self.overflow.groups() or self._wrappers.with_status(WrapperStatus.AGREED, WrapperStatus.PENDING)
        if not known and self._scalers[0].is_dynamic and has_other_processes():
            raise RuntimeError(_UNKNOWN_PROCESSES.format(torch.distributed.get_world_size() - 1))

    def agree_under_pending(self) -> None:
        """Agree under wrappers under which ranks have not agreed yet. All ranks call it after backward, or in a step.

        Raises:
            RuntimeError: scales were changed on this rank, and not on all.
        """
        pending = [each for each in self._wrappers.with_status(WrapperStatus.PENDING) if not is_joining(each)]
        for wrapper in self._in_order(pending) if pending else ():
            self._agree_under(wrapper)
        self._check_same_scales()

    def _in_order(self, wrappers: Sequence[Any]) -> list[Any]:
        """Sort wrappers by the positions of their parameters in the models: the same order on all ranks."""
        places = {id(parameter): place for place, parameter in enumerate(self.guard.parameters())}
        keys = {id(wrapper): sorted(places.get(id(p), -1) for p in reduced_by(wrapper)) for wrapper in wrappers}
        return sorted(wrappers, key=lambda wrapper: (len(keys[id(wrapper)]), keys[id(wrapper)]))

    def _changed_count(self) -> int:
        return sum(scaler.changed_count for scaler in self._scalers)

    def _check_same_scales(self) -> None:
        """Compare scales after a backward pass that reduces gradients, if this rank's have been changed.

        Scales may differ as long as no gradients are reduced, as in local SGD. Verdicts over groups make them equal.
        """
        changes = self._changed_count()
        if changes == self._changes or not has_other_processes() or self.overflow.groups():
            return
        if not self.overflow.agrees_after_backward():
            return
        self._comparisons += 1
        found = [scaler.changed_to for scaler in self._scalers]
        states = [None if each is None else (each[0].tolist(), each[1]) for each in found]
        text = f"mpinit {self._since} {self._comparisons}: {states}"
        agreed = [each for each in self._wrappers.with_status(WrapperStatus.AGREED) if not is_joining(each)]
        for wrapper in self._in_order(agreed):
            if not ranks_agree(text, wrapper.process_group):
                raise RuntimeError(_OTHER_SCALES)
        self._changes = changes

    def end(self, dtypes: dict[torch.Tensor, torch.dtype]) -> None:
        """Refuse training with wrappers around parameters whose dtype ``undo`` has changed.

        Args:
            dtypes: the parameters' dtypes before ``undo``.
        """
        changed = {id(parameter) for parameter, dtype in dtypes.items() if parameter.dtype != dtype}
        known = self._wrappers if "_wrappers" in vars(self) else None
        for wrapper in known.with_status(WrapperStatus.AGREED, WrapperStatus.PENDING) if known else ():
            if any(id(parameter) in changed for parameter in reduced_by(wrapper)):
                refuse_training(wrapper)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
