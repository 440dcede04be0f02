"""State dicts are float32, of models that build theirs in ways of their own too."""

import gc
from typing import Any

import pytest
import torch
from models import CASES, DTYPES, OPTIMIZERS, Case, equal_tensors, level_arguments, through_file, train
from torch import Tensor, nn

import mpinit

MASTERS: dict[str, dict[str, Any]] = {
    "fp16": {"opt_level": "O2"},
    "bf16": {"opt_level": "O5"},
    "bf16 split": {"opt_level": "O5", "master_weights": "split"},
}


LEVELS = ["O0", "O1", "O2", "O3"]


def trained(kind: str, network: str = "cnn") -> tuple[Case, nn.Module, torch.optim.Optimizer]:
    case = CASES[network]
    model = case.build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    mpinit.initialize(model, optimizer, **MASTERS[kind])
    train(model, optimizer, case.batches(3), case.loss)
    return case, model, optimizer


def noise(model: nn.Module) -> dict[str, Tensor]:
    """A float32 state that no 16-bit weight can hold."""
    return {
        name: torch.rand_like(value) + 0.1 if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("network", CASES)
def test_float32_at_every_level(network: str, level: str, dtype: str) -> None:
    model = CASES[network].build()
    plain = {name: (value.dtype, value.shape) for name, value in model.state_dict().items()}
    mpinit.initialize(model, OPTIMIZERS["sgd"](model.parameters()), **level_arguments(level, DTYPES[dtype]))
    for part, prefix in [(model, ""), *((child, f"{name}.") for name, child in model.named_children())]:
        state = part.state_dict(prefix=prefix)
        assert {name: (value.dtype, value.shape) for name, value in state.items()} == {
            name: kind for name, kind in plain.items() if name.startswith(prefix)
        }
    assert through_file(model.state_dict()).keys() == plain.keys()


def test_state_dict_keeps_class_metadata_and_keep_vars() -> None:
    model = CASES["cnn"].build()
    before = model.state_dict()
    mpinit.initialize(model, opt_level="O2")
    after = model.state_dict()
    assert type(after) is type(before)
    assert after._metadata == before._metadata  # type: ignore[attr-defined]
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight


@pytest.mark.parametrize("kind", MASTERS)
def test_state_dict_has_the_masters_bits(kind: str) -> None:
    _, model, optimizer = trained(kind)
    state = model.state_dict()
    for name, weight in model.named_parameters():
        assert state[name].dtype is torch.float32
        assert torch.equal(state[name].to(weight.dtype), weight) or kind == "bf16 split"
        if weight.dtype is not torch.float32:
            assert not torch.equal(state[name], weight.float()), "more bits than the weight has"
    if kind != "bf16 split":
        holders = [parameter.detach() for parameter in mpinit.master_params(optimizer)]
        assert all(torch.equal(state[n], h) for (n, _), h in zip(model.named_parameters(), holders, strict=True))
    head = model.head.state_dict()
    assert all(torch.equal(head[name], state[f"head.{name}"]) for name in head)
    mpinit.undo(model)
    assert equal_tensors(dict(model.state_dict()), dict(state)), "undo gives the model the same bits"


@pytest.mark.parametrize("kind", MASTERS)
def test_loading_a_part_sets_its_masters(kind: str) -> None:
    _, model, optimizer = trained(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    part = {name: torch.rand_like(value) for name, value in model.head.state_dict().items()}
    model.head.load_state_dict(part)
    model.load_state_dict({"features.0.bias": torch.full((4,), 1 / 3)}, strict=False)
    optimizer.zero_grad()
    optimizer.step()
    expected = before | {f"head.{name}": value for name, value in part.items()}
    expected["features.0.bias"] = torch.full((4,), 1 / 3)
    assert equal_tensors(dict(model.state_dict()), expected)


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("fault", ["shape", "missing", "unexpected"])
def test_state_that_does_not_fit_is_refused_and_nothing_is_stale(fault: str, kind: str) -> None:
    _, model, optimizer = trained(kind)
    state = noise(model)
    if fault == "shape":
        state["head.weight"] = torch.zeros(2, 2)
    elif fault == "missing":
        del state["head.weight"]
    else:
        state["more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"head\.weight|more"):
        model.load_state_dict(state)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    optimizer.step()
    assert equal_tensors(dict(model.state_dict()), after), "weights and masters agree on what was loaded"


PARTIAL: dict[str, dict[str, object]] = {
    **MASTERS,
    "model": {"opt_level": "O5", "master_weights": "model"},
    "O3": {"opt_level": "O3"},
}


class Scaled(nn.Module):
    """Saves its weight transposed and scaled, and under another name as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[prefix + "scaled"] = (self.weight.detach() * 3).t().contiguous()
        destination[prefix + "row"] = self.weight.detach()[1]
        destination.pop(prefix + "weight")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "scaled"].t() / 3)


def stepped(kind: str, model: nn.Module, width: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, loss_scale=8.0, **MASTERS[kind])
    step(model, optimizer, width)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 3) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(model(torch.randn(4, width)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def master_of(model: nn.Module, name: str) -> Tensor:
    """A weight's master by undoing a session that nothing else needs any more."""
    mpinit.undo(model)
    return model.get_parameter(name).detach().clone()


@pytest.mark.parametrize("kind", MASTERS)
def test_a_module_that_loads_in_its_own_way_writes_to_its_weight(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Scaled())
    optimizer = stepped(kind, model)
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    optimizer.zero_grad()
    optimizer.step()
    loaded = (state["1.scaled"].t() / 3).to(model[1].weight.dtype)
    assert torch.equal(master_of(model, "1.weight").to(loaded.dtype), loaded)


def double(layer: nn.Module) -> None:
    layer.weight.detach().mul_(2)


class DoubledOnLoad(nn.Linear):
    """A layer that changes its weight after the weight was loaded."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        double(self)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("way", ["override", "hook"])
@pytest.mark.parametrize("kind", MASTERS)
def test_weight_changed_while_it_is_loaded_keeps_the_change(kind: str, way: str, trains: bool) -> None:
    """Load a model with a layer that doubles its weight in a hook of its own, or in ``_load_from_state_dict``."""
    layer = (DoubledOnLoad if way == "override" else nn.Linear)(4, 4)
    if way == "hook":
        layer.register_load_state_dict_post_hook(lambda module, keys: double(module))
    layer.weight.requires_grad_(trains)
    model = nn.Sequential(layer, nn.Linear(4, 4))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **MASTERS[kind])
    state = noise(model)
    model.load_state_dict(state)
    after = model.state_dict()
    assert torch.equal(after["0.weight"], layer.weight.float()), "a written number has no lower bits"
    torch.testing.assert_close(after["0.weight"], 2 * state["0.weight"], rtol=2**-8, atol=0)
    assert torch.equal(after["1.weight"], state["1.weight"])


@pytest.mark.parametrize("change", ["another value", "another name"])
@pytest.mark.parametrize("kind", MASTERS)
def test_last_load_pre_hook_of_a_layer_decides(kind: str, change: str) -> None:
    """Register hooks after ``initialize``: they scale an entry, or rename an old checkpoint's."""
    _, model, _ = trained(kind)

    def upgrade(layer: nn.Module, state: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        state[prefix + "weight"] = (
            state.pop(prefix + "old") if change == "another name" else state[prefix + "weight"] * 3
        )

    model.head.register_load_state_dict_pre_hook(upgrade)
    state = noise(model)
    expected = state["head.weight"].clone()
    if change == "another name":
        state["head.old"] = state.pop("head.weight")
    else:
        expected *= 3
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()["head.weight"], expected)


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize("into", ["attribute", "insert", "nested"])
def test_modules_added_later_save_and_load_the_masters_bits(into: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"list": nn.ModuleList([nn.Identity()])}))
    model.forward = lambda x: model[0](x) + sum(m(x) for m in model.modules() if type(m) is nn.Linear)
    optimizer = stepped(kind, model)
    late = nn.Linear(3, 3).to(model[0].weight.dtype)
    if into == "attribute":
        model.late = late
    elif into == "insert":
        model[1]["list"].insert(0, late)
    else:
        model.late = nn.Sequential(nn.Sequential(late))
    optimizer.add_param_group({"params": list(late.parameters())})
    step(model, optimizer)
    name = next(name for name, parameter in model.named_parameters() if parameter is late.weight)
    whole = model.state_dict()
    assert not torch.equal(whole[name], late.weight.float()), "more bits than the weight has"
    assert torch.equal(late.state_dict()["weight"], whole[name])
    late.load_state_dict({"weight": torch.full((3, 3), 1 / 3), "bias": torch.zeros(3)})
    assert torch.equal(model.state_dict()[name], torch.full((3, 3), 1 / 3))
    whole = model.state_dict()
    assert torch.equal(whole[name], master_of(model, name))
    assert not late._state_dict_hooks
    assert not late._load_state_dict_pre_hooks


@pytest.mark.parametrize("kind", MASTERS)
def test_weight_parametrised_later_is_saved_with_masters_bits(kind: str) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).t()

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = stepped(kind, model)
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", Symmetric())
    step(model, optimizer)
    name = "1.parametrizations.weight.original"
    states = [model.state_dict(), model[1].state_dict(prefix="1.")]
    states.append(model[1].parametrizations.state_dict(prefix="1.parametrizations."))
    master = master_of(model, name)
    assert not torch.equal(master, master.to(torch.float16 if kind == "fp16" else torch.bfloat16).float())
    assert all(torch.equal(state[name], master) for state in states)


