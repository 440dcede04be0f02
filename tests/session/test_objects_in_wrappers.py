"""Optimizers and models inside wrappers: the session is found, and its masters are stepped.

Below the public face: the registry shows which session a wrapper stands for.
"""

from collections.abc import Callable
from typing import Any

import loops
import pytest
import torch
from loops import momentum, start
from masters_by_hand import ByHand
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import mpinit
from mpinit import registry
from mpinit.optimizer import parts


class Accelerated(loops.Forwarding):
    """As accelerate's AcceleratedOptimizer: an Optimizer whose groups and state are properties."""

    # By which it is told from an optimizer that wraps another and does more in its step.
    __module__ = "accelerate.optimizer"


class Lightning:
    """As Lightning's and Fabric's: a class made on the spot, the optimizer behind a property, the rest handed on."""

    __module__ = "lightning.pytorch.core.optimizer"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class ScheduleFree:
    """As schedule-free's wrapper: no Optimizer, which steps in a way of its own."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state


WRAPPERS = [Accelerated, Lightning, lambda optimizer: Accelerated(Lightning(optimizer))]  # type: ignore[arg-type]
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=["accelerated", "lightning", "both"])


@each_wrapper
@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_wrapper_stands_for_its_optimizer(wrap: Any, when: str, level: str) -> None:
    (usual, optimizer), model = loops.started(level), loops.mlp()
    inner = momentum(model.parameters())
    more = loops.keywords(level)
    if when == "after":
        mpinit.initialize(model, inner, **more)
    outer = wrap(inner)
    if when == "before":
        assert mpinit.initialize(model, outer, **more)[1] is outer
    elif when == "late":
        mpinit.initialize(model, await_optimizers=True, **more)
        assert mpinit.add_optimizers(outer) is outer
    assert registry.of(outer) is registry.of(inner) is registry.of(model)
    scaler = mpinit.GradScaler(outer)
    for batch in loops.batches(3):
        for each, owner in ((usual, optimizer), (model, outer)):
            owner.zero_grad()
            loops.backward(loops.mse(each, batch), owner)
            mpinit.clip_grad_norm_(owner, 0.1)
            owner.step()
    for batch in loops.batches(2):
        loops.iterate(loops.mse(usual, batch), optimizer)
        outer.zero_grad()
        scaler.scale(loops.mse(model, batch)).backward()
        scaler.unscale_(outer)
        scaler.step(outer)
        scaler.update()
    loops.same(mpinit.master_params(outer), mpinit.master_params(optimizer))
    assert mpinit.step_counts(outer) == mpinit.step_counts(inner) == (5, 0)
    assert mpinit.loss_scale(outer) == mpinit.loss_scale(inner) and not mpinit.step_was_skipped(outer)
    assert mpinit.describe(outer) == mpinit.describe(inner)
    mpinit.load_state_dict(mpinit.state_dict(outer), outer)


def test_an_optimizer_of_its_own_kind_is_no_wrapper() -> None:
    _, optimizer = loops.started("O5", make=decays)
    session: Any = registry.of(optimizer)
    assert list(session.optimizers) == [optimizer]


def test_a_wrapper_that_is_no_optimizer() -> None:
    model = loops.mlp()
    base = loops.plain_sgd(model.parameters())
    outer: Any = ScheduleFree(base)
    with pytest.raises(TypeError, match=r"ScheduleFree is not a torch.optim.Optimizer. Pass the SGD in it"):
        mpinit.initialize(model, outer, "O5")
    mpinit.initialize(model, base, "O5")
    loops.backward(loops.mse(model, loops.batches(1)[0]), outer)
    assert len(list(mpinit.master_params(outer))) == 4
    with pytest.raises(TypeError, match="optimizers must be a torch"):
        mpinit.scale_loss(torch.ones(()), object())


def test_wrapped_models() -> None:
    model, _ = loops.started("O2")
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert mpinit.describe(wrapped) == mpinit.describe(model)
    assert mpinit.GradScaler(nn.DataParallel(model)).is_enabled()
    mpinit.undo(nn.DataParallel(model))
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("given_first", ["outer", "inner"])
def test_compiled_model_and_what_is_in_it_stand_for_one_another(level: str, given_first: str) -> None:
    inner = loops.mlp()
    outer = torch.compile(inner, backend="eager")
    given, other = (outer, inner) if given_first == "outer" else (inner, outer)
    optimizer = momentum(inner.parameters())
    for undone in (given, other):
        mpinit.initialize(given, optimizer, **loops.keywords(level))
        assert registry.of(inner) is registry.of(outer) is registry.of(optimizer)
        assert mpinit.describe(other) == mpinit.describe(given)
        assert mpinit.GradScaler(other).get_scale() == mpinit.loss_scale(optimizer)
        loops.train(other, optimizer, loops.batches(1))
        with pytest.raises(ValueError, match="was initialised already"):
            mpinit.initialize(other, opt_level=level)
        mpinit.undo(undone)
        assert registry.of(inner) is registry.of(outer) is None
        with pytest.raises(ValueError, match="is not initialised"):
            mpinit.undo(other)


def test_model_with_more_than_another_is_not_its_wrapper() -> None:
    teacher = loops.mlp()
    mpinit.initialize(teacher, opt_level="O1")
    student = nn.Sequential()
    student.module, student.head = teacher, nn.Linear(3, 3)
    mpinit.initialize(student, opt_level="O1")
    assert registry.of(student) is not registry.of(teacher)
    mpinit.undo(teacher)
    assert registry.of(student) is not None


class Halves(Optimizer):
    """Two optimizers with groups of their own behind one, as kinds that split a model between them have."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.optimizers = [SGD(params[::2], lr=0.1, momentum=0.9), Adam(params[1::2], lr=0.01)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


