"""torch's default dtype and device, which scripts that load a large model set, change no number of a training."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import backward
from models import LEVELS
from torch import nn
from torch.optim import SGD, AdamW

import mpinit

PACKAGE = Path(mpinit.__file__).parent
FACTORIES = {"full", "zeros", "ones", "tensor", "empty", "randn", "rand", "arange", "randint", "randperm", "eye"}


def trained(level: str, make: Any, default: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80), nn.ReLU(), nn.Linear(80, 10))
    optimizer = make(model.parameters(), lr=1e-2)
    x = torch.randn(32, 100)
    try:
        torch.set_default_dtype(default)
        torch.set_default_device(device)
        mpinit.initialize(model, optimizer, **LEVELS[level])
        for _ in range(6):
            optimizer.zero_grad()
            backward(model(x).float().square().mean(), optimizer)
            mpinit.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        mpinit.undo(model)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("level", sorted(LEVELS.keys() - {"O3"}))
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_numbers_do_not_depend_on_the_default_dtype(default: torch.dtype, level: str) -> None:
    assert all(map(torch.equal, trained(level, AdamW, default), trained(level, AdamW)))


@pytest.mark.parametrize("level", sorted(LEVELS.keys() - {"O3"}))
def test_numbers_do_not_depend_on_the_default_device(level: str) -> None:
    assert all(map(torch.equal, trained(level, SGD, device="meta"), trained(level, SGD)))


def without_dtype_and_device(path: Path) -> list[str]:
    """List the calls of torch's factories in a file that depend on the default dtype or device."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords):
                if name in FACTORIES and not {"dtype", "device"} <= {each.arg for each in keywords}:
                    found.append(f"{path.name}:{node.lineno} torch.{name}")
    return found


def test_every_tensor_is_made_with_dtype_and_device() -> None:
    assert [call for path in sorted(PACKAGE.rglob("*.py")) for call in without_dtype_and_device(path)] == []
