"""torch's engines as data, what is trained on them, by mpinit and by hand, and what ranks ask one another."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import CASES, LEVELS, first_scale, sums_in_float32
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mpinit

RANKS, WORDS, WIDTH = 4, 32, 8
# The levels that are written by hand, and the type that each computes in.
DTYPES = {"O0": None, "O2": torch.float16, "O5": torch.bfloat16, "split": torch.bfloat16, "model": torch.float16}
State = dict[str, Tensor]


@functools.cache
def _mesh(world: Any, *shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])


def mesh(*shape: int) -> Any:
    """The mesh of the process group that there is."""
    return _mesh(dist.group.WORLD, *shape)


def mine(batch: Sequence[Tensor]) -> Any:
    """This rank's part of a batch."""
    return tuple(part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)


@functools.cache
def _alone(world: Any) -> Any:
    return dist.new_subgroups(group_size=1)[0]


def by_itself() -> dict[str, Any]:
    """What to give ``initialize`` for a model that every rank trains by itself."""
    return {"process_group": _alone(dist.group.WORLD)}


def on_all_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def assert_one(values: Any, group: Any = None) -> None:
    """All ranks, or those of a group, have the same: tensors to the bit, a model's weights, or anything else."""
    if isinstance(values, nn.Module):
        values = [value.to_local() if isinstance(value, DTensor) else value for value in values.state_dict().values()]
    values = list(values.values()) if isinstance(values, dict) else values
    if isinstance(values, list):
        values = torch.cat([value.detach().flatten().float() for value in values])
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, values, group=group)
        assert all(torch.equal(gathered[0], other) for other in gathered[1:]), "ranks have parted"
    else:
        first, *others = on_all_ranks(values)
        assert others == [first] * len(others), (first, *others)


def whole(state: Any) -> State:
    """A state's tensors by name, put together from all ranks; entries of nested states by their path."""
    found: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in whole(value).items()}
        elif isinstance(value, Tensor):
            found[key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def assert_same(one: State, other: State) -> None:
    """To the bit, in the same types."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    apart = [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
    assert not apart, apart


def assert_close(one: State, other: State, tolerance: float) -> None:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=tolerance, rtol=tolerance, msg=name)


@contextlib.contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError(f"not refused: {words}")


class Block(nn.Module):
    """A layer of a language model, which may be recomputed in the backward pass."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.recomputes = recomputes

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x))


class Text(nn.Module):
    """A tiny language model; its last layer may be left out of a forward, and its head be the embedding's weight."""

    def __init__(
        self, recomputes: bool = False, tied: bool = False, leaves_out: Callable[[Tensor], bool] | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.leaves_out = leaves_out

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        left_out = self.leaves_out is not None and self.leaves_out(x)
        for block in self.blocks[:1] if left_out else self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def sometimes(x: Tensor) -> bool:
    """Some ranks for a batch, or all, or none."""
    return int(x.sum()) % 2 == 1


def alternately() -> Callable[[Tensor], bool]:
    """All ranks together: FSDP2's gather and reduce as many parameters."""
    calls = itertools.count(1)
    return lambda x: next(calls) % 2 == 1


def text(**more: Any) -> Text:
    torch.manual_seed(0)
    return Text(**more)


def batches(count: int, rows: int = 2 * RANKS) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randint(WORDS, (count, rows, 5), generator=torch.Generator().manual_seed(1))
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def loss_of(output: Tensor, target: Tensor, rows: int) -> Tensor:
    """Summed over what this rank has: none of it, perhaps."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / (4 * rows)


def no_sync(runs: Any) -> Any:
    return runs.no_sync()


@contextlib.contextmanager
def unsynced(runs: Any) -> Iterator[None]:
    """FSDP2's counterpart of ``no_sync()``."""
    runs.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        runs.set_requires_gradient_sync(True)


@dataclass(frozen=True)
class Engine:
    """An engine of torch's, and what is special about a run on it.

    Attributes:
        wrap: puts the engine around a model; the type it is to compute in, where the engine itself casts by hand.
        comes_first: whether it is put there before the optimizer is made.
        has_policy: whether a loop by hand leaves casting to the engine.
        network: the model.
        by_hand: the model for the loop by hand; default: the same.
        sizes: the rows of each rank, or of so many neighbours; None: every rank has all of them.
        micros: passes of a cycle.
        quiet: around all of them but the last.
        around: around forward and backward.
        levels: at which it is tried.
        refused: level -> words of the error.
    """

    wrap: Callable[[nn.Module, torch.dtype | None], Any]
    comes_first: bool = False
    has_policy: bool = False
    network: Callable[[], nn.Module] = text
    by_hand: Callable[[], nn.Module] | None = None
    sizes: Sequence[int] | None = (2, 2, 2, 2)
    micros: int = 1
    quiet: Callable[[Any], Any] = contextlib.nullcontext
    around: Callable[[], Any] = contextlib.nullcontext
    levels: Sequence[str] = ("O2", "split", "model")
    refused: dict[str, Sequence[str]] = field(default_factory=dict)

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, int]:
        """What this rank has of a batch, and by how many rows its loss is divided."""
        x, y = batch
        if self.sizes is None:
            return x, y, len(x)
        index = dist.get_rank() * len(self.sizes) // RANKS
        return x.split(list(self.sizes))[index], y.split(list(self.sizes))[index], len(x) // len(self.sizes)


