"""The rules of the contract, by number: what a user may rely on, what is refused with its way out, what is not seen."""

import contextlib
import copy
import datetime
import gc
import io
import logging
import pickle
import threading
import warnings
from typing import Any

import engines
import pytest
import torch
import torch.distributed as dist
from frameworks import let_torchvision_load, needs
from processes import ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mpinit


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


# -- Rule 1: between steps a weight is one thing -----------------------------------------------------------------------

STORES: dict[str, dict[str, Any]] = {
    "float16": {"opt_level": "O2", "loss_scale": 128.0},
    "bfloat16": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
FULL = ("float16", "bfloat16")
stores, full = pytest.mark.parametrize("store", STORES), pytest.mark.parametrize("store", FULL)


def started(store: str, make: Any = None, steps: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model of two layers and its optimizer, after some steps."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if make is None else make(model.parameters())
    mpinit.initialize(model, optimizer, **STORES[store], verbosity=0)
    for index in range(steps):
        trained(model, optimizer, index)
    return model, optimizer


def batch(index: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(index))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, index: int = 0) -> None:
    optimizer.zero_grad()
    pass_of(model, optimizer, batch(index))
    optimizer.step()


def float32_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(these: dict[str, Tensor], those: dict[str, Tensor]) -> bool:
    return all(torch.equal(these[name], value) for name, value in those.items())


@stores
def test_groups_state_gradients_are_the_weights_between_steps(store: str) -> None:
    model, optimizer = started(store)
    weights = list(model.parameters())
    seen: list[list[Any]] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(list(optimizer.param_groups[0]["params"])))
    trained(model, optimizer)
    for own in (*seen, optimizer.param_groups[0]["params"], list(optimizer.state)):
        assert all(one is other for one, other in zip(own, weights, strict=True))
    assert all(weight.grad is not None and weight.dtype.itemsize == 2 for weight in weights)
    assert all(optimizer.state[weight]["momentum_buffer"].dtype is torch.float32 for weight in weights)


@stores
def test_the_optimizers_own_code_steps_float32_masters(store: str) -> None:
    dtypes = set()

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            dtypes.update(p.dtype for group in self.param_groups for p in group["params"])
            return super().step(closure)

    started(store, lambda parameters: Own(parameters, lr=0.1))
    assert dtypes == {torch.float32}