@pytest.mark.parametrize("kind", MASTERS)
def test_a_destination_and_a_prefix_of_the_callers_own(kind: str) -> None:
    first, second = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)
    stepped(kind, first)
    stepped(kind, second)
    together = first.state_dict(prefix="first.")
    second.state_dict(destination=together, prefix="second.")
    plain: dict[str, Tensor] = {}
    second.state_dict(destination=plain)
    assert torch.equal(together["first.0.weight"], master_of(first, "0.weight"))
    assert torch.equal(together["second.weight"], master := master_of(second, "weight"))
    assert torch.equal(plain["weight"], master)


@pytest.mark.parametrize("kind", MASTERS)
def test_swapping_tensors_while_loading_is_right(kind: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    stepped(kind, model)
    state = {name: torch.rand(value.shape).to(value.dtype) for name, value in model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(model.state_dict()["1.weight"], state["1.weight"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"assign=True"):
        model.load_state_dict(state, assign=True)
    assert equal_tensors(dict(model.state_dict()), before), "not even what is float32"
    model.load_state_dict(state)
    assert equal_tensors(dict(model.state_dict()), state)


def test_next_undo_removes_module_hook_of_dropped_session() -> None:
    hooks = torch.nn.modules.module._global_module_registration_hooks
    before = len(hooks)
    model = nn.Linear(3, 3)
    stepped("bf16", model)
    assert len(hooks) > before
    del model
    gc.collect()
    mpinit.undo(mpinit.initialize(nn.Linear(3, 3), opt_level="O0"))
    assert len(hooks) == before
