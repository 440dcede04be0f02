"""The examples, those in docstrings too: they run, print what they should and are short."""

import ast
import doctest
import importlib
import inspect
import logging
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import framework_of, let_torchvision_load, marks_for
from snippets import NUMBERS, words

import mpinit
from benchmarks import tables
from mpinit.compat import uninstall_apex

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def shown(page: str, title: str) -> list[list[str]]:
    """The words of the block of output that a page has under a heading: numbers are those of one machine."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {title}", maxsplit=1)[-1]
    block = re.search(r"```(?:text|none)\n(.*?)\n```", text, re.S)
    assert block is not None
    return words(block[1], NUMBERS)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs an example as ``__main__`` in this process, which has torch, and returns its output."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads, log = torch.get_num_threads(), logging.getLogger("mpinit")
    level = log.level

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)
    log.setLevel(level)


def check_minimal(level: str, output: str) -> None:
    first, resumed = output.splitlines()
    start, end = (float(part.split()[0].strip(",")) for part in first.split("loss ", 1)[1].split(" -> "))
    assert first.startswith(level)
    assert end < start / 10
    assert float(resumed.removeprefix("resumed: loss ")) < start / 10


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_the_minimal_example_trains_and_resumes(level: str, script) -> None:  # type: ignore[no-untyped-def]
    check_minimal(level, script("minimal.py", level))


def test_the_minimal_example_runs_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-W", "error", "examples/minimal.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_minimal("O2", done.stdout)
    assert shown("examples/README.md", "[minimal.py]") == words(done.stdout, NUMBERS)
    assert done.stderr == ""


def test_the_demo_prints_its_tables_and_writes_its_plot(tmp_path: Path, script) -> None:  # type: ignore[no-untyped-def]
    names = ["O0 fp32", "O1 bf16", "O2 fp16", "O2 bf16", "O3 bf16"]
    output = script("digits.py", "--epochs", 1, "--width", 4, "--out", tmp_path, "--only", *names)
    rows = [line.split() for line in output.splitlines()]
    for name in names:
        assert any(" ".join(row[:2]) == name for row in rows), f"{name} is missing from the table"
    assert re.search(r"float32 [\d.]+ ms,\s+bfloat16 [\d.]+ ms,\s+float16 [\d.]+ ms", output)
    assert "599 test images: an accuracy is known to about" in output
    moved = dict(re.findall(r"^ *(float32|bfloat16, .*?)  +[\d.]+  +([\d.]+) % ", output, re.M))
    assert len(moved) == 4 and float(moved["bfloat16, no masters"]) > 20
    assert all(float(share) < 2 for way, share in moved.items() if "no masters" not in way), "masters move"
    plot = tmp_path / "loss_and_scale.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 20_000
    assert (tmp_path / "table.txt").read_text(encoding="utf-8") in output
    from demo.training import SETTINGS

    page, printed = shown("docs/tutorial/first-run.md", "First run"), words(output, NUMBERS)
    heading = next(line for line in printed if line[:1] == ["level"])
    place = page.index(heading)
    assert sorted(line[:2] for line in page[place + 2 : place + 9]) == sorted(each.name.split() for each in SETTINGS)
    assert next(line for line in printed if line[:1] == ["fine-tuned"]) in page


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_of_the_demo_is_a_bar_or_lines(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check what a terminal and a file get, and that a warning has a line to itself."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from demo.progress import Progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    before = warnings.showwarning
    with warnings.catch_warnings(), Progress("O2 fp16", 2, 3) as progress:
        warnings.simplefilter("always")
        for _ in range(2):
            for _ in range(3):
                progress.step()
            warnings.warn("a scale", stacklevel=1)
            progress.epoch(loss="0.5", scale="8")
    said = capsys.readouterr().err
    lines = [line.strip() for line in re.split(r"[\r\n]", said)]
    assert any("UserWarning: a scale" in line and "%" not in line for line in lines)
    assert ("O2 fp16 epoch 2 of 2: loss 0.5, scale 8" in lines) is not is_terminal
    assert any("100%" in line and "6/6" in line for line in lines) is is_terminal
    assert warnings.showwarning is before


def test_an_interrupted_demo_shows_what_was_done(tmp_path: Path, script, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    from demo import training

    def interrupted(*given: object) -> object:
        if given[0].level == "O3":  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return train(*given)  # type: ignore[arg-type]

    train = training.train
    monkeypatch.setattr(training, "train", interrupted)
    with pytest.raises(SystemExit) as ended:
        script("digits.py", "--epochs", 1, "--width", 4, "--out", tmp_path, "--only", "O0 fp32", "O2 bf16", "O3 bf16")
    said = capsys.readouterr()
    assert ended.value.code == 130 and "Interrupted" in said.err and "Traceback" not in said.err
    table = (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert "O2" in table and "bf16" in table and "O3" not in table
    assert (tmp_path / "loss_and_scale.png").exists()


def test_the_skipped_step_is_explained_and_mended(tmp_path: Path, script) -> None:  # type: ignore[no-untyped-def]
    output = script("why_did_my_step_skip.py", "--steps", 70, "--out", tmp_path)
    assert "gelu': aten.exp.default computed inf or nan in float16 in the forward pass" in output
    assert "'O2', keep_fp32=['blocks.*.gelu']" in output
    rows = [line for line in output.splitlines() if line.startswith("O2, float16")]
    assert len(rows) == 2
    page = shown("docs/how-to/diagnose.md", "An example")
    assert page == words(output, NUMBERS)[: len(page)]
    broken, mended = (int(row.removeprefix("O2, float16").replace(", mended", "").split()[1]) for row in rows)
    assert broken >= 10 and mended == 0, "steps skipped"
    assert (tmp_path / "loss_and_scale.png").stat().st_size > 15_000


@pytest.mark.long
def test_the_finetuning_example_compares_four_ways(tmp_path: Path, script) -> None:  # type: ignore[no-untyped-def]
    let_torchvision_load()
    output = script("finetune_16bit_checkpoint.py", "--pretrain-steps", 4, "--steps", 2, "--out", tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    ways = ["float32-loaded", "bf16-loaded, plain", "bf16-loaded, mpinit O5", "bf16-loaded, mpinit O5 split"]
    assert [row[0] for row in rows[2:]] == ways
    assert [float(row[5]) for row in rows[2:]] == [16.0, 8.0, 18.0, 14.0]
    assert [float(row[4]) > 0 for row in rows[2:]] == [True, False, True, True], "norm weights"
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text in output
    # The tables of the documentation are made of what it writes.
    made = tables.finetuned_from(tmp_path / "result.json")
    assert re.sub(r"[ -]", "", made) == re.sub(r"[ -]", "", text.strip())
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_optimizers_of_a_package_come_to_the_loss_of_float32(script) -> None:  # type: ignore[no-untyped-def]
    output = script("other_optimizers.py")
    rows = {row[0]: [float(cell.rstrip("%")) for cell in row[1:]] for row in map(str.split, output.splitlines()[1:])}
    assert list(rows) == ["AdamW", "Muon", "SOAP", "Shampoo"]
    for name, (exact, alone, far, split, near) in rows.items():
        assert abs(split - exact) < 0.1 * exact, name
        # By its weights SOAP comes to another place every time, and by its loss to a like one.
        assert abs(split - exact) < abs(alone - exact) or name == "SOAP", name
        assert near < far / (1 if name == "SOAP" else 4), name
    assert shown("examples/README.md", "[other_optimizers.py]") == words(output, NUMBERS)


# Every module is imported here, Lightning's plug too.
let_torchvision_load()

# Methods that a base class documents.
PROTOCOL = {"create_module", "exec_module", "forward", "backward", "evaluate", "revert", "finish"}
PACKAGE = ROOT / "mpinit"


def public_modules() -> list[str]:
    """Every module but those that are run rather than imported."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "bootstrap" not in parts and parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def as_case(module: str) -> Any:
    """Return a parameter of a test; what frameworks are needed for is a long test."""
    framework = framework_of(module)
    return pytest.param(module, marks=() if framework is None else marks_for(framework))


