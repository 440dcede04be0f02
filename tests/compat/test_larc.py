"""LARC under apex's name, against its formula written out, on float32 parameters and on masters."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mpinit
from mpinit.compat.apex.parallel import LARC

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1", "loss_scale": 1024.0},
    "O2": {"opt_level": "O2", "loss_scale": 1024.0},
    "O5": {"opt_level": "O5"},
    "O5-split": {"opt_level": "O5", "master_weights": "split"},
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def rounded(master: Tensor, level: str) -> Tensor:
    if level == "O5-split":
        return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return master.to({"O2": torch.float16, "O5": torch.bfloat16}.get(level, torch.float32))


def larc_by_hand(optimizer: Optimizer, trust: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
    """The formula of You, Gitman and Ginsburg (2017), one parameter after the other, then the optimizer's step."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight_norm, grad_norm = p.norm(), p.grad.norm()
                if weight_norm != 0 and grad_norm != 0:
                    rate = trust * weight_norm / (grad_norm + weight_norm * group["weight_decay"] + eps)
                    rate = min(rate / group["lr"], 1) if clip else rate
                    p.grad = (p.grad + group["weight_decay"] * p) * rate
            group["weight_decay"] = 0
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


class ByHand:
    """Float32 masters, and a 16-bit model that is their rounding."""

    def __init__(self, level: str, make: Callable[..., Optimizer]) -> None:
        self.level, self.model = level, network()
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.optimizer = make(self.masters)
        self.scale = LEVELS[level].get("loss_scale", 1.0)
        self.model.to(rounded(self.masters[0].detach(), level).dtype)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            weight.copy_(rounded(master.detach(), self.level))

    def iterate(self, batch: tuple[Tensor, Tensor], **options: Any) -> None:
        self.model.zero_grad()
        if self.level == "O1":
            with torch.autocast("cpu", torch.float16):
                output = self.model(batch[0])
        else:
            output = self.model(batch[0].to(next(self.model.parameters()).dtype))
        (mse_loss(output.float(), batch[1]) * self.scale).backward()
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = weight.grad.float() / self.scale
        larc_by_hand(self.optimizer, **options)
        self.round()

    def assert_equal(self, model: nn.Module) -> None:
        for (name, value), master in zip(model.state_dict().items(), self.masters, strict=True):
            assert torch.equal(value, master.detach()), name


