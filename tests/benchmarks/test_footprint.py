"""Bytes of a training, at rest and at the peak, as arithmetic says.

Below the public face: the sizes of buckets are constants of the masters.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import run_code
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mpinit  # noqa: E402
from benchmarks import footprint  # noqa: E402
from benchmarks.footprint import Level, trace  # noqa: E402
from benchmarks.protocol import Interpreters  # noqa: E402
from benchmarks.setting_up import Initialize  # noqa: E402
from mpinit.masters import float_split, split  # noqa: E402
from mpinit.optimizer import scope  # noqa: E402

CPU = torch.device("cpu")


BYTES = {
    "fp32": (4, 0, 4, 8),
    "amp_fp16": (4, 0, 4, 8),
    "hand_fp16": (2, 4, 6, 8),
    "o2_fp16": (2, 4, 4, 8),
    "o2_bf16": (2, 4, 4, 8),
    "o2_split": (2, 2, 2, 8),
    "o2_split_bf16": (2, 2, 2, 4),
    "o2_int8": (2, 2, 2, 2.1),
    "o2_released": (2, 2, 0, 2.1),
    "o3_bf16": (2, 0, 2, 4),
}


# In a process of its own, as the benchmarks do: masters are all tensors that are left. Of this size the
# buffer of one tensor does not stay from step to step.
HELD = """
from benchmarks import footprint
from benchmarks.training import MemoryUse
case = MemoryUse("memory", {name!r}, {{"tensors": 2, "side": 1536}}, "cpu")
case.prepare()
facts = case.bytes_after_backward()
print(*[round(facts["bytes_" + kind] / case.training.parameters(), 1) for kind in footprint.KINDS])
"""


@pytest.mark.long
@pytest.mark.parametrize("name", BYTES)
def test_bytes_held_after_backward_are_what_arithmetic_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = run_code(HELD.format(name=name))
    assert done.returncode == 0, done.stderr
    assert tuple(map(float, done.stdout.split())) == BYTES[name]


# Bytes per parameter. Above the sum are one or two gradients during the backward pass, of a sixteenth each; and buckets
# of four bytes here, one of masters and gradients and one of states, with a tensor's temporaries.
PEAKS = {"fp32": (16, 16.5), "o2_bf16": (18, 19), "o2_split": (14 + 4, 19), "o2_int8": (8 + 4 + 4, 18)}
# The system counts pages of the whole process, and not at one moment: half a byte a parameter, in a model of this size.
INEXACT = 2_000_000


@pytest.mark.long
def test_peak_is_the_footprint_and_one_bucket() -> None:
    start = {"workload": "memory", "size": "quick", "device": "cpu", "patience_s": 60.0}
    with Interpreters(()) as interpreters:
        interpreters.ask(0, list(PEAKS), start=start)
        interpreters.ask(0, list(PEAKS), turn=1, untimed=0)
        answers = interpreters.ask(0, list(PEAKS), first=True)
    for name, answer in answers.items():
        facts, (least, most) = answer["facts"], PEAKS[name]
        numbers = facts["parameters"]
        assert least * numbers - INEXACT <= facts["peak_bytes"] <= most * numbers + INEXACT, (name, facts)


def test_a_peak_is_that_of_the_work_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = footprint.bytes_now(CPU)
    torch.zeros(40_000_000)
    peak = footprint.peak_of(lambda: torch.ones(10_000_000), CPU)
    assert peak is not None and 38_000_000 <= peak - before <= 60_000_000
    monkeypatch.setattr(footprint, "_RESET_PEAK", tmp_path / "no folder" / "clear_refs")
    assert footprint.peak_of(lambda: None, CPU) is None


def test_levels_follow_allocations_through_stages() -> None:
    kept: list[torch.Tensor] = []

    def first() -> None:
        kept.append(torch.zeros(1000))

    def second() -> None:
        torch.zeros(3000)

    levels = footprint.trace([first, second, kept.clear, lambda: None], CPU)
    assert [(level.start, level.peak) for level in levels] == [(0, 4000), (4000, 16000), (4000, 4000), (0, 0)]


@pytest.mark.long
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_initialize_peaks_within_the_footprint_and_one_parameter(weights: torch.dtype) -> None:
    from_float32 = weights is torch.float32
    for level, final in (("o2", 6), ("o2_split", 4), ("o3", 2)):
        facts = Initialize(level, {"layers": 32, "side": 32}, "cpu", weights).facts(first=True)
        before, after, peak, parameters = (
            int(facts[name]) for name in ("bytes_before", "bytes_after", "bytes_peak", "parameters")
        )
        assert after / parameters == pytest.approx(final, rel=0.05)
        assert before / parameters == pytest.approx(weights.itemsize, rel=0.05)
        # Splitting a float32 weight takes a second temporary of its size.
        allowed = 4 * 32 * 32 + (4 * 32 * 32 + 64 if from_float32 and level == "o2_split" else 0)
        # Until set-up has succeeded O3 keeps what it casts: the 16-bit weights, and counters, come beside it.
        allowed += 2 * parameters + 64 if level == "o3" else 0
        assert peak - max(before, after) <= allowed, facts


BUCKET = 4 * 2**20
SIDE = 256
# 8 bytes per parameter, of a master and its gradient or of two states.
IN_A_BUCKET = BUCKET // (8 * SIDE**2)
COUNT = 4 * IN_A_BUCKET
# What is worked on at a time where it is not compiled: by splitting, and by encodings, a few times over.
SPLIT_CHUNK, CHUNKS = 4 * float_split._CHUNK, 4 * 2**20
SPLIT: dict[str, Any] = {"master_weights": "split"}
# With which properties, and how many buffers of a bucket there are.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "split": (SPLIT, 1),
    "bfloat16": (SPLIT | {"optimizer_state": "bfloat16"}, 2),
    "int8": (SPLIT | {"optimizer_state": "int8"}, 2),
    "full, int8": ({"optimizer_state": "int8"}, 1),
}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "BUCKET_BYTES", BUCKET)


def step_traced(properties: dict[str, Any]) -> Level:
    """The fourth step of Adam: the first makes states, the second lays their codes together."""
    model = nn.ParameterList(torch.full((SIDE, SIDE), 0.5) for _ in range(COUNT))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    mpinit.initialize(model, optimizer, "O5", **properties)
    for weight in model:
        weight.grad = torch.full_like(weight, 1e-3, dtype=weight.grad_dtype or weight.dtype)
    optimizer.step()
    optimizer.step()
    levels = trace([optimizer.step, optimizer.step, lambda: None], torch.device("cpu"))
    assert levels[2].start - levels[1].start <= 4096  # of the step nothing remains
    mpinit.undo(model)
    return levels[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_peaks_within_the_footprint_and_one_bucket(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A buffer that stays from step to step would not be seen to be allocated.
    monkeypatch.setattr(split, "_KEPT_BYTES", 0)
    properties, buffers = KINDS[kind]
    level = step_traced(properties)
    chunks = CHUNKS if "optimizer_state" in properties else SPLIT_CHUNK
    assert buffers * BUCKET <= level.peak - level.start <= buffers * BUCKET + chunks
    # All at once, in float32, would take this much.
    assert COUNT * SIDE**2 * 8 * buffers > 2 * (level.peak - level.start)


def test_initialize_needs_memory_of_masters_and_one_piece() -> None:
    model = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    initialize = functools.partial(mpinit.initialize, model, optimizer, "O5", master_weights="split")
    (level,) = trace([initialize], torch.device("cpu"))
    assert level.peak <= 4 * 2048**2 + 2 * 4 * split._PIECE + 4096


@pytest.mark.long
def test_split_step_keeps_at_most_one_bucket() -> None:
    level = step_traced(SPLIT)
    # It was there before.
    assert level.peak - level.start <= SPLIT_CHUNK
    assert BUCKET <= split._KEPT_BYTES
