"""The agreement of several processes: on settings, float32 values, whether a step is done, and loss scales."""

import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..basics.patching import UndoStack
from ..distributed.agreement import Group, agree, check_same, device_for, groups_of, meshes_of, ranks_agree
from ..distributed.replicas import (
    after_join,
    broadcast,
    hooks_of,
    is_joining,
    reduced_by,
    refuse_training,
    remove_after_join,
)
from ..distributed.sharding import fsdp1_refusal, has_other_processes, is_distributed, is_sharded
from ..model.boundary import ForwardGuard
from ..model.casting import TensorCasts
from ..scaling.scaler import LossScaler
from ..torch_internals.running import current_pass
from .gradient_state import agreed
from .gradients import Gradients
from .members import Members

# Compared beside the keywords.
OPTIMIZERS: Final = "the optimizer's class"
# The names under which wrappers register a model.
_INSIDE_FSDP1: Final = "_fsdp_wrapped_module"
_INSIDE: Final = frozenset({"module", _INSIDE_FSDP1})
# The settings that may differ between the stages of a pipeline.
_OF_A_STAGE: Final = frozenset({"keep_fp32", "keep_inputs", "entry_points", "keep_batchnorm_fp32", OPTIMIZERS})

_NOT_TIED: Final = (
    "there are {} other processes, and nothing says that they train one model with this one, or do not: it is in no "
    "DistributedDataParallel, and not sharded. Where gradients are averaged by hand, an overflow on one rank would be "
    "skipped there alone, and the scales would part: give mpinit.initialize process_group=torch.distributed.group."
    "WORLD. Where every process trains a model of its own, give it a group of its own, process_group="
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


class Ranks:
    """The agreement of a session with those of other processes.

    They agree once, when DistributedDataParallel is made around a model (or at the end of ``initialize``, where
    parameters are sharded or a ``process_group`` was given): on the settings, on one set of float32 values
    beyond what the wrapper itself broadcasts, the 16-bit ones, and on loss scales; and again after ``join()``. In every
    step they agree on overflow, where gradients may differ by rank.

    Attributes:
        guard: what is checked before a forward of the models.
        is_first_step: whether no step was checked yet.
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
        self._passes = [0] * len(scalers)
        # When scales were made one, by the sender's clock, steps since then, and how often they had been loaded.
        self._since, self._steps, self._loads = 0.0, 0, 0
        self.is_first_step = True

    def watch(
        self, changed: Iterable[torch.Tensor], casts: TensorCasts | None, settings: Mapping[str, str], undos: UndoStack
    ) -> None:
        """Compare the settings of all ranks, and from here on follow wrappers that are made around the models."""
        self.guard.changed, self._casts, self._settings = set(map(id, changed)), casts, settings
        known = weakref.ref(self)

        def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            ranks = known()
            if ranks is not None and submodule is not None and name in _INSIDE and is_distributed():
                ranks._on_wrapping(module, name, submodule)

        handles: list[Any] = []
        weakref.finalize(self, _remove, handles).atexit = False
        undos.push(functools.partial(_remove, handles))
        handles.append(register_module_module_registration_hook(on_registration))
        if is_distributed():
            check_same(settings, {}, groups_of(meshes_of(self.guard.parameters())))
            alike = {name: value for name, value in settings.items() if name not in _OF_A_STAGE}
            check_same(alike, {}, groups_of([], self._process_group))

    def _on_wrapping(self, wrapper: nn.Module, name: str, module: nn.Module) -> None:
        if name == _INSIDE_FSDP1:
            own = {id(part) for model in self.guard.models for part in model.modules()}
            if any(id(part) in own for part in module.modules()):
                raise RuntimeError(fsdp1_refusal("a model of mpinit.initialize"))
        elif isinstance(wrapper, nn.parallel.DistributedDataParallel) and self.guard.has_some_of(wrapper):
            self.guard.check_present()
            self._unite(wrapper, module)

    def _unite(self, wrapper: Any, module: nn.Module) -> None:
        self._check_same_under(wrapper)
        self.guard.joined.add(wrapper)
        self._groups = None
        after_join(wrapper, self._send_under)
        self._send_under(wrapper, 0)
        if self._casts is not None:
            inside = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
            self._send_rounded([t for t in self._casts.with_more_bits() if id(t) in inside], wrapper.process_group)

    def _check_same_under(self, wrapper: Any) -> None:
        names = {id(parameter): name for model in self.guard.models for name, parameter in model.named_parameters()}
        parameters = {
            names.get(id(p), f"parameter {index}"): f"{tuple(p.shape)} {p.dtype}"
            + (" with a float32 master" if self._masters.of(p) is not None else "")
            for index, p in enumerate(reduced_by(wrapper))
        }
        check_same(self._settings, parameters, [wrapper.process_group])

    @torch.no_grad()
    def _send_rounded(self, tensors: Sequence[torch.Tensor], group: Group) -> None:
        """Send rank 0's float32 values of frozen weights and of buffers that are 16-bit in the model."""
        assert self._casts is not None
        values = [functools.partial(self._values_of, tensor) for tensor in tensors]
        for index, sent in broadcast(values, 0, group):
            tensors[index].copy_(sent)
            self._casts.load(tensors[index], sent)

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        values = None if self._casts is None else self._casts.original_values(tensor)
        return (tensor if values is None else values).detach().float()

    def before_step(self) -> None:
        """Unite the ranks under wrappers that are older than the session; all ranks are about to step.

        Raises:
            RuntimeError: with a dynamic scale, it is unknown which other processes train the same model; or scales were
                loaded on this rank, and not on all; or a backward pass is not over; or parameters were replaced.
        """
        if current_pass() != -1 and has_other_processes():
            raise RuntimeError(_INSIDE_BACKWARD)
        if self.is_first_step:
            self.guard.check_present()
            self.is_first_step = False
        for wrapper in sorted(
            (each for each in self.guard.older if not is_joining(each)), key=lambda w: len(reduced_by(w))
        ):
            self._unite(wrapper, wrapper.module)
            self.guard.older.discard(wrapper)
        self._steps += 1
        if has_other_processes() and not self._groups_to_agree_over() and self._scalers[0].rule.dynamic:
            self._check_same_scales()

    def _check_averages_masters(self) -> None:
        if any(members.masters for members in self._members):
            raise RuntimeError(
                "DistributedDataParallel has a post_localSGD_hook, and what is to average the models over ranks would "
                "average their 16-bit weights, and leave the float32 masters apart: make PostLocalSGDOptimizer("
                "optimizer, averager) first, and give that to mpinit.initialize and mpinit.scale_loss"
            )

    def _check_same_scales(self) -> None:
        if not (self.guard.joined or self.guard.older):
            raise RuntimeError(_NOT_TIED.format(torch.distributed.get_world_size() - 1))
        loads = sum(scaler.loaded_count for scaler in self._scalers)
        if loads != self._loads:
            said = f"mpinit {self._since} {self._steps}: {[scaler.state_dict() for scaler in self._scalers]}"
            for wrapper in (each for each in self.guard.joined if not is_joining(each)):
                if not ranks_agree(said, wrapper.process_group):
                    raise RuntimeError(_NOT_LOADED)
            self._loads = loads

    def _stepped(self) -> list[nn.Parameter]:
        for members in self._members:
            if members.generation == 0:
                members.sync_groups()  # of an optimizer to which nothing was done yet
        return [weight for members in self._members for weight in members.weights]

    @torch.no_grad()
    def _send_under(self, wrapper: Any, src: int) -> None:
        """Send the masters and the loss scales of one rank to all others."""
        found = {id(master): master for master in map(self._masters.of, reduced_by(wrapper)) if master is not None}
        masters, group = list(found.values()), wrapper.process_group
        for index, sent in broadcast([functools.partial(self._masters.values, m) for m in masters], src, group):
            self._masters.load(masters[index], sent)
        # Ranks average scaled gradients; one that was resumed by itself, or joined early, has another scale.
        for scaler in self._scalers:
            if scaler.rule.dynamic:
                counters = torch.cat([scaler.counters(), scaler.counters().new_tensor([time.time()])])
                there = counters.to(device_for(group, counters.device))
                torch.distributed.broadcast(there, group=group, group_src=src)
                scaler.load_counters(there[:-1])
                self._since = float(there[-1])
        self._steps, self._loads = 0, sum(scaler.loaded_count for scaler in self._scalers)

    def end(self, dtypes: dict[torch.Tensor, torch.dtype]) -> None:
        """Refuse to train with wrappers whose parameters have another dtype than ``dtypes``, those of before."""
        changed = {id(parameter) for parameter, dtype in dtypes.items() if parameter.dtype != dtype}
        for wrapper in (*self.guard.joined, *self.guard.older):
            remove_after_join(wrapper)
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
        wrappers = [wrapper for wrapper in self.guard.joined if not is_joining(wrapper)]
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
                self._check_averages_masters()
            found.sort(key=lambda group: str(group.group_name))
            self._groups = key, groups_of(meshes_of(stepped), self._process_group, *found)
        return self._groups[1]


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _check_passes(parted: Sequence[bool]) -> None:
    if any(parted):
        losses = " and ".join(f"loss_id={index}" for index, differs in enumerate(parted) if differs)
        raise RuntimeError(
            f"in this step ranks have scaled {losses} a different number of times, and the gradients that they reduce "
            "together would carry different scales: call mpinit.scale_loss with the same loss_id on all ranks. Where "
            "every rank trains a task of its own, use one loss scale for all (num_losses=1)"
        )
