"""The rules of the contract, by number: what a user may rely on, what is refused with its way out, what is not seen."""

import copy
import datetime
import logging
import pickle
from typing import Any

import engines
import pytest
import torch
import torch.distributed as dist
from processes import ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpinit

# -- Rule 10: ranks ----------------------------------------------------------------------------------------------------


def two_layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def of_rank(index: int) -> Tensor:
    """A batch of this rank's own."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pass_of(model: Any, optimizer: Any, x: Tensor, factor: float = 1.0, **more: Any) -> None:
    with mpinit.scale_loss(model(x).square().mean() * factor, optimizer, **more) as scaled_loss:
        scaled_loss.backward()


@ranks(2, ("ddp",), ("fsdp",), ("group",))
def test_overflow_on_one_rank_skips_on_all(engine: str) -> None:
    model: Any = two_layers()
    if engine == "fsdp":
        fully_shard(model, mesh=engines.mesh(2))
    optimizer = sgd(model)
    group = {"process_group": dist.group.WORLD} if engine == "group" else {}
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=1024.0), **group)
    runs = DistributedDataParallel(model) if engine == "ddp" else model
    for index in range(3):
        optimizer.zero_grad()
        bad = index == 1 and dist.get_rank() == 1
        pass_of(runs, optimizer, of_rank(index), float("inf") if bad else 1.0)
        for parameter in model.parameters() if engine == "group" else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (index == 1)
        engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
    assert mpinit.loss_scale(optimizer) == 512.0
    engines.assert_one(list(engines.whole(model.state_dict()).values()))


@ranks(2)
def test_rank_that_leaves_out_a_step_lets_the_others_wait_until_the_timeout() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2", process_group=group)
    pass_of(model, optimizer, of_rank(0))
    dist.barrier()
    if dist.get_rank() == 0:
        with engines.refused(RuntimeError, "imed out"):
            optimizer.step()
    dist.barrier()


@ranks(2, ("O2", True), ("O5", "split"))
def test_wrapping_gives_all_ranks_the_masters_of_the_first(level: str, masters: Any) -> None:
    model = two_layers(seed=dist.get_rank())
    first = two_layers(seed=0).state_dict()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, master_weights=masters)
    DistributedDataParallel(model)
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())


@ranks(2)
def test_older_wrapper_is_refused_at_the_first_step() -> None:
    model = two_layers()
    runs = DistributedDataParallel(model)
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5")
    pass_of(runs, optimizer, of_rank(0))
    before = [value.clone() for value in model.state_dict().values()]
    with engines.refused(RuntimeError, "made before mpinit.initialize", "Call mpinit.initialize first"):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before))


@ranks(2)
def test_models_of_unknown_processes_need_a_process_group() -> None:
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    pass_of(model, optimizer, of_rank(0))
    with engines.refused(RuntimeError, "process_group=torch.distributed.group.WORLD", "new_subgroups(group_size=1)"):
        optimizer.step()


@ranks(2)
def test_local_steps_need_a_process_group() -> None:
    """After passes in ``no_sync()`` only, at a dynamic scale. Passes that are averaged later need nothing."""
    for given in ({}, {"process_group": dist.group.WORLD}):
        model = two_layers()
        optimizer = sgd(model)
        mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=1024.0), **given)
        runs = DistributedDataParallel(model)
        pass_of(runs, optimizer, of_rank(0))
        optimizer.step()
        for index in range(2):
            optimizer.zero_grad()
            with runs.no_sync():
                pass_of(runs, optimizer, of_rank(1), float("inf") if dist.get_rank() == index == 1 else 1.0)
            if not given:
                with engines.refused(RuntimeError, "no_sync()", "process_group=torch.distributed.group.WORLD"):
                    optimizer.step()
                pass_of(runs, optimizer, of_rank(2))
            optimizer.step()
            engines.assert_one((mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)))
        assert mpinit.step_counts(optimizer) == (2, 1)


@ranks(2)
def test_float32_shards_are_the_masters() -> None:
    """Equal to float32 weights by hand whose forward is in bfloat16; gradients are averaged in float32."""
    model: Any = fully_shard(two_layers(), mesh=engines.mesh(2))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    by_hand = two_layers()
    stepped = sgd(by_hand)
    for index in range(3):
        optimizer.zero_grad()
        pass_of(model, optimizer, of_rank(index))
        optimizer.step()
        narrow = two_layers().bfloat16()
        narrow.load_state_dict(by_hand.state_dict())
        narrow(of_rank(index).bfloat16()).float().square().mean().backward()
        for weight, master in zip(narrow.parameters(), by_hand.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float() / 2
            dist.all_reduce(master.grad)
        stepped.step()
    for name, value in engines.whole(model.state_dict()).items():
        assert torch.equal(value, by_hand.state_dict()[name]), name


@ranks(2)
def test_gradients_that_fsdp_keeps_are_refused_under_a_loss_scale() -> None:
    model: Any = fully_shard(two_layers(), mesh=engines.mesh(2))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    model.set_requires_gradient_sync(False)
    with engines.refused(RuntimeError, "FSDP2 keeps gradients", "opt_level='O5'", "loss_scale=1.0"):
        pass_of(model, optimizer, of_rank(0))


@ranks(2)
def test_scale_that_one_rank_loads_is_not_seen() -> None:
    """Load it on every rank, or before the model is wrapped."""
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    if dist.get_rank() == 0:
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}, optimizer)
    runs = DistributedDataParallel(model)
    assert mpinit.loss_scale(optimizer) == 64.0
    if dist.get_rank() == 1:
        mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 0}}, optimizer)
    pass_of(runs, optimizer, of_rank(0))
    optimizer.step()
    assert mpinit.loss_scale(optimizer) == (64.0, 32.0)[dist.get_rank()]


# -- Rule 11: undo, and copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [True, "split", "model"])
def test_undo_gives_masters_back_and_copies_are_what_it_gives(masters: Any) -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5", master_weights=masters)
    pass_of(model, optimizer, torch.ones(2, 4))
    optimizer.step()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy((model, optimizer))[0]]
    mpinit.undo(model)
    for copied in copies:
        assert "forward" not in vars(copied)
        for name, value in model.state_dict().items():
            assert value.dtype is torch.float32 and torch.equal(copied.state_dict()[name], value)


def test_initialize_says_how_many_weights_keep_their_rounding(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mpinit")
    model = two_layers()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    mpinit.initialize(model, sgd(model), "O5")
    assert "2 weights have no master" in caplog.text
    mpinit.undo(model)
    assert torch.equal(model[0].weight, before.bfloat16().float())


# -- Rule 13: what a model has in float32, and buffers that it writes to -----------------------------------------------


class Rotated(nn.Module):
    """A layer in bfloat16 with a table and a norm in float32, whose forward casts, as those of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8)
        self.table = nn.Buffer(torch.linspace(0.1, 1, 8) ** 4)
        self.exact = nn.Buffer(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x.bfloat16()).float() * self.table
        return self.norm(hidden).bfloat16() * self.exact.bfloat16()  # type: ignore[no-any-return]


