"""What a session shares with the sessions of other processes: settings, float32 values, and whether to step."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..basics.modules import modules_of
from ..basics.patching import UndoStack, undo_when_dropped
from ..basics.running import current_pass
from ..distributed.agreement import check_at_initialize, check_same
from ..distributed.ddp import Wrappers, forget_disabled, is_ddp, of_first_rank, refuse_training
from ..distributed.sharding import (
    fsdp1_refusal,
    groups_of_fsdp,
    has_other_processes,
    is_distributed,
    keep_gradients,
)
from ..distributed.verdict import Group, groups_of, reduce_found_inf
from ..masters.masters import Masters
from ..scaling.scaler import LossScaler
from .members import Members

# The names under which DistributedDataParallel and FSDP1 register the model inside them.
_INSIDE_DDP: Final = "module"
_INSIDE_FSDP1: Final = "_fsdp_wrapped_module"

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
_JOINS: Final = (
    "optimizer.step() was called inside of DistributedDataParallel's join(), at whose end torch makes the 16-bit "
    "weights of all ranks one, and neither the float32 masters nor the loss scales. Give all ranks equally many "
    "batches (DistributedSampler, drop_last=True), or train with loss_scale=1.0 at opt_level='O1' or with "
    "master_weights='model'"
)
_LOCAL: Final = (
    "the last backward pass was in no_sync(), so this step would use gradients of this rank alone, and an overflow in "
    "them would move the loss scale of this rank alone. Leave no_sync() for the last pass before a step; or pass "
    "process_group=torch.distributed.group.WORLD to mpinit.initialize for local steps, which ranks then skip together"
)
_OUTSIDE: Final = (
    "{!r} is trained, and in no DistributedDataParallel, which has other parameters of the models: its gradient "
    "differs by rank, and an overflow in it would be skipped on one rank alone. Wrap it too, or pass "
    "process_group=torch.distributed.group.WORLD to mpinit.initialize, over which ranks then agree in each step"
)
_UNREDUCED: Final = (
    "FSDP2 keeps gradients of a backward pass for a later reduction (set_requires_gradient_sync(False) or "
    "set_requires_all_reduce(False)). They are in no weight.grad, so mpinit.scale_loss can neither scale nor unscale "
    "them. Reduce in every pass, or train without a loss scale: opt_level='O5', or loss_scale=1.0"
)
_FLOAT32_GRADIENTS: Final = "grad_dtype=torch.float32 does not work with {}: leave grad_dtype out, or {}"
_IN_BUCKETS: Final = (
    "DistributedDataParallel, which reduces gradients in the 16-bit dtype of the weights",
    "use master_weights='model', with which it reduces float32",
)
_IN_SHARDS: Final = (
    "16-bit parameters of FSDP2 before torch 2.15, which casts their gradients to 16 bits",
    "load the model in float32 before fully_shard, and leave master_weights=True: FSDP2 then reduces float32",
)


class Ranks:
    """The part of a session that its ranks share.

    - A model is put into a DistributedDataParallel: ranks compare their settings, and the first one sends its float32
      values and loss scales to the others.
    - Parameters are sharded, or there is a ``process_group``: ranks compare their settings at the end of
      ``initialize``, and whether gradients overflowed in each step.

    Attributes:
        groups: the process groups over which a step reduces ``found_inf``; empty where no gradient differs by rank.
        is_first_step: whether :meth:`before_step` was not called yet.
        are_local: whether the last block's gradients are those of this rank alone, as after a pass in ``no_sync()``,
            and no group reduces ``found_inf``: a later pass that averages them decides, or the step.
    """

    def __init__(
        self, members: Members, masters: Masters, scalers: Sequence[LossScaler], process_group: Group | None
    ) -> None:
        self.groups: list[Group] = []
        self.is_first_step = True
        self.are_local = False
        self._members = members
        self._masters = masters
        self._scalers = scalers
        self._process_group = process_group
        self._settings: Mapping[str, str] = {}
        self._wrappers = Wrappers()
        self._fsdp_groups: list[Any] | None = None
        # The optimizers' lists of weights, with their lengths, and the wrappers that all of them were found in.
        self._checked: set[tuple[int, ...]] = set()

    def watch(
        self,
        changed: Iterable[torch.Tensor],
        settings: Mapping[str, str],
        undos: UndoStack,
    ) -> None:
        """Compare the settings of all ranks, and from here on follow DistributedDataParallel around the models."""
        self._settings = settings
        self._wrappers = Wrappers(self._members.models, map(id, self._members.parameters()), map(id, changed))
        known = weakref.ref(self)

        def on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
            ranks = known()
            if ranks is not None and submodule is not None and name in (_INSIDE_DDP, _INSIDE_FSDP1):
                ranks._on_wrapping(module, name, submodule)

        # torch's documented hook: inside of DistributedDataParallel.__init__ it is called when its process group is
        # set, and before it broadcasts the weights.
        registered = UndoStack()
        undos.push(undo_when_dropped(self, registered.unwind))
        registered.push(register_module_module_registration_hook(on_registration).remove)
        forget_disabled(self._members.models)
        if is_distributed():
            parameters = self._members.parameters()
            check_at_initialize(settings, parameters, self._process_group)
            self.groups = groups_of(parameters, self._process_group)

    def check_shards(self) -> None:
        """Refuse float32 gradients of weights that FSDP2 has sharded in 16 bits."""
        is_asked = self._masters.grad_dtype is not None and torch.__version__ < "2.15"
        if is_asked and any(master.is_sharded for master in self._masters):
            raise ValueError(_FLOAT32_GRADIENTS.format(*_IN_SHARDS))

    def check_present(self) -> None:
        """Check that the models still have the parameters that optimizers step; see :meth:`.Members.check_present`."""
        self._members.check_present([master.weight for master in self._masters])

    def _on_wrapping(self, wrapper: nn.Module, name: str, module: nn.Module) -> None:
        if name == _INSIDE_FSDP1:
            own = set(map(id, modules_of(*self._members.models)))
            if any(id(part) in own for part in module.modules()):
                raise RuntimeError(fsdp1_refusal("a model of mpinit.initialize"))
        elif is_ddp(wrapper) and self._is_of_models(module):
            self.check_present()
            if self._masters.grad_dtype is not None and len(self._masters) > 0:
                raise ValueError(_FLOAT32_GRADIENTS.format(*_IN_BUCKETS))
            self._share_values(module, wrapper.process_group)
            self._wrappers.add(wrapper)

    def _is_of_models(self, module: nn.Module) -> bool:
        return not self._members.parameters().keys().isdisjoint(module.parameters())

    @torch.no_grad()
    def _share_values(self, module: nn.Module, group: Group) -> None:
        """Compare settings, and send the first rank's float32 values and loss scales to the others."""
        masters, ignored = self._masters, getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        parameters = {
            name: f"{tuple(p.shape)} {p.dtype}{'' if masters.of(p) is None else ' with a float32 master'}"
            for name, p in module.named_parameters()
        }
        check_same(self._settings, [group], parameters)
        for name, parameter in module.named_parameters():
            master = masters.of(parameter)
            if master is not None and name not in ignored:
                masters.load(master, of_first_rank(masters.values(master), group))
        for scaler in self._scalers:
            if scaler.is_dynamic:
                scaler.load_counters(of_first_rank(scaler.counters(), group))

    @property
    def has_wrappers(self) -> bool:
        """Whether DistributedDataParallel reduces gradients of the models, in buckets of the weights' dtype."""
        return self._wrappers.exist()

    def check_reduces(self, scaler: LossScaler) -> None:
        """Refuse a scaled loss whose gradients FSDP2 keeps: nobody would unscale them.

        Raises:
            RuntimeError: the scale is not always 1; and a module was told not to reduce gradients, or keeps some of an
                earlier pass.
        """
        if scaler.is_identity:
            return
        if self._fsdp_groups is None:  # listed once: fully_shard is called before initialize
            self._fsdp_groups = groups_of_fsdp(modules_of(*self._members.models))
        if keep_gradients(self._fsdp_groups):
            raise RuntimeError(_UNREDUCED)

    def after_block(self, weights: Iterable[nn.Parameter]) -> None:
        """Remember whether the last backward pass has averaged gradients over ranks.

        Args:
            weights: those that the loss is for.
        """
        self.are_local = not (self.groups or self._wrappers.have_reduced(weights))

    def reduce(self, found_inf: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Return the largest ``found_inf`` of all ranks; give the scalers theirs.

        One all-reduce in each group is for all of them. All ranks call it equally often.

        Args:
            found_inf: of the gradients that a step is about to use; None without gradients or a check.
            device: of these gradients.
        """
        if not self.groups:
            return found_inf
        zero = torch.zeros((), dtype=torch.float32, device=device)
        checks = [found_inf, *(scaler.found_inf for scaler in self._scalers)]
        vector = torch.stack([zero if each is None else each.to(device, torch.float32) for each in checks])
        reduced = reduce_found_inf(vector, self.groups)
        for scaler, found in zip(self._scalers, reduced[1:], strict=True):
            if scaler.found_inf is not None:
                scaler.found_inf = found.to(scaler.device)
        return reduced[0]

    def before_step(self, weights: Sequence[nn.Parameter]) -> None:
        """Refuse a step in which ranks would part.

        Args:
            weights: what the optimizer steps; always the same list.

        Raises:
            RuntimeError: a backward pass is running; or parameters were replaced; or a wrapper is older than the
                session, or in ``join()``. Where steps are skipped also: it is unknown which other processes train the
                same model, or gradients differ by rank.
        """
        if current_pass() != -1 and has_other_processes():
            raise RuntimeError(_INSIDE_BACKWARD)
        if self.is_first_step:
            self.check_present()
            self._members.warn_of_new_parameters()
            self.is_first_step = False
        if not has_other_processes():
            return
        for wrapper in self._wrappers.take_older():
            check_same(self._settings, [wrapper.process_group])
        wrappers, scaler = list(self._wrappers), self._scalers[0]
        if (scaler.is_dynamic or len(self._masters) > 0) and any(each._join_config.enable for each in wrappers):
            raise RuntimeError(_JOINS)
        if self.groups or not scaler.skips:
            return
        if scaler.is_dynamic and not wrappers:
            raise RuntimeError(_UNKNOWN_PROCESSES.format(torch.distributed.get_world_size() - 1))
        if scaler.is_dynamic and self.are_local:
            raise RuntimeError(_LOCAL)
        checked = (id(weights), len(weights), *map(id, wrappers))
        if wrappers and checked not in self._checked:
            reduced = {
                id(parameter)
                for wrapper in wrappers
                for name, parameter in wrapper.module.named_parameters()
                if name not in wrapper.parameters_to_ignore
            }
            outside = [weight for weight in weights if weight.requires_grad and id(weight) not in reduced]
            if outside:
                raise RuntimeError(_OUTSIDE.format(self._masters.names.of(outside[0])))
            self._checked.add(checked)

    def end(self, dtypes: dict[torch.Tensor, torch.dtype]) -> None:
        """Refuse training with wrappers around parameters whose dtype ``undo`` has changed.

        Args:
            dtypes: the parameters' dtypes before ``undo``.
        """
        changed = {id(parameter) for parameter, dtype in dtypes.items() if parameter.dtype != dtype}
        for wrapper in self._wrappers:
            if any(id(parameter) in changed for parameter in wrapper.module.parameters()):
                refuse_training(wrapper)
