"""Other packages' optimizers for bfloat16 weights, which promise less memory or fewer passes; if they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .case import Unavailable
from .contenders import SixteenBit
from .tasks import Rule, Task

Build = Callable[[Any, Rule, list[torch.nn.Parameter]], torch.optim.Optimizer]


class Peer(SixteenBit):
    """bfloat16 weights and the optimizer of another package that steps them."""

    def __init__(self, task: Task, package: str, build: Build) -> None:
        if task.rule.name not in ("adam", "sgd"):
            raise Unavailable("measured with Adam and SGD")
        try:
            self.module = importlib.import_module(package)
        except ImportError as error:
            raise Unavailable(f"{package} cannot be imported: {error}") from error
        self.build = build
        super().__init__(task, torch.bfloat16)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.build(self.module, self.task.rule, list(self.model.parameters()))


def optimi(module: Any, rule: Rule, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build optimi's optimizers with Kahan summation for the bfloat16 weights."""
    if rule.name == "adam":
        made = module.Adam(params, lr=rule.lr, betas=(0.9, 0.999), eps=1e-8, kahan_sum=True)
    else:
        made = module.SGD(params, lr=rule.lr, momentum=rule.momentum, kahan_sum=True)
    return _optimizer(made)


def torchao_8bit(module: Any, rule: Rule, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build torchao's 8-bit Adam with stochastic rounding."""
    if rule.name != "adam":
        raise Unavailable("torchao has no SGD")
    return _optimizer(module.AdamW8bit(params, lr=rule.lr, weight_decay=0.0, bf16_stochastic_round=True))


def bitsandbytes_8bit(module: Any, rule: Rule, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build bitsandbytes' 8-bit Adam, which rounds to the weights' own type."""
    if rule.name != "adam":
        raise Unavailable("measured with Adam")
    return _optimizer(module.optim.Adam8bit(params, lr=rule.lr))


def flashoptim(module: Any, rule: Rule, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build flashoptim's optimizers with 32-bit masters, kept as weight and correction, and 8-bit states."""
    if not params[0].is_cuda:
        raise Unavailable("flashoptim's kernels are CUDA's")
    if rule.name == "adam":
        return _optimizer(module.FlashAdam(params, lr=rule.lr, master_weight_bits=32))
    return _optimizer(module.FlashSGD(params, lr=rule.lr, momentum=rule.momentum, master_weight_bits=32))


def _optimizer(made: Any) -> torch.optim.Optimizer:
    assert isinstance(made, torch.optim.Optimizer)
    return made
