"""``mpinit run``: the recipes of apex's documentation at every level, and what a script sees of its surroundings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import run_code, run_mpinit

from mpinit.cli import main

SCRIPTS = Path(__file__).with_name("scripts")
LEVELS = ("O0", "O1", "O2", "O3")
RECIPES = (
    "basic",
    "return_value_ignored",
    "clipping",
    "accumulation",
    "gan_with_three_losses",
    "several_losses_and_optimizers",
    "checkpointing",
    "resuming_as_language_models_do",
    "custom_batches",
    "custom_functions",
    "live_state",
    "stash",
    "tolerance",
    "fused_optimizers_and_norms",
    "disabled",
)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``mpinit run arguments...`` with warnings as errors, as these tests are run."""
    return run_mpinit(["run", *arguments], cwd)


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """A command line, in a process of its own from the first."""
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_recipes(level: str) -> None:
    done = run(str(SCRIPTS / "recipes.py"), "--opt_level", level)
    assert (done.returncode, done.stderr) == (0, ""), "each passes, quietly"
    assert done.stdout.splitlines() == [f"passed {recipe}" for recipe in RECIPES]


def test_a_script_in_a_process_of_its_own_from_the_first() -> None:
    done = start(sys.executable, "-W", "error", "-m", "mpinit", "run", str(SCRIPTS / "old_interface.py"))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "passed\n")


@pytest.mark.long
def test_spawned_workers_find_apex_too() -> None:
    done = run(str(SCRIPTS / "spawning.py"), "--fp16", "-m", "x")
    assert done.stderr == ""
    assert done.stdout == f"passed {[str(SCRIPTS / 'spawning.py'), '--fp16', '-m', 'x']}\n"


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    """``torchrun --nproc-per-node 2 -m mpinit run script``, with workers forked from one that has imported torch."""
    module = tmp_path / "module.py"
    words = ["mpinit", "run", str(SCRIPTS / "distributed.py")]
    run_it = "runpy.run_module('mpinit', run_name='__main__', alter_sys=True)"
    module.write_text(f"import runpy, sys\nsys.argv[:] = {words}\n{run_it}\n")
    launch = ["--standalone", "--nproc-per-node=2", "--start-method=fork", "--run-path", str(module)]
    code = "import warnings\nwarnings.resetwarnings()\nfrom torch.distributed import run\n"
    done = run_code(f"{code}run.main({launch})")
    assert done.returncode == 0, done.stderr
    assert "passed 0" in done.stdout
    assert "passed 1" in done.stdout


SURROUNDINGS = """
import os, sys
import neighbour
print(__name__, sys.argv[1:], neighbour.where == {where})
import pickle
class Own: pass
assert type(pickle.loads(pickle.dumps(Own()))) is Own
assert sys.modules["__main__"].Own is Own
import atexit
atexit.register(lambda: print("at exit", Own.__name__, flush=True))
sys.exit(int(sys.argv[1]))
"""


def test_a_script_and_a_module_see_what_python_would_show_them(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "neighbour.py").write_text("where = 'top'\n")
    (package / "neighbour.py").write_text("where = 'package'\n")
    (package / "__init__.py").write_text("")
    (package / "script.py").write_text(SURROUNDINGS.format(where="'package'"))
    (package / "part.py").write_text(SURROUNDINGS.format(where="'top'"))
    script = run("package/script.py", "3", "--help", "-h", cwd=tmp_path)
    assert (script.returncode, script.stderr) == (3, "")
    assert script.stdout.splitlines() == ["__main__ ['3', '--help', '-h'] True", "at exit Own"]
    module = run("-m", "package.part", "4", "-m", cwd=tmp_path)
    assert (module.returncode, module.stderr) == (4, "")
    assert module.stdout.splitlines() == ["__main__ ['4', '-m'] True", "at exit Own"]


def test_a_scripts_own_error_passes_through(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("{}['missing']\n")
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'missing'")


def test_a_missing_script_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no_such_script.py"]) == 2
    assert "no such file: 'no_such_script.py'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run"], ["run", "-m"], ["unknown"]])
def test_a_command_line_without_sense_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: mpinit" in capsys.readouterr().err
