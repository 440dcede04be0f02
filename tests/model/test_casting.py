"""Casting a model: parameters and buffers of any type, and models that mix types.

Below the public face: casts of buffers are undone without a session.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interruptions import interrupt, places
from models import KINDS, quietly, sgd, start, step
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mpinit
from mpinit.basics.modules import ModelIndex, Names
from mpinit.masters.full import FullMasters
from mpinit.model.casting import Casts as ModelCasts
from mpinit.model.precision_loss import out_of_range

LEVELS = ["O2", "O3", "O5"]
LOWEST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """A mask and a constant, beside a weight."""

    def __init__(self, constant: Tensor, mask: float = -1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("constant", constant)
        self.register_buffer("mask", torch.tensor([0.1, mask, 1 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.constant


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().flatten().view(torch.int32).tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_the_users_tensor_is_not_changed(level: str) -> None:
    weights = torch.rand(3)
    before, version = weights.clone(), weights._version
    loss, model, bystander = nn.CrossEntropyLoss(weight=weights), Masked(weights), Masked(weights)
    quietly(model, level)
    mpinit.initialize(loss, opt_level=level)
    assert model.constant.dtype is loss.weight.dtype is not torch.float32
    assert torch.equal(model.constant, before.to(model.constant.dtype))
    assert weights.dtype is torch.float32
    assert torch.equal(weights, before)
    assert bystander.constant is weights, "a model that was never initialised"
    assert bystander(torch.ones(1, 3)).dtype is torch.float32
    mpinit.undo(model)
    mpinit.undo(loss)
    assert model.constant is loss.weight is weights
    assert weights._version == version
    assert torch.equal(weights, before)


@pytest.mark.parametrize("level", LEVELS)
def test_modules_that_share_a_buffer_share_its_cast(level: str) -> None:
    constant = torch.rand(3)
    first, second = Masked(constant), Masked(constant)
    model = nn.ModuleList([first, second])
    quietly(model, level)
    assert first.constant is second.constant
    first.constant.mul_(2)
    present = first.constant.float()
    mpinit.undo(model)
    assert first.constant is second.constant
    assert first.constant is not constant
    assert bits(first.constant) == bits(present)


def test_only_elements_that_were_changed_take_present_values() -> None:
    model = Masked(torch.rand(3), mask=-1e9)
    before = model.mask
    expected = before.clone()
    expected[0] = 0.5
    with pytest.warns(UserWarning, match=r"mask"):
        mpinit.initialize(model, sgd(model), "O2")
    model.mask[0] = 0.5
    mpinit.undo(model)
    assert bits(model.mask) == bits(expected)
    assert before[0] == torch.tensor(0.1), "the original is not written to"


@pytest.mark.parametrize(
    ("put", "expected"),
    [
        (None, None),
        (torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor([1.0, 2.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 2])),
    ],
)
def test_buffer_that_was_replaced_stays_what_user_put_there(put: Tensor | None, expected: Tensor | None) -> None:
    model = quietly(Masked(torch.rand(3)))
    model.mask = put
    mpinit.undo(model)
    assert (model.mask is None) if expected is None else torch.equal(model.mask, expected)
    assert expected is None or model.mask.dtype is expected.dtype


@pytest.mark.parametrize("level", [*LEVELS, "split"])
@pytest.mark.parametrize("optimised", [False, True])
def test_frozen_weights_keep_their_rounding(optimised: bool, level: str) -> None:
    model = nn.Sequential(nn.Linear(70, 50), nn.Linear(50, 2))
    model[0].requires_grad_(False)
    keywords = {"opt_level": "O5", "master_weights": "split"} if level == "split" else {"opt_level": level}
    optimizer = torch.optim.SGD(model.parameters() if optimised else model[1].parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **keywords)
    rounded = model[0].weight.float()
    assert bits(model.state_dict()["0.weight"]) == bits(rounded)
    mpinit.undo(model)
    assert bits(model[0].weight) == bits(rounded)


@pytest.mark.parametrize("store", [True, "model"])
def test_a_large_frozen_weight_is_finite_when_it_is_unfrozen(store: Any) -> None:
    """float16 has no number above 65,504, and the weight has no master as long as it is frozen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[0, 0] = 1e5
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mpinit.initialize(model, optimizer, "O2", master_weights=store)
    model[0].requires_grad_(True)
    with mpinit.scale_loss(model(torch.zeros(1, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    found = model.state_dict()["0.weight"][0, 0].item()
    assert found in (65504.0, 1e5) and model[0].weight.isfinite().all()


@pytest.mark.parametrize(("level", "value"), [("O2", -1e9), ("O2", LOWEST), ("O3", 1e38), ("O5", LOWEST)])
def test_finite_values_stay_finite_and_one_warning_names_them(level: str, value: float) -> None:
    model = nn.ModuleDict({"a": Masked(torch.rand(3), value), "b": Masked(torch.rand(3), value), "c": nn.Linear(2, 2)})
    model["a"].mask[0] = float("-inf")
    model["b"].weight.requires_grad_(False)[1, 1] = value
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning) as caught:
        mpinit.initialize(model, sgd(model), level)
    (warning,) = caught
    assert all(name in str(warning.message) for name in ("a.mask", "b.mask", "b.weight"))
    assert "constant" not in str(warning.message)
    assert warning.filename == __file__
    largest = torch.finfo(model["a"].mask.dtype).max
    assert model["a"].mask[0] == float("-inf"), "what is infinite stays so"
    assert model["a"].mask[1] == model["b"].mask[1] == model["b"].weight[1, 1] == (largest if value > 0 else -largest)
    state = model.state_dict()
    assert all(bits(state[name]) == bits(before[name]) for name in ("a.mask", "b.mask"))
    mpinit.undo(model)
    assert all(bits(model.state_dict()[name]) == bits(before[name]) for name in ("a.mask", "b.mask"))


@pytest.mark.parametrize("level", LEVELS)
def test_loaded_values_keep_their_bits_and_stay_finite(level: str) -> None:
    model = Masked(torch.rand(3))
    model.frozen = nn.Parameter(torch.randn(70), requires_grad=False)
    quietly(model, level)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    state["mask"][1] = state["frozen"][2] = LOWEST
    model.load_state_dict(state)
    largest = torch.finfo(model.mask.dtype).max
    assert model.mask[1] == model.frozen[2] == -largest
    for name in ("mask", "constant"):
        assert bits(model.state_dict()[name]) == bits(state[name]), name
    mpinit.undo(model)
    for name in ("mask", "constant"):
        assert bits(model.state_dict()[name]) == bits(state[name]), name


class Casts:
    """A model with every kind of tensor, about to be cast."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Masked(torch.rand(3), mask=-1e9)
        self.model.frozen = nn.Parameter(torch.randn(70), requires_grad=False)
        self.gradient = torch.randn(3, 3)
        self.model.weight.grad = self.gradient.clone()
        self.before = {name: (id(t), t.clone()) for name, t in self.tensors()}
        targets = dict.fromkeys([t for _, t in self.tensors()], torch.float16)
        self.targets, self.casts = targets, ModelCasts(FullMasters(Names([self.model])))

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def check(self, gradient: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> None:
        for name, tensor in self.tensors():
            number, value = self.before[name]
            assert id(tensor) == number, name
            assert bits(tensor) == bits(value), name
        assert self.model.weight.grad is not None
        assert bits(self.model.weight.grad) == bits(gradient(self.gradient))


@pytest.mark.filterwarnings("ignore:finite values")
@pytest.mark.parametrize("finished", [False, True])
def test_undo_interrupted_at_any_line_completes_if_called_again(finished: bool) -> None:
    def cast() -> Casts:
        case = Casts()
        case.casts.cast_models(ModelIndex([case.model]), case.targets, set(out_of_range(case.targets)))
        if finished:
            case.casts.finish()
            for name in ("weight", "frozen"):
                case.before[name] = case.before[name][0], case.model.get_parameter(name).float()
        return case

    def gradient(given: Tensor) -> Tensor:
        return given.half().float() if finished else given

    kept = cast()  # with its model
    for where in places(kept.casts.undo, "model/", "masters/", "distributed/"):
        case = cast()
        interrupt(where, case.casts.undo)
        case.casts.undo()
        case.check(gradient)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda m: m.append(nn.Linear(2, 2)),
    "replace": lambda m: setattr(m[1], "weight", nn.Parameter(torch.ones(2, 2))),
}


@pytest.mark.parametrize("masters", [True, "split"])
def test_float32_data_of_a_weight_is_refused_outside_of_a_block(masters: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, opt_level="O5", master_weights=masters)
    numbers = torch.arange(12.0).sqrt()
    with mpinit.float32_weights(model):
        vector_to_parameters(numbers, model.parameters())
    expected = numbers.clone()
    numbers.zero_()  # the masters have memory of their own
    with mpinit.float32_weights(model):
        assert torch.equal(parameters_to_vector(model.parameters()), expected)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    vector_to_parameters(numbers, model.parameters())
    for use in (lambda: model(torch.ones(1, 2)), optimizer.step):
        with pytest.raises(RuntimeError, match=r"'0.weight' was replaced by a tensor of torch.float32.*copy_\(\)"):
            use()
    for parameter, values in zip(model.parameters(), before, strict=True):
        parameter.data = values
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_error_of_a_float32_module_put_in_later_has_ways_out(change: Callable[[Any], None]) -> None:
    model = quietly(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "O5")
    change(model)
    with pytest.raises(RuntimeError, match=r"same dtype(.|\n)*\.to\(torch\.bfloat16\).*add_param_group"):
        model(torch.ones(1, 2))


def test_error_of_an_object_that_is_not_walked_has_ways_out() -> None:
    class Graph:
        x = torch.ones(1, 2)

        def to(self, device: Any) -> Graph:
            raise NotImplementedError

    class Net(nn.Linear):
        def forward(self, graph: Graph) -> torch.Tensor:  # type: ignore[override]
            return super().forward(graph.x)

    with pytest.raises(RuntimeError, match=r"same dtype(.|\n)*mpinit\.register_input"):
        quietly(Net(2, 2), "O5")(Graph())


def test_other_errors_are_left_as_they_are() -> None:
    model = quietly(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "O5")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(1, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, {"dtype": torch.float32}, {"device": "cpu", "dtype": torch.float64}])
def test_converting_model_is_refused_and_changes_nothing(given: dict[str, Any], kind: str) -> None:
    def convert(module: nn.Module) -> None:
        module.to(**given) if given else module.float()

    model, optimizer = start(kind)
    before = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for part in (model, model.first):
        with pytest.raises(RuntimeError, match=r"keep_fp32.*deepcopy.*mpinit.undo"):
            convert(part)
    assert before == {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    step(model, optimizer)
    mpinit.undo(model)
    convert(model)


def test_half_of_an_initialised_model_is_refused() -> None:
    model, _ = start("O2")
    with pytest.raises(RuntimeError, match="Net belongs to a model"):
        model.half()
    model.first.half()
    model.to("cpu", memory_format=torch.channels_last)
    model.share_memory()
    assert model.norm.weight.dtype is torch.float32


@pytest.mark.parametrize("keywords", [{}, {"master_weights": "split"}], ids=["O5", "split"])
def test_buffers_that_are_moved_keep_their_float32_numbers(keywords: dict[str, Any]) -> None:
    model, part = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Module()
    table = torch.randn(1, 3, 8, 8)
    for module in (model, part):
        module.register_buffer("table", table)
    part.register_buffer("narrow", torch.randn(1, 3, 8, 8).bfloat16())
    model.append(part)
    mpinit.initialize(model, opt_level="O5", **keywords)
    known = weakref.ref(model.table)
    model.to(memory_format=torch.channels_last)
    assert known() is None, "as in plain torch, the ones from before are freed"
    with torch.no_grad():
        part.table[0, 0, 0, 0] = 1.0  # each module has its own by now
    expected = table.clone()
    expected[0, 0, 0, 0] = 1.0
    state, copied = model.state_dict(), copy.deepcopy(model)
    with mpinit.float32_weights(model):
        assert torch.equal(model.table, table) and torch.equal(part.table, expected)
    assert model.table.dtype is part.table.dtype is torch.bfloat16
    mpinit.undo(model)
    for own, other in ((state["table"], state["1.table"]), (copied.table, copied[1].table), (model.table, part.table)):
        assert torch.equal(own, table) and torch.equal(other, expected)
    assert part.narrow.dtype is torch.bfloat16
