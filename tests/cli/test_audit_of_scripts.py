"""``mpinit audit train.py``: a script runs until its first step, with its own arguments, and is audited there.

Below the public face: the command is called in this process, whose arguments and hooks are compared, and the report
that it prints is kept.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mpinit
from mpinit.cli import main
from mpinit.inspect.audit import Audit

SCRIPT = """
import argparse, sys
import torch
from torch import nn
import neighbour

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--traceback", action="store_true")
options = parser.parse_args()
assert __name__ == "__main__" and options.traceback
torch.manual_seed(0)
frozen = nn.Linear(16, 16).requires_grad_(False)
model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).to(torch.bfloat16)
optimizer = neighbour.OPTIMIZER(model.parameters(), lr=options.lr)
print("the script prints")
try:
    for _ in range(3):
        x = frozen(torch.ones(2, 16)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        print("stepped")
except Exception:
    print("caught")
"""


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Audit]:
    """The reports that the command has printed."""
    found: list[Audit] = []

    def audit(*arguments: Any) -> Audit:
        found.append(mpinit.audit(*arguments))
        return found[-1]

    monkeypatch.setattr(importlib.import_module("mpinit.cli.audit"), "audit", audit)
    return found


def script(folder: Path, text: str, optimizer: str = "AdamW") -> str:
    (folder / "neighbour.py").write_text(f"import torch\nOPTIMIZER = torch.optim.{optimizer}\n")
    path = folder / "train.py"
    path.write_text(text)
    sys.modules.pop("neighbour", None)
    return str(path)


def test_script_is_audited_at_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reports: list[Audit]
) -> None:
    before = sys.argv[:], sys.path[:]
    path = script(tmp_path, SCRIPT)
    assert main(["audit", "--traceback", path, "--lr", "1e-5", "--traceback"]) == 0
    printed = capsys.readouterr()
    [found] = reports
    assert printed.out == f"{found}\n"
    assert "the script prints" in printed.err and "stepped" not in printed.err and "caught" not in printed.err
    assert {row.name: row.rate for row in found.rows} == dict.fromkeys(
        ("0.weight", "0.bias", "1.weight", "1.bias"), 1e-5
    )
    assert found.stuck["1.weight"] == 1.0
    assert (sys.argv, sys.path) == before
    # Nothing of it is left: an optimizer steps.
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()
    assert weight.item() == 0.0


def test_gradients_of_the_script_tell_the_size_of_sgds_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", script(tmp_path, SCRIPT, "SGD"), "--lr", "1e-9", "--traceback"]) == 0
    out = capsys.readouterr().out
    assert "1.weight" in out and "100.0%" in out and "audit again after a backward pass" not in out


def test_script_that_mpinit_has_initialised_is_audited_as_it_is(tmp_path: Path, reports: list[Audit]) -> None:
    text = SCRIPT.replace('print("the script prints")', 'import mpinit; mpinit.initialize(model, optimizer, "O5")')
    assert main(["audit", "--traceback", script(tmp_path, text), "--traceback"]) == 0
    assert {row.master for row in reports[0].rows if row.weight == "bfloat16"} == {"float32"}


TWO = """
import torch
from torch import nn

torch.manual_seed(0)
class Generator(nn.Sequential): pass
class Discriminator(nn.Sequential): pass
generator = Generator(nn.Linear(4, 64), nn.Linear(64, 64))
discriminator = Discriminator(nn.Linear(64, 64), nn.Linear(64, 1))
of_generator = torch.optim.SGD(generator.parameters(), lr=1e-2)
of_discriminator = torch.optim.AdamW(discriminator.parameters(), lr=1e-3)
for _ in range({iterations}):
    for sign, optimizer in ((1, of_discriminator), (-1, of_generator)):
        optimizer.zero_grad()
        (sign * discriminator(generator(torch.ones(2, 4)))).mean().backward()
        optimizer.step()
    print("iteration ends")
"""


def test_models_and_optimizers_of_a_gan_are_audited_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reports: list[Audit]
) -> None:
    assert main(["audit", script(tmp_path, TWO.format(iterations=3))]) == 0
    assert "iteration ends" not in capsys.readouterr().err
    [found] = reports
    rates = {row.name: row.rate for row in found.rows}
    assert rates["Generator.0.weight"] == 1e-2 and rates["Discriminator.0.weight"] == 1e-3 and len(rates) == 8
    sizes = {name: (4 * 64 + 64 + 64 * 64 + 64, 64 * 64 + 64 + 64 + 1)[name == "D"] for name in "GD"}
    state = found.bytes_per_parameter["now"]["optimizer state"]
    assert state == pytest.approx(8 * sizes["D"] / (sizes["G"] + sizes["D"]), rel=1e-2)


def test_optimizers_that_share_one_model_are_audited_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reports: list[Audit]
) -> None:
    text = SCRIPT.replace(
        "optimizer = neighbour", "first = torch.optim.SGD(model[1].parameters(), lr=1.0)\noptimizer = neighbour"
    )
    text = text.replace("OPTIMIZER(model.", "OPTIMIZER(model[0].").replace(
        "optimizer.step()", "first.step(); optimizer.step()"
    )
    assert main(["audit", "--traceback", script(tmp_path, text), "--traceback"]) == 0
    assert "stepped" not in capsys.readouterr().err
    assert [(row.name, row.rate) for row in reports[0].rows] == [
        ("0.weight", 1e-2),
        ("0.bias", 1e-2),
        ("1.weight", 1.0),
        ("1.bias", 1.0),
    ]
    assert "in no audited optimizer" not in reports[0].advice


def test_script_with_unowned_parameters_runs_to_the_second_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reports: list[Audit]
) -> None:
    text = SCRIPT.replace("OPTIMIZER(model.", "OPTIMIZER(model[0].")
    assert main(["audit", "--traceback", script(tmp_path, text), "--traceback"]) == 0
    assert capsys.readouterr().err.count("stepped") == 1
    assert "2 trainable parameters in no audited optimizer, such as '1.weight'" in reports[0].advice


def test_blocks_that_end_the_script_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT + 'finally:\n    print("finally")\n'
    assert main(["audit", script(tmp_path, text), "--traceback"]) == 0
    assert "finally" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize("line", ["model = torch.compile(model)", "model.compile(fullgraph=True)"])
def test_compiled_model_is_audited(line: str, tmp_path: Path, reports: list[Audit]) -> None:
    text = SCRIPT.replace('print("the', f'{line}\nprint("the')
    assert main(["audit", "--traceback", script(tmp_path, text), "--traceback"]) == 0
    assert reports[0].rows[0].name == "0.weight"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{path}"], "ended without a step"),
        (["--lr", "1e-5", "{path}"], "--lr: a script makes its own model and optimizer"),
        (["no_such.py"], "there is no file 'no_such.py'"),
    ],
)
def test_scripts_that_cannot_be_audited(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "import sys\nsys.exit(0)\n")
    assert main(["audit", *(word.format(path=path) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