class Scaled(nn.Linear):
    """Multiplies by an attribute of its weight, and counts its calls in another."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return super().forward(input) * weight.gain


class ByAttribute(torch.optim.Optimizer):
    """Multiplies each update by an attribute of the weight, and counts its steps in another."""

    def step(self, closure: Any = None) -> None:
        weight: Any
        for weight in self.param_groups[0]["params"]:
            weight.steps = getattr(weight, "steps", 0) + 1
            weight.data.add_(weight.grad, alpha=-getattr(weight, "factor", 0.0))


@pytest.mark.parametrize("more", [{}, {"compute_fp32": ["0"]}], ids=["", "compute_fp32"])
@pytest.mark.parametrize("store", [*STORES, "model"])
def test_attributes_of_a_weight_are_those_of_all_its_forms(store: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(4, 2))
    weight: Any = model[0].weight
    weight.gain, weight.factor = 2.0, 0.5
    optimizer = ByAttribute(model.parameters(), {})
    by_hand = nn.functional.linear(batch(), weight.detach(), model[0].bias.detach()) * 6
    stores = {**STORES, "model": {"opt_level": "O5", "master_weights": "model"}}
    mpinit.initialize(model, optimizer, **stores[store], **more, verbosity=0)
    before = float32_of(model)
    trained(model, optimizer)
    assert (weight.calls, weight.steps) == (1, 1)
    assert not same(before, {"0.weight": float32_of(model)["0.weight"]})  # it has a factor
    assert same(float32_of(model), {"0.bias": before["0.bias"]})
    model.load_state_dict(before)
    with mpinit.float32_weights(model):
        model[0].weight.gain = 6.0
        assert torch.equal(model(batch()), by_hand)
    assert (weight.gain, weight.calls) == (6.0, 2)
    assert torch.allclose(model(batch()), by_hand, atol=0.05)
    masters: list[Any] = list(mpinit.master_params(optimizer))
    assert (masters[0].gain, masters[0].calls) == (6.0, 3)
    assert pickle.loads(pickle.dumps(model))[0].weight.gain == 6.0


@pytest.mark.parametrize("more", [{"master_weights": "model"}, {"compute_fp32": ["0"]}], ids=["model", "compute_fp32"])
def test_a_compiled_forward_reads_attributes_of_weights(more: dict[str, Any]) -> None:
    class Product(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * getattr(self.weight, "gain", 1.0)

    torch.manual_seed(0)
    model = nn.Sequential(Product(4, 2))
    weight: Any = model[0].weight
    weight.gain = 4.0
    mpinit.initialize(model, sgd(model), opt_level="O5", **more, verbosity=0)
    by_hand = nn.functional.linear(batch(), weight.detach().float(), model[0].bias.detach().float()) * 4
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(batch()), by_hand, atol=0.05)


# -- Rule 2: a master is a function of two tensors ---------------------------------------------------------------------


def law(weight: Tensor, master: Tensor) -> Tensor:
    rounded = master.to(weight.dtype)
    return torch.where((rounded == weight) | (rounded.isnan() & weight.isnan()), master, weight.float())


@full
def test_a_full_master_counts_where_its_rounding_is_the_weight(store: str) -> None:
    model, _ = started(store)
    before, weight = float32_of(model)["0.weight"], model[0].weight
    with torch.no_grad():
        weight[0] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
        weight[1] = weight[1].clone()
        weight[2, 0] = 0.3
    expected = law(weight.detach(), before)
    assert torch.equal(expected[1], before[1]) and not torch.equal(expected[1], weight[1].float())
    assert torch.equal(model.state_dict()["0.weight"].nan_to_num(7.0), expected.nan_to_num(7.0))
    with mpinit.float32_weights(model):
        assert torch.equal(model[0].weight.detach().nan_to_num(7.0), expected.nan_to_num(7.0))
    mpinit.undo(model)
    assert torch.equal(weight.detach().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_split_master_is_the_weight_and_the_old_remainder() -> None:
    model, _ = started("split")
    before, weight = float32_of(model)["0.weight"], model[0].weight
    remainder = before.view(torch.int32) - weight.detach().float().view(torch.int32)
    with torch.no_grad():
        weight[0] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
        weight[1] = 0.3
    found, wide = model.state_dict()["0.weight"], weight.detach().float()
    assert torch.equal(found[0].nan_to_num(7.0), wide[0].nan_to_num(7.0)), "0, inf and nan have no remainder"
    assert torch.equal(found[1:], (wide.view(torch.int32) + remainder).view(torch.float32)[1:])
    torch.testing.assert_close(found[1], wide[1], rtol=2**-8, atol=0)


@stores
@pytest.mark.parametrize("how", ["copy_", "data", "data ="])
def test_weights_swapped_for_an_evaluation_keep_lower_bits(store: str, how: str) -> None:
    model, optimizer = started(store)
    masters = list(mpinit.master_params(optimizer))  # kept, as for clipping
    before, own = float32_of(model), [weight.detach().clone() for weight in model.parameters()]

    def swap(values: list[Tensor]) -> None:
        for weight, value in zip(model.parameters(), values, strict=True):
            if how == "copy_":
                weight.detach().copy_(value)
            elif how == "data":
                weight.data.copy_(value)
            else:
                weight.data = value.clone()

    swap([torch.full_like(value, 0.25) for value in own])
    with torch.no_grad():
        evaluated = model(batch())
        assert torch.equal(evaluated[:, 0], evaluated[:, 1]), "all weights are the same"
    swap(own)
    with torch.no_grad():
        model(batch())
    assert same(float32_of(model), before)
    other, other_optimizer = started(store)
    for each in ((model, optimizer), (other, other_optimizer)):
        trained(*each, 5)
    assert same(float32_of(model), float32_of(other))
    assert all(one is other for one, other in zip(masters, mpinit.master_params(optimizer), strict=True))


@full
def test_reading_masters_while_others_are_swapped_in_moves_them(store: str) -> None:
    """Lower bits are lost then: restore the weights before anything reads masters."""
    model, optimizer = started(store)
    before, own = float32_of(model)["0.weight"], model[0].weight.detach().clone()
    model[0].weight.detach().fill_(0.25)
    list(mpinit.master_params(optimizer))
    model[0].weight.detach().copy_(own)
    found = float32_of(model)["0.weight"]
    assert not torch.equal(found, before) and torch.equal(found, own.float())


# -- Rule 3: which writes to a weight are seen -------------------------------------------------------------------------

WRITES: dict[str, Any] = {
    "in place": lambda w: w.detach().fill_(0.3),
    "no_grad": lambda w: torch.no_grad()(w.fill_)(0.3),
    "foreach": lambda w: torch.no_grad()(torch._foreach_copy_)([w], [torch.full_like(w, 0.3)]),
    "out=": lambda w: torch.no_grad()(torch.mul)(torch.full_like(w, 0.3), 1.0, out=w),
    "init": lambda w: nn.init.constant_(w, 0.3),
    "a view": lambda w: w.detach().view(-1).fill_(0.3),
    "inference_mode": lambda w: torch.inference_mode()(w.fill_)(0.3),
    "data.fill_": lambda w: w.data.fill_(0.3),
    "data[:]": lambda w: w.data.__setitem__(slice(None), 0.3),
    "a view of data": lambda w: w.data.view(-1).fill_(0.3),
    "a kept data": lambda w: KEPT[id(w)].fill_(0.3),
    "data =": lambda w: setattr(w, "data", torch.full_like(w, 0.3)),
    "data = in another layout": lambda w: setattr(w, "data", torch.full((4, 8), 0.3, dtype=w.dtype).t()),
    "set_": lambda w: torch.no_grad()(w.set_)(torch.full_like(w, 0.3).untyped_storage(), 0, w.shape, w.stride()),
    "data.clamp_": lambda w: w.data.clamp_(0.3, 0.3),
    "load_state_dict": None,
}
KEPT: dict[int, Tensor] = {}


@stores
@pytest.mark.parametrize("how", WRITES)
def test_writes_torch_counts_or_through_data_are_stepped(store: str, how: str) -> None:
    model, optimizer = started(store)
    weight = model[0].weight
    KEPT[id(weight)] = weight.data
    for _ in range(2):
        master = float32_of(model)["0.weight"]
        if how == "load_state_dict":
            model[0].load_state_dict({"weight": torch.full((8, 4), 0.3)}, strict=False)
        else:
            WRITES[how](weight)
        assert (weight == torch.tensor(0.3).to(weight.dtype)).all()
        before = model.state_dict()["0.weight"]
        if how == "load_state_dict":
            assert torch.equal(before, torch.full((8, 4), 0.3))
        elif store == "split":
            torch.testing.assert_close(before, weight.detach().float(), rtol=2**-8, atol=0)
        else:
            assert torch.equal(before, law(weight.detach(), master))
        optimizer.zero_grad()
        optimizer.state.clear()
        pass_of(model, optimizer, batch())
        optimizer.step()
        torch.testing.assert_close(
            model.state_dict()["0.weight"], before - 0.1 * weight.grad.float(), rtol=0, atol=2e-7
        )
    KEPT.clear()


@full
def test_reads_of_data_are_no_writes(store: str) -> None:
    """A norm for a log between a write to a master and the next use is none, nor is a compilation."""
    model, optimizer = started(store)
    master = next(mpinit.master_params(optimizer))
    with torch.no_grad():
        master.fill_(0.2)
    float(model[0].weight.data.norm()), model[0].weight.data.clone(), repr(model[0].weight.data)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(batch())
    model(batch())
    assert torch.equal(model[0].weight.float(), torch.tensor(0.2).to(model[0].weight.dtype).float().expand(8, 4))
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 0.2))


UNSEEN: dict[str, Any] = {
    "numpy": lambda w: w.detach().view(torch.int16).numpy().fill(0),
    "data of a view": lambda w: w.detach().view(-1).data.zero_(),
    "memory of the storage": lambda w: torch.empty(0, dtype=w.dtype).set_(w.untyped_storage()).zero_(),
}


@stores
@pytest.mark.parametrize("how", UNSEEN)
def test_unseen_writes_are_overwritten_by_a_step_of_full_masters(store: str, how: str) -> None:
    model, optimizer = started(store)
    before = float32_of(model)["0.weight"]
    UNSEEN[how](model[0].weight)
    assert not model[0].weight.any()
    trained(model, optimizer)
    found = model.state_dict()["0.weight"]
    if store == "split":
        assert found.abs().max() < before.abs().max() / 2, "the next step starts from 0"
    else:
        assert (found - before).abs().max() < 0.5 < (before - found * 0 + 1).abs().max()
        torch.testing.assert_close(found, before, rtol=0, atol=0.3)


def test_swapped_tensors_are_not_seen() -> None:
    model, optimizer = started("bfloat16")
    before = float32_of(model)["0.weight"]
    weight, new = model[0].weight, nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))
    versions = weight._version, new._version
    with torch.no_grad():
        while new._version < weight._version:
            new.zero_()
    optimizer.zero_grad()
    torch.utils.swap_tensors(weight, new)
    assert versions[0] >= versions[1] and not weight.any()
    trained(model, optimizer)
    torch.testing.assert_close(model.state_dict()["0.weight"], before, rtol=0, atol=0.3)


@full
@pytest.mark.parametrize("reads", ["nothing", "masters", "state dict"])
def test_first_step_compares_all_weights_by_value(store: str, reads: str) -> None:
    """Ranks that broadcast their weights by hand before training move no version."""
    model, optimizer = started(store, steps=0)
    if reads == "masters":
        list(mpinit.master_params(optimizer))
    UNSEEN["numpy"](model[0].weight)
    if reads == "state dict":
        assert not model.state_dict()["0.weight"].any()
    pass_of(model, optimizer, batch())
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["0.weight"], -0.1 * model[0].weight.grad.float(), rtol=1e-6, atol=0)


@ranks(2, (False,), (True,))
def test_weights_broadcast_before_training_are_those_of_rank_0(in_block: bool) -> None:
    """All bits of masters are sent inside a block; a 16-bit weight is sent without its master's lower bits."""
    model = two_layers(seed=dist.get_rank())
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5", process_group=dist.group.WORLD)
    with mpinit.float32_weights(model) if in_block else contextlib.nullcontext():
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    for index in range(2):
        trained(model, optimizer, index)
    found = [value.clone() for value in model.state_dict().values()]
    if in_block:
        engines.assert_one(found)
    for value in found:
        other = value.clone()
        dist.broadcast(other, 0)
        torch.testing.assert_close(value, other, rtol=2**-7, atol=2**-9)