@pytest.mark.parametrize("name", [*map(as_case, public_modules())])
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, name):
        runner.run(test, out=report.append)
    uninstall_apex()  # which an example may have installed
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", public_modules())
def test_public_functions_and_classes_are_documented(name: str) -> None:
    path = PACKAGE.parent.joinpath(*name.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name} does not say what it is for"
    # Of the classes that users of apex know, the methods too.
    nodes = ast.walk(tree) if "compat" in name else tree.body
    bare = [
        node.name
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and node.name not in PROTOCOL
        and not any(isinstance(d, ast.Attribute) or ast.unparse(d) == "overload" for d in node.decorator_list)
        and not ast.get_docstring(node)
    ]
    assert not bare


def test_doctest_search_finds_examples() -> None:
    found = doctest.DocTestFinder().find(importlib.import_module("mpinit.basics.dtypes"))
    assert any("parse_dtype" in test.name and test.examples for test in found)


PUBLIC = sorted({name for name in mpinit.__all__ if callable(getattr(mpinit, name))} - {"Properties"})


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_has_arguments_and_results(name: str) -> None:
    thing = getattr(mpinit, name)
    text = inspect.getdoc(thing) or ""
    signature = inspect.signature(thing)
    args = text.partition("Args:")[2].partition("\n\n")[0]
    named = {word for line in re.findall(r"^ {4}([\w*, ]+):", args, re.M) for word in re.findall(r"\w+", line)}
    assert set(signature.parameters) - named == set()
    gives = inspect.isfunction(thing) and signature.return_annotation not in ("None", None)
    assert not gives or "Returns:" in text or "Yields:" in text
    assert ">>> " in text.partition("Example:")[2]
    # The site takes what stands before a colon for a type.
    first = re.search(r"(?:Returns|Yields):\n +(.*)", text)
    assert first is None or ": " not in re.sub(r":?\w*:?`+.*?`+", "", first[1])