class OwnList(Optimizer):
    """Steps what it was given, whatever is in the groups."""

    def __init__(self, params: Any) -> None:
        self.mine = list(params)
        self.by_name = {"all": tuple(self.mine)}
        super().__init__(self.mine, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(a is b for a, b in zip(self.mine, self.by_name["all"], strict=True))
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


class ByIdentity(Optimizer):
    """Keeps what it knows of parameters under their ids, and in its state by parameter but not one entry each."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momentum: dict[int, torch.Tensor] = {}
        self.faster = {id(p) for p in self.param_groups[0]["params"][:2]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        start: dict[Any, torch.Tensor] = self.state["start"]
        for parameter in self.param_groups[0]["params"]:
            momentum = self.momentum.setdefault(id(parameter), torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
            first = start.setdefault(parameter, parameter.clone())
            parameter.sub_(momentum, alpha=0.2 if id(parameter) in self.faster else 0.1).lerp_(first, 0.1)


class Around(Optimizer):
    """Wraps one that holds parameters of its own, in a dict."""

    def __init__(self, params: Any) -> None:
        self.inner = {"it": OwnList(params)}
        super().__init__(self.inner["it"].mine, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner["it"].step()


def by_hand(make: Callable[[Any], Optimizer], steps: int, warm: int = 0) -> list[nn.Parameter]:
    """Float32 masters of a bfloat16 model, written out; the first and last ``warm`` steps in float32."""
    loop = ByHand(loops.mlp(), "O0", make)
    for index, batch in enumerate(loops.batches(steps)):
        loop.setting = "O5" if warm <= index < steps - warm else "O0"
        loop.follow()
        loop.clear()
        loop.backward(batch)
        loop.step()
    return loop.masters


@pytest.mark.parametrize("make", [Halves, OwnList])
def test_every_place_that_holds_a_weight_gets_its_master(make: Callable[[Any], Optimizer]) -> None:
    model, optimizer = loops.started("O5", make=make)
    loops.train(model, optimizer, loops.batches(4))
    loops.same(loops.masters(optimizer), by_hand(make, 4))
    weights = list(model.parameters())
    mpinit.undo(model)
    held = [p for o in getattr(optimizer, "optimizers", []) for g in o.param_groups for p in g["params"]]
    held += list(getattr(optimizer, "mine", []))
    assert {id(p) for p in held} == {id(weight) for weight in weights}
    for each in getattr(optimizer, "optimizers", []):
        assert all(any(key is weight for weight in weights) for key in each.state), "state went back as well"


@pytest.mark.parametrize("make", [ByIdentity, Around])
def test_optimizer_state_moves_to_the_master_and_back(make: Callable[[Any], Optimizer]) -> None:
    model, data = loops.mlp(), loops.batches(7)
    optimizer = make(model.parameters())
    loops.train_plainly(model, optimizer, data[:2])
    mpinit.initialize(model, optimizer, "O5")
    loops.train(model, optimizer, data[2:5])
    mpinit.undo(model)
    loops.train_plainly(model, optimizer, data[5:])
    loops.same(model.parameters(), by_hand(make, 7, warm=2))


def test_counters_and_hooks_run_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BUCKET_BYTES", 4)
    model = loops.mlp()
    optimizer = loops.Counting(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["step"] = 0
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loops.train(model, optimizer, loops.batches(3))
    assert optimizer.param_groups[0]["step"] == optimizer.count == 3
    assert calls == ["before", "after"] * 3


class Decays(loops.Forwarding):
    """Does more than what it wraps in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


def decays(params: Any) -> Decays:
    return Decays(SGD(params, lr=0.1))


def test_the_whole_step_of_a_wrapper_that_does_more_is_skipped() -> None:
    model, optimizer = loops.started(make=decays)
    before = [value.clone() for value in model.state_dict().values()]
    for batch, overflows in zip(loops.batches(2), (True, False), strict=True):
        loss = loops.mse(model, batch)
        loops.iterate(loops.poison(loss, next(model.parameters())) if overflows else loss, optimizer)
        is_as_before = all(map(torch.equal, model.state_dict().values(), before))
        assert is_as_before == overflows


def test_a_wrapper_that_does_more_steps_split_masters_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BUCKET_BYTES", 4)
    model, data = loops.mlp(), loops.batches(4)
    reference = ByHand(model, "split", decays)
    optimizer = start(model, "O5", make=decays, master_weights="split")
    for batch in data:
        loops.train(model, optimizer, [batch])
        reference.clear()
        reference.backward(batch)
        reference.step()
    loops.same(model.state_dict().values(), reference.masters)


class Keeper(OwnList):
    """Finds what it keeps when it steps first: under ids, in its state under a name, in a tuple."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not hasattr(self, "seen"):
            self.seen = {id(p): (p, 0) for p in self.param_groups[0]["params"]}
            self.state["kept"] = {p: p.detach().clone() for p in self.param_groups[0]["params"]}
        for parameter in self.param_groups[0]["params"]:
            same_one, steps = self.seen[id(parameter)]
            assert same_one is parameter and self.state["kept"][parameter].dtype is torch.float32
            self.seen[id(parameter)] = parameter, steps + 1
        super().step()


@pytest.mark.parametrize("masters_kind", [True, "split"])
def test_optimizer_attributes_have_weights_between_steps(masters_kind: Any) -> None:
    model, optimizer = loops.started("O5", make=Keeper, master_weights=masters_kind)
    for undone in (False, True):
        loops.train_plainly(model, optimizer, loops.batches(2))
        weights = list(model.parameters())
        assert optimizer.seen == {id(p): (p, 4 if undone else 2) for p in weights}
        assert list(map(id, optimizer.state["kept"])) == list(map(id, weights)) == list(map(id, optimizer.mine))
        assert list(map(id, optimizer.by_name["all"])) == list(map(id, weights))
        if not undone:
            mpinit.undo(model)
