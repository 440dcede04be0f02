"""Converting models and moving values between 16-bit parameters and float32 masters, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from ....basics.trees import cast_tree

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(nn.Module):
    """A module that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """The input in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Put every BatchNorm that has weights back to float32, in place.

    Example:
        >>> BN_convert_float(nn.BatchNorm1d(2).half()).weight.dtype
        torch.float32
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.affine:
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """A float16 network, BatchNorm apart, that casts its own input.

    Example:
        >>> network_to_half(nn.Linear(2, 2))(torch.ones(1, 2)).dtype
        torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast one module's own floating parameters and buffers, and their gradients, not its children's.

    Args:
        module: changed in place.
        dtype: the floating dtype they get.
    """
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point() and parameter.dtype != dtype:
            grad = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            if grad is not None:
                parameter.grad = grad.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network in place, BatchNorm with weights apart.

    Example:
        >>> convert_network(nn.Linear(2, 2), torch.float16).weight.dtype
        torch.float16
    """
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network in float16 (BatchNorm apart) whose floating inputs are cast.

    Args:
        network: converted in place.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: Any) -> Any:
        """Call the network on the inputs in float16."""
        return self.network(*cast_tree(inputs, torch.float16))


def prep_param_lists(model: nn.Module) -> tuple[list[Tensor], list[nn.Parameter]]:
    """The trainable parameters of a model and float32 masters of them.

    Example:
        >>> params, masters = prep_param_lists(nn.Linear(2, 2).half())
        >>> len(params), len(masters), masters[0].dtype
        (2, 2, torch.float32)
    """
    model_params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    return model_params, [nn.Parameter(p.detach().clone().float()) for p in model_params]


def model_grads_to_master_grads(model_params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    """Copy the model's gradients into the masters', in float32.

    Args:
        model_params, master_params: what :func:`prep_param_lists` returned.
    """
    for p, master in zip(model_params, master_params, strict=True):
        master.grad = None if p.grad is None else p.grad.detach().clone().to(master.dtype)


def master_params_to_model_params(model_params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    """Copy the masters' values into the model, rounded to its dtype.

    Args:
        model_params, master_params: what :func:`prep_param_lists` returned.
    """
    with torch.no_grad():
        for p, master in zip(model_params, master_params, strict=True):
            p.copy_(master)


def to_python_float(t: Any) -> float:
    """The number in a one-element tensor (or sequence).

    Example:
        >>> to_python_float(torch.tensor(2.5))
        2.5
    """
    return float(t.item()) if hasattr(t, "item") else float(t[0])
