"""Inputs of a forward: cast, kept as they are, and those that the forward writes to."""

import collections
import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import Parts, quietly
from torch import Tensor, nn

import mpinit

F16, F32 = torch.float16, torch.float32


def at_o2(function: Callable[..., Any], **more: Any) -> Any:
    """A model whose forward is a function of the test's, at O2."""
    linear = nn.Linear(2, 2)
    nn.init.eye_(linear.weight), nn.init.zeros_(linear.bias)
    return quietly(Parts(lambda self, *args: function(self.linear, *args), linear=linear), **more)


X = torch.tensor([[1.0001, 2.0]])  # which float16 cannot represent


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, images: Tensor, targets: Any = None, *more: Any, scale: Any = None, **rest: Any) -> Any:
        return SimpleNamespace(images=images, targets=targets, more=more, scale=scale, rest=rest)

    def predict(self, images: Tensor, anchors: Tensor) -> Any:
        return SimpleNamespace(images=images, anchors=anchors)


BOXES = torch.tensor([1203.9])


CALLS = (lambda m, t: m(X, t), lambda m, t: m(X, targets=t), lambda m, t: m(targets=t, images=X))


@pytest.mark.parametrize("call", [*CALLS, lambda m, t: m.forward(X, t)])
@pytest.mark.parametrize(
    "keep", ["targets", "targ*", ["scale", "targets"], lambda name, value: name == "targets", [lambda n, v: n > "j"]]
)
@pytest.mark.parametrize("boxes", [BOXES, [{"boxes": BOXES}]], ids=["tensor", "nested"])
def test_arguments_named_are_passed_as_they_are(keep: Any, call: Callable[..., Any], boxes: Any) -> None:
    got = call(quietly(Detector(), keep_inputs=keep), boxes)
    assert got.images.dtype is F16
    assert got.targets is boxes


def test_targets_are_rounded_without_keep_inputs() -> None:
    assert quietly(Detector())(X, BOXES).targets.item() == 1204.0


def test_rest_of_arguments_have_names_of_signature() -> None:
    seen: dict[str, Any] = {}
    model = quietly(Detector(), keep_inputs=lambda name, value: bool(seen.setdefault(name, value) is None))
    model(X, None, 1, 2, scale=3, other=4)
    assert seen == {"images": X, "targets": None, "more": 1, "scale": 3, "other": 4}


def test_arguments_of_entry_points_and_of_parts_called_alone() -> None:
    model = nn.Sequential(Detector())
    quietly(model, keep_inputs=["anchors", "targets"], entry_points="0.predict")
    assert model[0].predict(X, BOXES).anchors is BOXES
    assert model[0](X, BOXES).targets is BOXES
    twin = copy.deepcopy(model)
    assert twin[0].predict(X, anchors=BOXES).anchors is BOXES


def test_loss_inside_of_forward_is_that_of_the_targets_given() -> None:
    class WithLoss(Detector):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return nn.functional.mse_loss(self.linear(x).float(), target)

    target = torch.tensor([[1203.9, 1203.9]])
    model = quietly(WithLoss(), keep_inputs="target")
    expected = nn.functional.mse_loss(model.linear(X.half()).float(), target)
    assert torch.equal(model(X, target), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X, target), expected)


@pytest.mark.parametrize(("keep", "say"), [("target", "input"), (3, "argument"), (Tensor, "predicate"), ([None], "")])
def test_unknown_argument_is_refused_before_changes(keep: Any, say: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"keep_inputs.*{say}"):
        quietly(model, keep_inputs=keep)
    assert model.weight.dtype is F32 and "forward" not in vars(model)
    assert mpinit.Properties(keep_inputs="None").keep_inputs == ()


def test_misspelt_argument_of_forward_with_any_keywords_is_shown() -> None:
    with pytest.raises(ValueError, match=r"keep_inputs='rest' is no argument of forward.*images, targets"):
        quietly(Detector(), keep_inputs="rest")
    with pytest.warns(UserWarning, match=r"keep_inputs='tragets' .* by \*\*rest, and casts 'targets'"):
        quietly(Detector(), keep_inputs=["scale", "tragets"])
    model = quietly(Detector(), keep_inputs=["boxes"])
    assert model(X, boxes=BOXES).rest["boxes"].equal(BOXES)


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Any = None


def put(box: Any, value: Any) -> None:
    box["y"] = value


