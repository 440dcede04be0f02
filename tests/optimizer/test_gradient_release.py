"""gradient_release=True: parameters stepped inside of backward(), to the bit as without, and their gradients freed."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import Counting, backward
from models import Parts
from states_by_name import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpinit
from mpinit.optimizer.gradient_release import Released

SPLIT: dict[str, Any] = {"master_weights": "split"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("O5", {}),
    "float16": ("O2", {}),
    "split": ("O5", SPLIT),
    "full-int8": ("O5", {"optimizer_state": "int8"}),
    "split-int8": ("O5", SPLIT | {"optimizer_state": "int8"}),
    "split-bfloat16": ("O5", SPLIT | {"optimizer_state": "bfloat16"}),
    "model": ("O5", {"master_weights": "model"}),
    "O0-int8": ("O0", {"optimizer_state": "int8"}),
    "O0": ("O0", {}),
    "O1": ("O1", {}),
}
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> Any:
    """Tied weights, a layer used twice, one that is frozen and one that is not used."""

    def run(self: Any, x: Tensor) -> Tensor:
        hidden = self.twice(self.embedding(x)).tanh()
        hidden = hidden + self.frozen(self.twice(hidden).tanh())
        return self.head(self.norm(self.once(hidden)))  # type: ignore[no-any-return]

    layers = {name: nn.Linear(24, 24) for name in ("twice", "once", "frozen")}
    others = {"unused": nn.Linear(3, 3), "norm": nn.LayerNorm(24), "head": nn.Linear(24, 200, bias=False)}
    model: Any = Parts(run, embedding=nn.Embedding(200, 24), **layers, **others)
    model.frozen.requires_grad_(False)
    model.head.weight = model.embedding.weight
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    thin = {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.01, "weight_decay": 0.0}
    wide = {"params": [p for p in model.parameters() if p.dim() > 1]}
    return torch.optim.AdamW([wide, thin], lr=3e-3, weight_decay=0.1)


def set_up(kind: str = "split", make: Make = adamw, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = net()
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
        if index % 3 == 1:
            backward(loss_of(model, index), optimizer)
        elif index % 3 == 2:
            scaler = mpinit.GradScaler(optimizer)
            scaler.scale(loss_of(model, index)).backward()
            scaler.step(optimizer)
            continue
        else:
            loss_of(model, index).backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), mpinit.step_counts(optimizer)])


def check_parity(kind: str = "split", make: Make = adamw, loop: Any = train, **more: Any) -> None:
    ends = []
    for release in (True, False):
        model, optimizer = set_up(kind, make, gradient_release=release, **more)
        loop(model, optimizer)
        ends.append(everything(model, optimizer))
        mpinit.undo(model)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert_same(*ends, dtype=None)


OPTIMIZERS: dict[str, Make] = {
    name: lambda model, name=name: getattr(torch.optim, name)(model.parameters(), lr=0.01)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
} | {
    "Adam fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "Adam one by one": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=False, amsgrad=True),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01),
}
EVERYWHERE: dict[str, Make] = {
    "AdamW": adamw,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "SGD momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*itertools.product(KINDS, EVERYWHERE), *(("split", name) for name in OPTIMIZERS)]
)
def test_training_is_the_same_to_the_bit(kind: str, name: str) -> None:
    check_parity(kind, (EVERYWHERE | OPTIMIZERS)[name])


@pytest.mark.parametrize("kind", ["split", "full", "O0"])
def test_step_does_what_is_left(kind: str) -> None:
    """Gradients assigned by hand, groups and trainable weights that come later, and backward passes that fail."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for index in range(3):
            optimizer.zero_grad()
            loss_of(model, index).backward()
            weight = model.unused.weight
            weight.grad = torch.full_like(weight, 0.5, dtype=weight.grad_dtype or weight.dtype)
            optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        model.frozen.requires_grad_(True)
        train(model, optimizer, 2)
        optimizer.zero_grad()
        middle = model.twice(model.embedding(torch.arange(4)))
        middle.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model.once(model.norm(middle)).float().square().sum().backward()
        optimizer.step()
        train(model, optimizer, 1)

    check_parity(kind, loop=loop, split_bucket_bytes=8)


def fail(_: Tensor) -> None:
    raise ValueError("on purpose")


@pytest.mark.filterwarnings("error")
def test_optimizers_and_schedulers_count_one_step() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            train(model, optimizer, 1)
            schedule.step()
        assert optimizer.count == 3 and mpinit.step_counts(optimizer) == (3, 0)

    check_parity(make=lambda model: Counting(model.parameters(), lr=0.1), loop=loop)


