"""The migration page: its Python blocks run, and its tables name things that exist.

Below the public face: the page is compared with the table of refused names.
"""

import importlib
import inspect
import pickle
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, marked_for
from torch import nn

import mpinit
from mpinit.compat import uninstall_apex
from mpinit.compat.importing import MISSING

PAGE = Path(mpinit.__file__).parents[1] / "docs" / "how-to" / "migrate.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:<!-- (.*?) -->\n)?```python\n(.*?)```", TEXT, re.DOTALL)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    uninstall_apex()


def beginning() -> dict[str, Any]:
    """What every block finds: the names a training script has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return {
        "__name__": "page",
        "torch": torch,
        "mpinit": mpinit,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(4)],
    }


def execute(source: str) -> dict[str, Any]:
    namespace = beginning()
    line = TEXT[: TEXT.index(source)].count("\n")
    exec(compile("\n" * line + source, str(PAGE), "exec"), namespace)
    return namespace


def test_the_page_has_its_blocks_and_rows() -> None:
    assert len(BLOCKS) == TEXT.count("```python") > 8
    assert len(ROWS) > 30


@pytest.mark.parametrize("source", [source for mark, source in BLOCKS if not mark.startswith("skip")])
def test_block(source: str) -> None:
    execute(source)


def test_the_two_loops_train_the_same_weights_within_rounding() -> None:
    marked = dict(BLOCKS)
    theirs = execute(marked["torch.amp"])["model"].state_dict()
    ours = execute(marked["mpinit"])["model"].state_dict()
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=2e-3, atol=2e-3)


def test_what_fp16_optimizer_saved_can_be_read() -> None:
    execute(dict(BLOCKS)["old scalers"])
    for kind in ("LossScaler", "DynamicLossScaler"):
        assert pickle.loads(f"capex.fp16_utils.loss_scaler\n{kind}\n.".encode()).__name__ == "Scaler"


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([A-Za-z_][\w.]*)", cell)


def resolve(name: str) -> Any:
    """The object a dotted name stands for; an AttributeError where there is none."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:index]))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_a_row_names_what_there_is(row: list[str]) -> None:
    mpinit.install_as_apex()
    old, new, note = row
    for name in names_in(old):
        if name not in MISSING:
            resolve(name.replace("GradScaler", "torch.amp.GradScaler") if name.startswith("GradScaler") else name)
    for name in [*names_in(new), *names_in(note)]:
        if name.split(".")[0] in ("mpinit", "torch"):
            assert resolve(name) is not None


def test_every_public_function_of_amp_has_a_row() -> None:
    rows = {name for row in ROWS for name in names_in(row[0])}
    amp = importlib.import_module("mpinit.compat.apex.amp")
    assert {f"apex.amp.{name}" for name in amp.__all__} <= rows


def test_links_lead_to_headings() -> None:
    anchors = {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    for link in re.findall(r"\]\(#(.*?)\)", TEXT):
        assert link in anchors


FLAGS = re.findall(r"^\| (\w+): `(\w+)=(.+?)` \|.*?`.*?\"(O\d)\".*?` \|", TEXT, re.MULTILINE)


def accepted(framework: str, flag: str, value: str) -> bool:
    """Whether a framework knows a flag, and its value."""
    let_torchvision_load()
    match framework:
        case "Accelerate":
            assert flag in inspect.signature(importlib.import_module("accelerate").Accelerator).parameters
            return value in importlib.import_module("accelerate.utils").PrecisionType.list()
        case "Transformers":
            return flag in inspect.signature(importlib.import_module("transformers").TrainingArguments).parameters
        case _:
            known = importlib.import_module("lightning.fabric.connector")._PRECISION_INPUT_STR
            return flag == "precision" and value in typing.get_args(known)


@marked_for("accelerate", "transformers", "lightning")
def test_flags_and_levels_on_the_page_exist() -> None:
    assert len(FLAGS) == 8
    assert all(accepted(framework, flag, value.strip('"')) for framework, flag, value, _ in FLAGS)
    types = {"fp16": "O1", "bf16": "O4", "16-mixed": "O1", "bf16-mixed": "O4", "16-true": "O2", "bf16-true": "O5"}
    for framework, flag, value, level in FLAGS:
        assert level == types[flag if framework == "Transformers" else value.strip('"')]
