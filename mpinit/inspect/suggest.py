"""The doctor: runs a step in float32 and in 16 bit, finds where they part, and what makes them agree."""

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..basics.dtypes import is_lower_precision
from ..basics.patching import Undo
from ..settings.properties import OPT_LEVELS
from ..settings.resolve import resolve
from ..torch_internals.native_autocast import CastsOff
from .copies import at_level, copy_of_optimizer, float32_copy, kept_from_running, same_random_numbers
from .overflow import OverflowWatch

UserStep = Callable[[Any, Any], Any]
_ADVICE: Final = "let step(model, optimizer) use its arguments"
# Scales that a dynamic one would come down, or up, to.
_LARGEST_SCALE, _SMALLEST_SCALE = 2.0**16, 2.0**-10
# Room between the largest gradient and the type's largest number.
_HEADROOM: Final = 4.0
# No activation of a network that trains is this large.
_DIVERGED: Final = 1e15
# A gradient below this share of the whole gradient's norm is compared as if it had that.
_NEGLIGIBLE: Final = 0.01
# A parameter underflows where this share of the elements that should have a gradient has none.
_GONE: Final = 0.5
_FLOAT32: Final = "float32"
_MOST_RUNS: Final = 3


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where.

    Attributes:
        kind: "forward", "backward" (an operation left the range of the 16-bit type in that pass), "cast" (a cast in the
            program did), "forced" (an operation that the program runs in 16 bit did, at every level), "buffer" (a
            buffer that the 16-bit type cannot hold), "underflow" (gradients that become 0), "precision" (too few
            digits), "float32" (inf or nan made in float32, where precision is not at fault), "data", "weights".
        where: dotted name of the module, of the buffer or parameter where the kind is about one; "" is the model
            itself, None what is outside of it.
        detail: the operation and the numbers it was given, in words.
    """

    kind: str
    where: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@final
@dataclass(frozen=True)
class Run:
    """One run of the step, beside the same run in float32.

    Attributes:
        level: what the copy was initialised at; "float32" is the reference.
        keep_fp32: what it kept in float32.
        loss: what came out.
        loss_error: of the loss, relative to the reference.
        gradient_error: the largest of a parameter's gradient, relative to the reference.
        underflowing: parameters most of whose gradient is 0 here and not in the reference, in modules of which that is
            true of every parameter (a bias in front of a norm has no gradient but rounding errors).
        agrees: whether loss and gradients are within the tolerance, no gradient is lost, and nothing left the range.
    """

    level: str
    keep_fp32: tuple[str, ...]
    loss: float
    loss_error: float
    gradient_error: float
    underflowing: tuple[str, ...]
    agrees: bool


@final
@dataclass(frozen=True)
class Suggestion:
    """What :func:`suggest` found.

    Attributes:
        level: the level to use; None where no level that was tried agrees with float32.
        keep_fp32: the modules with which it does, beside what the model was initialised with.
        keywords: everything to give to ``initialize`` beside the level.
        reason: why, in words.
        findings: what is wrong, the first cause in front; empty for a healthy model.
        runs: every run of the step, in order.
        precision_is_at_fault: False where float32 itself gives inf or nan, so that no level helps.
    """

    level: str | None
    keep_fp32: list[str]
    keywords: Mapping[str, Any]
    reason: str
    findings: tuple[Finding, ...]
    runs: tuple[Run, ...]
    precision_is_at_fault: bool = True

    @property
    def finding(self) -> Finding | None:
        """The first finding, or None."""
        return self.findings[0] if self.findings else None

    def to_keywords(self) -> str:
        """The arguments to paste into ``mpinit.initialize``."""
        words = ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())
        return f"opt_level={self.level!r}" + (f", {words}" if words else "")

    def __str__(self) -> str:
        lines = [self.reason]
        lines += [f"  {finding}" for finding in self.findings]
        if self.level is not None:
            lines.append(f"  mpinit.initialize(model, optimizer, {self.to_keywords()})")
        lines.append(f"  {'run':<4}{'level':<9}{'loss':>11}{'error':>10}{'gradients':>11}  keep_fp32")
        for index, run in enumerate(self.runs, 1):
            lines.append(
                f"  {index:<4}{run.level:<9}{run.loss:>11.5g}{run.loss_error:>10.2g}{run.gradient_error:>11.2g}  "
                f"{', '.join(run.keep_fp32) or '-'}{'' if run.agrees else '   (does not agree)'}"
            )
        return "\n".join(lines)


def suggest(
    model: nn.Module,
    optimizer: Optimizer,
    step: UserStep,
    levels: Sequence[str] = ("O2", "O5"),
    *,
    tolerance: float = 0.2,
    **keywords: Any,
) -> Suggestion:
    """Find out what a model needs to train in 16 bit as it does in float32.

    The step is run on copies: once in float32, then at a level, every operation and gradient looked at. The run in
    float32 ranks the modules before anything is tried: those whose numbers leave the level's range, and then by how
    far rounding moves the loss (the sum of abs(gradient x rounding error) over all results of their operations). Where
    the two runs part, a third and last keeps the modules in float32 that the ranking names, or is one at the next
    level. Model, optimizer, gradients and random numbers are left as they are, also after an exception; every run
    begins with the same random numbers.

    Args:
        model, optimizer: initialised or not; copied for every run, so there must be memory for two.
        step: ``step(model, optimizer)`` computes the loss of one batch, the same batch each time, with what it is
            given, and returns it. It may go on as a training loop does (``scale_loss``, ``backward``,
            ``optimizer.step``); where it has not called ``backward``, that is done here.
        levels: tried in this order, in at most three runs; the first that works is suggested.
        tolerance: largest relative error of the loss and of every parameter's gradient (of a small gradient: relative
            to a hundredth of the norm of all). Default 0.2.
        **keywords: of ``initialize``, for every level. Default those the model was initialised with, at its own level.

    Returns:
        The suggestion, with ``level``, ``keep_fp32``, ``reason``, ``findings``; printed, a table of the runs.

    Raises:
        ValueError: no such level, a step that gives another batch each time or does not use its arguments, an optimizer
            with parameters that are not the model's.
        TypeError: the step returns no loss.

    Example:
        >>> import torch, mpinit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = mpinit.suggest(model, optimizer, lambda model, optimizer: model(torch.ones(2, 4)).square().mean())
        >>> found.level, found.keep_fp32
        ('O2', [])
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"suggest takes a model, an optimizer and a step, not {type(model).__name__} and {type(optimizer).__name__}"
        )
    if not levels or isinstance(levels, str):
        raise ValueError(f"levels={levels!r}: give a tuple of levels, such as ('O2', 'O5')")
    for level in levels:
        resolve(level, keywords)
    with same_random_numbers() as again:
        return _Doctor(model, optimizer, step, again, tolerance, keywords).examine(levels)