@ranks(2, ("copy",), ("block",))
def test_weights_broadcast_during_training(way: str) -> None:
    """An in-place collective into a weight, or into its data, moves no version: a copy that torch counts is seen."""
    model = two_layers(seed=dist.get_rank())
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5", process_group=dist.group.WORLD)
    for index in range(2):
        trained(model, optimizer, index)
    with mpinit.float32_weights(model) if way == "block" else contextlib.nullcontext():
        for parameter in model.parameters():
            values = parameter.detach().clone()
            dist.broadcast(values, 0)
            parameter.data.copy_(values)
    sent = [parameter.detach().clone() for parameter in model.parameters()]
    engines.assert_one(sent)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trained(model, optimizer, 2)
    assert all(map(torch.equal, model.parameters(), sent))


@stores
@pytest.mark.parametrize("values", [torch.zeros(8, 4), torch.zeros(3, 4, dtype=torch.bfloat16)], ids=["dtype", "shape"])
def test_data_of_another_dtype_or_shape_names_copy(store: str, values: Tensor) -> None:
    model, optimizer = started(store)
    own = model[0].weight.data
    optimizer.zero_grad()
    model[0].weight.data = values
    for use in (lambda: model(batch()), optimizer.step):
        with pytest.raises(RuntimeError, match=r"data of '0.weight' was replaced.*copy_\(\).*float32_weights"):
            use()
    model[0].weight.data = own
    trained(model, optimizer)


@stores
def test_small_update_is_lost_on_a_weight_and_counts_in_a_block(store: str) -> None:
    model, _ = started(store)
    before = float32_of(model)
    with torch.no_grad():
        model[0].weight.mul_(1 - 1e-4)
    assert same(float32_of(model), before)
    with mpinit.float32_weights(model), torch.no_grad():
        model[0].weight.mul_(1 - 1e-4)
    assert torch.equal(float32_of(model)["0.weight"], before["0.weight"] * (1 - 1e-4))


# -- Rule 4: masters that users have -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("store", "passes"), [*((store, "scale_loss") for store in FULL), ("bfloat16", "plain")])
def test_a_kept_list_of_masters_clips_what_the_step_uses(store: str, passes: str) -> None:
    """Also where a weight gets no gradient in some iterations, and where gradients were replaced or cleared late."""
    model, optimizer = started(store, lambda p: torch.optim.SGD(p, lr=0.1))
    masters, total = list(mpinit.master_params(optimizer)), 0.0
    for index in range(6):
        output = model[0](batch(index)) if index % 3 == 2 else model(batch(index))
        optimizer.zero_grad()
        loss = output.float().square().mean()
        if passes == "scale_loss":
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if index % 2:
            for weight in model.parameters():
                weight.grad = None if weight.grad is None else weight.grad / 2
        expected = torch.cat([w.grad.float().flatten() for w in model.parameters() if w.grad is not None]).norm()
        norm = nn.utils.clip_grad_norm_(masters, 0.01)
        torch.testing.assert_close(norm.float(), expected, rtol=2**-7, atol=0)
        assert all(master.grad is weight.grad for master, weight in zip(masters, model.parameters(), strict=True))
        before = float32_of(model)
        optimizer.step()
        moved = sum((value - before[name]).square().sum() for name, value in model.state_dict().items())
        total = float(torch.as_tensor(moved).sqrt())
        assert 0 < total < 0.1 * 0.0101
    assert all(one is other for one, other in zip(masters, mpinit.master_params(optimizer), strict=True))


@full
@pytest.mark.parametrize("how", ["no_grad", "data.copy_", "data =", "detach"])
@pytest.mark.parametrize("use", ["forward", "step", "state_dict"])
def test_a_written_master_counts_over_its_weight(store: str, how: str, use: str) -> None:
    model, optimizer = started(store)
    master, weight = next(mpinit.master_params(optimizer)), model[0].weight
    values = torch.full((8, 4), 0.1001)
    with torch.no_grad():
        if how == "no_grad":
            master.copy_(values)
        elif how == "data =":
            master.data = values
        else:
            (master.data if how == "data.copy_" else master.detach()).copy_(values)
    optimizer.zero_grad()
    {"forward": lambda: model(batch()), "step": optimizer.step, "state_dict": model.state_dict}[use]()
    assert torch.equal(model.state_dict()["0.weight"], values)
    model(batch())
    assert torch.equal(weight, values.to(weight.dtype))


@full
def test_weight_and_master_written_to_differently_are_an_error(store: str) -> None:
    model, optimizer = started(store)
    master, weight = next(mpinit.master_params(optimizer)), model[0].weight
    with torch.no_grad():
        master.fill_(0.1001), weight.fill_(0.1001)
    model(batch())
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 4), 0.1001))
    with torch.no_grad():
        master.fill_(0.2), weight.fill_(0.3)
    for use in (lambda: model(batch()), optimizer.step, model.state_dict):
        with pytest.raises(RuntimeError, match=r"'0.weight' and its float32 master were both written to.*one of"):
            use()
    weight.detach().fill_(0.2)
    trained(model, optimizer)


@full
def test_gradient_set_on_a_master_and_loss_of_it_are_errors(store: str) -> None:
    model, optimizer = started(store)
    master = next(mpinit.master_params(optimizer))
    for value in (None, torch.zeros(8, 4)):
        with pytest.raises(RuntimeError, match=r"assign it to the weight.*zero_grad"):
            master.grad = value
    with pytest.raises(RuntimeError, match="use the weight instead"):
        (model(batch()).square().mean() + sum(m.square().sum() for m in mpinit.master_params(optimizer))).backward()
    trained(model, optimizer)


