"""FSDP2: shards are the masters, of any level, and their states.

Below the public face: local shards and codes are read, of which the public state has only float32 values.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import engines
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engines import BF16, F32
from models import LEVELS, dynamic, level_arguments, sums_in_float32, train
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
from mpinit.optimizer import parts


@ranks(
    2,
    *[("O0", F32, False), ("O1", engines.F16, True), ("O2", BF16, True)],
    long=[("O1", BF16, False), ("O2", engines.F16, False), ("O3", engines.F16, True), ("O3", BF16, False)],
)
def test_fsdp_equals_one_process_with_the_large_batch(level: str, dtype: torch.dtype, warm: bool) -> None:
    batches = engines.CASE.batches(5)
    alone = engines.CASE.build()
    optimizer = engines.sgd_of(alone)
    mpinit.initialize(alone, optimizer, **level_arguments(level, dtype), **engines.by_itself())
    train(alone, optimizer, batches, engines.CASE.loss)
    expected = engines.whole(alone.state_dict())
    mpinit.undo(alone)
    model = engines.sharded()
    optimizer = engines.sgd_of(model)
    before = {id(parameter) for parameter in model.parameters()}
    if warm:
        x, y = engines.mine(batches[0])
        engines.CASE.loss(model(x), y).backward()
        model.zero_grad()
        model(x)  # leaves the gathered weights in place
    mpinit.initialize(model, optimizer, **level_arguments(level, dtype))
    weights = dtype if level == "O3" else F32
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    assert all(isinstance(parameter, DTensor) for parameter in mpinit.master_params(optimizer))
    train(model, optimizer, [engines.mine(batch) for batch in batches], engines.CASE.loss)
    state = engines.whole(model.state_dict())
    assert all(value.dtype is F32 for value in state.values())
    engines.assert_one(state)
    engines.assert_close(state, expected, engines.TOLERANCE[dtype])
    mpinit.undo(model)
    undone = engines.whole(model.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    assert all(torch.equal(undone[name], state[name]) for name in state), "the masters' bits"
    assert {id(parameter) for parameter in model.parameters()} == before
    x, y = engines.mine(batches[0])
    engines.CASE.loss(model(x), y).backward()
    optimizer.step()


@ranks(2, ("O2", BF16), long=[("O2", engines.F16), ("O1", BF16)])
def test_fsdp_skips_on_all_ranks_when_one_shard_overflows(level: str, dtype: torch.dtype) -> None:
    """Check skips in float16, and in bfloat16, where gradients are checked when the step begins."""
    model = engines.sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, skip_nonfinite=True, **level_arguments(level, dtype))
    x, y = engines.mine(engines.CASE.batches(1)[0])
    before = engines.whole(model.state_dict())
    with mpinit.scale_loss(engines.CASE.loss(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
        if dist.get_rank() == 1:
            next(iter(model.layer.parameters())).grad.to_local().fill_(float("nan"))
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer)
    engines.assert_one(mpinit.loss_scale(optimizer))
    after = engines.whole(model.state_dict())
    assert all(torch.equal(after[name], before[name]) for name in before)


@ranks(2)
def test_group_of_two_dtypes_is_refused_and_batchnorm_works() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    model = fully_shard(network(), mesh=engines.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engines.refused(ValueError, "fully_shard", "keep_batchnorm_fp32"):
        mpinit.initialize(model, optimizer, "O5", master_weights="split")
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    model = network()
    fully_shard(model[1], mesh=engines.mesh(2))
    fully_shard(model, mesh=engines.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", loss_scale=8.0)
    x = torch.randn(4, 4)
    inside: dict[int, torch.dtype] = {}
    for index in range(2):
        model[index].register_forward_pre_hook(lambda m, _, i=index: inside.update({i: m.weight.dtype}))
    for _ in range(2):
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {F32}
    assert (inside[0], inside[1]) == (engines.F16, F32)


@ranks(2)
def test_optimizer_made_before_sharding_is_refused() -> None:
    model = engines.CASE.build()
    optimizer = engines.sgd_of(model)
    fully_shard(model, mesh=engines.mesh(2))
    for level in ("O1", "O2"):
        with engines.refused(ValueError, "fully_shard (or parallelize_module) has put a shard"):
            mpinit.initialize(model, optimizer, level)
    for level, more in (("O1", {}), ("O2", {}), ("O5", {}), ("O2", {"master_weights": "model"})):
        model = engines.CASE.build()
        optimizer = engines.sgd_of(model)
        mpinit.initialize(model, optimizer, level, **dynamic(level, init=1024.0), **more)
        fully_shard(model.layer, mesh=engines.mesh(2))
        with engines.refused(RuntimeError, "master_weights=True" if more else "layer.", "fully_shard"):
            train(model, optimizer, [engines.mine(batch) for batch in engines.CASE.batches(1)], engines.CASE.loss)
        mpinit.undo(model)
    model = engines.CASE.build()
    mpinit.initialize(model, opt_level="O5", await_optimizers=True)
    fully_shard(model, mesh=engines.mesh(2))
    with engines.refused(RuntimeError, "fully_shard"):
        mpinit.add_optimizers(engines.sgd_of(model))


@ranks(2, ("O2",), ("O5",))
def test_shards_are_the_masters(level: str) -> None:
    """Bit for bit what a loop by hand comes to on FSDP2's own policy; writes to shards stay."""
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    batches = [engines.mine(batch) for batch in engines.CASE.batches(4)]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = engines.sharded(mp_policy=policy)
    optimizer = engines.sgd_of(model)
    for x, y in batches:
        optimizer.zero_grad()
        scale = 1024.0 if level == "O2" else 1.0
        with sums_in_float32():
            (engines.CASE.loss(model(x).float(), y) * scale).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        write(model)
    expected = engines.whole(model.state_dict())
    model = engines.sharded()
    optimizer = engines.sgd_of(model)
    before = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    mpinit.initialize(model, optimizer, **LEVELS[level])
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == before
    seen: set[torch.dtype] = set()
    handle = model.layer.linear1.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    for batch in batches:
        optimizer.zero_grad()
        engines.backward(model, optimizer, batch)
        optimizer.step()
        write(model)
    handle.remove()
    assert seen == {dtype}
    engines.assert_same(engines.whole(model.state_dict()), expected)
    mpinit.undo(model)
    handle = model.layer.linear1.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    engines.CASE.loss(model(batches[0][0]), batches[0][1]).backward()
    assert seen == {dtype, torch.float32}


