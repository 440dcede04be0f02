"""Every optimizer of the installed packages: steps like a hand-written loop with masters, or is refused."""

import contextlib
import copy
import importlib
import inspect
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from frameworks import is_installed, let_torchvision_load
from loops import backward, poison
from masters_by_hand import rounded
from torch import nn

import mpinit
from mpinit.optimizer import parts

Maker = Callable[[list[Any]], Any]
# What these are made for a survey has not.
_NOT_HERE = {"Optimizer", "SparseAdam"}


def _plain(cls: Any, **given: Any) -> Maker:
    """With ``lr`` where the class wants one."""
    lr = inspect.signature(cls).parameters.get("lr")
    if lr is not None and lr.default is inspect.Parameter.empty:
        given.setdefault("lr", 1e-3)
    return lambda params: cls(params, **given)


def _matrices(params: list[Any]) -> tuple[list[Any], list[Any]]:
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def _torch_optim() -> Iterator[tuple[str, Maker]]:
    for name, maker in _module("torch.optim")():
        if name == "Muon":
            yield name, lambda params: torch.optim.Muon(_matrices(params)[0])
        else:
            yield name, _plain(torch.optim.LBFGS, lr=0.1, max_iter=3) if name == "LBFGS" else maker


def _pytorch_optimizer() -> Iterator[tuple[str, Maker]]:
    package = importlib.import_module("pytorch_optimizer")

    def grouped(cls: Any) -> Maker:
        def make(params: list[Any]) -> Any:
            two, others = _matrices(params)
            return cls([{"params": two, "use_muon": True}, {"params": others, "use_muon": False}])

        return make

    for name in package.get_supported_optimizers():
        cls = package.load_optimizer(name)
        muon = name in {"muon", "adamuon", "adago", "normuon", "distributedmuon", "muonclip"}
        # At its own rate of 1 it diverges.
        slower = {"lr": 0.1, "max_iter": 3} if name == "lbfgs" else {}
        yield name, grouped(cls) if muon else _plain(cls, **slower)
    adamw = torch.optim.AdamW
    yield "Lookahead", lambda p: package.Lookahead(adamw(p), k=2)
    yield "OrthoGrad", lambda p: package.OrthoGrad(adamw(p))
    yield "OrthoGrad of class", lambda p: package.OrthoGrad(adamw, params=p)
    yield "ScheduleFreeWrapper", lambda p: package.ScheduleFreeWrapper(adamw(p))
    yield "TRAC", lambda p: package.TRAC(adamw(p))
    yield "Lookahead of OrthoGrad", lambda p: package.Lookahead(package.OrthoGrad(adamw(p)), k=2)
    yield "ScheduleFreeWrapper of Lookahead", lambda p: package.ScheduleFreeWrapper(package.Lookahead(adamw(p), k=2))
    yield "SAM", lambda p: package.SAM(p, adamw, lr=1e-3)
    yield "SAM foreach", lambda p: package.SAM(p, adamw, lr=1e-3, foreach=True)
    yield "SAM adaptive", lambda p: package.SAM(p, torch.optim.SGD, lr=1e-2, momentum=0.9, adaptive=True)
    yield "FriendlySAM", lambda p: package.FriendlySAM(p, adamw, lr=1e-3)
    yield "LookSAM", lambda p: package.LookSAM(p, adamw, lr=1e-3, k=2)
    yield "AdamW 8-bit states", lambda p: package.FlashAdamW(p)


def _heavyball() -> Iterator[tuple[str, Maker]]:
    package = importlib.import_module("heavyball")
    package.utils.compile_mode = None
    for name in package.__all__:
        cls = getattr(package, name)
        if name == "SplitOpt":

            def split(params: list[Any]) -> Any:
                two, others = _matrices(params)
                muon = {"params": two, "optimizer": package.Muon, "lr": 0.02}
                return package.SplitOpt([muon, {"params": others, "optimizer": package.AdamW, "lr": 0.001}])

            yield name, split
        elif isinstance(cls, type):
            yield name, _plain(cls)


def _schedulefree() -> Iterator[tuple[str, Maker]]:
    package = importlib.import_module("schedulefree")
    yield from _module("schedulefree")()
    yield "ScheduleFreeWrapper", lambda p: package.ScheduleFreeWrapper(torch.optim.SGD(p, lr=0.01))


