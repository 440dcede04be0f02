"""Ways to train one task: float32, torch.amp, a loop written by hand, and mpinit. All have the same interface.

An iteration is forward, backward, step, and what an ``extra`` adds: "clip", "accumulation", "scheduler" or "ema".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import mpinit

FP16, BF16 = torch.float16, torch.bfloat16
DECAY: Final = 0.999
ACCUMULATED: Final = 4


@dataclass
class Task:
    """A float32 network on its device, its batches and its loss.

    Attributes:
        batches: (inputs, target), used one after the other, again and again.
        form: "fused" or "foreach", of torch's Adam.
    """

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    form: str = "fused"

    @property
    def device(self) -> torch.device:
        return self.batches[0][0].device

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3, **{self.form: True})


class Float32:
    """Plain float32, and what the other ways have in common."""

    def __init__(self, task: Task, extra: str = "", compiled: bool = False) -> None:
        self.task, self.model, self.extra, self.number = task, task.model, extra, 0
        self.optimizer = self.set_up()
        self.compute: Callable[..., Tensor] = torch.compile(self.loss) if compiled else self.loss
        self.passes = ACCUMULATED if extra == "accumulation" else 1
        if extra == "scheduler":
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100_000)
        elif extra.startswith("ema"):
            with self.averaging() as tensors:
                self.averages = [tensor.detach().float().clone() for tensor in tensors]

    def set_up(self) -> torch.optim.Optimizer:
        """Change the model, and return its optimizer."""
        return self.task.make_optimizer(self.model.parameters())

    def loss(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Run model and loss: the function that is compiled."""
        return nn.functional.mse_loss(self.model(inputs), target)

    def casts(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)

    def averaging(self) -> AbstractContextManager[list[Tensor]]:
        """Return the context in which float32 weights can be averaged; it yields them."""
        return nullcontext(list(self.model.parameters()))

    def step(self) -> None:
        self.optimizer.step()

    def schedule(self) -> None:
        self.scheduler.step()

    def iterate(self) -> None:
        """Make one iteration."""
        for _ in range(self.passes):
            inputs, target = self.task.batches[self.number % len(self.task.batches)]
            self.number += 1
            with self.casts():
                loss = self.compute(inputs, target)
            self.backward(loss / self.passes if self.passes > 1 else loss)
        if self.extra.startswith("clip"):
            self.clip()
        self.step()
        if self.extra == "scheduler":
            self.schedule()
        elif self.extra.startswith("ema"):
            with self.averaging() as tensors, torch.no_grad():
                torch._foreach_lerp_(self.averages, tensors, 1 - DECAY)
        self.clear()

    def clear(self) -> None:
        self.optimizer.zero_grad()


class TorchAmp(Float32):
    """torch.amp as in torch's documentation: autocast around forward and loss, a GradScaler for float16."""

    def __init__(self, task: Task, extra: str = "", compiled: bool = False, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(task.device.type, enabled=dtype is FP16)
        super().__init__(task, extra, compiled)

    def casts(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.task.device.type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        super().clip()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ByHand(Float32):
    """The loop of O2 and O5, written by hand as well as possible: 16-bit weights and float32 masters.

    One foreach call copies gradients to the masters. In float16 one pass unscales and checks them, and a fused step
    skips by itself. One foreach call copies masters to weights. In bfloat16 nothing is scaled or checked. As with
    mpinit and in plain torch, gradients take no memory between iterations.
    """

    def __init__(self, task: Task, extra: str = "", compiled: bool = False, *, dtype: torch.dtype) -> None:
        self.dtype, self.scales = dtype, dtype is FP16
        super().__init__(task, extra, compiled)

    def set_up(self) -> torch.optim.Optimizer:
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in self.model.parameters()]
        self.model.to(self.dtype)
        self.weights = list(self.model.parameters())
        optimizer = self.task.make_optimizer(self.masters)
        self.scale = torch.full((), 2.0**16 if self.scales else 1.0, device=self.task.device)
        self.growth = torch.zeros((), dtype=torch.int32, device=self.task.device)
        self.found_inf = torch.zeros((), device=self.task.device)
        if self.scales:
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        return optimizer

    def loss(self, inputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(inputs.to(self.dtype)).float(), target)

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters if master.grad is not None]

    @torch.no_grad()
    def backward(self, loss: Tensor) -> None:
        with torch.enable_grad():
            (loss * self.scale if self.scales else loss).backward()
        if self.masters[0].grad is None:
            wide = [torch.empty_like(master) for master in self.masters]
            torch._foreach_copy_(wide, [weight.grad for weight in self.weights])
            for master, gradient in zip(self.masters, wide, strict=True):
                master.grad = gradient
        else:
            torch._foreach_add_(self.gradients(), [weight.grad for weight in self.weights])
        self.model.zero_grad()
        if self.passes == 1:
            self.unscale()

    def unscale(self) -> None:
        if self.scales:
            self.found_inf.zero_()
            scale = self.scale.reciprocal()
            torch._amp_foreach_non_finite_check_and_unscale_(self.gradients(), self.found_inf, scale)

    def clip(self) -> None:
        clip_grad_norm_(self.masters, 1.0)

    def averaging(self) -> AbstractContextManager[list[Tensor]]:
        return nullcontext(list[Tensor](self.masters))

    @torch.no_grad()
    def step(self) -> None:
        if self.passes > 1:
            self.unscale()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        if self.scales:
            torch._amp_update_scale_(self.scale, self.growth, self.found_inf, 2.0, 0.5, 2000)

    def schedule(self) -> None:
        if not self.scales or not self.found_inf:
            self.scheduler.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


