"""The workloads: a row for each, with its contenders and its controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from .case import Case
from .growth import AXES, Growth
from .loops import EXTRAS, LoopRow, LoopTraining, loop_rows
from .pieces import PIECES, Piece
from .roster import CONTROLS, ROSTER
from .setting_up import Import, Initialize
from .tasks import TASKS
from .training import CompiledTraining, MemoryUse, Training

Make = Callable[[str, str, str], Case]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Workload:
    """Something to measure, with the contenders that are compared.

    Attributes:
        title: the text in tables.
        contenders: their names, in the order in which they are shown.
        make: (contender, size of run, device) -> the case that its process measures.
        controls: pairs of contenders that do the same work. If the ratio of their times is not 1, no figure of the
            workload is shown.
        kind: "training", "pairs", "native", "memory", "pieces", "compiled", "growth", "initialize", "import" or
            "loops": the table that shows it.
        minutes: the time that its rounds need on a quiet CPU of two cores. Further rounds, for controls whose ratio is
            not 1 yet, begin only within this time.
        devices: the devices on which it is measured.
        repeat_s: the time that one turn should last; 0: each turn is a single repetition without a warm-up.
        rounds: the number of processes of each contender, if it is not the usual one.
        patience: a factor of the time limit for the turns of one process.
        target: "bench", "bench-loops" or "bench-native": the target of make that measures it.
    """

    title: str
    contenders: tuple[str, ...]
    make: Make
    controls: Pairs
    kind: str
    minutes: float
    devices: tuple[str, ...] = ("cpu", "cuda")
    repeat_s: float = 0.008
    rounds: int | None = None
    patience: float = 1.0
    target: str = "bench"


TARGETS: Final = ("bench", "bench-loops", "bench-native")
_CONTROL: Final = ("fp32", "fp32_again")
_CONTROLS: Final = (*_CONTROL, "o0")
_USUAL: Final = ("amp_bf16", "hand_bf16", "o1_bf16", "o2_bf16", "o2_split", "o3_bf16")
_LAUNCH: Final = (
    *("amp_bf16", "amp_norms_bf16", "hand_bf16", "plain_bf16", "o1_bf16", "o2_bf16", "o2_split", "o2_model", "o3_bf16"),
    *("amp_fp16", "amp_norms_fp16", "hand_fp16", "o1_fp16", "o2_fp16", "o3_fp16"),
)
_ENCODED: Final = ("o2_bf16", "o2_split", "o2_split_bf16", "o2_int8")
_ONE_PASS: Final = ("o2_bf16", "o2_split", "o2_int8")
_EAGER: Final = ("o2_eager", "o2_split_eager", "o2_int8_eager")
_NATIVE: Final = ("native_sgd", "native_adam", "native_adamw", "native_adamw_fused")
_PEERS: Final = ("optimi", "torchao", "bitsandbytes", "flashoptim")
_BANDWIDTH: Final = ("hand_bf16", *_ENCODED, "o3_bf16", *_PEERS, "hand_fp16", "o2_fp16")
_MEMORY: Final = (
    *("amp_fp16", "hand_fp16", "o2_fp16", "hand_bf16", "o2_bf16", "o2_split", "o2_split_bf16", "o2_int8"),
    *("o2_released", "o3_bf16", *_PEERS),
)
_O1: Final = ("amp_bf16", "o1_bf16", "amp_fp16", "o1_fp16")
_FP16: Final = ("amp_fp16", "hand_fp16", "o1_fp16", "o2_fp16")
_COMPILED: Final = (*_CONTROL, "amp_bf16", "o1_bf16", "o2_bf16", "amp_fp16", "o1_fp16", "o2_fp16")


# The first extra of a row -> the minutes if it is launch-bound, and if it is bandwidth-bound.
_LOOP_MINUTES: Final[Mapping[str, tuple[float, float]]] = {
    "none": (1.4, 2.2),
    "accumulation": (0.6, 1.2),
    "checkpoint": (1.0, 1.2),
    "checkpoint_10": (1.0, 1.2),
}


def _numbers(task: str, size: str, device: str) -> Mapping[str, int]:
    return TASKS[task].sizes["quick" if size == "quick" else device]


def _train(task: str, name: str, size: str, device: str) -> Case:
    return Training(task, name, _numbers(task, size, device), device)


def _train_loop(task: str, name: str, size: str, device: str) -> Case:
    return LoopTraining(task, name, _numbers(task, size, device), device)


def _measure_memory(task: str, name: str, size: str, device: str) -> Case:
    return MemoryUse(task, name, _numbers(task, size, device), device)


def _train_compiled(task: str, name: str, size: str, device: str) -> Case:
    return CompiledTraining(task, name, _numbers(task, size, device), device)


def _grow(axis: str, name: str, size: str, device: str) -> Case:
    return Growth(axis, int(name.removesuffix(" again")), device)


def _initialize(layers: int, side: int, name: str, size: str, device: str) -> Case:
    return Initialize(name, {"layers": 10 if size == "quick" else layers, "side": side}, device)


def _import(name: str, size: str, device: str) -> Case:
    return Import()


def _piece(name: str, size: str, device: str) -> Case:
    return Piece(name.removesuffix(" again"), 128 if size == "quick" else 512, needs_native=size != "quick")


def _training(
    task: str, contenders: tuple[str, ...], minutes: float, devices: tuple[str, ...] = ("cpu", "cuda")
) -> Workload:
    names = (*_CONTROLS, *contenders)
    return Workload(TASKS[task].title, names, partial(_train, task), CONTROLS, "training", minutes, devices)


def _steps(task: str, contenders: tuple[str, ...], minutes: float, kind: str = "pairs") -> Workload:
    """Make a workload whose only control is float32: O0's overhead is visible in a step that is mostly launches."""
    return Workload(TASKS[task].title, (*_CONTROL, *contenders), partial(_train, task), CONTROLS[:1], kind, minutes)


