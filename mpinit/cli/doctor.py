"""``mpinit doctor``: what this machine can do in 16 bits, and which level suits it."""

import argparse
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from ..basics.dtypes import dtype_name
from ..basics.tables import bytes_text
from ..torch_internals.native_autocast import device_types
from .output import show_json, show_table, show_text

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_OPTIMIZERS: Final = ("Adam", "AdamW", "SGD", "Adagrad")
# What 16 bits have to gain over float32 to be worth it.
_WORTH: Final = 1.15


@dataclass
class Device:
    """What was found on one device: milliseconds by dtype, None where it cannot, and optimizers with a fused step."""

    name: str
    model: str
    memory: int | None
    matmul: dict[str, float | None] = field(default_factory=dict)
    convolution: dict[str, float | None] = field(default_factory=dict)
    fused: list[str] = field(default_factory=list)


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.description = (
        "Show torch, devices, which 16-bit types and fused optimizers each has, how fast matrix "
        "products and convolutions are in 16 bits against float32 here, and which level that speaks for."
    )
    parser.add_argument(
        "--size", type=int, metavar="N", help="edge of the matrices. Default 512 on a CPU, 4096 elsewhere"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement. Default 0.5")


def run(arguments: argparse.Namespace) -> int:
    """Look and show."""
    if arguments.size is not None and arguments.size < 8:
        raise ValueError(f"--size {arguments.size} is too small to measure anything; give 8 or more")
    devices = [_look(name, arguments) for name in device_types()]
    level, reason = recommended(devices[-1])
    if arguments.json:
        found = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
        shown = [asdict(device) for device in devices]
        show_json(found | {"devices": shown, "level": level, "reason": reason})
        return 0
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads\n")
    for device in devices:
        _show(device)
    show_text(f"recommended: {level}, {reason}")
    return 0


def _look(name: str, arguments: argparse.Namespace) -> Device:
    size = arguments.size or (512 if name == "cpu" else 4096)
    device = Device(name, *_identity(name))
    for dtype in _DTYPES:
        a, b = (torch.randn(size, size, device=name) for _ in range(2))
        x, w = torch.randn(8, 64, size // 8, size // 8, device=name), torch.randn(64, 64, 3, 3, device=name)
        device.matmul[dtype_name(dtype)] = _milliseconds(torch.mm, a, b, dtype, arguments.seconds)
        device.convolution[dtype_name(dtype)] = _milliseconds(F.conv2d, x, w, dtype, arguments.seconds)
    device.fused = [kind for kind in _OPTIMIZERS if _has_fused(kind, name)]
    return device


def _identity(name: str) -> tuple[str, int | None]:
    if name == "cpu":
        return platform.processor() or platform.machine(), None
    module: Any = torch.get_device_module(name)
    properties = module.get_device_properties(module.current_device())
    return str(getattr(properties, "name", name)), getattr(properties, "total_memory", None)


def _milliseconds(function: Any, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, seconds: float) -> float | None:
    names = {"function": function, "x": x.to(dtype), "y": y.to(dtype)}
    timer = Timer("function(x, y)", globals=names, num_threads=torch.get_num_threads())
    try:
        return 1000 * timer.blocked_autorange(min_run_time=seconds).median
    except RuntimeError:
        return None


def _has_fused(kind: str, device: str) -> bool:
    parameter = torch.nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        getattr(torch.optim, kind)([parameter], lr=0.1, fused=True).step()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def recommended(device: Device) -> tuple[str, str]:
    """The level for a device, and why."""
    for level, dtype, more in (
        ("O5", "bfloat16", "and nothing to scale (O4 where float32 weights are wanted)"),
        ("O2", "float16", "with a dynamic loss scale (O1 where float32 weights are wanted)"),
    ):
        gain = _gain(device, dtype)
        if gain >= _WORTH and gain >= 0.7 * _gain(device, "float16"):
            times = f"{gain:.1f} times as fast as float32 on {device.name}"
            return level, f"{dtype} weights, float32 masters: {times}, {more}"
    return "O0", (
        f'16 bits are no faster than float32 on {device.name}; where memory is short, O5 with master_weights="split" '
        "takes a quarter less for weights, masters and gradients"
    )


def _gain(device: Device, dtype: str) -> float:
    """How many times as fast as float32, over both operations; 0 where one cannot."""
    gains = [_speed(times, dtype) for times in (device.matmul, device.convolution)]
    return math.sqrt(math.prod(gain or 0.0 for gain in gains))


def _speed(times: Mapping[str, float | None], dtype: str) -> float | None:
    """How many times as fast as float32; None where one of the two cannot."""
    took, full = times.get(dtype), times.get("float32")
    return full / took if took and full else None


def _show(device: Device) -> None:
    memory = f", {bytes_text(device.memory)}" if device.memory else ""
    rows = []
    for name in device.matmul:
        rows.append([name])
        for times in (device.matmul, device.convolution):
            speed = _speed(times, name)
            rows[-1] += ["cannot", ""] if speed is None else [f"{times[name]:.3g}", f"{speed:.2f}x"]
    head = ("type", "matmul ms", "speed", "convolution ms", "speed")
    show_table(f"{device.name}: {device.model}{memory}", head, rows, numbers=range(1, 5))
    print(f"fused optimizers on {device.name}: {', '.join(device.fused) or 'none'}\n")
