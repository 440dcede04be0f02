"""The agreement of ranks on overflow: a verdict for some optimizers' gradients, and loss scales that stay equal."""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ..basics.modules import modules_of
from ..basics.patching import UndoStack
from ..distributed.agreement import Group, groups_of, meshes_of
from ..distributed.forward_hooks import ForwardHook
from ..distributed.replicas import hooks_of, is_joining, reduced_by
from ..distributed.sharding import groups_of_fsdp, is_sharded
from ..distributed.stages import Stages
from ..distributed.verdicts import Verdicts
from ..model.boundary import ForwardGuard
from ..scaling.scaler import LossScaler
from ..torch_internals.bulk import float32_on_cpu
from .gradients import Gradients
from .members import Members
from .wrappers import Wrappers, WrapperStatus

_OTHER_OPTIMIZER: Final = (
    "ranks that reduce gradients together step different optimizers, and cannot agree on whether gradients overflowed: "
    "some rank has not called a step(), or steps in another order. Pass the same optimizers to mpinit.scale_loss and "
    "call their step(), in the same order, on all ranks"
)
# The neutral element of MAX, for a rank that joins a verdict without gradients of its own.
_NEUTRAL: Final = -math.inf
# float32 represents every integer up to 2**24.
_BITS: Final = 24


class OverflowAgreement:
    """The agreement of a session's ranks on overflow.

    Attributes:
        stages: the ranks of the ``process_group`` of ``initialize``.
        verdicts: the collectives.
    """

    def __init__(
        self,
        guard: ForwardGuard,
        scalers: Sequence[LossScaler],
        members: list[Members],
        wrappers: Wrappers,
        stages: Stages,
    ) -> None:
        self.stages = stages
        self._wrappers = wrappers
        self.verdicts = Verdicts()
        self._guard = guard
        self._scalers = scalers
        self._members = members
        self._passes = [0] * len(scalers)
        # The groups to agree over; the key is the members and wrappers for which they were computed.
        self._groups: tuple[tuple[int, ...], list[Group]] | None = None
        # True: ranks agree in steps only, because they may run different numbers of scale_loss blocks.
        self._agrees_in_steps = False
        # True: something other than a PostLocalSGDOptimizer averages the models.
        self._averages_weights = False

    def follow_shards(self, undos: UndoStack) -> None:
        """Prepare the agreement on sharded models, and hook their forwards."""
        parameters, models = list(self._guard.parameters()), self._guard.models
        self.verdicts.fsdp_groups = groups_of_fsdp([module for model in models for module in modules_of(model)])
        self.verdicts.groups = groups_of(meshes_of(parameters), self.stages.group)
        # Stages of a pipeline run forwards of micro-batches, and may run different numbers of them.
        follows = any(map(is_sharded, parameters)) and not self.stages.are_named
        if follows:
            self.verdicts.passes.compare_over(self.verdicts.groups)
            for model in models:
                undos.push(self.verdicts.passes.follow(model))
                undos.push(model.register_forward_pre_hook(_BeforeForward(self), prepend=True).remove)

    def before_forward(self, module: nn.Module) -> None:
        """Join the verdict of ranks that step, if one is owed, before a forward runs collectives.

        Raises:
            RuntimeError: see :meth:`agree`. Or this rank has left out a backward pass that others have run.
        """
        is_owed = bool(self.verdicts.groups) and self.verdicts.expect(module)
        if not is_owed or not self._scalers[0].skips:
            return
        # The device is that of the other ranks' gradients; a meta model was materialised before its first forward.
        first = next(module.parameters(), None)
        device = torch.get_default_device() if first is None else first.device
        same = torch.full((self._same,), _NEUTRAL, dtype=torch.float32, device=device)
        scalers, passes = len(self._scalers), self._passes_since()
        opposite = same.clone()
        same[scalers : scalers + len(passes)], opposite[scalers : scalers + len(passes)] = passes, -passes
        reduced = self.verdicts.join(torch.cat([same.new_full((self._slots + 2 * scalers,), _NEUTRAL), same, opposite]))
        if len(passes):
            most, least = torch.split(reduced[-2 * self._same :], self._same)
            _check_same_losses_and_optimizers((most != -least)[scalers : scalers + len(passes)].tolist(), len(passes))

    def before_forward_of_wrapper(self, wrapper: Any) -> None:
        """Do the same as :meth:`before_forward` for a DistributedDataParallel."""
        if not self.stages.are_named and self.groups():
            self.before_forward(wrapper)

    @property
    def is_alone(self) -> bool:
        """Return whether every group, or that of every DistributedDataParallel, consists of this rank only."""
        groups = self.groups() or [each.process_group for each in self._wrappers_with(WrapperStatus.AGREED)]
        return all(torch.distributed.get_world_size(group) == 1 for group in groups)

    def _wrappers_with(self, *statuses: WrapperStatus) -> list[Any]:
        return [wrapper for wrapper in self._wrappers.with_status(*statuses) if not is_joining(wrapper)]

    def agrees_after_backward(self) -> bool:
        """Return whether ranks agree at the end of a ``scale_loss`` block, which all of them reach.

        They do if the block's backward pass has reduced gradients. A pass inside of ``no_sync()`` reduces none, and
        ranks may have different numbers of such passes: they agree after the next pass that reduces, or in the step.
        """
        self.groups()
        wrappers = self._wrappers_with(WrapperStatus.AGREED, WrapperStatus.PENDING)
        return not self._agrees_in_steps and self.verdicts.were_reduced(wrappers)

    @property
    def agrees_together(self) -> bool:
        """Return whether one verdict is for all optimizers of a rank: ranks may have different numbers of them."""
        return self.stages.group is not None

    @property
    def agrees_in_steps(self) -> bool:
        """Return whether ranks agree in steps only.

        A rank that has not called ``step()`` agrees when it scales its next loss.
        """
        return bool(self.groups()) and self._agrees_in_steps

    @property
    def has_groups(self) -> bool:
        """Return whether there is anything to agree on with other ranks."""
        return self._scalers[0].skips and bool(self.groups())

    def agree(self, judged: Sequence[tuple[Members, Gradients]], pending: list[LossScaler]) -> None:
        """Replace what checks found by what all ranks found, in one collective a group, and update the scales.

        Where gradients are the same on all ranks, under DistributedDataParallel with one loss, nothing is sent. Nor is
        it by a rank that has left out a backward pass of DistributedDataParallel, and has no new gradients.

        Args:
            judged: the gradients that the verdict is for, with the members of their optimizers.
            pending: the scalers to update. Those that are due on other ranks are added.

        Raises:
            RuntimeError: ranks that reduce gradients together have scaled them for different losses, or step
                different optimizers.
        """
        # A hook of an output may be dropped, by an in-place write to a view, though a backward pass has run.
        lacks_gradients = self.verdicts.are_without_gradients and not any(each.present() for _, each in judged)
        if self.has_groups and not lacks_gradients:
            self._agree_over(judged, pending)
        for scaler in pending:
            scaler.update()

    def _agree_over(self, judged: Sequence[tuple[Members, Gradients]], pending: list[LossScaler]) -> None:
        scalers = self._scalers
        checks = [gradients.state.found_inf for _, gradients in judged]
        device = next((found_inf.device for found_inf in checks if found_inf is not None), scalers[0].device)
        zero, one = (torch.full((), value, dtype=torch.float32, device=device) for value in (0.0, 1.0))
        # One vector, of which the largest numbers over all ranks are reduced: whether gradients of each optimizer
        # overflowed; for each scaler whether its losses' gradients did, and whether its scale is updated now, not by a
        # GradScaler; and the numbers that have to be the same, with both signs, whose maximum is the smallest, too.
        places = [self._place_of(members) for members, _ in judged]
        found = [zero] * self._slots
        for place, found_inf in zip(places, checks, strict=True):
            if found_inf is not None:
                found[place] = torch.maximum(found[place], found_inf.to(device))
        found += [zero if scaler.found_inf is None else scaler.found_inf.to(device) for scaler in scalers]
        due = [one if scaler in pending and scaler.found_inf is not None else zero for scaler in scalers]
        passes, whose = self._passes_since(), self._number_of(places)
        scales = torch.stack([scaler.scale_now().to(device) for scaler in scalers])
        same = torch.cat([scales, passes.to(device), whose.to(device)])
        reduced = self.verdicts.agree(torch.cat([torch.stack([*found, *due]), same, -same]))
        all_found, all_due, most, least = torch.split(reduced, [len(found), len(due), len(same), len(same)])
        differ = most != -least
        if len(same) > len(scalers):
            _check_same_losses_and_optimizers(differ[len(scalers) :].tolist(), len(passes))
        # If only one rank has loaded a scale, gradients of two scales were added up: that counts as an overflow.
        apart = differ[: len(scalers)].any().float()
        for place, (_, gradients) in zip(places, judged, strict=True):
            gradients.decide(torch.maximum(all_found[place], apart))
        for index, scaler in enumerate(scalers):
            scaler.copy_scale(-least[index])
            if scaler.found_inf is None:
                # A device sync, for a loss that this rank has not scaled since the last update.
                if all_due[index].item() == 0:
                    continue
                pending.append(scaler)
            scaler.found_inf = all_found[self._slots + index].to(scaler.device)

    @property
    def _slots(self) -> int:
        """The number of optimizers whose overflows a verdict distinguishes; stages of a pipeline step as one."""
        return 1 if self.agrees_together else max(len(self._members), 1)

    @property
    def _same(self) -> int:
        """The number of numbers in a verdict that have to be the same on all ranks; the vector has them twice."""
        losses = len(self._scalers)
        return losses + (losses if losses > 1 and not self.stages.are_named else 0) + (not self.agrees_together)

    def _place_of(self, members: Members) -> int:
        places = {id(each): place for place, each in enumerate(self._members[:])}
        return 0 if self.agrees_together else places[id(members)]

    def _number_of(self, places: Sequence[int]) -> torch.Tensor:
        """Encode a verdict's optimizers as one number, a bit for each; empty if ranks may have different optimizers."""
        number = sum(1 << place % _BITS for place in set(places))
        return float32_on_cpu([] if self.agrees_together else [number])

    def _passes_since(self) -> torch.Tensor:
        """Return how often each loss was scaled since the last verdict; empty for one loss, or if ranks may differ.

        Ranks of a ``process_group``, such as stages of a pipeline, may differ: they reduce no gradients together.
        """
        before, self._passes = self._passes, [scaler.scaled_count for scaler in self._scalers]
        counts = [now - then for now, then in zip(self._passes, before, strict=True)]
        return float32_on_cpu(counts if len(counts) > 1 and not self.stages.are_named else [])

    def groups(self) -> list[Group]:
        """List the groups over which overflow is agreed on: those of all parameters, with a gradient or without."""
        wrappers = self._wrappers_with(WrapperStatus.AGREED)
        key = (*(members.generation for members in self._members[:]), -1, *map(id, wrappers))
        if self._groups is None or self._groups[0] != key:
            stepped = self._stepped()
            reduced = {id(parameter) for wrapper in wrappers for parameter in reduced_by(wrapper)}
            differ = len(self._scalers) > 1 or any(id(p) not in reduced and not is_sharded(p) for p in stepped)
            # With this hook gradients are reduced over a subgroup only, so they differ between ranks.
            local = [wrapper for wrapper in wrappers if "post_localSGD_hook" in hooks_of(wrapper)]
            found = [wrapper.process_group for wrapper in (wrappers if differ else local)]
            # PostLocalSGDOptimizer averages after some number of steps, so all ranks must count the same steps.
            averagers: list[Any] = [getattr(members.optimizer, "averager", None) for members in self._members[:]]
            averagers = [each if hasattr(each, "process_group") else None for each in averagers]
            averaging = [each.process_group for each in averagers if each is not None]
            self._averages_weights = bool(local) and None in averagers
            self._agrees_in_steps = self.stages.are_replicas or (bool(averaging) and not wrappers)
            found = sorted([*found, *averaging], key=lambda group: str(group.group_name))
            self._groups = key, groups_of(meshes_of(stepped), self.stages.group, *found)
            self.verdicts.groups = self._groups[1]
        return self._groups[1]

    def _stepped(self) -> list[nn.Parameter]:
        for members in self._members[:]:
            if members.generation == 0:
                members.sync_groups()  # its groups were not read yet
        return [weight for members in self._members[:] for weight in members.weights]

    def check_averages_masters(self) -> None:
        """Refuse a step where what averages the models over ranks would average 16-bit weights."""
        self.groups()
        if self._averages_weights and any(members.masters for members in self._members[:]):
            raise RuntimeError(
                "DistributedDataParallel has a post_localSGD_hook, and the averaging of models over ranks would "
                "average their 16-bit weights, and not the float32 masters: make PostLocalSGDOptimizer("
                "optimizer, averager) first, and pass that to mpinit.initialize and mpinit.scale_loss"
            )


class _BeforeForward(ForwardHook[OverflowAgreement]):
    """A forward pre-hook that calls :meth:`OverflowAgreement.before_forward`."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Call the method with the module."""
        agreement = self.owner()
        if agreement is not None:
            agreement.before_forward(module)


def _check_same_losses_and_optimizers(differ: Sequence[bool], losses: int) -> None:
    """Raise if numbers differ between ranks: those of :meth:`_passes_since`, ``losses`` many, or :meth:`_number_of`."""
    if any(differ[:losses]):
        named = " and ".join(f"loss_id={index}" for index, differs in enumerate(differ[:losses]) if differs)
        raise RuntimeError(
            f"in this step ranks have scaled {named} a different number of times, and the gradients that they reduce "
            "together would carry different scales: call mpinit.scale_loss with the same loss_id on all ranks. Where "
            "every rank trains a task of its own, use one loss scale for all (num_losses=1)"
        )
    if any(differ[losses:]):
        raise RuntimeError(_OTHER_OPTIMIZER)
