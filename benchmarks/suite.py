"""All that is measured: a row per workload, each with its contenders, what they are compared with, and its controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from .case import Case
from .compiled import CompiledTraining
from .growth import AXES, Growth
from .roster import BY_TYPE, CONTROLS, ROSTER
from .setting_up import Import, Initialize
from .tasks import TASKS
from .training import Training

Make = Callable[[str, str, str], Case]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Workload:
    """A row.

    Attributes:
        title: for people.
        contenders: by name, in the order in which they are shown.
        make: (contender, size of run, device) -> what its process measures.
        controls: (one, other): the other's time over the one's has to be 1, or nothing here is worth printing.
        kind: "training", "pairs", "memory", "compiled", "growth", "initialize" or "import": which tables it is for.
        devices: where it is measured.
        repeat_s: about how long one timing lasts; 0 for a single timing, without any before it.
    """

    title: str
    contenders: tuple[str, ...]
    make: Make
    controls: Pairs
    kind: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    repeat_s: float = 0.03


_BF16, _FP16 = BY_TYPE["bfloat16"], BY_TYPE["float16"]
_CONTROL: Final = ("fp32", "fp32_again")
_CONTROLS: Final = (*_CONTROL, "o0")
_USUAL: Final = ("amp_bf16", "hand_bf16", "o1_bf16", "o2_bf16", "o2_split", "o3_bf16")
# Those that compile take seconds to a minute before their first step.
_NO_COMPILERS: Final = tuple(name for name in _BF16 if not ROSTER[name].compiles)
_SMALL: Final = ("hand_bf16", "o2_bf16", "o2_split", "o2_int8", "hand_fp16", "o2_fp16")
_MEMORY: Final = (
    *("amp_fp16", "hand_fp16", "o2_fp16", "hand_bf16", "o2_bf16", "o2_split", "o2_split_bf16", "o2_int8"),
    *("o2_released", "o3_bf16", "optimi", "torchao", "bitsandbytes", "flashoptim"),
)
_ENCODED: Final = ("hand_bf16", "o2_bf16", "o2_split", "o2_split_bf16", "o2_int8")
_O1: Final = ("amp_bf16", "o1_bf16", "amp_fp16", "o1_fp16")
_COMPILED: Final = (*_CONTROL, "amp_bf16", "o1_bf16", "o2_bf16", "amp_fp16", "o1_fp16", "o2_fp16")


def _train(task: str, name: str, size: str, device: str) -> Case:
    return Training(task, name, TASKS[task].sizes["quick" if size == "quick" else device], device)


def _hold(task: str, name: str, size: str, device: str) -> Case:
    # Few steps: what a compiler takes once an encoding has had work enough is no part of what training holds.
    return Training(task, name, TASKS[task].sizes["quick" if size == "quick" else device], device, warm_up=2)


def _train_compiled(task: str, name: str, size: str, device: str) -> Case:
    return CompiledTraining(task, name, TASKS[task].sizes["quick" if size == "quick" else device], device)


def _grow(axis: str, name: str, size: str, device: str) -> Case:
    return Growth(axis, int(name.removesuffix(" again")), device)


def _initialize(layers: int, side: int, name: str, size: str, device: str) -> Case:
    return Initialize(name, {"layers": 10 if size == "quick" else layers, "side": side}, device)


def _import(name: str, size: str, device: str) -> Case:
    return Import()


def _training(task: str, contenders: tuple[str, ...]) -> Workload:
    return Workload(TASKS[task].title, (*_CONTROLS, *contenders), partial(_train, task), CONTROLS, "training")


def _launches(task: str, contenders: tuple[str, ...], kind: str = "pairs") -> Workload:
    """O0 is a contender and no control, as where a step is nothing but launches and its own book-keeping shows."""
    names = (*_CONTROLS, *contenders)
    return Workload(TASKS[task].title, names, partial(_train, task), CONTROLS[:1], kind)


def _growth(axis: str, size: str) -> Workload:
    points = AXES[axis].points[size]
    control = (f"{points[1]}", f"{points[1]} again")
    names = (*map(str, points), control[1])
    return Workload(AXES[axis].title, names, partial(_grow, axis), (control,), "growth", repeat_s=0.02)


def workloads(size: str) -> Mapping[str, Workload]:
    """Everything, by name, in the order in which it is measured; ``size`` is "quick" or "full"."""
    setting_up = ("o1", "o2", "o2_again", "o2_split", "o3")
    compiled = Workload(
        "compiled model and loss: three Linear layers with ReLU", _COMPILED, partial(_train_compiled, "wide"),
        CONTROLS[:1], "compiled",
    )  # fmt: skip
    return {
        "launch": _launches("launch", (*_BF16, *_FP16), "training"),
        "bandwidth": _training("bandwidth", (*_BF16, *_FP16)),
        "memory": Workload(
            "bytes held for 10 M parameters in 40 tensors with Adam, no network", (*_CONTROL, *_MEMORY),
            partial(_hold, "bandwidth"), CONTROLS[:1], "memory", repeat_s=0.0,
        ),
        "bandwidth_40m": _launches("bandwidth_40m", _ENCODED),
        "bandwidth_40m_foreach": _launches("bandwidth_40m_foreach", _ENCODED),
        "small_nets": _launches("small_nets", _ENCODED),
        "bandwidth_small": _launches("bandwidth_small", _SMALL),
        "wide": _training("wide", (*_USUAL, "plain_bf16", "amp_fp16", "hand_fp16", "o1_fp16", "o2_fp16")),
        "bert": _training("bert", (*_NO_COMPILERS, "amp_fp16", "hand_fp16", "o2_fp16")),
        "unet": _training("unet", _USUAL),
        "resnet": _training("resnet", _USUAL),
        "lstm": _training("lstm", _USUAL),
        "o1_linear": _launches("o1_linear", _O1),
        "o1_layer_norm": _launches("o1_layer_norm", _O1),
        **{f"grow_{axis}": _growth(axis, size) for axis in AXES},
        "initialize": Workload(
            "initialize with 1,000 modules", setting_up, partial(_initialize, 999, 4), (("o2", "o2_again"),),
            "initialize",
        ),
        "initialize_large": Workload(
            "initialize with 67 M parameters", setting_up, partial(_initialize, 64, 1024), (("o2", "o2_again"),),
            "initialize",
        ),
        "import": Workload(
            "import mpinit behind import torch", ("mpinit", "mpinit_again"), _import, (("mpinit", "mpinit_again"),),
            "import", ("cpu",), repeat_s=0.0,
        ),
        "compiled": compiled,
    }  # fmt: skip


def title_of(contender: str) -> str:
    """What people read."""
    return ROSTER[contender].title if contender in ROSTER else contender
