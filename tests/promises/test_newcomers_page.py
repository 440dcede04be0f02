"""The way of one iteration, which CONTRIBUTING.md shows to newcomers, against an iteration."""

import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import mpinit

PACKAGE = Path(mpinit.__file__).parent
PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
SECTION = PAGE.partition("## One iteration\n")[2].partition("\n## ")[0]
LINES = re.findall(r"^(\d+)\. `([\w/]+\.py):([\w.]+)` ", SECTION, re.M)
FUNCTIONS = [(file, name) for _, file, name in LINES]


def code_of(file: str, name: str) -> CodeType:
    module = importlib.import_module("mpinit." + file.removesuffix(".py").replace("/", "."))
    function: Any = functools.reduce(getattr, name.split("."), module)
    code: CodeType = inspect.unwrap(function).__code__
    return code


def entered() -> list[CodeType]:
    """Run the second of two iterations at O2; return what it enters of the package, in order."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    # No native code steps this optimizer, built or not.
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, opt_level="O2")
    found: list[CodeType] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.append(frame.f_code)

    def iterate() -> None:
        loss = 1e-3 * model(torch.ones(2, 4)).square().mean()  # not so large that a step is skipped
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        mpinit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    iterate()
    before = sys.getprofile()
    sys.setprofile(record)
    try:
        iterate()
    finally:
        sys.setprofile(before)
    mpinit.undo(model)
    return found


def test_way_of_one_iteration_has_at_most_twelve_numbered_lines() -> None:
    lines = re.findall(r"^\d+\..*", SECTION, re.M)
    assert [int(number) for number, *_ in LINES] == list(range(1, len(lines) + 1))
    assert 8 <= len(lines) <= 12


@pytest.mark.parametrize(("file", "name"), FUNCTIONS)
def test_function_of_a_line_exists_in_its_file(file: str, name: str) -> None:
    assert Path(code_of(file, name).co_filename) == PACKAGE / file


def test_an_iteration_enters_the_functions_in_the_order_of_the_lines() -> None:
    left = iter(entered())
    missing = [f"{file}:{name}" for file, name in FUNCTIONS if code_of(file, name) not in left]
    assert not missing, "not entered, or before the line above"
