"""Every optimizer of public packages, as something that makes it for a model's parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
    for name, cls in sorted(vars(torch.optim).items()):
        if isinstance(cls, type) and name not in _NOT_HERE:
            if name == "Muon":
                yield name, lambda params: torch.optim.Muon(_matrices(params)[0])
            elif name == "LBFGS":
                yield name, _plain(cls, lr=0.1, max_iter=3)
            else:
                yield name, _plain(cls)


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
    for name, cls in sorted(vars(package).items()):
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            yield name, _plain(cls)
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
