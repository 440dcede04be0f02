"""Native code: built by a command, never by a training, and used where a sample has the bits of torch's operations.

Below the public face: native code is replaced by code with other bits.
"""

import copy
import functools
import logging
import operator
import os
import re
import shutil
import subprocess
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import mpinit
from mpinit.masters.codecs import codec
from mpinit.masters.split import SplitMasters
from mpinit.optimizer import gradients as gradients_of_weights
from mpinit.optimizer import one_pass, skipping
from mpinit.torch_internals import bulk
from mpinit.torch_internals import native as native_code
from mpinit.torch_internals.bulk import are_plain, changed_grads, grads_of, set_grads

Make = Callable[..., torch.optim.Optimizer]
# Odd sizes: some fill no vector, one has rows of encoded state that are not full.
SHAPES = [(97, 131), (5,), (4099,), (1,), (3, 7, 11)]


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code is used where a test says so."""
    use(monkeypatch, None)


def use(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Step by this native code from here on; None: by torch's operations."""
    monkeypatch.setattr(native_code, "_module", module)
    for owner in (one_pass, codec):
        monkeypatch.setattr(owner, "_has_same_bits", {})


class Training:
    """A list of weights, stepped with gradients that are numbers of their own."""

    def __init__(
        self,
        make: Make,
        state: str,
        weights: list[torch.Tensor] | None = None,
        level: str = "O5",
        masters: Any = "split",
    ) -> None:
        torch.manual_seed(0)
        own = weights or [torch.randn(shape) * 0.02 for shape in SHAPES]
        self.model = nn.ParameterList([nn.Parameter(weight) for weight in own])
        self.optimizer = make(self.model.parameters())
        asked = {"master_weights": masters, "optimizer_state": state, "skip_nonfinite": False, "loss_scale": 1.0}
        mpinit.initialize(self.model, self.optimizer, level, **asked)

    def step(self, seed: int, odd: bool = False) -> None:
        random = torch.Generator().manual_seed(seed)
        for weight in self.model:
            gradient = (torch.randn(weight.shape, generator=random) * 0.01).bfloat16()
            if odd:
                gradient.view(-1)[0], gradient.view(-1)[-1] = torch.inf, torch.nan
            weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype or weight.dtype).copy_(gradient)
        self.optimizer.step()

    def numbers(self) -> list[torch.Tensor]:
        states = [value for weight in self.model for value in self.optimizer.state[weight].values()]
        masters = [master.detach() for master in mpinit.master_params(self.optimizer)]
        return [each + 0 for each in (*self.model, *masters, *states) if isinstance(each, torch.Tensor)]


def assert_same(one: Training, other: Training) -> None:
    for mine, its in zip(one.numbers(), other.numbers(), strict=True):
        # A nan's own bits are not promised, as they depend on the order of a sum.
        assert torch.equal(mine.isnan(), its.isnan()) and torch.equal(mine.nan_to_num(7), its.nan_to_num(7))


def two(make: Make = AdamW, state: str = "float32", weights: Any = list, **more: Any) -> tuple[Training, Training]:
    return Training(make, state, weights(), **more), Training(make, state, weights(), **more)


def functions_of(native: Any) -> dict[str, Any]:
    """All functions of native code but the step."""
    return {name: value for name, value in vars(native).items() if callable(value) and name != "step"}


def counting(native: Any) -> tuple[Any, list[int]]:
    """Native code, and how many numbers each of its steps was of."""
    calls: list[int] = []
    counted = SimpleNamespace(**functions_of(native))
    counted.step = lambda groups, *rest: calls.append(native.step(groups, *rest)) or calls[-1]
    return counted, calls


def assert_stepped_alike(
    monkeypatch: pytest.MonkeyPatch, native: Any, trainings: tuple[Training, Training], steps: int, odd: int = -1
) -> int:
    """Step one by torch and one natively; how many of the steps were native."""
    counted, calls = counting(native)
    by_torch, natively = trainings
    for seed in range(steps):
        by_torch.step(seed, seed == odd)
    use(monkeypatch, counted)
    for seed in range(steps):
        natively.step(seed, seed == odd)
    assert_same(by_torch, natively)
    return sum(numbers > 1000 for numbers in calls)


