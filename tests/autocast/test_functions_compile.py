"""torch.compile under O1: fullgraph, the dtypes of eager mode, its values within tolerance, no recompilation.

Below the public face: every row of the policy is compiled, without a model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cast_samples import ROWS, Make, keywords, sample
from casts import BF16, FP32, HALF, o1_plan
from torch import nn
from torch.utils._pytree import tree_leaves

import mpinit
from mpinit.autocast import apply
from mpinit.autocast.cast_lists import TORCH_POLICY, Cast, CastRow
from mpinit.autocast.forward_casts import ForwardCasts
from mpinit.autocast.thread_flags import disable_casts

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|reduction|size_average|in beta|Dynamo detected)")

# A graph draws its own random numbers; torch's own RNNs are refused by dynamo unless allow_rnn is set, and
# gaussian_nll_loss, which reads whether a variance is negative, in one graph; nor sparse tensors.
NOT_HERE = {
    *("torch.sparse.mm", "torch.sparse.addmm"),
    *("torch.nn.functional.gumbel_softmax", "torch.lstm", "torch.gru", "torch.rnn_tanh", "torch.rnn_relu"),
    "torch.nn.functional.gaussian_nll_loss",
}
# torch 2.13 compiles it to other values without mpinit too, in float32: only its dtype is compared.
MISCOMPILED = {"torch.nn.functional.multilabel_margin_loss"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def names_of(cast: Cast) -> list[tuple[CastRow, str]]:
    """One function and one method of each row, where there are both."""
    found = []
    for row in TORCH_POLICY:
        if row.cast is cast:
            public = [name for name in row.names if "._VF." not in name and name not in NOT_HERE]
            found += [
                (row, name) for name in {name.rpartition(".")[0] == "torch.Tensor": name for name in public}.values()
            ]
    return found


def calling(names: list[str]) -> Callable[[list[tuple[Any, ...]]], list[Any]]:
    """A function whose source calls every name in turn, as a user's would."""
    calls = "\n".join(
        f"    out.append({name}(*args[{index}], **keywords[{index}]))" for index, name in enumerate(names)
    )
    scope: dict[str, Any] = {"torch": torch, "keywords": [*map(keywords, names)]}
    exec(f"def call(args):\n    out = []\n{calls}\n    return out", scope)
    return scope["call"]  # type: ignore[no-any-return]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.long
@pytest.mark.parametrize("cast", [Cast.LOWER_PRECISION, Cast.FP32, Cast.PROMOTE, Cast.BANNED], ids=str)
def test_every_row_compiles_to_what_eager_mode_gives(cast: Cast) -> None:
    rows = names_of(cast)
    given = {Cast.LOWER_PRECISION: FP32, Cast.BANNED: BF16}.get(cast, HALF)
    args = [sample(row.name, name)(Make("cpu", given)) for row, name in rows]
    call, forward = calling([name for _, name in rows]), ForwardCasts(HALF)
    undo = apply(o1_plan())
    try:
        eager = forward.run(call, args)
        compiled = torch.compile(lambda args: forward.run(call, args), fullgraph=True, backend="aot_eager")(args)
    finally:
        undo()
    for (_, name), want, got in zip(rows, eager, compiled, strict=True):
        for a, b in zip(tensors(want), tensors(got), strict=True):
            assert a.dtype is b.dtype, name
            if name not in MISCOMPILED:
                torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-2, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.long
def test_inductor_gives_the_dtypes_of_eager_mode() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(2, 4)
    mpinit.initialize(model, opt_level="O1", patch_torch_functions_type=BF16)
    seen = model(x)
    got = torch.compile(model, fullgraph=True)(x)
    assert got.dtype is seen.dtype is FP32
    torch.testing.assert_close(got, seen, rtol=2e-2, atol=2e-2)


def test_a_backward_compiled_with_casts_on_around_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with 1 + 2**-12, which float16 does not have, that a product in the backward pass is float32."""
    weight = torch.full((1, 1), 1 + 2.0**-12)
    undo = apply(o1_plan())
    try:

        def exact(x: torch.Tensor) -> torch.Tensor:
            with disable_casts():
                return x @ weight

        x = torch.ones(1, 1, requires_grad=True)
        torch.compile(exact, fullgraph=True, backend="aot_eager")(x).backward()
        assert x.grad is not None
        assert x.grad.item() == 1 + 2.0**-12
    finally:
        undo()


@pytest.mark.parametrize("scope", [True, "model"])
def test_disable_casts_around_a_compiled_model(scope: Any) -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain = model(x)
    mpinit.initialize(model, opt_level="O1", patch_torch_functions=scope)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x).float(), plain)
    with mpinit.disable_casts():
        assert torch.equal(compiled(x), plain)
    assert not torch.equal(compiled(x).float(), plain)


def test_functions_compile_again_after_the_last_session() -> None:
    """Check that dynamo's knowledge of wrapped names does not outlive the wrappers."""
    names = ["exp", "Tensor.exp", "softmax", "Tensor.cumsum", "bilinear", "nn.functional.bilinear", "Tensor.dot"]
    rows = [(row, f"torch.{name}") for name in names if (row := ROWS.get(f"torch.{name}")) is not None]
    assert len(rows) == len(names)
    args = [sample(row.name, name)(Make("cpu", HALF)) for row, name in rows]
    call = calling([name for _, name in rows])
    forward = ForwardCasts(HALF)
    undo = apply(o1_plan(patch_torch_functions="model"))
    try:
        torch.compile(lambda args: forward.run(call, args), fullgraph=True, backend="aot_eager")(args)
    finally:
        undo()
    torch._dynamo.reset()
    plain = call(args)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(args)
    assert [leaf.dtype for leaf in tensors(compiled)] == [leaf.dtype for leaf in tensors(plain)] == [HALF] * len(names)
