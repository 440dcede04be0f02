"""The goals: the largest ratio of times of two contenders, or the longest time of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .estimate import Estimate, seconds
from .loop_figures import GOAL
from .loops import CLIPPING, loop_rows
from .results import Results


@dataclass(frozen=True)
class Comparison:
    """A goal.

    Attributes:
        title: the text in tables.
        workload: the name of the workload.
        above, below: the contenders whose times are divided; with ``kind`` "time" only ``above`` is used.
        goal: the largest figure that meets the goal.
        kind: "ratio", or "time" in milliseconds.
        least: the smallest figure that meets the goal.
    """

    title: str
    workload: str
    above: str
    below: str
    goal: float
    kind: str = "ratio"
    least: float = 0.0

    @property
    def unit(self) -> str:
        """Return the unit of the figures."""
        return {"ratio": "", "time": " ms"}[self.kind]

    @property
    def goals(self) -> str:
        """Return the goal with its unit."""
        least = f"{self.least:.2f} to " if self.least else ""
        return f"{least}{self.goal:.2f}{self.unit}"

    def is_met_by(self, figure: float) -> bool:
        """Return whether a figure meets the goal, in the digits that are shown."""
        return self.least <= round(figure, 2) <= self.goal

    def estimate(self, results: Results) -> Estimate | None:
        """Return the figure; None where a contender is missing."""
        above, below = results.rounds(self.above), results.rounds(self.below)
        if not above or not below:
            return None
        if self.kind == "time":
            return seconds(above).times(1e3)
        return results.ratio(self.above, self.below)


def _time(title: str, workload: str, contender: str, goal_ms: float) -> Comparison:
    return Comparison(title, workload, contender, contender, goal_ms, "time")


def _clipping() -> Iterator[Comparison]:
    """Compare the ways to clip with each other, and mpinit's with the loop written by hand."""
    for workload, row in loop_rows().items():
        for way in row.level.ours if "clip_model" in row.extras else ():
            ours, masters, model = (f"{way}+{extra}" for extra in CLIPPING)
            title = f"{row.level.title}{' split' if way.endswith('split') else ''}, clipping"
            by_hand = f"{row.level.by_hand}+clip_model"
            yield Comparison(f"{title}: mpinit's / by hand", workload, ours, by_hand, GOAL)
            yield Comparison(f"{title}: mpinit's / model.parameters()", workload, ours, model, 1.05, least=0.95)
            yield Comparison(f"{title}: master_params / model.parameters()", workload, masters, model, 1.05, least=0.95)


_NETWORKS: Final = ("bert", "resnet", "wide", "unet", "lstm")
COMPARISONS: Final = (
    Comparison("O2 / hand-written O2, fp16", "launch", "o2_fp16", "hand_fp16", 1.00),
    Comparison("O5 / hand-written O2, bf16", "launch", "o2_bf16", "hand_bf16", 1.00),
    Comparison("O2 / hand-written O2, fp16", "bandwidth", "o2_fp16", "hand_fp16", 1.00),
    Comparison("O5 / hand-written O2, bf16", "bandwidth", "o2_bf16", "hand_bf16", 1.00),
    *(Comparison("O5 / hand-written O2, bf16", name, "o2_bf16", "hand_bf16", 1.00) for name in _NETWORKS),
    Comparison("masters in the model / full masters, bf16", "launch", "o2_model", "o2_bf16", 1.10),
    Comparison("O1 / torch.amp, fp16", "o1_linear", "o1_fp16", "amp_fp16", 1.03),
    Comparison("O4 / torch.amp, bf16", "o1_linear", "o1_bf16", "amp_bf16", 1.03),
    Comparison("O1 / torch.amp, fp16", "launch", "o1_fp16", "amp_fp16", 1.10),
    Comparison("O4 / torch.amp, bf16", "launch", "o1_bf16", "amp_bf16", 1.10),
    Comparison("O1 / torch.amp with LayerNorm in float32, fp16", "launch", "o1_fp16", "amp_norms_fp16", 1.10),
    Comparison("O4 / torch.amp with LayerNorm in float32, bf16", "launch", "o1_bf16", "amp_norms_bf16", 1.10),
    *(
        Comparison(f"{what} / full masters", workload, name, "o2_bf16", goal)
        for workload, goal in (*(("bandwidth", 1.35), ("bandwidth_foreach", 1.35), ("bandwidth_small", 1.35)),)
        for what, name in (
            ("split", "o2_split"),
            ("split, bf16 states", "o2_split_bf16"),
            ("split, int8 states", "o2_int8"),
        )
    ),
    Comparison("split / full masters", "bandwidth_sgd", "o2_split", "o2_bf16", 1.35),
    Comparison("split, int8 states / full masters", "bandwidth_sgd", "o2_int8", "o2_bf16", 4.00),
    *(
        Comparison(f"{what} / full masters, without native code", workload, name, "o2_eager", goal)
        for workload in ("bandwidth_eager", "bandwidth_sgd")
        for what, name, goal in (("split", "o2_split_eager", 2.50), ("split, int8 states", "o2_int8_eager", 10.00))
    ),
    Comparison("compiled O4 / torch.amp, bf16", "compiled", "o1_bf16", "amp_bf16", 1.03),
    Comparison("compiled O5 / torch.amp, bf16", "compiled", "o2_bf16", "amp_bf16", 1.00),
    Comparison("compiled O1 / torch.amp, fp16", "compiled", "o1_fp16", "amp_fp16", 1.03),
    Comparison("compiled O2 / torch.amp, fp16", "compiled", "o2_fp16", "amp_fp16", 1.00),
    *_clipping(),
    _time("initialize at O2", "initialize", "o2", 30.0),
    _time("initialize at O1", "initialize", "o1", 30.0),
    _time("import mpinit behind import torch", "import", "mpinit", 200.0),
)
