"""What a session's steps have to be one in over all ranks: the masters, whether a step is done, and the scales."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from ..distributed.agreement import Group, agree, device_for, groups_of, meshes_of
from ..distributed.replicas import (
    after_join,
    broadcast,
    no_longer_after_join,
    outdate,
    reduced_by,
    running_wrapper,
    wrappers_of,
)
from ..distributed.sharding import given_memory_since, is_distributed, is_sharded, left_behind
from ..masters.pairs import Pair
from ..masters.store import MasterStore
from ..masters.two_copies import TwoCopies
from ..scaling.scaler import LossScaler
from ..torch_internals.ddp_made import when_made
from .gradient_cycle import GradientCycle
from .parameter_groups import ParameterGroups


@final
class Ranks:
    """A session among those of other processes.

    DistributedDataParallel broadcasts what it sees when it is made, the 16-bit weights: rank 0's masters are broadcast
    right behind them, and after ``join()`` those of the rank whose weights all have taken, and its loss scales.

    Args:
        models: the session's models.
        store: where masters live.
        scalers: the session's loss scalers.
        all_copies: every pair of the session, by who steps it.
        stepped: the model's parameters that the session's optimizers step.
        generation: what changes whenever those do.
        process_group: over which the session's steps are one; None: over whatever parameters are sharded.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        store: MasterStore,
        scalers: Sequence[LossScaler],
        all_copies: Callable[[], list[TwoCopies]],
        stepped: Callable[[], Iterable[nn.Parameter]],
        generation: Callable[[], tuple[int, ...]],
        process_group: Group | None,
    ) -> None:
        self._models = models
        self._store = store
        self._scalers = scalers
        self._all_copies = all_copies
        self._stepped = stepped
        self._generation = generation
        self._process_group = process_group
        self._groups: tuple[tuple[int, ...], list[Group]] | None = None
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._new_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_looked = False
        # What has not happened yet, and is checked when it does for the first time.
        self._to_be_checked = {"forward", "step"}

    # -- replicas -----------------------------------------------------------------------------------------------

    def watch(self) -> Callable[[], None]:
        """Know from here on of wrappers as they are made; returns the undo."""
        return when_made(self._was_wrapped)

    def _was_wrapped(self, wrapper: Any) -> None:
        ids = set(map(id, self._parameters()))
        if any(id(parameter) in ids for parameter in reduced_by(wrapper)):
            self._take(wrapper)

    def _take(self, wrapper: Any) -> None:
        """All ranks are here, with the same wrapper."""
        self._wrappers.add(wrapper)
        self._groups = None
        after_join(wrapper, self._after_join)
        self._send_under(wrapper, 0)

    def got_optimizers(self) -> None:
        """There are masters that were none when the models were wrapped."""
        if len(self._wrappers):
            gc.collect()  # those that nobody has any more, so that all ranks know of the same
        for wrapper in list(self._wrappers):
            self._send_under(wrapper, 0)

    def before_forward(self) -> None:
        """A model is about to be run, perhaps inside a wrapper that is not known yet.

        Raises:
            RuntimeError: see :meth:`check_present`.
        """
        self._check_at_first("forward")
        wrapper = running_wrapper()
        if wrapper is not None and wrapper not in self._wrappers:
            self._new_wrappers.add(wrapper)

    def before_step(self) -> None:
        """Make masters one under wrappers that were not seen to be made: all ranks are about to step."""
        self._check_at_first("step")
        if not is_distributed() or (self._has_looked and not self._new_wrappers):
            return
        found: list[Any] = [] if self._has_looked else wrappers_of(list(self._parameters()), self._new_wrappers)
        self._has_looked = True
        for wrapper in dict.fromkeys([*found, *self._new_wrappers]):
            if wrapper not in self._wrappers:
                self._take(wrapper)
        self._new_wrappers.clear()
        self._groups = None

    def _check_at_first(self, what: str) -> None:
        if what in self._to_be_checked:
            self.check_present()
            self._to_be_checked.remove(what)

    def check_present(self) -> None:
        """Notice that ``fully_shard`` or the like has taken parameters from the models after ``initialize``.

        Raises:
            RuntimeError: it has, and steps would train nothing.
        """
        stepped = list(dict.fromkeys([*(pair.model_param for pair in self._store.pairs), *self._stepped()]))
        names = given_memory_since(self._models, stepped)
        if names:
            raise RuntimeError(
                f"{names[0]!r} was on the meta device at mpinit.initialize, and to_empty() has put another parameter "
                "in its place since: the optimizer would train nothing. Call to_empty() first, load a state, make the "
                "optimizer from the parameters that the model has then, and call mpinit.initialize last"
            )
        names = left_behind(self._models, stepped) if is_distributed() else []
        if names:
            raise RuntimeError(
                f"{names[0]!r} was replaced by a shard after mpinit.initialize, and the optimizer goes on stepping "
                "what it was: nothing would be trained. Call fully_shard (or parallelize_module) first, make the "
                "optimizer from the parameters that the model has then, and call mpinit.initialize last"
            )

    def _parameters(self) -> Iterable[nn.Parameter]:
        return dict.fromkeys(parameter for model in self._models for parameter in model.parameters())

    def _after_join(self, wrapper: Any, src: int) -> None:
        self._send_under(wrapper, src)

    def _send_under(self, wrapper: Any, src: int) -> None:
        pairs = [pair for pair in map(self._store.pairs.of, reduced_by(wrapper)) if pair is not None]
        self.send(list(dict.fromkeys(pairs)), [], src, wrapper.process_group)

    @torch.no_grad()
    def send(self, pairs: Sequence[Pair], plain: Sequence[torch.Tensor], src: int, group: Group | None) -> None:
        """Give all ranks the masters, and the parameters without masters, of one of them, and its loss scales.

        Args:
            pairs: on all ranks the same.
            plain: on all ranks the same.
            src: whose, its rank within ``group``.
            group: a process group; None: the default one.
        """
        all_copies = self._all_copies()
        for pair in pairs:
            if not pair.holders:
                pair.follow_device()
            for copies in all_copies:
                copies.look_at_weight(pair)
        for index, values in broadcast([pair.values for pair in pairs], src, group):
            pairs[index].load(values)
            for copies in all_copies:
                copies.note_one(pairs[index])
        copy_from(plain, src, group)
        self._send_scales(src, group)

    def _send_scales(self, src: int, group: Group | None) -> None:
        """Ranks average scaled gradients; one that was resumed by itself, or joined early, has another scale."""
        distributed: Any = torch.distributed
        for scaler in self._scalers:
            if scaler.rule.dynamic:
                counters = scaler.counters()
                there = counters.to(device_for(group or distributed.group.WORLD, counters.device))
                distributed.broadcast(there, group=group, group_src=src)
                scaler.take_counters(there)

    def leave(self, dtypes: dict[torch.Tensor, torch.dtype]) -> None:
        """The session is over.

        Args:
            dtypes: what the models' parameters were before its undo.
        """
        for wrapper in (*self._wrappers, *self._new_wrappers):
            no_longer_after_join(wrapper)
        changed = [parameter for parameter, dtype in dtypes.items() if parameter.dtype != dtype]
        for wrapper in wrappers_of(changed, self._wrappers) if changed else ():
            outdate(wrapper)

    # -- verdicts -----------------------------------------------------------------------------------------------

    def agree(self, cycle: GradientCycle, members: ParameterGroups) -> None:
        """Make what the checks of a cycle found one over all ranks, in one round, and move the scales.

        Where gradients are the same on all ranks, under DistributedDataParallel, nothing is sent.

        Args:
            cycle: of the optimizer that is about to step.
            members: its parameters.
        """
        pending = cycle.take_pending()
        groups = self._over() if is_distributed() and self._scalers[0].rule.dynamic else []
        if groups:
            if cycle.found_inf is not None:
                members.copies.look_at_gradients()
                if members.are_without_gradients():
                    cycle.forget_overflow()
            device = cycle.found_inf.device if cycle.found_inf is not None else self._scalers[0].device
            none, nothing = torch.full((), -1.0, device=device), torch.zeros((), device=device)
            # By 2 more where the scale is to move at this step, and not when a GradScaler says so.
            noted = [(scaler.noted, 2.0 * (scaler in pending)) for scaler in self._scalers]
            found = [nothing if cycle.found_inf is None else cycle.found_inf]
            found += [none if note is None else note.to(device) + more for note, more in noted]
            verdict, *rest = agree(torch.stack(found), groups).unbind()
            cycle.settle(verdict.clone())
            for scaler, (note, more), agreed in zip(self._scalers, noted, rest, strict=True):
                if note is not None:
                    scaler.settle(agreed - more)
                # Waits for the device, for a loss that this rank has not scaled.
                elif agreed.item() >= 2:
                    scaler.settle(agreed - 2)
                    pending.append(scaler)
        for scaler in pending:
            scaler.update()

    def _over(self) -> list[Group]:
        """The groups over which overflow is agreed on: by all parameters, whichever have gradients at the moment."""
        key = self._generation()
        if self._groups is None or self._groups[0] != key:
            stepped = list(self._stepped())
            reduced = {id(parameter) for wrapper in self._wrappers for parameter in reduced_by(wrapper)}
            alone = self._wrappers and any(id(p) not in reduced and not is_sharded(p) for p in stepped)
            outside = [wrapper.process_group for wrapper in self._wrappers] if alone else []
            self._groups = key, groups_of(meshes_of(stepped), self._process_group, *outside)
        return self._groups[1]


@torch.no_grad()
def copy_from(tensors: Sequence[torch.Tensor], src: int, group: Group | None) -> None:
    """Copy tensors from the rank ``src`` of a group to the others, in place."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        for index, values in broadcast([tensor.detach for tensor in same], src, group):
            same[index].copy_(values)
