"""modules: inputs and outputs of a patched forward, in every container, and the forward itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import Cnn, quietly
from torch import nn

LEVELS = ["O0", "O1", "O2", "O3"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Probe(nn.Module):
    """Hands back what it was given and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.given: Any = None

    def forward(self, value: Any, *, flag: bool = False, other: Any = None) -> Any:
        """Remembers."""
        self.given = value
        return value


@pytest.mark.parametrize("call", [lambda m, v: m(v), lambda m, v: m.forward(v), lambda m, v: m(value=v)])
def test_inputs_and_outputs_are_cast_in_containers(call: Callable[[nn.Module, Any], Any]) -> None:
    x, probe = torch.ones(2), quietly(Probe(), "O3")
    value = {"a": [(x, 1)], "ids": torch.arange(2)}
    returned = call(probe, value)
    assert (probe.given["a"][0][0].dtype, returned["a"][0][0].dtype) == (F16, F32)
    assert probe.given["ids"] is returned["ids"] is value["ids"]
    assert value["a"][0][0] is x, "what the caller holds is not touched"
    assert call(probe, ids := torch.arange(2)) is ids


@pytest.mark.parametrize("outputs", ["bf16", "fp32", torch.float16, None])
@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(level: str, outputs: Any) -> None:
    model = quietly(Cnn(), level, cast_model_outputs=outputs)
    expected = {"bf16": BF16, "fp32": F32, F16: F16, None: F32}[outputs]
    x = torch.randn(2, 1, 8, 8)
    if level == "O1" and outputs is None:
        expected = F16  # a linear layer came last, and O1 in the scope of a thread leaves outputs as they are
    assert model(x).dtype is expected
    assert model.forward(x).dtype is expected


@pytest.mark.parametrize("level", LEVELS)
def test_signature_and_documentation_of_forward_stay(level: str) -> None:
    probe = Probe()
    expected = inspect.signature(probe.forward)
    quietly(probe, level)
    assert inspect.signature(probe.forward) == expected
    assert probe(torch.ones(2), flag=True, other=SimpleNamespace(a=1)).dtype is F32


def test_forward_hooks_run_once_and_see_what_the_caller_sees() -> None:
    model = nn.Linear(2, 2)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model.register_forward_hook(lambda m, args, output: seen.append((args[0].dtype, output.dtype)))
    quietly(model, "O2")
    model(torch.ones(1, 2))
    assert seen == [(F32, F32)]
