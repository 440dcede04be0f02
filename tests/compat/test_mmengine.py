"""MMEngine's own integration of apex, over mpinit: its wrapper, its Runner, its state dicts."""

import subprocess
from pathlib import Path

import pytest
from forked_runs import run_code
from frameworks import marked_for

PROGRAM = """
import os, traceback, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch, mpinit
mpinit.install_as_apex()
import frameworks
frameworks.let_torchvision_load()
from loops import iterate
from mmengine.optim import ApexOptimWrapper
from mmengine.runner import Runner
from recipe_names import names_of


def check(level, folder):
    more = {"loss_scale": 128.0} if level == "O3" else {}

    def made():
        names = names_of("mmengine", folder)
        return names, ApexOptimWrapper(optimizer=names["optimizer"], opt_level=level, verbosity=0, **more)

    names, wrapper = made()
    data = {"train_dataloader": names["loader"], "train_cfg": names["epochs"]}
    Runner(names["model"], str(folder), optim_wrapper=wrapper, log_level="ERROR", **data).train()
    state = wrapper.state_dict()

    by_hand = names_of("mmengine", folder)
    model, optimizer = by_hand["model"], by_hand["optimizer"]
    mpinit.initialize(model, optimizer, opt_level=level, verbosity=0, **{"loss_scale": "dynamic", **more})
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(by_hand["loader"]["dataset"], 8):
            iterate(model(x, y, mode="loss")["loss"], optimizer)
    here, there = model.state_dict(), names["model"].state_dict()
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    assert next(names["model"].parameters()).dtype is (torch.float16 if level in ("O2", "O3") else torch.float32)

    assert state["apex_amp"]["loss_scaler0"]["loss_scale"] == mpinit.loss_scale(optimizer)

    mpinit.undo(model)
    mpinit.undo(names["model"])
    again, other = made()
    other.load_state_dict(dict(state))  # before initialize: kept until the first iteration
    with other.optim_context(again["model"]):
        pass
    assert other.state_dict()["apex_amp"] == state["apex_amp"]
    other.load_state_dict(dict(state))  # and after it
    loss = again["model"](torch.randn(4, 4), torch.tensor([0, 1, 0, 1]), mode="loss")["loss"]
    other.update_params(loss)
    assert len(other.state_dict()["state"]) == len(state["state"])


# A process for each level, forked: importing MMEngine lasts longer than a training.
for level in LEVELS:
    child = os.fork()
    if not child:
        try:
            check(level, Path(FOLDER) / level)
            print(level, "passed", flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""
LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """All levels, trained."""
    paths = f"import sys\nsys.path[:0] = [{str(Path(__file__).parents[1] / 'support')!r}]\n"
    folder = tmp_path_factory.mktemp("mmengine")
    for level in LEVELS:
        (folder / level).mkdir()
    return run_code(f"{paths}LEVELS, FOLDER = {LEVELS!r}, {str(folder)!r}\n{PROGRAM}")


@marked_for("mmengine")
@pytest.mark.parametrize("level", LEVELS)
def test_wrapper_for_apex_trains_with_bits_of_loop_by_hand(level: str, done: subprocess.CompletedProcess[str]) -> None:
    assert f"{level} passed" in done.stdout.splitlines(), done.stderr
