"""Casts around the forwards of models.

What is put on a model are objects of module-level classes that know their module, never closures: a copy or an
unpickled model then runs its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..basics.patching import Undo, UndoStack, set_attribute
from ..basics.trees import cast_tree
from ..plan import Plan
from ..torch_internals.native_autocast import ForwardCasts
from .selection import kept_float32


class PatchedForward:
    """A module's ``forward`` with casts around it; stands at ``module.forward`` as a plain attribute.

    Args:
        module: the module whose class's forward runs inside.
        input_dtype: what floating inputs are cast to, or None to leave them.
        output_dtype: what floating outputs are cast to, or None to leave them.
        casts: switched on around the forward, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        casts: ForwardCasts | None = None,
    ) -> None:
        self.module = module
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.casts = casts
        # A forward that was put on the instance before this one; None: the class's own.
        self.inner: Callable[..., Any] | None = vars(module).get("forward")
        self.owner: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_dtype is not None:
            args = cast_tree(args, self.input_dtype)
            kwargs = cast_tree(kwargs, self.input_dtype)
        output = self._run(*args, **kwargs) if self.casts is None else self.casts.run(self._run, *args, **kwargs)
        return output if self.output_dtype is None else cast_tree(output, self.output_dtype)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward inside, for ``inspect.signature``."""
        return self.inner or type(self.module).forward.__get__(self.module)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is no part of the session that owns the original.
        return {**self.__dict__, "owner": None}


class PatchedReplicate:
    """``_replicate_for_data_parallel`` for patched modules: each replica's forward must run the replica."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)  # type: ignore[no-untyped-call]
        forward = vars(self.module)["forward"]
        copied = PatchedForward.__new__(PatchedForward)
        copied.__dict__.update(forward.__dict__, module=replica)
        replica.__dict__["forward"] = copied
        return replica


def patch_forwards(models: Sequence[nn.Module], plan: Plan, owner: object) -> Undo:
    """Put casts around the models' forwards and around those of modules that stay float32.

    Args:
        models: the models, patched in place.
        plan: what to do.
        owner: kept alive as long as the models are.

    Returns:
        The undo.
    """
    casts = ForwardCasts(plan.function_dtype) if plan.patch_functions else None
    with UndoStack() as undos:
        for module in kept_float32(models, plan):
            if module not in models and not _mixes_dtypes_itself(module):
                _patch_forward(module, PatchedForward(module, torch.float32, plan.model_dtype), undos)
        for model in models:
            is_kept = plan.keep_float32("", model)
            forward = PatchedForward(
                model,
                (torch.float32 if is_kept else plan.model_dtype) if plan.cast_model else None,
                plan.output_dtype if plan.cast_outputs else None,
                casts,
            )
            forward.owner = owner
            _patch_forward(model, forward, undos)
    return undos.unwind


def _patch_forward(module: nn.Module, forward: PatchedForward, undos: UndoStack) -> None:
    undos.push(set_attribute(module, "forward", forward))
    undos.push(set_attribute(module, "_replicate_for_data_parallel", PatchedReplicate(module)))


def _mixes_dtypes_itself(module: nn.Module) -> bool:
    """Whether a module's kernel takes 16-bit inputs with float32 parameters and answers in the input's type.

    torch's own BatchNorms do, in training and evaluation: casting around them would cost memory for nothing.
    """
    return isinstance(module, _BatchNorm) and type(module).forward in _MIXED_FORWARDS and "forward" not in vars(module)


_MIXED_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
