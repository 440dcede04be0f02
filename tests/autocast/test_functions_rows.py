"""Every row of the cast policy, called for real through every name it can be reached by.

Below the public face: every row of the policy is called, without a model.
"""

from typing import Any

import pytest
import simulated_device
import torch
from cast_samples import SAMPLES, Make, keywords, resolve, sample
from casts import BF16, FP32, HALF, StartCasts
from session_device import device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from mpinit.autocast import thread_flags
from mpinit.autocast.cast_lists import APEX_POLICY, TORCH_POLICY, Cast, CastRow
from mpinit.autocast.casters import wrapper
from mpinit.autocast.forward_casts import ForwardCasts
from mpinit.autocast.thread_flags import device_types

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(upsample|deprecated|reduction|swap|size_average|in beta|RNN module weights are not part of single)"
)

_IN_TORCH = {row.name: row for row in TORCH_POLICY}
# The stricter policy's own rows: the others are the same objects and tested once.
CASES = [(row, "torch") for row in TORCH_POLICY] + [
    (row, "apex") for row in APEX_POLICY if _IN_TORCH.get(row.name) is not row
]
# Each name in one 16-bit type or the other in every run.
NAMES = [
    pytest.param(
        *(row, policy, name, lower),
        id=f"{policy}-{name.removeprefix('torch.')}-{'fp16' if lower is HALF else 'bf16'}",
        marks=() if (index + (lower is BF16)) % 2 == 0 else pytest.mark.nightly,
    )
    for index, (row, policy, name) in enumerate((*case, name) for case in CASES for name in case[0].names)
    for lower in (HALF, BF16)
]


