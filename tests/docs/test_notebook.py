"""The notebook runs from top to bottom, shows what it stores, and its numbers say what its text says."""

import re
import sys

import pytest
from snippets import NUMBERS, ROOT, words

import mpinit

sys.path.insert(0, str(ROOT / "docs"))

import notebook

NOTEBOOK = notebook.read()


def printed(outputs: list[dict[str, object]]) -> str:
    """Return what a cell has printed."""
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")  # type: ignore[arg-type]


def test_the_notebook_is_one_and_was_run_in_order() -> None:
    assert NOTEBOOK["nbformat"] == 4 and NOTEBOOK["metadata"]["kernelspec"]["language"] == "python"
    cells = notebook.code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    text = "".join(line for cell in NOTEBOOK["cells"] for line in cell["source"])
    assert "mpinit.audit(" in text and 'opt_level="O5", master_weights="split"' in text
    for target in re.findall(r"\]\((?!https://)([^)]+)\)", text):
        assert (notebook.PATH.parent / target).exists(), target


@pytest.mark.long
def test_the_notebook_shows_what_it_stores() -> None:
    outputs, names = notebook.execute(NOTEBOOK)
    stored = [cell["outputs"] for cell in notebook.code_cells(NOTEBOOK)]
    for number, (now, before) in enumerate(zip(outputs, stored, strict=True)):
        assert [output["output_type"] for output in now] == [output["output_type"] for output in before]
        if "bytes per parameter" in printed(before):
            # Which rows are shown depends on last bits; the table of sizes and the advice do not.
            now_shown, shown = (printed(each)[printed(each).index("bytes ") :] for each in (now, before))
            now_shown, shown = (re.sub(r"'[\w.]+'", "'NAME'", each) for each in (now_shown, shown))
            assert words(now_shown, NUMBERS) == words(shown, NUMBERS)
        else:
            assert words(printed(now), NUMBERS) == words(printed(before), NUMBERS), f"cell {number + 1}"
    losses = {name: run[0] for name, run in names["runs"].items()}
    full, plain, split = losses["float32"], losses["plain bfloat16"], losses["mpinit O5, split masters"]
    assert full[0] - full[-1] > 0.005, "float32 learns"
    assert plain[0] - plain[-1] < 0.5 * (full[0] - full[-1])
    assert abs(split[-1] - full[-1]) < 0.002 < plain[-1] - full[-1]
    shares = {name: run[1] for name, run in names["runs"].items()}
    assert shares["plain bfloat16"] > 0.85 and max(shares["float32"], shares["mpinit O5, split masters"]) < 0.01
    with pytest.raises(ValueError, match="not initialised"):
        mpinit.undo(names["model"])