PLAIN: dict[str, list[torch.Tensor | None]] = {
    "none": [],
    "float32": [torch.ones(2), torch.ones(3)],
    "a missing one": [torch.ones(2), None],
    "bfloat16": [torch.ones(2).bfloat16()],
    "float64": [torch.ones(2).double()],
    "sparse": [torch.ones(2).to_sparse()],
    "a parameter": [torch.nn.Parameter(torch.ones(2))],
    "meta": [torch.ones(2, device="meta")],
}


@pytest.mark.parametrize("case", PLAIN)
def test_native_code_finds_the_same_gradients_plain(monkeypatch: pytest.MonkeyPatch, native: Any, case: str) -> None:
    expected = are_plain(PLAIN[case], torch.device("cpu"))
    use(monkeypatch, native)
    assert are_plain(PLAIN[case], torch.device("cpu")) is expected


def test_native_code_finds_the_same_gradients_changed(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    weights: list[Any] = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    gradients = [torch.ones(2), None, torch.zeros(2)]
    set_grads(weights, gradients)
    others: list[list[torch.Tensor | None]] = [
        gradients,
        [None] * 3,
        gradients[:2],
        [gradients[0], None, torch.zeros(2)],
    ]
    for code in (None, native):
        use(monkeypatch, code)
        found = [changed_grads(weights, expected) for expected in others]
        assert found[0] is None and all(map(operator.is_, grads_of(iter(weights)), gradients))
        assert all(map(operator.is_, grads_of(weights), gradients))
        assert all(now is not None and all(map(operator.is_, now, gradients)) for now in found[1:])


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("code", [False, True])
def test_native_code_sets_the_same_gradients(monkeypatch: pytest.MonkeyPatch, native: Any, code: bool) -> None:
    use(monkeypatch, native if code else None)
    weights: list[Any] = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    gradients: list[Any] = [torch.ones(2), None, torch.zeros(2)]
    set_grads(weights, gradients)
    assert all(weight.grad is gradient for weight, gradient in zip(weights, gradients, strict=True))
    # torch's setter has the word where a gradient does not fit, or is of another class.
    before = gradients
    for odd in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta"), weights[0]):
        with pytest.raises((RuntimeError, TypeError)):
            set_grads(weights, [odd, None, None])
        assert all(weight.grad is gradient for weight, gradient in zip(weights, before, strict=True))
    marked = torch.ones(2).as_subclass(Marked)
    set_grads(weights, [marked, None, None])
    assert weights[0].grad is marked and weights[1].grad is weights[2].grad is None
    weights[0].grad_dtype = None
    wide = torch.ones(2, dtype=torch.float64)
    set_grads(weights, [wide, None, None])
    assert weights[0].grad is wide
    set_grads(weights, [None] * 3)
    assert not any(weight.grad is not None for weight in weights)
    weights[0].sum().backward()
    assert torch.equal(weights[0].grad, torch.ones(2))


@pytest.mark.parametrize("code", [False, True])
def test_native_code_reads_and_sets_the_same_things(monkeypatch: pytest.MonkeyPatch, native: Any, code: bool) -> None:
    use(monkeypatch, native if code else None)
    tensors: list[Any] = [torch.nn.Parameter(torch.ones(2, 3)), torch.ones(4), torch.ones(2, device="meta")]
    versions = bulk.versions_of(tensors)
    assert bulk.changed_versions(tensors, versions) is None
    assert bulk.changed_versions(tensors, versions[:2]) == versions
    tensors[1].add_(1)
    assert bulk.changed_versions(tensors, versions) == [0, versions[1] + 1, 0]
    with torch.inference_mode(), pytest.raises((TypeError, RuntimeError)):
        bulk.changed_versions([torch.ones(1)], [0])

    layout = bulk.layouts_of(tensors[:2])
    tensors[1].mul_(2)
    assert bulk.layouts_of(tensors[:2]) == layout
    bulk.set_all_data(tensors[:1], [torch.zeros(3, 2).t()])
    assert tensors[0].stride() == (1, 2) and bulk.layouts_of(tensors[:2]) != layout
    marked = torch.ones(4).as_subclass(Marked)
    bulk.set_all_data([tensors[1]], [marked])
    assert torch.equal(tensors[1], torch.ones(4))
    with pytest.raises(RuntimeError):
        bulk.set_all_data([tensors[0]], [torch.ones(1, device="meta")])

    dicts: list[dict[str, Any]] = [{"a": tensors[0], "b": None}, {"c": tensors[1]}]
    assert not bulk.replace_entries(dicts, ["a", "c"], [tensors[0], None], [1, 2])
    assert not bulk.replace_entries(dicts, ["a", "d"], [tensors[0], tensors[1]], [1, 2])
    assert dicts == [{"a": tensors[0], "b": None}, {"c": tensors[1]}]
    assert bulk.replace_entries(dicts, ["a", "c"], tensors[:2], [1, 2])
    assert dicts == [{"a": 1, "b": None}, {"c": 2}]

    other = torch.ones(1)
    found = bulk.exchanged(tensors, {id(tensors[1]): other, 5: None})
    assert found[0] is tensors[0] and found[1] is other and found[2] is tensors[2] and bulk.exchanged([], {}) == []


def test_parameters_that_have_nothing_to_carry(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    def made() -> Any:
        return torch.nn.Parameter(torch.ones(2))

    def changed(change: Callable[[Any], Any]) -> list[Any]:
        parameters = [made(), made()]
        change(parameters[1])
        return parameters

    changes: list[Callable[[Any], Any]] = [
        lambda p: setattr(p, "tag", 1),
        lambda p: p.requires_grad_(False),
        lambda p: p.register_hook(lambda grad: None),
        lambda p: p.register_post_accumulate_grad_hook(lambda _: None),
    ]
    use(monkeypatch, native)
    assert bulk.have_nothing_to_carry([made()]) and bulk.have_nothing_to_carry(changed(lambda p: p.sum().backward()))
    assert bulk.have_nothing_to_carry(changed(vars)) and not any(map(bulk.have_nothing_to_carry, map(changed, changes)))
    use(monkeypatch, None)
    assert not bulk.have_nothing_to_carry([made()])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("value", [1.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-42])
def test_native_code_multiplies_gradients_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, native: Any, value: float, checked: bool
) -> None:
    def run(factor: float) -> tuple[Any, list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        tensors = [torch.randn(shape) for shape in ((7, 9), (3,), (0,), (40_000,), ())]
        tensors.append(torch.randn(4, 6).t())
        tensors[3][39_999] = value
        by = torch.tensor(factor)
        found = None
        if checked:
            found = gradients_of_weights.unscale_and_check_(tensors, by)
        else:
            gradients_of_weights.unscale_(tensors, by)
        return found, tensors, [tensor._version for tensor in tensors]

    for factor in (2.0**-7, 1 / 3, 1.0):
        use(monkeypatch, None)
        expected = run(factor)
        use(monkeypatch, native)
        found = run(factor)
        assert found[0] == expected[0] and found[2] == expected[2]
        for one, other in zip(found[1], expected[1], strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_native_code_refuses_gradients_that_it_does_not_know(native: Any) -> None:
    weight, two = torch.nn.Parameter(torch.ones(3)), torch.tensor(2.0)
    weight.grad_dtype = None
    others = [torch.ones(3).half(), torch.ones(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3).double()]
    for odd in (*others, torch.ones(6)[::2]):
        plain = torch.ones(3)
        assert native.multiply([plain, odd], two, True, False) is None and torch.equal(plain, torch.ones(3))
        if odd.shape == weight.shape and odd.device == weight.device:
            weight.grad = odd
            assert native.multiply([weight], two, True, True) is None
    assert native.multiply([torch.ones(1)], torch.ones(2), True, False) is None
    weight.grad = torch.ones(3)
    assert native.multiply([weight, torch.nn.Parameter(torch.ones(1))], two, True, True) is True
    assert torch.equal(weight.grad, torch.full((3,), 2.0)) and weight.grad._version == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_code_finds_values_that_differ_from_weights(native: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in ((5, 7), (40_001,), (0, 3), (), (16,))] + [torch.randn(3, 4).t()]
    values[1][:4] = torch.tensor([0.0, -0.0, torch.inf, torch.finfo(dtype).max])
    weights = [value.to(dtype) for value in values]
    assert native.differing(values, weights, None) == []
    for index, place in ((0, 34), (1, 40_000), (1, 17), (3, 0), (5, 11)):
        changed = [weight.clone() for weight in weights]
        flat = changed[index].as_strided((changed[index].numel(),), (1,))
        flat.view(torch.int16)[place] ^= 1
        assert native.differing(values, changed, None) == [index]
    for odd in (values[0].double(), values[0].t(), torch.ones(5, 7, device="meta"), values[0][:, :6]):
        assert native.differing([odd], weights[:1], None) is None
    assert native.differing(values[:1], [weights[0].float()], None) is None


def test_native_code_joins_split_masters(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    torch.manual_seed(0)
    shapes = [(5, 7), (40_001,), (1,), (16, 3)]
    values = [torch.randn(shape) for shape in shapes]
    values[1][:4] = torch.tensor([0.0, -0.0, torch.inf, 1e-42])
    table = SplitMasters()
    weights = [nn.Parameter(value.clone() if value.dim() != 2 else value.t().clone().t()) for value in values]
    masters = [table.add(weight, torch.bfloat16) for weight in weights]
    for master in masters:
        assert master is not None
        table.cast(master, torch.bfloat16, clamps=False)
    kept: list[Any] = masters
    use(monkeypatch, None)
    by_torch = table.all_values(kept)
    use(monkeypatch, native)
    natively = table.all_values(kept)
    assert all(map(torch.equal, natively, values)) and all(map(torch.equal, natively, by_torch))
    assert [each.stride() for each in natively] == [weight.stride() for weight in weights]
    assert native.differing(natively, list(weights), kept) == []
    natively[1][40_000] += 1e-7
    natively[3][0, 0] = torch.nan
    assert native.differing(natively, list(weights), kept) == [1, 3]
    # A written 0 does not keep the lower bits, which torch's operations know by the weight's version.
    with torch.no_grad():
        weights[0][0, 0] = 0.0
    assert not table.have_remainders(kept) and table.all_values(kept)[0][0, 0] == 0
    use(monkeypatch, None)
    assert all(map(torch.equal, table.all_values(kept)[1:], by_torch[1:]))
    weights[2].data = torch.ones(1, dtype=torch.bfloat16)
    assert native.joined([weights[2]], [kept[2]]) is None


def test_split_masters_with_float32_gradients_are_stepped_natively(
    monkeypatch: pytest.MonkeyPatch, native: Any
) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 9))
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        mpinit.initialize(model, optimizer, "O5", master_weights="split")
        for step in range(5):
            for batch in torch.randn(3, 8, 20):
                with mpinit.scale_loss(model(batch).square().mean(), optimizer) as loss:
                    loss.backward()
            assert model[0].weight.grad is not None and model[0].weight.grad.dtype is torch.float32, step
            optimizer.step()
            optimizer.zero_grad()
        state = [value.clone() for value in model.state_dict().values()]
        mpinit.undo(model)
        return state

    expected = run()
    counted, calls = counting(native)
    use(monkeypatch, counted)
    found = run()
    assert all(map(torch.equal, found, expected)) and sum(numbers > 500 for numbers in calls) == 4


@pytest.mark.parametrize("code", [False, True])
def test_step_without_gradients_keeps_the_lower_bits_of_split_masters(
    monkeypatch: pytest.MonkeyPatch, native: Any, code: bool
) -> None:
    use(monkeypatch, native if code else None)
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5012, 0.3, 0.7]]))
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split")
    with torch.no_grad():
        model.weight[0, 0] = 0.0
    optimizer.step()
    with torch.no_grad():
        model.weight[0, 0] = 0.5
    assert model.state_dict()["weight"][0, 0].item() == pytest.approx(0.5012)