def ddp(**more: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, dtype: DistributedDataParallel(model, **more)


def hooked(hook: str) -> Callable[[nn.Module, Any], Any]:
    """DistributedDataParallel whose gradients travel by one of torch's own hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def wrap(model: nn.Module, dtype: torch.dtype | None) -> Any:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
        return wrapped

    return wrap


def fsdp(
    *shape: int, by_layer: bool = True, offload: OffloadPolicy | None = None, over: Any = None, **more: Any
) -> Callable[[nn.Module, Any], Any]:
    def wrap(model: Any, dtype: torch.dtype | None) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        where = mesh(*shape)[over] if over else mesh(*shape)
        given = more | {"mp_policy": policy, "mesh": where} | ({"offload_policy": offload} if offload else {})
        for block in model.blocks if by_layer else ():
            fully_shard(block, **given)
        return fully_shard(model, **given)

    return wrap


def tensor_parallel(sequence: bool = False, losses: bool = False) -> Callable[[nn.Module, Any], Any]:
    across = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=across),
        "head": ColwiseParallel(
            input_layouts=across, output_layouts=Shard(-1) if losses else Replicate(), use_local_output=not losses
        ),
    }
    for block in ("blocks.0", "blocks.1"):
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=across)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=across)
        if sequence:
            plan[f"{block}.norm"] = SequenceParallel()
    if sequence:
        plan["norm"] = SequenceParallel()
    return lambda model, dtype: parallelize_module(model, mesh(4), plan)


def two_dimensions(model: Any, dtype: torch.dtype | None) -> Any:
    """Tensor parallel inside, FSDP2 outside."""
    plan = {f"blocks.{index}.{name}": kind for index in range(2) for name, kind in _COLUMNS_AND_ROWS.items()}
    return fsdp(2, 2, over="outer")(parallelize_module(model, mesh(2, 2)["inner"], plan), dtype)


_COLUMNS_AND_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def from_meta(model: Any, dtype: torch.dtype | None) -> Any:
    """Sharded while it has no memory, which it gets afterwards, and its numbers after that."""
    state = model.state_dict() if dist.get_rank() == 0 else {}
    model = fsdp(4)(model.to("meta"), dtype)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


FSDP: dict[str, Any] = {"comes_first": True, "has_policy": True, "levels": ("O2",)}
TP: dict[str, Any] = {"comes_first": True, "sizes": None, "levels": ("O2", "O5")}
ALL: dict[str, Any] = {"levels": ("O2", "O5", "model"), "refused": {"model": ("fully_shard", "master_weights=True")}}
ENGINES: dict[str, Engine] = {
    "ddp": Engine(ddp(), levels=tuple(DTYPES)),
    "ddp unused": Engine(ddp(find_unused_parameters=True), network=functools.partial(text, leaves_out=sometimes)),
    "ddp static graph": Engine(ddp(static_graph=True)),
    "ddp views": Engine(ddp(gradient_as_bucket_view=True)),
    "ddp hook": Engine(hooked("allreduce_hook")),
    "ddp hook fp16": Engine(hooked("fp16_compress_hook")),
    "ddp no_sync": Engine(ddp(), micros=2, quiet=no_sync),
    "ddp no_sync views": Engine(ddp(gradient_as_bucket_view=True), micros=2, quiet=no_sync),
    "ddp uneven": Engine(ddp(), sizes=(1, 2, 2, 3)),
    "ddp empty": Engine(ddp(), sizes=(3, 2, 3, 0)),
    "ddp tied": Engine(ddp(), network=functools.partial(text, tied=True)),
    "ddp recomputed": Engine(ddp(), network=functools.partial(text, recomputes=True), by_hand=text),
    "ddp recomputed static": Engine(
        ddp(static_graph=True), network=functools.partial(text, recomputes=True), by_hand=text
    ),
    "fsdp": Engine(fsdp(4, by_layer=False), **FSDP),
    "fsdp by layer": Engine(fsdp(4), **FSDP | ALL | {"levels": ("O0", "O2", "O5", "model")}),
    "fsdp kept": Engine(fsdp(4, reshard_after_forward=False), **FSDP),
    "fsdp reshard 2": Engine(fsdp(4, reshard_after_forward=2), **FSDP),
    "fsdp unsynced": Engine(fsdp(4), micros=2, quiet=unsynced, **FSDP | {"levels": ("O5",)}),
    "fsdp uneven": Engine(fsdp(4), sizes=(1, 2, 2, 3), **FSDP),
    "fsdp empty": Engine(fsdp(4), sizes=(3, 2, 3, 0), **FSDP),
    "fsdp unused": Engine(fsdp(4), network=lambda: text(leaves_out=alternately()), **FSDP),
    "fsdp tied": Engine(fsdp(4), network=functools.partial(text, tied=True), **FSDP),
    "fsdp recomputed": Engine(fsdp(4), network=functools.partial(text, recomputes=True), **FSDP),
    "fsdp offload": Engine(fsdp(4, offload=CPUOffloadPolicy(pin_memory=False)), **FSDP),
    "fsdp from meta": Engine(from_meta, **FSDP),
    "hsdp": Engine(fsdp(2, 2), **FSDP | ALL),
    "tp": Engine(tensor_parallel(), **TP | {"levels": tuple(DTYPES)}),
    "tp sequence": Engine(tensor_parallel(sequence=True), **TP),
    "tp loss": Engine(tensor_parallel(sequence=True, losses=True), around=loss_parallel, **TP),
    "tp fsdp": Engine(two_dimensions, sizes=(4, 4), **FSDP | ALL | {"levels": ("O2", "model")}),
}


class CastByHand(nn.Module):
    """A float32 model whose forward runs on casts of its parameters, one for every place they have in it.

    Without a type: a model that is 16-bit already. Inputs are cast too, and outputs are float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, casts_weights: bool = True) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.casts_weights = casts_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype) if x.is_floating_point() else x
        if not self.casts_weights:
            return self.model(x).float()
        named = self.model.named_parameters(remove_duplicate=False)
        casts = {name: parameter.to(self.dtype) for name, parameter in named}
        result: Tensor = torch.func.functional_call(self.model, casts, x, tie_weights=False)
        return result.float()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def cycles(engine: Engine, count: int) -> Iterator[list[tuple[Tensor, Tensor, int]]]:
    """The batches of each step."""
    parts = [engine.part(batch) for batch in batches(count * engine.micros)]
    for start in range(0, len(parts), engine.micros):
        yield parts[start : start + engine.micros]


