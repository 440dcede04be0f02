"""What a session's steps have to be one in over all ranks: the masters, whether a step is done, and the scales."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..distributed.agreement import Group, agree, device_for, groups_of, meshes_of
from ..distributed.replicas import (
    after_join,
    broadcast,
    no_longer_after_join,
    outdate,
    reduced_by,
    running_wrapper,
)
from ..distributed.sharding import given_memory_since, is_distributed, is_sharded, left_behind
from ..masters.masters import Master, Masters
from ..scaling.scaler import LossScaler
from .gradients import Gradients
from .members import Members


@final
class Ranks:
    """A session among those of other processes.

    DistributedDataParallel broadcasts what it sees when it is made, the 16-bit weights: rank 0's masters are broadcast
    before the first step that follows, and after ``join()`` those of the rank whose weights all have taken, and its
    loss scales.

    Args:
        models: the session's models.
        masters: the session's masters.
        scalers: the session's loss scalers.
        members: the parameters of each of its optimizers; the list grows with them.
        process_group: over which the session's steps are one; None: over whatever parameters are sharded.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        masters: Masters,
        scalers: Sequence[LossScaler],
        members: list[Members],
        process_group: Group | None,
    ) -> None:
        self._models = models
        self._masters = masters
        self._scalers = scalers
        self._members = members
        self._process_group = process_group
        self._groups: tuple[tuple[int, ...], list[Group]] | None = None
        # Wrappers made while the session lives; those whose ranks have the same masters; and the parameters' dtypes
        # before it began, for wrappers that are older.
        self._new: weakref.WeakSet[Any] = weakref.WeakSet()
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._changed: set[int] = set()
        # What has not happened yet, and is checked when it does for the first time.
        self._to_be_checked = {"forward", "step"}

    # -- replicas -----------------------------------------------------------------------------------------------

    def watch(self, changed: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Know from here on of wrappers as they are made; returns the undo.

        Args:
            changed: parameters whose dtype the session changes, which a wrapper that is older does not know.
        """
        self._changed = set(map(id, changed))
        known = weakref.ref(self._new)

        def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            new = known()
            if new is not None and isinstance(module, nn.parallel.DistributedDataParallel):
                new.add(module)

        handle = register_module_module_registration_hook(note)
        weakref.finalize(self, handle.remove).atexit = False
        return handle.remove

    def before_forward(self) -> None:
        """A model is about to be run, perhaps inside a wrapper.

        Raises:
            RuntimeError: the wrapper was made before ``mpinit.initialize``; or see :meth:`check_present`.
        """
        self._check_at_first("forward")
        wrapper = running_wrapper()
        if wrapper is None or wrapper in self._wrappers or wrapper in self._new:
            return
        if self._changed and any(id(parameter) in self._changed for parameter in reduced_by(wrapper)):
            name = type(wrapper).__name__
            raise RuntimeError(
                f"this {name} was made before mpinit.initialize, and has recorded the parameters' dtypes: it would not "
                "reduce the gradients of 16-bit weights, and every rank would train by itself. Call mpinit.initialize "
                f"first and wrap the model in {name} afterwards"
            )
        self._new.add(wrapper)

    def before_step(self) -> None:
        """Make masters one under wrappers that are new: all ranks are about to step."""
        self._check_at_first("step")
        if not self._new or not is_distributed():
            return
        ids = {id(parameter) for parameter in self._parameters()}
        for wrapper in sorted(self._new, key=lambda each: [id(p) in ids for p in reduced_by(each)].count(True)):
            if any(id(parameter) in ids for parameter in reduced_by(wrapper)):
                self._wrappers.add(wrapper)
                after_join(wrapper, self._send_under)
                self._send_under(wrapper, 0)
        self._new.clear()
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
        stepped = list(dict.fromkeys([*(master.weight for master in self._masters), *self._stepped()]))
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

    def _stepped(self) -> list[nn.Parameter]:
        return [weight for members in self._members for weight in members.weights]

    def _send_under(self, wrapper: Any, src: int) -> None:
        found = {id(master): master for master in map(self._masters.of, reduced_by(wrapper)) if master is not None}
        self.send(list(found.values()), [], src, wrapper.process_group)

    @torch.no_grad()
    def send(self, masters: Sequence[Master], plain: Sequence[torch.Tensor], src: int, group: Group | None) -> None:
        """Give all ranks the masters, and the parameters without masters, of one of them, and its loss scales.

        Args:
            masters: on all ranks of the same weights.
            plain: on all ranks the same.
            src: whose, its rank within ``group``.
            group: a process group; None: the default one.
        """
        values = [functools.partial(self._masters.values, master) for master in masters]
        for index, sent in broadcast(values, src, group):
            self._masters.load(masters[index], sent)
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
        changed = {id(parameter) for parameter, dtype in dtypes.items() if parameter.dtype != dtype}
        for wrapper in (*self._wrappers, *self._new):
            no_longer_after_join(wrapper)
            if any(id(parameter) in changed for parameter in reduced_by(wrapper)):
                outdate(wrapper)

    # -- verdicts -----------------------------------------------------------------------------------------------

    def agree(self, gradients: Gradients, pending: list[LossScaler]) -> None:
        """Make what the checks of gradients found one over all ranks, in one round, and move the scales.

        Where gradients are the same on all ranks, under DistributedDataParallel, nothing is sent.

        Args:
            gradients: of the optimizer that is about to step.
            pending: scalers whose update was put off until now.
        """
        groups = self._over() if is_distributed() and self._scalers[0].rule.dynamic else []
        if groups:
            if gradients.found_inf is not None and not gradients.present():
                gradients.forget_overflow()
            found_inf = gradients.found_inf
            device = found_inf.device if found_inf is not None else self._scalers[0].device
            none, nothing = torch.full((), -1.0, device=device), torch.zeros((), device=device)
            # By 2 more where the scale is to move at this step, and not when a GradScaler says so.
            noted = [(scaler.noted, 2.0 * (scaler in pending)) for scaler in self._scalers]
            found = [nothing if found_inf is None else found_inf]
            found += [none if note is None else note.to(device) + more for note, more in noted]
            verdict, *rest = agree(torch.stack(found), groups).unbind()
            gradients.agree(verdict.clone())
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
        key = tuple(members.generation for members in self._members)
        if self._groups is None or self._groups[0] != key:
            stepped = self._stepped()
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
