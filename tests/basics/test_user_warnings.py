"""user_warnings: a warning points at the line of the user's that led to it.

Below the public face: ``warn_user`` is called from frames that stand for the package's and torch's.
"""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpinit
from mpinit.basics.logs import warn_user

# Compiled under the name of a file of the package, so that its frames are the package's.
SOURCE = """
def deep(*_):
    deeper()
def deeper():
    warn_user("found")
"""
_space: dict[str, Any] = {"warn_user": warn_user, "__name__": "mpinit.deep"}
exec(compile(SOURCE, str(Path(mpinit.__file__).parent / "deep.py"), "exec"), _space)
deep = _space["deep"]


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_warning_skips_frames_of_the_package() -> None:
    with pytest.warns(UserWarning, match="found") as caught:
        deep()
    here = line() - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, here)


def test_hook_that_torch_calls_points_at_call_of_torchs_method() -> None:
    module = nn.Identity()
    module.register_forward_pre_hook(deep)
    with pytest.warns(UserWarning, match="found") as caught:
        module(torch.ones(1))
    here = line() - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, here)


@pytest.mark.parametrize("face", [mpinit, mpinit.amp], ids=["mpinit", "amp"])
def test_warnings_of_initialize_point_at_the_call(face: Any) -> None:
    model = nn.Linear(2, 2).half()
    with pytest.warns(UserWarning, match="16-bit") as caught:
        face.initialize(model, opt_level="O1")
    here = line() - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, here)


def test_the_same_line_warns_once_by_default() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            deep()
    assert len(caught) == 1


def test_code_that_was_generated_without_a_module_is_no_user_s() -> None:
    namespace: dict[str, Any] = {"deep": deep}
    generated = eval("lambda: deep()", namespace)  # as torch.fx generates it; Python drops warnings of such code
    with pytest.warns(UserWarning, match="found") as caught:
        generated()
    here = line() - 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, here)
