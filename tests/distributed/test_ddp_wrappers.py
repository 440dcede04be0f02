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
from undo_snapshots import end_dropped_sessions

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
def test_older_wrapper_of_16_bit_weights_that_become_float32_is_refused() -> None:
    """Their dtype changes, too, and torch drops the wrapper's hooks."""
    model = network().bfloat16()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="model")
    with engines.refused(RuntimeError, "made before mpinit.initialize"):
        step(wrapped, optimizer, batch(dist.get_rank()))


@ranks(2, ("O1",), long=[("O4",)])
def test_older_wrapper_of_a_part_is_found(level: str) -> None:
    """Ranks that were resumed with other scales agree at the first step."""
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


@ranks(3, (False,), long=[(True,)])
def test_float32_reduction_in_join(is_older: bool) -> None:
    """Train ranks with two, one and no batches: gradients are divided by all ranks, and no rank is blocked."""
    rank = dist.get_rank()
    model = network().to(BF16 if is_older else torch.float32)
    wrapped = DistributedDataParallel(model) if is_older else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mpinit.initialize(model, optimizer, "O5")
    wrapped = wrapped or DistributedDataParallel(model)
    wrapped.register_comm_hook(None, mpinit.float32_allreduce_hook)
    found = []
    with wrapped.join():
        for index in range((2, 1, 0)[rank]):
            optimizer.zero_grad()
            loss_of(wrapped(batch(rank, index))).backward()
            found.append(gradients_of(model))
            optimizer.step()
    # By hand: zeros where a rank has no batch.
    for index in range(2):
        active = 2 - index
        plain = network().to(BF16)
        loss_of(plain(batch(rank, index).to(BF16)).float()).backward()
        for place, parameter in enumerate(plain.parameters()):
            assert parameter.grad is not None
            mean = (parameter.grad.float() if rank < active else torch.zeros(parameter.shape)) / 3
            dist.all_reduce(mean)
            if rank < active:
                assert torch.equal(found[index][place], mean.to(BF16).float()), (index, place)


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


def told(model: Named, how: str) -> DistributedDataParallel:
    """Wrap a model and leave some of its tensors out."""
    more: dict[str, Any] = {}
    if how == "ignored":
        ignored = ["first.weight", "frozen.weight", "table"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    elif how == "delayed":
        more["delay_all_reduce_named_params"] = [("first.weight", model.first.weight)]
        more["param_to_hook_all_reduce"] = model.first.bias
    elif how == "delayed alone":
        more["delay_all_reduce_named_params"] = [("first.weight", model.first.weight)]
        more["param_to_hook_all_reduce"] = model.first.bias
        more["init_sync"] = False
    elif how:
        more[how] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DistributedDataParallel(model, **more)


TOLD = ("", "ignored", "delayed", "delayed alone", "init_sync", "broadcast_buffers", "forward_sync_buffers")


@ranks(
    2,
    *[("O2", how) for how in TOLD],
    long=[(level, how) for level in ("O5", "split", "O3") for how in TOLD if (level, how[:7]) != ("O3", "delayed")],
)
def test_float32_values_are_sent_where_the_wrapper_sends(level: str, how: str) -> None:
    """Exactly the tensors that plain DDP makes one have rank 0's float32 values; the others keep their own."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Named()
    own = copy.deepcopy(model.state_dict())
    firsts = {name: value.clone() for name, value in own.items()}
    for value in firsts.values():
        dist.broadcast(value, 0)
    plain = copy.deepcopy(model)
    told(plain, how)
    sent = {name for name, value in plain.state_dict().items() if torch.equal(value, firsts[name])}
    sent = set(engines.on_all_ranks(sent)[1])
    assert len(sent) == {"": 8, "ignored": 5, "delayed": 8, "delayed alone": 1, "init_sync": 0}.get(how, len(sent))
    trained = [*model.first.parameters(), *model.last.parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    wrapped = told(model, how)
    exact = level != "O3"
    for name, value in model.state_dict().items():
        expected = firsts[name] if name in sent else own[name]
        if exact or not name.startswith(("first", "last")):
            assert torch.equal(value, expected), name
    # The values of a frozen weight and of a buffer are float32 again after an undo.
    step(wrapped, optimizer, batch(rank))
    mpinit.undo(model)
    for name in ("frozen.weight", "frozen.bias", "table", "other"):
        value = model.state_dict()[name]
        # Without a first broadcast DDP sends rank 0's 16-bit buffers in each forward.
        if name not in ("table", "other") or how not in ("init_sync", "delayed alone"):
            assert torch.equal(value, firsts[name] if name in sent else own[name]), name


@ranks(2)
def test_wrapper_without_a_first_broadcast_exchanges_nothing_when_made() -> None:
    """Check that it communicates like plain DDP; settings are compared at the first step."""
    rank = dist.get_rank()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=256.0 * (1 + rank)))
    wrapped: Any = None
    # A rank may make it later than the other.
    if rank == 0:
        wrapped = DistributedDataParallel(model, init_sync=False)
    dist.barrier()
    if rank == 1:
        wrapped = DistributedDataParallel(model, init_sync=False)
    with engines.refused(ValueError, "loss_scale is DynamicLossScale(init=256.0"):
        step(wrapped, optimizer, batch(rank))


@ranks(3)
def test_end_of_join_sends_what_the_wrapper_sends() -> None:
    """Send from the rank with most batches; ignored tensors keep each rank's own float32 values."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Named()
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=SCALE))
    wrapped = told(model, "ignored")
    with torch.no_grad():
        model.state_dict()["first.weight"].add_(rank * 1e-5)
    with wrapped.join():
        for index in range(rank):
            step(wrapped, optimizer, batch(rank, index))
    state = model.state_dict()
    engines.assert_one([state[name] for name in ("first.bias", "last.weight", "last.bias", "other")])
    parted = engines.on_all_ranks(state["first.weight"])
    assert not any(torch.equal(parted[0], each) for each in parted[1:])


