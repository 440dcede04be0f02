"""A loop over float32 masters, written by hand, beside which mpinit's are run."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from loops import Batch, batches, mlp, momentum, same, start, train
from torch import nn
from torch.optim import Optimizer

import mpinit

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SETTINGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O2": {"opt_level": "O2", "loss_scale": 1.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
WEIGHTS = {"O0": F32, "O2": F16, "O5": BF16, "split": BF16}


def rounded(master: torch.Tensor, setting: str) -> torch.Tensor:
    """A master's weight; that of a split one is rounded half away from zero."""
    if setting != "split":
        return master.to(WEIGHTS[setting])
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(BF16)


class ByHand:
    """Float32 masters, their gradients, and a model that is their rounding: what O2 has to equal bit for bit.

    Attributes:
        setting: a key of :data:`SETTINGS`; at another one the loop goes on after :meth:`follow`.
    """

    def __init__(self, model: nn.Module, setting: str, make: Any = momentum) -> None:
        self.setting = setting
        self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.model = copy.deepcopy(model).to(WEIGHTS[setting])
        self.optimizer = make(self.masters)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.masters)
        self.follow()

    def follow(self) -> None:
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            weight.data = rounded(master.detach(), self.setting)

    def backward(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        self.model.zero_grad()
        output = self.model(batch[0].to(WEIGHTS[self.setting])).float()
        loss = nn.functional.mse_loss(output, batch[1])
        (loss * scale).backward()
        held = BF16 if self.setting == "split" else F32
        for index, weight in enumerate(self.model.parameters()):
            before = self.gradients[index]
            fresh = weight.grad.to(held) / scale  # type: ignore[union-attr]
            # Those of split masters are bfloat16 after one pass, and their sums float32.
            self.gradients[index] = fresh if before is None else before.float() + fresh.float()
        return loss.detach()

    def clip(self, norm: float) -> None:
        holders = [nn.Parameter(torch.zeros_like(g)) for g in self.gradients if g is not None]
        for holder, gradient in zip(holders, (g for g in self.gradients if g is not None), strict=True):
            holder.grad = gradient
        torch.nn.utils.clip_grad_norm_(holders, norm)

    def clear(self) -> None:
        self.gradients = [None] * len(self.masters)

    def step(self) -> None:
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()
        self.follow()


def as_by_hand(setting: str, make: Callable[..., Optimizer], count: int = 6) -> None:
    """Assert that O2 ends with the masters and weights of :class:`ByHand` after ``count`` batches."""
    model, data = mlp(), batches(count)
    by_hand = ByHand(model, setting, make)
    more = {"master_weights": "split", "loss_scale": 1.0} if setting == "split" else {}
    optimizer = start(model, "O2", WEIGHTS[setting], make, **more)
    for batch in data:
        by_hand.clear()
        by_hand.backward(batch, scale=mpinit.loss_scale(optimizer))
        by_hand.step()
        train(model, optimizer, [batch])
    # What no optimizer steps has no master, and keeps its rounding.
    stepped = [
        any(p is each for group in optimizer.param_groups for each in group["params"]) for p in model.parameters()
    ]
    weights = list(by_hand.model.parameters())
    values = [m if has else w.float() for m, w, has in zip(by_hand.masters, weights, stepped, strict=True)]
    same(model.state_dict().values(), values)
    same(model.parameters(), weights)
