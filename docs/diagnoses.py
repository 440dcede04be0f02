"""Measure how often each tool is right about planted and healthy models: ``python docs/measure.py diagnoses``."""

from __future__ import annotations

import fnmatch
import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from planted_models import Batch, Example, faulty, healthy
from torch import nn

import mpinit

TOOLS: Final = ("watch_overflow", "overflow_report", "suggest")
STEPS: Final = 60
# A share of what float32 takes off the loss.
TOLERANCE: Final = 0.2
# Kinds that 16 bits have no part in.
NOT_OF_PRECISION: Final = ("forced", "float32", "data", "weights")


@dataclass
class Trained:
    """A training: the mean loss of its first and of its last 10 steps, and the skipped steps."""

    first: float
    last: float
    skipped: int
    late: int


def train(example: Example, level: str, keywords: dict[str, Any]) -> Trained:
    """Train on other batches than the tools see; too many skips in a row end it."""
    model, optimizer = example.make()
    losses: list[float] = []
    skipped = late = 0
    try:
        mpinit.initialize(model, optimizer, level, **keywords)
        for number, batch in enumerate(example.batches(STEPS, 1)):
            loss = _one(example, model, optimizer, batch)
            losses.append(loss)
            if mpinit.step_was_skipped(optimizer):
                skipped += 1
                late += number >= STEPS // 2
            if not math.isfinite(loss) and level != "O0" and skipped > 20:
                break
    except RuntimeError:
        return Trained(math.nan, math.nan, skipped, STEPS)
    return Trained(sum(losses[:10]) / 10, sum(losses[-10:]) / 10, skipped, late)


def _one(example: Example, model: nn.Module, optimizer: Any, batch: Batch) -> float:
    optimizer.zero_grad()
    loss = example.loss(model, batch)
    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return float(loss.detach())


def keeps_up(trained: Trained, reference: Trained) -> bool:
    """Return whether a training takes off the loss what float32 does, without skips once its scale is found."""
    fallen = max(abs(reference.first - reference.last), 0.02 * abs(reference.first))
    return (
        math.isfinite(trained.last)
        and trained.last - reference.last <= TOLERANCE * fallen
        and trained.late == 0
        and trained.skipped <= STEPS // 3
    )


def _named(example: Example, name: str | None) -> bool:
    """Return whether a name is a culprit's, or a pattern of keep_fp32 that it falls under."""
    return name is not None and any(
        fnmatch.fnmatchcase(name, culprit) or fnmatch.fnmatchcase(culprit.replace("*", "0"), name)
        for culprit in example.culprits
    )


def watched(example: Example) -> tuple[str, str]:
    """Ask watch_overflow about a step at O2: the first that is not skipped, or the last of 20."""
    model, optimizer = example.make()
    mpinit.initialize(model, optimizer, "O2")
    (batch,) = example.batches(1, 0)
    for _ in range(20):
        with mpinit.watch_overflow(model) as watch:
            _one(example, model, optimizer, batch)
        if not mpinit.step_was_skipped(optimizer):
            break
    found = watch.first
    if found is None:
        return ("silent" if example.kind else "right"), "nothing left the range"
    where = found.operation if found.kind == "weights" else found.module
    is_right = _named(example, where) and (example.kind not in ("data", "weights") or found.kind == example.kind)
    return ("right" if is_right else "wrong"), f"{found.kind} in {where!r}: {found.operation}"


def reported(example: Example) -> tuple[str, str]:
    """Ask overflow_report after training at O2 until 12 steps in a row were skipped, or 30 were done.

    It names the parameters in front of the fault: right is the culprit, or the module that runs just before it.
    """
    model, optimizer = example.make()
    order = _order(example, model)
    mpinit.initialize(model, optimizer, "O2")
    skips = 0
    for batch in example.batches(30, 0):
        _one(example, model, optimizer, batch)
        skips = skips + 1 if mpinit.step_was_skipped(optimizer) else 0
        if skips == 12:
            break
    report = mpinit.overflow_report(optimizer)
    if not report.parameters or skips == 0:
        what = "an overflow while the scale came down" if report.parameters else "no overflow"
        return ("silent" if example.kind else "right"), what
    name = report.first_module
    if name is None:
        return "silent", "does not show where"
    behind = order[order.index(name) + 1] if name in order[:-1] else None
    return ("right" if _named(example, name) or _named(example, behind) else "wrong"), f"names {name!r}"


def _order(example: Example, model: nn.Module) -> list[str]:
    """Return the names of modules without parts in the order in which a forward runs them."""
    found: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: found.append(name))
        for name, module in model.named_modules()
        if not list(module.children()) and not isinstance(module, (nn.Identity, nn.Dropout))
    ]
    with torch.no_grad():
        example.loss(model, example.batches(1, 0)[0])
    for hook in hooks:
        hook.remove()
    return found


def suggested(example: Example, reference: Trained) -> tuple[str, str]:
    """Ask suggest, and train as it says."""
    model, optimizer = example.make()
    (batch,) = example.batches(1, 0)
    found = mpinit.suggest(model, optimizer, lambda model, optimizer: example.loss(model, batch))
    words = f"{found.level}{'' if not found.keywords else f', {dict(found.keywords)}'}"
    if example.kind in NOT_OF_PRECISION:
        finding = found.finding
        is_right = found.level is None and not found.precision_is_at_fault
        is_right = is_right and finding is not None and _named(example, finding.where)
        return ("right" if is_right else "wrong"), "no level helps" if found.level is None else words
    if found.level is None:
        return "wrong", "train in float32"
    if not example.kind and (found.level != "O2" or found.keywords):
        return "wrong", words
    if not keeps_up(train(example, found.level, dict(found.keywords)), reference):
        return "wrong", f"{words} does not train"
    # A cure by another level is one, too; where something is kept, it is what is at fault.
    names = [*found.keep_fp32, *found.keywords.get("keep_inputs", ())]
    is_right = not names or any(_named(example, name) for name in names) or example.kind == "underflow"
    return ("right" if is_right else "wrong"), words


def examine(example: Example) -> dict[str, Any]:
    """Measure the truth about a model, and what each tool says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("mpinit").disabled = True
        try:
            reference = train(example, "O0", {})
            at = {level: train(example, level, {}) for level in ("O2", "O5")}
            verdicts = {
                "watch_overflow": watched(example),
                "overflow_report": reported(example),
                "suggest": suggested(example, reference),
            }
        finally:
            logging.getLogger("mpinit").disabled = False
    trains = {level: keeps_up(trained, reference) for level, trained in at.items()}
    return {
        "model": example.name,
        "fault": example.kind,
        "trains at O2": trains["O2"],
        "trains at O5": trains["O5"],
        **{tool: {"verdict": verdict, "said": words} for tool, (verdict, words) in verdicts.items()},
        "losses": {level: [_short(t.first), _short(t.last), t.skipped] for level, t in {"O0": reference, **at}.items()},
    }


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def diagnoses() -> dict[str, Any]:
    """Try the tools on all of them."""
    torch.set_num_threads(1)
    rows = []
    for example in (*faulty(), *healthy()):
        rows.append(examine(example))
    return {"torch": torch.__version__, "steps": STEPS, "rows": rows}