def _timm() -> Iterator[tuple[str, Maker]]:
    package = importlib.import_module("timm.optim")
    for name in package.list_optimizers():
        yield name, lambda p, name=name: package.create_optimizer_v2(p, opt=name, lr=1e-3)  # type: ignore[misc]
    yield "lookahead_adamw", lambda p: package.create_optimizer_v2(p, opt="lookahead_adamw", lr=1e-3)


def _bitsandbytes() -> Iterator[tuple[str, Maker]]:
    package = importlib.import_module("bitsandbytes")
    for name, cls in sorted(vars(package.optim).items()):
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            more = {"min_8bit_size": 16} if "min_8bit_size" in inspect.signature(cls).parameters else {}
            yield name, _plain(cls, **more)


def _torch_optimizer() -> Iterator[tuple[str, Maker]]:
    package = importlib.import_module("torch_optimizer")
    for name in package.__all__:
        cls = getattr(package, name)
        if name == "Lookahead":
            yield name, lambda p: package.Lookahead(package.Yogi(p), k=2)
        elif isinstance(cls, type):
            yield name, _plain(cls)


def _module(name: str, *more: str) -> Callable[[], Iterator[tuple[str, Maker]]]:
    """Every optimizer that a module exports."""

    def makers() -> Iterator[tuple[str, Maker]]:
        for each in (name, *more):
            for key, cls in sorted(vars(importlib.import_module(each)).items()):
                if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and key not in _NOT_HERE:
                    yield key, _plain(cls)

    return makers


PACKAGES: dict[str, Callable[[], Iterator[tuple[str, Maker]]]] = {
    "torch.optim": _torch_optim,
    "pytorch_optimizer": _pytorch_optimizer,
    "heavyball": _heavyball,
    "schedulefree": _schedulefree,
    "timm.optim": _timm,
    "bitsandbytes": _bitsandbytes,
    "torch_optimizer": _torch_optimizer,
    "optimi": _module("optimi"),
    "lion_pytorch": _module("lion_pytorch"),
    "prodigyopt": _module("prodigyopt"),
    "dadaptation": _module("dadaptation", "dadaptation.experimental"),
    "adabelief_pytorch": _module("adabelief_pytorch"),
    "transformers": _module("transformers.optimization"),
}

# Full masters in mid-training, from the beginning, with float16 and an overflow at the third step, split masters
# likewise, or full masters with states so small that none is encoded, in parts.
RUNS = ("full", "full, fresh", "overflow", "split", "split, fresh", "parts")
SCALE = 1024.0


def net() -> nn.Sequential:
    """Parameters of one, two and four dimensions."""
    torch.manual_seed(0)
    parts = nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*parts)


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for :func:`net`."""
    chance = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 2, 4, 4, generator=chance), torch.randn(6, 4, generator=chance)) for _ in range(count)]


class Side:
    """A model and its optimizer, whose step takes no closure, one, or one after a first backward pass."""

    def __init__(self, make: Maker, takes_closure: str) -> None:
        self.model = net()
        torch.manual_seed(2)
        self.optimizer = make(list(self.model.parameters()))
        self.takes_closure = takes_closure
        self.in_mode("train")

    def in_mode(self, mode: str) -> None:
        method = getattr(self.optimizer, mode, None)
        if callable(method):
            # That of heavyball's SAMWrapper calls what its inner optimizer has not.
            with contextlib.suppress(AttributeError):
                method()

    def step(self, number: int, evaluate: Callable[[], torch.Tensor]) -> None:
        """One step; random numbers are the same on both sides."""
        torch.manual_seed(100 + number)
        if self.takes_closure != "closure":
            evaluate()
        self.optimizer.step(*(() if self.takes_closure == "no" else (evaluate,)))

    def plainly(self, number: int, batch: Any) -> None:
        """One step in float32 without mpinit."""

        def evaluate() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            loss.backward()
            return loss

        self.step(number, evaluate)


class ByHand(Side):
    """The float32 model's parameters are the masters of a 16-bit copy."""

    def start(self, dtype: torch.dtype, half_away: bool) -> None:
        self.dtype, self.half_away = dtype, half_away
        self.copy = copy.deepcopy(self.model).to(dtype)
        self.scale = SCALE if dtype is torch.float16 else 1.0
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for weight, master in zip(self.copy.parameters(), self.model.parameters(), strict=True):
            weight.copy_(rounded(master.contiguous(), "split") if self.half_away else master)

    def in_16_bit(self, number: int, batch: Any, overflows: int = 0) -> None:
        """One step; from the evaluation numbered ``overflows`` on with half the scale."""
        evaluations = 0

        def evaluate() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            if overflows == evaluations:
                self.scale /= 2
            self.round()
            self.copy.zero_grad()
            loss = nn.functional.mse_loss(self.copy(batch[0].to(self.dtype)).float(), batch[1])
            (loss * self.scale).backward()
            for weight, master in zip(self.copy.parameters(), self.model.parameters(), strict=True):
                master.grad = None if weight.grad is None else weight.grad.float() / self.scale
            return loss.detach()

        self.step(number, evaluate)
        self.round()