WRITABLE: dict[str, tuple[Callable[..., Any], ...]] = {
    "dict": (lambda: {"x": X.clone()}, put, lambda b: b["x"], lambda b: b["y"]),
    "list": (lambda: [X.clone()], lambda b, v: b.append(v), lambda b: b[0], lambda b: b[1]),
    "UserDict": (lambda: collections.UserDict(x=X.clone()), put, lambda b: b["x"], lambda b: b["y"]),
    "dataclass": (lambda: Record(X.clone()), lambda b, v: setattr(b, "y", v), lambda b: b.x, lambda b: b.y),
    "deep": (lambda: ({"in": [{"x": X.clone()}]},), lambda b, v: put(b[0]["in"][0], v),
             lambda b: b[0]["in"][0]["x"], lambda b: b[0]["in"][0]["y"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITABLE)
def test_what_forward_writes_into_a_container_reaches_the_caller(kind: str) -> None:
    make, write, read_x, read_y = WRITABLE[kind]

    def forward(linear: nn.Module, box: Any) -> Any:
        assert read_x(box).dtype is F16
        write(box, linear(read_x(box)))
        return box

    box = make()
    returned = at_o2(forward)(box)
    assert read_y(box).dtype is F32
    assert torch.equal(read_y(box), X.half().float())
    assert torch.equal(read_x(box), X), "what was given stays as exact as it was"
    assert type(returned) is type(box) and torch.equal(read_x(returned), X)
    assert returned is box or kind == "deep"
    box = make()
    assert read_x(at_o2(forward, cast_model_outputs=F16)(box)).dtype is F16
    assert read_x(box).dtype is F32


def test_integers_are_never_cast_and_trees_may_hold_themselves() -> None:
    ids = torch.arange(40_000, 40_004)  # beyond what float16 can hold
    items: list[Any] = [X.clone(), ids]
    items.append(items)
    box: dict[str, Any] = {"items": items, "x": X.clone()}
    box["box"] = box

    def forward(linear: nn.Module, given: dict[str, Any]) -> Any:
        assert given["box"] is given and given["items"][2] is given["items"]
        assert given["x"].dtype is given["box"]["items"][2][0].dtype is F16
        assert given["items"][1] is ids
        given["y"] = linear(given["x"])
        return given

    returned = at_o2(forward)(box)
    assert box["y"].dtype is F32 and box["box"] is box and box["items"][2] is items
    assert returned["x"].dtype is F32 and returned["box"] is returned


def test_entries_replaced_deleted_renamed_and_shared() -> None:
    inner = {"z": X.clone()}
    batch = {"a": X.clone(), "b": X.clone(), "ids": torch.arange(2), "inner": inner, "gone": X.clone()}
    given = dict(batch)

    def forward(linear: nn.Module, box: dict[str, Any]) -> None:
        del box["gone"]
        box["a"] = box["a"] + 1
        box["c"] = box["b"]
        box["again"] = box["inner"]
        box["inner"]["z"] = box.pop("ids")
        box["nested"] = {"new": linear(box["b"]), "old": box["b"], "n": 1}

    at_o2(forward)(batch)
    assert set(batch) == {"a", "b", "c", "inner", "again", "nested"}
    assert batch["a"].dtype is F32 and torch.equal(batch["a"], (X.half() + 1).float())
    assert batch["b"] is batch["c"] is batch["nested"]["old"] is given["b"]
    assert batch["again"] is batch["inner"] is inner
    assert inner["z"] is given["ids"]
    assert batch["nested"]["new"].dtype is F32


def test_lists_are_written_back_whatever_is_done_to_them() -> None:
    first, second, ids = X.clone(), X.clone() + 1, torch.arange(2)

    def forward(linear: nn.Module, items: list[Any]) -> None:
        items.reverse()
        items.insert(0, linear(items[1]))
        items.pop()

    items = [first, second, ids]
    at_o2(forward)(items)
    assert len(items) == 3 and items[1] is ids and items[2] is second
    assert torch.equal(items[0], second.half().float())
    empty: list[Any] = []
    at_o2(lambda linear, out: out.append(linear(torch.ones(1, 2, dtype=F16))))(empty)
    assert empty[0].dtype is F32, "a list that nothing was to be cast in is written to as well"


def test_writes_before_an_exception_reach_the_caller() -> None:
    def forward(linear: nn.Module, box: dict[str, Any]) -> None:
        box["y"] = linear(box["x"])
        raise KeyError

    box = {"x": X.clone()}
    with pytest.raises(KeyError):
        at_o2(forward)(box)
    assert box["y"].dtype is F32


def test_elements_written_in_place_reach_the_caller() -> None:
    cache, box = torch.full((4, 2), 1.0001), {"cache": torch.full((4, 2), 1.0001)}

    def forward(linear: nn.Module, x: Tensor, cache: Tensor, box: dict[str, Tensor]) -> Tensor:
        cache[1] = linear(x)[0]
        box["cache"][2:].mul_(2)
        return cache

    returned = at_o2(forward)(torch.tensor([[3.0, 4.0]]), cache, box)
    expected = torch.full((4, 2), 1.0001)
    expected[1] = torch.tensor([3.0, 4.0])
    assert torch.equal(cache, expected)
    assert torch.equal(returned, expected)
    expected = torch.full((4, 2), 1.0001)
    expected[2:] = (expected[2:].half() * 2).float()
    assert torch.equal(box["cache"], expected)


def test_in_place_writes_to_a_leaf_with_grad_stay_inside() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    out = at_o2(lambda linear, value: linear(value.mul_(2)))(x)
    out.sum().backward()
    assert torch.equal(x, torch.ones(1, 2)) and torch.equal(x.grad, torch.full((1, 2), 2.0))


def test_gradients_flow_through_what_was_written() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    box: dict[str, Tensor] = {"x": x}
    model = at_o2(lambda linear, box: box.update(y=linear(box["x"])))
    model(box)
    box["y"].sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 2))
    assert model.linear.bias.grad is not None


