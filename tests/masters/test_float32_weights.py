"""``float32_weights``: inside, weights read and write as the float32 numbers that they mean; outside as before.

Below the public face: each test runs by torch's operations and by native code.
"""

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import simulated_device
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import LEVELS
from session_device import device, placed
from torch import nn

import mpinit

pytestmark = pytest.mark.device

KINDS = LEVELS | {"O3": {"opt_level": "O3", "cast_model_type": torch.bfloat16}}


def trained(**keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model after three steps, with a buffer and a frozen part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 2))
    model[4].requires_grad_(False)
    model[4].register_buffer("shift", torch.tensor([0.3, 1.0 / 3.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    mpinit.initialize(model, optimizer, **keywords | {"loss_scale": 1.0})
    batch = torch.randn(16, 6)
    for _ in range(3):
        step(model, optimizer, batch)
    return model, optimizer, batch


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss((model(batch) - 1).square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_inside_parameters_and_buffers_are_what_a_state_dict_says(kind: str) -> None:
    model, _, _ = trained(**KINDS[kind])
    expected, outside = state(model), [tensor.dtype for tensor in model.state_dict(keep_vars=True).values()]
    with mpinit.float32_weights(model):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(tensor, expected[name]), name
            assert tensor.dtype == expected[name].dtype
    assert [tensor.dtype for tensor in model.state_dict(keep_vars=True).values()] == outside
    after = state(model)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_inside_are_those_of_a_float32_model(kind: str) -> None:
    model, _, batch = trained(**KINDS[kind])
    if kind == "O1":
        pytest.skip("weights are float32 anyway, and functions go on casting")
    copied = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 2))
    copied[4].register_buffer("shift", torch.zeros(2))
    copied.load_state_dict(model.state_dict())
    model.eval(), copied.eval()
    with mpinit.float32_weights(model), torch.no_grad():
        assert torch.equal(model(batch), copied(batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raises", [False, True])
def test_writes_inside_survive_an_exception(kind: str, raises: bool) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    target = {name: value * 1.0001 for name, value in model.state_dict().items() if value.is_floating_point()}
    try:
        with mpinit.float32_weights(model), mpinit.float32_weights(optimizer), torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in target:
                    tensor.data.mul_(1.0001)
            if raises:
                raise KeyError("stop")
    except KeyError:
        pass
    after = model.state_dict()
    for name, value in target.items():
        exact = kind != "O3" and not name.startswith("4") and name in dict(model.named_parameters())
        torch.testing.assert_close(after[name], value, rtol=0 if exact else 2**-8, atol=0)
    step(model, optimizer, batch)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize("kind", ["O5", "split"])
def test_training_is_unchanged_after_reading(kind: str) -> None:
    looked, plain = trained(**KINDS[kind]), trained(**KINDS[kind])
    for _ in range(3):
        with mpinit.float32_weights(looked[0]):
            assert all(parameter.dtype == torch.float32 for parameter in looked[0].parameters())
        for each in (looked, plain):
            step(*each)
    a, b = state(looked[0]), state(plain[0])
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["O2", "split"])
def test_steps_losses_and_undo_are_refused_inside(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    step(model, optimizer, batch)
    loss = torch.ones((), requires_grad=True)
    for call in (optimizer.step, mpinit.scale_loss(loss, optimizer).__enter__, lambda: mpinit.undo(model)):
        with mpinit.float32_weights(model), pytest.raises(RuntimeError, match="float32_weights"):
            call()
    step(model, optimizer, batch)


def test_a_recurrent_net_and_tied_weights() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, opt_level="O5")
    with mpinit.float32_weights(model), torch.no_grad():
        assert model["a"].weight is model["b"].weight and model["a"].weight.dtype == torch.float32
        expected = model["rnn"].forward(torch.ones(2, 1, 4))[0].dtype
        model["rnn"].weight_hh_l0.fill_(0.1001)
    assert expected == torch.float32
    assert model["rnn"]._flat_weights[1] is model["rnn"].weight_hh_l0
    assert model.state_dict()["rnn.weight_hh_l0"][0, 0] == torch.tensor(0.1001)


class Shapes(nn.Module):
    """Weights of many shapes and layouts, with zeros and infinities, and one that is empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.many = nn.ParameterList(torch.randn(5, 3) for _ in range(20))
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.large = nn.Parameter(torch.randn(1100, 1000))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.number = nn.Parameter(torch.tensor(1 / 3))
        self.frozen = nn.Parameter(torch.full((4,), 1 / 3), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 1 / 3))

    def forward(self) -> torch.Tensor:
        return sum((parameter.float() ** 3).sum() for parameter in self.parameters())  # type: ignore[return-value]


def shapes(kind: str) -> Shapes:
    model = placed(Shapes())
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    mpinit.initialize(model, optimizer, **KINDS[kind] | {"loss_scale": 1.0})
    with mpinit.scale_loss(model(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    with torch.no_grad():  # their lower bits no longer count
        model.many[0][0], model.many[1][:, 1], model.channels_last[0] = 0.0, float("inf"), 0.0
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_any_layout_are_read_and_written_together(kind: str) -> None:
    model = shapes(kind)
    expected = state(model)
    with mpinit.float32_weights(model), torch.no_grad():
        inside = dict(model.named_parameters())
        for name, parameter in inside.items():
            assert torch.equal(parameter, expected[name]), name
            assert parameter.stride() == expected[name].stride()
        # No tensor is a part of another's memory, which saving it would save, too.
        assert len({p.untyped_storage().data_ptr() for p in inside.values() if p.numel()}) == len(inside) - 1
        for name in ("many.3", "channels_last", "large", "number"):
            inside[name].add_(1 / 3)
            expected[name] = inside[name].clone()
        del inside, parameter
    same = state(model)
    if kind not in ("O1", "O3"):
        assert all(torch.equal(same[name], expected[name]) for name in expected)
    assert all(same[name].isfinite().all() for name in same if name != "many.1")


@pytest.mark.parametrize("kind", ["O2", "split"])
def test_a_block_costs_a_device_the_same_however_many_weights(kind: str) -> None:
    """Count operations of a block that reads: an average of the weights does so in every step."""
    if device().type != "sim":
        pytest.skip("counted on the simulated device: pytest --device sim")
    found = []
    for count in (4, 40):
        model = placed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))))
        mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **KINDS[kind])
        for _ in range(2):
            with simulated_device.counted() as counts, mpinit.float32_weights(model):
                pass
        found.append((counts.launches, counts.reads))
        mpinit.undo(model)
    assert found[0] == found[1] and found[0][1] == (kind == "split")


MASTERS = {kind: KINDS[kind] for kind in ("O2", "O5", "split")}


@pytest.mark.parametrize("kind", MASTERS)
def test_parameters_are_the_same_objects_in_every_block(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    with mpinit.float32_weights(model):
        kept = list(model.parameters())
    for _ in range(2):
        step(model, optimizer, batch)
        expected = [value for name, value in state(model).items() if name in dict(model.named_parameters())]
        with mpinit.float32_weights(model), torch.no_grad():
            assert all(one is other for one, other in zip(kept, model.parameters(), strict=True))
            assert all(map(torch.equal, kept, expected))
            kept[0].add_(1e-4)
        assert torch.equal(model.state_dict()["0.weight"], expected[0] + 1e-4)


@pytest.mark.parametrize("kind", MASTERS)
def test_average_over_a_kept_list_is_that_of_float32_numbers(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    with mpinit.float32_weights(model):
        kept = list(model.parameters())
        averages = [p.detach().clone() for p in kept]
    expected = [average.clone() for average in averages]
    names = [name for name, _ in model.named_parameters()]
    for _ in range(4):
        step(model, optimizer, batch)
        with mpinit.float32_weights(model), torch.no_grad():
            torch._foreach_lerp_(averages, kept, 0.1)
        torch._foreach_lerp_(expected, [model.state_dict()[name] for name in names], 0.1)
    assert all(map(torch.equal, averages, expected))


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("way", ["unfrozen", "added"])
def test_average_over_a_kept_list_has_a_weight_that_is_trained_later(kind: str, way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    trained_first = model if way == "unfrozen" else model[1]
    optimizer = torch.optim.SGD(trained_first.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **KINDS[kind] | {"loss_scale": 1.0})
    with mpinit.float32_weights(model):
        kept = list(model.parameters())
        averages = [p.detach().clone() for p in kept]
    expected = [average.clone() for average in averages]
    for number in range(4):
        if number == 2:
            model[0].requires_grad_(True)
            if way == "added":
                optimizer.add_param_group({"params": list(model[0].parameters())})
        step(model, optimizer, torch.ones(3, 6))
        with mpinit.float32_weights(model), torch.no_grad():
            torch._foreach_lerp_(averages, kept, 0.1)
        torch._foreach_lerp_(expected, list(model.state_dict().values()), 0.1)
    assert all(map(torch.equal, averages, expected))
    if kind != "split":
        assert all(map(operator.is_, mpinit.master_params(optimizer), kept if way == "unfrozen" else kept[2:]))
    with torch.no_grad():
        kept[0].fill_(0.1)
    if kind == "split":
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            model(torch.ones(3, 6))
    else:
        assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 6), 0.1))


@pytest.mark.parametrize("kind", MASTERS)
def test_average_over_a_kept_list_has_a_weight_that_becomes_float32(kind: str) -> None:
    class Decaying(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.99)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Decaying(6, 6).requires_grad_(False), nn.Linear(6, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **KINDS[kind] | {"loss_scale": 1.0})
    with mpinit.float32_weights(model):
        kept = dict(model.named_parameters())
    for _ in range(3):
        step(model, optimizer, torch.ones(3, 6))
        expected = state(model)
        with mpinit.float32_weights(model):
            assert all(torch.equal(kept[name], expected[name]) for name in kept)
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("kind", MASTERS)
def test_block_after_a_replaced_parameter_has_the_new_one(kind: str) -> None:
    model, optimizer, _ = trained(**KINDS[kind])
    with mpinit.float32_weights(model):
        kept = list(model.parameters())
    new = nn.Linear(8, 2)
    model[3] = new
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with mpinit.float32_weights(model):
        inside = list(model.parameters())
        assert inside[0] is kept[0] and inside[4] is not kept[4]
    for name, value in new.state_dict().items():
        assert torch.equal(model.state_dict()[f"3.{name}"], value)
    model[3] = nn.Linear(8, 2).bfloat16()
    with mpinit.float32_weights(model):
        assert model[3].weight.dtype is torch.float32
    assert model[3].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", MASTERS)
def test_hooks_attributes_and_gradients_of_one_block_are_not_in_the_next(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    weight, called = model[0].weight, []
    for each in range(2):
        with mpinit.float32_weights(model):
            inside = model[0].weight
            assert each == 0 or (not vars(inside) and inside.grad is None)
            inside.tag = each
            handle = inside.register_hook(lambda grad: called.append(grad.dtype))
            inside.requires_grad_(each == 0)
            inside.grad = torch.full_like(inside, 0.5)
        assert weight.tag == each and weight.requires_grad is (each == 0)
        assert torch.equal(weight.grad.float(), torch.full_like(weight, 0.5, dtype=torch.float32))
        del weight.tag
        handle.remove()
        weight.grad = None
        weight.requires_grad_()
    step(model, optimizer, batch)
    assert not called and not weight._backward_hooks
    with mpinit.float32_weights(model):
        assert not vars(model[0].weight) and not model[0].weight._backward_hooks


def writes() -> dict[str, Any]:
    """Ways to write 0.1 to a number of a parameter inside of a block."""

    def replace(model: nn.Module) -> None:
        new = model[0].weight.detach().clone()
        new[0, 0] = 0.1
        model[0].weight = nn.Parameter(new)

    return {
        "in place": lambda model: model[0].weight.detach()[0, 0].fill_(0.1),
        "its data": lambda model: model[0].weight.data[0, 0].fill_(0.1),
        "numpy": lambda model: model[0].weight.detach().numpy().__setitem__((0, 0), 0.1),
        "other data": lambda model: setattr(model[0].weight, "data", model[0].weight.data + 1.0),
        "other strides": lambda model: setattr(model[0].weight, "data", model[0].weight.data.t().contiguous().t() + 1),
        "another parameter": replace,
    }


@pytest.mark.parametrize("way", writes())
@pytest.mark.parametrize("kind", MASTERS)
def test_every_write_inside_counts_in_the_second_block_too(kind: str, way: str) -> None:
    if way == "numpy" and device().type != "cpu":
        pytest.skip("numpy is for a CPU")
    model, optimizer, batch = trained(**KINDS[kind])
    for _ in range(2):
        step(model, optimizer, batch)
        others = {name: value for name, value in state(model).items() if name != "0.weight"}
        with mpinit.float32_weights(model), torch.no_grad():
            writes()[way](model)
            expected = model[0].weight.detach().clone()
        after = model.state_dict()
        assert torch.equal(after["0.weight"], expected)
        assert torch.equal(model[0].weight, expected.to(model[0].weight.dtype))
        assert all(torch.equal(after[name], value) for name, value in others.items())
        with mpinit.float32_weights(model):
            assert torch.equal(model[0].weight, expected)


@pytest.mark.parametrize("kind", MASTERS)
def test_writes_to_weights_between_blocks_are_read_inside(kind: str) -> None:
    model, _, _ = trained(**KINDS[kind])
    ways = [
        lambda w: w.detach()[0].fill_(0.5),
        lambda w: w.data[1].fill_(0.25),
        lambda w: w.detach()[2].zero_(),
        lambda w: w.detach()[3].fill_(float("inf")),
    ]
    if device().type == "cpu":
        ways.append(lambda w: w.detach().view(torch.int16).numpy().__setitem__((4, 0), 0))
    for write in ways:
        with mpinit.float32_weights(model):
            pass
        before = model.state_dict()["0.weight"].clone()
        write(model[0].weight)
        with mpinit.float32_weights(model):
            inside = model[0].weight.detach().clone()
        changed = inside != before
        # Split masters keep their lower bits, of at most half a unit in the last place.
        expected = model[0].weight.detach().float()
        assert changed.any()
        torch.testing.assert_close(inside[changed], expected[changed], rtol=2**-8 if kind == "split" else 0, atol=0)


@pytest.mark.parametrize("kind", MASTERS)
def test_block_in_inference_mode_reads_and_writes(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    expected = state(model)
    for _ in range(2):
        with torch.inference_mode(), mpinit.float32_weights(model):
            assert torch.equal(model[0].weight, expected["0.weight"])
            model(batch)
        step(model, optimizer, batch)
        expected = state(model)


@pytest.mark.parametrize("kind", [*MASTERS, "O3"])
def test_parameter_kept_from_a_block_is_refused_after_its_replacement(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    with mpinit.float32_weights(model):
        kept = model[4].shift  # no master, so it is made for blocks
    model[4].register_buffer("shift", torch.tensor([0.5, 0.25], dtype=model[4].shift.dtype))
    with mpinit.float32_weights(model):
        assert model[4].shift is not kept and torch.equal(model[4].shift, torch.tensor([0.5, 0.25]))
    assert kept.isnan().all()
    kept.data = torch.ones(2)
    kept.mul_(2)
    with pytest.raises(RuntimeError, match="kept from inside"):
        model.state_dict()
    step(model, optimizer, batch)


@given(st.lists(st.sampled_from(["read", "write", "step", "freeze", "free", "outside", "raise"]), max_size=8))
def test_any_order_of_blocks_and_steps_is_that_of_one_model(actions: list[str]) -> None:
    """Split masters and full masters of bfloat16 differ in rounding alone, so both are compared with state dicts."""
    for kind in ("O5", "split"):
        model, optimizer, batch = trained(**KINDS[kind])
        expected = state(model)
        for action in actions:
            weight = model[3].weight
            if action == "step":
                step(model, optimizer, batch)
            elif action in ("freeze", "free"):
                weight.requires_grad_(action == "free")
            elif action == "outside":
                with torch.no_grad():
                    weight[0, 0] = 0.5
            else:
                try:
                    with mpinit.float32_weights(model), torch.no_grad():
                        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
                        if action != "read":
                            model[3].weight.mul_(1.0001)
                            expected["3.weight"] = model[3].weight.detach().clone()
                        if action == "raise":
                            raise KeyError
                except KeyError:
                    pass
            if action in ("step", "outside"):
                expected = state(model)
            after = state(model)
            assert all(torch.equal(after[name], value) for name, value in expected.items()), action
        mpinit.undo(model)


def exchange(model: nn.Module) -> None:
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


def tie(model: nn.Module) -> None:
    model[1].weight = model[0].weight


def move(model: nn.Module) -> None:
    weight = model[0].weight
    del model[0].weight
    model[1].register_parameter("moved", weight)


def add_a_place(model: nn.Module) -> None:
    model[2].extra = model[0].weight


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())


STRUCTURES = (exchange, tie, move, add_a_place, parametrize)


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("change", STRUCTURES)
def test_parameters_put_into_other_places_inside_are_there_after(
    kind: str, change: Callable[[nn.Module], None]
) -> None:
    changed = []
    for is_inside in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, **KINDS[kind] | {"loss_scale": 1.0})
        own = list(model.parameters())
        with mpinit.float32_weights(model) if is_inside else nullcontext():
            change(model)
        places = model.state_dict(keep_vars=True)
        changed.append(({name: [p is each for each in own] for name, p in places.items()}, state(model)))
        assert all(p.dtype is KINDS[kind].get("cast_model_type", own[0].dtype) for p in model.parameters())
        assert all(map(operator.is_, optimizer.param_groups[0]["params"], own))
        mpinit.undo(model)
    (inside, values), (outside, expected) = changed
    assert inside == outside
    assert all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", MASTERS)
def test_replacement_in_all_places_inside_shares_the_parameter(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    model[0].extra, shared = model[3].weight, model[3].weight
    with mpinit.float32_weights(model):
        new = nn.Parameter(model[3].weight * 2)
        model[3].weight = model[0].extra = model[1].extra = new
    assert model[3].weight is model[0].extra is model[1].extra is shared
    assert torch.equal(state(model)["3.weight"], new)
    step(model, optimizer, batch)


@pytest.mark.parametrize("kind", MASTERS)
def test_replacement_in_one_place_of_a_shared_parameter_is_refused_by_name(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    model[0].extra = shared = model[3].weight
    before = state(model)
    with pytest.raises(RuntimeError, match=r"0.extra"), mpinit.float32_weights(model):
        model[3].weight = nn.Parameter(torch.zeros_like(model[3].weight))
    assert model[3].weight is model[0].extra is shared
    after = state(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    step(model, optimizer, batch)


@pytest.mark.parametrize("kind", MASTERS)
def test_replacement_put_into_the_groups_inside_is_trained(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    weight = model[0].weight
    with mpinit.float32_weights(model):
        optimizer.param_groups[0]["params"][0] = model[0].weight = nn.Parameter(model[0].weight * 2)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight is weight
    before = state(model)
    step(model, optimizer, batch)
    assert not torch.equal(state(model)["0.weight"], before["0.weight"])


WRITES_OUTSIDE: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": lambda own: own.copy_(torch.full_like(own, 0.25)),
    "data.copy_": lambda own: own.data.copy_(torch.full_like(own, 0.25)),
    "data =": lambda own: setattr(own, "data", torch.full_like(own, 0.25)),
}


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("name", ["0.weight", "4.weight"])
@pytest.mark.parametrize("write", WRITES_OUTSIDE)
def test_own_parameter_written_inside_a_block_is_refused_by_name(kind: str, name: str, write: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    own, expected = model.get_parameter(name), state(model)
    for _ in range(2):
        own.data  # noqa: B018 (read before the block, too)
        with pytest.raises(RuntimeError, match=name), mpinit.float32_weights(model), torch.no_grad():
            WRITES_OUTSIDE[write](own)
            model[0].bias.fill_(0.1)
        after = state(model)
        expected["0.bias"].fill_(0.1)
        assert all(torch.equal(after[each], expected[each]) for each in expected)
    with mpinit.float32_weights(model), torch.no_grad():
        own.data.sum(), model[0].bias.fill_(0.2)
    step(model, optimizer, batch)


@pytest.mark.parametrize("kind", MASTERS)
def test_own_parameter_written_inside_through_old_data_is_refused_on_a_cpu(kind: str) -> None:
    model, _, _ = trained(**KINDS[kind])
    if device().type != "cpu":
        pytest.skip("a comparison would need a device sync")
    data = model[0].weight.data
    with pytest.raises(RuntimeError, match=r"0\.weight"), mpinit.float32_weights(model):
        data.fill_(0.25)


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("asks_for_masters", [False, True])
@pytest.mark.parametrize("graph", ["penalty", "forward"])
def test_gradients_of_a_graph_made_inside_count_after_or_are_refused(
    kind: str, asks_for_masters: bool, graph: str
) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    optimizer.zero_grad()
    reference = copy.deepcopy(model)
    expected = torch.autograd.grad(loss_of(reference, batch, graph), list(reference[:4].parameters()))
    if asks_for_masters:
        list(mpinit.master_params(optimizer))
    for count in (1, 2):  # the second pass adds to the first
        with mpinit.float32_weights(model):
            loss = loss_of(model, batch, graph)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            if kind == "split":
                scaled_loss.backward()
                break
            scaled_loss.backward()
        for parameter, gradient in zip(model[:4].parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient * count)
    if kind == "split":
        with pytest.raises(RuntimeError, match=r"'0\.weight'.*after the block"):
            optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, batch)
        return
    loss_of(model, batch, "forward").backward()
    before = state(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert norm > 0 and not torch.equal(state(model)["0.weight"], before["0.weight"])


def loss_of(model: nn.Module, batch: torch.Tensor, graph: str) -> torch.Tensor:
    model.eval()
    if graph == "forward":
        return (model(batch).float() - 1).square().mean()
    return torch.stack([p.float().square().sum() for p in model[:4].parameters()]).sum()


@pytest.mark.parametrize("kind", MASTERS)
def test_state_dict_made_inside_is_a_copy_after_the_block(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    with mpinit.float32_weights(model), torch.no_grad():
        best = model.state_dict()
        best["0.bias"].fill_(0.1)  # shares the parameter's memory inside, as in torch
        assert torch.equal(model[0].bias, torch.full((8,), 0.1))
    kept, now = {name: value.clone() for name, value in best.items()}, state(model)
    assert all(torch.equal(now[name], kept[name]) for name in kept)
    step(model, optimizer, batch)
    with mpinit.float32_weights(model), torch.no_grad():
        model[0].weight.mul_(0.5)
    model(batch)
    assert all(torch.equal(best[name], kept[name]) for name in kept if not name.startswith("1."))  # a float32 norm
    with mpinit.float32_weights(model):
        new = model.state_dict()
    new["0.weight"].fill_(0.3)
    model(batch)
    assert torch.equal(model.state_dict()["0.weight"], torch.full((8, 6), 0.3))
    best["0.weight"].fill_(0.5)
    with pytest.raises(RuntimeError, match=r"'0\.weight' of a state dict"):
        model(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_made_inside_is_refused_after_the_block(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    with mpinit.float32_weights(model):
        made = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer.zero_grad()
    model(batch).float().sum().backward()
    if model[0].weight.dtype is torch.float32:
        made.step()
        return
    before = state(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*make the optimizer after the block"):
        made.step()
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())
    step(model, optimizer, batch)


@pytest.mark.parametrize("name", ["4.weight", "head.bias"])
@pytest.mark.parametrize("write", ["fill_", "data =", "data.fill_", "old data"])
def test_data_of_a_parameter_kept_from_a_block_is_refused_once_written(name: str, write: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("4", nn.Linear(2, 2))
    model.add_module("head", nn.Linear(2, 1))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **KINDS["split"])
    before = state(model)
    for _ in range(2):
        with mpinit.float32_weights(model), torch.no_grad():
            kept = model.get_parameter(name)
            kept.data = kept.data.clone()  # counts inside, and is no write after the block
        model(torch.ones(1, 2))
        if write == "data =":
            kept.data = torch.zeros_like(kept)
        elif write == "fill_":
            with torch.no_grad():
                kept.fill_(3.0)
        else:
            data = kept.data
            if write == "old data":
                model(torch.ones(1, 2))
            data.fill_(3.0)
        with pytest.raises(RuntimeError, match=f"'{name}' that was kept"):
            model(torch.ones(1, 2))
        assert bool(kept.isnan().all())
        model(torch.ones(1, 2))
        assert all(torch.equal(value, before[each]) for each, value in state(model).items())


@pytest.mark.parametrize(("kind", "name"), [("split", "0.weight"), ("O5", "4.weight"), ("O2", "4.shift")])
def test_data_of_another_shape_inside_is_refused_by_name(kind: str, name: str) -> None:
    model, _, batch = trained(**KINDS[kind])
    before = state(model)

    def tensors() -> dict[str, torch.Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    with pytest.raises(RuntimeError, match=f"'{name}' got the shape"), mpinit.float32_weights(model):
        tensors()[name].data = tensors()[name].data[:1]
    model(batch)
    assert all(torch.equal(value, before[each]) for each, value in state(model).items() if "1." not in each)
