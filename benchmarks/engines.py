"""Cost of torch's engines on four ranks: bytes per parameter and rank, and bytes sent per step.

``python -m benchmarks.engines`` measures with gloo on an otherwise idle machine, where everything sent goes
over the loopback interface (Linux). It writes the figures beside the others, and the guide's table from them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

RESULT: Final = Path(__file__).parent / "results" / "engines.json"
PAGE: Final = Path(__file__).parents[1] / "docs" / "explanation" / "engines.md"
BEGINS, ENDS = "<!-- made from engines.json -->\n", "\n<!-- until here -->"
RANKS: Final = 4
STEPS: Final = 4
WIDTH, LAYERS = 512, 4
PARAMETERS: Final = LAYERS * (WIDTH + 1) * WIDTH

LEVELS: Final[dict[str, dict[str, Any]]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2 float32": {"opt_level": "O2"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "split float32": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O2", "master_weights": "model"},
}
ENGINES: Final = {
    "DDP": ("O0", "O1", "O2", "O2 float32", "split", "split float32", "model"),
    "HSDP 2 x 2": ("O0", "O1", "O2", "split"),
    "FSDP2": ("O0", "O1", "O2", "split"),
}
PARTS: Final = ("weights", "gradients", "masters", "optimizer states")


def sent() -> int:
    """Return the bytes that were sent over the loopback interface."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    fields = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8])


def bytes_of(tensors: Any, seen: set[int]) -> int:
    """Return the bytes of the tensors' storages, without those in ``seen``, and add them to ``seen``."""
    total = 0
    for tensor in tensors:
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def network(engine: str) -> Any:
    """Make a few layers; for FSDP2 and HSDP sharded, because ``fully_shard`` comes before the optimizer."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if engine == "DDP":
        return model
    shape, names = ((RANKS,), ("shard",)) if engine == "FSDP2" else ((2, 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measure(engine: str, level: str) -> dict[str, Any]:
    """Train with one engine at one level, and return the figures of this rank."""
    import torch
    from torch import nn

    import mpinit

    model = network(engine)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    runs = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if engine == "DDP" else model
    if level.endswith("float32"):
        runs.register_comm_hook(None, mpinit.float32_allreduce_hook)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with mpinit.scale_loss(runs(torch.randn(2, WIDTH)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    # The first two steps are not measured: they send things once, such as masters.
    reduced = reduced_while(lambda: train(2))
    before = sent_by_all()
    train(STEPS)
    after = sent_by_all()
    memory = parts_of(model, optimizer)
    mpinit.undo(model)
    return {
        "engine": engine,
        "level": level,
        "reduced_in": reduced,
        "bytes": {part: round(size / PARAMETERS, 2) for part, size in memory.items()},
        "bytes_sent": round((after - before) / STEPS / RANKS / PARAMETERS, 2),
    }


def reduced_while(run: Any) -> list[str]:
    """Return the dtypes of the tensors that torch's collectives reduce while a function runs, without small ones."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found: set[str] = set()

    class RecordDtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d" and "reduce" in func.__name__:
                sent = [each for each in tree_leaves(args) if hasattr(each, "numel") and each.numel() > WIDTH]
                found.update(str(each.dtype).removeprefix("torch.") for each in sent)
            return func(*args, **(kwargs or {}))

    with RecordDtypes():
        run()
    return sorted(found)


def sent_by_all() -> int:
    """Return :func:`sent` between two barriers, while no rank sends."""
    import torch.distributed as dist

    dist.barrier()
    count = sent()
    dist.barrier()
    return count


def parts_of(model: Any, optimizer: Any) -> dict[str, int]:
    """Return the bytes on a rank between backward and step, by part; a storage counts once, for its first part."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    seen: set[int] = set()
    return {
        "weights": bytes_of(model.parameters(), seen),
        "gradients": bytes_of((parameter.grad for parameter in stepped if parameter.grad is not None), seen),
        "masters": bytes_of(_masters(model), seen),
        "optimizer states": bytes_of((value for value in states if value.dim()), seen),
    }


def _masters(model: Any) -> list[Any]:
    """Return the full masters of a model, or the remainders of its split masters."""
    from mpinit import registry

    session = registry.of(model)
    masters = [] if session is None else list(session.masters)
    return [getattr(master, "remainder", master.parameter) for master in masters]


def errors() -> dict[str, float]:
    """Return the relative error of a mean of gradients over ranks that is computed in 16 bits, by dtype."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    gradient = torch.randn(1 << 18)
    exact = gradient.double()
    dist.all_reduce(exact)
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        mean = (gradient / RANKS).to(dtype)
        dist.all_reduce(mean)
        error = (mean.double() - exact / RANKS).norm() / (exact / RANKS).norm()
        found[str(dtype).removeprefix("torch.")] = float(f"{error.item():.1e}")
    return found


def run(rank: int, port: int) -> None:
    """Measure every engine and level on this rank; rank 0 writes the results and the page."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    rows = [measure(engine, level) for engine, levels in ENGINES.items() for level in levels]
    result = {
        "torch": torch.__version__.partition("+")[0],
        "ranks": RANKS,
        "parameters": PARAMETERS,
        "error_of_16_bit_means": errors(),
        "rows": rows,
    }
    if rank == 0:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


IN_FLOAT32: Final = ", `float32_allreduce_hook`"
NAMES: Final = {
    "O0": "O0",
    "O1": "O1, O4",
    "O2": "O2, O5",
    "O2 float32": f"O2, O5{IN_FLOAT32}",
    "split": 'O5, `"split"`',
    "split float32": f'O5, `"split"`{IN_FLOAT32}',
    "model": 'O2, O5, `"model"`',
}


def table(result: dict[str, Any]) -> str:
    """Return the table of the page about engines."""
    head = ["engine", "level", *PARTS, "together", "sent a step", "reduced in"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in result["rows"]:
        numbers = [row["bytes"][part] for part in PARTS]
        cells = [f"{number:.1f}" for number in (*numbers, sum(numbers), row["bytes_sent"])]
        # The rows of O2 and of masters in the model are of float16, and O5's of bfloat16.
        cells.append(" and ".join("16 bit" if name.endswith("16") else name for name in row["reduced_in"]))
        lines.append(f"| {row['engine']} | {NAMES[row['level']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, result: dict[str, Any]) -> str:
    """Return the page with the table and the sentence below it made anew."""
    before, after = page.split(BEGINS)[0], page.split(ENDS)[1]
    error = result["error_of_16_bit_means"]
    how = f"on each of {result['ranks']} ranks with Adam, after a step; torch {result['torch']}, gloo"
    off = f"{error['float16']:.0e} (float16) and {error['bfloat16']:.0e} (bfloat16), relative to its norm"
    below = f"Bytes per parameter, {how}. A mean over {result['ranks']} ranks in 16 bit is off by {off}."
    return f"{before}{BEGINS}{table(result)}\n\n{below}{ENDS}{after}"


def main() -> int:
    """Measure with four processes on this machine."""
    import socket

    import torch.multiprocessing as multiprocessing

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, args=(port,), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