def which_are_one(linear: nn.Module, first: Any, second: Any) -> tuple[Any, ...]:
    """Return which arguments are one object, as a layer asks that attends to itself or to another sequence."""
    del linear
    return (first is second, first, second)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x], lambda x: (x, 1), lambda x: {"x": x}], ids=["tensor", "list", "tuple", "dict"]
)
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_one_argument_passed_twice_is_one_object_in_forward(level: str, wrap: Callable[[Tensor], Any]) -> None:
    model, value = at_o2(which_are_one, level=level), wrap(X.clone())
    assert model(value, value)[0] is True
    assert model(value, wrap(X.clone()))[0] is False
    first, second = model(value, value)[1:]
    assert first is second


def test_one_tensor_in_two_places_is_written_to_through_both() -> None:
    def run(linear: nn.Module, batch: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        batch["a"].add_(1)
        output = linear(batch["b"])
        return output - x, output

    x = torch.zeros(1, 2)
    difference, output = at_o2(run)({"a": x, "b": x}, x)
    assert [difference.tolist(), output.tolist(), x.tolist()] == [[[0.0, 0.0]], [[1.0, 1.0]], [[1.0, 1.0]]]


def test_one_result_returned_twice_is_one_tensor() -> None:
    def run(linear: nn.Module, x: Tensor) -> Any:
        output = linear(x)
        return output, {"again": output}

    output, more = at_o2(run)(X)
    assert output is more["again"]


def test_compiled_code_passes_one_argument_twice_as_one() -> None:
    model = at_o2(lambda linear, q, k: linear(q) * (1 if q is k else 2), level="O5")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    assert compiled(x, x).tolist() == [[1.0, 1.0]]
    assert compiled(x, x.clone()).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_writes_back_too(backend: str) -> None:
    def forward(linear: nn.Module, box: dict[str, Any], items: list[Any]) -> Tensor:
        box["y"] = linear(box["x"])
        items.append(box["y"] + 1)
        return box["y"]

    torch._dynamo.reset()
    box, items = {"x": X.clone()}, [X.clone()]
    out = torch.compile(at_o2(forward), fullgraph=True, backend=backend)(box, items)
    assert out.dtype is box["y"].dtype is items[1].dtype is F32
    assert torch.equal(out, box["y"]) and torch.equal(items[1], (X.half() + 1).float())
    assert torch.equal(items[0], X)


def test_a_module_kept_in_float32_writes_back_inside() -> None:
    def scale(self: Any, box: dict[str, Tensor]) -> None:
        assert box["x"].dtype is F32
        box["y"] = box["x"] * self.weight

    def run(self: Any, x: Tensor) -> Tensor:
        box = {"x": self.linear(x)}
        self.norm(box)
        assert box["y"].dtype is F16
        return box["y"]

    model = Parts(run, linear=nn.Linear(2, 2), norm=Parts(scale, weight=nn.Parameter(torch.ones(2))))
    assert quietly(model, keep_fp32="norm")(X).dtype is F32
