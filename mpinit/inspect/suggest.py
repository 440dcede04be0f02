"""``mpinit.suggest``: train copies in float32 and in 16 bits, and find a configuration with which the losses agree."""

import fnmatch
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from .. import registry
from ..settings.properties import OPT_LEVELS
from ..settings.resolve import resolve
from .copies import same_random_numbers
from .overflow import OverflowWatch
from .suggestion import Finding, Run, Suggestion
from .trials import Trial, Trials, UserStep

# No activation of a network that trains is this large.
_DIVERGED: Final = 1e15
# A parameter underflows if this share of the gradient's elements is 0 here and not in float32.
_UNDERFLOW_SHARE: Final = 0.5
# If float32 training decreases the loss by a smaller share than this, losses show too little, and gradients have to
# agree within the tolerance.
_LEAST_DECREASE: Final = 0.02
# The largest relative error of gradients where losses agree. Rounding noise averages out over steps, but a gradient
# with a larger error is mostly noise.
_MOST_NOISE: Final = 0.5
_FLOAT32: Final = "float32"
_LAST_LEVEL: Final = "O5"
# How many runs at one level try to keep further modules in float32.
_MOST_ATTEMPTS: Final = 3


def suggest(
    model: nn.Module,
    optimizer: Optimizer,
    step: UserStep,
    levels: Sequence[str] = ("O2", "O5"),
    *,
    tolerance: float = 0.2,
    **keywords: Any,
) -> Suggestion:
    """Find the configuration with which a model trains in 16 bits as it does in float32.

    It trains copies for 8 steps: in float32, and at each level with the level's own loss scale. A level agrees if its
    steps are not skipped, the loss decreases as in float32, and no gradient is lost.

    If a level does not agree, ``suggest`` searches for the first operation that overflowed. Then it tries to keep
    inputs or modules in float32: first it trains in float32 with rounded inputs, to find those that must not be
    rounded, then at the level with ``keep_inputs`` or ``keep_fp32``. Modules of one kind, such as ``blocks.*.attn``,
    are kept together. O5 is always tried before float32 is advised.

    Model, optimizer, gradients and random numbers do not change, also after an exception. A step that uses the
    originals in place of its arguments is refused; an error names the tensors to which it wrote by hand, which are not
    restored. Every run starts with the same random numbers.

    Args:
        model, optimizer: a model and its optimizer, initialised or not. Each run needs the memory of a copy.
        step: a function ``step(model, optimizer)`` that computes the loss of one batch with its arguments and returns
            it. It must use the same batch each time. It may also call ``scale_loss``, ``backward`` and
            ``optimizer.step``; calls that it does not make are made here.
        levels: the levels to try, in this order; the first that agrees is suggested. Default ("O2", "O5").
        tolerance: the largest relative error of the first loss, and of the decrease of the loss. Default 0.2.
        **keywords: arguments of ``initialize`` for every level. Default: those that the model was initialised with, at
            its own level.

    Returns:
        The suggestion, with ``level``, ``keep_fp32``, ``reason``, ``findings``; printed, a table of the runs.

    Raises:
        ValueError: there is no such level; ``step`` uses another batch each time, or does not use its arguments; or the
            optimizer has parameters that are not the model's.
        TypeError: ``step`` does not return a loss, or cannot be called with a model and an optimizer.

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
            f"suggest needs a model, an optimizer and a step, not {type(model).__name__} and {type(optimizer).__name__}"
        )
    if not levels or isinstance(levels, str):
        raise ValueError(f"levels={levels!r}: pass a tuple of levels, such as ('O2', 'O5')")
    for level in levels:
        resolve(level, keywords)
    _check_step(step, model, optimizer)
    with same_random_numbers() as restore_random_numbers:
        trials = Trials(model, optimizer, step, restore_random_numbers)
        return _Examination(trials, tolerance, keywords).run(levels)


def _check_step(step: Any, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a step that cannot be called with a model and an optimizer."""
    try:
        signature = inspect.signature(step)
    except ValueError:
        return  # a builtin function, which has no signature to read
    except TypeError:
        raise TypeError(f"step must be a function of a model and an optimizer, not {type(step).__name__}") from None
    try:
        signature.bind(model, optimizer)
    except TypeError as error:
        raise TypeError(
            f"step is called as step(model, optimizer), on copies of both: {error}. Write it with these two parameters "
            "instead of your own objects, and let it return the loss"
        ) from None


