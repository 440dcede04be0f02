"""Every way of copying an initialised model, at every level: the copy is what `undo` would give.

Below the public face: the registry shows that a copy has no session.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from frameworks import needs
from loops import iterate
from torch import nn

import mpinit
from mpinit import registry

# torch.package's own, of every tensor that it saves.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

LEVELS: dict[str, tuple[str, dict[str, Any]]] = {
    "O1": ("O1", {}),
    "O2": ("O2", {}),
    "O3": ("O3", {}),
    "O5": ("O5", {}),
    "split": ("O5", {"master_weights": "split"}),
    "model": ("O5", {"master_weights": "model"}),
}
X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def trained(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    name, more = LEVELS[level]
    mpinit.initialize(model, optimizer, name, **more)
    for _ in range(2):
        iterate(model(X).float().square().mean(), optimizer)
    return model, optimizer


def by_pickle(protocol: int, model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model, protocol))


def by_package(name: str, model: nn.Module, **keywords: Any) -> nn.Module:
    package = importlib.import_module(name)
    return package.loads(package.dumps(model, **keywords))


def by_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_torch_package(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", model)
    file.seek(0)
    return torch.package.PackageImporter(file).load_pickle("model", "model.pkl")


def answer_in_child(inbox: Any, outbox: Any) -> None:
    """Run the models that a parent process sends, and send back what they are."""
    torch.set_num_threads(1)
    for level, model in inbox.get().items():
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        outbox.put((level, registry.of(model) is None, weights, model(X).detach()))
    inbox.get()


def answer_from_arguments(outbox: Any, models: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Send the weights of models that came as arguments of this process, and whether the optimizer's are among them."""
    mine = next(iter(models["O5"].parameters())) is optimizer.param_groups[0]["params"][0]
    # NumPy arrays: the memory of a tensor that this process sends would go away with the process.
    outbox.put((mine, {level: [w.detach().numpy() for w in model.parameters()] for level, model in models.items()}))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{f"pickle, protocol {protocol}": partial(by_pickle, protocol) for protocol in range(2, 6)},
    "cloudpickle": partial(by_package, "cloudpickle"),
    "dill": partial(by_package, "dill"),
    "dill, recurse=True": partial(by_package, "dill", recurse=True),
    "torch.save": by_file,
    "copy.deepcopy": copy.deepcopy,
    "torch.package": by_torch_package,
}


