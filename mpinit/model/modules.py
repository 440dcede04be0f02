"""Models: casts parameters, buffers, inputs and outputs in place, and says how to take it back.

What is put on a model are objects of module-level classes that know their module, never closures: a copy or an
unpickled model then runs its own weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..basics.dtypes import is_lower_precision
from ..basics.patching import Undo, UndoStack, set_attribute
from ..basics.trees import cast_tree
from ..distributed.sharding import check_groups, rebuild_groups, set_data
from ..plan import Plan
from ..torch_internals.native_autocast import ForwardCasts


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


def kept_float32(models: Sequence[nn.Module], plan: Plan) -> list[nn.Module]:
    """The topmost modules that stay float32; everything below them does too."""
    kept: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if plan.keep_float32(name, module):
            kept.append(module)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    for model in models:
        visit("", model)
    return kept


def float32_tensors(models: Sequence[nn.Module], plan: Plan) -> set[torch.Tensor]:
    """The parameters and buffers of modules that stay float32.

    Raises:
        ValueError: a parameter is shared between a module that stays float32 and one that does not.
    """
    kept_modules = {module for top in kept_float32(models, plan) for module in top.modules()}
    kept = {tensor for module in kept_modules for tensor in _own_tensors(module)}
    for model in models:
        for name, module in model.named_modules():
            if module in kept_modules:
                continue
            shared = [own for own, tensor in module.named_parameters(recurse=False) if tensor in kept]
            if shared:
                where = f"{name}.{shared[0]}" if name else shared[0]
                raise ValueError(
                    f"parameter {where!r} is shared with a module that keep_fp32 leaves in float32, and cannot be in "
                    "two dtypes at once: name both modules in keep_fp32, or neither"
                )
    return kept


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def tensors_to_cast(models: Sequence[nn.Module], plan: Plan) -> dict[torch.Tensor, torch.dtype]:
    """Every floating parameter and buffer with the dtype it is to have, tied ones once, in the models' order."""
    if not plan.cast_model:
        return {}
    kept = float32_tensors(models, plan)
    targets = {
        tensor: torch.float32 if tensor in kept else plan.model_dtype
        for model in models
        for module in model.modules()
        for tensor in _own_tensors(module)
        if tensor.is_floating_point()
    }
    check_groups(models, targets)
    return targets


def will_hold_16_bit(models: Sequence[nn.Module], targets: Mapping[torch.Tensor, torch.dtype]) -> bool:
    """Whether any parameter or buffer will be 16-bit once ``targets`` are cast."""
    tensors = (tensor for model in models for module in model.modules() for tensor in _own_tensors(module))
    return any(is_lower_precision(targets.get(tensor, tensor.dtype)) for tensor in tensors)


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


def cast_tensors(targets: dict[torch.Tensor, torch.dtype]) -> Undo:
    """Cast parameters and buffers in place, one at a time, gradients with them.

    Whoever wants the float32 bits later holds on to the old storage: masters do. For everything else the undo casts
    back what the 16-bit values are then.

    Args:
        targets: tensor -> dtype.

    Returns:
        The undo.
    """
    before = {tensor: tensor.dtype for tensor in targets}

    def undo() -> None:
        for tensor, dtype in before.items():
            _cast_in_place(tensor, dtype)

    try:
        for tensor, dtype in targets.items():
            _cast_in_place(tensor, dtype)
    except BaseException:
        undo()
        raise
    return undo


def _cast_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype == dtype:
        return
    gradient, tensor.grad = tensor.grad, None
    set_data(tensor, tensor.detach().to(dtype))
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def rebuild_flat_weights(models: Sequence[nn.Module]) -> None:
    """Let RNNs, and FSDP, gather their weights anew after a cast."""
    rebuild_groups(models)
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


class Float32State:
    """State-dict hooks: what leaves a model is float32 (the masters' bits where there are masters), at every level.

    Args:
        find_master: model parameter -> the float32 values that stand for it, or None.
        load_master: (model parameter, float32 values) -> whether it has a master: takes over loaded values.
    """

    def __init__(
        self,
        find_master: Callable[[torch.Tensor], torch.Tensor | None],
        load_master: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        self._find_master: Callable[[torch.Tensor], torch.Tensor | None] | None = find_master
        self._load_master: Callable[[torch.Tensor, torch.Tensor], bool] | None = load_master
        self._arriving: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        self._rebuilt: list[str] = []

    def install(self, models: Sequence[nn.Module]) -> Undo:
        """Hook every module of the models, so that a part's state dict is float32 as well."""
        export, arrive, settle = _Hook(self, "export"), _Hook(self, "arrive"), _Hook(self, "settle")
        modules: dict[Any, None] = {module: None for model in models for module in model.modules()}
        with UndoStack() as undos:
            for module in modules:
                undos.push(module.register_state_dict_post_hook(export).remove)
                undos.push(module.register_load_state_dict_pre_hook(arrive).remove)
                undos.push(module.register_load_state_dict_post_hook(settle).remove)
        return undos.unwind

    def export(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict()``: replace this module's own 16-bit entries by float32 ones."""
        for name, tensor in _named_own_tensors(module):
            value = state_dict.get(prefix + name)
            # With keep_vars=True the caller wants the parameters themselves.
            if isinstance(value, torch.Tensor) and is_lower_precision(value.dtype) and value is not tensor:
                master = self._find_master(tensor) if self._find_master is not None else None
                state_dict[prefix + name] = value.float() if master is None else master

    def arrive(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
        """Before loading: remember the float32 values that masters are to get."""
        if self._find_master is None:
            return
        arriving = {
            name: state_dict[prefix + name]
            for name, tensor in module._parameters.items()
            if tensor is not None
            and is_lower_precision(tensor.dtype)
            and isinstance(state_dict.get(prefix + name), torch.Tensor)
        }
        if arriving and local_metadata.get("assign_to_params_buffers"):
            self._arriving.clear()
            raise RuntimeError(
                "load_state_dict(assign=True) would replace parameters that an optimizer has masters of; load with "
                "assign=False, or before mpinit.initialize"
            )
        self._arriving[id(module)] = prefix, arriving

    def settle(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After loading: hand the float32 values over, for every parameter they fit."""
        prefix, arrived = self._arriving.pop(id(module), ("", {}))
        for name, value in arrived.items():
            parameter = module._parameters[name]
            if parameter is None or self._load_master is None or parameter.shape != value.shape:
                continue
            if self._load_master(parameter, value) and is_lower_precision(value.dtype):
                self._rebuilt.append(prefix + name)
        # The outermost module settles last, and speaks for all.
        if self._rebuilt and not self._arriving:
            self._say_what_was_rebuilt()

    def _say_what_was_rebuilt(self) -> None:
        names, self._rebuilt = self._rebuilt, []
        warnings.warn(
            f"the state loaded holds 16-bit values for {len(names)} weights that have float32 masters "
            f"({', '.join(names[:3])} first): their masters were rebuilt from these, without the lower bits. Save "
            "model.state_dict() of the initialised model, which is float32, to resume exactly",
            UserWarning,
            stacklevel=6,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no masters: it exports its own weights.
        return {"_find_master": None, "_load_master": None, "_arriving": {}, "_rebuilt": []}


class _Hook:
    """One of the hooks above as an object: torch marks hooks with attributes, which bound methods cannot carry."""

    def __init__(self, state: Float32State, verb: str) -> None:
        self._state = state
        self._verb = verb

    def __call__(self, *args: Any) -> None:
        getattr(self._state, self._verb)(*args)


def _named_own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