class Mpinit(Float32):
    """mpinit through its public functions, with the keywords of ``initialize``."""

    def __init__(self, task: Task, extra: str = "", compiled: bool = False, **keywords: Any) -> None:
        self.keywords = keywords
        super().__init__(task, extra, compiled)

    def set_up(self) -> torch.optim.Optimizer:
        optimizer = super().set_up()
        mpinit.initialize(self.model, optimizer, **self.keywords)
        if self.extra == "compile_steps":
            mpinit.compile_steps(optimizer)
        return optimizer

    def backward(self, loss: Tensor) -> None:
        with mpinit.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def clip(self) -> None:
        if self.extra == "clip":
            mpinit.clip_grad_norm_(self.optimizer, 1.0)
        elif self.extra == "clip_masters":
            clip_grad_norm_(mpinit.master_params(self.optimizer), 1.0)
        else:
            super().clip()

    def averaging(self) -> AbstractContextManager[list[Tensor]]:
        if self.extra == "ema_masters":
            return nullcontext(list(mpinit.master_params(self.optimizer)))
        return _Float32Parameters(self.model)

    def schedule(self) -> None:
        mpinit.scheduler_step(self.scheduler)


class _Float32Parameters:
    """``float32_weights``, yielding the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.block = model, mpinit.float32_weights(model)

    def __enter__(self) -> list[Tensor]:
        self.block.__enter__()
        return list(self.model.parameters())

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)


Make = Callable[..., Float32]


@dataclass(frozen=True)
class Way:
    """A way by its title in tables, and the way written by hand and with torch.amp that it is compared with.

    Attributes:
        is_ours: whether it is mpinit.
    """

    title: str
    make: Make
    by_hand: str = ""
    amp: str = ""
    is_ours: bool = False


def _ours(title: str, suffix: str, **keywords: Any) -> Way:
    by_hand = "" if keywords["opt_level"] in ("O0", "O1", "O4") else f"hand_{suffix}"
    return Way(title, partial(Mpinit, **keywords), by_hand, f"amp_{suffix}", is_ours=True)


WAYS: Final[Mapping[str, Way]] = {
    "fp32": Way("float32", Float32),
    "amp_bf16": Way("torch.amp, bfloat16", partial(TorchAmp, dtype=BF16)),
    "amp_bf16_again": Way("torch.amp, bfloat16, again", partial(TorchAmp, dtype=BF16)),
    "hand_bf16": Way("by hand, bfloat16", partial(ByHand, dtype=BF16), amp="amp_bf16"),
    "hand_bf16_again": Way("by hand, bfloat16, again", partial(ByHand, dtype=BF16)),
    "o4": _ours("O4", "bf16", opt_level="O4"),
    "o5": _ours("O5", "bf16", opt_level="O5"),
    "o5_again": _ours("O5, again", "bf16", opt_level="O5"),
    "split": _ours("O5, split", "bf16", opt_level="O5", master_weights="split"),
    "model": _ours('O5, "model"', "bf16", opt_level="O5", master_weights="model"),
    "split_int8": _ours(
        "O5, split, int8 states", "bf16", opt_level="O5", master_weights="split", optimizer_state="int8"
    ),
    "amp_fp16": Way("torch.amp, float16", partial(TorchAmp, dtype=FP16)),
    "hand_fp16": Way("by hand, float16", partial(ByHand, dtype=FP16), amp="amp_fp16"),
    "hand_fp16_again": Way("by hand, float16, again", partial(ByHand, dtype=FP16)),
    "o1": _ours("O1", "fp16", opt_level="O1"),
    "o2": _ours("O2", "fp16", opt_level="O2"),
    "o2_model": _ours('O2, "model"', "fp16", opt_level="O2", master_weights="model"),
}
# An extra of mpinit -> the extra of the other ways that it is compared with.
EXTRAS: Final[Mapping[str, tuple[str, str]]] = {
    "clip": ("clip", "mpinit.clip_grad_norm_(optimizer)"),
    "clip_masters": ("clip", "clip_grad_norm_(master_params(optimizer))"),
    "clip_model": ("clip", "clip_grad_norm_(model.parameters())"),
    "accumulation": ("accumulation", f"{ACCUMULATED} backward passes a step"),
    "scheduler": ("scheduler", "a learning rate scheduler"),
    "ema": ("ema", "an average of the weights each step, in float32_weights"),
    "compile_steps": ("", "mpinit.compile_steps(optimizer)"),
    "ema_masters": ("ema", "an average of master_params(optimizer) each step"),
}


def build(name: str, task: Task, compiled: bool = False) -> Float32:
    """Make a way of a name such as "o5" or "o5+clip"."""
    way, _, extra = name.partition("+")
    return WAYS[way].make(task, extra, compiled)


def by_title(name: str) -> str:
    """Return the title of a way with its extra."""
    way, _, extra = name.partition("+")
    return f"{WAYS[way].title}, {EXTRAS[extra][1]}" if extra else WAYS[way].title


def live_tensors() -> Iterator[Tensor]:
    """Yield all tensors of this process."""
    import gc

    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            yield thing
