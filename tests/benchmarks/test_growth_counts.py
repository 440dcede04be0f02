"""Counts of growth: the page and its picture are of the committed counts, and no count grows more than linearly."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import growth_counts, stamps  # noqa: E402

RESULT = json.loads(growth_counts.RESULT.read_text(encoding="utf-8"))


def test_page_and_picture_are_of_the_committed_counts() -> None:
    page = growth_counts.PAGE.read_text(encoding="utf-8")
    again = "run: python -m benchmarks.growth_counts --draw"
    assert growth_counts.replaced(page, RESULT) == page, again
    assert stamps.read(growth_counts.PICTURE) == stamps.of_text(json.dumps(RESULT, sort_keys=True)), again


@pytest.mark.parametrize("axis", ["parameters", "modules"])
def test_no_count_grows_more_than_linearly(axis: str) -> None:
    for kind, rows in RESULT[axis].items():
        at = [row[axis] for row in rows]
        assert at[-1] / at[0] >= (900 if axis == "parameters" else 100)
        for key in rows[0].keys() - {axis}:
            assert growth_counts.slope(at, [row[key] for row in rows]) <= 1.01, (kind, key)


def test_verdicts_do_not_grow_with_ranks() -> None:
    for engine, count in zip(growth_counts.ENGINES, (0, 2, 1), strict=True):
        rows = RESULT["ranks"][engine]
        assert [row["ranks"] for row in rows["mpinit"]] == list(growth_counts.RANKS)
        assert growth_counts.own(rows, "small") == growth_counts.own(rows, "collectives") == [count] * 4
        (size,) = set(growth_counts.own(rows, "bytes_of_small"))
        assert size <= 64 * count
    assert [growth_counts.sent_on_paper(60, ranks) for ranks in (1, 2, 4)] == [0, 60, 90]


def test_counts_of_today_are_about_the_committed_ones() -> None:
    """Compare the smallest sizes, without native code: some functions differ between versions of torch and Python."""
    for kind in growth_counts.KINDS:
        growth_counts.by_modules(kind, 2)
        for now, then in (
            (growth_counts.by_modules(kind, 30), RESULT["modules"][kind][1]),
            (growth_counts.by_parameters(kind, 100), RESULT["parameters"][kind][1]),
        ):
            assert now == pytest.approx(then, rel=0.2)


def test_one_rank_sends_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        for engine in growth_counts.ENGINES:
            for who in ("plain", "mpinit"):
                assert growth_counts.by_ranks(engine, who == "mpinit") == RESULT["ranks"][engine][who][0]
    finally:
        dist.destroy_process_group()