def bytes_held() -> int:
    """Of all tensors that are alive."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("kind", "bytes_each"), [("split-int8", 6.15), ("full", 14.05), ("O0", 12.05)])
def test_bytes_a_parameter_with_adam_in_and_after_backward(kind: str, bytes_each: float) -> None:
    gc.collect()
    before, seen = bytes_held(), []
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    level, extra = KINDS[kind]
    mpinit.initialize(model, optimizer, level, gradient_release=True, split_bucket_bytes=2**21, verbosity=0, **extra)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 512)).sum()
        model[0].weight.register_hook(lambda _: seen.append(bytes_held()))
        loss.backward()
        optimizer.step()
    model(torch.ones(1, 512)).sum().backward()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    buffers = 2 * 2**21 if kind == "split-int8" else 0  # one bucket, and two states of it, stay laid out
    assert (bytes_held() - before - buffers) / numbers <= bytes_each
    assert (seen[1] - before - buffers) / numbers <= bytes_each + 1  # in the pass also one weight's gradient of eight
    assert {type(parameter.grad) for parameter in model.parameters()} == {Released}
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


def unscale_by_torch(_: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


AFTER_BACKWARD: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "backward": (lambda model, _: loss_of(model, 1).backward(), r"there is one backward\(\) a step"),
    "closure": (lambda _, optimizer: optimizer.step(lambda: 0.0), "closure or arguments"),
    "clip": (lambda _, optimizer: mpinit.clip_grad_norm_(optimizer, 1.0), "clip_grad_norm_.* between"),
    "masters": (lambda _, optimizer: list(mpinit.master_params(optimizer)), "master_params.* between"),
    "torch's clip": (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "without clipping"),
    "norm": (lambda model, _: [p.grad.norm() for p in model.parameters() if p.grad is not None], "was used between"),
    "zeroed": (lambda _, optimizer: optimizer.zero_grad(set_to_none=False), "a gradient was used between"),
    "torch's scaler": (unscale_by_torch, "a gradient was used between"),
}


@pytest.mark.parametrize("kind", ["full", "split-int8", "O0"])
@pytest.mark.parametrize("what", AFTER_BACKWARD)
def test_refused_between_backward_and_step(what: str, kind: str) -> None:
    call, message = AFTER_BACKWARD[what]

    def loop(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        if any(type(parameter.grad) is Released for parameter in model.parameters()):
            with pytest.raises(RuntimeError, match=message):
                call(model, optimizer)
        optimizer.step()
        train(model, optimizer, 1)

    check_parity(kind, loop=loop)


def test_a_step_that_is_dropped_is_told_of_and_an_undo_leaves_no_trace() -> None:
    model, optimizer = set_up(split_bucket_bytes=2**20)
    for call in (optimizer.step, lambda: loss_of(model).backward()):
        train(model, optimizer, 1)
        loss_of(model).backward()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) or a second backward\(\) came before optimizer.step"):
            call()
    train(model, optimizer, 1)
    saved, before = copy.deepcopy((model.state_dict(), optimizer.state_dict())), everything(model, optimizer)
    loss_of(model).backward()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_same(everything(model, optimizer), before, dtype=None)
    train(model, optimizer, 1)
    loss_of(model).backward()
    mpinit.undo(model)
    assert {type(parameter.grad) for parameter in model.parameters()} <= {Tensor, type(None)}


def test_options_changed_in_between_step_hooks_and_gradients_of_gradients_are_refused() -> None:
    model, optimizer = set_up("O0")
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss_of(model).backward(create_graph=True)
    optimizer.zero_grad()
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="step hooks and CUDA graphs"):
        loss_of(model).backward()
    assert_same(everything(model, optimizer), before, dtype=None)
    handle.remove()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="'lr' was changed before step"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.01
    optimizer.step()


def test_checkpoints_inside_of_backward_are_told_of_where_they_are_reentrant() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, reentrant: bool = False) -> None:
        hidden = model.embedding(torch.arange(6))
        for _ in range(2):
            hidden = checkpoint(lambda x: model.once(model.twice(x).tanh()), hidden, use_reentrant=reentrant)
        hidden.float().square().sum().backward()
        optimizer.step()

    check_parity("O0", loop=loop)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loop(*set_up("O0", split_bucket_bytes=8), reentrant=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loss_scale": "dynamic"}, "gradient_release=True contradicts loss_scale=dynamic"),
        ({"loss_scale": 128.0}, "gradient_release=True contradicts loss_scale=128.0"),
        ({"make": lambda model: torch.optim.LBFGS(model.once.parameters())}, "nothing is known of how LBFGS"),
    ],
)
def test_contradicting_properties_and_optimizers(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_up("full", **more)


def test_two_optimizers_of_one_parameter_are_refused_and_none_is_kept_alive() -> None:
    model = net()
    two = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, model.once)]
    with pytest.raises(ValueError, match="in the groups of two optimizers"):
        mpinit.initialize(model, two, "O5", gradient_release=True, verbosity=0)
    assert model.once.weight.dtype == torch.float32
    mpinit.initialize(model, two[0], "O5", gradient_release=True, verbosity=0)
    with pytest.raises(ValueError, match="in the groups of two optimizers"):
        mpinit.add_optimizers(two[1])
    loss_of(model).backward()
    known, weight = weakref.ref(two[0]), model.once.weight
    two[0].step()
    del model, two
    gc.collect()
    assert known() is None
    weight.sum().backward()
    assert weight.grad is not None
