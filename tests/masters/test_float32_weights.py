"""``float32_weights``: inside, weights read and write as the float32 numbers that they mean; outside as before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import simulated_device
import torch
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
def test_inside_parameters_and_buffers_are_what_state_dict_says(kind: str) -> None:
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


@pytest.mark.parametrize("kind", ["O2"])
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
    assert found[0] == found[1] and found[0][1] == 0


MASTERS = {kind: KINDS[kind] for kind in ("O2", "O5", "split")}


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
        assert inside[4] is not kept[4]
        assert kind == "split" or inside[0] is kept[0]
    for name, value in new.state_dict().items():
        assert torch.equal(model.state_dict()[f"3.{name}"], value)
    model[3] = nn.Linear(8, 2).bfloat16()
    with mpinit.float32_weights(model):
        assert model[3].weight.dtype is torch.float32
    assert model[3].weight.dtype is torch.bfloat16


def writes() -> dict[str, Any]:
    """Ways to write 0.1 to a number of a parameter inside of a block."""

    return {
        "in place": lambda model: model[0].weight.detach()[0, 0].fill_(0.1),
        "its data": lambda model: model[0].weight.data[0, 0].fill_(0.1),
        "numpy": lambda model: model[0].weight.detach().numpy().__setitem__((0, 0), 0.1),
        "other data": lambda model: setattr(model[0].weight, "data", model[0].weight.data + 1.0),
        "other strides": lambda model: setattr(model[0].weight, "data", model[0].weight.data.t().contiguous().t() + 1),
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


def exchange(model: nn.Module) -> None:
    model[0].weight, model[3].weight = model[3].weight, model[0].weight


def tie(model: nn.Module) -> None:
    model[1].weight = model[0].weight


def move(model: nn.Module) -> None:
    weight = model[0].weight
    del model[0].weight
    model[1].register_parameter("moved", weight)


def remove(model: nn.Module) -> None:
    del model[0].weight


def add_a_place(model: nn.Module) -> None:
    model[2].extra = model[0].weight


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 6))


def freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


def hook(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda gradient: gradient)


def set_gradient(model: nn.Module) -> None:
    model[0].weight.grad = torch.zeros(8, 6)


def reshape(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(3)


def cut(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data[:1]


CHANGES: dict[Callable[[nn.Module], None], str] = {
    exchange: "was replaced",
    tie: "was put into another place",
    move: "was put into another place",
    remove: "was removed",
    add_a_place: "was put into another place",
    parametrize: "was put into another place",
    replace: "was replaced",
    freeze: "has another requires_grad",
    hook: "has hooks",
    set_gradient: "has a gradient",
    reshape: "has other memory",
    cut: "has other memory",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MASTERS)
def test_changes_of_other_things_than_values_are_refused(kind: str, change: Callable[[nn.Module], None]) -> None:
    """The error names the parameter; values that were written to others count, and the loop goes on."""
    model, optimizer, batch = trained(**KINDS[kind])
    own = [model[0].weight, model[3].weight]
    with (
        pytest.raises(RuntimeError, match=f"' {CHANGES[change]} inside `with mpinit.float32_weights"),
        mpinit.float32_weights(model),
    ):
        model[3].bias.detach().fill_(0.1001)
        change(model)
    assert model.state_dict()["3.bias"][0] == torch.tensor(0.1001)
    if change not in (tie, move, parametrize, remove):
        assert model[0].weight is own[0] and model[3].weight is own[1]
        assert (own[0].requires_grad and own[0].dtype is torch.bfloat16) or kind == "O2"
        step(model, optimizer, batch)
        with mpinit.float32_weights(model):
            hooks = [hook.__name__ for hook in (model[0].weight._backward_hooks or {}).values()]
            assert model[0].weight.requires_grad and model[0].weight.grad is None and "<lambda>" not in hooks


@pytest.mark.parametrize("way", ["copy_", "data.copy_", "data ="])
@pytest.mark.parametrize("kind", MASTERS)
def test_write_to_the_models_own_parameter_inside_is_refused(kind: str, way: str) -> None:
    model, _, _ = trained(**KINDS[kind])
    own, new = model[0].weight, torch.full_like(model[0].weight, 0.25)
    writes = {
        "copy_": lambda: own.detach().copy_(new),
        "data.copy_": lambda: own.data.copy_(new),
        "data =": lambda: setattr(own, "data", new),
    }
    before = state(model)
    with pytest.raises(RuntimeError, match=r"'0.weight' was itself written to"), mpinit.float32_weights(model):
        writes[way]()
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"]), "the write was dropped"


@pytest.mark.parametrize("kind", MASTERS)
def test_backward_into_parameters_of_a_block_is_refused(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    model.eval()
    before = state(model)
    with mpinit.float32_weights(model):
        inside = model(batch).square().mean()
        with pytest.raises(RuntimeError, match="before or after the with-block"):
            model(batch).square().mean().backward()
        x = batch.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)  # a gradient of the input reaches no parameter
    with pytest.raises(RuntimeError, match="to evaluate, use"):
        inside.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    after = state(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.train()
    step(model, optimizer, batch)


def test_block_of_other_models_inside_block_is_refused() -> None:
    one, _, _ = trained(**KINDS["O5"])
    other, _, _ = trained(**KINDS["split"])
    with mpinit.float32_weights([one, other]), mpinit.float32_weights(one):
        assert one[0].weight.dtype is other[0].weight.dtype is torch.float32
    with (
        mpinit.float32_weights(one),
        pytest.raises(RuntimeError, match=r"pass the models of both"),
        mpinit.float32_weights(other),
    ):
        pass
    assert one[0].weight.dtype is other[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", MASTERS)
def test_kept_parameter_of_a_block_is_the_live_master_or_empty(kind: str) -> None:
    model, optimizer, batch = trained(**KINDS[kind])
    with mpinit.float32_weights(model):
        kept = model[0].weight
    if kind == "split":
        assert kept.shape == (0,)
        with pytest.raises(RuntimeError):
            kept.detach().copy_(torch.zeros(8, 6))
    else:
        with torch.no_grad():
            kept.fill_(0.1001)
        model(batch)
        assert torch.equal(model[0].weight.float(), torch.tensor(0.1001).to(model[0].weight.dtype).float().expand(8, 6))
        kept.data = torch.full((8, 6), 0.2002)
        step(model, optimizer, batch)
        assert (model.state_dict()["0.weight"] - 0.2002).abs().max() < 0.2


@pytest.mark.parametrize("kind", MASTERS)
def test_frozen_weight_and_its_average(kind: str) -> None:
    model, _, _ = trained(**KINDS[kind])
    model[3].weight.requires_grad_(False)
    for _ in range(2):
        with mpinit.float32_weights(model), torch.no_grad():
            assert not model[3].weight.requires_grad
            model[3].weight.lerp_(torch.zeros(2, 8), 0.001)
    assert model[0].weight.requires_grad and not model[3].weight.requires_grad


@pytest.mark.parametrize("kind", MASTERS)
def test_blocks_follow_a_model_that_changes_between_them(kind: str) -> None:
    """Unfrozen with a master, frozen, a part more, a buffer replaced: each block has float32 numbers of all of it."""
    model, optimizer, batch = trained(**KINDS[kind])
    head = model[4]

    def unfreeze() -> None:
        head.requires_grad_(True)
        step(model, optimizer, batch)

    def add_part() -> None:
        model.append(nn.Linear(2, 2).to(head.weight.dtype))

    def replace_buffer() -> None:
        head.shift = torch.ones(2, dtype=head.weight.dtype)

    def freeze_first() -> None:
        model[0].requires_grad_(False)

    for change in (unfreeze, add_part, replace_buffer, freeze_first):
        change()
        own = [*model.parameters(), *model.buffers()]
        for _ in range(2):
            expected = state(model)
            with mpinit.float32_weights(model), torch.no_grad():
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype, name
                asked = [tensor.requires_grad for tensor in own if isinstance(tensor, nn.Parameter)]
                assert [parameter.requires_grad for parameter in model.parameters()] == asked
                head.weight.add_(0.125)
            moved = state(model)["4.weight"] - expected["4.weight"]
            torch.testing.assert_close(moved, torch.full_like(moved, 0.125), rtol=0, atol=2**-8)
        assert all(one is other for one, other in zip(own, (*model.parameters(), *model.buffers()), strict=True))
        step(model, optimizer, batch)


def test_loading_an_optimizer_is_refused_inside() -> None:
    """Its state would become 16-bit, as the weights in its groups."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    mpinit.initialize(model, optimizer, "O5")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    with (
        mpinit.float32_weights(model),
        pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called inside .*float32_weights"),
    ):
        optimizer.load_state_dict(saved)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
