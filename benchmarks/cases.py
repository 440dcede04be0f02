"""What is measured: a case runs in a process of its own, and answers with seconds, or with counts."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import mpinit

from .ways import WAYS, Mpinit, Task, build, live_tensors

LAUNCH: Final = {"layers": 40, "width": 32, "norms": True}
WEIGHTS: Final = {"layers": 40, "width": 640, "norms": False}
QUICK: Final = {"layers": 3, "width": 8, "norms": True}
BATCH: Final = 4


def make_task(size: dict[str, Any], device: str, form: str = "fused") -> Task:
    """Make a network of linear layers with ReLU between, and LayerNorm where ``norms`` is set."""
    torch.manual_seed(0)
    width = size["width"]
    parts: list[nn.Module] = []
    for _ in range(size["layers"]):
        parts += [nn.Linear(width, width), *([nn.LayerNorm(width)] if size["norms"] else []), nn.ReLU()]
    batches = [(torch.randn(BATCH, width, device=device), torch.randn(BATCH, width, device=device)) for _ in range(4)]
    return Task(nn.Sequential(*parts).to(device), batches, form)


def timed(function: Any, count: int, device: str) -> float:
    """Return the seconds of a call: CPU time of this thread, and on CUDA wall time until the device is done."""
    # torch's own timer synchronises an accelerator.
    timer = {} if device == "cuda" else {"timer": time.process_time}
    return Timer("function()", globals={"function": function}, **timer).timeit(count).mean


class Iterations:
    """Whole iterations of a way."""

    def __init__(self, name: str, device: str, size: dict[str, Any], compiled: bool = False) -> None:
        self.device, self.compiled = device, compiled
        self.way = build(name, make_task(size, device), compiled)
        for _ in range(6 if compiled else 4):
            self.way.iterate()

    def seconds(self, count: int) -> float:
        return timed(self.way.iterate, count, self.device)

    def facts(self) -> dict[str, Any]:
        if not self.compiled:
            return {}
        from torch._dynamo.utils import counters

        return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


class Steps:
    """Steps alone: from 16-bit gradients, as after a plain backward pass, to 16-bit weights."""

    def __init__(self, name: str, device: str, size: dict[str, Any]) -> None:
        self.device, self.way = device, build(name, make_task(size, device))
        # Of ordinary size: states of the smallest gradients are denormal numbers, with which processors are slow.
        self.gradients = [(weight, torch.randn_like(weight)) for weight in self.way.model.parameters()]
        for _ in range(4):
            self.step()

    def step(self) -> None:
        for weight, gradient in self.gradients:
            weight.grad = gradient
        self.way.optimizer.step()

    def seconds(self, count: int) -> float:
        return timed(self.step, count, self.device)

    def facts(self) -> dict[str, Any]:
        return {}


class Initialize:
    """``initialize`` of 1,000 modules, with a new model each time."""

    LEVELS: Final = {
        "O1": {"opt_level": "O1"},
        "O2": {"opt_level": "O2"},
        "O2_again": {"opt_level": "O2"},
        "O5, split": {"opt_level": "O5", "master_weights": "split"},
        'O5, "model"': {"opt_level": "O5", "master_weights": "model"},
    }

    def __init__(self, name: str, device: str, modules: int) -> None:
        self.keywords, self.device, self.modules = self.LEVELS[name], device, modules
        self.seconds(1)

    def seconds(self, count: int) -> float:
        total = 0.0
        for _ in range(count):
            model = nn.Sequential(*(nn.Linear(4, 4, device=self.device) for _ in range(self.modules - 1)))
            optimizer = torch.optim.AdamW(model.parameters())
            gc.collect()  # so that the collector does not run while the clock does
            begin = time.process_time()
            mpinit.initialize(model, optimizer, **self.keywords)  # type: ignore[call-overload]
            total += time.process_time() - begin
            mpinit.undo(model)
        return total / count

    def facts(self) -> dict[str, Any]:
        return {}


class Import:
    """``import mpinit`` after ``import torch``, in a new interpreter each time."""

    CODE: Final = "import time, torch; begin = time.process_time(); import mpinit; print(time.process_time() - begin)"

    def __init__(self, name: str, device: str) -> None:
        """Take no preparation: the process that measures has imported mpinit, which has written its bytecode."""

    def seconds(self, count: int) -> float:
        command = [sys.executable, "-c", self.CODE]
        return sum(float(subprocess.check_output(command, text=True)) for _ in range(count)) / count

    def facts(self) -> dict[str, Any]:
        return {}


class Memory:
    """Bytes by kind between backward and step, and the peak of whole iterations."""

    def __init__(self, name: str, device: str, size: dict[str, Any]) -> None:
        # Freed blocks of 64 KiB and more are returned to the system at once, or they would count.
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        for option, value in ((-3, 1 << 16), (-4, 1 << 20), (-1, 1 << 17), (-2, 0)) if set_option else ():
            set_option(option, value)
        # A tiny model first: what imports allocate once is not counted.
        build(name, make_task(QUICK, device)).iterate()
        self.device = device
        before = self._now()
        self.way = build(name, make_task(size, device))
        for _ in range(2):
            self.way.iterate()
        self.peak = self._peak() - before

    def _now(self) -> int:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        return _status("RssAnon")

    def _peak(self) -> int:
        self._now()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.way.iterate()
            return torch.cuda.max_memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        self.way.iterate()
        return _status("VmHWM") - _status("RssFile") - _status("RssShmem")

    def seconds(self, count: int) -> float:
        return timed(self.way.iterate, count, self.device)

    def facts(self) -> dict[str, Any]:
        found: dict[str, int] = {}

        def count() -> None:
            found.update(bytes_by_kind(self.way.task, self.way.model, self.way.optimizer))

        step, self.way.step = self.way.step, count  # type: ignore[method-assign]
        self.way.iterate()
        self.way.step = step  # type: ignore[method-assign]
        parameters = sum(p.numel() for p in self.way.model.parameters())
        return {"parameters": parameters, "peak": self.peak, **found}


def bytes_by_kind(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the bytes of all live tensors, each storage once, for the first kind that has it.

    Masters are what is neither a weight nor a gradient nor a state: full masters, remainders of split ones.
    """
    seen: set[int] = set()
    _count([tensor for batch in task.batches for tensor in batch], seen)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    weights = _count([*model.parameters(), *model.buffers()], seen)
    gradients = _count([p.grad for p in [*model.parameters(), *stepped] if p.grad is not None], seen)
    states = _count([value for state in optimizer.state.values() for value in _tensors(state)], seen)
    return {"weights": weights, "gradients": gradients, "states": states, "masters": _count(live_tensors(), seen)}


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in a value: itself, and what a dict, a list or an encoded tensor has in it."""
    if isinstance(value, (dict, list, tuple)):
        return [tensor for each in (value.values() if isinstance(value, dict) else value) for tensor in _tensors(each)]
    # An encoded state has its codes in an attribute.
    return [value, *_tensors(vars(value))] if isinstance(value, Tensor) else []


def _count(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a wrapper without memory of its own
            continue
        if size and address not in seen:
            seen.add(address)
            total += size
    return total


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class Launches:
    """Operations, host reads and copies of an iteration of all ways, counted on the simulated device of the tests."""

    def __init__(self, name: str, device: str, form: str) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
        import simulated_device

        if why := simulated_device.missing():
            raise RuntimeError(why)
        simulated_device.start()
        self.found = {}
        size = {"layers": 20, "width": 64, "norms": True}
        with simulated_device.autocast_list():
            for way in WAYS:
                # Only a fused step skips by itself, which the loop by hand relies on in float16.
                if not way.endswith("_again") and way != "split_int8" and (form, way) != ("foreach", "hand_fp16"):
                    made = build(way, make_task(size, "sim", form))
                    for _ in range(4):
                        with simulated_device.counted() as counts:
                            made.iterate()
                    self.found[way] = {"launches": counts.launches, "reads": counts.reads, "copies": counts.copies}
                    if isinstance(made, Mpinit):
                        mpinit.undo(made.model)  # O1's casts are on in the whole thread

    def seconds(self, count: int) -> float:
        return 0.0

    def facts(self) -> dict[str, Any]:
        return self.found


# -- the table of workloads -------------------------------------------------------------------------------------------

_BF16: Final = ("hand_bf16", "hand_bf16_again", "amp_bf16", "o4", "o5", "split", "model")
_FP16: Final = ("hand_fp16", "hand_fp16_again", "amp_fp16", "o1", "o2", "o2_model")
_LOOPS: Final = {
    "clip": ("clip", "clip_masters", "clip_model"),
    "accumulation": ("accumulation",),
    "scheduler": ("scheduler",),
    "ema": ("ema", "ema_masters"),
}


def _loop(extras: tuple[str, ...]) -> tuple[str, ...]:
    names = [f"{way}+{extras[0]}" for way in ("hand_bf16", "hand_bf16_again", "hand_fp16")]
    return (*names, *(f"{way}+{extra}" for way in ("o5", "o2") for extra in extras))


@dataclass(frozen=True)
class Workload:
    """Ways that are measured together.

    Attributes:
        case: (name of a way, device) -> the case.
        turns: how many turns the ways take in a round; 0: a single process of each answers with counts.
        only: the device that it is measured on; "": on every one.
        start: how its processes start.
    """

    title: str
    names: tuple[str, ...]
    case: Any
    turns: int = 12
    only: str = ""
    start: str = "fork"


def workloads(quick: bool = False) -> dict[str, Workload]:
    """Return all workloads by name; ``quick`` ones are tiny, to try that everything runs."""
    launch, weights, modules = (QUICK, QUICK, 4) if quick else (LAUNCH, WEIGHTS, 1000)
    found = {
        "launch_bf16": Workload("launch-bound, bfloat16", _BF16, partial(Iterations, size=launch)),
        "launch_fp16": Workload("launch-bound, float16", _FP16, partial(Iterations, size=launch)),
    }
    plain = partial(Iterations, size=launch | {"norms": False})
    names = ("amp_bf16", "amp_bf16_again", "o4", "amp_fp16", "o1")
    found["plain"] = Workload("launch-bound, without norms", names, plain)
    names = ("hand_bf16", "hand_bf16_again", "o5", "split", "hand_fp16", "o2")
    found["weights"] = Workload("16 M weights", names, partial(Iterations, size=weights))
    names = ("o5", "o5_again", "split", "split+compile_steps", "split_int8", "split_int8+compile_steps")
    found["steps"] = Workload("steps of 16 M weights", names, partial(Steps, size=weights))
    for kind, extras in _LOOPS.items():
        found[f"loops_{kind}"] = Workload(kind, _loop(extras), partial(Iterations, size=launch))
    compiled = partial(Iterations, size={"layers": 3, "width": 256, "norms": False}, compiled=True)
    names = ("amp_bf16", "amp_bf16_again", "hand_bf16", "o4", "o5", "split")
    found["compiled"] = Workload("compiled", names, compiled)
    found["initialize"] = Workload("initialize", (*Initialize.LEVELS,), partial(Initialize, modules=modules), turns=4)
    found["import"] = Workload("import", ("mpinit", "mpinit_again"), Import, turns=1, only="cpu")
    names = ("fp32", "amp_fp16", "hand_bf16", "o2", "o5", "split", "split_int8", "model")
    found["memory"] = Workload("memory", names, partial(Memory, size=weights), turns=0)
    for form in ("fused", "foreach"):
        # Accelerators do not survive a fork: one new interpreter counts all ways.
        case = partial(Launches, form=form)
        found[f"launches_{form}"] = Workload(form, ("all",), case, turns=0, only="cpu", start="spawn")
    return found