def passes(engine: Engine, runs: Any, micros: list[tuple[Tensor, Tensor, int]]) -> Iterator[Tensor]:
    """The losses of one cycle, each where its backward belongs."""
    for index, (x, y, rows) in enumerate(micros):
        with engine.quiet(runs) if index + 1 < len(micros) else contextlib.nullcontext(), engine.around():
            yield loss_of(runs(x).float(), y, rows) / len(micros)


def pair(engine: Engine, level: str, **more: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """What runs, the model, and its optimizer, initialised."""
    runs: Any = engine.network()
    model = runs = engine.wrap(runs, None) if engine.comes_first else runs
    optimizer = sgd(model.parameters())
    mpinit.initialize(model, optimizer, **LEVELS[level] | more)
    return runs if engine.comes_first else engine.wrap(model, None), model, optimizer


def trained(engine: Engine, level: str, steps: int) -> State:
    """By mpinit."""
    runs, model, optimizer = pair(engine, level)
    for micros in cycles(engine, steps):
        optimizer.zero_grad()
        for loss in passes(engine, runs, micros):
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    assert mpinit.step_counts(optimizer) == (steps, 0)
    state = whole(model.state_dict())
    mpinit.undo(model)
    return state


@sums_in_float32()
def trained_by_hand(
    engine: Engine, level: str, steps: int, skips: Sequence[int] = (), leaves_out: Mapping[int, str] | None = None
) -> State:
    """In plain torch, on the same engine, without some of the steps.

    Args:
        leaves_out: cycle -> what this rank leaves out of it: all ("forward"), or all from "backward" or "step" on.
    """
    left_out = dict.fromkeys(skips, "forward") | dict(leaves_out or {})
    dtype, scale = DTYPES[level], first_scale(LEVELS[level])
    runs: Any = (engine.by_hand or engine.network)()
    policy = dtype if engine.has_policy else None
    model = runs = engine.wrap(runs, policy) if engine.comes_first else runs
    weights = dict(model.named_parameters())
    masters = weights
    if dtype is not None and level == "model":
        runs = CastByHand(model, dtype)
    elif dtype is not None and not engine.has_policy:
        masters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        model.to(dtype)
        weights = dict(model.named_parameters())
        round_into(weights, masters, level)
    runs = runs if engine.comes_first else engine.wrap(runs, None)
    optimizer = sgd(masters.values())
    for index, micros in enumerate(cycles(engine, steps)):
        what = left_out.get(index)
        if what == "forward":
            continue
        for weight in weights.values():
            weight.grad = None
        for loss in passes(engine, runs, micros):
            if what != "backward":
                (loss * scale).backward()
        if what is not None:
            continue
        for weight, master in zip(weights.values(), masters.values(), strict=True):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype) / scale
        optimizer.step()
        round_into(weights, masters, level)
    return whole(masters)


@torch.no_grad()
def round_into(weights: State, masters: State, level: str) -> None:
    """Masters into weights, to the nearest; of two that are as near, split masters take the larger one."""
    for weight, master in zip(weights.values(), masters.values(), strict=True):
        if isinstance(weight, DTensor) and isinstance(master, DTensor):
            weight, master = weight.to_local(), master.to_local()  # a DTensor has no bits to shift
        if level == "split" and weight.dtype is not master.dtype:
            master = ((master.view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)
        weight.copy_(master)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASE = CASES["transformer"]
# How near two processes come to one with the batches of both.
TOLERANCE = {F32: 1e-5, F16: 5e-3, BF16: 3e-2}


def sharded(over: Any = None, **policy: Any) -> nn.Module:
    """A model that FSDP2 has sharded over both processes, or over a mesh."""
    model: Any = CASE.build()
    over = over or mesh(2)
    fully_shard(model.layer, mesh=over, **policy)
    return fully_shard(model, mesh=over, **policy)


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: Any, optimizer: Any, batch: Any, factor: float = 1.0, **more: Any) -> None:
    with mpinit.scale_loss(CASE.loss(model(batch[0]), batch[1]) * factor, optimizer, **more) as scaled_loss:
        scaled_loss.backward()
