"""Suggestions: what a model needs to train in 16 bit as it does in float32, and the runs that show it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from .trials import STEPS


@dataclass(frozen=True)
class Finding:
    """A cause, and where it is.

    Attributes:
        kind: "forward", "backward" (an operation left the range of the 16-bit type in that pass), "cast" (a cast in the
            program did), "forced" (an operation that the program runs in 16 bit did, at every level), "buffer" (a
            buffer that the 16-bit type cannot hold), "input" (an input that must not be rounded), "underflow"
            (gradients that become 0), "precision" (too few digits), "float32" (inf or nan made in float32), "data",
            "weights".
        where: dotted name of the module, of the buffer or parameter where the kind is about one, or the input's name;
            "" is the model itself, None what is outside of it.
        detail: the operation and the numbers it was given, in words.
        hint: the usual cure, in words; "" where there is none.
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
        level: what the copy was initialised at; "float32" is the reference.
        keep_fp32: the modules kept in float32.
        keep_inputs: the inputs that were not cast.
        loss: of the first step that was done; nan where none was.
        loss_error: of that loss, relative to the reference.
        gradient_error: of all gradients of that step together, relative to the reference; inf where one is inf or nan.
        training_error: how far the losses of the next steps stay behind the reference's, relative to what training
            takes off the reference's loss; below 0 where they are ahead.
        skipped: steps that were skipped, those in which a dynamic scale comes down at the beginning included.
        underflowing: parameters most of whose gradient is 0 here and not in the reference, in modules of which that is
            true of every parameter (a bias in front of a norm has no gradient but rounding errors).
        agrees: whether steps are done, training keeps up within the tolerance, and no gradient is lost.
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
    """What :func:`mpinit.suggest` found.

    Attributes:
        level: the level to use; None where no level that was asked for agrees with float32.
        keep_fp32: the modules with which it does, as names and patterns, beside what the model was initialised with.
        keywords: everything to give to ``initialize`` beside the level.
        reason: why, in words.
        findings: what is wrong, the first cause in front; empty for a healthy model.
        runs: every run, in order.
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