@dataclass(frozen=True)
class _Added:
    """Arguments that are added to those of a level, so that the level agrees with float32."""

    keep_fp32: tuple[str, ...] = ()
    keep_inputs: tuple[str, ...] = ()
    loss_scale: str | None = None

    def merged_into(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return keywords with these arguments in them."""
        words = dict(keywords)
        for name, more in (("keep_fp32", self.keep_fp32), ("keep_inputs", self.keep_inputs)):
            if more:
                words[name] = [*_listed(words.get(name)), *more]
        return words if self.loss_scale is None else {**words, "loss_scale": self.loss_scale}

    def __str__(self) -> str:
        parts = []
        if self.keep_fp32:
            parts.append(f"{', '.join(map(repr, self.keep_fp32))} kept in float32")
        if self.keep_inputs:
            noun = "input" if len(self.keep_inputs) == 1 else "inputs"
            parts.append(f"{noun} {', '.join(map(repr, self.keep_inputs))} not cast")
        return " and ".join(parts)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) or callable(value) else list(value)


@dataclass
class _Examination:
    """One call of :func:`suggest`.

    Attributes:
        trials: trains the copies.
        runs, findings: what was found so far.
        reference: the trial in float32.
    """

    trials: Trials
    tolerance: float
    keywords: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    reference: Trial = field(init=False)

    @property
    def seen(self) -> OverflowWatch:
        """The record of the first step in float32."""
        assert self.reference.watch is not None
        return self.reference.watch

    def run(self, levels: Sequence[str]) -> Suggestion:
        """Try the levels in their order."""
        types = {_lower_type(level, self._keywords_at(level)) for level in (*levels, _LAST_LEVEL)}
        narrow = [dtype for dtype in types if dtype is not None]
        self.reference = trial = self.trials.run("O0", {}, watched=narrow)
        loss = trial.losses[0] if trial.losses else math.nan
        self.runs.append(Run(_FLOAT32, (), loss, 0.0, 0.0, (), not self.seen.reached_results and math.isfinite(loss)))
        fault = self._fault_of_float32()
        if fault is not None:
            return self._report(None, _Added(), {}, fault, at_fault=False)
        reasons: list[str] = []
        for level in levels:
            keywords = self._keywords_at(level)
            added, why = self._examine_level(level, keywords)
            reasons.append(why)
            if added is not None:
                return self._report(level, added, keywords, " ".join([*reasons, *self._hints()]))
        if _LAST_LEVEL not in levels:
            added, why = self._examine_level(_LAST_LEVEL, self._keywords_at(_LAST_LEVEL))
            reasons.append(why)
            if added is not None:
                names = f"levels={tuple(levels)!r}"
                reasons.append(f"Use {_LAST_LEVEL}, which is not in {names}, or change the operation named here.")
                return self._report(None, _Added(), {}, " ".join([*reasons, *self._hints()]))
        reasons.append(
            f"{_LAST_LEVEL} was tried, and does not agree with float32 either: train in float32 (O0), or change the "
            "operation named here."
        )
        return self._report(None, _Added(), {}, " ".join([*reasons, *self._hints()]))

    def _keywords_at(self, level: str) -> dict[str, Any]:
        session = registry.of(self.trials.optimizer)
        if self.keywords or session is None or session.opt_level != level:
            return dict(self.keywords)
        row, own = OPT_LEVELS[level], session.properties
        names = type(row).model_fields
        return {name: getattr(own, name) for name in names if getattr(own, name) != getattr(row, name)}

    def _fault_of_float32(self) -> str | None:
        """Describe the fault if the loss or gradients are inf or nan in float32 already; None if they are finite."""
        watch = self.seen
        fault = watch.first
        if fault is None:
            return None if self.runs[0].agrees else "The loss is inf or nan in float32 too."
        is_16_bit = fault.kind in ("forward", "backward")
        kind = "forced" if is_16_bit else fault.kind
        where = fault.operation if kind == "weights" else fault.module
        self.findings.append(Finding(kind, where, fault.text, fault.hint))
        if kind in ("forced", "cast"):
            return (
                f"{fault.where} computes in 16 bits at every level, even in float32, because your code casts there, "
                "and a number overflows: remove the cast from your code."
            )
        if kind == "float32" and max(watch.peaks.values(), default=0.0) > _DIVERGED:
            return (
                "Activations have grown beyond float32: lower the learning rate, or go back to an earlier checkpoint."
            )
        return {
            "data": "The batch itself contains inf or nan: check the data; no level helps.",
            "weights": "The weights contain inf or nan: go back to an earlier checkpoint, and lower the learning rate.",
        }.get(kind, f"float32 computes inf or nan too, in {fault.where}: precision is not at fault and no level helps.")

    def _examine_level(self, level: str, keywords: dict[str, Any]) -> tuple[_Added | None, str]:
        """Return the arguments with which a level agrees with float32, or None, and a sentence for the report."""
        added = _Added()
        trial, result = self._run_at(level, keywords, added)
        if result.agrees:
            return added, f"{level} agrees with float32 as it is."
        lower = _lower_type(level, keywords)
        watch = self._watched(level, keywords, trial, added)
        sensitive = self._most_sensitive(lower, result)
        inputs = self._inputs_at_fault(lower)
        self._record_findings(level, trial, result, watch, sensitive, inputs)
        first = self.findings[0].detail if self.findings else "the loss decreases less"
        failed = f"{level} does not agree with float32 ({first})."
        if result.underflowing and keywords.get("loss_scale", "dynamic") != "dynamic":
            added = _Added(loss_scale="dynamic")
            if self._run_at(level, keywords, added)[1].agrees:
                return added, f"{level} needs loss scaling: at {keywords['loss_scale']} gradients become 0."
            return None, failed
        if inputs:
            added = _Added(keep_inputs=tuple(inputs))
            if self._agrees_with(level, keywords, added):
                return added, f"{level} agrees with float32 with {added}."
        kept: tuple[str, ...] = ()
        for _ in range(_MOST_ATTEMPTS):
            new = [name for name in self._to_keep(lower, trial, watch, sensitive) if name not in kept]
            if not new:
                break
            kept = (*kept, *new)
            added = _Added(kept, added.keep_inputs)
            try:
                trial, result = self._run_at(level, keywords, added)
            except (RuntimeError, TypeError):  # the model's own code mixes dtypes
                break
            if result.agrees:
                return added, f"{level} agrees with float32 with {added}."
            watch = self._watched(level, keywords, trial, added)
        return None, failed

    def _agrees_with(self, level: str, keywords: dict[str, Any], added: _Added) -> bool:
        try:
            return self._run_at(level, keywords, added)[1].agrees
        except (RuntimeError, TypeError):  # an operation on the float32 input and a 16-bit weight
            return False

    def _run_at(self, level: str, keywords: Mapping[str, Any], added: _Added) -> tuple[Trial, Run]:
        trial = self.trials.run(level, added.merged_into(keywords))
        self._check_inputs(trial)
        result = self._compare(trial, level, added)
        self.runs.append(result)
        return trial, result

    def _watched(self, level: str, keywords: Mapping[str, Any], trial: Trial, added: _Added) -> OverflowWatch:
        """Watch one step at the scale of the trial's first step that was not skipped.

        At the larger scales before it gradients overflow in healthy models, too.
        """
        words = added.merged_into(keywords)
        if trial.scale is not None:
            words["loss_scale"] = trial.scale
        watch = self.trials.run(level, words, steps=1, watched=()).watch
        assert watch is not None
        return watch

    def _check_inputs(self, trial: Trial) -> None:
        inputs, expected = trial.inputs or [], self.reference.inputs or []
        same = len(inputs) == len(expected) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=0.02, atol=1e-3, equal_nan=True)
            for a, b in zip(inputs, expected, strict=True)
        )
        if not same:
            raise ValueError(
                "step(model, optimizer) passed the model another batch than in the float32 run: let it use one batch, "
                "drawn before mpinit.suggest is called"
            )

    def _compare(self, trial: Trial, level: str, added: _Added) -> Run:
        expected, tolerance = self.reference, self.tolerance
        loss = trial.losses[0] if trial.losses else math.nan
        loss_error = math.inf
        if math.isfinite(loss):
            # The relative error of a loss near 0 would be large for any small difference.
            loss_error = abs(loss - expected.losses[0]) / max(abs(expected.losses[0]), 0.1)
        gradient_error = _gradient_error(trial.gradients, expected.gradients)
        training_error, is_clear = _training_error(trial.losses, expected.losses)
        lost = _lost_gradients(trial.gradients, expected.gradients)
        trains_alike = training_error <= tolerance and gradient_error <= (_MOST_NOISE if is_clear else tolerance)
        agrees = loss_error <= tolerance and trains_alike and not lost
        skipped = sum(trial.skips)
        kept = added.keep_fp32, loss, loss_error, gradient_error, lost, agrees
        return Run(level, *kept, added.keep_inputs, training_error, skipped)

    def _inputs_at_fault(self, lower: torch.dtype | None) -> list[str]:
        """Return the names of the inputs whose rounding changes a run that is otherwise in float32."""
        names = list(dict.fromkeys(self.reference.input_names))
        if lower is None or not names or self._agrees_with_rounded(lower, names):
            return []
        return [name for name in names if not self._agrees_with_rounded(lower, [name])] or names

    def _agrees_with_rounded(self, lower: torch.dtype, names: Sequence[str]) -> bool:
        """Return whether a float32 run with some inputs rounded agrees with one without."""
        trial = self.trials.run("O0", {}, rounded=(lower, names))
        return self._compare(trial, _FLOAT32, _Added()).agrees

    def _record_findings(
        self,
        level: str,
        trial: Trial,
        result: Run,
        watch: OverflowWatch,
        *causes: list[str],
    ) -> None:
        sensitive, inputs = causes
        fault = watch.first
        for name in inputs:
            self.findings.append(Finding("input", name, f"input {name!r} must not be rounded to {level}'s type"))
        for name in trial.damaged_buffers:
            self.findings.append(
                Finding("buffer", name, f"buffer {name!r} has numbers that {level}'s dtype cannot store")
            )
        if fault is not None:
            self.findings.append(Finding(fault.kind, fault.module, fault.text, fault.hint))
        elif result.underflowing:
            name = result.underflowing[-1]
            self.findings.append(Finding("underflow", name, f"most of the gradient of {name!r} becomes 0"))
        elif sensitive and not self.findings:
            detail = f"training differs from float32 by more than {self.tolerance:g}, and rounding in {sensitive[0]!r}"
            self.findings.append(Finding("precision", sensitive[0], f"{detail} changes the loss most"))

    def _to_keep(
        self, lower: torch.dtype | None, trial: Trial, watch: OverflowWatch, sensitive: list[str]
    ) -> list[str]:
        """Return the modules that are at fault, and others of their kind; empty if only the whole model is."""
        seen, fault = self.seen, watch.first
        largest = torch.finfo(lower or torch.float32).max
        wanted = [name.rpartition(".")[0] for name in trial.damaged_buffers]
        if fault is not None and fault.module is not None:
            wanted.append(fault.module)
        wanted += [name for name, peak in seen.peaks.items() if name and peak > largest]
        found = [] if wanted else list(sensitive)
        for name in wanted:
            # A module's output is cast to 16 bits. If it overflows there, the module around it is kept as well.
            while name and seen.result_peaks.get(name, 0.0) > largest:
                name = name.rpartition(".")[0]
            found.append(name)
        tops = [n for n in dict.fromkeys(found) if n and not any(n.startswith(f"{other}.") for other in found if other)]
        return list(dict.fromkeys(entry for name in tops for entry in _of_one_kind(self.trials.model, name)))

    def _most_sensitive(self, lower: torch.dtype | None, result: Run) -> list[str]:
        """Return the modules whose rounding changes the loss most, largest first.

        The list ends when the rounding of all other modules together changes the loss by less than half the tolerance.
        """
        rows = {} if lower is None else self.seen.sensitivity[lower]
        error = max(result.loss_error, result.gradient_error, result.training_error, self.tolerance)
        remaining = sum(rows.values())
        tolerated = remaining * self.tolerance / (2 * (error if math.isfinite(error) else 1.0))
        found = []
        for name, moved in sorted(rows.items(), key=lambda item: -item[1]):
            if remaining <= tolerated:
                break
            remaining -= moved
            if name:
                found.append(name)
        return found

    def _hints(self) -> list[str]:
        hint = self.findings[0].hint if self.findings else ""
        return [f"Hint: {hint}."] if hint else []

    def _report(
        self, level: str | None, added: _Added, keywords: dict[str, Any], reason: str, at_fault: bool = True
    ) -> Suggestion:
        found = tuple(self.findings)
        words = added.merged_into(keywords)
        return Suggestion(
            level, list(added.keep_fp32), words, reason, found, tuple(self.runs), at_fault and bool(found)
        )


def _gradient_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the error of all gradients together, relative to their norm."""
    squared_error = squared_norm = 0.0
    for name, gradient in expected.items():
        mine = found.get(name)
        if mine is not None and not bool(torch.isfinite(mine).all()):
            return math.inf
        squared_norm += float(gradient.double().square().sum())
        difference = gradient if mine is None else mine.double() - gradient.double()
        squared_error += float(difference.double().square().sum())
    return math.sqrt(squared_error / squared_norm) if squared_norm > 0 else 0.0


def _lost_gradients(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the parameters most of whose gradient became 0, in modules where that is true of every parameter."""
    of_module: dict[str, list[tuple[str, bool]]] = {}
    for name, gradient in expected.items():
        mine = found.get(name, torch.zeros_like(gradient))
        is_expected = gradient != 0
        if bool(is_expected.any()):
            is_lost = float((mine[is_expected] == 0).double().mean()) >= _UNDERFLOW_SHARE
            of_module.setdefault(name.rpartition(".")[0], []).append((name, is_lost))
    return tuple(name for rows in of_module.values() if all(is_lost for _, is_lost in rows) for name, _ in rows)


def _training_error(losses: Sequence[float], expected: Sequence[float]) -> tuple[float, bool]:
    """Compare the decrease of losses with the expected decrease.

    Returns:
        By how much less the losses decrease, relative to the expected decrease; and whether that decrease is large
        enough to compare with.
    """
    if not losses or not all(map(math.isfinite, losses)) or len(losses) < len(expected):
        return math.inf, True
    if len(expected) < 2:
        return 0.0, False
    count = len(expected) - 1
    decrease = sum(expected[0] - loss for loss in expected[1:]) / count
    pairs = zip(losses[1 : len(expected)], expected[1:], strict=True)
    missing = sum((mine - losses[0]) - (loss - expected[0]) for mine, loss in pairs) / count
    least = _LEAST_DECREASE * max(abs(expected[0]), 0.1)
    return missing / max(abs(decrease), least), abs(decrease) >= least


def _of_one_kind(model: nn.Module, name: str) -> list[str]:
    """Return a pattern, or names, of the modules of the same class whose names differ only in numbers.

    For ``blocks.0.attn`` this is ``blocks.*.attn``. A module whose own name is a number, as in an ``nn.Sequential``, is
    returned alone.
    """
    parts = name.split(".")
    if parts[-1].isdigit() or not any(part.isdigit() for part in parts):
        return [name]
    pattern = ".".join("*" if part.isdigit() else part for part in parts)
    kind = type(model.get_submodule(name))
    others = {other: module for other, module in model.named_modules() if fnmatch.fnmatchcase(other, pattern)}
    alike = [other for other, module in others.items() if type(module) is kind and len(other.split(".")) == len(parts)]
    if len(alike) == 1:
        return [name]
    return [pattern] if len(alike) == len(others) else alike


def _lower_type(level: str, keywords: Mapping[str, Any]) -> torch.dtype | None:
    return resolve(level, keywords)[1].lower_precision_type