@dataclass
class _Trial:
    """What a run of a copy gave: unscaled gradients, by parameters' dotted names, are in float32."""

    model: nn.Module
    watch: OverflowWatch
    damaged_buffers: Sequence[str]
    loss: float = math.nan
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def take_gradients(self) -> None:
        """Copy the gradients that a step is about to use, and may clear."""
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                self.gradients[name] = whole.detach().to(torch.float32, copy=True)


def _damaged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of buffers that a 16-bit type cannot hold: one of its numbers is off by more than a hundredth."""
    cast = {name: buffer for name, buffer in after.items() if name in before and is_lower_precision(buffer.dtype)}
    return [
        name
        for name, buffer in cast.items()
        if not torch.allclose(buffer.double(), before[name].double(), rtol=0.01, atol=0.0, equal_nan=True)
    ]


def _compare(trial: _Trial, reference: _Trial, tolerance: float, level: str, keep: tuple[str, ...]) -> Run:
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in reference.gradients.values()))
    loss, gradient = math.inf, 0.0
    if math.isfinite(trial.loss):
        # A loss near 0 is compared absolutely: the gradients tell more of it.
        loss = abs(trial.loss - reference.loss) / max(abs(reference.loss), 0.1)
    of_module: dict[str, list[tuple[str, bool]]] = {}
    for name, expected in reference.gradients.items():
        found = trial.gradients.get(name, torch.zeros_like(expected))
        gradient = max(gradient, _error(found, expected, whole))
        meant = expected != 0
        if bool(meant.any()):
            is_gone = float((found[meant] == 0).double().mean()) >= _GONE
            of_module.setdefault(name.rpartition(".")[0], []).append((name, is_gone))
    gone = tuple(name for rows in of_module.values() if all(is_gone for _, is_gone in rows) for name, _ in rows)
    agrees = loss <= tolerance and gradient <= tolerance and not gone and trial.watch.first is None
    return Run(level, keep, trial.loss, loss, gradient, gone, agrees)


def _error(gradient: torch.Tensor, expected: torch.Tensor, whole: float) -> float:
    if not bool(torch.isfinite(gradient).all()):
        return math.inf
    scale = max(float(expected.double().norm()), _NEGLIGIBLE * whole)
    return float((gradient.double() - expected.double()).norm()) / scale if scale > 0 else 0.0


@dataclass
class _Doctor:
    """One examination; every run of the step is on fresh copies, and with the same random numbers."""

    model: nn.Module
    optimizer: Optimizer
    step: UserStep
    again: Undo
    tolerance: float
    keywords: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    reference: _Trial = field(init=False)

    def _try(self, level: str, keywords: Mapping[str, Any], rounded_to: Iterable[torch.dtype] = ()) -> _Trial:
        """Run the step once; ``rounded_to`` are the 16-bit types whose rounding errors are weighed."""
        clone = float32_copy(self.model)
        twin = copy_of_optimizer(self.optimizer, dict(zip(self.model.parameters(), clone.parameters(), strict=True)))
        before = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
        with CastsOff(), at_level([clone], [twin], *resolve(level, keywords)) as session:
            watch = OverflowWatch(clone, rounded_to)
            trial = _Trial(clone, watch, _damaged(before, dict(clone.named_buffers())))
            step = twin.step

            def taking(_: Any, *args: Any, **kwargs: Any) -> Any:
                trial.take_gradients()
                return step(*args, **kwargs)

            # Bound, as schedulers want it.
            vars(twin)["step"] = types.MethodType(taking, twin)
            self.again()
            with kept_from_running(self.model, "mpinit.suggest", _ADVICE), watch, torch.enable_grad():
                loss = self.step(clone, twin)
                if watch.batch is None:
                    raise ValueError(
                        "step(model, optimizer) did not run the model it was given: it has to use its arguments"
                    )
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise TypeError(
                        f"step(model, optimizer) must return the loss, a tensor of one number, not {loss!r:.80}"
                    )
                if not watch.went_backward and loss.requires_grad:
                    with session.losses.scaled(loss, [twin], 0, False) as scaled_loss:
                        scaled_loss.backward()
            trial.loss = float(loss.detach())
            if not trial.gradients:
                trial.take_gradients()
        return trial

    def _run_at(self, level: str, keywords: Mapping[str, Any], keep: Sequence[str]) -> tuple[_Trial, Run]:
        given = self._with_scale(level, keywords)
        kept = [*(given.pop("keep_fp32", None) or ()), *keep]
        trial = self._try(level, given | ({"keep_fp32": kept} if kept else {}))
        inputs, expected = trial.watch.batch or [], self.reference.watch.batch or []
        same = len(inputs) == len(expected) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=0.02, atol=1e-3, equal_nan=True)
            for a, b in zip(inputs, expected, strict=True)
        )
        if not same:
            raise ValueError(
                "step(model, optimizer) gave the model another batch than the time before: let it use one batch, drawn "
                "before mpinit.suggest is called"
            )
        result = _compare(trial, self.reference, self.tolerance, level, tuple(keep))
        self.runs.append(result)
        return trial, result

    def _with_scale(self, level: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """A dynamic scale is put where it would settle: overflows on the way there are no fault."""
        if resolve(level, keywords)[1].loss_scale != "dynamic":
            return dict(keywords)
        largest = max(self.reference.watch.largest_gradient, 1e-30)
        scale = 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / _HEADROOM / largest))
        return dict(keywords) | {"loss_scale": min(max(scale, _SMALLEST_SCALE), _LARGEST_SCALE)}

    def _keywords_at(self, level: str) -> dict[str, Any]:
        session = registry.of(self.optimizer)
        if self.keywords or session is None or session.opt_level != level:
            return dict(self.keywords)
        row, given = OPT_LEVELS[level], session.properties
        names = type(row).model_fields
        return {name: getattr(given, name) for name in names if getattr(given, name) != getattr(row, name)}

    def examine(self, levels: Sequence[str]) -> Suggestion:
        types = {_lower_type(level, self._keywords_at(level)) for level in levels}
        self.reference = trial = self._try("O0", {}, {dtype for dtype in types if dtype is not None})
        is_good = trial.watch.first is None and math.isfinite(trial.loss)
        self.runs.append(Run(_FLOAT32, (), trial.loss, 0.0, 0.0, (), is_good))
        blameless = self._not_of_precision()
        if blameless is not None:
            return self._say(None, [], {}, blameless, at_fault=False)
        reasons: list[str] = []
        for level in levels:
            if len(self.runs) == _MOST_RUNS:
                reasons.append(f"{level} was not tried: give levels=({level!r},).")
                continue
            found, keywords, why = self._examine_level(level, self._keywords_at(level))
            reasons.append(why)
            if found is not None:
                return self._say(level, found, keywords, " ".join(reasons))
        reasons.append(
            "No level that was tried agrees with float32: train in float32 (O0), or mend what is named here."
        )
        return self._say(None, [], {}, " ".join(reasons))

    def _not_of_precision(self) -> str | None:
        """What is wrong in float32 already."""
        watch = self.reference.watch
        fault = watch.first
        if fault is None:
            return None if math.isfinite(self.reference.loss) else "The loss is inf or nan in float32 too."
        is_16_bit = fault.kind in ("forward", "backward")
        kind = "forced" if is_16_bit else fault.kind
        self.findings.append(Finding(kind, fault.operation if kind == "weights" else fault.module, str(fault)))
        if kind in ("forced", "cast"):
            return (
                f"{fault.where} computes in 16 bit at every level, float32 too, because the program says so, and "
                "leaves its range: take the cast out of the program."
            )
        if kind == "float32" and max(watch.peaks.values(), default=0.0) > _DIVERGED:
            return (
                "Activations have grown beyond float32: lower the learning rate, or go back to an earlier checkpoint."
            )
        return {
            "data": "The batch itself holds inf or nan: look at the data; no level helps.",
            "weights": "The weights hold inf or nan: go back to an earlier checkpoint, and lower the learning rate.",
        }.get(kind, f"float32 gives inf or nan too, in {fault.where}: precision is not at fault and no level helps.")

    def _examine_level(self, level: str, keywords: dict[str, Any]) -> tuple[list[str] | None, dict[str, Any], str]:
        trial, result = self._run_at(level, keywords, [])
        if result.agrees:
            return [], keywords, f"{level} agrees with float32 as it is."
        lower = _lower_type(level, keywords)
        sensitive = self._most_sensitive(lower, result)
        self._note_findings(level, trial, result, sensitive)
        keep = self._to_keep(lower, trial, sensitive)
        may_go_on = len(self.runs) < _MOST_RUNS
        if result.underflowing and keywords.get("loss_scale", "dynamic") != "dynamic":
            scaled = {**keywords, "loss_scale": "dynamic"}
            if may_go_on and self._run_at(level, scaled, [])[1].agrees:
                return [], scaled, f"{level} needs loss scaling: at {keywords['loss_scale']} gradients become 0."
        elif keep and may_go_on and self._run_at(level, keywords, keep)[1].agrees:
            names = ", ".join(map(repr, keep))
            return keep, keywords, f"{level} agrees with float32 with {names} kept in float32."
        first = self.findings[0].detail if self.findings else "gradients differ"
        return None, keywords, f"{level} does not do ({first})."

    def _note_findings(self, level: str, trial: _Trial, result: Run, sensitive: list[str]) -> None:
        fault = trial.watch.first
        for name in trial.damaged_buffers:
            self.findings.append(Finding("buffer", name, f"buffer {name!r} holds numbers that {level}'s type does not"))
        if fault is not None:
            self.findings.append(Finding(fault.kind, fault.module, str(fault)))
        elif result.underflowing:
            name = result.underflowing[-1]
            self.findings.append(Finding("underflow", name, f"most of the gradient of {name!r} becomes 0"))
        elif sensitive:
            detail = f"loss or gradients differ by more than {self.tolerance:g}, and rounding in {sensitive[0]!r} most"
            self.findings.append(Finding("precision", sensitive[0], f"{detail} of all"))

    def _to_keep(self, lower: torch.dtype | None, trial: _Trial, sensitive: list[str]) -> list[str]:
        """The modules that are at fault; empty where none can be kept in float32."""
        seen, fault = self.reference.watch, trial.watch.first
        largest = torch.finfo(lower or torch.float32).max
        wanted = [name.rpartition(".")[0] for name in trial.damaged_buffers]
        if fault is not None and fault.module is not None:
            wanted.append(fault.module)
        wanted += [name for name, peak in seen.peaks.items() if name and peak > largest]
        found = [] if wanted else sensitive
        for name in wanted:
            # What a module returns leaves it in 16 bits: where that is too large, what is around it is kept.
            while name and seen.result_peaks.get(name, 0.0) > largest:
                name = name.rpartition(".")[0]
            found.append(name)
        return [n for n in dict.fromkeys(found) if n and not any(n.startswith(f"{other}.") for other in found if other)]

    def _most_sensitive(self, lower: torch.dtype | None, result: Run) -> list[str]:
        """The modules whose rounding moves the loss most: as few as leave half of what is tolerated to the others."""
        rows = {} if lower is None else self.reference.watch.sensitivity[lower]
        error = max(result.loss_error, result.gradient_error, self.tolerance)
        left = sum(rows.values())
        tolerated = left * self.tolerance / (2 * (error if math.isfinite(error) else 1.0))
        found = []
        for name, moved in sorted(rows.items(), key=lambda item: -item[1]):
            if left <= tolerated:
                break
            left -= moved
            if name:
                found.append(name)
        return found

    def _say(
        self, level: str | None, keep: list[str], keywords: dict[str, Any], reason: str, at_fault: bool = True
    ) -> Suggestion:
        kept = [*(keywords.get("keep_fp32") or ()), *keep]
        words = {**keywords, "keep_fp32": kept} if kept else keywords
        found = tuple(self.findings)
        return Suggestion(level, keep, words, reason, found, tuple(self.runs), at_fault and bool(found))


def _lower_type(level: str, keywords: Mapping[str, Any]) -> torch.dtype | None:
    return resolve(level, keywords)[1].lower_precision_type