def skip_without_package_of(way: str) -> None:
    if way.startswith(("cloudpickle", "dill")):
        needs(way.split(",")[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_a_model_of_its_own(way: str, level: str) -> None:
    skip_without_package_of(way)
    model, optimizer = trained(level)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    copied = WAYS[way](model)
    assert type(copied) is Net
    assert registry.of(copied) is None
    assert not {"forward", "_apply", "__deepcopy__", "__reduce_ex__"} & vars(copied).keys()
    reference = Net()
    reference.load_state_dict(values)
    with mpinit.disable_casts() if level == "O1" else contextlib.nullcontext():
        assert torch.equal(copied(X), reference(X))
    assert all(torch.equal(value, values[name]) for name, value in copied.state_dict().items())
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32}
    # Neither notices the other.
    before = copied(X).detach()
    iterate(model(X).float().square().mean(), optimizer)
    assert torch.equal(copied(X), before)
    with torch.no_grad():
        copied.first.weight.zero_()
    assert bool(model.first.weight.any())
    # It can be initialised itself.
    name, more = LEVELS[level]
    own = torch.optim.Adam(copied.parameters(), lr=1e-3)
    mpinit.initialize(copied, own, name, **more)
    iterate(copied(X).float().square().mean(), own)
    assert bool(copied.first.weight.any())
    mpinit.undo(copied)
    assert registry.of(model) is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_the_numbers_written_to_a_master_before_it(way: str) -> None:
    skip_without_package_of(way)
    for part in ("", "first"):
        model, optimizer = trained("O5")
        master, *_ = mpinit.master_params(optimizer)
        with torch.no_grad():
            master.fill_(0.5)
        copied = WAYS[way](model.get_submodule(part))
        assert bool((copied.get_submodule("" if part else "first").weight == 0.5).all())


@pytest.mark.parametrize("level", LEVELS)
def test_a_shallow_copy_names_the_way_out(level: str) -> None:
    model, _ = trained(level)
    with pytest.raises(RuntimeError, match=r"shallow copy .*use copy\.deepcopy\(model\)"):
        copy.copy(model)(X)


class Saves(Net):
    """Copies itself in its forward, in the way that is in ``ways``."""

    ways: ClassVar[list[Callable[[nn.Module], nn.Module]]] = []
    saved: ClassVar[list[nn.Module]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Saves.saved[:] = [way(self) for way in Saves.ways]
        return super().forward(x)


@pytest.mark.parametrize("level", ["O5", "model"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_in_a_forward_is_float32(way: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_package_of(way)
    model = Saves()
    name, more = LEVELS[level]
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, **more)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(Saves, "ways", [WAYS[way]])
    model(X)
    (copied,) = Saves.saved
    assert all(torch.equal(value, values[name]) for name, value in copied.named_parameters())


class Doubled:
    """A wrapper that a user puts around a model's forward."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "torch.package"])
def test_wrapper_around_forward_is_copied_around_copy_s_own(way: str) -> None:
    skip_without_package_of(way)
    model, _ = trained("O5")
    model.forward = Doubled(model.forward)
    copied = WAYS[way](model)
    reference = Net()
    reference.load_state_dict(model.state_dict())
    assert torch.equal(copied(X), 2 * reference(X))
    with torch.no_grad():
        copied.first.weight.zero_(), copied.last.weight.zero_(), copied.last.bias.zero_()
    assert not copied(X).any() and model(X).any()


CHILD = """
import pickle, sys, torch
model, x, expected = pickle.loads(open(sys.argv[1], "rb").read())
assert type(model).__name__ == "Local", type(model)
assert torch.allclose(model(x), expected, atol=0.05)
assert "mpinit" not in sys.modules
"""


@pytest.mark.long
def test_cloudpickle_takes_a_model_of_an_unknown_class(tmp_path: Path) -> None:
    cloudpickle = needs("cloudpickle")

    class Local(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = Local(nn.Linear(4, 4), nn.Linear(4, 2))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
    file = tmp_path / "model.pkl"
    file.write_bytes(cloudpickle.dumps((model, X, model(X).detach())))
    subprocess.run([sys.executable, "-c", CHILD, str(file)], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.long
def test_a_spawned_process_has_copies_and_the_parent_trains_on() -> None:
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    sessions = {level: trained(level) for level in LEVELS}
    process = context.Process(target=answer_in_child, args=(inbox, outbox))
    process.start()
    inbox.put({level: model for level, (model, _) in sessions.items()})
    for _ in LEVELS:
        level, is_free, weights, output = outbox.get(timeout=120)
        model, optimizer = sessions[level]
        assert is_free
        values = model.state_dict()
        assert all(torch.equal(weight, values[name]) for name, weight in weights.items())
        with mpinit.disable_casts():  # those of the live session at O1 hold for all of this thread
            assert torch.equal(output, copy.deepcopy(model)(X))
        alone, by_hand = trained(level)
        for each, own in ((model, optimizer), (alone, by_hand)):
            iterate(each(X).float().square().mean(), own)
        assert all(torch.equal(value, alone.state_dict()[name]) for name, value in model.state_dict().items())
    inbox.put(None)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.long
def test_a_process_is_spawned_with_models_as_arguments() -> None:
    context = torch.multiprocessing.get_context("spawn")
    outbox = context.Queue()
    sessions = {level: trained(level) for level in LEVELS}
    models = {level: model for level, (model, _) in sessions.items()}
    process = context.Process(target=answer_from_arguments, args=(outbox, models, sessions["O5"][1]))
    process.start()
    is_tied, found = outbox.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0
    assert is_tied
    for level, model in models.items():
        values = copy.deepcopy(model).parameters()
        assert all(torch.equal(torch.from_numpy(a), b) for a, b in zip(found[level], values, strict=True))
