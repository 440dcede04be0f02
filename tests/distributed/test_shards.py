"""Parameters of which each process holds a part: split masters, and encoded states of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engines import assert_same, mesh, refused, whole
from models import LEVELS
from processes import ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

import mpinit
from mpinit.distributed.sharding import shard
from mpinit.masters.codecs.encoded import encoded_part

BF16, F32 = torch.bfloat16, torch.float32
Optimizers = Callable[[Any], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Sizes that four ranks cannot share evenly: the last has nothing of some."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def sharded(over: Any, model: nn.Sequential, columns: Any = None, **options: Any) -> nn.Sequential:
    """By FSDP2, inside of which a layer may be tensor parallel already."""
    if columns is not None:
        parallelize_module(model, columns, {"2": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model[0], mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def batch(index: int) -> tuple[Tensor, Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, indices: range) -> None:
    for index in indices:
        x, y = batch(index)
        optimizer.zero_grad()
        with mpinit.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def split(over: Any, make: Optimizers, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = sharded(over, network(), **options)
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
    return model, optimizer


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand(over: Any, make: Optimizers, steps: int, **options: Any) -> dict[str, Tensor]:
    """16-bit parameters given to FSDP2, and float32 ones, sharded alike, that an optimizer steps in their places."""
    model = sharded(over, network().to(BF16), **options)
    exact = sharded(over, network(), **options)
    optimizer = make(exact.parameters())
    for index in range(steps):
        x, y = batch(index)
        F.cross_entropy(model(x.to(BF16)).float(), y).backward()
        for weight, master in zip(model.parameters(), exact.parameters(), strict=True):
            assert isinstance(weight.grad, DTensor)
            master.grad, weight.grad = weight.grad.to(F32), None
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), exact.parameters(), strict=True):
                bits = shard(master).view(torch.int32)
                shard(weight).view(torch.int16).copy_((bits + 0x8000) >> 16)
    return whole(exact.state_dict())


@ranks(4, ("one dimension",), ("two dimensions",), ("tensor parallel",))
def test_shards_step_as_float32_ones_do(kind: str) -> None:
    """Masters to the bit, in the reduction that the policy asks for, and over a mesh of two dimensions."""
    for make, policy in ((adam, None), (sgd, F32)):
        over = mesh(4) if kind == "one dimension" else mesh(2, 2)
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policy)}
        if kind == "tensor parallel":
            over, options["columns"] = over["outer"], over["inner"]
        expected = by_hand(over, make, 4, **options)
        model, optimizer = split(over, make, **options)
        train(model, optimizer, range(4))
        assert {parameter.dtype for parameter in model.parameters()} == {BF16}
        assert_same(whole(model.state_dict()), expected)
        mpinit.undo(model)
        assert {parameter.dtype for parameter in model.parameters()} == {F32}
        assert_same(whole(model.state_dict()), expected)


@ranks(4)
def test_both_sides_of_a_shard_are_one() -> None:
    """What is written to a weight counts; values that come from a state dict keep all bits."""
    model, optimizer = split(mesh(4), adam)
    train(model, optimizer, range(2))
    before = whole(model.state_dict())
    with torch.no_grad():
        model[2].bias.mul_(2)  # type: ignore[operator]
    after = whole(model.state_dict())
    assert torch.equal(after["2.bias"].to(BF16), before["2.bias"].to(BF16) * 2)
    assert_same(after | {"2.bias": before["2.bias"]}, before)
    noise = {name: value.detach() * 1.37 + 0.1 for name, value in model.state_dict().items()}
    expected = whole(noise)
    model.load_state_dict(noise)
    assert_same(whole(model.state_dict()), expected)
    mpinit.clip_grad_norm_(optimizer, 1.0)
    train(model, optimizer, range(2, 4))
    bytes_held = sum(shard(parameter).nbytes + shard(parameter.grad).nbytes for parameter in model.parameters())
    states = sum(shard(value).nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    own = sum(shard(parameter).numel() for parameter in model.parameters())
    assert bytes_held == 4 * own and states == 8 * own


@ranks(4)
def test_gradient_release_is_refused() -> None:
    """Other ranks' gradients come later."""
    for model in (network(), sharded(mesh(2, 2), network())):
        optimizer = adam(model.parameters())
        with refused(ValueError, "fully_shard", "meshes of one or more dimensions"):
            mpinit.initialize(model, optimizer, "O5", gradient_release=True, verbosity=0)
        assert {parameter.dtype for parameter in model.parameters()} == {F32}


