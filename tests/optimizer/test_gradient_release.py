"""gradient_release=True: parameters stepped inside of backward(), to the bit as without, and their gradients freed."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradient_release import SPLIT, Make, adamw, assert_same, everything, kinds, loss_of, set_up, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpinit


def run(release: bool, kind: str = "split", make: Make = adamw, loop: Any = train, **more: Any) -> list[Any]:
    model, optimizer = set_up(kind, make, gradient_release=release, **more)
    loop(model, optimizer)
    found = [*everything(model, optimizer), mpinit.step_counts(optimizer)]
    mpinit.undo(model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return found


# -- to the bit as without --------------------------------------------------------------------------------------------


@kinds
def test_training_is_the_same_to_the_bit(kind: str) -> None:
    assert_same(run(True, kind), run(False, kind))


OPTIMIZERS: dict[str, Make] = {
    **{
        name: lambda model, name=name: getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
    },
    **{
        name: lambda model, name=name: getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for name in ("RMSprop", "Rprop", "SGD")
    },
    "SGD momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "Adam one by one": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=False, amsgrad=True),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch(name: str) -> None:
    one, other = (run(release, make=OPTIMIZERS[name]) for release in (True, False))
    assert_same(one, other)


def test_sparse_gradients() -> None:
    def ends_with(release: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Embedding(40, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, "O0", gradient_release=release, verbosity=0)
        for index in range(3):
            optimizer.zero_grad()
            model(torch.tensor([index, 3, index])).square().sum().backward()
            optimizer.step()
        found = everything(model, optimizer)
        mpinit.undo(model)
        return found

    assert_same(ends_with(True), ends_with(False))


@pytest.mark.parametrize("kind", ["split", "full", "O0"])
def test_a_grad_scaler_s_loop(kind: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = mpinit.GradScaler(optimizer)
        for index in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, index)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert_same(run(True, kind, loop=loop), run(False, kind, loop=loop))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for index in range(3):
            optimizer.zero_grad()
            x = torch.randint(200, (4, 6), generator=torch.Generator().manual_seed(index))

            def inside(hidden: Tensor) -> Tensor:
                return model.once(model.twice(hidden).tanh())

            hidden = checkpoint(inside, model.embedding(x), use_reentrant=reentrant)
            hidden = checkpoint(inside, hidden, use_reentrant=reentrant)
            F.cross_entropy(model.norm(hidden).flatten(0, 1).float(), x.flatten() % 24).backward()
            optimizer.step()

    assert_same(run(True, "O0", loop=loop), run(False, "O0", loop=loop))


def test_a_pickled_optimizer_and_a_copied_model_have_no_part_in_it() -> None:
    model, optimizer = set_up("O0")
    train(model, optimizer)
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model.state_dict()))
    loss_of(twin).backward()
    assert all(parameter.grad is not None for parameter in twin.once.parameters())
    mpinit.undo(model)


# -- what it is for ---------------------------------------------------------------------------------------------------


@kinds
def test_gradients_are_freed_while_the_pass_is_running(kind: str) -> None:
    model, optimizer = set_up(kind)
    train(model, optimizer, 1)  # of which it learns that a layer is not used
    seen: list[bool] = []
    before = model.once.weight.detach().clone()

    def look(gradient: Tensor) -> None:
        seen.append(model.once.weight.grad is None and not torch.equal(model.once.weight, before))

    loss = loss_of(model)
    model.twice.weight.register_hook(look)
    loss.backward()
    assert seen[-1]
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    mpinit.undo(model)


def bytes_held() -> int:
    """Of all tensors that are alive."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    tensors = [each for each in tensors if each.layout is torch.strided and not each.is_meta]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def test_bytes_a_parameter_with_adam_after_backward() -> None:
    before = bytes_held()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    extra = SPLIT | {"optimizer_state": "int8", "split_bucket_bytes": 2**21}
    mpinit.initialize(model, optimizer, "O5", gradient_release=True, verbosity=0, **extra)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    model(torch.ones(1, 512)).sum().backward()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    # Beside the one bucket in float32 that stays, laid out, where it is small: masters and gradients, and two states.
    assert (bytes_held() - before - 2 * 2**21) / numbers <= 6.15
    mpinit.undo(model)


# -- a step is one step -----------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts its steps in its groups and for itself, and goes by that."""

    steps_per_parameter = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            with torch.no_grad():
                for parameter in (p for p in group["params"] if p.grad is not None):
                    parameter.sub_(parameter.grad, alpha=0.1 / group["step"])


def test_what_an_optimizer_counts_it_counts_once() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        train(model, optimizer)
        assert optimizer.count == 4

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Counting(model.parameters())

    assert_same(run(True, make=make, loop=loop), run(False, make=make, loop=loop))


def test_step_hooks_and_schedulers_see_one_step() -> None:
    seen: list[str] = []
    model, optimizer = set_up()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(3):
            optimizer.zero_grad()
            loss_of(model, index).backward()
            assert seen == ["before", "after"] * index + ["before"]
            optimizer.step()
            schedule.step()
    assert seen == ["before", "after"] * 3
    assert mpinit.step_counts(optimizer) == (3, 0)
    assert optimizer.param_groups[0]["lr"] == 3e-3 / 8
    mpinit.undo(model)


@pytest.mark.parametrize("kind", ["split", "full", "O0"])
def test_step_finishes_what_is_left(kind: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for index in range(3):
            optimizer.zero_grad()
            loss_of(model, index).backward()
            model.unused.weight.grad = torch.full_like(model.unused.weight, 0.5)
            optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        model.frozen.requires_grad_(True)
        train(model, optimizer, 2)

    assert_same(run(True, kind, loop=loop), run(False, kind, loop=loop))