@full
def test_copies_and_pickles_of_masters_are_plain_parameters(store: str) -> None:
    """As in {"master params": list(amp.master_params(optimizer))}, saved and copied back."""
    model, optimizer = started(store)
    trained(model, optimizer)
    masters, file = list(mpinit.master_params(optimizer)), io.BytesIO()
    torch.save({"master params": masters}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["master params"]
    for made in (saved, copy.deepcopy(masters), pickle.loads(pickle.dumps(masters))):
        assert all(type(each) is nn.Parameter and each.grad is None for each in made)
        assert all(map(torch.equal, made, masters))
    trained(model, optimizer, 3)
    for master, value in zip(masters, saved, strict=True):
        master.data.copy_(value.data)
    model(batch())
    assert all(
        torch.equal(weight, value.to(weight.dtype)) for weight, value in zip(model.parameters(), saved, strict=True)
    )


@pytest.mark.parametrize("store", ["split", "model"])
def test_split_and_model_masters_are_the_models_parameters(store: str) -> None:
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5", master_weights=store)
    assert all(one is other for one, other in zip(mpinit.master_params(optimizer), model.parameters(), strict=True))


@stores
def test_replaced_parameters_are_freed_with_their_masters(store: str) -> None:
    model, optimizer = started(store)
    list(mpinit.master_params(optimizer))
    with mpinit.float32_weights(model):
        pass
    model.state_dict()
    sizes = 61, 67
    model[2] = nn.Linear(8, 61).to(model[0].weight.dtype)
    model.append(nn.Linear(61, 67).to(model[0].weight.dtype))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    list(mpinit.master_params(optimizer))
    with mpinit.float32_weights(model):
        pass
    trained(model, optimizer)
    model[2].weight.data.clamp_(-1, 1)
    trained(model, optimizer)
    assert tensors_of(sizes) > 0
    model[2], optimizer.param_groups[0]["params"] = nn.Linear(8, 2).to(model[0].weight.dtype), []
    del model[3]
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for parameter in [each for each in optimizer.state if each.shape[0] in sizes]:
        del optimizer.state[parameter], parameter
    trained(model, optimizer)
    assert tensors_of(sizes) == 0


def tensors_of(sizes: tuple[int, ...]) -> int:
    """How many tensors live whose first dimension is one of these."""
    gc.collect()
    return sum(isinstance(each, Tensor) and each.dim() > 0 and each.shape[0] in sizes for each in gc.get_objects())


# -- Rule 5: entries of state dicts are copies -------------------------------------------------------------------------


@stores
def test_entries_are_float32_copies_that_load_exactly(store: str) -> None:
    model, optimizer = started(store)
    entries, before = model.state_dict(), float32_of(model)
    assert {value.dtype for value in entries.values()} == {torch.float32}
    trained(model, optimizer)
    assert same(entries, before) and not same(float32_of(model), before)
    model.load_state_dict(entries)
    assert same(float32_of(model), before)
    with mpinit.float32_weights(model):
        inside = model.state_dict()
        model[0].weight.detach().add_(1.0)
    assert same(inside, before)
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@stores
@pytest.mark.parametrize("use", ["forward"])
def test_a_written_entry_that_was_not_loaded_is_warned_of_once(store: str, use: str) -> None:
    model, optimizer = started(store)
    before, entries = float32_of(model), model.state_dict()
    entries["0.bias"].add_(1.0)

    def run() -> None:
        model(batch()) if use == "forward" else optimizer.step()

    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"'0.bias' of a state dict.*load_state_dict\(\).*float32_weights") as caught:
        run()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        entries["0.bias"].add_(1.0)
        run()
    assert same(float32_of(model), before)


@stores
def test_entries_loaded_dropped_or_only_read_say_nothing(store: str) -> None:
    model, optimizer = started(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries = model.state_dict()  # as Reptile, FedAvg and averages by hand do
        for value in entries.values():
            value.add_(0.01)
        model.load_state_dict(entries)
        trained(model, optimizer)
        part = model.state_dict()
        part["0.weight"].zero_()
        model[0].load_state_dict({"weight": part["0.weight"], "bias": part["0.bias"]})
        trained(model, optimizer)
        model.state_dict()["0.weight"].zero_()  # nobody has it
        kept = model.state_dict()
        trained(model, optimizer)
        copy.deepcopy(kept)["0.weight"].zero_()
        trained(model, optimizer)


def test_tied_weights_share_one_entry() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    mpinit.initialize(model, sgd(model), "O5")
    for _ in range(2):
        state = model.state_dict()
        assert state["0.weight"] is state["1.weight"]


class OwnSaves(nn.Linear):
    """A module with a state of its own."""

    def get_extra_state(self) -> Any:
        return {"weight": self.weight.detach()}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def test_what_modules_save_by_own_methods_is_saved_as_it_is() -> None:
    model = nn.Sequential(OwnSaves(4, 4))
    mpinit.initialize(model, sgd(model), "O5")
    state = model.state_dict()
    assert state["0._extra_state"]["weight"].dtype is torch.bfloat16
    assert state["0.weight"].dtype is torch.float32


@stores
def test_uncounted_writes_to_entries_are_lost_without_a_warning(store: str) -> None:
    model, optimizer = started(store)
    before, state = float32_of(model), model.state_dict()
    state["0.weight"].numpy().fill(1.0)
    state["0.bias"].data.fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())
    assert same(float32_of(model), before)
    trained(model, optimizer)


# -- Rule 6: float32_weights is about values ---------------------------------------------------------------------------


@stores
def test_a_block_has_the_values_in_float32_and_rounds_them_back(store: str) -> None:
    """The refusals are in tests/masters/test_float32_weights.py."""
    model, optimizer = started(store)
    before, own = float32_of(model), list(model.parameters())
    with mpinit.float32_weights(model), torch.no_grad():
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert same(dict(model.named_parameters()), before)
        plain = two_layers()
        plain.load_state_dict(before)
        assert torch.equal(model(batch()), plain(batch())), "the model computes in float32"
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-4)
    expected = {name: value * (1 - 1e-4) for name, value in before.items()}
    assert same(float32_of(model), expected)
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
    assert all(weight.grad is not None for weight in own), "gradients are where they were"
    if store != "split":
        for name, weight in model.named_parameters():
            assert torch.equal(weight, expected[name].to(weight.dtype))
    trained(model, optimizer)


@stores
def test_average_of_weights_in_blocks_is_of_float32_numbers(store: str) -> None:
    model, optimizer = started(store)
    with mpinit.float32_weights(model):
        shadow = [parameter.detach().clone() for parameter in model.parameters()]
    expected = [value.clone() for value in shadow]
    for index in range(5):
        trained(model, optimizer, index)
        with mpinit.float32_weights(model):
            for mean, parameter in zip(shadow, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.1)
        for mean, value in zip(expected, model.state_dict().values(), strict=True):
            mean.lerp_(value, 0.1)
    assert all(map(torch.equal, shadow, expected))
    before, own = float32_of(model), [weight.detach().clone() for weight in model.parameters()]
    with mpinit.float32_weights(model), torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), shadow)
        model(batch())
        torch._foreach_copy_(list(model.parameters()), list(before.values()))
    assert same(float32_of(model), before)
    assert all(torch.equal(weight, value) for weight, value in zip(model.parameters(), own, strict=True))


