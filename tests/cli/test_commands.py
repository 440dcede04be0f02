"""The command line: every command, and convert's files.

Below the public face: checkpoints are converted in memory, and compared with the list of formats.
"""

import copy
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import adam, start
from models import CASES, train
from states_by_name import assert_same
from torch import nn

import mpinit
from mpinit import OPT_LEVELS
from mpinit.cli import COMMANDS, main
from mpinit.cli.convert import FORMATS, converted

CLASSIFIER = "cli_models:classifier"

Said = Callable[..., tuple[int, str, str]]
Printed = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command; its status, or what it ends with, and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def printed(said: Said) -> Printed:
    """What a command prints that succeeds."""

    def run(*arguments: str) -> str:
        status, out, _ = said(*arguments)
        assert status == 0
        return out

    return run


def cells(out: str) -> dict[str, list[str]]:
    """Of each line of a table its first word, and the others."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}


def test_levels_shows_the_table_of_properties(printed: Printed) -> None:
    lines = cells(printed("levels"))
    assert lines["property"] == list(OPT_LEVELS)
    assert lines["loss_scale"] == ["1.0", "dynamic", "dynamic", "1.0", "1.0", "1.0"]
    assert lines["master_weights"] == ["False", "None", "True", "False", "None", "True"]


def test_levels_applies_overrides(printed: Printed, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('max_loss_scale = 8.0\nopt_level = "O3"\nnum_losses = 2\n')
    given = ["--set", "loss_scale=128", "--set", "keep_fp32=a, b", "--config", str(config)]
    lines = cells(printed("levels", "O2", *given))
    assert lines["loss_scale*"] == ["128.0"]
    assert lines["keep_fp32*"] == ["a,", "b"]
    assert lines["max_loss_scale*"] == ["8.0"]
    assert lines["master_weights"] == ["True"]
    assert lines["num_losses*"] == ["2"]
    assert lines["verbosity"] == ["1"]
    assert cells(printed("levels", "O2", "O5", "--set", "loss_scale=128"))["loss_scale*"] == ["128.0", "128.0"]


def test_levels_report_a_refused_override(printed: Printed) -> None:
    out = printed("levels", "--set", "cast_model_type=bf16")
    for level in ("O1", "O4"):
        assert f"refused at {level}: cast_model_type=torch.bfloat16 contradicts" in out


def test_levels_show_the_type_that_is_used(printed: Printed) -> None:
    """Check that the dtype of patched functions is None without patched functions."""
    for level, used in (("O1", "float16"), ("O4", "bfloat16"), ("O5", "None"), ("O2", "None")):
        assert cells(printed("levels", level))["patch_torch_functions_type"][0] == used
    assert "float16 " not in printed("levels", "O5").replace("bfloat16", "")


@pytest.mark.parametrize("spec", [[CLASSIFIER, "--optimizer", "adamw", "--lr", "1e-5"], ["cli_models:pair"]])
def test_audit_names_what_cannot_move_and_the_cure(spec: list[str], printed: Printed) -> None:
    out = printed("audit", *spec, "--dtype", "bf16")
    assert "1.weight" in out and "100.0%" in out and "opt_level='O5'" in out.replace("\n", " ")
    assert cells(out)["O2"] == ["2.00", "4.00", "4.00", "8.00", "18.00"]


WRONG: dict[str, tuple[list[str], str]] = {
    "a level": (["levels", "O9"], "opt_level='O9' is not a level"),
    "an override": (["levels", "--set", "loss_scale"], "write NAME=VALUE"),
    "a value": (["levels", "--set", "loss_scale=x"], "loss_scale: 'x' is not a loss scale"),
    "a property": (["levels", "--set", "los_scale=2"], "did you mean 'loss_scale'"),
    "a keyword that is no property": (
        ["levels", "--set", "models=2"],
        "there is no property 'models'. There are: cast_model_type,",
    ),
    "a keyword for a dtype": (["levels", "--set", "dtype=bf16"], "no property 'dtype': the level sets the dtype"),
    "an object": (["audit", "cli_models:NOT_A_FUNCTION"], "is an object of"),
    "an option": (["levels", "--bogus"], "unrecognized arguments: --bogus"),
    "no name": (["audit", "cli_models"], "cli_models is an object of module, not a function"),
    "no module": (["audit", "no_such_module:build"], "ModuleNotFoundError: No module named 'no_such_module'"),
    "no factory": (["audit", "cli_models:build"], "module 'cli_models' has no attribute 'build'"),
    "no model": (["audit", "cli_models:returns_no_model"], "returned int, not a torch.nn.Module"),
    "the factory's own": (["audit", "cli_models:raises"], "KeyError: 'on purpose'"),
    "a folder": (
        ["convert", __file__, "nodir/out.pt", "--to", "mpinit"],
        "FileNotFoundError: [Errno 2] No such file or directory: 'nodir/out.pt'",
    ),
    "no config": (
        ["levels", "--config", "no_such.toml"],
        "No such file or directory: 'no_such.toml'",
    ),
    "a rate": (["audit", CLASSIFIER, "--lr", "1e-7"], "--lr 1e-07 is the learning rate of --optimizer"),
    "an optimizer": (["audit", CLASSIFIER, "--optimizer", "adamx"], "'adamx' is not an optimizer of torch.optim"),
    "a file": (["convert", "no_such.pt", "out.pt", "--to", "mpinit"], "No such file or directory: 'no_such.pt'"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_errors_are_one_line_with_exit_status_2(arguments: list[str], words: str, said: Said) -> None:
    status, out, err = said(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(("mpinit: unrecognized", f"mpinit {arguments[0]}: "))
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("arguments", [["convert", "a"], ["convert", "a", "b", "--to", "x"], ["audit"]])
def test_missing_arguments_are_one_line_too(arguments: list[str], said: Said) -> None:
    status, _, err = said(*arguments)
    assert (status, err.count("\n")) == (2, 1)


def test_traceback_shows_where_an_error_comes_from() -> None:
    with pytest.raises(KeyError, match="on purpose"):
        main(["audit", "cli_models:raises", "--traceback"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, printed: Printed) -> None:
    out = printed(name, "--help")
    assert f"usage: mpinit {name}" in out
    assert len(out.split()) > 20


def test_no_command_prints_the_help(said: Said) -> None:
    status, out, err = said()
    assert (status, err) == (0, "")
    assert all(name in out for name in COMMANDS)


def test_a_misspelt_command_shows_the_commands(said: Said) -> None:
    status, _, err = said("lvels", "O2")
    assert status == 2 and err.count("\n") == 1
    assert "lvels" in err and all(name in err for name in COMMANDS)


@pytest.mark.parametrize("words", [["-m"], []])
def test_run_asks_for_the_argument_that_is_missing(words: list[str], said: Said) -> None:
    status, out, err = said("run", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "required: SCRIPT or MODULE" in err


def test_version(said: Said) -> None:
    assert said("--version") == (0, f"mpinit {mpinit.__version__}\n", "")


def test_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m mpinit levels O2 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("What the levels set")


CASE = CASES["lstm"]


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASE.build()
    optimizer = start(model, make=adam)
    train(model, optimizer, CASE.batches(steps), CASE.loss)
    return model, optimizer


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    scale = mpinit.state_dict(optimizer)
    if form == "torch":
        scaler = torch.amp.GradScaler("cpu", init_scale=scale["loss_scaler0"]["loss_scale"])
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        scaler._growth_tracker.fill_(scale["loss_scaler0"]["unskipped"])
        return {**state, "scaler": scaler.state_dict()}
    return {**state, ("amp" if form == "apex" else "mpinit"): scale}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_convert_between_all_formats(source: str, to: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(saved(model, optimizer, source), tmp_path / "in.pt")
    assert main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", to]) == 0
    found = torch.load(tmp_path / "out.pt")
    expected = saved(model, optimizer, to)
    assert set(found) == set(expected)
    assert_same(found, expected, dtype=None)


def test_training_resumes_from_a_converted_torch_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = copy.deepcopy(converted(saved(model, optimizer, "torch"), "mpinit")[0])
    batches = CASE.batches(6)[3:]
    expected = train(model, optimizer, batches, CASE.loss)
    resumed = CASE.build(1)
    other = start(resumed, make=adam, loss_scale=mpinit.DynamicLossScale(init=2.0))
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    mpinit.load_state_dict(checkpoint["mpinit"], other)
    assert mpinit.state_dict(other)["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 3}
    assert train(resumed, other, batches, CASE.loss) == expected


def test_apexs_wrapped_optimizer_is_refused_with_the_way_out() -> None:
    inner = {"state": {}, "param_groups": []}
    wrapped = {"loss_scaler": {}, "optimizer_state_dict": inner, "fp32_from_fp16": [[torch.ones(3, 4)]]}
    checkpoint = {"model": nn.Linear(4, 3).half().state_dict(), "optimizer": wrapped}
    message = r"'optimizer' is apex's FP16_Optimizer.*\['fp32_from_fp16'\].* save model\."
    for to in FORMATS:
        with pytest.raises(ValueError, match=message):
            converted(checkpoint, to)


def test_steps_of_apexs_fused_optimizers_reach_every_parameter() -> None:
    state = {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0], "step": 7}]}
    found = converted({"optimizer": state}, "torch")[0]["optimizer"]
    assert found["state"][0]["step"] == 7.0
    assert "step" not in state["state"][0], "the checkpoint is not changed"


def test_the_first_of_several_losses_becomes_the_scale_of_torch(tmp_path: Path) -> None:
    scales = {f"loss_scaler{index}": {"loss_scale": 2.0 ** (index + 2), "unskipped": 2} for index in range(3)}
    torch.save({"amp": scales}, tmp_path / "in.pt")
    assert main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", "torch"]) == 0
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(tmp_path / "out.pt")["scaler"])
    assert (scaler.get_scale(), scaler._growth_tracker or scaler._init_growth_tracker) == (4.0, 2)


def test_convert_refuses_missing_inputs_and_existing_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("good.pt", "other.pt", "text.pt", "code.pt", "zip.pt", "lost.pt", "empty.pt")
    good, other, text, code, archive, lost, empty = (tmp_path / name for name in names)
    empty.touch()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("a.txt", "a")
    torch.save({"amp": {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}}, good)
    other.write_bytes(good.read_bytes())
    text.write_text("no checkpoint")
    code.write_bytes(pickle.dumps({"model": Path("x")}, protocol=2))
    out = str(tmp_path / "out.pt")
    lost.symlink_to(tmp_path / "nowhere")
    wrong = [
        ([str(good), str(other)], "File exists"),
        ([str(good), str(lost)], "File exists"),
        ([str(text), out], "text.pt contains pickled objects, or is not a checkpoint"),
        ([str(empty), out], "EOFError"),
        ([str(archive), out], "RuntimeError"),
        ([str(code), out], "--trust"),
    ]
    for words, error in wrong:
        assert main(["convert", *words, "--to", "torch"]) == 2
        assert error in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ([1], "the file contains list"),
        (
            {"amp": {"loss_scaler0": {"loss_scale": -1.0, "unskipped": 0}}},
            r"loss_scale=-1.0 is not a number between 2\*\*-126 and 2\*\*126",
        ),
    ],
)
def test_convert_refuses_unknown_contents(checkpoint: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        converted(checkpoint, "mpinit")


def test_a_failed_convert_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, out = tmp_path / "good.pt", tmp_path / "out.pt"
    torch.save({"amp": {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}}, good)

    def fails(value: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fails)
    assert main(["convert", str(good), str(out), "--to", "mpinit"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["good.pt"]
