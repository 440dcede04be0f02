"""Functions of the user's own: registered by name before or after, undone and back, and marked with decorators.

Below the public face: the list of registered functions is emptied after each test.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from casts import BF16, FP32, HALF, StartCasts

from mpinit import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from mpinit.autocast import installation


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A user's module with a function that tells what it was given and what a product is in its body."""
    module = types.ModuleType("library_of_the_user")
    source = """
import torch

def seen(x, *rest, **named):
    return x.dtype

def product_inside(x):
    return (x @ x).dtype

class Owner:
    def method(self, x):
        return x.dtype

    @staticmethod
    def static(x):
        return x.dtype

    @classmethod
    def of_class(cls, x):
        return x.dtype
"""
    exec(source, module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


ONES, HALVES = torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)

WAYS = {
    "half": (register_half_function, ONES, HALF),
    "float": (register_float_function, HALVES, FP32),
    "promote": (register_promote_function, HALVES, HALF),
}
REGISTER = pytest.mark.parametrize(("register", "given", "expected"), WAYS.values(), ids=WAYS)
Register = Callable[[Any, str], None]


@REGISTER
@pytest.mark.parametrize("when", ["before", "after"])
def test_registration_survives_undo(
    register: Register,
    given: torch.Tensor,
    expected: torch.dtype,
    when: str,
    library: types.ModuleType,
    start_casts: StartCasts,
) -> None:
    original = library.seen
    if when == "before":
        register(library, "seen")
    undo = start_casts()
    if when == "after":
        register(library, "seen")
    assert library.seen is not original
    assert library.seen(given) is expected
    with disable_casts():
        assert library.seen(given) is given.dtype
    undo()
    assert library.seen is original
    again = start_casts(patch_torch_functions_type=BF16)
    assert library.seen(ONES) is (BF16 if register is register_half_function else FP32)
    again()
    assert library.seen is original


def test_methods_static_and_class_methods(library: types.ModuleType, start_casts: StartCasts) -> None:
    before = dict(vars(library.Owner))
    for name in ("method", "static", "of_class"):
        register_half_function(library.Owner, name)
    undo = start_casts()
    owner = library.Owner()
    assert [owner.method(ONES), owner.static(ONES), library.Owner.static(ONES), owner.of_class(ONES)] == [HALF] * 4
    undo()
    assert dict(vars(library.Owner)) == before


def test_float_function_runs_in_float32_and_half_function_casts(
    library: types.ModuleType, start_casts: StartCasts
) -> None:
    register_float_function(library, "product_inside")
    start_casts()
    assert library.product_inside(HALVES) is FP32
    register_half_function(library, "product_inside")  # the later registration of a name counts
    assert library.product_inside(ONES) is HALF
    register_promote_function(library, "product_inside")
    assert library.product_inside(ONES) is HALF


def test_a_registration_beats_the_table(start_casts: StartCasts) -> None:
    original = torch.exp
    register_half_function(torch, "exp")
    register_float_function(torch, "mm")
    register_float_function(torch, "sigmoid")
    undo = start_casts()
    assert torch.exp(ONES).dtype is HALF
    assert torch.mm(HALVES, HALVES).dtype is FP32
    assert torch.sigmoid(HALVES).dtype is FP32
    assert torch.nn.functional.binary_cross_entropy(torch.nn.Sigmoid()(HALVES), ONES).dtype is FP32
    undo()
    assert torch.exp is original


def test_promotion_goes_to_the_widest_of_nested_arguments(library: types.ModuleType, start_casts: StartCasts) -> None:
    register_promote_function(library, "seen")
    start_casts()
    assert library.seen(HALVES, [{"x": (HALVES,)}]) is HALF
    assert library.seen(HALVES, [{"x": (ONES,)}]) is FP32
    assert library.seen(HALVES, named=ONES) is FP32
    assert library.seen(HALVES, HALVES.bfloat16()) is FP32


def test_an_unknown_name_is_an_error_with_the_nearest_one(library: types.ModuleType) -> None:
    before = list(installation.REGISTERED)
    with pytest.raises(ValueError, match=r"no function 'sofmax' in torch\.nn\.functional; did you mean 'softmax'\?"):
        register_float_function(torch.nn.functional, "sofmax")
    with pytest.raises(ValueError, match=r"no function 'qqq' in library_of_the_user"):
        register_half_function(library, "qqq")
    with pytest.raises(TypeError, match=r"must be a string, not <function"):
        register_half_function(library, library.seen)
    assert before == installation.REGISTERED


def test_names_imported_earlier_are_warned_of(library: types.ModuleType, start_casts: StartCasts) -> None:
    importer = types.ModuleType("importer_of_the_library")
    exec("from library_of_the_user import seen as mine", importer.__dict__)
    sys.modules[importer.__name__] = importer
    try:
        start_casts()
        with pytest.warns(UserWarning, match=r"importer_of_the_library\.mine was imported .*user\.seen"):
            register_half_function(library, "seen")
        assert importer.mine(ONES) is FP32
        assert library.seen(ONES) is HALF
        with pytest.warns(UserWarning, match="importer_of_the_library"):  # also where a wrapper stands by now
            register_float_function(library, "seen")
    finally:
        del sys.modules[importer.__name__]


