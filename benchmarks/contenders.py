"""The contenders that need only torch: ways to train, with the interface that every other contender has.

A training step calls ``forward``, ``backward``, ``finish_gradients`` and ``update``. ``finish_gradients`` is all that a
contender does to gradients between the backward pass and the step: unscale them, check them, copy them to masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .case import Unavailable
from .tasks import Rule, Task


def torch_optimizer(rule: Rule, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Make the optimizer of a rule."""
    form: dict[str, Any] = {} if rule.form == "default" else {rule.form: True}
    if rule.name != "sgd":
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[rule.name](params, lr=rule.lr, **form)
    return torch.optim.SGD(params, lr=rule.lr, momentum=rule.momentum, **form)


class Contender:
    """Plain training in the model's own dtype.

    Attributes:
        set_to_none: the argument of ``zero_grad``, which is called after each step.
    """

    set_to_none: bool = True

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.model
        self.device_type = next(task.model.parameters()).device.type
        self.optimizer = self.make_optimizer()
        self.run: Callable[[Tensor, Tensor], Tensor] = self.compute

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch_optimizer(self.task.rule, self.model.parameters())

    def compile_forward(self) -> None:
        """Run model and loss as one compiled function from now on."""
        self.run = torch.compile(self.compute)

    def compute(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Run model and loss: the function that is compiled."""
        return self.task.loss(self.model(inputs), target)

    def casts(self) -> AbstractContextManager[object]:
        """Return the context in which the forward runs."""
        return nullcontext()

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        with self.casts():
            return self.run(inputs, target)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def finish_gradients(self) -> None:
        """Do nothing: the gradients are ready."""

    def update(self) -> None:
        self.optimizer.step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def states(self) -> Iterable[Any]:
        """Return the optimizer's state of each parameter."""
        return self.optimizer.state.values()

    def gradient_carriers(self) -> Iterable[Tensor]:
        """Yield the tensors that have a ``.grad``, besides the model's parameters."""
        for group in self.optimizer.param_groups:
            yield from group["params"]


class Float32(Contender):
    """Plain float32; with ``tf32`` CUDA's matrix products and convolutions round their inputs to TF32."""

    def __init__(self, task: Task, *, tf32: bool = False) -> None:
        super().__init__(task)
        if tf32 and self.device_type != "cuda":
            raise Unavailable("TF32 is CUDA's")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32


class Checked:
    """The loss scale of a hand-written loop: one pass unscales and checks, and the scale is updated without a sync."""

    def __init__(self, device_type: str, scale: float | None) -> None:
        self.dynamic = scale is None
        self.scale = torch.full((), 2.0**16 if scale is None else scale, device=device_type)
        self.growth = torch.zeros((), dtype=torch.int32, device=device_type)
        self.found_inf = torch.zeros((), device=device_type)

    def unscale(self, gradients: list[Tensor]) -> None:
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self.scale.reciprocal())

    def update(self) -> None:
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self.growth, self.found_inf, 2.0, 0.5, 2000)


class Float32LayerNorm(nn.LayerNorm):
    """A LayerNorm that computes in float32, as under torch.amp on CUDA. On a CPU torch.amp keeps the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float())


class TorchAmp(Contender):
    """torch.amp as in torch's documentation: autocast around forward and loss, a GradScaler for float16.

    With ``float32_norms`` LayerNorm computes and returns float32, as on CUDA.
    """

    def __init__(self, task: Task, dtype: torch.dtype, float32_norms: bool = False) -> None:
        if float32_norms:
            norms = [module for module in task.model.modules() if type(module) is nn.LayerNorm]
            if not norms:
                raise Unavailable("there is no LayerNorm")
            for norm in norms:
                norm.__class__ = Float32LayerNorm
        super().__init__(task)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=dtype is torch.float16)

    def casts(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clear_gradients()


class SixteenBit(Contender):
    """16-bit weights and float32 BatchNorm: inputs are cast to 16 bits, and outputs to float32."""

    def __init__(self, task: Task, dtype: torch.dtype) -> None:
        self.dtype = dtype
        _lower(task.model, dtype)
        super().__init__(task)

    def compute(self, inputs: Tensor, target: Tensor) -> Tensor:
        lowered = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        return self.task.loss(self.model(lowered).float(), target)


def _lower(model: nn.Module, dtype: torch.dtype) -> None:
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.float()


class HandWritten(SixteenBit):
    """The loop of O2, written by hand as well as possible.

    It has float32 masters. One foreach call copies the gradients to them, one pass unscales and checks, a fused step
    skips by itself after an overflow, and one foreach call copies the masters to the weights.

    Args:
        checked: False: without a loss scale and without a check for inf, as in many bfloat16 loops.
        scale: a static loss scale; None: a dynamic one in float16, none otherwise.
    """

    def __init__(self, task: Task, dtype: torch.dtype, *, checked: bool = True, scale: float | None = None) -> None:
        if checked and task.rule.form != "fused":
            raise Unavailable("only a fused step skips by itself")
        originals = {param: param.detach().clone() for param in task.model.parameters()}
        super().__init__(task, dtype)
        self.checked = checked
        self.check = Checked(self.device_type, scale if dtype is torch.float16 else 1.0)
        pairs: list[tuple[Tensor, Tensor]] = [(p, originals[p]) for p in self.model.parameters() if p.dtype is dtype]
        self.weights = [weight for weight, _ in pairs]
        self.masters = [master for _, master in pairs]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        full = [p for p in self.model.parameters() if p.dtype is torch.float32]
        self.stepped = [*self.masters, *full]
        self.optimizer = torch_optimizer(self.task.rule, self.stepped)
        if checked:
            self.optimizer.found_inf = self.check.found_inf  # type: ignore[attr-defined]

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.check.scale if self.checked else loss)

    def finish_gradients(self) -> None:
        torch._foreach_copy_([_grad(m) for m in self.masters], [_grad(w) for w in self.weights])
        self.unscale()

    def unscale(self) -> None:
        """Unscale and check the gradients that are stepped, in one pass."""
        if self.checked:
            self.check.unscale([_grad(p) for p in self.stepped])

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the weights' gradients to the masters' in float32, and clear them; replaces ``finish_gradients``."""
        torch._foreach_add_([_grad(m) for m in self.masters], [_grad(w) for w in self.weights])
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def zero_master_gradients(self) -> None:
        torch._foreach_zero_([_grad(m) for m in self.masters])

    @torch.no_grad()
    def update(self) -> None:
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        if self.checked:
            self.check.update()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        if self.set_to_none:
            self.model.zero_grad()
        else:
            torch._foreach_zero_([_grad(p) for p in self.model.parameters()])


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None, "every parameter of the workloads takes part in the loss"
    return param.grad
