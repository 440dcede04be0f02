"""What the tests of O1's casts share: dtypes, plans, the types of the fixtures, a model, a thread."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpinit.basics.patching import Undo
from mpinit.config.plan import Plan, make_plan
from mpinit.config.reading import resolve

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LOWER = pytest.mark.parametrize("lower", [HALF, BF16], ids=["fp16", "bf16"])

# What the fixtures `initialize` and `start_casts` give.
Initialize = Callable[..., Any]
StartCasts = Callable[..., Undo]


def o1_plan(cast_policy: Any = "torch", **overrides: Any) -> Plan:
    """The plan of O1 with these properties."""
    return make_plan(resolve("O1", overrides)[1], cast_policy)


def listed_on_cpu_only() -> set[str]:
    """The kernels on the CPU's autocast list that are not on CUDA's, without their overloads' names."""
    registered: Any = torch._C._dispatch_get_registrations_for_dispatch_key
    cpu, cuda = (
        {name.removeprefix("aten::").partition(".")[0] for name in registered(f"Autocast{key}")}
        for key in ("CPU", "CUDA")
    )
    return cpu - cuda


def in_thread(run: Callable[[], Any]) -> Any:
    """What ``run`` returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def product_dtype() -> torch.dtype:
    """The type of a product of float32 matrices, here and now."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


class CheckpointEach(nn.Module):
    """Layers whose activations are recomputed while training."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.training else layer(x)
        return x