@pytest.fixture(params=[HALF, BF16], ids=["fp16", "bf16"])
def lower(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def floating(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def expected(row: CastRow, lower: torch.dtype, given: tuple[torch.dtype, ...]) -> torch.dtype:
    if row.cast is Cast.LOWER_PRECISION:
        return lower
    if row.cast is Cast.PROMOTE:
        return given[0] if len(given) == 1 else FP32
    return FP32


@pytest.mark.device
@pytest.mark.parametrize(("row", "policy", "name", "lower"), NAMES)
def test_names_give_the_rows_dtype_and_the_inputs_gradients(
    row: CastRow, policy: str, name: str, lower: torch.dtype, start_casts: StartCasts
) -> None:
    start_casts(patch_torch_functions_type=lower, cast_policy=policy)
    follows(row, name, device().type, lower)


@pytest.mark.parametrize("accelerator", ["cuda", "mps"])
def test_rows_hold_for_tensors_of_cpu_where_there_is_accelerator(
    accelerator: str, monkeypatch: pytest.MonkeyPatch, start_casts: StartCasts
) -> None:
    """CUDA is on the rows' lists and Metal is not: one wrapper for the CPU inside another."""
    monkeypatch.setattr(thread_flags, "_devices", ("cpu", accelerator))
    start_casts()
    for row in TORCH_POLICY:
        for name in row.names:
            follows(row, name, "cpu", HALF)


@pytest.mark.gpu
def test_rows_hold_on_a_device_with_a_list_of_its_own(start_casts: StartCasts) -> None:
    if device().type != "sim":
        pytest.skip("every other device has one always")
    start_casts()
    with simulated_device.autocast_list():
        for row in TORCH_POLICY:
            for name in row.names:
                follows(row, name, "sim", HALF)


def follows(row: CastRow, name: str, device: str, lower: torch.dtype) -> None:
    """Results in the row's dtype, gradients in the inputs' dtype."""
    if row.cast is Cast.REFUSED:
        refuses(name, row, device, lower)
        return
    if device == "sim" and name.startswith("torch.sparse."):
        return  # it has no sparse tensors
    for given in ((FP32,), (lower,), (lower, FP32)):
        make = Make(device, *given)
        if row.cast is Cast.BANNED and HALF in given:
            with pytest.raises(NotImplementedError):
                resolve(name)(*sample(row.name, name)(make))
            continue
        outputs = floating(resolve(name)(*sample(row.name, name)(make), **keywords(name, device)))
        used = given if len(make.made) > 1 else given[:1]
        assert [output.dtype for output in outputs] == [expected(row, lower, used)] * len(outputs), (name, given)
        assert outputs
        differentiable = [output for output in outputs if output.requires_grad]
        sum(output.float().sum() for output in differentiable).backward()  # type: ignore[union-attr]
        gradients = [(leaf.grad, leaf.dtype) for leaf in make.made if leaf.grad is not None]
        assert gradients
        assert all(grad.dtype is dtype for grad, dtype in gradients)


def refuses(name: str, row: CastRow, device: str, lower: torch.dtype) -> None:
    """In place on 16 bits: refused under casts; on float32, and without casts, it runs."""
    for dtype in (lower, FP32):
        args = sample(row.name, name)(Make(device, dtype))
        target, *rest = args[0].detach(), *args[1:]
        if dtype is lower:
            with pytest.raises(NotImplementedError, match=r"not\s+in place, or call \.float\(\)"):
                resolve(name)(target, *rest)
            with torch.autocast(device, enabled=False):
                assert resolve(name)(target, *rest).dtype is lower
        else:
            assert resolve(name)(target, *rest).dtype is FP32


def test_each_row_has_one_sample_and_each_sample_a_row_or_a_name() -> None:
    rows = {row.name for row, _ in CASES}
    names = {name for row, _ in CASES for name in row.names}
    assert all(row.name in SAMPLES or all(name in SAMPLES for name in row.names) for row, _ in CASES)
    assert set(SAMPLES) <= rows | names


@pytest.mark.device
def test_operators(lower: torch.dtype, start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions_type=lower)
    make = Make(device().type, lower)
    x, wide = make(3, 3), Make(device().type, FP32)(3, 3)
    assert [(x**2).dtype, (2.0**x).dtype, (1 / x).dtype, (x**x).dtype] == [FP32] * 4
    assert [(wide @ wide).dtype, (wide @ x).dtype, (x @ x).dtype] == [lower] * 3
    product = wide
    product = product @ wide
    assert product.dtype is lower


@pytest.mark.device
def test_in_place_out_and_explicit_dtypes_are_not_cast(lower: torch.dtype, start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions_type=lower)
    x = Make(device().type, lower)(2, 3).detach()
    out = torch.empty_like(x)
    assert torch.exp(x, out=out) is out
    assert out.dtype is lower
    kept = x.clone()
    assert kept.exp_() is kept
    assert kept.dtype is lower
    kept += Make(device().type, FP32)(2, 3).detach()
    kept.mul_(torch.ones(2, 3, device=device()))
    assert kept.dtype is lower
    assert torch.softmax(x, -1, dtype=torch.float64).dtype is torch.float64
    assert x.sum(dtype=lower).dtype is lower


def test_float64_and_integers_are_never_cast(start_casts: StartCasts) -> None:
    start_casts()
    double, number = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    assert (double @ double).dtype is torch.float64
    assert double.exp().dtype is torch.float64
    assert torch.dot(double[0], double[0]).dtype is torch.float64
    assert torch.einsum("ij,jk->ik", double, double).dtype is torch.float64
    assert number.sum().dtype is torch.int64


def test_banned_in_float16_only(start_casts: StartCasts) -> None:
    start_casts()
    loss = torch.nn.functional.binary_cross_entropy
    probability, target = torch.full((2,), 0.5), torch.ones(2)
    with pytest.raises(NotImplementedError, match=r"BCEWithLogitsLoss.*\"sigmoid\""):
        loss(probability.half(), target.half())
    with pytest.raises(NotImplementedError):
        torch.nn.BCELoss()(probability.half(), target)
    assert loss(probability, target).dtype is FP32
    assert loss(probability.bfloat16(), target.bfloat16()).dtype is FP32
    with torch.autocast("cpu", enabled=False):
        assert loss(probability.half(), target.half()).dtype is HALF


def test_the_policies_differ_only_where_they_should(start_casts: StartCasts) -> None:
    x = torch.ones(2, 3, dtype=HALF)
    start_casts()
    assert torch.nn.functional.gelu(x).dtype is HALF
    assert (x.std().dtype, x.cpu().dtype) == (HALF, HALF)
    assert x.clone().exp_().dtype is HALF
    start_casts(cast_policy="apex")
    assert torch.nn.functional.gelu(x).dtype is FP32
    assert (x.std().dtype, x.cpu().dtype) == (FP32, FP32)
    with pytest.raises(NotImplementedError, match=r"Tensor\.exp_"):
        x.clone().exp_()


@pytest.mark.device
@pytest.mark.parametrize("kind", device_types())
def test_wrappers_follow_the_flag_of_the_tensors_device(kind: str, start_casts: StartCasts) -> None:
    start_casts(patch_torch_functions="model")
    x = torch.ones(2, 3, dtype=HALF, device=kind)
    assert x.exp().dtype is HALF
    with ForwardCasts(HALF):
        assert x.exp().dtype is FP32
        assert torch.ones(2, dtype=HALF, device="meta").exp().dtype is HALF
    assert x.exp().dtype is HALF


@pytest.mark.parametrize("is_mixed", [False, True])
def test_recurrent_networks_on_cuda_get_one_dtype(is_mixed: bool, lower: torch.dtype) -> None:
    """Check what arrives at torch's function, which casts to float16 by itself, with tensors that have no memory."""
    received: list[list[torch.dtype]] = []
    (row,) = (row for row in TORCH_POLICY if row.name == "lstm")
    lstm = wrapper(row, "torch.lstm", lambda *args: received.append([x.dtype for x in floating(args)]), ("cuda",))
    before = torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        weights = [
            torch.empty(20, 6, device="cuda"),
            torch.empty(20, 5, device="cuda", dtype=lower if is_mixed else FP32),
        ]
        state = (torch.empty(1, 2, 5, device="cuda"),) * 2
        try:
            torch.set_autocast_dtype("cuda", lower)
            torch.set_autocast_enabled("cuda", True)
            lstm(torch.empty(3, 2, 6, device="cuda"), state, weights, False, 1, 0.0, False, False, False)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)
    assert set(received[0]) == ({FP32} if lower is HALF and not is_mixed else {lower})
