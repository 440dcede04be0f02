"""Training loops, by mpinit and by hand: what the tests of optimizers share."""

import functools
import gc
from collections.abc import Iterable
from typing import Any

import models
import torch
from session_device import placed
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import mpinit

HALVES = (torch.float16, torch.bfloat16)
Batch = tuple[torch.Tensor, torch.Tensor]


def mlp(seed: int = 0, dropout: float = 0.0, batchnorm: bool = False) -> nn.Sequential:
    """A small regression net, the same for the same seed."""
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(8)] if batchnorm else []
    net: nn.Sequential = placed(nn.Sequential(nn.Linear(6, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)))
    return net


def batches(count: int, seed: int = 1, size: int = 4) -> list[Batch]:
    """``count`` batches for :func:`mlp`."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Batch] = [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(count)
    ]
    return [placed(batch) for batch in made]


def bytes_held() -> int:
    """The bytes of all tensors that are alive, each memory counted once."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def mse(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean squared error of one batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def keywords(level: str, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """What makes ``level`` work in ``dtype``, quietly, with dynamic scaling that does not overflow at once."""
    given: dict[str, Any] = {"opt_level": level, "verbosity": 0}
    scaling = {"loss_scale": mpinit.DynamicLossScale(init=1024.0)}
    if level == "O1":
        given |= {"patch_torch_functions_type": dtype} | scaling
    elif level == "O2":
        given |= {"cast_model_type": dtype} | scaling
    elif level == "O3":
        given |= {"cast_model_type": dtype}
    return given


def start(
    model: nn.Module, level: str = "O2", dtype: torch.dtype = torch.float16, make: Any = None, **more: Any
) -> Optimizer:
    """Initialise ``model`` with the optimizer that ``make`` gives for its parameters (SGD with momentum)."""
    optimizer: Optimizer = (make or momentum)(model.parameters())
    mpinit.initialize(model, optimizer, **keywords(level, dtype) | more)
    return optimizer


def started(level: str = "O2", *args: Any, **more: Any) -> tuple[nn.Sequential, Optimizer]:
    """:func:`mlp`, and the optimizer that :func:`start` initialised it with."""
    model = mlp()
    return model, start(model, level, *args, **more)


def momentum(parameters: Iterable[Any]) -> Optimizer:
    """SGD with momentum and weight decay."""
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def plain_sgd(parameters: Iterable[Any]) -> Optimizer:
    """SGD with a learning rate of 1: a step subtracts the gradient."""
    return SGD(parameters, lr=1.0)


def adam(parameters: Iterable[Any]) -> Optimizer:
    """Adam with a learning rate that a small net can bear."""
    return Adam(parameters, lr=0.01)


def backward(loss: torch.Tensor, optimizers: Any, loss_id: int = 0, **more: Any) -> None:
    """One backward pass through ``scale_loss``."""
    with mpinit.scale_loss(loss, optimizers, loss_id, **more) as scaled_loss:
        scaled_loss.backward()


def iterate(loss: torch.Tensor, optimizer: Optimizer) -> None:
    """One iteration on a loss that was computed before its optimizer's gradients are cleared."""
    optimizer.zero_grad()
    backward(loss, optimizer)
    optimizer.step()


# The usual loop, with mpinit and without; both return the losses.
train = functools.partial(models.train, loss_of=nn.functional.mse_loss)
train_plainly = functools.partial(models.train_plainly, loss_of=nn.functional.mse_loss)


def masters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of the parameters the optimizer steps: masters where it has some."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    given = mpinit.master_params(optimizer) if hasattr(optimizer.step, "managed") else stepped
    return [parameter.detach().clone() for parameter in given]


def gradients(optimizer: Optimizer) -> list[torch.Tensor | None]:
    """Copies of the gradients the next step uses."""
    return [None if p.grad is None else p.grad.clone() for p in mpinit.master_params(optimizer)]


def poison(loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """``loss`` with infinite gradients for ``parameters`` and its own for all others."""
    for parameter in parameters:
        loss = loss + _Infinite.apply(parameter)  # type: ignore[no-untyped-call]
    return loss


class _Infinite(torch.autograd.Function):
    """0 going forward, inf coming back."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.like = {"size": parameter.shape, "dtype": parameter.dtype, "device": parameter.device}
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
        return torch.full(fill_value=float("inf"), **ctx.like)


def same(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """Assert that two lists of tensors are equal bit for bit, dtypes and missing ones included."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert a is b, f"{index}: {a} and {b}"
        else:
            # Texts of tensors cost more than most of what is compared here: made where there is a difference alone.
            text = functools.partial("{0}: {1} {2}: {3}".format, index, a, b)
            torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True, msg=text)


def close(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], tolerance: float = 0.01) -> None:
    """Assert that two lists of tensors are close, ours taken as float32."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach().float(), b.detach(), rtol=tolerance, atol=tolerance)


def follow(model: nn.Module, optimizer: Optimizer) -> None:
    """Assert that every weight is its master rounded."""
    for weight, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert torch.equal(weight.detach(), master.to(weight.dtype)), "a weight does not follow its master"


def save(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A checkpoint as a training script writes it, with the state of the random numbers."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "mpinit": mpinit.state_dict(optimizer),
        "rng": torch.get_rng_state(),
    }


def load(checkpoint: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Load the weights and the optimizer's state, not the loss scaler's."""
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def states(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state."""
    return [v for s in optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor)]


class Forwarding(Optimizer):
    """Shows the groups and the state of what it wraps as its own, without calling ``Optimizer.__init__``."""

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)


class SignDescent(Optimizer):
    """The plainest of subclasses: no foreach, no fused, no defaults that torch knows."""

    def __init__(self, params: Any, rate: float = 0.01) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                    parameter.sub_(group["rate"] * parameter.grad.sign())


class Counting(SGD):
    """Counts its steps in its groups and for itself, and goes by that, as kinds with a warm-up of their own do."""

    steps_per_parameter = True
    count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["step"])