@pytest.mark.parametrize("masters", [True, "split", "model"])
def test_model_that_comes_in_16_bits_keeps_what_it_has_in_float32(masters: Any) -> None:
    torch.manual_seed(0)
    model = Rotated()
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, "O5", master_weights=masters)
    assert model.table.dtype is model.norm.weight.dtype is torch.float32 and model.exact.dtype is torch.float64
    values = [nn.Parameter(parameter.detach().float()) for parameter in by_hand.parameters()]
    own = torch.optim.AdamW(values, lr=0.01)
    for index in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
        pass_of(model, optimizer, x)
        optimizer.step()
        optimizer.zero_grad()
        by_hand.zero_grad()
        by_hand(x).float().square().mean().backward()
        for value, parameter in zip(values, by_hand.parameters(), strict=True):
            assert parameter.grad is not None
            value.grad = parameter.grad.float()
        own.step()
        with torch.no_grad():
            for value, parameter in zip(values, by_hand.parameters(), strict=True):
                parameter.copy_(value)
    state = model.state_dict()
    for (name, _), value in zip(by_hand.named_parameters(), values, strict=True):
        assert torch.equal(state[name], value), name


def test_buffers_that_training_writes_to_are_named_once_with_the_entry() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count = nn.Linear(4, 1), nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x)  # type: ignore[no-any-return]

    model = Counting()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5")
    with pytest.warns(UserWarning, match=r"keep_fp32=\['count'\]") as caught:
        for _ in range(4):
            pass_of(model, optimizer, torch.ones(2, 4))
            optimizer.step()
    assert len(caught) == 1 and model.count.dtype is torch.bfloat16, "nothing changes in a running model"


class Listed(nn.Module):
    _keep_in_fp32_modules = ("first",)
    _keep_in_fp32_modules_strict = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x.to(self.first.weight.dtype)).to(self.middle.weight.dtype))
        return self.last(hidden.to(self.last.weight.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("level", "first"), [("O2", torch.float32), ("O5", torch.bfloat16)])
def test_tensors_that_a_library_lists_stay_float32(
    level: str, first: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mpinit")
    model = Listed()
    mpinit.initialize(model, sgd(model), level)
    assert model.first.weight.dtype is first and model.last.weight.dtype is torch.float32
    assert model(torch.ones(2, 4)).dtype is torch.float32
    assert "as the library lists them" in caplog.text and "last.weight" in caplog.text


# -- Rule 15: float32 parameters that are 16-bit in forwards -----------------------------------------------------------


def test_weights_of_a_function_that_recomputes_get_gradients() -> None:
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Any, x: Tensor, *weights: Tensor) -> Tensor:
            ctx.run, ctx.x, ctx.weights = run, x, weights
            with torch.no_grad():
                return run(x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            x = ctx.x.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.run(x)
            return None, *torch.autograd.grad(output, [x, *ctx.weights], gradients, allow_unused=True)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = two_layers()

        def forward(self, x: Tensor) -> Tensor:
            return Recomputed.apply(self.body, x, *self.parameters())  # type: ignore[no-untyped-call,no-any-return]

    model = nn.Sequential(nn.Linear(4, 4), Block())
    plain = copy.deepcopy(model)
    mpinit.initialize(model, sgd(model), "O5", master_weights="model")
    x = torch.randn(3, 4)
    for network in (model, plain):
        network(x).square().mean().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and expected.grad is not None
        assert (ours.grad - expected.grad).norm() <= 0.05 * expected.grad.norm()


def test_a_forward_that_writes_to_its_weights_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Writes(4, 4)
    mpinit.initialize(model, sgd(model), "O5", master_weights="model")
    with pytest.raises(RuntimeError, match="keep_fp32"):
        model(torch.ones(1, 4))
