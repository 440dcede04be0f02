"""DistributedDataParallel (DDP) around initialised models, and what it does not do for float32 masters."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..basics.modules import modules_of
from ..basics.weak_references import WeakIdSet
from .agreement import check_same
from .verdict import Group, device_for, groups_of

# The settings of a rank with initialize(enabled=False).
_OFF: Final = {"enabled": "False"}
# Bytes sent in one call.
_CHUNK: Final = 1 << 26
# The wrappers whose forward has called an initialised model. An older one is in no registration hook.
_CALLED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_OLDER: Final = (
    "this {0} was made before mpinit.initialize, and has recorded the parameters' dtypes: it does not reduce the "
    "gradients of 16-bit weights, and every rank would train by itself. Call mpinit.initialize first and wrap the "
    "model in {0} afterwards"
)
_JOINS: Final = (
    "optimizer.step() was called inside of DistributedDataParallel's join(), at whose end torch makes the 16-bit "
    "weights of all ranks one, and neither the float32 masters nor the loss scales. Give all ranks equally many "
    "batches (DistributedSampler, drop_last=True), or train with loss_scale=1.0 at opt_level='O1' or with "
    "master_weights='model'"
)
_SUBGROUPS: Final = (
    "DistributedDataParallel has a post_localSGD_hook, which averages gradients over a part of the ranks: an overflow "
    "would be skipped there alone. Pass process_group=torch.distributed.group.WORLD to mpinit.initialize"
)


def note_running_wrapper() -> None:
    """Remember the DDP whose forward runs at the moment; called by the forward of each initialised model."""
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    if wrapper is not None and torch.is_grad_enabled():
        _CALLED.add(wrapper)


# While dynamo traces a forward, it calls this function once, and its result is a constant. It is what
# torch.compiler.assume_constant_result does, which imports dynamo.
note_running_wrapper._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Wrappers:
    """The DDP wrappers around the models of one session, or around parts of them.

    Args:
        models: the session's, which may have wrapped parts.
        parameters: the ids of their parameters. A wrapper that was called before the session counts only if it is
            called again.
        changed: the ids of the parameters whose dtype the session has changed.
    """

    def __init__(
        self,
        models: Iterable[nn.Module] = (),
        parameters: Iterable[int] = (),
        changed: Iterable[int] = (),
    ) -> None:
        self._parameters, self._changed = set(parameters), set(changed)
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._older: weakref.WeakSet[Any] = weakref.WeakSet()
        self._older.update([module for module in modules_of(*models) if _is_ddp(module)])
        for wrapper in [each for each in _CALLED if self._is_around(each)]:
            _CALLED.discard(wrapper)

    def _is_around(self, wrapper: Any) -> bool:
        return any(id(parameter) in self._parameters for parameter in wrapper.module.parameters())

    def add(self, wrapper: Any) -> None:
        """Add a wrapper that is being made, and has its module and its process group already."""
        self._made.add(wrapper)

    def take_older(self) -> list[Any]:
        """List the wrappers that are older than the session, and were not listed before.

        Raises:
            RuntimeError: the session has changed the dtype of the parameters of one.
        """
        found = [*self._older, *(each for each in _CALLED if each not in self._made and self._is_around(each))]
        for wrapper in found:
            if any(id(parameter) in self._changed for parameter in wrapper.module.parameters()):
                raise RuntimeError(_OLDER.format(type(wrapper).__name__))
        self._made.update(found)
        self._older.clear()
        return found

    def exist(self) -> bool:
        """Return whether there is a wrapper of the models, an older one too."""
        return bool(self._made or self._older) or any(map(self._is_around, _CALLED))

    def list(self) -> list[Any]:
        """List the wrappers, but for those that :meth:`take_older` has still to list."""
        return [*self._made]


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def check_step(wrappers: Sequence[Any], has_group: bool) -> None:
    """Refuse a step in which the ranks of a wrapper would part.

    Args:
        has_group: whether there is a ``process_group``, over which overflows are agreed on.

    Raises:
        RuntimeError: the step is in ``join()``, or gradients are averaged over a part of the ranks.
    """
    if any(wrapper._join_config.enable for wrapper in wrappers):
        raise RuntimeError(_JOINS)
    hooks = [hook for wrapper in wrappers for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    if not has_group and any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook in hooks):
        raise RuntimeError(_SUBGROUPS)


def reduced_by(wrapper: Any) -> list[nn.Parameter]:
    """List the parameters whose gradients a DDP averages."""
    ignored = wrapper.parameters_to_ignore
    return [parameter for name, parameter in wrapper.module.named_parameters() if name not in ignored]


def have_reduced(wrappers: Sequence[Any], weights: Iterable[torch.Tensor]) -> bool:
    """Return whether the last backward passes have averaged gradients: not inside of ``no_sync()``.

    Args:
        weights: those that the loss is for. A wrapper of others may have run under ``no_grad`` last, which looks alike.
    """
    if not all(wrapper.require_backward_grad_sync for wrapper in wrappers):
        return False
    # torch's flag of the last forward: that may have been in no_sync(), and the backward pass behind it.
    local = [wrapper for wrapper in wrappers if not wrapper.require_forward_param_sync]
    ids = set(map(id, weights)) if local else set()
    return not any(id(parameter) in ids for wrapper in local for parameter in wrapper.module.parameters())


@torch.no_grad()
def broadcast(values: Sequence[Callable[[], torch.Tensor]], group: Group) -> Iterator[tuple[int, torch.Tensor]]:
    """Send float32 numbers from the first rank of a group to all others, a few at a time.

    Yields:
        On the receiving ranks: an index of ``values``, and the sent value, in a new tensor. On the first: nothing.
    """
    distributed: Any = torch.distributed
    receives = distributed.get_rank(group) != 0
    for first, chunk in _chunks(values):
        flat = torch.cat([part.reshape(-1) for part in chunk])
        there = flat.to(device_for(group, flat.device))
        distributed.broadcast(there, group=group, group_src=0)
        if receives:
            parts = torch.split(there.to(flat.device), [part.numel() for part in chunk])
            for index, (part, old) in enumerate(zip(parts, chunk, strict=True)):
                yield first + index, part.view(old.shape)


def _chunks(values: Sequence[Callable[[], torch.Tensor]]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    chunk: list[torch.Tensor] = []
    first = size = 0
    for index, get in enumerate(values):
        value = get().detach()
        if chunk and (size + 4 * value.numel() > _CHUNK or chunk[0].device != value.device):
            yield first, chunk
            chunk, first, size = [], index, 0
        chunk.append(value)
        size += 4 * value.numel()
    if chunk:
        yield first, chunk


def refuse_training(wrapper: Any) -> None:
    """Refuse to train with a DDP whose parameters have another dtype than it was made for.

    torch silently drops its hooks then, and no gradient is reduced. Evaluation still works.
    """
    wrapper.register_forward_pre_hook(_refuse_in_training)


def _refuse_in_training(wrapper: nn.Module, args: Any) -> None:
    if torch.is_grad_enabled() and wrapper.training:
        name = type(wrapper).__name__
        raise RuntimeError(
            f"this {name} was made before mpinit.undo has changed the dtypes of its parameters: it would not reduce "
            f"gradients over ranks any more. Wrap the model again, model = {name}(model), or evaluate with it under "
            "torch.no_grad()"
        )


# Models of initialize(enabled=False) in a process group, and the hook that finds a DDP around one.
_DISABLED: Final[WeakIdSet[nn.Module]] = WeakIdSet()
_hooks: list[Any] = []


def compare_disabled(models: Sequence[nn.Module], process_group: Group | None) -> None:
    """Let ranks on which mpinit is enabled name this one, which is not, where they compare their settings.

    Otherwise the collectives of plain DDP or FSDP2 would meet those of the comparison.

    Raises:
        ValueError: mpinit is enabled on another rank. It is raised on all of them.
    """
    parameters = [parameter for model in models for parameter in model.parameters()]
    check_same(_OFF, {}, groups_of(parameters, None))
    if process_group is not None:
        check_same(_OFF, {}, [process_group])
    _DISABLED.update(models)
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_compare_wrapped))


def forget_disabled(models: Iterable[nn.Module]) -> None:
    """Forget that mpinit was disabled for models."""
    for model in models:
        _DISABLED.discard(model)


def _compare_wrapped(wrapper: Any, name: str, module: nn.Module | None) -> None:
    if module is not None and _is_ddp(wrapper) and any(part in _DISABLED for part in module.modules()):
        check_same(_OFF, {}, [wrapper.process_group])
