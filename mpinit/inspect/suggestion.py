"""What the doctor says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from .faults import Fault


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
        fault: the operation, where there is one.
    """

    kind: str
    where: str | None
    detail: str
    fault: Fault | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class Run:
    """One run of the step.

    Attributes:
        level: what the copy was initialised at; "float32" is the reference.
        keep_fp32: what it kept in float32.
        loss: what came out.
        loss_error: of the loss, relative to the reference.
        gradient_error: the largest of a parameter's gradient, relative to the reference.
        agrees: whether both are within the tolerance.
    """

    level: str
    keep_fp32: tuple[str, ...]
    loss: float
    loss_error: float
    gradient_error: float
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
        tolerance: the relative error that was allowed.
        precision_is_at_fault: False where float32 itself gives inf or nan, so that no level helps.
    """

    level: str | None
    keep_fp32: list[str]
    keywords: Mapping[str, Any]
    reason: str
    findings: tuple[Finding, ...]
    runs: tuple[Run, ...]
    tolerance: float
    precision_is_at_fault: bool = field(default=True)

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
