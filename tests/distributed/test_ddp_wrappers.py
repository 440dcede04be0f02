"""DistributedDataParallel older than the session, compiled, in join(), around parts, and told to leave tensors be."""

import contextlib
import copy
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import engines
import torch
import torch.distributed as dist
from engines import BF16
from models import LEVELS
from processes import ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpinit

SCALE = 16.0


def network() -> nn.Sequential:
    """Build two layers; every rank has the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, index: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * index + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def step(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(loss_of(run(x)), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def compiled(model: nn.Module, how: str, make: Callable[[nn.Module], Any]) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Wrap and compile in one of the orders; return the wrapper, and what runs."""
    if how == "model in place":
        model.compile(backend="eager")
    wrapped = make(torch.compile(model, backend="eager") if how == "inside" else model)
    run = wrapped
    if how == "in place":
        wrapped.compile(backend="eager")
    elif how == "a function":
        run = torch.compile(lambda x: wrapped(x), backend="eager")
    elif how == "outside":
        run = torch.compile(wrapped, backend="eager")
    return wrapped, run


ORDERS = ("not", "outside", "inside", "in place", "model in place", "a function")


@ranks(
    2,
    *[("O5", how) for how in ("outside", "inside")],
    long=[(level, how) for level in ("O2", "O3", "split") for how in ORDERS],
)
def test_older_wrapper_of_cast_weights_is_refused(level: str, how: str) -> None:
    """Also where dynamo traces the forward, and where it has traced it before the session."""
    torch.compiler.reset()  # graphs of another test's model of this class would be used again
    model = network()
    _, run = compiled(model, how, DistributedDataParallel)
    loss_of(run(batch(dist.get_rank()))).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    before = copy.deepcopy(model.state_dict())
    # A graph that was traced outside of the wrapper is used inside of it.
    with torch.no_grad():
        model(batch(0))
    for _ in range(2):
        with engines.refused(RuntimeError, "made before mpinit.initialize", "in DistributedDataParallel afterwards"):
            step(run, optimizer, batch(dist.get_rank()))
    engines.assert_same(dict(model.state_dict()), dict(before))


@ranks(
    2,
    *[("O1", "outside"), ("model", "inside")],
    long=[(level, how) for level in ("O0", "O1", "O4", "model") for how in ORDERS],
)
def test_older_wrapper_of_float32_weights_trains(level: str, how: str) -> None:
    """Compare, bit for bit, with a wrapper made after ``initialize``; scales agree at the first step."""
    torch.compiler.reset()  # graphs of another test's model of this class would be used again
    states = []
    rank = dist.get_rank()
    for is_older in (True, False):
        model = network()
        run: Any = compiled(model, how, DistributedDataParallel)[1] if is_older else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, **LEVELS[level])
        run = run if is_older else compiled(model, how, DistributedDataParallel)[1]
        for index in range(3):
            step(run, optimizer, batch(rank, index))
        engines.assert_one([*model.state_dict().values(), torch.tensor([mpinit.loss_scale(optimizer)])])
        states.append([value.clone() for value in model.state_dict().values()])
        mpinit.undo(model)
    assert all(map(torch.equal, *states))


@ranks(2)
def test_older_wrapper_is_refused_if_weights_become_float32() -> None:
    """Their dtype changes, too, and torch drops the wrapper's hooks."""
    model = network().bfloat16()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="model")
    with engines.refused(RuntimeError, "made before mpinit.initialize"):
        step(wrapped, optimizer, batch(dist.get_rank()))


@ranks(2, ("O1",), long=[("O4",)])
def test_older_wrapper_of_a_part_is_found(level: str) -> None:
    """And settings that differ by rank at the first step."""
    model = network()
    model[2] = DistributedDataParallel(model[2])
    model[0] = DistributedDataParallel(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = LEVELS[level] | {"loss_scale": mpinit.DynamicLossScale(init=2.0 ** (8 + dist.get_rank()))}
    with engines.refused(ValueError, "loss_scale is DynamicLossScale(init=256.0"):
        mpinit.initialize(model, optimizer, **asked)
        step(model, optimizer, batch(dist.get_rank()))


def by_hand(x: Tensor, dtype: torch.dtype, counts: bool = True, divisor: float = 2.0) -> list[Tensor]:
    """Average gradients over ranks in float32, and round the mean once."""
    model = network().to(dtype)
    (loss_of(model(x.to(dtype)).float()) * (1.0 if counts else 0.0)).backward()
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad.float() / (divisor if divisor == 2.0 else 1.0)
        dist.all_reduce(mean)
        found.append((mean if divisor == 2.0 else mean / divisor).to(dtype).float())
    return found


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]