class ByMpinit(Side):
    def start(self, **keywords: Any) -> None:
        mpinit.initialize(self.model, self.optimizer, "O2", **keywords)

    def in_16_bit(self, number: int, batch: Any, overflows: int = 0) -> None:
        """One step; the evaluation numbered ``overflows``, from 1 on, does."""
        evaluations = 0

        def evaluate() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            raised = poison(loss, self.model[3].weight) if overflows == evaluations else loss
            backward(raised, self.optimizer)
            return loss.detach()

        self.step(number, evaluate)


def difference(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> str:
    """What is not the same in two lists of tensors; empty where nothing is."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.detach(), b.detach()
        if a.dtype != b.dtype:
            return f"{index}: {a.dtype} and {b.dtype}"
        if not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return f"{index}: off by {(a.float() - b.float()).abs().max():.3g} of {b.float().abs().max():.3g}"
    return ""


def state_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in the state of an optimizer and of those it wraps, in an order that both sides have."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if id(item) in seen:
            return
        if isinstance(item, torch.Tensor):
            # What heavyball keeps of views is made anew in every step.
            found.extend([] if item._is_view() else [item])
        elif isinstance(item, dict):
            seen.add(id(item))
            parameters = [key for key in item if isinstance(key, torch.Tensor)]
            parameters.sort(key=lambda parameter: float(parameter.detach().double().sum()))
            for key in dict.fromkeys([*parameters, *item]):
                walk(item[key])
        elif isinstance(item, (list, tuple)):
            seen.add(id(item))
            for each in item:
                walk(each)
        elif hasattr(item, "param_groups"):
            seen.add(id(item))
            for key, each in vars(item).items():
                if key not in ("param_groups", "defaults"):
                    walk(each)

    walk(value)
    return found


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def survey(make: Maker, run: str) -> str:
    """Train by hand and by mpinit: "equal", "needs more: ..." (fails by hand), "refused: ..." or "wrong: ..."."""
    with _quietly():
        closure = _way_to_step(make)
        if closure.startswith("needs more"):
            return closure
        try:
            found = _compare(make, run, closure)
        except Refused as error:
            return f"refused: {error}"
        except Exception as error:  # what mpinit raises where by hand nothing does
            return f"wrong: {type(error).__name__}: {str(error)[:200]}"
        # Some round as the addresses of their matrices have it.
        if found.startswith("wrong") and any(
            difference(_by_hand(make, closure), _by_hand(make, closure)) for _ in range(4)
        ):
            return "needs more: not the same twice by hand"
        return found


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BUCKET_BYTES", 512)


class Refused(Exception):
    """``initialize`` said no."""


def _way_to_step(make: Maker) -> str:
    last = ""
    for way in ("no", "closure", "after backward"):
        try:
            side = ByHand(make, way)
            if way == "closure" and hasattr(side.optimizer, "first_step"):
                continue
            before = [p.detach().clone() for p in side.model.parameters()]
            side.start(torch.bfloat16, half_away=False)
            for number, batch in enumerate(data(8)):
                side.in_16_bit(number, batch)
        except Exception as error:
            last = last or f"{type(error).__name__}: {str(error)[:120]}"
            continue
        if difference(before, side.model.parameters()):
            return way
        last = last or "nothing is trained by hand either"
    return f"needs more: {last}"


def _by_hand(make: Maker, closure: str) -> list[torch.Tensor]:
    side = ByHand(make, closure)
    side.start(torch.bfloat16, half_away=False)
    for number, batch in enumerate(data(9)):
        side.in_16_bit(number, batch)
    return list(side.model.parameters())


def _compare(make: Maker, run: str, closure: str) -> str:
    ours, theirs, batches = ByMpinit(make, closure), ByHand(make, closure), data(12)
    warm = 0 if run.endswith("fresh") else 2
    for number in range(warm):
        ours.plainly(number, batches[number])
        theirs.plainly(number, batches[number])
    if found := difference(ours.model.parameters(), theirs.model.parameters()):
        return f"needs more: not the same twice by hand ({found})"
    dtype = torch.float16 if run == "overflow" else torch.bfloat16
    keywords: dict[str, Any] = {"cast_model_type": dtype}
    if run == "overflow":
        keywords |= {"loss_scale": mpinit.DynamicLossScale(init=SCALE)}
    if run.startswith("split"):
        keywords |= {"master_weights": "split"}
    if run == "parts":
        keywords |= {"optimizer_state": "int8"}
    theirs.start(dtype, half_away=run.startswith("split"))
    try:
        ours.start(**keywords)
    except (ValueError, TypeError) as error:
        raise Refused(str(error)) from error
    for number in range(warm, 9):
        overflows = {warm + 2: 1, warm + 4: 2}.get(number, 0) if run == "overflow" else 0
        ours.in_16_bit(number, batches[number], overflows)
        if overflows == 1 and closure != "closure":
            # Before anything was stepped: the step is skipped.
            theirs.scale /= 2
        else:
            theirs.in_16_bit(number, batches[number], overflows)
        if found := _after_step(ours, theirs):
            return f"wrong: step {number}: {found}"
    if found := _modes(ours, theirs):
        return f"wrong: {found}"
    mpinit.undo(ours.model)
    if found := difference(ours.model.parameters(), theirs.model.parameters()):
        return f"wrong: after undo {found}"
    return _afterwards(ours, theirs, batches)


def _after_step(ours: ByMpinit, theirs: ByHand) -> str:
    if found := difference(ours.model.state_dict().values(), theirs.model.parameters()):
        return f"masters {found}"
    if found := difference(ours.model.parameters(), theirs.copy.parameters()):
        return f"weights {found}"
    scale = mpinit.loss_scale(ours.optimizer)
    return "" if scale == theirs.scale else f"scale {scale}, not {theirs.scale}"


def _modes(ours: ByMpinit, theirs: ByHand) -> str:
    for mode in ("eval", "train"):
        ours.in_mode(mode)
        theirs.in_mode(mode)
        theirs.round()
        ours.model(data(1)[0][0])
        if found := _after_step(ours, theirs):
            return f"{mode}() {found}"
    return ""


def _afterwards(ours: ByMpinit, theirs: ByHand, batches: list[Any]) -> str:
    mine, other = state_tensors(ours.optimizer), state_tensors(theirs.optimizer)
    if len(mine) != len(other):
        return f"wrong: {len(mine)} tensors of state, {len(other)} by hand"
    if found := difference(mine, other):
        return f"wrong: state {found}"
    for number in range(9, 12):
        ours.plainly(number, batches[number])
        theirs.plainly(number, batches[number])
        if found := difference(ours.model.parameters(), theirs.model.parameters()):
            return f"wrong: step {number} after undo {found}"
    return "equal"


# Its eval() looks states up by the addresses of parameters, and raises: split masters have others in every step.
KNOWN = {(name, run): "wrong: KeyError" for name in ("SFAdamW", "MSAMLaProp") for run in RUNS if "split" in run}
# Now and then by the last bit, as two runs by hand differ: its matrix products depend on where in memory matrices lie.
LAST_BIT = r"wrong: (step \d+: masters|(step \d+ )?after undo) \d: off by \d(\.\d+)?e-(0[89]|1\d) "
KNOWN |= {("kron", run): LAST_BIT for run in RUNS}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
def test_optimizers_step_masters_as_by_hand(package: str) -> None:
    let_torchvision_load()
    try:
        makers = list(PACKAGES[package]())
    except ModuleNotFoundError as error:
        if is_installed(error.name or ""):
            raise
        pytest.skip(f"{error.name} is not installed")
    outcomes = {(name, run): survey(make, run) for name, make in makers for run in RUNS}
    assert any(outcome == "equal" for outcome in outcomes.values())
    for outcome in sorted(set(outcomes.values())):
        print(outcome, sorted(name for name, other in outcomes.items() if other == outcome))
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("wrong")}
    assert not {name: outcome for name, outcome in wrong.items() if not re.match(KNOWN.get(name, "none"), outcome)}