def write(model: Any) -> None:
    """In all the ways that leave no trace on a DTensor."""
    weights = [parameter for parameter in model.parameters() if parameter.to_local().numel()]
    with torch.no_grad():
        weights[0].data.mul_(1.0001)
        weights[1].to_local().mul_(1.0001)
        weights[2]._local_tensor.data.mul_(1.0001)
        weights[3].mul_(1.0001)


@ranks(2)
def test_a_policy_that_contradicts_the_level_is_refused() -> None:
    for level, other in (("O2", torch.bfloat16), ("O5", torch.float16), ("O3", torch.bfloat16)):
        model = engines.sharded(mp_policy=MixedPrecisionPolicy(param_dtype=other))
        with engines.refused(ValueError, "MixedPrecisionPolicy", str(other)):
            mpinit.initialize(model, engines.sgd_of(model), level)
    model = engines.sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = engines.sgd_of(model)
    mpinit.initialize(model, optimizer, "O5")
    train(model, optimizer, [engines.mine(batch) for batch in engines.CASE.batches(1)], engines.CASE.loss)


@ranks(2, ("O2",), long=[("O1",)])
def test_undo_after_a_failed_forward(level: str) -> None:
    model = engines.sharded()
    optimizer = engines.sgd_of(model)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    before = engines.whole(model.state_dict())

    def fail(*_: Any) -> None:
        raise KeyError("in the forward")

    handle = model.layer.linear2.register_forward_hook(fail)
    batch = engines.mine(engines.CASE.batches(1)[0])
    with engines.refused(KeyError):
        engines.backward(model, optimizer, batch)
    handle.remove()
    mpinit.undo(model)
    engines.assert_same(engines.whole(model.state_dict()), before)
    engines.CASE.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