@stores
def test_frozen_parameters_and_buffers_are_float32_inside_too(store: str) -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    model[2].register_buffer("shift", torch.tensor([1 / 3, 0.3]))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **STORES[store], verbosity=0)
    rounded = model[0].weight.detach().clone()
    versions = model[0].weight._version, model[2].shift._version
    with mpinit.float32_weights(model), torch.no_grad():
        assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float32}
        assert torch.equal(model[2].shift, torch.tensor([1 / 3, 0.3])), "a buffer keeps its original"
    assert (model[0].weight._version, model[2].shift._version) == versions, "reading is no write"
    with mpinit.float32_weights(model), torch.no_grad():
        model[0].weight.fill_(0.1001)
        model[2].shift = model[2].shift * 2
    assert torch.equal(model[0].weight, torch.full((8, 4), 0.1001).to(rounded.dtype))
    torch.testing.assert_close(model[2].shift.float(), torch.tensor([2 / 3, 0.6]), rtol=2**-8, atol=0)


IN_BLOCKS: dict[str, tuple[Any, str]] = {
    "step": (lambda model, optimizer: optimizer.step(), "before or after the with-block"),
    "scale_loss": (lambda model, optimizer: pass_of(model, optimizer, batch()), "before or after the with-block"),
    "backward": (lambda model, optimizer: model(batch()).sum().backward(), "torch.no_grad"),
    "undo": (lambda model, optimizer: mpinit.undo(model), "before or after the with-block"),
    "masters": (lambda _, optimizer: list(mpinit.master_params(optimizer)), "before or after the with-block"),
    "replace": (lambda model, _: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 4))), "with copy_"),
    "tie": (lambda model, _: setattr(model, "tied", model[0].weight), "tie weights outside"),
    "freeze": (lambda model, _: model[0].requires_grad_(False), "the model's own parameters"),
    "hook": (lambda model, _: model[0].weight.register_hook(lambda gradient: gradient), "the model's own parameters"),
    "gradient": (lambda model, _: setattr(model[0].weight, "grad", torch.ones(8, 4)), "the model's own parameters"),
}


@stores
@pytest.mark.parametrize("what", IN_BLOCKS)
def test_what_is_not_about_values_is_refused_in_blocks(store: str, what: str) -> None:
    model, optimizer = started(store)
    before, own = float32_of(model), list(model.parameters())
    use, way_out = IN_BLOCKS[what]
    with pytest.raises(RuntimeError, match="float32_weights") as refused, mpinit.float32_weights(model):
        use(model, optimizer)
    assert way_out in str(refused.value)
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
    assert all(weight.requires_grad for weight in own)
    if what != "replace":
        assert same(float32_of(model), before)
    trained(model, optimizer)


# -- Rule 7: gradients are 16-bit, and become float32 where they are used ----------------------------------------------

ONE_WEIGHT = {"float16": torch.float16, "bfloat16": torch.bfloat16, "split": torch.bfloat16}


def one_weight(store: str, **more: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model whose gradient is its input."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mpinit.initialize(model, optimizer, **STORES[store] | more, verbosity=0)
    return model, optimizer


@stores
def test_gradients_are_16_bit_after_a_plain_pass_float32_in_step(store: str) -> None:
    model, optimizer = one_weight(store, loss_scale=1.0)
    seen = []

    def look(*_: Any) -> None:
        seen.extend(p.dtype for p in optimizer.param_groups[0]["params"])

    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype is ONE_WEIGHT[store]
    before = model.state_dict()["weight"]
    optimizer.register_step_pre_hook(look)
    optimizer.step()
    assert seen == [ONE_WEIGHT[store]], "hooks see the weights"
    assert torch.equal(model.state_dict()["weight"], before - 1.0)


@stores
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_300_blocks_of_one_step_add_up_to_300(store: str, scale: float) -> None:
    model, optimizer = one_weight(store, loss_scale=scale)
    for _ in range(300):
        with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[300.0, 300.0]]


