"""16-bit networks, and float32 copies of their parameters that a script updates and copies back by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BN_convert_float", "FP16Model", "clip_grad_norm", "convert_module", "convert_network", "tofp16"]
__all__ += ["master_params_to_model_params", "model_grads_to_master_grads", "network_to_half", "prep_param_lists"]
__all__ += ["to_python_float"]

clip_grad_norm = torch.nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """A module that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast the BatchNorms with parameters inside a module to float32, in place, and return the module."""
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.affine:
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Cast a network to float16, in place, but for its BatchNorms; return it after a cast of its one input.

    Example:
        >>> half = network_to_half(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        >>> half(torch.ones(3, 2)).dtype
        torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, their gradients and its buffers, without those of modules inside it."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network in place, but for its BatchNorms with parameters, and return it."""
    for module in network.modules():
        if not (isinstance(module, _BatchNorm) and module.affine):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network in float16, cast in place but for its BatchNorms with parameters, whose inputs are cast to float16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the network with the inputs in float16."""
        return self.network(*(value.half() for value in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Make float32 copies of a model's trainable parameters.

    Args:
        model: a model of 16-bit parameters.
        flat_master: True: one flat copy of all parameters, which must have one dtype. Default False.

    Returns:
        The parameters, and the copies to pass to an optimizer.

    Raises:
        ValueError: ``flat_master`` with parameters of several dtypes.

    Example:
        >>> weights, masters = prep_param_lists(nn.Linear(2, 2).half())
        >>> masters[0].dtype
        torch.float32
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return weights, [nn.Parameter(weight.detach().clone().float()) for weight in weights]
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) != 1:
        raise ValueError(
            f"flat_master=True takes parameters of one dtype, and the model has {sorted(map(str, dtypes))}: omit it"
        )
    flat = nn.Parameter(torch.cat([weight.detach().reshape(-1) for weight in weights]).float())
    flat.grad = torch.zeros_like(flat)
    return weights, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor], master_params: Sequence[Any], flat_master: bool = False
) -> None:
    """Copy the parameters' gradients into those of their float32 copies, in place.

    A copy gets a gradient if it has none, and loses it if its parameter has none.
    """
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad.copy_(torch.cat([grad.reshape(-1) for grad in grads]))
        return
    for weight, master in zip(model_params, master_params, strict=True):
        if weight.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = weight.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.copy_(weight.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the float32 copies back into the parameters, in place."""
    masters = list(master_params)
    if flat_master:
        sizes = [weight.numel() for weight in model_params]
        parts = torch.split(masters[0], sizes)
        masters = [part.view_as(w) for part, w in zip(parts, model_params, strict=True)]
    for weight, master in zip(model_params, masters, strict=True):
        weight.copy_(master)


def to_python_float(t: Any) -> Any:
    """Return a tensor's or a sequence's one number."""
    return t.item() if hasattr(t, "item") else t[0]
