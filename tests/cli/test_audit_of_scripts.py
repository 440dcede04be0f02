"""``mpinit audit train.py``: a script runs until its first step, with its own arguments, and is audited there.

Below the public face: the command is called in this process, whose arguments and hooks are compared.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from mpinit.cli import main

SCRIPT = """
import argparse, sys
import torch
from torch import nn
import neighbour

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--json", action="store_true")
options = parser.parse_args()
assert __name__ == "__main__" and options.json
torch.manual_seed(0)
frozen = nn.Linear(16, 16)
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


def script(folder: Path, text: str, optimizer: str = "AdamW") -> str:
    (folder / "neighbour.py").write_text(f"import torch\nOPTIMIZER = torch.optim.{optimizer}\n")
    path = folder / "train.py"
    path.write_text(text)
    sys.modules.pop("neighbour", None)
    return str(path)


def test_script_is_audited_at_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv[:], sys.path[:]
    path = script(tmp_path, SCRIPT)
    assert main(["audit", "--json", path, "--lr", "1e-5", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "the script prints" in printed.err and "stepped" not in printed.err and "caught" not in printed.err
    assert {row["name"]: row["rate"] for row in found["rows"]} == dict.fromkeys(
        ("0.weight", "0.bias", "1.weight", "1.bias"), 1e-5
    )
    assert found["stuck"]["1.weight"] == 1.0
    assert (sys.argv, sys.path) == before
    # Nothing of it is left: an optimizer steps.
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=1.0).step()
    assert weight.item() == 0.0


def test_gradients_of_the_script_tell_the_size_of_sgds_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", script(tmp_path, SCRIPT, "SGD"), "--lr", "1e-9", "--json"]) == 0
    out = capsys.readouterr().out
    assert "1.weight" in out and "100.0%" in out and "audit again after a backward pass" not in out


def test_script_that_mpinit_has_initialised_is_audited_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SCRIPT.replace('print("the script prints")', 'import mpinit; mpinit.initialize(model, optimizer, "O5")')
    assert main(["audit", "--json", script(tmp_path, text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["master"] for row in found["rows"] if row["weight"] == "bfloat16"} == {"float32"}


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
