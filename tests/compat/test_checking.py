"""``mpinit check-apex``: what it finds, what it says of it, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpinit.cli import main
from mpinit.compat.checking import find_uses
from mpinit.compat.coverage import MISSING


def found(source: str) -> dict[str, bool]:
    return {use.name: use.covered for use in find_uses(source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", {}),
        ("from apex import amp", {"apex.amp": True}),
        ("from apex import amp\namp.initialize(m)", {"apex.amp": True, "apex.amp.initialize": True}),
        ("import apex\napex.amp.scale_loss", {"apex": True, "apex.amp": True, "apex.amp.scale_loss": True}),
        ("import apex.amp as A\nA.master_params(o)", {"apex.amp": True, "apex.amp.master_params": True}),
        ("from apex.parallel import LARC as L", {"apex.parallel.LARC": True}),
        ("from apex.parallel.LARC import LARC", {"apex.parallel.LARC": True}),
        ("from apex.fp16_utils import *", {"apex.fp16_utils": False}),
        ("from apex.fp16_utils import FP16_Optimizer", {"apex.fp16_utils.FP16_Optimizer": False}),
        ("from apex.contrib.xentropy import X", {"apex.contrib.xentropy.X": False}),
        ("from apex.optimizers import FusedMixedPrecisionLamb", {"apex.optimizers.FusedMixedPrecisionLamb": False}),
        ("from apex import amp\namp.frobnicate()", {"apex.amp": True, "apex.amp.frobnicate": False}),
        ("from apex.amp.opt import OptimWrapper", {"apex.amp.opt": False}),
        ("from apex.optimizers import FusedNovoGrad", {"apex.optimizers.FusedNovoGrad": False}),
        ("from apex.optimizers import FusedAdagrad", {"apex.optimizers.FusedAdagrad": False}),
        ("import importlib\nimportlib.import_module('apex.transformer')", {"apex.transformer": False}),
        ("def f():\n    from apex import amp", {"apex.amp": True}),
        ("optimizer._amp_stash.all_fp16_params", {"optimizer._amp_stash": True}),
        (
            "from apex import amp\nx = amp._amp_state.loss_scalers[0]._loss_scale",
            {"apex.amp": True, "apex.amp._amp_state": True},
        ),
        ("from .apex import amp", {}),
        ("from torch.cuda import amp\namp.nonsense", {}),
        ("s = '\\d'\nfrom apex import amp", {"apex.amp": True}),
    ],
)
def test_what_is_found(source: str, expected: dict[str, bool]) -> None:
    assert found(source) == expected


def test_spelling_and_line() -> None:
    uses = {use.name: use for use in find_uses("\nfrom apex import amp\n\namp.initialize(m)\namp.initialize(n)\n")}
    assert uses["apex.amp.initialize"].spelling == "mpinit.initialize"
    assert uses["apex.amp.initialize"].line == 4
    assert uses["apex.amp"].line == 2


def test_what_is_missing_has_a_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in MISSING:
        script = tmp_path / "script.py"
        script.write_text(f"import importlib\nimportlib.import_module('{name}')\n")
        assert main(["check-apex", str(script)]) == 1
        assert f"{name}  NOT COVERED  use {MISSING[name]}" in capsys.readouterr().out


def test_report_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, broken = (str(tmp_path / name) for name in ("good.py", "bad.py", "broken.py"))
    Path(good).write_text("from apex import amp\nraise SystemExit('this must not run')\n")
    Path(bad).write_text("import apex.contrib.sparsity\n")
    Path(broken).write_text("def (:\n")
    assert main(["check-apex", good]) == 0
    assert "1 apex names, 1 covered, 0 not" in capsys.readouterr().out
    assert main(["check-apex", good, bad]) == 1
    said = capsys.readouterr().out
    assert "line    1  apex.contrib.sparsity  NOT COVERED" in said
    assert main(["check-apex", broken, bad]) == 2
    said = capsys.readouterr()
    assert "broken.py: cannot be read" in said.err
    assert "NOT COVERED" in said.out
    assert main(["check-apex", str(tmp_path / "absent.py")]) == 2


def test_our_own_recipes_are_covered(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = [path for path in Path(__file__).with_name("scripts").glob("*.py") if path.stem != "old_interface"]
    assert main(["check-apex", *map(str, sorted(scripts))]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "deep",
    ["x = " + "-" * 100_000 + "1", "x = " + "(" * 100_000, "x = 1" + " + 1" * 100_000, "x = a" + ".b" * 100_000],
    ids=["signs", "brackets", "sum", "attributes"],
)
def test_a_file_too_deep_to_parse_is_reported_and_the_others_are_still_read(
    deep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "deep.py", tmp_path / "bad.py"
    first.write_text(deep)
    second.write_text("import apex.contrib.sparsity\n")
    assert main(["check-apex", str(first), str(second)]) == 2
    said = capsys.readouterr()
    assert f"{first}: cannot be read: " in said.err and "nested" in said.err
    assert "apex.contrib.sparsity  NOT COVERED" in said.out