# -- encoded states ------------------------------------------------------------------------------------------


def wide_network() -> nn.Sequential:
    """Two ranks get whole blocks of the first weight; of the rest they get too little to be encoded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 80), nn.Tanh(), nn.Linear(80, 3))


def encoded(encoding: str, kind: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = fully_shard(wide_network(), mesh=mesh(2))
    optimizer = adam(model.parameters())
    mpinit.initialize(
        model, optimizer, optimizer_state=encoding, split_bucket_bytes=40_000, verbosity=0, **LEVELS[kind]
    )
    return model, optimizer


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    x, y = torch.randn(8, 128, generator=generator), torch.randint(3, (8,), generator=generator)
    optimizer.zero_grad()
    with mpinit.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This process's parts, in float32."""
    found = optimizer.state_dict()["state"]
    return [shard(value) for state in found.values() for value in state.values()]


@ranks(2, ("int8", "split"), ("bfloat16", "O5"), ("int8", "O0"))
def test_shards_are_encoded_as_parameters_of_their_own_are(encoding: str, kind: str) -> None:
    model, optimizer = encoded(encoding, kind)
    alone = nn.ParameterList(part.detach().chunk(2)[dist.get_rank()].clone() for part in wide_network().parameters())
    stepped = adam(alone.parameters())
    mpinit.initialize(alone, stepped, optimizer_state=encoding, split_bucket_bytes=40_000, verbosity=0, **LEVELS[kind])
    for index in range(4):
        backward(model, optimizer, index)
        for weight, mine in zip(model.parameters(), alone, strict=True):
            assert isinstance(weight.grad, DTensor)
            mine.grad = shard(weight.grad).clone()
        optimizer.step()
        stepped.step()
    codes = [encoded_part(value) for state in optimizer.state.values() for value in state.values()]
    assert sum(code is not None for code in codes) == 2
    assert all(type(part) is Tensor for part in states(optimizer))
    # FSDP2 holds full masters' weights itself, in float32, and gathers them in 16 bit.
    for weight, mine in zip(mpinit.master_params(optimizer), mpinit.master_params(stepped), strict=True):
        assert torch.equal(shard(weight), mine)
    for part, mine in zip(states(optimizer), states(stepped), strict=True):
        assert torch.equal(part, mine)
    before = states(optimizer)
    mpinit.undo(model)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(encoded_part(value) is None for value in after)
    assert {type(value) for value in after if value.dim()} == {DTensor}
    assert all(torch.equal(shard(value), part) for value, part in zip(after, before, strict=True))


@ranks(2, ("int8",))
def test_states_go_through_float32(encoding: str) -> None:
    """Gathered, loaded by one process, and sharded again: blocks fall alike, and so do bits."""
    model, optimizer = encoded(encoding, "split")
    for index in range(3):
        backward(model, optimizer, index)
        optimizer.step()
    # Not the tensors themselves: torch would load them without a copy.
    weights, found = tree_map_only(Tensor, torch.clone, get_state_dict(model, optimizer))
    saved = whole({"model": weights, "optimizer": found["state"]})
    assert {value.dtype for value in saved.values()} == {torch.float32}
    alone = wide_network()
    stepped = adam(alone.parameters())
    mpinit.initialize(alone, stepped, optimizer_state=encoding, verbosity=0, **LEVELS["split"])
    _, gathered = get_state_dict(alone, stepped)
    gathered["state"] = nested(saved)
    set_model_state_dict(alone, {name: saved[f"model.{name}"] for name in weights})
    set_optimizer_state_dict(alone, stepped, gathered)
    again, other = encoded(encoding, "split")
    set_model_state_dict(again, weights)
    set_optimizer_state_dict(again, other, found)
    for one, two in ((alone, stepped), (again, other)):
        weights_of, states_of = get_state_dict(one, two)
        assert_same(whole({"model": weights_of, "optimizer": states_of["state"]}), saved)
    for two in (stepped, other):
        codes = [encoded_part(value) for state in two.state.values() for value in state.values()]
        assert sum(code is not None for code in codes) == 2
    # Training goes on, and to the same numbers.
    for one, two in ((model, optimizer), (again, other)):
        backward(one, two, 3)
        two.step()
    assert_same(whole(again.state_dict()), whole(model.state_dict()))


def nested(saved: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's part, by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(".")
            found.setdefault(parameter, {})[key] = value
    return found
