"""Peaks of memory in a step and in ``initialize``: the footprint and one bucket.

Below the public face: the sizes of buckets are constants of the masters.
"""

import functools
from typing import Any

import pytest
import torch
from allocations import Level, trace
from torch import nn

import mpinit
from mpinit.masters import split
from mpinit.optimizer import parts


def test_levels_follow_allocations_through_stages() -> None:
    kept: list[torch.Tensor] = []

    def first() -> None:
        kept.append(torch.zeros(1000))

    def second() -> None:
        torch.zeros(3000)

    levels = trace([first, second, kept.clear, lambda: None])
    assert [(level.start, level.peak) for level in levels] == [(0, 4000), (4000, 16000), (4000, 4000), (0, 0)]


BUCKET = 4 * 2**20
SIDE = 256
# 8 bytes per parameter, of a master and its gradient or of two states.
IN_A_BUCKET = BUCKET // (8 * SIDE**2)
COUNT = 8 * IN_A_BUCKET
# What is worked on at a time where it is not compiled: by splitting, and by encodings, a few times over.
SPLIT_CHUNK, CHUNKS = 8 * split._PIECE, 4 * 2**20
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
    monkeypatch.setattr(parts, "BUCKET_BYTES", BUCKET)


def step_traced(properties: dict[str, Any]) -> Level:
    """The fourth step of Adam: the first makes states, the second lays their codes together."""
    model = nn.ParameterList(torch.full((SIDE, SIDE), 0.5) for _ in range(COUNT))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    mpinit.initialize(model, optimizer, "O5", **properties)
    for weight in model:
        weight.grad = torch.full_like(weight, 1e-3, dtype=weight.grad_dtype or weight.dtype)
    optimizer.step()
    optimizer.step()
    levels = trace([optimizer.step, optimizer.step, lambda: None])
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
    (level,) = trace([initialize])
    # Of a piece: its bits, their magnitudes, and which are nan.
    assert level.peak <= 4 * 2048**2 + (2 * 4 + 1) * split._PIECE + 4096


@pytest.mark.long
def test_split_step_keeps_at_most_one_bucket() -> None:
    level = step_traced(SPLIT)
    # It was there before.
    assert level.peak - level.start <= SPLIT_CHUNK
    assert BUCKET <= split._KEPT_BYTES