@full
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_gradients_are_float32_after_a_block(store: str, scale: float) -> None:
    model, optimizer = one_weight(store, loss_scale=scale)
    with mpinit.scale_loss(model(torch.full((1, 2), 2 / 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    gradient = model.weight.grad
    rounded = torch.full((1, 2), 2 / 3).to(ONE_WEIGHT[store]).float()
    assert gradient is not None and gradient.dtype is torch.float32 and torch.equal(gradient, rounded)
    before = model.state_dict()["weight"]
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    expected = before - rounded * (0.3 / (rounded.norm() + 1e-6))
    assert torch.equal(model.state_dict()["weight"], expected), "the clipped gradient was not rounded"


@stores
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_a_step_inside_of_a_block_is_refused_at_any_scale(store: str, scale: float) -> None:
    model, optimizer = one_weight(store, loss_scale=scale)
    with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=r"step\(\) was called inside .*scale_loss.*move it after"):
            optimizer.step()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)


@stores
def test_a_hook_may_step_inside_of_a_block_at_scale_1(store: str) -> None:
    """A weight whose gradient is complete is stepped in the backward pass, and its gradient freed."""
    results = []
    for in_hook in (True, False):
        torch.manual_seed(0)
        model, optimizer = one_weight(store, loss_scale=1.0)
        (weight,) = model.parameters()

        def step(_: object = None, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        if in_hook:
            weight.register_post_accumulate_grad_hook(step)
        with mpinit.scale_loss(model(torch.full((1, 2), 0.3)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        if not in_hook:
            step()
        assert mpinit.step_counts(optimizer) == (1, 0)
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@stores
def test_plain_passes_add_up_in_16_bits_unless_asked_otherwise(store: str) -> None:
    stops = {torch.float16: 2048.0, torch.bfloat16: 256.0}[ONE_WEIGHT[store]]
    for asked, expected in (({}, stops), ({"grad_dtype": torch.float32}, stops + 2)):
        model, _ = one_weight(store, loss_scale=1.0, **asked)
        model(torch.full((1, 2), stops)).sum().backward()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[expected, expected]]


@stores
def test_a_process_group_without_a_wrapper_changes_no_gradient(store: str) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model, optimizer = one_weight(store, loss_scale=1.0)
        for _ in range(300):
            with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[300.0, 300.0]]
    finally:
        dist.destroy_process_group()


@full
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_blocks_in_a_wrapper_add_up_in_the_dtype_of_its_buckets(store: str, views: bool, scale: float) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model, optimizer = one_weight(store, loss_scale=scale)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        for _ in range(3):
            with mpinit.scale_loss(wrapped(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[3.0, 3.0]]
        optimizer.step()
        del wrapped
    finally:
        dist.destroy_process_group()


def test_blocks_in_an_older_wrapper_of_16_bit_weights_add_up() -> None:
    """A wrapper from before initialize, which has recorded the dtype that the weights keep."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapped = DistributedDataParallel(model)
        mpinit.initialize(model, optimizer, "O5", verbosity=0)
        for _ in range(3):
            with mpinit.scale_loss(wrapped(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[3.0, 3.0]]
        optimizer.step()
        del wrapped
    finally:
        dist.destroy_process_group()


@stores
def test_undo_keeps_gradients_in_float32(store: str) -> None:
    for asked in ({}, {"grad_dtype": torch.float32}):
        model, _ = one_weight(store, loss_scale=1.0, **asked)
        model(torch.ones(1, 2)).sum().backward()
        mpinit.undo(model)
        gradient = model.weight.grad
        assert gradient is not None and gradient.dtype is torch.float32 and gradient.tolist() == [[1.0, 1.0]]


def test_one_buffer_under_all_gradients_counts_with_model_masters() -> None:
    model, plain = two_layers(), two_layers()
    trained = []
    for each in (model, plain):
        optimizer = sgd(each)
        if each is model:
            mpinit.initialize(model, optimizer, "O5", master_weights="model")
        parameters = list(each.parameters())
        buffer = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        for _ in range(3):
            buffer.zero_()
            loss = each(torch.ones(2, 4)).square().sum()
            with mpinit.scale_loss(loss, optimizer) if each is model else contextlib.nullcontext(loss) as scaled_loss:
                scaled_loss.backward()
            buffer.mul_(1e-3)  # as a user's own all-reduce or clipping
            optimizer.step()
        trained.append(torch.cat([p.detach().flatten() for p in parameters]))
    start = torch.cat([p.detach().flatten() for p in two_layers().parameters()])
    assert (trained[0] - trained[1]).norm() < 0.02 * (trained[1] - start).norm()


# -- Rule 8: overflow is handled as in torch.amp -----------------------------------------------------------------------

SCALE = 1024.0


def scaling(level: str = "O2", **more: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, loss_scale=mpinit.DynamicLossScale(init=SCALE), verbosity=0, **more)
    return model, optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_overflow_in_one_of_four_blocks_skips_and_backs_off_once(level: str, bad: int) -> None:
    model, optimizer = scaling(level)
    before = copy.deepcopy(model.state_dict())
    for index in range(4):
        pass_of(model, optimizer, torch.ones(2, 4), float("inf") if index == bad else 1.0)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 1) and mpinit.loss_scale(optimizer) == SCALE / 2
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_a_second_step_after_a_skipped_one_is_skipped_too() -> None:
    model, optimizer = scaling()
    pass_of(model, optimizer, torch.ones(2, 4), float("inf"))
    optimizer.step()
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (0, 2)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


def test_dropped_overflow_counts_unless_gradients_are_none() -> None:
    for to_none, expected in ((True, (1, 0)), (False, (0, 1))):
        model, optimizer = scaling()
        pass_of(model, optimizer, torch.ones(2, 4), float("inf"))
        optimizer.zero_grad(set_to_none=to_none)
        pass_of(model, optimizer, torch.ones(2, 4))
        optimizer.step()
        assert mpinit.step_counts(optimizer) == expected and mpinit.loss_scale(optimizer) == SCALE / 2


def test_nan_written_after_the_check_is_stepped_unless_asked_for() -> None:
    for asked, is_skipped in (({}, False), ({"skip_nonfinite": True}, True)):
        model, optimizer = scaling(**asked)
        pass_of(model, optimizer, torch.ones(2, 4))
        for parameter in model.parameters():
            parameter.grad.mul_(float("nan"))  # type: ignore[union-attr]
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == is_skipped


@stores
def test_a_report_does_not_tell_of_an_earlier_block(store: str) -> None:
    model, optimizer = one_weight(store, loss_scale=1.0, skip_nonfinite=True)
    pass_of(model, optimizer, torch.ones(1, 2))
    optimizer.step()
    optimizer.zero_grad()
    (model(torch.ones(1, 2)).sum() * float("nan")).backward()
    optimizer.step()
    report = mpinit.overflow_report(optimizer)
    assert report.parameters == ("weight",) and report.loss is None and report.scale is None
    assert "loss was finite" not in str(report)


@stores
def test_a_report_says_only_what_was_looked_at(store: str) -> None:
    """Nobody knows when inf and nan were written."""
    for scale in (1.0, 64.0):
        model, optimizer = one_weight(store, loss_scale=scale, skip_nonfinite=True)
        pass_of(model, optimizer, torch.ones(1, 2))
        model.weight.grad.mul_(float("nan"))  # type: ignore[union-attr]
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer)
        advice = mpinit.overflow_report(optimizer).advice
        assert "were finite after" not in advice


def test_one_step_has_scale_loss_or_a_grad_scaler() -> None:
    for is_scaler_first in (True, False):
        model, optimizer = scaling()
        scaler = mpinit.GradScaler(optimizer)

        def by_scaler() -> None:
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()  # noqa: B023 - called in this round
            scaler.step(optimizer)  # noqa: B023

        with pytest.raises(RuntimeError, match=r"mpinit\.scale_loss.* use the one or the other"):
            if is_scaler_first:
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
                pass_of(model, optimizer, torch.ones(2, 4))
            else:
                pass_of(model, optimizer, torch.ones(2, 4))
                by_scaler()
        assert mpinit.step_counts(optimizer) == (0, 0)


def test_step_inside_a_block_that_scales_is_refused() -> None:
    model, optimizer = scaling()
    before = float32_of(model)
    with (
        pytest.raises(RuntimeError, match=r"inside `with mpinit\.scale_loss.* after the with-block"),
        mpinit.scale_loss(model(torch.ones(2, 4)).square().mean(), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        optimizer.step()
    assert same(float32_of(model), before)


# -- Rule 9: a step does all or nothing --------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    """Changes the first parameter, and fails."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].add_(0.123)
        raise MemoryError("no memory")


@stores
def test_error_in_a_step_leaves_weights_their_masters_rounded(store: str) -> None:
    model, optimizer = started(store, make=lambda p: Failing(p, lr=0.1), steps=0)
    pass_of(model, optimizer, torch.ones(2, 4))
    weights = list(model.parameters())
    with pytest.raises(MemoryError, match="no memory"):
        optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], weights, strict=True))
    for weight, values in zip(weights, model.state_dict().values(), strict=True):
        # Split masters round ties away from zero.
        torch.testing.assert_close(weight.detach(), values.to(weight.dtype), rtol=2**-8, atol=0)
        assert store == "split" or torch.equal(weight.detach(), values.to(weight.dtype))


LATE: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": torch.optim.Adadelta,
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


@pytest.mark.parametrize("name", LATE)
@stores
def test_state_of_a_weight_that_gets_its_master_later_is_float32(store: str, name: str) -> None:
    """Freeze a layer that has state, initialise, load that state, and unfreeze it: all of it stays float32."""
    model = two_layers()
    optimizer = LATE[name](model.parameters())
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(False)
    mpinit.initialize(model, optimizer, **STORES[store], verbosity=0)
    for loads in (False, True):
        if loads:
            optimizer.load_state_dict(saved)
        for key, expected in saved["state"][0].items():
            value = optimizer.state[model[0].weight][key]
            assert not isinstance(expected, Tensor) or (value.dtype is expected.dtype and torch.equal(value, expected))
    model[0].requires_grad_(True)
    pass_of(model, optimizer, torch.ones(2, 4))
    optimizer.step()
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    assert not [value.dtype for value in values if value.dtype in (torch.float16, torch.bfloat16)]
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


