"""The guide's table of engines says what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import engines


def test_the_guide_repeats_what_was_measured() -> None:
    result = json.loads(engines.RESULT.read_text(encoding="utf-8"))
    page = engines.PAGE.read_text(encoding="utf-8")
    assert engines.with_table(page, result) == page
    assert {(row["engine"], row["level"]) for row in result["rows"]} == {
        (engine, level) for engine, levels in engines.ENGINES.items() for level in levels
    }
