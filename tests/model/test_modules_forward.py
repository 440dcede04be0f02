"""modules: inputs and outputs of a patched forward, in every container, and the forward itself."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models import Cnn, quietly
from torch import Tensor, nn

import mpinit

LEVELS = ["O0", "O1", "O2", "O3"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

Point = namedtuple("Point", "x y")


class Bag(dict):  # type: ignore[type-arg]
    """A mapping of the user's."""


@dataclass
class Record:
    x: Tensor
    tag: str


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


X = torch.ones(2)
CONTAINERS: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "tensor": (X, lambda v: v),
    "list": ([X, 1], lambda v: v[0]),
    "tuple": ((X, "a"), lambda v: v[0]),
    "namedtuple": (Point(X, 2), lambda v: v.x),
    "dict": ({"b": X, "a": 1}, lambda v: v["b"]),
    "OrderedDict": (OrderedDict(b=X, a=None), lambda v: v["b"]),
    "mapping subclass": (Bag(b=X, a=1), lambda v: v["b"]),
    "dataclass": (Record(X, "t"), lambda v: v.x),
    "nested": ({"a": [(Point(X, 1),)]}, lambda v: v["a"][0][0].x),
}


@pytest.mark.parametrize("call", [lambda m, v: m(v), lambda m, v: m.forward(v), lambda m, v: m(value=v)])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_inputs_and_outputs_are_cast_in_every_container(kind: str, call: Callable[[nn.Module, Any], Any]) -> None:
    value, leaf = CONTAINERS[kind]
    probe = Probe()
    quietly(probe, "O3")
    returned = call(probe, value)
    assert type(probe.given) is type(value)
    assert leaf(probe.given).dtype is F16
    assert type(returned) is type(value)
    assert leaf(returned).dtype is F32
    assert leaf(value).dtype is F32, "what the caller holds is not touched"
    if isinstance(value, dict):
        assert list(probe.given) == list(value)


@pytest.mark.parametrize(
    "value",
    [3, "text", None, np.ones(2), torch.arange(2), torch.ones(2, dtype=torch.bool), [1, "a"], {"i": torch.arange(2)}],
    ids=["int", "str", "None", "numpy", "integers", "bool", "list", "dict"],
)
def test_what_is_not_floating_keeps_its_identity(value: Any) -> None:
    probe = Probe()
    quietly(probe, "O2")
    assert probe(value) is value
    assert probe.given is value


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_flow_back_to_float32_inputs(level: str) -> None:
    model = quietly(Cnn(), level, loss_scale=1.0)
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is F32
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("outputs", ["fp16", "bf16", "fp32", torch.float16, None])
@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(level: str, outputs: Any) -> None:
    model = quietly(Cnn(), level, cast_model_outputs=outputs)
    expected = {"fp16": F16, "bf16": BF16, "fp32": F32, F16: F16, None: F32}[outputs]
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


def test_a_forward_put_on_the_instance_before_still_runs() -> None:
    model = nn.Linear(2, 2)
    model.forward = lambda x: nn.functional.linear(x, model.weight) + 100  # type: ignore[method-assign]
    before = model.forward
    quietly(model, "O2")
    assert model(torch.zeros(1, 2)).min() >= 99
    mpinit.undo(model)
    assert model.forward is before


def test_forward_hooks_run_once_and_see_what_the_caller_sees() -> None:
    model = nn.Linear(2, 2)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model.register_forward_hook(lambda m, args, output: seen.append((args[0].dtype, output.dtype)))
    quietly(model, "O2")
    model(torch.ones(1, 2))
    assert seen == [(F32, F32)]