@stores
def test_a_hidden_step_of_checkpoints_changes_nothing(store: str) -> None:
    model, optimizer = started(store, make=torch.optim.AdamW, steps=0)
    before = copy.deepcopy(model.state_dict())
    get_state_dict(model, optimizer)
    assert mpinit.step_counts(optimizer) == (0, 0)
    assert all(state["exp_avg"].dtype is torch.float32 for state in optimizer.state.values())
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


# -- Rule 10: ranks ----------------------------------------------------------------------------------------------------


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
def test_rank_that_leaves_out_a_step_lets_others_time_out() -> None:
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
def test_scale_backs_off_once_for_two_optimizers() -> None:
    """It moves in the step of the first."""
    model = two_layers()
    optimizers = [sgd(model[0]), sgd(model[2])]
    scale = mpinit.DynamicLossScale(init=1024.0)
    mpinit.initialize(model, optimizers, "O2", loss_scale=scale, process_group=dist.group.WORLD)
    for index in range(3):
        bad = index == 1 and dist.get_rank() == 1
        pass_of(model, optimizers, of_rank(index), float("inf") if bad else 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert mpinit.loss_scale(optimizers[0]) == 512.0
    assert [mpinit.step_counts(optimizer) for optimizer in optimizers] == [(2, 1), (2, 1)]


@ranks(2, ("ddp",), ("fsdp",))
def test_scale_backs_off_where_all_ranks_leave_out_a_step(engine: str) -> None:
    """As loops do after a norm that is inf or nan: at the next block, which begins without gradients."""
    model: Any = two_layers()
    if engine == "fsdp":
        fully_shard(model, mesh=engines.mesh(2))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=1024.0))
    runs = DistributedDataParallel(model) if engine == "ddp" else model
    for index in range(4):
        optimizer.zero_grad()
        bad = index in (1, 2) and dist.get_rank() == 1
        pass_of(runs, optimizer, of_rank(index), float("inf") if bad else 1.0)
        norm = mpinit.clip_grad_norm_(optimizer, 1.0)
        if norm.isfinite():
            optimizer.step()
        engines.assert_one(mpinit.loss_scale(optimizer))
    assert mpinit.loss_scale(optimizer) == 256.0
    assert mpinit.step_counts(optimizer)[0] == 2


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
def test_gradients_fsdp_keeps_are_refused_under_a_loss_scale() -> None:
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


# -- Rule 12: closures and two-phase optimizers need a fixed scale -----------------------------------------------------


def test_closures_are_refused_at_a_dynamic_scale() -> None:
    _, optimizer = scaling()
    with pytest.raises(RuntimeError, match=r"opt_level='O5'.* loss_scale=128\.0"):
        optimizer.step(lambda: None)  # type: ignore[arg-type, return-value]


@stores
def test_lbfgs_at_a_fixed_scale_lowers_the_loss_on_the_weights(store: str) -> None:
    model, optimizer = started(store, make=lambda p: torch.optim.LBFGS(p, max_iter=4), steps=0)
    x, found = torch.ones(2, 4), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {ONE_WEIGHT[store]}
        loss: Tensor = model(x).square().mean()
        found.append(loss.item())
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert found[-1] < found[0] / 2 and mpinit.step_counts(optimizer) == (2, 0)


class TwoPhases(torch.optim.SGD):
    """Sharpness-aware: the gradient is that at a point further up."""

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moved"] = parameter.grad * 0.05
            parameter.add_(self.state[parameter]["moved"])
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.state[parameter].pop("moved"))
        super().step()
        if zero_grad:
            self.zero_grad()


def test_two_phase_optimizers_are_refused_at_a_dynamic_scale() -> None:
    model = two_layers()
    optimizer = TwoPhases(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"opt_level='O5'.* loss_scale=128\.0"):
        mpinit.initialize(model, optimizer, "O2")
    assert model[0].weight.dtype is torch.float32, "nothing has changed"


@stores
def test_two_phase_optimizers_at_a_fixed_scale_lower_the_loss(store: str) -> None:
    model, optimizer = started(store, make=lambda p: TwoPhases(p, lr=0.1), steps=0)
    losses = []
    for _ in range(5):
        losses.append(model(torch.ones(2, 4)).square().mean().item())
        pass_of(model, optimizer, torch.ones(2, 4))
        optimizer.first_step(zero_grad=True)  # type: ignore[attr-defined]
        pass_of(model, optimizer, torch.ones(2, 4))
        optimizer.second_step(zero_grad=True)  # type: ignore[attr-defined]
    assert losses[-1] < losses[0] / 2


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
def test_model_that_comes_in_16_bits_keeps_its_float32_parts(masters: Any) -> None:
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


def test_buffers_that_training_writes_to_are_named_once() -> None:
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


@pytest.mark.parametrize("masters", [True, "split", "model"])
def test_float64_and_complex_tensors_are_never_cast(masters: Any) -> None:
    model = two_layers()
    model.register_buffer("exact", torch.tensor([1 / 3], dtype=torch.float64))
    model.register_buffer("turns", torch.tensor([1j]))
    mpinit.initialize(model, sgd(model), "O5", master_weights=masters, verbosity=0)
    assert model.exact.dtype is torch.float64 and model.turns.dtype is torch.complex64
    assert model.exact.item() == 1 / 3


def test_buffers_that_overlap_are_refused_with_the_ways_out() -> None:
    model, memory = two_layers(), torch.ones(4)
    model.register_buffer("first", memory[:3])
    model.register_buffer("second", memory[1:])
    with pytest.raises(ValueError, match=r"shares memory.* \.clone\(\).* keep_fp32"):
        mpinit.initialize(model, sgd(model), "O5")
    assert model.first.dtype is torch.float32 and model[0].weight.dtype is torch.float32


def test_plain_loop_over_bfloat16_llama_is_a_loop_by_hand() -> None:
    let_torchvision_load()
    transformers = needs("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = mpinit.initialize(model, optimizer, opt_level="O5")
    assert model.model.rotary_emb.inv_freq.dtype is by_hand.model.rotary_emb.inv_freq.dtype is torch.float32
    values = [nn.Parameter(parameter.detach().float()) for parameter in by_hand.parameters()]
    own = torch.optim.AdamW(values, lr=1e-3)
    for index in range(10):
        # Each token once, so that no sum depends on its order.
        x = torch.randperm(64, generator=torch.Generator().manual_seed(index))[:32].view(2, 16)
        loss, expected = model(input_ids=x, labels=x).loss, by_hand(input_ids=x, labels=x).loss
        assert loss.item() == expected.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.backward()
        for value, parameter in zip(values, by_hand.parameters(), strict=True):
            value.grad, parameter.grad = parameter.grad.float(), None
        own.step()
        with torch.no_grad():
            for value, parameter in zip(values, by_hand.parameters(), strict=True):
                parameter.copy_(value)
    state = model.state_dict()
    for (name, _), value in zip(by_hand.named_parameters(), values, strict=True):
        assert torch.equal(state[name], value), name


def test_kept_names_of_parameters_mean_the_same_at_every_store() -> None:
    outputs = []
    for masters in (True, "split", "model"):
        torch.manual_seed(0)
        model = Rotated().float()
        mpinit.initialize(
            model, sgd(model), "O5", master_weights=masters, keep_fp32=["norm.weight", "norm.bias", "table"]
        )
        seen: list[torch.dtype] = []
        model.norm.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.weight.dtype))  # type: ignore[misc]
        model.inner.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.weight.dtype))  # type: ignore[misc]
        outputs.append(model(torch.ones(2, 8)))
        assert seen == [torch.bfloat16, torch.float32]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