def iterate(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], factor: float = 1.0) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(mse_loss(model(batch[0]), batch[1]) * factor, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wraps", ["before", "after"])
def test_equals_the_formula(level: str, name: str, wraps: str) -> None:
    model, make = network(), OPTIMIZERS[name]
    by_hand = ByHand(level, make)
    optimizer: Any = make(model.parameters())
    if wraps == "before":
        optimizer = LARC(optimizer)
        mpinit.initialize(model, optimizer, **LEVELS[level])
    else:
        mpinit.initialize(model, optimizer, **LEVELS[level])
        optimizer = LARC(optimizer)
    for batch in batches(6):
        by_hand.iterate(batch)
        iterate(model, optimizer, batch)
        by_hand.assert_equal(model)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("options", [{"clip": False, "trust": 0.001}, {"eps": 0.1}, {"trust": 1.0}])
def test_options(level: str, options: dict[str, Any]) -> None:
    model, make = network(), OPTIMIZERS["SGD"]
    by_hand = ByHand(level, make)
    theirs = {"trust_coefficient" if key == "trust" else key: value for key, value in options.items()}
    optimizer = LARC(make(model.parameters()), **theirs)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    for batch in batches(4):
        by_hand.iterate(batch, **options)
        iterate(model, optimizer, batch)
        by_hand.assert_equal(model)


@pytest.mark.parametrize("level", LEVELS)
def test_a_scheduler_and_a_new_group(level: str) -> None:
    model, data = network(), batches(8)

    def make(parameters: Any) -> Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    by_hand = ByHand(level, lambda masters: make(masters[:2]))
    with torch.no_grad():  # a weight without an optimizer is rounded by initialize
        for master in by_hand.masters[2:]:
            master.copy_(rounded(master.detach(), level))
    optimizer = LARC(make(model[0].parameters()))
    mpinit.initialize(model, optimizer, **LEVELS[level])
    schedulers = [LambdaLR(each, lambda step: 0.5**step) for each in (optimizer.optim, by_hand.optimizer)]
    for index, batch in enumerate(data):
        if index == 4:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
            by_hand.optimizer.add_param_group({"params": by_hand.masters[2:], "lr": 0.05})
            for scheduler in schedulers:
                scheduler.base_lrs.append(0.05)
                scheduler.lr_lambdas.append(lambda step: 1.0)
        by_hand.iterate(batch)
        iterate(model, optimizer, batch)
        by_hand.assert_equal(model)
        for scheduler in schedulers:
            scheduler.step()


def test_parameters_and_gradients_of_zero_are_left_to_optimizer() -> None:
    zero, used = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    without = nn.Parameter(torch.ones(3))
    optimizer = LARC(SGD([zero, used, without], lr=0.1, weight_decay=0.5))
    zero.grad, used.grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    assert torch.equal(zero, torch.full((3,), -0.1))  # no weight decay, no scaling
    assert torch.equal(used, torch.ones(3))
    assert torch.equal(without, torch.ones(3))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_shares_groups_state_and_their_dicts() -> None:
    weight = nn.Parameter(torch.ones(3))
    inner = SGD([weight], lr=0.1, momentum=0.9)
    optimizer = LARC(inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert isinstance(optimizer, Optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    other = LARC(SGD([nn.Parameter(torch.ones(3))], lr=1.0, momentum=0.9))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(next(iter(other.state.values()))["momentum_buffer"], inner.state[weight]["momentum_buffer"])
    optimizer.zero_grad()
    assert weight.grad is None
    assert "momentum: 0.9" in repr(optimizer)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies(way: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = LARC(SGD([weight], lr=0.1), trust_coefficient=0.5, clip=False)
    copied = way(optimizer)
    assert copied.trust_coefficient == 0.5 and copied.clip is False
    own = copied.param_groups[0]["params"][0]
    own.grad = torch.ones(3)
    copied.step()
    assert torch.equal(weight, torch.ones(3)) and not torch.equal(own, torch.ones(3))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("wraps", ["before", "after"])
def test_an_overflow_skips_the_step(level: str, wraps: str) -> None:
    model, data = network(), batches(3)
    optimizer: Any = OPTIMIZERS["SGD"](model.parameters())
    keywords = LEVELS[level] | {"loss_scale": "dynamic"}
    if wraps == "before":
        optimizer = LARC(optimizer)
        mpinit.initialize(model, optimizer, **keywords)
    else:
        mpinit.initialize(model, optimizer, **keywords)
        optimizer = LARC(optimizer)
    iterate(model, optimizer, data[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scale = mpinit.loss_scale(optimizer)
    iterate(model, optimizer, data[1], factor=float("inf"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert mpinit.loss_scale(optimizer) == scale / 2
    iterate(model, optimizer, data[2])
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("level", LEVELS)
def test_resumed_training_is_equal_to_the_bit(level: str) -> None:
    data = batches(6)
    models = [network(), network()]
    optimizers = [LARC(OPTIMIZERS["SGD"](model.parameters())) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        mpinit.initialize(model, optimizer, **LEVELS[level])
    for batch in data[:3]:
        iterate(models[0], optimizers[0], batch)
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for batch in data[3:]:
        for model, optimizer in zip(models, optimizers, strict=True):
            iterate(model, optimizer, batch)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scaled_gradients_are_not_normalised() -> None:
    """torch.amp.GradScaler unscales before the step, although the wrapped optimizer's kernel could do it."""
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizers = [LARC(SGD([weight], lr=0.1, weight_decay=0.1, fused=True)) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale((weights[0] ** 2).sum()).backward()
    scaler.step(optimizers[0])
    (weights[1] ** 2).sum().backward()
    optimizers[1].step()
    assert torch.equal(*weights)


def test_the_class_is_found_in_the_module_too() -> None:
    """apex.parallel.LARC is a module in apex: scripts write apex.parallel.LARC.LARC(...)."""
    from mpinit.compat.apex import parallel

    assert parallel.LARC.LARC is parallel.LARC is LARC  # type: ignore[attr-defined]


def test_a_closure_is_refused() -> None:
    optimizer = LARC(SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(RuntimeError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
