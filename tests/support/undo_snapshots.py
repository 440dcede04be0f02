"""Snapshots of torch, a model and an optimizer: what the tests of undo compare before and after."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from models import CASES, OPTIMIZERS, train_plainly
from torch import Tensor, nn
from torch.nn.modules.module import _global_module_registration_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks

from mpinit.autocast import thread_flags
from mpinit.basics.patching import undo_dropped

KINDS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O1 model scope": {"opt_level": "O1", "patch_torch_functions": "model"},
    "O2": {"opt_level": "O2"},
    "O2 and a float32 head": {"opt_level": "O2", "keep_fp32": "head"},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5 split": {"opt_level": "O5", "master_weights": "split"},
}
KEEPS_EVERY_BIT = ("O0", "O1", "O4")
NAMESPACES = (
    torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.autograd, torch._C._nn,
    torch.nn.Module, torch.nn.Parameter, torch.nn.Linear, torch.nn.LSTM, torch.nn.RNNBase, torch.nn.BatchNorm2d,
    torch.nn.MultiheadAttention, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch._VF,
    torch.backends.mha,
)  # fmt: skip


def end_dropped_sessions() -> None:
    """End the sessions that earlier tests dropped without undo, as the next ``initialize`` does."""
    gc.collect()
    undo_dropped()


def namespace() -> dict[str, Any]:
    """torch as it stands: what every name refers to, and the state of autocast."""
    seen: dict[str, Any] = {
        f"{owner.__name__}.{name}": id(value)
        for owner in NAMESPACES
        for name, value in vars(owner).items()
        if name != "__warningregistry__"
    }
    for device in thread_flags.device_types():
        seen[f"autocast {device}"] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    seen["hooks"] = [*_global_optimizer_pre_hooks, *_global_module_registration_hooks]
    seen["autocast cache"] = torch.is_autocast_cache_enabled()
    seen["autocast tag"] = torch.compiler.config.cache_key_tag
    return seen


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


def structure_of_model(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks and forwards of every module; identity, class and dtypes of every tensor."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not isinstance(value, (dict, list))}
        seen[name] = type(module), {key: id(value) for key, value in own.items()}, module.forward.__func__
        for key, value in vars(module).items():
            if isinstance(value, dict):
                seen[f"{name}: {key}"] = {inner: id(held) for inner, held in value.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        gradient = None if tensor.grad is None else tensor.grad.dtype
        seen[f"tensor {name}"] = type(tensor), tensor.dtype, tensor.requires_grad, vars(tensor), gradient
        seen[f"tensor {name}"] += (tensor.shape, tensor.stride(), tensor.is_leaf)
        if tensor.requires_grad:
            # torch cannot set grad_dtype back to "the tensor's own"; None, which takes any gradient, is the nearest.
            seen[f"grad_dtype {name}"] = tensor.grad_dtype in (None, tensor.dtype)
    return seen


def structure_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes, methods, groups and the dtypes of the state."""
    seen: dict[str, Any] = {
        key: id(value)
        for key, value in vars(optimizer).items()
        if key not in ("step", "zero_grad", "add_param_group", "_opt_called")
    }
    for name in ("step", "zero_grad", "add_param_group"):
        method = getattr(optimizer, name)
        bound = getattr(method, "__func__", method), getattr(method, "__self__", optimizer)
        seen[name] = (name in vars(optimizer), *bound)
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        seen[f"group {index}"] = id(group), id(group["params"]), [id(p) for p in group["params"]], options
    seen["state"] = {
        id(parameter): {key: getattr(value, "dtype", type(value)) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    return seen


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every number there is."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        found |= {f"state {index} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return found


class Snapshot:
    """torch, a model and an optimizer as they are now."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._structure, self._values = self._look(), values(model, optimizer)

    def _look(self) -> dict[str, Any]:
        own = structure_of_model(self._model) | {
            f"optimizer: {k}": v for k, v in structure_of_optimizer(self._optimizer).items()
        }
        return own | {f"torch: {name}": value for name, value in namespace().items()}

    def check(self, rounded: Callable[[str], bool] | None = None, but: str = "nothing") -> None:
        """Everything is as it was, but what is named so; given ``rounded``, numbers too, to the bit or nearly."""
        assert not [key for key in differences(self._structure, self._look()) if not key.endswith(but)]
        if rounded is not None:
            self._check_numbers(rounded)

    def _check_numbers(self, rounded: Callable[[str], bool]) -> None:
        before, after = self._values, values(self._model, self._optimizer)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value.dtype is after[name].dtype, name
            if rounded(name) and value.is_floating_point():
                torch.testing.assert_close(after[name], value, rtol=2.0**-7, atol=1e-6)
            else:
                assert torch.equal(after[name], value), name


def set_up(network: str = "cnn", optimizer: str = "sgd", warm: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of its training: with a frozen part, gradients and optimizer state."""
    case = CASES[network]
    model = case.build()
    next(model.parameters()).requires_grad_(False)
    trainer = OPTIMIZERS[optimizer](model.parameters())
    if warm:
        train_plainly(model, trainer, case.batches(2), case.loss)
    return model, trainer


def rounds(kind: str, model: nn.Module) -> Callable[[str], bool]:
    """What undo can only give back as 16-bit numbers: weights without masters, their state, gradients."""
    weights = {name for name, _ in model.named_parameters()}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if kind in KEEPS_EVERY_BIT or kind.startswith("O1"):
        return lambda name: False
    if kind == "O3":
        return lambda name: name in weights or name.startswith(("gradient", "state"))
    return lambda name: name in frozen or name.startswith("gradient")