FORMS: dict[str, dict[str, Any]] = {"single": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
KINDS: dict[str, Make] = {
    "AdamW": partial(AdamW, lr=1e-2, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "Adam, decayed, maximized": partial(torch.optim.Adam, lr=1e-2, betas=(0.3, 0.99), weight_decay=0.1, maximize=True),
    "SGD": partial(SGD, lr=1e-2, weight_decay=0.1, maximize=True),
    "SGD, momentum": partial(SGD, lr=1e-2, momentum=0.9, dampening=0.1),
    "SGD, nesterov": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.mark.long
@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_native_step_equals_torch_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, native: Any, kind: str, form: str, state: str
) -> None:
    make = partial(KINDS[kind], **FORMS[form])
    steps = 1000 if (kind, form) in (("AdamW", "fused"), ("SGD, nesterov", "single")) else 30
    own = assert_stepped_alike(monkeypatch, native, two(make, state), steps, odd=25)
    made_first = kind == "SGD"
    # The first step makes the state; foreach adds a momentum to the gradients themselves, which only torch does.
    assert own == (0 if (kind, form) == ("SGD, nesterov", "foreach") else steps - (not made_first))


# Masters of both 16-bit types, and none.
STORES = {"O2": True, "O5": True, "O4": False}


@pytest.mark.parametrize("level", STORES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["AdamW", "SGD, momentum"])
def test_native_step_with_and_without_full_masters(
    monkeypatch: pytest.MonkeyPatch, native: Any, kind: str, form: str, level: str
) -> None:
    trainings = two(partial(KINDS[kind], **FORMS[form]), level=level, masters=STORES[level])
    assert assert_stepped_alike(monkeypatch, native, trainings, 12, odd=10) == 11


def written(values: torch.Tensor) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Ways to write to a weight: counted by torch, through its memory, with what it is, with 0, inf and nan."""
    return {
        "counted": lambda w: w.detach().copy_(values),
        "a part of it": lambda w: w.detach()[3:5].view(-1).data.fill_(0.5),
        "by numpy": lambda w: w.detach().view(torch.int16).numpy().__setitem__(0, 0),
        "what it is": lambda w: w.detach().copy_(w.detach().clone()),
        "odd numbers": lambda w: w.detach()[0, :4].copy_(torch.tensor([0.0, -0.0, torch.inf, torch.nan])),
        "the largest": lambda w: w.detach()[0, :2].copy_(torch.tensor([1.0, -1.0]) * torch.finfo(w.dtype).max),
    }


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("way", written(torch.ones(1)))
def test_what_was_written_to_weights_counts(monkeypatch: pytest.MonkeyPatch, native: Any, way: str, level: str) -> None:
    write = written(torch.randn(97, 131))[way]
    trainings = two(level=level, masters=True)
    counted, calls = counting(native)
    for training in trainings:
        if training is trainings[1]:
            use(monkeypatch, counted)
        for seed in range(6):
            training.step(seed)
            if seed in (2, 3):
                write(training.model[0])
        # By torch's operations again, and after a write between the two.
        use(monkeypatch, None)
        write(training.model[0])
        training.step(6)
    assert_same(*trainings)
    assert sum(numbers > 1000 for numbers in calls) == 5


def test_float16_masters_that_grew_too_large_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    monkeypatch.setattr(skipping, "_CLAMP_CHECK_INTERVAL", 20)

    def weights() -> list[torch.Tensor]:
        return [torch.full((40, 40), 65500.0), torch.ones(40, 40)]

    trainings = two(partial(SGD, lr=1e5), weights=weights, level="O2", masters=True)
    with pytest.warns(UserWarning, match="beyond the largest float16"):
        for training in trainings:
            if training is trainings[1]:
                use(monkeypatch, native)
            for seed in range(50):
                training.step(seed)
    assert_same(*trainings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_are_found(native: Any, dtype: torch.dtype) -> None:
    largest = torch.full((300, 301), torch.finfo(dtype).max, dtype=dtype)
    assert native.are_finite([largest, -largest, largest[:0]]) is True
    for place, value in ((0, torch.inf), (300 * 301 - 1, torch.nan), (40_000, -torch.inf)):
        odd = largest.clone()
        odd.view(-1)[place] = value
        assert native.are_finite([largest, odd.t()]) is False
    assert native.are_finite([largest[:, ::2]]) is None and native.are_finite([largest.to("meta")]) is None


@pytest.mark.long
def test_weights_that_begin_anywhere_and_lie_in_any_order(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    def weights() -> list[torch.Tensor]:
        torch.manual_seed(1)
        memory = [torch.randn(size).mul_(0.1).bfloat16() for size in (4200, 64)]
        images = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
        return [memory[0][1:], memory[1][1:].view(7, 9).t(), images]

    assert assert_stepped_alike(monkeypatch, native, two(AdamW, "int8", weights), 10) == 9


@pytest.mark.long
@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
def test_run_continues_with_or_without_native_code(monkeypatch: pytest.MonkeyPatch, native: Any, state: str) -> None:
    first, whole = two(state=state)
    for seed in range(5):
        first.step(seed)
    second = Training(AdamW, state)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for seed in range(10):
        whole.step(seed)
    use(monkeypatch, native)
    for seed in range(5, 10):
        second.step(seed)
    assert_same(whole, second)


def refusals() -> dict[str, tuple[Make, Callable[[Training], Any]]]:
    def replace_step(optimizer: Any) -> Any:
        step = optimizer.step
        optimizer.step = lambda closure=None: step(closure)
        return optimizer

    return {
        "amsgrad": (lambda p: AdamW(p, amsgrad=True), lambda t: None),
        "a rate in a tensor": (lambda p: AdamW(p, lr=torch.tensor(0.01)), lambda t: None),
        "another optimizer": (torch.optim.RMSprop, lambda t: None),
        "a step of the object's own": (lambda p: replace_step(SGD(p)), lambda t: None),
        "a state that is gone": (lambda p: SGD(p, momentum=0.9), lambda t: t.optimizer.state.pop(t.model[2])),
        "one count for two": (
            AdamW,
            lambda t: t.optimizer.state[t.model[0]].update(step=t.optimizer.state[t.model[2]]["step"]),
        ),
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", refusals())
def test_unsupported_options_use_torch(monkeypatch: pytest.MonkeyPatch, native: Any, case: str) -> None:
    make, change = refusals()[case]
    trainings = two(make)
    for training in trainings:
        training.step(99)
        change(training)
    assert assert_stepped_alike(monkeypatch, native, trainings, 1) == 0


@pytest.mark.long
def test_a_step_that_fails_before_it_begins_changes_nothing(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    training = Training(AdamW, "int8")
    training.step(0)
    before = training.numbers()
    versions = [weight._version for weight in training.model]

    def fail(groups: Any, *more: Any) -> int:
        if groups[0][0][0] is training.model[0]:
            raise MemoryError
        return int(native.step(groups, *more))

    failing = SimpleNamespace(**functions_of(native), step=fail)
    use(monkeypatch, failing)
    with pytest.raises(MemoryError):
        training.step(1)
    assert all(map(torch.equal, before, training.numbers()))
    use(monkeypatch, native)
    training.step(1)
    assert all(weight._version > version for weight, version in zip(training.model, versions, strict=True))


def of_other_bits(native: Any) -> Any:
    """Native code whose step of a weight without moments is a little off."""

    def step(groups: Any, states: Any, is_split: bool, smallest: int) -> int:
        for weights, masters, _, options in groups:
            for weight, master in zip(weights, masters, strict=True):
                table = one_pass.SplitMasters()
                values = table.values(master).add_(weight.grad.float(), alpha=-options[0])
                table.load(master, values + 1e-6)
        return sum(weight.numel() for weights, *_ in groups for weight in weights)

    return SimpleNamespace(**functions_of(native), step=step)


def test_native_code_of_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, native: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training, expected = two(SGD)
    use(monkeypatch, of_other_bits(native))
    with caplog.at_level(logging.INFO, "mpinit"):
        training.step(0)
    expected.step(0)
    assert_same(expected, training)
    assert "other bits" in caplog.text
    assert "native code: built, not used" in mpinit.describe(training.model)


def test_state_in_another_mapping_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    trainings = two(masters=True)
    for training in trainings:
        training.step(0)
        training.optimizer.state = UserDict(training.optimizer.state)  # type: ignore[assignment]
    assert assert_stepped_alike(monkeypatch, native, trainings, 3) == 0


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_replaced_step_method_runs(monkeypatch: pytest.MonkeyPatch, native: Any, level: str) -> None:
    use(monkeypatch, native)
    own = SGD.step

    @functools.wraps(own)
    def other(self: Any, *args: Any) -> Any:
        for weight in self.param_groups[0]["params"]:
            weight.grad.fill_(1)
        return own(self, *args)

    monkeypatch.setattr(SGD, "step", other)
    training = Training(SGD, "float32", [torch.ones(30, 30)], level, level == "O5")
    for seed in range(3):
        training.step(seed)
    master = next(iter(mpinit.master_params(training.optimizer)))
    assert torch.allclose(master, torch.full((30, 30), 0.997), rtol=1e-6, atol=0)


@pytest.mark.parametrize("state", ["float32", "int8"])
@pytest.mark.parametrize("make", [SGD, AdamW])
def test_describe_says_whether_it_is_used(monkeypatch: pytest.MonkeyPatch, native: Any, make: Make, state: str) -> None:
    training = Training(make, state)
    training.step(0)
    assert "  native code: switched off by MPINIT_NATIVE=0" in mpinit.describe(training.model).splitlines()
    use(monkeypatch, native)
    training.step(1)
    assert "  native code: built, used" in mpinit.describe(training.model).splitlines()


def test_describe_omits_native_code_when_unused(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    use(monkeypatch, native)
    for other, state, is_said in ((torch.optim.RMSprop, "float32", False), (torch.optim.RMSprop, "int8", True)):
        training = Training(other, state)
        training.step(0)
        assert ("native code: built" in mpinit.describe(training.model)) is is_said


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder in which a process that has not loaded native code looks for it."""
    monkeypatch.delenv("MPINIT_NATIVE", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    use(monkeypatch, native_code._NOT_TRIED)
    path = native_code.library()
    assert path.is_relative_to(tmp_path)
    return path


def put_at(path: Path, native: Any) -> None:
    """Have the module that the tests' session built where it is looked for."""
    path.parent.mkdir(parents=True)
    shutil.copy(native.__spec__.origin, path)


def forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise AssertionError(f"a process was started: {arguments}")

    for owner, name in (
        *((subprocess, "Popen"), (os, "system"), (os, "fork"), (os, "posix_spawn"), (os, "popen")),
        *((os, "execv"), (os, "execve"), (os, "execvp"), (os, "posix_spawnp")),
    ):
        monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("state", ["float32", "int8"])
@pytest.mark.parametrize("masters", ["split", True])
def test_a_training_starts_no_process_and_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unloaded: Path, masters: Any, state: str
) -> None:
    forbid_processes(monkeypatch)
    training = Training(AdamW, state, masters=masters)
    for seed in range(30):
        training.step(seed)
    assert native_code.native() is None and not list(tmp_path.iterdir())
    assert "  native code: not built, `mpinit build-native` builds it" in mpinit.describe(training.model).splitlines()


def test_native_code_is_loaded_once(monkeypatch: pytest.MonkeyPatch, native: Any, unloaded: Path) -> None:
    put_at(unloaded, native)
    loads: list[Path] = []
    load = native_code.load
    monkeypatch.setattr(native_code, "load", lambda path: loads.append(path) or load(path))
    forbid_processes(monkeypatch)
    training, other = two()
    assert not loads, "before a step"
    for seed in range(5):
        training.step(seed)
    assert loads == [unloaded]
    assert "  native code: built, used" in mpinit.describe(training.model)
    use(monkeypatch, None)
    for seed in range(5):
        other.step(seed)
    assert_same(training, other)


def test_environment_variable_disables_native_code(
    monkeypatch: pytest.MonkeyPatch, native: Any, unloaded: Path
) -> None:
    put_at(unloaded, native)
    monkeypatch.setenv("MPINIT_NATIVE", "0")
    assert native_code.native() is None


def test_a_file_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, unloaded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unloaded.parent.mkdir(parents=True)
    unloaded.write_bytes(b"no library")
    training, expected = two()
    with caplog.at_level(logging.WARNING, "mpinit"):
        training.step(0)
        training.step(1)
    assert caplog.text.count(f"{unloaded} cannot be loaded") == 1
    assert "native code: built, but cannot be loaded; `mpinit build-native --force`" in mpinit.describe(training.model)
    use(monkeypatch, None)
    expected.step(0)
    expected.step(1)
    assert_same(training, expected)


def test_no_clock_chooses_code_in_a_step() -> None:
    """Find one file that reads a clock: once in a process, for a log line about emulated 16-bit arithmetic."""
    package = Path(mpinit.__file__).parent
    reading = {
        path.name
        for folder in ("optimizer", "masters", "torch_internals")
        for path in (package / folder).rglob("*.py")
        if re.search(r"perf_counter|process_time", path.read_text("utf-8"))
    }
    assert reading == {"emulation.py"}
    users = [path for path in package.rglob("*.py") if re.search(r"import .*\bslowdown\b", path.read_text("utf-8"))]
    assert [path.relative_to(package).as_posix() for path in users] == ["model/boundary.py"]