# -- Rule 14: modules that compute in float32 --------------------------------------------------------------------------


class Tied(nn.Module):
    """A language model whose head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x))))  # type: ignore[no-any-return]


COMPUTED: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "loss_scale": 128.0},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O5", "master_weights": "model"},
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_tied_head_computes_and_returns_float32(kind: str, compiles: bool) -> None:
    torch._dynamo.reset()
    x = torch.arange(12).view(3, 4)
    model = Tied()
    saved = model.state_dict()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, compute_fp32=["head"], **COMPUTED[kind])
    seen: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    run = torch.compile(model, backend="aot_eager") if compiles else model
    logits = run(x)
    assert model.head.weight is model.embedding.weight and logits.dtype is torch.float32
    with mpinit.disable_casts():
        expected = nn.functional.linear(seen[0].float(), model.head.weight.float())
    assert torch.equal(logits, expected) and not torch.equal(logits, logits.bfloat16().float())
    with mpinit.scale_loss(nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten()), optimizer) as scaled_loss:
        scaled_loss.backward()
    plain = Tied()
    nn.functional.cross_entropy(plain(x).flatten(0, 1), x.flatten()).backward()
    gradient = plain.head.weight.grad
    assert gradient is not None and model.head.weight.grad is not None
    assert (model.head.weight.grad.float() - gradient).norm() < 0.02 * gradient.norm()
    assert model.state_dict().keys() == saved.keys()
    mpinit.undo(model)
    assert "forward" not in vars(model.head)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", COMPUTED)
def test_float32_head_in_a_checkpoint_has_its_gradients(kind: str, reentrant: bool) -> None:
    class Checkpointed(Tied):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.head, self.body(self.embedding(x)), use_reentrant=reentrant)  # type: ignore[no-any-return]

    class Plain(Tied):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(x)))  # type: ignore[no-any-return]

    x, gradients = torch.arange(12).view(3, 4), []
    for model in (Plain(), Checkpointed()):
        optimizer = sgd(model)
        mpinit.initialize(model, optimizer, compute_fp32=["head"], **COMPUTED[kind])
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        mpinit.undo(model)
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain is not None and checkpointed is not None and torch.equal(plain, checkpointed)


def test_keep_fp32_stores_and_compute_fp32_does_not() -> None:
    outputs: list[torch.dtype] = []
    for keyword in ("keep_fp32", "compute_fp32"):
        model = two_layers()
        model[2].register_forward_hook(lambda _, inputs, output: outputs.append(output.dtype))
        mpinit.initialize(model, sgd(model), "O5", **{keyword: ["2"]})
        model(torch.ones(1, 4))
        assert model[2].weight.dtype is (torch.float32 if keyword == "keep_fp32" else torch.bfloat16)
    assert outputs == [torch.bfloat16, torch.float32]


@ranks(2, ("O5", True), ("O5", "split"), ("O5", "model"))
def test_head_that_computes_in_float32_under_ddp(level: str, masters: Any) -> None:
    model = Tied()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, master_weights=masters, compute_fp32=["head"])
    runs = DistributedDataParallel(model)
    x = torch.arange(8).view(2, 4) + dist.get_rank()
    logits = runs(x)
    assert logits.dtype is torch.float32
    with mpinit.scale_loss(nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten()), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    engines.assert_one({name: value.clone() for name, value in model.state_dict().items()})


@ranks(2, ("O2", True), ("O5", True), ("O5", "split"))
def test_tied_head_that_computes_in_float32_under_fsdp2(level: str, masters: Any) -> None:
    x = torch.arange(8).view(2, 4) + dist.get_rank()
    alone = Tied()
    mpinit.initialize(alone, opt_level=level, compute_fp32=["head"], verbosity=0)
    expected = alone(x)
    model = Tied()
    fully_shard(model, mesh=engines.mesh(2))
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, level, master_weights=masters, compute_fp32=["head"], loss_scale=1.0)
    logits = model(x)
    assert logits.dtype is torch.float32 and torch.equal(logits, expected)
    assert not torch.equal(logits, logits.bfloat16().float())
    nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    state = engines.whole(model.state_dict())
    engines.assert_one(state)
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert not torch.equal(state["head.weight"], Tied().head.weight)


@pytest.mark.parametrize("kind", COMPUTED)
def test_files_do_not_say_what_computes_in_float32(kind: str) -> None:
    files = []
    for more in ({}, {"compute_fp32": ["head"]}):
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, verbosity=0, **COMPUTED[kind] | more)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        files.append(file.getvalue())
        mpinit.undo(model)
    assert files[0] == files[1]


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


def test_one_cast_per_weight_and_version() -> None:
    model = two_layers()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O5", master_weights="model", verbosity=0)
    seen: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    for _ in range(2):
        pass_of(model, optimizer, torch.ones(2, 4))
    optimizer.step()
    model(torch.ones(2, 4))
    assert seen[0] is seen[1] and seen[1] is not seen[2]
    assert seen[2].dtype is torch.bfloat16 and torch.equal(seen[2], model[0].weight.bfloat16())
    assert model[0].weight.dtype is torch.float32


def test_forward_in_a_second_thread_is_refused_with_the_ways_out() -> None:
    model = two_layers()
    mpinit.initialize(model, sgd(model), "O5", master_weights="model", verbosity=0)
    found: list[BaseException] = []

    def forward() -> None:
        try:
            model(torch.ones(2, 4))
        except RuntimeError as error:
            found.append(error)

    def run_another(*_: Any) -> None:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    model[1].register_forward_hook(run_another)
    expected = model(torch.ones(2, 4))
    assert len(found) == 1
    assert "copy.deepcopy(model)" in str(found[0]) and "another thread" in str(found[0])
    model[1]._forward_hooks.clear()
    assert torch.equal(model(torch.ones(2, 4)), expected), "the first thread's forward was not disturbed"


# -- Rule 16: nothing depends on a clock, a sample, a compiler or a read of a device -----------------------------------

ON_META = STORES | {"model": {"opt_level": "O5", "master_weights": "model"}}


@pytest.mark.parametrize("store", ON_META)
def test_training_at_a_fixed_scale_reads_nothing_from_a_device(store: str) -> None:
    """Tensors on the meta device have no numbers: every read of one raises."""
    with torch.device("meta"):
        model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    mpinit.initialize(model, optimizer, **ON_META[store], verbosity=0)
    for _ in range(3):
        pass_of(model, optimizer, torch.ones(2, 4, device="meta"))
        optimizer.step()
        optimizer.zero_grad()
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