def assert_gradients(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs), (ours - theirs).abs().max()


@ranks(2, ("outside",), ("inside",), ("not",), long=[(how,) for how in ORDERS])
def test_float32_reduction_when_compiled(how: str) -> None:
    """Check the first backward pass already, against the bits of a mean in float32."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mpinit.initialize(model, optimizer, "O5")
    wrapped, run = compiled(model, how, DistributedDataParallel)
    wrapped.register_comm_hook(None, mpinit.float32_allreduce_hook)
    x = batch(dist.get_rank())
    expected = by_hand(x, BF16)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(run(x)).backward()
        assert_gradients(gradients_of(model), expected)


@ranks(2, (False,), long=[(True,)])
def test_float32_reduction_of_parts(compiles: bool) -> None:
    """Wrap each part in a wrapper of its own."""
    x = batch(dist.get_rank())
    model: Any = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mpinit.initialize(model, optimizer, "O5")
    for index in (0, 2):
        model[index] = DistributedDataParallel(model[index])
        model[index].register_comm_hook(None, mpinit.float32_allreduce_hook)
    loss_of((torch.compile(model, backend="eager") if compiles else model)(x)).backward()
    assert_gradients(gradients_of(model), by_hand(x, BF16))


class Named(nn.Module):
    """Two layers, a frozen one, and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 2)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("other", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) + self.frozen(x)).tanh() * self.table + self.other)


@ranks(2, ("O2", "", 8), ("O2", "ignored", 6), ("split", "init_sync", 8), long=[("O5", "delayed", 8), ("split", "", 8)])
def test_float32_values_of_the_first_rank_are_sent(level: str, how: str, count: int) -> None:
    """Those of all parameters, but for ignored ones, whatever DDP itself broadcasts."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Named()
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    firsts = {name: value.clone() for name, value in own.items()}
    for value in firsts.values():
        dist.broadcast(value, 0)
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    more: dict[str, Any] = {"init_sync": False} if how == "init_sync" else {}
    ignored = ["first.weight"] if how == "ignored" else []
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = DistributedDataParallel(model, **more)
    for name, master in zip(own, (value for key, value in model.state_dict().items() if key in own), strict=True):
        if not name.startswith("frozen"):
            assert torch.equal(master, own[name] if name in ignored else firsts[name]), name
    if not ignored:
        step(wrapped, optimizer, batch(rank))
        engines.assert_one(list(mpinit.master_params(optimizer)))


@ranks(2, ("O2",), ("O5",), ("O1",))
def test_join_is_refused_where_ranks_would_part(level: str) -> None:
    """At the first step inside of it; without masters and a dynamic scale it works."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, loss_scale=1.0 if level == "O1" else None)
    wrapped = DistributedDataParallel(model)
    refusal = contextlib.nullcontext() if level == "O1" else engines.refused(RuntimeError, "join()", "drop_last=True")
    with refusal, wrapped.join():
        for index in range(3 - dist.get_rank()):
            step(wrapped, optimizer, batch(dist.get_rank(), index))
    if level == "O1":
        engines.assert_one(model)


@ranks(2)
def test_weights_outside_of_the_wrapper_need_a_process_group() -> None:
    """Their gradients differ by rank, and so does an overflow in them."""
    for given in ({}, {"process_group": dist.group.WORLD}):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, "O2", **given)
        wrapped = DistributedDataParallel(model[0])
        for index in range(3):
            bad = index == 1 and dist.get_rank() == 1
            optimizer.zero_grad()
            loss = loss_of(model[2](wrapped(batch(0, index)))) * (float("inf") if bad else 1.0)
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if not given:
                with engines.refused(RuntimeError, "'2.weight' is trained", "process_group"):
                    optimizer.step()
                break
            optimizer.step()
            assert mpinit.step_was_skipped(optimizer) == bool(index == 1)
            engines.assert_one(model)