def _growth(axis: str, size: str) -> Workload:
    points = AXES[axis].points[size]
    control = (f"{points[1]}", f"{points[1]} again")
    names = (*map(str, points), control[1])
    return Workload(AXES[axis].title, names, partial(_grow, axis), (control,), "growth", AXES[axis].minutes)


def _set_up(title: str, layers: int, side: int, minutes: float) -> Workload:
    names, control = ("o1", "o2", "o2_again", "o2_split", "o3"), (("o2", "o2_again"),)
    return Workload(title, names, partial(_initialize, layers, side), control, "initialize", minutes, patience=3)


def _loops(row: LoopRow) -> Workload:
    task = TASKS[row.task]
    names = (*_CONTROL, *row.level.contenders(row.extras, has_network=not task.optimizer_only))
    first = row.extras[0]
    title = "clipping" if first == "none" else EXTRAS[first].title
    launch_bound, bandwidth_bound = _LOOP_MINUTES.get(first, (0.5, 0.8))
    return Workload(
        f"{row.level.title}, {title}: {task.title}", names, partial(_train_loop, row.task), CONTROLS[:1], "loops",
        bandwidth_bound if task.optimizer_only else launch_bound, target="bench-loops",
    )  # fmt: skip


def workloads(size: str) -> Mapping[str, Workload]:
    """Return all workloads by name, in the order in which they are measured; ``size`` is "quick" or "full"."""
    return {
        "launch": _steps("launch", ("o0", *_LAUNCH), 4.3, "training"),
        "bandwidth": _training("bandwidth", _BANDWIDTH, 2.8),
        "bert": _training("bert", _USUAL, 1.0),
        "resnet": _training("resnet", _USUAL, 1.0),
        "wide": _training("wide", (*_USUAL, "plain_bf16"), 0.7),
        "unet": _training("unet", _USUAL, 0.8),
        "lstm": _training("lstm", _USUAL, 0.8),
        "bandwidth_foreach": _steps("bandwidth_foreach", _ENCODED, 0.9),
        "bandwidth_eager": replace(_steps("bandwidth_eager", _EAGER, 0.4), devices=("cpu",)),
        "bandwidth_sgd": replace(_steps("bandwidth_sgd", (*_ONE_PASS, *_EAGER), 0.6), devices=("cpu",)),
        **{
            task: replace(_steps(task, (*_ONE_PASS, *_EAGER), 1.5, "native"), devices=("cpu",), target="bench-native")
            for task in _NATIVE
        },
        "bandwidth_small": _steps("bandwidth_small", ("hand_bf16", *_ENCODED), 0.5),
        "o1_linear": _steps("o1_linear", _O1, 0.5),
        "pieces": Workload(
            "pieces of a step on a million numbers in 4 tensors", (*PIECES, "fused Adam again"), _piece,
            (("fused Adam", "fused Adam again"),), "pieces", 0.5, ("cpu",),
        ),
        "memory": Workload(
            TASKS["memory"].title, (*_CONTROL, *_MEMORY), partial(_measure_memory, "memory"), (), "memory", 1.0,
            repeat_s=0.0, rounds=1,
        ),
        "initialize": _set_up("initialize with 1,000 modules", 999, 4, 1.2),
        "initialize_large": _set_up("initialize with 17 M parameters", 16, 1024, 0.8),
        "import": Workload(
            "import mpinit behind import torch", ("mpinit", "mpinit_again"), _import, (("mpinit", "mpinit_again"),),
            "import", 1.0, ("cpu",), patience=9,
        ),
        **{f"grow_{axis}": _growth(axis, size) for axis in AXES},
        "compiled": Workload(
            "compiled model and loss: three Linear layers with ReLU", _COMPILED, partial(_train_compiled, "wide"),
            CONTROLS[:1], "compiled", 2.2,
        ),
        # On a CPU a network in float16 needs minutes.
        "wide_fp16": _training("wide", _FP16, 1.0, ("cuda",)),
        "bert_fp16": _training("bert", _FP16, 1.0, ("cuda",)),
        **{name: _loops(row) for name, row in loop_rows().items()},
    }  # fmt: skip


def title_of(contender: str) -> str:
    """Return the title of a contender in tables."""
    way, _, extra = contender.partition("+")
    title = ROSTER[way].title if way in ROSTER else way
    return f"{title}, {EXTRAS[extra].title}" if extra in EXTRAS else title