@ranks(2)
def test_class_is_as_before_when_sessions_have_ended() -> None:
    """Check that methods of the class are patched while a session lives, in any order of undos."""
    end_dropped_sessions()
    before = {name: getattr(DistributedDataParallel, name) for name in ("__init__", "_pre_forward", "join_hook")}
    models = [mpinit.initialize(network(), opt_level="O5") for _ in range(3)]
    for index in (0, 2, 1):
        assert DistributedDataParallel.__init__ is not before["__init__"]
        mpinit.undo(models[index])
    assert {name: getattr(DistributedDataParallel, name) for name in before} == before


# The batches of each rank: as many, or fewer and none, inside of join().
JOINS = {"": (3, 3), "all ranks": (3, 1), "ranks with batches": (2, 0)}
AGES, REDUCES = ("newer", "older"), ("", "float32")
MATRIX = [
    (age, how, joins, level, reduces)
    for age, how, joins, level, reduces in itertools.product(AGES, ORDERS, JOINS, LEVELS, REDUCES)
    if level in (*engines.DTYPES, "O1", "O4")
    # A communication hook divides by all ranks.
    and (not reduces or (level in ("O2", "O5", "split") and joins != "ranks with batches"))
]
# Neighbours differ in every axis.
CHOSEN = MATRIX[::11]


def trained_by_hand(level: str, joins: str, reduces: str) -> list[Tensor]:
    """Train without mpinit and without a wrapper: gradients are averaged one by one, in the type that DDP sums in."""
    rank, counts = dist.get_rank(), JOINS[joins]
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
    for index in range(max(counts)):
        model.zero_grad()
        has_batch = index < counts[rank]
        (loss_of(runs(batch(rank, index))) * (scale if has_batch else 0.0)).backward()
        active = sum(index < count for count in counts)
        divisor = active if joins == "ranks with batches" else 2
        for weight, master in zip(weights.values(), masters.values(), strict=True):
            assert weight.grad is not None
            gradient = weight.grad.float() if reduces else weight.grad
            gradient = gradient * (1 / divisor)
            dist.all_reduce(gradient)
            master.grad = gradient.to(weight.dtype).to(master.dtype) / scale
        optimizer.step()
        engines.round_into(weights, masters, level)
    return [master.detach() for master in masters.values()]


@ranks(2, *CHOSEN[:: len(CHOSEN) // 4], long=CHOSEN, nightly=MATRIX)
def test_cell_of_wrappers(age: str, how: str, joins: str, level: str, reduces: str) -> None:
    """Compare with a loop by hand, O1 and O4 with float32, on all ranks; or all ranks refuse."""
    rank, counts = dist.get_rank(), JOINS[joins]
    model = network()
    found = compiled(model, how, DistributedDataParallel) if age == "older" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    wrapped, run = found or compiled(model, how, DistributedDataParallel)
    if reduces:
        wrapped.register_comm_hook(None, mpinit.float32_allreduce_hook)

    def train() -> None:
        with wrapped.join(joins != "ranks with batches") if joins else contextlib.nullcontext():
            for index in range(counts[rank]):
                step(run, optimizer, batch(rank, index))

    if age == "older" and level in ("O2", "O5", "split"):
        start = time.monotonic()
        with engines.refused(RuntimeError, "made before mpinit.initialize"):
            train()
        assert time.monotonic() - start < 15
        assert engines.on_all_ranks("alive") == ["alive"] * 2
        return
    train()
    assert mpinit.step_counts(optimizer) == (counts[rank], 0)
    ours = list(model.state_dict().values())
    engines.assert_one([*ours, torch.tensor([mpinit.loss_scale(optimizer)])])
    expected = trained_by_hand(level, joins, reduces)
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