AGES, REDUCES = ("newer", "older"), ("", "float32")
MATRIX = [
    (age, how, level, reduces)
    for age, how, level, reduces in itertools.product(AGES, ORDERS, LEVELS, REDUCES)
    if level in (*engines.DTYPES, "O1", "O4") and (not reduces or level in ("O2", "O5", "split"))
]
# Neighbours differ in every axis.
CHOSEN = MATRIX[::11]


def trained_by_hand(level: str, reduces: str) -> list[Tensor]:
    """Train without mpinit and without a wrapper: gradients are averaged one by one, in the type that DDP sums in."""
    rank = dist.get_rank()
    dtype, scale = engines.DTYPES.get(level), engines.first_scale(LEVELS[level])
    model = network()
    masters = weights = dict(model.named_parameters())
    runs: nn.Module = model
    if dtype is not None and level != "model":
        masters = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        model.to(dtype)
        engines.round_into(weights, masters, level)
    if dtype is not None:
        runs = engines.CastByHand(model, dtype, casts_weights=level == "model")
    optimizer = torch.optim.SGD(masters.values(), lr=0.1, momentum=0.9)
    for index in range(3):
        model.zero_grad()
        (loss_of(runs(batch(rank, index))) * scale).backward()
        for weight, master in zip(weights.values(), masters.values(), strict=True):
            assert weight.grad is not None
            gradient = weight.grad.float() if reduces else weight.grad
            gradient = gradient * 0.5
            dist.all_reduce(gradient)
            master.grad = gradient.to(weight.dtype).to(master.dtype) / scale
        optimizer.step()
        engines.round_into(weights, masters, level)
    return [master.detach() for master in masters.values()]


@ranks(2, *CHOSEN[:: len(CHOSEN) // 4], long=CHOSEN, nightly=MATRIX)
def test_cell_of_wrappers(age: str, how: str, level: str, reduces: str) -> None:
    """Compare with a loop by hand, O1 and O4 with float32, on all ranks; or all ranks refuse."""
    rank = dist.get_rank()
    torch.compiler.reset()  # graphs of another test's model of this class would be used again
    model = network()
    found = compiled(model, how, DistributedDataParallel) if age == "older" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    wrapped, run = found or compiled(model, how, DistributedDataParallel)
    if reduces:
        wrapped.register_comm_hook(None, mpinit.float32_allreduce_hook)

    def train() -> None:
        for index in range(3):
            step(run, optimizer, batch(rank, index))

    if age == "older" and level in ("O2", "O5", "split"):
        start = time.monotonic()
        with engines.refused(RuntimeError, "made before mpinit.initialize"):
            train()
        assert time.monotonic() - start < 15
        assert engines.on_all_ranks("alive") == ["alive"] * 2
        return
    train()
    assert mpinit.step_counts(optimizer) == (3, 0)
    ours = list(model.state_dict().values())
    engines.assert_one([*ours, torch.tensor([mpinit.loss_scale(optimizer)])])
    expected = trained_by_hand(level, reduces)
    for mine, theirs in zip(ours, expected, strict=True):
        tolerance = 0.0 if level in engines.DTYPES else 2e-2
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def collectives() -> int:
    """Return how many collectives this rank has begun in the process group."""
    return int(dist.group.WORLD._get_sequence_number_for_group())


@ranks(2, ("O2", ""), ("O1", ""), long=[("O5", ""), ("split", ""), ("model", ""), ("O4", ""), ("O2", "float32")])
def test_step_has_as_many_collectives_as_plain_ddp(level: str, reduces: str) -> None:
    """Count from the second step on, also under a wrapper that is older than the session."""
    counts = []
    for kind in ("plain", "newer", "older") if level in ("O1", "O4", "model") else ("plain", "newer"):
        model = network()
        wrapped = DistributedDataParallel(model) if kind == "older" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind != "plain":
            mpinit.initialize(model, optimizer, **LEVELS[level])
        wrapped = wrapped or DistributedDataParallel(model)
        if reduces:
            wrapped.register_comm_hook(None, mpinit.float32_allreduce_hook)
        for index in range(4):
            if index == 1:
                before = collectives()
            if kind == "plain":
                optimizer.zero_grad()
                loss_of(wrapped(batch(dist.get_rank(), index))).backward()
                optimizer.step()
            else:
                step(wrapped, optimizer, batch(dist.get_rank(), index))
        counts.append(collectives() - before)
        if kind != "plain":
            mpinit.undo(model)
    assert counts[0] >= 3 and counts == [counts[0]] * len(counts), counts
