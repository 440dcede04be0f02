"""torch's own database of operators run through O1: nothing raises, types are the page's, numbers those of float32.

Below the public face: every operator is compared with the rows of the policy.
"""

import functools
import itertools
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cast_samples import ROWS
from casts import BF16, FP32, HALF, in_thread, listed_on_cpu_only, o1_plan
from torch.utils._pytree import tree_leaves, tree_map

from mpinit.autocast import apply
from mpinit.autocast.cast_lists import Cast
from mpinit.autocast.cpu_autocast_list import RUNS_UNCAST
from mpinit.autocast.forward_casts import ForwardCasts
from mpinit.autocast.installation import resolve_owner

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "cast_policy.py"))
FLOAT32_ON_CPU, MADE_OF_OTHERS = PAGE["FLOAT32_ON_CPU"], PAGE["MADE_OF_OTHERS"]

SHARDS = 4
COMPLEX = {torch.complex64: FP32, torch.complex32: HALF}
# What a function gives that draws random numbers, or leaves memory as it is, is no number to compare.
NO_VALUES = ("empty", "new_empty", "rand", "normal", "bernoulli", "multinomial", "dropout", "uniform", "exponential")
NO_VALUES += ("cauchy", "geometric", "log_normal", "gumbel_softmax", "as_strided")
# Bases of an eigenspace, a null space, a factor: right ones differ by more than rounding.
NOT_UNIQUE = ("svd", "eig", "qr", "lstsq", "pca_lowrank", "geqrf", "ormqr", "orgqr", "householder", "lu")

TOLERANCES = {FP32: 1e-3, HALF: 5e-2, BF16: 2e-1}
# New in torch 2.13, and another function for each of its options; a power of 0, 1 or below is no product; new by 2.15,
# and float32 made of products in 16 bits.
INSIDE_ROWS = (
    *("addmm_activation", "native_multi_head_attention", "cross_entropy_loss", "multilabel_margin_loss_forward"),
)
NOT_HERE = (
    *("torch.nn.functional.linear_cross_entropy", "torch.matrix_power", "torch.linalg.matrix_power"),
    "torch.linalg.polar",
)