@half_function
def leaves_in_half(tree: Any, *, named: Any = None) -> Any:
    return tree, named


@float_function
def loss_in_float(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The docstring stays."""
    return ((a - b) @ (a - b)).sum()


@promote_function
def mixed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    return a.dtype, b.dtype


class Scorer:
    """Has a ``to`` of its own: ``self`` must not be taken for something to cast."""

    def to(self, dtype: torch.dtype) -> Scorer:
        raise AssertionError(f"self was cast to {dtype}")

    @half_function
    def score(self, x: torch.Tensor) -> torch.dtype:
        return x.dtype


class Square(torch.autograd.Function):
    @staticmethod
    @half_function
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_registered_function_is_unchanged_without_casts() -> None:
    tree = [ONES, {"x": HALVES}]
    assert leaves_in_half(tree)[0] is tree
    assert loss_in_float(HALVES, HALVES).dtype is HALF
    assert mixed(ONES, HALVES) == (FP32, HALF)
    assert loss_in_float.__doc__ == "The docstring stays."


def test_decorated_functions_cast_nested_containers(start_casts: StartCasts) -> None:
    start_casts()
    cast, named = leaves_in_half({"a": [ONES, "text"], "b": HALVES}, named={"deep": (ONES,)})
    assert [cast["a"][0].dtype, named["deep"][0].dtype] == [HALF, HALF]
    assert cast["a"][1] == "text" and cast["b"] is HALVES


def test_decorated_float_and_promote_functions(start_casts: StartCasts) -> None:
    start_casts()
    assert loss_in_float(HALVES, ONES).dtype is FP32
    assert mixed(ONES, HALVES) == (FP32, FP32)
    assert mixed(HALVES, HALVES) == (HALF, HALF)
    assert Scorer().score(ONES) is HALF


def write_to_arguments(x: torch.Tensor, items: list[Any], cache: dict[str, Any]) -> int:
    """Write in every way to arguments, as caches and in-place activations do."""
    x.clamp_(min=0)
    items.append(items.pop(0))
    items.append(x + 1)
    cache["k"] = torch.cat([cache["k"], x])
    cache["new"] = cache.pop("old")
    return len(items)


@pytest.mark.parametrize("way", [half_function, float_function, promote_function])
@pytest.mark.parametrize("given", [FP32, HALF])
def test_writes_of_a_function_to_its_arguments_reach_the_caller(
    way: Callable[[Any], Any], given: torch.dtype, start_casts: StartCasts
) -> None:
    start_casts()
    decorated = way(write_to_arguments)
    x, first, second = (torch.tensor(values, dtype=given) for values in ([-1.0, 2.0], [0.1], [0.2]))
    items, cache = [first, second], {"k": x.clone(), "old": first}
    assert decorated(x, items, cache) == 3
    assert x.dtype is given
    assert x.tolist() == [0.0, 2.0]
    assert [items[0] is second, items[1] is first, cache["new"] is first] == [True] * 3
    assert items[2].tolist() == [1.0, 3.0]
    assert cache["k"].tolist() == [-1.0, 2.0, 0.0, 2.0]
    assert "old" not in cache


def test_gradients_flow_through_what_a_function_writes_in_place(start_casts: StartCasts) -> None:
    start_casts()
    weight = torch.ones(3, requires_grad=True)
    product = weight * 2
    half_function(lambda x: x.mul_(3))(product)
    product.sum().backward()
    assert weight.grad is not None
    assert [product.tolist(), weight.grad.tolist()] == [[6.0] * 3] * 2


def test_writes_before_an_error_in_a_function_reach_the_caller(start_casts: StartCasts) -> None:
    start_casts()

    def fail(items: list[Any]) -> None:
        items.append(1)
        raise KeyError

    items = [ONES]
    with pytest.raises(KeyError):
        half_function(fail)(items)
    assert items == [ONES, 1]


def test_a_static_forward_of_an_autograd_function(start_casts: StartCasts) -> None:
    start_casts()
    x = torch.full((2,), 3.0, requires_grad=True)
    y = Square.apply(x)
    assert y.dtype is HALF
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is FP32
    assert x.grad.tolist() == [6.0, 6.0]


def test_decorated_functions_compile(start_casts: StartCasts) -> None:
    start_casts()

    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        tree, _ = leaves_in_half([a, {"b": b}])
        return tree[0], tree[1]["b"], loss_in_float(tree[0], b)

    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        assert [out.dtype for out in function(ONES, ONES)] == [HALF, HALF, FP32]


def test_a_function_that_belongs_to_no_module_can_be_decorated() -> None:
    namespace: dict[str, object] = {}
    exec("def halve(x):\n    return x / 2", namespace)
    halve = namespace["halve"]
    halve.__module__ = None  # type: ignore[attr-defined]
    assert torch.equal(half_function(halve)(torch.ones(2)), torch.full((2,), 0.5))  # type: ignore[arg-type]
