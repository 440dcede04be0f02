"""Every command as a new user would try it: what it shows, as a table and as JSON, and what it says when it cannot."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_runs import run_code

from mpinit.cli import COMMANDS, main, output
from mpinit.cli.contender import TORCH_AMP
from mpinit.settings.opt_levels import OPT_LEVELS

MODEL = ["cli_models:classifier", "--input", "8"]

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command; its status and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# -- levels -----------------------------------------------------------------------------------------------------------


def test_levels_shows_the_table_of_properties(said: Said) -> None:
    status, out, _ = said("levels")
    assert status == 0
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["property"] == list(OPT_LEVELS)
    assert lines["loss_scale"] == ["1.0", "dynamic", "dynamic", "1.0", "1.0", "1.0"]
    assert lines["master_weights"] == ["False", "None", "True", "False", "None", "True"]


def test_levels_applies_overrides(said: Said, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('growth_interval = 7\nopt_level = "O3"\nnum_losses = 2\n')
    status, out, _ = said("levels", "O2", "--set", "loss_scale=128", "--set", "keep_fp32=a, b", "--config", str(config))
    assert status == 0
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["loss_scale*"] == ["128.0", "override"]
    assert lines["keep_fp32*"] == ["a,", "b", "override"]
    assert lines["growth_interval*"] == ["7", "override"]
    assert lines["master_weights"] == ["True", "level"]
    assert lines["hysteresis"] == ["1", "default"]
    status, out, _ = said("levels", "O2", "O5", "--set", "loss_scale=128", "--json")
    found = json.loads(out)
    assert found["O5"]["loss_scale"] == 128.0
    assert found["O2"]["cast_model_type"] == "float16"


def test_levels_that_refuse_an_override_say_so_once(said: Said) -> None:
    status, out, _ = said("levels", "--set", "cast_model_type=bf16")
    assert status == 0
    assert out.count("refused at O1, O4: cast_model_type=torch.bfloat16 contradicts") == 1


# -- explain ----------------------------------------------------------------------------------------------------------


def test_explain_prints_a_report_and_writes_pages(said: Said, tmp_path: Path) -> None:
    status, out, _ = said("explain", *MODEL, "--opt-level", "O2", "--loss", "cli_models:first_class")
    assert status == 0
    assert "Sequential at O2" in out
    assert "! weight type: weights are float16" in out
    page = tmp_path / "out.html"
    status, out, _ = said("explain", *MODEL, "--loss", "mean", "--html", str(page))
    assert status == 0
    assert "Sequential at O1: " in out
    assert page.read_text().startswith("<!doctype html>")


def test_explain_takes_whole_numbers_and_counts_an_optimizers_state(said: Said) -> None:
    words = ["cli_models:embedding", "--input", "5:int64:10", "--batch", "3", "--optimizer", "adamw", "--json"]
    status, out, _ = said("explain", *words)
    assert status == 0
    report = json.loads(out)
    assert report["bytes_per_parameter"]["O2"]["optimizer state"] == 8.0
    assert {row["module"] for row in report["rows"]} >= {"0", "1"}


# -- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_bench_compares_in_processes_of_their_own(said: Said, tmp_path: Path) -> None:
    plot = tmp_path / "bench.png"
    words = ["--steps", "3", "--lr", "0.01", "--loss", "cli_models:first_class", "--levels", "O2"]
    status, out, err = said("bench", *MODEL, *words, "--plot", str(plot), "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert [result["level"] for result in found] == ["O2"]
    assert all(len(result["losses"]) == 3 and result["ms"] > 0 for result in found)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("contender", [*OPT_LEVELS, *TORCH_AMP])
def test_every_contender_trains(contender: str, said: Said) -> None:
    words = ["--steps", "8", "--lr", "0.01", "--loss", "cli_models:first_class", "--contender", contender]
    status, out, _ = said("bench", *MODEL, *words)
    assert status == 0
    result = json.loads(out)
    # Adam's 1e-8 is 0 in float16, so that O3 has nothing to divide by: what bench is there to show.
    assert result["loss"] < result["first_loss"] or contender == "O3"
    if contender == "O0":
        assert result["skipped"] == 0


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_measures_and_recommends(said: Said) -> None:
    status, out, _ = said("doctor", "--size", "32", "--seconds", "0.01")
    assert status == 0
    assert all(word in out for word in ("float32", "bfloat16", "fused optimizers", "recommended: O", "torch 2"))
    status, out, _ = said("doctor", "--size", "32", "--seconds", "0.01", "--json")
    found = json.loads(out)
    assert found["level"] in OPT_LEVELS
    assert found["devices"][0]["matmul"]["float32"] > 0
    assert "AdamW" in found["devices"][0]["fused"]
    assert "inductor" in found["compile"]


# -- what goes wrong --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "a level": (["levels", "O9"], "opt_level='O9' is not a level"),
    "an override": (["levels", "--set", "loss_scale"], "write NAME=VALUE"),
    "a value": (["levels", "--set", "loss_scale=x"], "'x' is not a loss scale"),
    "a property": (["levels", "--set", "los_scale=2"], "did you mean 'loss_scale'"),
    "an option": (["levels", "--bogus"], "unrecognized arguments: --bogus"),
    "no colon": (["explain", "cli_models"], "write the module, a colon and the name"),
    "no module": (["explain", "no_such_module:build"], "there is no module 'no_such_module'"),
    "no factory": (["explain", "cli_models:build"], "cli_models has no 'build'"),
    "no model": (["explain", "cli_models:returns_no_model"], "returned int, not a torch.nn.Module"),
    "the factory's own": (["explain", "cli_models:raises"], "KeyError: 'on purpose'"),
    "an input": (["explain", "cli_models:classifier", "--input", "3xa"], "--input '3xa' is no input"),
    "a shape": (["explain", "cli_models:classifier", "--input", "7"], "shapes cannot be multiplied"),
    "an optimizer": (["explain", *MODEL, "--optimizer", "adamx"], "'adamx' is no optimizer of torch.optim"),
    "a contender": (["bench", *MODEL, "--levels", "O7"], "the levels are O0"),
    "a size": (["doctor", "--size", "1"], "too small to measure"),
    "a file": (["convert", "no_such.pt", "out.pt", "--to", "mpinit"], "there is no file 'no_such.pt'"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_errors_are_one_line_with_exit_status_2(arguments: list[str], words: str, said: Said) -> None:
    status, out, err = said(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"mpinit {arguments[0]}: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("arguments", [["convert", "a"], ["convert", "a", "b", "--to", "x"], ["explain"]])
def test_missing_arguments_are_one_line_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bench_says_what_no_contender_could(said: Said) -> None:
    status, out, err = said("bench", "cli_models:raises", "--levels", "O0")
    assert (status, out, err) == (2, "", "mpinit bench: KeyError: 'on purpose'\n")


def test_traceback_shows_where_an_error_comes_from() -> None:
    with pytest.raises(KeyError, match="on purpose"):
        main(["explain", "cli_models:raises", "--traceback"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: mpinit {name}" in out
    assert len(out.split()) > 20


# -- tables -----------------------------------------------------------------------------------------------------------


def table() -> None:
    output.show_table("Title", ["name", "n"], [["a [b] c", "1"], ["d", "20"]], numbers=[1])


class Terminal:
    """Says that it is one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return True


def test_tables_are_plain_text_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table()
    assert capsys.readouterr().out == "Title\nname      n\n-------  --\na [b] c   1\nd        20\n\n"


def test_tables_are_drawn_by_rich_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    table()
    out = capsys.readouterr().out
    assert "─" in out
    assert "a [b] c" in out, "what stands in a cell is no markup"


def test_tables_need_no_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_rich(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return imported(name, *arguments, **keywords)

    for name in [name for name in sys.modules if name.startswith("rich")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(output.importlib, "import_module", without_rich)
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    table()
    with output.progress(2, "working") as advance:
        advance("one")
    captured = capsys.readouterr()
    assert "a [b] c   1" in captured.out
    assert captured.err == "working: one\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m mpinit levels O2 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("What the levels set")


def test_what_the_commands_need_is_imported_when_they_run() -> None:
    code = "import sys, mpinit, mpinit.cli; print([m for m in sys.modules if m.startswith(('mpinit.cli.', 'rich'))])"
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