@dataclass(frozen=True)
class Call:
    """One sample of one operator, under one of its names, with its floating arguments in given types."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lower: torch.dtype
    given: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"{self.name} of {self.given} with casts to {self.lower}, kwargs {list(self.kwargs)}"

    @property
    def public(self) -> str:
        """A method goes by the name of the function."""
        return self.name.replace("torch.Tensor.", "torch.")

    @property
    def function(self) -> Callable[..., Any]:
        owner, attribute = resolve_owner(self.name)
        return getattr(owner, attribute)  # type: ignore[no-any-return]

    def arguments(self, exact: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """In the given types; ``exact``: the same numbers in float32."""
        count = itertools.count()

        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dtype is not FP32:
                return leaf
            dtype = self.given[min(next(count), len(self.given) - 1)]
            cast = leaf.detach().to(dtype)
            return cast.float() if exact else cast.clone()

        return tree_map(cast, (self.args, self.kwargs))

    def run(self, exact: bool = False) -> Any:
        args, kwargs = self.arguments(exact)
        torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack trace for each device that is absent
        return self.function(*args, **kwargs)

    @property
    def found(self) -> set[torch.dtype]:
        """The types that occur among the arguments, the float32 ones of the sample aside where they were cast."""
        return {leaf.dtype for leaf in floating(self.arguments())} & {FP32, HALF, BF16}


def floating(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def types(tree: Any) -> list[torch.dtype]:
    return [COMPLEX.get(leaf.dtype, leaf.dtype) for leaf in floating(tree)]


@functools.cache
def operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if FP32 in op.dtypes]


def names_of(op: Any) -> Iterator[str]:
    for name in (op.name, *(alias.name for alias in op.aliases)):
        for dotted in (f"torch.{name}", f"torch.Tensor.{name}"):
            try:
                owner, attribute = resolve_owner(dotted)
            except AttributeError:
                continue
            if callable(getattr(owner, attribute, None)) and not attribute.startswith("_"):
                yield dotted


def calls(shard: int, samples: int | None) -> Iterator[Call]:
    for number, op in enumerate(operators()[shard::SHARDS]):
        if f"torch.{op.name}" in NOT_HERE:
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", FP32), samples):
            for name, lower in itertools.product(names_of(op), (HALF, BF16)):
                if samples is not None and lower is (HALF, BF16)[number % 2]:
                    continue
                other = BF16 if lower is HALF else HALF
                mixed = ((other,), (lower, FP32))
                all_kinds = samples is None or name == f"torch.{op.name}"
                for given in ((FP32,), (lower,), (other, FP32), *mixed) if all_kinds else mixed:
                    yield Call(name, (sample.input, *sample.args), dict(sample.kwargs), lower, given)


def check(call: Call, casts: dict[torch.dtype, ForwardCasts]) -> str | None:
    """What is wrong with this call under O1, or None."""
    exact, _ = attempt(lambda: call.run(exact=True))
    if exact is None:
        return None
    plain, _ = attempt(call.run)
    with casts[call.lower]:
        result, error = attempt(call.run)
    if error is not None:
        row = ROWS.get(call.name)
        if row is not None and row.cast is Cast.BANNED and HALF in call.found:
            return None
        promised = call.name in ROWS or call.public in FLOAT32_ON_CPU or call.found == {FP32}
        return f"{call} raised {error!r}" if plain is not None or promised else None
    if "multi_head_attention" in call.name:
        exact, plain, result = exact[0], plain and plain[0], result[0]  # beside it are weights out of a softmax
    wanted = expected(call)
    if wanted is None and plain is not None and types(result) != types(plain):
        return f"{call} gave {types(result)}, without casts {types(plain)}"
    if wanted is not None and any(dtype not in (wanted, torch.float64) for dtype in types(result)):
        return f"{call} gave {types(result)}, not {wanted}"
    tolerance = 1e-6 if wanted is None else TOLERANCES[call.lower if call.public in MADE_OF_OTHERS else wanted]
    numbers_agree = near(call, result, plain if wanted is None else exact, tolerance)
    return None if numbers_agree else f"{call}: numbers differ"


def attempt(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return run(), None
    except Exception as error:
        return None, error


def expected(call: Call) -> torch.dtype | None:
    """The type that the policy promises for the result; None: what it is without casts."""
    if call.kwargs.get("dtype") is not None or call.kwargs.get("mode") == "area" or ".masked." in call.name:
        return None
    row = ROWS.get(call.name)
    cast = row.cast if row is not None else MADE_OF_OTHERS.get(call.public)
    if call.public in FLOAT32_ON_CPU or cast in (Cast.FP32, Cast.BANNED):
        return FP32
    if cast is Cast.LOWER_PRECISION:
        return call.lower
    if cast is Cast.PROMOTE:
        return next(iter(call.found)) if len(call.found) == 1 else FP32
    return None


def near(call: Call, result: Any, reference: Any, tolerance: float) -> bool:
    base = call.name.rpartition(".")[2]
    if reference is None or any(word in base for word in (*NO_VALUES, *NOT_UNIQUE)):
        return True
    for got, want in zip(floating(result), floating(reference), strict=True):
        if got.layout is not torch.strided:
            continue
        a, b = (
            torch.view_as_real(leaf.to(torch.complex128)) if leaf.is_complex() else leaf.double()
            for leaf in (got, want)
        )
        size = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(size, 1e-3), equal_nan=True):
            return False
    return True


def wrong(shard: int, samples: int | None) -> list[str]:
    casts = {lower: ForwardCasts(lower) for lower in (HALF, BF16)}
    operators()  # imported before there is a wrapper that it could hold on to
    undo = apply(o1_plan(patch_torch_functions="model"))
    try:
        # In a thread, because its stack is short: the database looks at the whole stack for every sample it makes.
        found = in_thread(lambda: [check(call, casts) for call in calls(shard, samples)])
    finally:
        undo()
    assert len(found) > 1500
    return [what for what in found if what is not None]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator_does_what_the_policy_says(shard: int) -> None:
    assert wrong(shard, samples=2) == []


def test_kernels_on_the_cpus_list_alone_follow_cuda_or_are_named() -> None:
    named = {name.rpartition(".")[2] for name in FLOAT32_ON_CPU}
    renamed = {"grid_sampler_2d_cpu_fallback", "lu_with_info", "mkldnn_rnn_layer"}
    for kernel in listed_on_cpu_only() - set(RUNS_UNCAST):
        name = kernel.removeprefix("fft_").removeprefix("linalg_").removeprefix("_")
        assert name in named | renamed or f"torch.nn.functional.{name}" in ROWS or name in INSIDE_ROWS, kernel


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_sample_of_every_operator_does_what_policy_says(shard: int) -> None:
    assert wrong(shard, samples=None) == []
