"""torch's own lists of what autocast casts, run through O1: each function gives the type that its list says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, in_thread, o1_plan
from torch.utils._pytree import tree_leaves, tree_map

from mpinit.functions import apply
from mpinit.torch_internals.cpu_autocast_list import RUNS_AS_GIVEN
from mpinit.torch_internals.forward_casts import ForwardCasts

pytestmark = pytest.mark.filterwarnings("ignore")

# Kernels of one vendor, private entries that no Python name of torch's public modules leads to, and nll_loss2d, which
# torch.nn.functional.nll_loss calls.
NOT_PUBLIC = ("cudnn_convolution", "cudnn_convolution_transpose", "_convolution", "_native_multi_head_attention")
NOT_PUBLIC += ("_addmm_activation",)
# Their result is no tensor; a method of Python 2.
NO_TENSOR = ("equal", "__div__")


def cases(lists: Any, lower: torch.dtype) -> Iterator[tuple[str, str, Any, Any, torch.dtype]]:
    """(list, function's name, arguments, keyword arguments, the result's type)."""
    expected: dict[str, Any] = {
        "torch_fp16": lower,
        "torch_16": lower,
        "nn_fp16": lower,
        "nn_16": lower,
        "linalg_fp16": lower,
        "methods_fp16": lower,
        "torch_fp32": FP32,
        "nn_fp32": FP32,
        "methods_fp32": FP32,
        "torch_need_autocast_promote": FP32,
    }
    for name, wanted in expected.items():
        for entry in getattr(lists, name, ()):
            # einsum's entry is for none to run. Some kernels are on the CPU's list alone: there the policy is CUDA's.
            if entry[0] not in (*NOT_PUBLIC, *RUNS_AS_GIVEN[2:]) and not isinstance(entry[1], str):
                kwargs = entry[-1] if isinstance(entry[-1], dict) else {}
                yield name, entry[0], entry[1], kwargs, wanted
    for name in ("torch_expect_builtin_promote", "methods_expect_builtin_promote"):
        for function, *arguments, wanted in getattr(lists, name):
            if function not in NO_TENSOR:
                for args in arguments:
                    yield name, function, args, {}, wanted


def owner_of(lists: str, name: str) -> tuple[Any, str]:
    if lists.startswith("linalg"):
        return torch.linalg, name.removeprefix("linalg_")
    if lists.startswith("methods"):
        return torch.Tensor, name
    if lists.startswith("nn"):
        return (torch.nn.functional, name) if hasattr(torch.nn.functional, name) else (torch._C._nn, name)
    return torch, name


def narrowed(tree: Any, lower: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (HALF, BF16):
            return leaf.to(lower)
        return leaf

    return tree_map(cast, tree)


def outcome(lists: str, name: str, args: Any, kwargs: Any) -> set[torch.dtype]:
    owner, attribute = owner_of(lists, name)
    result = getattr(owner, attribute)(*args, **kwargs)
    return {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize("lower", [HALF, BF16], ids=str)
@pytest.mark.parametrize("which", ["AutocastTestLists", "AutocastCPUTestLists"])
def test_every_listed_function_gives_its_lists_type(which: str, lower: torch.dtype) -> None:
    from torch.testing._internal import autocast_test_lists

    lists = getattr(autocast_test_lists, which)(torch.device("cpu"))

    def run() -> list[str]:
        undo = apply(o1_plan(cast_scope="model", allow_banned=True))
        wrong = []
        try:
            for source, name, args, kwargs, wanted in cases(lists, lower):
                with ForwardCasts(lower):
                    try:
                        found: Any = outcome(source, name, narrowed(args, lower), kwargs)
                    except Exception as error:
                        found = error
                if found != {wanted}:
                    wrong.append(f"{source}: {name} gives {found}, not {wanted}")
        finally:
            undo()
        return wrong

    wrong = in_thread(run)
    assert not wrong, "\n".join(wrong)
