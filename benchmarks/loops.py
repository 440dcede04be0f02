"""Extras: parts of training loops beside the step, such as clipping, for every contender.

A function receives a contender and returns its :class:`Work`. The name of a contender with an extra is
"contender+extra", such as ``o2_bf16+clip_model``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from .contenders import Contender, HandWritten, TorchAmp
from .training import Training
from .with_mpinit import Mpinit

MAX_NORM: Final = 1.0
DECAY: Final = 0.999
ACCUMULATED: Final = 4


def _do_nothing() -> None: ...


@dataclass(frozen=True)
class Work:
    """Calls that an iteration makes besides forward, backward and step.

    Attributes:
        after_backward: replaces the contender's ``finish_gradients``; None: it is not replaced.
        before_step, after_step: called once per iteration.
        backward_passes: their number in an iteration.
        iterations: their number in a repetition, which is what is timed.
        at_end: called once per repetition.
        made: tensors that the extra keeps, for tests.
    """

    after_backward: Callable[[], Any] | None = None
    before_step: Callable[[], Any] = _do_nothing
    after_step: Callable[[], Any] = _do_nothing
    backward_passes: int = 1
    iterations: int = 1
    at_end: Callable[[], Any] = _do_nothing
    made: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Extra:
    """An extra, as a function for each kind of contender.

    Attributes:
        title: the text in tables.
        plain: for contenders with float32 weights, such as torch.amp.
        by_hand: for the hand-written loop.
        with_mpinit: for mpinit.
        counterpart: the extra of the hand-written loop that this one is compared with; empty: the same one.
        needs_full_masters: whether it is not measured with split masters.
    """

    title: str
    plain: Callable[[Contender], Work]
    by_hand: Callable[[HandWritten], Work]
    with_mpinit: Callable[[Mpinit], Work]
    counterpart: str = ""
    needs_full_masters: bool = False

    def work(self, contender: Contender) -> Work:
        """Return the work for a contender."""
        if isinstance(contender, HandWritten):
            return self.by_hand(contender)
        return self.with_mpinit(contender) if isinstance(contender, Mpinit) else self.plain(contender)


def _no_work(_: Contender) -> Work:
    return Work()


def _clip_plain(contender: Contender) -> Work:
    def clip() -> None:
        if isinstance(contender, TorchAmp):
            contender.scaler.unscale_(contender.optimizer)
        clip_grad_norm_(contender.model.parameters(), MAX_NORM)

    return Work(before_step=clip)


def _clip_by_hand(contender: HandWritten) -> Work:
    return Work(before_step=lambda: clip_grad_norm_(contender.stepped, MAX_NORM))


def _clip_model(contender: Mpinit) -> Work:
    return Work(before_step=lambda: clip_grad_norm_(contender.model.parameters(), MAX_NORM))


def _clip_masters(contender: Mpinit) -> Work:
    return Work(before_step=lambda: clip_grad_norm_(contender.mpinit.master_params(contender.optimizer), MAX_NORM))


def _clip_mpinit(contender: Mpinit) -> Work:
    return Work(before_step=lambda: contender.mpinit.clip_grad_norm_(contender.optimizer, MAX_NORM))


def _scheduler(contender: Contender) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(contender.optimizer, T_max=100_000)


def _schedule_plain(contender: Contender) -> Work:
    return Work(after_step=_scheduler(contender).step)


def _schedule_by_hand(contender: HandWritten) -> Work:
    scheduler, found_inf = _scheduler(contender), contender.check.found_inf

    def step_unless_skipped() -> None:
        if not found_inf:
            scheduler.step()

    return Work(after_step=step_unless_skipped if contender.checked else scheduler.step)


def _schedule_mpinit(contender: Mpinit) -> Work:
    return Work(after_step=partial(contender.mpinit.scheduler_step, _scheduler(contender)))


def _zero_gradients(contender: Contender) -> Work:
    contender.set_to_none = False
    return Work()


def _average(tensors: Callable[[], Iterator[Tensor]]) -> Work:
    averages = [tensor.detach().float().clone() for tensor in tensors()]

    @torch.no_grad()
    def average() -> None:
        torch._foreach_lerp_(averages, list(tensors()), 1 - DECAY)

    return Work(after_step=average, made=tuple(averages))


def _average_plain(contender: Contender) -> Work:
    return _average(contender.model.parameters)


def _average_by_hand(contender: HandWritten) -> Work:
    return _average(lambda: iter(contender.stepped))


def _average_mpinit(contender: Mpinit) -> Work:
    float32_weights, model = contender.mpinit.float32_weights, contender.model
    with float32_weights(model):
        # Every block has the same parameters, as the hand-written loop has the same masters.
        parameters = list(model.parameters())
        work = _average(lambda: iter(parameters))

    def average() -> None:
        with float32_weights(model):
            work.after_step()

    return Work(after_step=average, made=work.made)


def _average_masters(contender: Mpinit) -> Work:
    return _average(lambda: contender.mpinit.master_params(contender.optimizer))


def _accumulate(_: Contender) -> Work:
    return Work(backward_passes=ACCUMULATED)


def _accumulate_by_hand(contender: HandWritten) -> Work:
    """Sum in float32 on the masters, as mpinit does with full masters."""
    return Work(
        after_backward=contender.add_gradients,
        before_step=contender.unscale,
        after_step=contender.zero_master_gradients,
        backward_passes=ACCUMULATED,
    )


def _saving(every: int, state: Callable[[], dict[str, Any]]) -> Work:
    def save() -> None:
        torch.save(state(), io.BytesIO())

    return Work(iterations=every, at_end=save)


def _save_plain(contender: Contender, every: int) -> Work:
    parts: dict[str, Any] = {"model": contender.model, "optimizer": contender.optimizer}
    return _saving(every, lambda: {name: part.state_dict() for name, part in parts.items()})


def _save_by_hand(contender: HandWritten, every: int) -> Work:
    def state() -> dict[str, Any]:
        model = contender.model.state_dict()
        names = {weight.data_ptr(): name for name, weight in model.items()}
        pairs = zip(contender.weights, contender.masters, strict=True)
        model |= {names[weight.data_ptr()]: master for weight, master in pairs}
        return {"model": model, "optimizer": contender.optimizer.state_dict(), "scale": contender.check.scale}

    return _saving(every, state)


def _save_mpinit(contender: Mpinit, every: int) -> Work:
    def state() -> dict[str, Any]:
        optimizer = contender.optimizer
        scalers = contender.mpinit.state_dict(optimizer)
        return {"model": contender.model.state_dict(), "optimizer": optimizer.state_dict(), "mpinit": scalers}

    return _saving(every, state)


def _checkpoint(every: int) -> Extra:
    plain, by_hand = partial(_save_plain, every=every), partial(_save_by_hand, every=every)
    return Extra(f"a checkpoint into memory every {every} steps", plain, by_hand, partial(_save_mpinit, every=every))


EXTRAS: Final[Mapping[str, Extra]] = {
    "none": Extra("nothing more", _no_work, _no_work, _no_work),
    "clip_model": Extra("clip_grad_norm_(model.parameters())", _clip_plain, _clip_by_hand, _clip_model),
    "clip_masters": Extra(
        "clip_grad_norm_(master_params(optimizer))", _clip_plain, _clip_by_hand, _clip_masters, "clip_model"
    ),
    "clip_mpinit": Extra("mpinit.clip_grad_norm_(optimizer)", _clip_plain, _clip_by_hand, _clip_mpinit, "clip_model"),
    "scheduler": Extra("a learning rate scheduler", _schedule_plain, _schedule_by_hand, _schedule_mpinit),
    "zero_grad": Extra("zero_grad(set_to_none=False)", _zero_gradients, _zero_gradients, _zero_gradients),
    "ema": Extra(
        "an average of the weights, each step: float32_weights", _average_plain, _average_by_hand, _average_mpinit
    ),
    "ema_masters": Extra(
        "an average of master_params(optimizer), each step",
        _average_plain,
        _average_by_hand,
        _average_masters,
        counterpart="ema",
        needs_full_masters=True,
    ),
    "accumulation": Extra(f"{ACCUMULATED} backward passes a step", _accumulate, _accumulate_by_hand, _accumulate),
    "checkpoint": _checkpoint(50),
    "checkpoint_10": _checkpoint(10),
}
CLIPPING: Final = ("clip_mpinit", "clip_masters", "clip_model")


class LoopTraining(Training):
    """The time of whole iterations of a loop with an extra; a name without "+" means no extra.

    A repetition is :attr:`Work.iterations` iterations.
    """

    def __init__(self, task: str, name: str, size: Mapping[str, int], device: str) -> None:
        way, _, extra = name.partition("+")
        super().__init__(task, way, size, device)
        self.extra = EXTRAS[extra or "none"]

    def build(self) -> None:
        super().build()
        self.work = self.extra.work(self.contender)
        self.after_backward = self.work.after_backward or self.contender.finish_gradients

    def step(self) -> Tensor:
        for _ in range(self.work.iterations):
            loss = self.iteration()
        self.work.at_end()
        return loss

    def iteration(self) -> Tensor:
        """Run one iteration; return the loss of its last backward pass."""
        contender, work = self.contender, self.work
        for _ in range(work.backward_passes):
            loss = contender.forward(*self.next_batch())
            contender.backward(loss / work.backward_passes if work.backward_passes > 1 else loss)
            self.after_backward()
        work.before_step()
        contender.update()
        work.after_step()
        return loss.detach()


@dataclass(frozen=True)
class Level:
    """A level of mpinit beside the loops that it is compared with.

    Attributes:
        title: the text in tables.
        by_hand: the hand-written loop.
        ours: the contenders with mpinit.
        amp: the contender with torch.amp, for tasks with a network; empty: not measured.
        extras: the extras that are measured besides clipping.
    """

    title: str
    by_hand: str
    ours: tuple[str, ...]
    amp: str = ""
    extras: tuple[str, ...] = ()

    def contenders(self, extras: tuple[str, ...], has_network: bool) -> tuple[str, ...]:
        """Return the names of all contenders with some extras: the hand-written loop first, mpinit last."""
        others = [self.by_hand, *([self.amp] if has_network and self.amp else [])]
        counterparts = dict.fromkeys(EXTRAS[extra].counterpart or extra for extra in extras)
        names = [f"{way}+{extra}" for way in others for extra in counterparts]
        measured = [(way, extra) for way in self.ours for extra in extras if self.measures(way, extra)]
        return (*names, *(f"{way}+{extra}" for way, extra in measured))

    def measures(self, way: str, extra: str) -> bool:
        """Return whether a contender with mpinit is measured with an extra."""
        return not (EXTRAS[extra].needs_full_masters and way == SPLIT)


# The contender with split masters, of which master_params() yields the 16-bit weights.
SPLIT: Final = "o2_split"
_EXTRAS: Final = ("scheduler", "zero_grad", "ema", "accumulation", "checkpoint")
# Extras that are measured together with another one.
_BESIDE: Final = {"ema": ("ema_masters",)}
LEVELS: Final[Mapping[str, Level]] = {
    "o2_static": Level("O2, scale 128", "hand_static", ("o2_static",)),
    "o2": Level("O2", "hand_fp16", ("o2_fp16",), "amp_fp16", _EXTRAS),
    "o5": Level("O5", "hand_bf16", ("o2_bf16", SPLIT), "amp_bf16", _EXTRAS),
}
# task -> extras that are measured in place of others: 50 steps of the larger task would last seconds.
TASKS_OF_LOOPS: Final[Mapping[str, Mapping[str, str]]] = {
    "launch_adamw": {},
    "bandwidth_adamw": {"checkpoint": "checkpoint_10"},
}


@dataclass(frozen=True)
class LoopRow:
    """A workload of loops: a task, a level, and extras that are measured together."""

    task: str
    level: Level
    extras: tuple[str, ...]


def loop_rows() -> dict[str, LoopRow]:
    """Return all rows by the names of their workloads, such as ``loops_launch_o5_clip``."""
    found = {}
    for task, others in TASKS_OF_LOOPS.items():
        for name, level in LEVELS.items():
            groups = {"clip": ("none", *CLIPPING), **{e: (others.get(e, e), *_BESIDE.get(e, ())) for e in level.extras}}
            for group, extras in groups.items():
                found[f"loops_{task.removesuffix('_adamw')}_{name}_{group}"] = LoopRow(task, level, extras)
    return found
