"""gradient_release=True: parameters stepped inside of backward(), to the bit as without, and everything it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpinit

SPLIT: dict[str, Any] = {"master_weights": "split"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("O5", {}),
    "float16": ("O2", {}),
    "split": ("O5", SPLIT),
    "split-int8": ("O5", SPLIT | {"optimizer_state": "int8"}),
    "split-bfloat16": ("O5", SPLIT | {"optimizer_state": "bfloat16"}),
    "model": ("O5", {"master_weights": "model"}),
    "O0-int8": ("O0", {"optimizer_state": "int8"}),
    "O0": ("O0", {}),
    "O1": ("O1", {}),
    "O3": ("O3", {"cast_model_type": "bf16"}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Tied weights, a layer used twice, one that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 24)
        self.twice, self.once = nn.Linear(24, 24), nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 200, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.embedding(x)).tanh()
        hidden = hidden + self.frozen(self.twice(hidden).tanh())
        return self.head(self.norm(self.once(hidden)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    thin = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    wide = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": wide}, {"params": thin, "lr": 0.01, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)


def set_up(kind: str = "split", make: Make = adamw, **more: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    level, extra = KINDS[kind]
    options = {"gradient_release": True, "split_bucket_bytes": 6000, "loss_scale": 1.0, "verbosity": 0}
    mpinit.initialize(model, optimizer, level, **(options | extra | more))
    return model, optimizer


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randint(200, (4, 6), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for index in range(steps):
        optimizer.zero_grad()
        if index % 2:
            with mpinit.scale_loss(loss_of(model, index), optimizer) as scaled:
                scaled.backward()
        else:
            loss_of(model, index).backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights, states and options, in an order that does not depend on who was stepped first."""
    state = optimizer.state_dict()
    found: list[Any] = [value.clone() for value in model.state_dict().values()]
    for _, entries in sorted(state["state"].items()):
        found += [leaf for key in sorted(entries) for leaf in (key, copy.deepcopy(entries[key]))]
    return found + copy.deepcopy(state["param_groups"])


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs


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


# -- what is refused --------------------------------------------------------------------------------------------------


@kinds
def test_a_second_backward_changes_nothing(kind: str) -> None:
    model, optimizer = set_up(kind)
    loss_of(model).backward()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=r"second backward\(\) was called before optimizer.step"):
        loss_of(model, 1).backward()
    with (
        pytest.raises(RuntimeError, match=r"second backward\(\) was called"),
        mpinit.scale_loss(loss_of(model), optimizer),
    ):
        pass
    assert_same(everything(model, optimizer), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    train(model, optimizer, 1)
    mpinit.undo(model)


Call = Callable[[Any, Any], Any]
AFTER_BACKWARD: dict[str, tuple[Call, str]] = {
    "zero_grad": (lambda model, optimizer: optimizer.zero_grad(), r"zero_grad\(\) was called between"),
    "closure": (lambda model, optimizer: optimizer.step(lambda: 0.0), "inside of the step"),
    "clip": (lambda model, optimizer: mpinit.clip_grad_norm_(optimizer, 1.0), "no norm of all gradients"),
    "masters": (lambda model, optimizer: list(mpinit.master_params(optimizer)), "looks at all gradients"),
    "torch's clip": (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "no norm of all gradients"),
    "clip value": (lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0), "looks at all gradients"),
    "delay": (
        lambda model, optimizer: mpinit.scale_loss(torch.ones(()), optimizer, delay_unscale=True),
        "delay_unscale",
    ),
}


@pytest.mark.parametrize("what", AFTER_BACKWARD)
def test_refused_between_backward_and_step(what: str) -> None:
    call, message = AFTER_BACKWARD[what]
    model, optimizer = set_up()
    loss_of(model).backward()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        call(model, optimizer)
    assert_same(everything(model, optimizer), before)
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)
    mpinit.undo(model)
    loss_of(model).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_an_option_changed_between_backward_and_step_is_refused() -> None:
    model, optimizer = set_up()
    loss_of(model).backward()
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"'lr' of a parameter group was changed from 0.01 to 0.5"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.01
    optimizer.step()
    mpinit.undo(model)


def test_gradients_of_gradients_are_refused() -> None:
    model, optimizer = set_up("O0")
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss_of(model).backward(create_graph=True)
    assert_same(everything(model, optimizer), before)
    mpinit.undo(model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_scale": "dynamic"}, "gradient_release=True contradicts loss_scale=dynamic"),
        ({"loss_scale": 128.0}, "gradient_release=True contradicts loss_scale=128.0"),
        ({"compile_step": True, "master_weights": True}, "compile_step=True contradicts gradient_release=True"),
    ],
)
def test_contradicting_properties(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_up("full", **more)


def test_optimizers_that_look_across_parameters_or_share_them_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient_release=True steps a bucket.*LBFGS"):
        set_up("O0", lambda model: torch.optim.LBFGS(model.once.parameters()))
    model = Net()
    two = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.once.parameters(), lr=0.1)]
    with pytest.raises(ValueError, match="in the groups of two optimizers"):
        mpinit.initialize(model, two, "O5", gradient_release=True, verbosity=0)
    assert model.once.weight.dtype == torch.float32
    mpinit.initialize(model, two[0], "O5", gradient_release=True, verbosity=0)
    with pytest.raises(ValueError, match="in the groups of two optimizers"):
        mpinit.add_optimizers(two[1])
    mpinit.undo(model)


# -- what has failed half way -----------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("on purpose")


@kinds
def test_a_pass_that_fails_half_way_is_told_of(kind: str) -> None:
    model, optimizer = set_up(kind, split_bucket_bytes=8)
    train(model, optimizer, 1)
    once, twice = model.once.weight.detach().clone(), model.twice.weight.detach().clone()
    x = torch.randint(200, (4, 6))
    hidden = model.once(model.norm(Fails.apply(model.twice(model.embedding(x)))))
    with pytest.raises(ValueError, match="on purpose"):
        (hidden.float() ** 2).sum().backward()
    assert torch.equal(model.twice.weight, twice)
    for call in (optimizer.step, lambda: loss_of(model).backward()):
        with pytest.raises(RuntimeError, match="has failed after"):
            call()
    with pytest.warns(UserWarning, match="has failed after .* It stays half done"):
        optimizer.zero_grad()
    assert not torch.equal(model.once.weight, once)
    train(model, optimizer, 1)
    assert mpinit.step_counts(optimizer) == (2, 0)
    mpinit.undo(model)


def test_a_gradient_that_comes_again_is_told_of() -> None:
    model, optimizer = set_up("O0", lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randint(200, (4, 6))
    hidden = checkpoint(lambda inner: model.once(inner), model.embedding(x), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"a gradient came to 'once.* again after it was stepped"):
        model.once(model.twice(hidden)).sum().backward()
    with pytest.warns(UserWarning, match="It stays half done"):
        optimizer.zero_grad()
    mpinit.undo(model)


def test_a_session_that_is_dropped_leaves_torchs_clipping_alone() -> None:
    gc.collect()
    before = torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grad._clip_grads_with_norm_
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", gradient_release=True, verbosity=0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert torch.nn.utils.clip_grad_value_ is not before[0]
    del model, optimizer
    gc.collect()
    assert (torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grad._clip_grads_with_norm_) == before
