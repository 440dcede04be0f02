"""Every store and optimizer in every usual loop, equal to the last bit to the loop that one writes by hand."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer, RMSprop

import mpinit

Batch = tuple[Tensor, Tensor]
Make = Callable[..., Optimizer]
Program = Callable[[Any, int, list[Batch]], None]


@dataclass(frozen=True)
class Store:
    """One way to store float32 masters, and how a weight is rounded from its master."""

    keywords: dict[str, Any]
    dtype: torch.dtype
    scale: float

    def rounded(self, master: Tensor) -> Tensor:
        if self.keywords.get("master_weights") == "split":  # to nearest, half away from zero
            return ((master.contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        return master.to(self.dtype)


SCALE: Final = 1024.0
STORES: Final = {
    "O0": Store({"opt_level": "O0"}, torch.float32, 1.0),
    "O2": Store({"opt_level": "O2", "loss_scale": SCALE}, torch.float16, SCALE),
    "O2-bfloat16": Store(
        {"opt_level": "O2", "cast_model_type": torch.bfloat16, "loss_scale": 1.0}, torch.bfloat16, 1.0
    ),
    "O5": Store({"opt_level": "O5"}, torch.bfloat16, 1.0),
    "O5-split": Store({"opt_level": "O5", "master_weights": "split"}, torch.bfloat16, 1.0),
    "O5-model": Store({"opt_level": "O5", "master_weights": "model"}, torch.bfloat16, 1.0),
    "O2-model": Store({"opt_level": "O2", "master_weights": "model", "loss_scale": SCALE}, torch.float16, SCALE),
}
OPTIMIZERS: Final[dict[str, Make]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "AdamW-foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "AdamW-fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3, momentum=0.5),
    "Muon": lambda p: Muon(p, lr=1e-2),
}


def network(biases: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=biases), nn.Tanh(), nn.Linear(16, 3, bias=biases))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


class ByHand:
    """A 16-bit model, float32 masters, and float32 sums of its gradients."""

    def __init__(self, store: Store, make: Make, biases: bool) -> None:
        self.store, self.model = store, network(biases)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.model.to(store.dtype)
        self.sums: list[Tensor | None] = [None] * len(self.masters)
        self.trained = set(range(len(self.masters)))
        self.optimizer = make(self.masters)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            weight.copy_(self.store.rounded(master.detach()))

    def loss(self, batch: Batch) -> Tensor:
        return mse_loss(self.model(batch[0].to(self.store.dtype)).float(), batch[1])

    def backward(self, batch: Batch, factor: float = 1.0) -> None:
        self.model.zero_grad()
        (self.loss(batch) * factor * self.store.scale).backward()
        for i, weight in enumerate(self.model.parameters()):
            if i in self.trained:
                assert weight.grad is not None
                fresh = weight.grad.float() / self.store.scale
                before = self.sums[i]
                self.sums[i] = fresh if before is None else before + fresh

    def clip(self, norm: float) -> None:
        for master, total in zip(self.masters, self.sums, strict=True):
            master.grad = total
        torch.nn.utils.clip_grad_norm_(self.masters, norm)

    def step(self) -> None:
        for master, total in zip(self.masters, self.sums, strict=True):
            master.grad = total
        if all(total is None or bool(total.isfinite().all()) for total in self.sums):
            self.optimizer.step()
        self.sums = [None] * len(self.masters)
        self.round()


class WithMpinit:
    """The same with mpinit."""

    def __init__(self, store: Store, make: Make, biases: bool, door: str = "", trained: slice = slice(None)) -> None:
        self.model = network(biases)
        self.model.requires_grad_(False)
        self.model[trained].requires_grad_(True)
        self.optimizer = make(self.model[trained].parameters())
        mpinit.initialize(self.model, self.optimizer, **store.keywords)
        self.kept = list(mpinit.master_params(self.optimizer)) if door == "kept masters" else []
        self.door = door

    def backward(self, batch: Batch, factor: float = 1.0) -> None:
        with mpinit.scale_loss(mse_loss(self.model(batch[0]), batch[1]) * factor, self.optimizer) as scaled:
            scaled.backward()

    def clip(self, norm: float) -> None:
        if self.door == "weights":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        elif self.door == "mpinit":
            mpinit.clip_grad_norm_(self.optimizer, norm)
        else:
            masters = self.kept if self.door == "kept masters" else mpinit.master_params(self.optimizer)
            torch.nn.utils.clip_grad_norm_(masters, norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_equal(ours: WithMpinit, theirs: ByHand, context: str) -> None:
    state = ours.model.state_dict()
    for (name, value), master in zip(state.items(), theirs.masters, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, master.detach()), f"{context}: master of {name} differs"
    for ours_, weight in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        if ours_.dtype == weight.dtype:
            assert torch.equal(ours_, weight), f"{context}: weight differs"


def run(chosen: Store, optimizer: str, program: Program, door: str = "") -> None:
    biases = optimizer != "Muon"
    ours = WithMpinit(chosen, OPTIMIZERS[optimizer], biases, door)
    theirs = ByHand(chosen, OPTIMIZERS[optimizer], biases)
    data = batches(24)
    for step in range(6):
        chunk = data[4 * step : 4 * step + 4]
        for side in (ours, theirs):
            program(side, step, chunk)
        assert_equal(ours, theirs, f"step {step}")


def plain(side: Any, step: int, data: list[Batch]) -> None:
    side.backward(data[0])
    side.step()


def accumulated(side: Any, step: int, data: list[Batch]) -> None:
    for batch in data[: 1 + step % 4]:
        side.backward(batch, 0.25)
    side.step()


def clipped(side: Any, step: int, data: list[Batch]) -> None:
    for batch in data[:2]:
        side.backward(batch, 0.5)
    side.clip(0.05)
    side.step()


def each(test: Any) -> Any:
    """Run a test for every store and every optimizer."""
    by_store = pytest.mark.parametrize("store", STORES)(test)
    return pytest.mark.parametrize("optimizer", OPTIMIZERS)(by_store)


@each
@pytest.mark.parametrize("program", [plain, accumulated])
def test_loop(store: str, optimizer: str, program: Program) -> None:
    run(STORES[store], optimizer, program)


@each
@pytest.mark.parametrize("door", ["weights", "masters", "kept masters", "mpinit"])
def test_clipping(store: str, optimizer: str, door: str) -> None:
    run(STORES[store], optimizer, clipped, door)


@each
@pytest.mark.parametrize("bad", range(3))
def test_overflow_in_one_of_three_micro_batches(store: str, optimizer: str, bad: int) -> None:
    chosen = replace(STORES[store], keywords=STORES[store].keywords | {"skip_nonfinite": True})

    def program(side: Any, step: int, data: list[Batch]) -> None:
        for index, batch in enumerate(data[:3]):
            side.backward(batch, float("inf") if step in (0, 3) and index == bad else 0.3)
        side.step()

    run(chosen, optimizer, program)


@each
def test_plain_backward_without_scale_loss(store: str, optimizer: str) -> None:
    if STORES[store].scale != 1.0:
        pytest.skip("a loss that has to be scaled")

    def program(side: Any, step: int, data: list[Batch]) -> None:
        if isinstance(side, ByHand):
            side.backward(data[0])
        else:
            mse_loss(side.model(data[0][0]), data[0][1]).backward()
        side.step()

    run(STORES[store], optimizer, program)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(store: str, search: str | None) -> None:
    data, chosen = batches(1)[0], STORES[store]
    make = functools.partial(LBFGS, max_iter=5, line_search_fn=search)
    ours, theirs = WithMpinit(chosen, make, True), ByHand(chosen, make, True)

    def closure() -> Tensor:
        ours.optimizer.zero_grad()
        loss = mse_loss(ours.model(data[0]), data[1])
        with mpinit.scale_loss(loss, ours.optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    def closure_by_hand() -> Tensor:
        theirs.round()
        theirs.sums = [None] * len(theirs.masters)
        theirs.backward(data)
        for master, total in zip(theirs.masters, theirs.sums, strict=True):
            master.grad = total
        return theirs.loss(data).detach()

    for step in range(3):
        loss = ours.optimizer.step(closure)
        theirs.round()
        expected = theirs.optimizer.step(closure_by_hand)
        theirs.round()
        assert float(loss) == float(expected)
        assert_equal(ours, theirs, f"step {step}")


@each
def test_unfreezing_and_a_new_group(store: str, optimizer: str) -> None:
    biases, chosen, make = optimizer != "Muon", STORES[store], OPTIMIZERS[optimizer]
    ours = WithMpinit(chosen, make, biases, trained=slice(0, 1))
    theirs = ByHand(chosen, make, biases)
    first, last = theirs.masters[: len(theirs.masters) // 2], theirs.masters[len(theirs.masters) // 2 :]
    theirs.optimizer = make(first)
    theirs.trained = set(range(len(first)))
    with torch.no_grad():  # what is frozen at initialize is rounded there
        for p in last:
            p.copy_(p if store.endswith("-model") else chosen.rounded(p.detach()))
    data = batches(24)
    for step in range(6):
        if step == 3:
            for p in ours.model[2].parameters():
                p.requires_grad_(True)
            ours.optimizer.add_param_group({"params": list(ours.model[2].parameters())})
            theirs.optimizer.add_param_group({"params": last})
            theirs.trained = set(range(len(theirs.masters)))
        for side in (ours, theirs):
            accumulated(side, step, data[4 * step : 4 * step + 4])
        assert_equal(ours, theirs, f"step {step}")


@each
def test_two_losses_and_two_optimizers(store: str, optimizer: str) -> None:
    biases, chosen, make = optimizer != "Muon", STORES[store], OPTIMIZERS[optimizer]
    model = network(biases)
    optimizers = [make(model[0].parameters()), make(model[2].parameters())]
    mpinit.initialize(model, optimizers, num_losses=2, **chosen.keywords)
    theirs = ByHand(chosen, make, biases)
    half = len(theirs.masters) // 2
    pair = [make(theirs.masters[:half]), make(theirs.masters[half:])]
    data = batches(12)
    for step in range(6):
        for loss_id in range(2):
            batch = data[2 * step + loss_id]
            with mpinit.scale_loss(mse_loss(model(batch[0]), batch[1]), optimizers, loss_id=loss_id) as scaled:
                scaled.backward()
            theirs.backward(batch)
        for one in optimizers:
            one.step()
            one.zero_grad()
        for master, total in zip(theirs.masters, theirs.sums, strict=True):
            master.grad = total
        for one in pair:
            one.step()
        theirs.sums = [None] * len(theirs.masters)
        theirs.round()
        for (name, value), master in zip(model.state_dict().items(), theirs.masters, strict=True):
            assert torch.equal(value, master.detach()), (step, name)


@pytest.mark.parametrize("store", [s for s in STORES if STORES[s].dtype != torch.float32])
def test_dynamic_scale_backs_off_once_a_step(store: str) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    keywords = STORES[store].keywords | {"loss_scale": "dynamic"}
    mpinit.initialize(model, optimizer, **keywords)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    scale = mpinit.loss_scale(optimizer)
    data = batches(4)
    for k, batch in enumerate(data):
        factor = float("inf") if k == 0 else 1.0
        with mpinit.scale_loss(mse_loss(model(batch[0]), batch[1]) * factor, optimizer) as scaled:
            scaled.backward()
    assert mpinit.loss_scale(optimizer) == scale / 2
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    optimizer.step()  # a second step after a skip, without a backward pass: the gradients are still inf
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
