"""The growth of mpinit's cost with parameters, modules and ranks, by counts: ``python -m benchmarks.growth_counts``.

It counts function calls, bytes and collectives in real runs, on up to four gloo ranks, and no time. It writes the
figures, the picture and the table of the page about growth.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from . import stamps
from .results import ROOT

RESULT: Final = ROOT / "benchmarks" / "results" / "growth-counts.json"
PICTURE: Final = RESULT.with_suffix(".png")
PAGE: Final = ROOT / "docs" / "reference" / "growth.md"
_MARKED: Final = re.compile(r"(<!-- growth counts: begin -->\n).*?(<!-- growth counts: end -->)", re.S)

# Sides of 16 square weights: 16 thousand to 16 million parameters.
SIDES: Final = (32, 100, 316, 1000)
TENSORS: Final = 16
MODULES: Final = (10, 30, 100, 300, 1000)
RANKS: Final = (1, 2, 3, 4)
ON_PAPER: Final = (2, 4, 8, 16, 32, 64)
WIDTH, LAYERS = 128, 4
KINDS: Final[dict[str, dict[str, Any]]] = {
    "O2": {"opt_level": "O2"},
    "O5 split": {"opt_level": "O5", "master_weights": "split"},
}
ENGINES: Final = ("DDP", "DDP, 2 losses", "FSDP2")
# A verdict has fewer bytes, the gradients of a layer more.
_SMALL: Final = 1024


# -- one process ---------------------------------------------------------------------------------------------------


def calls_of(run: Callable[[], Any]) -> int:
    """Return how many functions, of Python and of C, a run calls."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    try:
        sys.setprofile(on_event)
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors that are alive, each memory counted once."""
    import torch

    found = [each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def by_parameters(kind: str, side: int) -> dict[str, Any]:
    """Count the calls of a step, and the bytes between steps, with weights of a size."""
    import torch
    from torch import nn

    import mpinit

    before = bytes_of_tensors()
    model = nn.ParameterList(torch.zeros(side, side) for _ in range(TENSORS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **KINDS[kind])

    def train() -> None:
        with mpinit.scale_loss(torch.stack([p.float().mean() for p in model]).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    calls = calls_of(train)
    between = bytes_of_tensors() - before
    mpinit.undo(model)
    return {"parameters": TENSORS * side**2, "calls": calls, "bytes": between}


def by_modules(kind: str, count: int) -> dict[str, Any]:
    """Count the calls of each part of a training's life, with as many modules."""
    import torch
    from torch import nn

    import mpinit

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(1, 2)

    def train() -> None:
        with mpinit.scale_loss(model(x).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = {"modules": count, "initialize": calls_of(lambda: mpinit.initialize(model, optimizer, **KINDS[kind]))}
    train()
    found |= {"step": calls_of(train), "state_dict": calls_of(model.state_dict)}
    return found | {"undo": calls_of(lambda: mpinit.undo(model))}


# -- several ranks -------------------------------------------------------------------------------------------------


def by_ranks(engine: str, is_ours: bool) -> dict[str, Any]:
    """Count collectives and their bytes on this rank in a step of plain torch, or of mpinit at O2."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import mpinit

    class Collectives(TorchDispatchMode):
        sizes: list[int]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
                tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
                self.sizes.append(max(each.numel() * each.element_size() for each in tensors))
            return func(*args, **kwargs or {})

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if engine == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = 2 if "2 losses" in engine else 1
    if is_ours:
        mpinit.initialize(model, optimizer, "O2", num_losses=losses)
    runs = model if engine == "FSDP2" else nn.parallel.DistributedDataParallel(model)
    counted = Collectives()
    for step in range(3):
        counted.sizes = []
        optimizer.zero_grad()
        for loss_id in range(losses):
            with counted:
                loss = runs(torch.ones(2, WIDTH)).square().mean()
                if is_ours:
                    with mpinit.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                        scaled_loss.backward()
                else:
                    loss.backward()
        with counted:
            optimizer.step()
        del step
    if is_ours:
        mpinit.undo(model)
    small = [size for size in counted.sizes if size < _SMALL]
    return {
        "ranks": dist.get_world_size(),
        "collectives": len(counted.sizes),
        "bytes": sum(counted.sizes),
        "small": len(small),
        "bytes_of_small": sum(small),
    }


def _on_rank(rank: int, count: int, port: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    found = {
        engine: {name: by_ranks(engine, is_ours) for name, is_ours in (("plain", False), ("mpinit", True))}
        for engine in ENGINES
    }
    every: list[Any] = [None] * count
    dist.all_gather_object(every, found)
    assert all(each == found for each in every), "every rank sends alike"
    if rank == 0:
        (Path(folder) / f"{count}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(count: int) -> dict[str, Any]:
    """Run :func:`by_ranks` for every engine on some ranks."""
    import socket
    import tempfile

    import torch.multiprocessing as multiprocessing

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_on_rank, args=(count, port, folder), nprocs=count)
        found: dict[str, Any] = json.loads((Path(folder) / f"{count}.json").read_text(encoding="utf-8"))
    return found


def count_all() -> dict[str, Any]:
    """Count everything."""
    import torch

    for kind in KINDS:  # what is imported or compiled once
        by_parameters(kind, SIDES[0]), by_modules(kind, MODULES[0])
    ranks = {count: on_ranks(count) for count in RANKS}
    return {
        "torch": torch.__version__.partition("+")[0],
        "parameters": {kind: [by_parameters(kind, side) for side in SIDES] for kind in KINDS},
        "modules": {kind: [by_modules(kind, count) for count in MODULES] for kind in KINDS},
        "ranks": {e: {who: [ranks[n][e][who] for n in RANKS] for who in ("plain", "mpinit")} for e in ENGINES},
    }


# -- figures -------------------------------------------------------------------------------------------------------


def slope(at: Sequence[float], counts: Sequence[float]) -> float:
    """Return the exponent of the growth from the last but one to the last point: 1 is a straight line, 0 is flat."""
    return math.log(counts[-1] / counts[-2]) / math.log(at[-1] / at[-2])


def own(rows: dict[str, list[dict[str, int]]], what: str) -> list[int]:
    """Return what mpinit adds to the small collectives of the engine, for each number of ranks."""
    return [ours[what] - plain[what] for ours, plain in zip(rows["mpinit"], rows["plain"], strict=True)]


def sent_on_paper(size: int, ranks: int) -> float:
    """Return the bytes that each rank sends in an all_reduce by a ring: 2 (n - 1) / n times the vector's."""
    return 2 * (ranks - 1) / ranks * size


def table(result: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = [["what is counted", "", "from", "to", "slope at the end"], ["---"] * 5]

    def add(what: str, kind: str, rows: list[dict[str, int]], axis: str, key: str) -> None:
        at, counts = [row[axis] for row in rows], [row[key] for row in rows]
        ends = (f"{counts[i]:,} at {at[i]:,}" for i in (0, -1))
        lines.append([what, kind, *ends, f"{slope(at, counts):.2f}"])

    for kind, rows in result["parameters"].items():
        add("calls of a step, by parameters in 16 weights", kind, rows, "parameters", "calls")
        add("bytes between steps, by parameters", kind, rows, "parameters", "bytes")
    for kind, rows in result["modules"].items():
        for part in ("initialize", "step", "state_dict", "undo"):
            add(f"calls of `{part}`, by modules", kind, rows, "modules", part)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    head = [
        "engine, O2",
        *(f"{n} ranks" if n > 1 else "1 rank" for n in RANKS),
        *(f"{n} ranks, on paper" for n in ON_PAPER[2:]),
        "bytes of each",
    ]
    lines = [head, ["---"] * len(head)]
    for engine, rows in result["ranks"].items():
        counts, sizes = own(rows, "small"), own(rows, "bytes_of_small")
        each = str(sizes[-1] // counts[-1]) if counts[-1] else "-"
        lines.append([engine, *map(str, counts), *[str(counts[-1])] * len(ON_PAPER[2:]), each])
    return text + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the four plots."""
    from .charts import OURS, _panels, _save

    figure, panels = _panels(4, 3.8)
    colors = dict(zip(KINDS, (OURS, "#0072b2"), strict=True))
    for kind, rows in result["parameters"].items():
        at = [row["parameters"] for row in rows]
        panels[0].plot(at, [row["bytes"] for row in rows], "o-", color=colors[kind], label=f"{kind}: bytes")
        panels[0].plot(at, [row["calls"] for row in rows], "s--", color=colors[kind], label=f"{kind}: calls of a step")
    panels[0].set_xlabel("parameters, in 16 weights")
    parts = {"initialize": "o-", "step": "s-", "state_dict": "^-", "undo": "v-"}
    for kind, rows in result["modules"].items():
        for part, style in parts.items():
            counts = [row[part] for row in rows]
            panels[1].plot(
                [row["modules"] for row in rows], counts, style, color=colors[kind], markersize=4,
                label=f"{kind}: calls of {part}",
            )  # fmt: skip
    panels[1].set_xlabel("modules")
    for engine, color in zip(ENGINES, (OURS, "#0072b2", "#009e73"), strict=True):
        rows = result["ranks"][engine]
        counts, sizes = own(rows, "small"), own(rows, "bytes_of_small")
        panels[2].plot(RANKS, counts, "o-", color=color, label=f"{engine}: counted")
        panels[2].plot(ON_PAPER, [counts[-1]] * len(ON_PAPER), ":", color=color, label=f"{engine}: on paper")
        for who, style in (("plain", "s--"), ("mpinit", "o-")):
            label = f"{engine}: {who}"
            # On one rank FSDP2 sends nothing, which a logarithmic axis cannot show.
            shown = [row for row in rows[who] if row["bytes"] >= _SMALL]
            at, sizes_of = [row["ranks"] for row in shown], [row["bytes"] for row in shown]
            panels[3].plot(at, sizes_of, style, color=color, label=label, markersize=4)
        if sizes[-1]:
            paper = [sent_on_paper(sizes[-1], n) for n in ON_PAPER]
            panels[3].plot(ON_PAPER, paper, ":", color=color, label=f"{engine}: verdicts, sent on paper")
    panels[2].set_xlabel("ranks: collectives of mpinit in a step")
    panels[3].set_xlabel("ranks: bytes passed to collectives in a step, on each")
    for panel in panels[:2]:
        panel.set_xscale("log")
    for panel in panels[2:]:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({*RANKS, *ON_PAPER}), map(str, sorted({*RANKS, *ON_PAPER})))
    for panel in (panels[0], panels[1], panels[3]):
        panel.set_yscale("log")
    for panel in panels:
        panel.legend(fontsize=7, frameon=False, loc="best" if panel is not panels[2] else (0.5, 0.62))
    panels[2].set_ylim(-0.1, 3.5)
    panels[0].set_ylabel("count")
    figure.suptitle("Growth of what mpinit costs, counted")
    _save(figure, path, stamps.of_text(json.dumps(result, sort_keys=True)))


def replaced(text: str, result: dict[str, Any]) -> str:
    """Return the page with the table made anew."""
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{table(result)}\n\n{mark[2]}", text)


def main() -> int:
    """Count, and write the figures, the picture and the page."""
    if "--draw" not in sys.argv:
        RESULT.write_text(json.dumps(count_all(), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    draw(result, PICTURE)
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # Native code, where it is built, would replace calls of Python.
    os.environ["MPINIT_NATIVE"] = "0"
    sys.exit(main())