@ranks(2, ("O2",), ("O5",))
def test_what_is_trained_is_what_is_served(level: str) -> None:
    """Compare each rank's forward, bit for bit, with a plain 16-bit model loaded from the exported checkpoint."""
    model = engines.sharded()
    optimizer = engines.sgd_of(model)
    mpinit.initialize(model, optimizer, level)
    batches = engines.CASE.batches(4)
    train(model, optimizer, [engines.mine(batch) for batch in batches[:3]], engines.CASE.loss)
    served = engines.CASE.build()
    served.load_state_dict(engines.whole(model.state_dict()))
    served = served.to(engines.F16 if level == "O2" else BF16)
    found = mpinit.fidelity(model, engines.mine(batches[3])[0], served=served)
    assert found, str(found)


BF16, F32 = torch.bfloat16, torch.float32
Optimizers = Callable[[Any], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Sizes that four ranks cannot share evenly: the last has nothing of some."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def by_fsdp(over: Any, model: nn.Sequential, columns: Any = None, **options: Any) -> nn.Sequential:
    """By FSDP2, inside of which a layer may be tensor parallel already."""
    if columns is not None:
        parallelize_module(model, columns, {"2": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model[0], mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def batch(index: int) -> tuple[Tensor, Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def train_shards(model: nn.Module, optimizer: torch.optim.Optimizer, indices: range) -> None:
    for index in indices:
        x, y = batch(index)
        optimizer.zero_grad()
        with mpinit.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def split(over: Any, make: Optimizers, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = by_fsdp(over, network(), **options)
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    return model, optimizer


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand(over: Any, make: Optimizers, steps: int, **options: Any) -> dict[str, Tensor]:
    """16-bit parameters given to FSDP2, and float32 ones, sharded alike, that an optimizer steps in their places."""
    model = by_fsdp(over, network().to(BF16), **options)
    exact = by_fsdp(over, network(), **options)
    optimizer = make(exact.parameters())
    for weight in model.parameters():
        weight.grad_dtype = None  # what is reduced in float32 stays so, from torch 2.15 on
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
    return engines.whole(exact.state_dict())


@ranks(4, ("one dimension",), ("two dimensions",), ("tensor parallel",))
def test_shards_step_as_float32_ones_do(kind: str) -> None:
    """Masters to the bit, in the reduction that the policy asks for, and over a mesh of two dimensions."""
    for make, policy in ((adam, None), (sgd, F32)):
        over = engines.mesh(4) if kind == "one dimension" else engines.mesh(2, 2)
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policy)}
        if kind == "tensor parallel":
            over, options["columns"] = over["outer"], over["inner"]
        expected = by_hand(over, make, 4, **options)
        model, optimizer = split(over, make, **options)
        train_shards(model, optimizer, range(4))
        assert {parameter.dtype for parameter in model.parameters()} == {BF16}
        engines.assert_same(engines.whole(model.state_dict()), expected)
        mpinit.undo(model)
        assert {parameter.dtype for parameter in model.parameters()} == {F32}
        engines.assert_same(engines.whole(model.state_dict()), expected)


@ranks(4)
def test_both_sides_of_a_shard_are_one() -> None:
    """Check that writes to a weight count, and that values from a state dict keep all bits."""
    model, optimizer = split(engines.mesh(4), adam)
    train_shards(model, optimizer, range(2))
    before = engines.whole(model.state_dict())
    with torch.no_grad():
        model[2].bias.mul_(2)  # type: ignore[operator]
    after = engines.whole(model.state_dict())
    assert torch.equal(after["2.bias"].to(BF16), before["2.bias"].to(BF16) * 2)
    engines.assert_same(after | {"2.bias": before["2.bias"]}, before)
    noise = {name: value.detach() * 1.37 + 0.1 for name, value in model.state_dict().items()}
    expected = engines.whole(noise)
    model.load_state_dict(noise)
    engines.assert_same(engines.whole(model.state_dict()), expected)
    mpinit.clip_grad_norm_(optimizer, 1.0)
    train_shards(model, optimizer, range(2, 4))
    bytes_held = sum(shard(parameter).nbytes + shard(parameter.grad).nbytes for parameter in model.parameters())
    states = sum(shard(value).nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    own = sum(shard(parameter).numel() for parameter in model.parameters())
    assert bytes_held == 4 * own and states == 8 * own


def wide_network() -> nn.Sequential:
    """Two ranks get whole blocks of the first weight; of the rest they get too little to be encoded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 80), nn.Tanh(), nn.Linear(80, 3))


def encoded(encoding: str, kind: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = fully_shard(wide_network(), mesh=engines.mesh(2))
    optimizer = adam(model.parameters())
    mpinit.initialize(model, optimizer, optimizer_state=encoding, **LEVELS[kind])
    return model, optimizer


def backward_of_rank(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
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
@mock.patch.object(parts, "BUCKET_BYTES", 40_000)
def test_shards_are_encoded_as_parameters_of_their_own_are(encoding: str, kind: str) -> None:
    model, optimizer = encoded(encoding, kind)
    alone = nn.ParameterList(part.detach().chunk(2)[dist.get_rank()].clone() for part in wide_network().parameters())
    stepped = adam(alone.parameters())
    mpinit.initialize(alone, stepped, optimizer_state=encoding, **LEVELS[kind])
    for index in range(4):
        backward_of_rank(model, optimizer, index)
        for weight, own in zip(model.parameters(), alone, strict=True):
            assert isinstance(weight.grad, DTensor)
            own.grad = shard(weight.grad).clone()
        optimizer.step()
        stepped.step()
    codes = [encoded_part(value) for state in optimizer.state.values() for value in state.values()]
    assert sum(code is not None for code in codes) == 2
    assert all(type(part) is Tensor for part in states(optimizer))
    # FSDP2 holds full masters' weights itself, in float32, and gathers them in 16 bit.
    for weight, own in zip(mpinit.master_params(optimizer), mpinit.master_params(stepped), strict=True):
        assert torch.equal(shard(weight), own)
    for part, own in zip(states(optimizer), states(stepped), strict=True):
        assert torch.equal(part, own)
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
        backward_of_rank(model, optimizer, index)
        optimizer.step()
    # Not the tensors themselves: torch would load them without a copy.
    weights, found = tree_map_only(Tensor, torch.clone, get_state_dict(model, optimizer))
    saved = engines.whole({"model": weights, "optimizer": found["state"]})
    assert {value.dtype for value in saved.values()} == {torch.float32}
    alone = wide_network()
    stepped = adam(alone.parameters())
    mpinit.initialize(alone, stepped, optimizer_state=encoding, **LEVELS["split"])
    _, gathered = get_state_dict(alone, stepped)
    gathered["state"] = nested(saved)
    set_model_state_dict(alone, {name: saved[f"model.{name}"] for name in weights})
    set_optimizer_state_dict(alone, stepped, gathered)
    again, other = encoded(encoding, "split")
    set_model_state_dict(again, weights)
    set_optimizer_state_dict(again, other, found)
    for one, two in ((alone, stepped), (again, other)):
        weights_of, states_of = get_state_dict(one, two)
        engines.assert_same(engines.whole({"model": weights_of, "optimizer": states_of["state"]}), saved)
    for two in (stepped, other):
        codes = [encoded_part(value) for state in two.state.values() for value in state.values()]
        assert sum(code is not None for code in codes) == 2
    # Training goes on, and to the same numbers.
    for one, two in ((model, optimizer), (again, other)):
        backward_of_rank(one, two, 3)
        two.step()
    engines.assert_same(engines.whole(again.state_dict()), engines.whole(model.state_dict()))


def nested(saved: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's part, by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition(".")
            found.setdefault(parameter, {})[key] = value
    return found


@ranks(2, ("whole", "block"), ("whole", "GradScaler"), long=[("part", "block")])
def test_gradients_kept_for_later_are_refused_under_a_loss_scale(kept: str, way: str) -> None:
    """Also those of an earlier plain pass. Without a scale they are added up as in plain FSDP2."""
    over = engines.mesh(1, 2) if kept == "part" else engines.mesh(2)
    x, y = engines.mine(engines.CASE.batches(1)[0])
    results = []
    for level in ("O2", "O5", "O5"):
        model: Any = engines.sharded(over)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        mpinit.initialize(model, optimizer, level)
        sync = model.set_requires_gradient_sync if kept == "whole" else model.set_requires_all_reduce
        for is_last in (False, True):
            sync(is_last or len(results) == 1)
            loss = engines.CASE.loss(model(x), y)
            if level == "O5":
                with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                continue
            with engines.refused(RuntimeError, "FSDP2 keeps gradients", "loss_scale=1.0"):
                if way == "block":
                    with mpinit.scale_loss(loss, optimizer):
                        pass
                else:
                    mpinit.GradScaler(optimizer).scale(loss)
            loss.backward()
        results.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        mpinit.undo(model)
    for one, other in zip(results[1], results[2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


@ranks(2)
def test_overflow_of_one_loss_changes_its_scale_alone() -> None:
    """As in one process: all ranks skip the step, and the other loss's scale stays."""
    model: Any = engines.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", num_losses=2, loss_scale=mpinit.DynamicLossScale(init=1024.0))
    for index, batch in enumerate(map(engines.mine, engines.CASE.batches(4))):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 1
        engines.backward(model, optimizer, batch, float("inf") if bad else 1.0, loss_id=0)
        engines.backward(model, optimizer, batch, loss_id=1)
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        engines.assert_one((mpinit.loss_scale(optimizer, 0), mpinit.loss_scale(optimizer, 1)))
    assert (mpinit.loss_scale(optimizer, 0), mpinit.loss_scale(optimizer, 1)) == (512.0, 1024.0)


@ranks(2, ("O2",), ("O5",))
def test_gradients_of_shards_are_reduced_in_float32(level: str) -> None:
    """In bfloat16 the sum would be 256, whatever the version's own default is."""
    for dtype, expected in ((None, 257.0), (BF16, 256.0)) if level == "O5" else ((None, 257.0),):
        model = nn.Linear(1, 4, bias=False)
        fully_shard(model, mesh=engines.mesh(2), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, level, loss_scale=1.0, verbosity=0)
        model(torch.tensor([[2.0 if dist.get_rank() else 512.0]])).sum().backward()
        gradient = model.weight.grad
        assert gradient.dtype is F32 and gradient.to_local()[0].item() == expected
        mpinit.undo(model)


@ranks(4)
def test_gradients_of_split_shards_are_reduced_by_the_policy() -> None:
    """The mean of 512 and three times 1.5 is 129.125. In bfloat16 512 + 1.5 is 512, which some ranks begin with."""
    is_new = hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn")
    exact = (F32, 129.125) if is_new else (BF16, 129.0)
    for dtype, expected in ((None, (BF16, 128.0)), (F32, exact)):
        model = nn.Linear(1, 4, bias=False)
        fully_shard(model, mesh=engines.mesh(4), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
        model(torch.tensor([[1.5 if dist.get_rank() else 512.0]])).sum().backward()
        gradient = model.weight.grad.full_tensor()
        assert (gradient.dtype, gradient.min().item()) == expected
        mpinit.undo(model)


class Routed(nn.Module):
    """A layer, and a router whose small differences bfloat16 would round away."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.router, self.scale = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.full((8,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.router(hidden).float() + (hidden.float() * self.scale).sum(-1, keepdim=True)  # type: ignore[no-any-return]


@ranks(2)
def test_kept_parameters_in_a_group_with_others() -> None:
    """Refused before torch 2.15 with the way out; from there on, gathered in float32 beside 16-bit ones."""
    kept = {"keep_fp32": ["router", "scale"], "verbosity": 0}
    alone = Routed()
    mpinit.initialize(alone, opt_level="O5", **kept)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    expected = alone(x)
    mpinit.undo(alone)
    model = Routed()
    fully_shard(model, mesh=engines.mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
        with engines.refused(ValueError, "fully_shard", "Before torch 2.15"):
            mpinit.initialize(model, optimizer, "O5", **kept)
        return
    mpinit.initialize(model, optimizer, "O5", **kept)
    inside: dict[str, torch.dtype] = {}
    for name in ("layer", "router"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, _, name=name: inside.update({name: module.weight.dtype, "scale": model.scale.dtype})
        )
    output = model(x)
    assert inside == {"layer": BF16, "router": F32, "scale": F32}
    assert torch.equal(output, expected)
    output.square().mean().backward()
    optimizer.step()
    state = engines.whole(model.state_dict())
    engines.assert_one(state)
    assert not torch.equal(state["router.weight"], Routed().router.weight)


@ranks(2)
def test_float32_gradients_of_16_bit_shards() -> None:
    """Train them from torch 2.15 on, and refuse them before, where FSDP2 would fail in the backward pass."""
    for dtype, masters in ((F32, True), (F32, "split"), (BF16, True), (BF16, "split")):
        model = fully_shard(engines.CASE.build().to(dtype), mesh=engines.mesh(2))
        optimizer = engines.sgd_of(model)
        given: Any = {"master_weights": masters, "grad_dtype": torch.float32}
        if (dtype is BF16 or masters == "split") and torch.__version__ < "2.15":
            with engines.refused(ValueError, "grad_dtype=torch.float32", "FSDP2", "in float32 before fully_shard"):
                mpinit.initialize(model, optimizer, "O5", **given)
            assert {parameter.dtype for parameter in model.parameters()} == {dtype}
            continue
        mpinit.initialize(model, optimizer, "O5", **given)
        train(model, optimizer, [engines.mine(batch) for batch in engines.CASE.batches(2)], engines.CASE.loss)
        assert mpinit.step_counts(optimizer) == (2, 0)
        mpinit.undo(model)


@ranks(2)
def test_module_that_is_unfrozen_later_trains_as_in_fsdp2() -> None:
    """Freeze it after a first forward, and compare with FSDP2's own mixed precision, bit for bit."""
    batches = [engines.mine(batch) for batch in engines.CASE.batches(4)]

    def trained(by_mpinit: bool) -> Any:
        policy = {} if by_mpinit else {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)}
        model: Any = engines.sharded(**policy)
        optimizer = adam(model.parameters())
        if by_mpinit:
            mpinit.initialize(model, optimizer, "O5")
        with torch.no_grad():
            model(batches[0][0])
        for module in (model, model.layer):
            module.reshard()
        model.layer.requires_grad_(False)
        for index, (x, y) in enumerate(batches):
            model.layer.requires_grad_(index > 1)
            optimizer.zero_grad()
            engines.CASE.loss(model(x).float(), y).backward()
            optimizer.step()
        return engines.whole(model.state_dict())

    engines.assert_same(trained(True), trained(False))
