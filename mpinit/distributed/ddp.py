"""DistributedDataParallel (DDP) around initialised models, and what it does not do for float32 masters."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..basics.modules import modules_of
from ..basics.running import constant_when_compiled
from ..basics.weak_references import WeakIdSet
from .agreement import check_at_initialize, check_same
from .verdict import Group, device_for

# The settings of a rank with initialize(enabled=False).
_OFF: Final = {"enabled": "False"}
# The wrappers whose forward has called an initialised model, or that were in one when it was initialised. One that is
# older than the session is in no registration hook.
_CALLED: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_OLDER: Final = (
    "this {0} was made before mpinit.initialize, and has recorded the parameters' dtypes: it does not reduce the "
    "gradients of 16-bit weights, and every rank would train by itself. Call mpinit.initialize first and wrap the "
    "model in {0} afterwards"
)


@constant_when_compiled
def note_running_wrapper() -> None:
    """Remember the DDP whose forward runs at the moment; called by the forward of each initialised model."""
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    if wrapper is not None and torch.is_grad_enabled():
        _CALLED.add(wrapper)


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
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for wrapper in [each for each in _CALLED if self._is_around(each)]:
            _CALLED.discard(wrapper)
        _CALLED.update([module for module in modules_of(*models) if is_ddp(module)])

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the wrappers, but for older ones that :meth:`take_older` has still to list."""
        return iter(self._known)

    def exist(self) -> bool:
        """Return whether there is a wrapper of the models, an older one too."""
        return len(self._known) > 0 or any(map(self._is_around, _CALLED))

    def _is_around(self, wrapper: Any) -> bool:
        return any(id(parameter) in self._parameters for parameter in wrapper.module.parameters())

    def add(self, wrapper: Any) -> None:
        """Add a wrapper that is being made, and has its module and its process group already."""
        self._known.add(wrapper)

    def take_older(self) -> list[Any]:
        """List the wrappers that are older than the session, and were not listed before.

        Raises:
            RuntimeError: the session has changed the dtype of the parameters of one.
        """
        found = [each for each in _CALLED if each not in self._known and self._is_around(each)]
        for wrapper in found:
            if any(id(parameter) in self._changed for parameter in wrapper.module.parameters()):
                raise RuntimeError(_OLDER.format(type(wrapper).__name__))
        self._known.update(found)
        return found

    def have_reduced(self, weights: Iterable[torch.Tensor]) -> bool:
        """Return whether the last backward pass has averaged gradients of some weights: not inside of ``no_sync()``."""
        # The flag of the last forward, too: the backward pass may have ended in no_sync(). A forward under no_grad
        # looks alike, so wrappers of other weights do not count.
        local = [each for each in self if not (each.require_backward_grad_sync and each.require_forward_param_sync)]
        ids = set(map(id, weights)) if local else set()
        return not any(id(parameter) in ids for wrapper in local for parameter in wrapper.module.parameters())


def is_ddp(module: nn.Module) -> bool:
    """Return whether a module is a DistributedDataParallel."""
    return isinstance(module, nn.parallel.DistributedDataParallel)


def of_first_rank(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a copy of the first rank's tensor, on all ranks of a group, which all have to call it."""
    distributed: Any = torch.distributed
    there = tensor.detach().to(device_for(group, tensor.device), copy=True, memory_format=torch.contiguous_format)
    distributed.broadcast(there, group=group, group_src=0)
    return there.to(tensor.device)


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
    check_at_initialize(_OFF, [parameter for model in models for parameter in model.parameters()], process_group)
    for model in models:
        _DISABLED.add(model)
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_compare_wrapped))


def forget_disabled(models: Iterable[nn.Module]) -> None:
    """Forget that mpinit was disabled for models."""
    for model in models:
        _DISABLED.discard(model)


def _compare_wrapped(wrapper: Any, name: str, module: nn.Module | None) -> None:
    if module is not None and is_ddp(wrapper) and any(part in _DISABLED for part in module.modules()):
        check_same(_OFF, [wrapper.process_group])
