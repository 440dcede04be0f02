"""ForwardCasts and disable_casts: thread by thread, nested, recomputed; and how long weight casts live.

Below the public face: casts are entered without a model.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, StartCasts, in_thread, product_dtype
from torch.nn import functional as F

from mpinit.autocast import thread_flags
from mpinit.autocast.forward_casts import ForwardCasts
from mpinit.autocast.thread_flags import device_types, disable_casts


@pytest.mark.parametrize(("present", "expected"), [(False, ("cpu",)), (True, ("cpu", "cuda"))])
def test_build_for_device_not_there_counts_as_one_without(
    present: bool, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch.autocast warns of the missing device, for someone who only ever uses the CPU."""
    monkeypatch.setattr(thread_flags, "_devices", ())
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert device_types() == expected


@pytest.mark.filterwarnings("ignore:this forward runs inside a torch.autocast")
@pytest.mark.parametrize("scope", [True, "model"])
@pytest.mark.parametrize("where", ["here", "other thread"])
@pytest.mark.parametrize(
    "region", [disable_casts, lambda: torch.autocast("cpu", enabled=False)], ids=["disable_casts", "torch.autocast"]
)
def test_casts_off_around_a_forward_win(
    region: Callable[[], Any], where: str, scope: Any, start_casts: StartCasts
) -> None:
    start_casts(patch_torch_functions=scope)
    forward = ForwardCasts(HALF)

    def run() -> list[torch.dtype]:
        with region():
            with forward:
                seen = [product_dtype()]
                with torch.autocast("cpu", dtype=BF16):
                    seen.append(product_dtype())
                seen.append(product_dtype())
            seen.append(product_dtype())
        with forward:
            seen.append(product_dtype())
            with region():
                with forward:
                    seen.append(product_dtype())
                seen.append(product_dtype())
            seen.append(product_dtype())
        return seen

    seen = run() if where == "here" else in_thread(run)
    assert seen == [FP32, BF16, FP32, FP32, HALF, FP32, FP32, HALF]


def test_no_weight_cast_outlives_a_forward_in_an_autocast_block() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=HALF):
        with ForwardCasts(HALF):
            F.linear(x, weight)
        with torch.no_grad():
            weight.fill_(2.0)
        with ForwardCasts(HALF):
            assert F.linear(x, weight)[0, 0].item() == 8.0
