"""Suggestions: what a model needs to train in 16 bit as it does in float32, and the runs that show it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from .trials import STEPS


@dataclass(frozen=True)
class Finding:
    """The cause that ``suggest`` found, and its place.

    Attributes:
        kind: one of the kinds on the page docs/how-to/diagnose.md: "forward", "backward", "cast", "forced", "buffer",
            "input", "underflow", "precision", "float32", "data" or "weights".
        where: the dotted name of the module, buffer or parameter, or the input's name. "" is the model itself; None:
            outside of the model.
        detail: the operation and its inputs, as text.
        hint: the usual cure, as text; "" if there is none.
    """

    kind: str
    where: str | None
    detail: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@final
@dataclass(frozen=True)
class Run:
    """A few training steps at a level, beside the same steps in float32.

    Attributes:
        level: the level of the copy; "float32" is the reference.
        keep_fp32: the modules kept in float32.
        keep_inputs: the inputs that were not cast.
        loss: the loss of the first step that was not skipped; nan if all were.
        loss_error: the error of this loss, relative to the reference.
        gradient_error: the error of all gradients of this step together, relative to the reference; inf if one is inf
            or nan.
        training_error: the difference of the later losses from the reference's, relative to the decrease of the
            reference's loss; below 0 if they are lower.
        skipped: number of skipped steps, including those in which a dynamic scale decreases at the beginning.
        underflowing: parameters most of whose gradient is 0, but not in the reference. Only in modules where this is
            true of every parameter: a bias before a norm has rounding errors for a gradient.
        agrees: whether steps are not skipped, the loss decreases within the tolerance, and no gradient is lost.
    """

    level: str
    keep_fp32: tuple[str, ...]
    loss: float
    loss_error: float
    gradient_error: float
    underflowing: tuple[str, ...]
    agrees: bool
    keep_inputs: tuple[str, ...] = ()
    training_error: float = 0.0
    skipped: int = 0


@final
@dataclass(frozen=True)
class Suggestion:
    """The result of :func:`mpinit.suggest`.

    Attributes:
        level: the level to use; None if no level agrees with float32.
        keep_fp32: the modules to keep in float32, as names and patterns, in addition to those of the model's session.
        keywords: all arguments of ``initialize`` besides the level.
        reason: the reason, as text.
        findings: the causes, the first one first; empty for a healthy model.
        runs: all runs, in order.
        precision_is_at_fault: False if float32 itself computes inf or nan, so that no level helps.
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
        """Return the arguments to paste into ``mpinit.initialize``."""
        words = ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())
        return f"opt_level={self.level!r}" + (f", {words}" if words else "")

    def __str__(self) -> str:
        lines = [self.reason]
        lines += [f"  {finding}" for finding in self.findings]
        if self.level is not None:
            lines.append(f"  mpinit.initialize(model, optimizer, {self.to_keywords()})")
        steps = f"{STEPS} steps"
        lines.append(
            f"  {'run':<4}{'level':<9}{'loss':>10}{'error':>10}{'gradients':>11}{steps:>9}{'skipped':>9}  kept"
        )
        for index, run in enumerate(self.runs, 1):
            kept = ", ".join((*run.keep_fp32, *(f"input {name}" for name in run.keep_inputs))) or "-"
            lines.append(
                f"  {index:<4}{run.level:<9}{run.loss:>10.5g}{run.loss_error:>10.2g}{run.gradient_error:>11.2g}"
                f"{run.training_error:>9.2g}{run.skipped:>9}  {kept}{'' if run.agrees else '   (does not agree)'}"
            )
        return "\n".join(lines)
