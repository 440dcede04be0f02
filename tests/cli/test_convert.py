"""Checkpoints of apex, torch.amp and mpinit, each as another's: loaded, training goes on with the same numbers."""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, train
from torch import nn

import mpinit
from mpinit.cli import main
from mpinit.cli.convert import FORMATS, converted

CASE = CASES["lstm"]


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASE.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, "O2", init_loss_scale=1024.0, verbosity=0)
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


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_form_becomes_every_other(source: str, to: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(saved(model, optimizer, source), tmp_path / "in.pt")
    assert main(["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", to]) == 0
    found = torch.load(tmp_path / "out.pt")
    expected = saved(model, optimizer, to)
    assert set(found) == set(expected)
    assert all(same(found[key], expected[key]) for key in expected)


def test_training_goes_on_from_what_torch_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint = copy.deepcopy(converted(saved(model, optimizer, "torch"), "mpinit")[0])
    batches = CASE.batches(6)[3:]
    expected = train(model, optimizer, batches, CASE.loss)
    resumed = CASE.build(1)
    other = torch.optim.Adam(resumed.parameters(), lr=0.01)
    mpinit.initialize(resumed, other, "O2", verbosity=0)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    mpinit.load_state_dict(checkpoint["mpinit"], other)
    assert mpinit.state_dict(other)["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 3}
    assert train(resumed, other, batches, CASE.loss) == expected


def test_apexs_wrapped_optimizer_is_refused_with_the_way_out() -> None:
    inner = {"state": {}, "param_groups": []}
    wrapped = {"loss_scaler": {}, "optimizer_state_dict": inner, "fp32_from_fp16": [[torch.ones(3, 4)]]}
    checkpoint = {"model": nn.Linear(4, 3).half().state_dict(), "optimizer": wrapped}
    for to in FORMATS:
        with pytest.raises(
            ValueError, match=r"'optimizer' is apex's FP16_Optimizer.*\['fp32_from_fp16'\].* save model\."
        ):
            converted(checkpoint, to)


def test_steps_of_apexs_fused_optimizers_reach_every_parameter() -> None:
    state = {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0], "step": 7}]}
    found = converted({"optimizer": state}, "torch")[0]["optimizer"]
    assert found["state"][0]["step"] == 7.0
    assert "step" not in state["state"][0], "what was given is not changed"


def test_16_bit_weights_are_widened() -> None:
    found, said = converted({"model": nn.Linear(2, 2).half().state_dict()}, "mpinit")
    assert {tensor.dtype for tensor in found["model"].values()} == {torch.float32}
    assert "2 tensors were 16-bit, the first 'weight'" in said[0]


def test_several_losses_become_the_one_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scales = {f"loss_scaler{index}": {"loss_scale": 2.0**index, "unskipped": index} for index in range(3)}
    torch.save({"amp": scales}, tmp_path / "in.pt")
    words = ["convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "--to", "torch", "--json"]
    assert main([*words, "--loss-id", "9"]) == 2
    assert "there is no loss 9; the file has loss_scaler0" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
    assert main([*words, "--loss-id", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] == ["scaler"]
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(tmp_path / "out.pt")["scaler"])
    assert (scaler.get_scale(), scaler._growth_tracker or scaler._init_growth_tracker) == (4.0, 2)


def test_files_that_are_none_or_would_be_lost_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("good.pt", "other.pt", "text.pt", "code.pt", "zip.pt", "lost.pt", "other.gif", "empty.pt")
    good, other, text, code, archive, lost, other_format, empty = (tmp_path / name for name in names)
    empty.touch()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("a.txt", "a")
    torch.save({"amp": {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}}, good)
    other.write_bytes(good.read_bytes())
    text.write_text("no checkpoint")
    code.write_bytes(pickle.dumps({"model": Path("x")}))
    out = str(tmp_path / "out.pt")
    other_format.write_bytes(b"GIF89a")
    lost.symlink_to(tmp_path / "nowhere")
    wrong = [
        ([str(good), str(good)], "is the file to read"),
        ([str(good), str(other)], "is there already; give another name, or --force"),
        ([str(good), str(lost)], "is there already; give another name, or --force"),
        ([str(text), out], "text.pt is no checkpoint"),
        ([str(other_format), out], "other.gif is no checkpoint"),
        ([str(empty), out], "empty.pt is no checkpoint"),
        ([str(archive), out], "zip.pt is no checkpoint"),
        ([str(code), out], "--trust"),
    ]
    for words, error in wrong:
        assert main(["convert", *words, "--to", "torch"]) == 2
        said = capsys.readouterr().err
        assert error in said
        assert "--trust" not in said or "code.pt" in said, "which would not help"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert main(["convert", str(good), str(other), "--to", "torch", "--force"]) == 0
    assert list(torch.load(other)) == ["scaler"]


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ([1], "the file holds list"),
        ({"epoch": 1}, "found no loss scale, model or optimizer"),
        ({"amp": {"loss_scaler0": {"loss_scale": -1.0, "unskipped": 0}}}, "'amp': loss_scaler0 has loss_scale=-1.0"),
    ],
)
def test_what_cannot_be_converted_is_refused(checkpoint: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        converted(checkpoint, "mpinit")


def test_only_the_file_that_is_named_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file beside it that was there before, nor what a link there leads to."""
    good, out, beside, far = (tmp_path / name for name in ("good.pt", "out.pt", "out.pt.part", "far.txt"))
    torch.save({"amp": {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}}, good)
    far.write_text("of another")
    beside.symlink_to(far)
    assert main(["convert", str(good), str(out), "--to", "torch"]) == 0
    assert far.read_text() == "of another"
    assert beside.is_symlink()
    assert list(torch.load(out)) == ["scaler"]

    def fails(value: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fails)
    before = out.read_bytes()
    assert main(["convert", str(good), str(out), "--to", "mpinit", "--force"]) == 2
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far.txt", "good.pt", "out.pt", "out.pt.part"]
