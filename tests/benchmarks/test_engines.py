"""The guide's table of engines says what was measured."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import engines


def test_the_guide_repeats_what_was_measured() -> None:
    result = json.loads(engines.RESULT.read_text(encoding="utf-8"))
    page = engines.PAGE.read_text(encoding="utf-8")
    assert engines.with_table(page, result) == page
    assert {(row["engine"], row["level"]) for row in result["rows"]} == {
        (engine, level) for engine, levels in engines.ENGINES.items() for level in levels
    }


@pytest.mark.long
def test_it_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, result, threads = tmp_path / "engines.md", tmp_path / "engines.json", torch.get_num_threads()
    page.write_text(engines.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    tiny = {"RANKS": 1, "WIDTH": 32, "PARAMETERS": engines.LAYERS * 33 * 32, "PAGE": page, "RESULT": result}
    few = {"ENGINES": {"DDP": ("O2", "split"), "FSDP2": ("O2",)}}
    for name, value in (tiny | few).items():
        monkeypatch.setattr(engines, name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        engines.run(0, port)
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    assert [row["bytes"]["weights"] for row in rows] == [2.0, 2.0, 4.0], "FSDP2's weights are the masters"
    assert [row["bytes"]["optimizer states"] for row in rows] == [8.0] * 3
    assert '| DDP | O5, `"split"` |' in page.read_text(encoding="utf-8")
