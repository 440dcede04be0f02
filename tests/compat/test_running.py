"""Scripts for apex, run unmodified: by name, as modules, under torchrun, with the same bits.

Below the public face: results of scripts are compared with the modules that they import as ``apex``.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_runs import run_code, run_mpinit
from models import Parts, equal_tensors
from torch import nn
from torch.nn import functional as F

import mpinit
from mpinit.cli import main
from mpinit.compat.apex import amp as face
from mpinit.compat.apex.optimizers import FusedAdam
from mpinit.initialization import start

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


@pytest.mark.parametrize("level", LEVELS)
def test_recipes(level: str) -> None:
    done = run(str(SCRIPTS / "recipes.py"), "--opt_level", level, *RECIPES)
    assert (done.returncode, done.stderr) == (0, ""), "each passes, quietly"
    assert done.stdout.splitlines() == [f"passed {recipe}" for recipe in RECIPES]


def test_a_script_in_a_process_of_its_own_from_the_first() -> None:
    command = [sys.executable, "-W", "error", "-m", "mpinit", "run", str(SCRIPTS / "old_interface.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "passed\n")


@pytest.mark.parametrize("level", LEVELS)
def test_self_supervised_scripts_with_larc(level: str) -> None:
    done = run(str(SCRIPTS / "self_supervised.py"), "--opt_level", level)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "passed\n")


@pytest.mark.parametrize("script", ["language_model.py", "masters_by_hand.py"])
def test_scripts_with_lamb_and_with_masters_by_hand(script: str) -> None:
    done = run(str(SCRIPTS / script))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "passed\n")


@pytest.mark.parametrize("level", [*LEVELS, "O4", "O5"])
def test_the_workflow_of_rocms_apex(level: str) -> None:
    done = run(str(SCRIPTS / "rocm_checkpoint.py"), "--opt_level", level)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "passed\n")


@pytest.mark.long
def test_spawned_workers_find_apex_too() -> None:
    done = run(str(SCRIPTS / "spawning.py"), "--fp16", "-m", "x")
    assert done.stderr == ""
    assert done.stdout == f"passed {[str(SCRIPTS / 'spawning.py'), '--fp16', '-m', 'x']}\n"


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    """Run ``torchrun --nproc-per-node 2 -m mpinit run script``, with forked workers that have torch already."""
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


@pytest.mark.parametrize(
    ("words", "error"),
    [(["no_such_script.py"], "can't open file|No such file"), (["-m", "nomod"], "No module named nomod")],
)
def test_missing_scripts_and_modules_are_pythons_errors(words: list[str], error: str, tmp_path: Path) -> None:
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(error, done.stderr.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["run"], ["run", "-m"]])
def test_a_command_line_without_sense_names_the_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "see mpinit run --help" in capsys.readouterr().err


# Each under apex's name and under torch's.
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (FusedAdam, functools.partial(torch.optim.AdamW, fused=True), {"lr": 0.01, "weight_decay": 0.01}),
}


def net() -> Any:
    """Convolution, BatchNorm, GELU (float32 under the stricter policy), attention-like softmax, linear."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv(x))).transpose(1, 2)
        x = F.softmax(self.mix(x), dim=-1) @ x.transpose(1, 2)
        return self.head(x.mean(2)[:, :4])  # type: ignore[no-any-return]

    torch.manual_seed(11)
    conv, norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
    return Parts(run, conv=conv, norm=norm, mix=nn.Linear(4, 4), head=nn.Linear(4, 1))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(6, 2, 8, generator=generator) for _ in range(8)]
    # One batch overflows in float16, so that a skipped step is part of what is compared.
    batches[3] = batches[3] * 1e6
    return [(x, x.mean((1, 2)).unsqueeze(1)) for x in batches]


def loop(amp: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    seen = []
    for index, (x, y) in enumerate(data()):
        loss = F.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer, delay_unscale=index % 2 == 0) as scaled:
            scaled.backward()
        seen.append(loss.detach())
        if index % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_same_bits(level: str, kind: str) -> None:
    make_theirs, make_ours, rates = OPTIMIZERS[kind]
    theirs, ours = net(), net()
    their_optimizer, our_optimizer = make_theirs(theirs.parameters(), **rates), make_ours(ours.parameters(), **rates)
    theirs, their_optimizer = face.initialize(theirs, their_optimizer, opt_level=level, verbosity=0)
    their_losses = loop(face, theirs, their_optimizer)
    their_state, their_scale = theirs.state_dict(), face.state_dict()
    mpinit.undo(theirs)
    start(ours, our_optimizer, level, {}, cast_policy="apex")
    our_losses = loop(mpinit, ours, our_optimizer)
    our_state, our_scale = ours.state_dict(), mpinit.state_dict(our_optimizer)
    mpinit.undo(ours)

    torch.testing.assert_close(their_losses, our_losses, rtol=0, atol=0, equal_nan=True)
    assert their_state.keys() == our_state.keys()
    torch.testing.assert_close(dict(their_state), dict(our_state), rtol=0, atol=0, equal_nan=True)
    # apex's states have these two words and no other.
    assert dict(their_scale) == {
        name: {word: part[word] for word in ("loss_scale", "unskipped")} for name, part in our_scale.items()
    }
    if level in ("O1", "O2"):
        assert our_scale["loss_scaler0"]["loss_scale"] < 2.0**16, "the overflow was seen"
        assert all(torch.isfinite(p).all() for p in ours.parameters()), "and its step was skipped"
        assert not torch.equal(ours.head.weight, net().head.weight), "the others were not"


@pytest.mark.parametrize("level", LEVELS)
def test_undo_removes_apexs_attributes(level: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    face.initialize(model, optimizer, opt_level=level, verbosity=0)
    mpinit.undo(model)
    after = model.state_dict()
    assert all(after[name].dtype == before[name].dtype for name in before)
    # O3 keeps no float32 masters to restore from.
    assert level == "O3" or equal_tensors(after, before)
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
