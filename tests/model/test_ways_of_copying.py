"""Every way of copying an initialised model, at every level: the section of docs/reference/limits.md.

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
from typing import Any

import pytest
import torch
from frameworks import needs
from loops import iterate
from torch import nn

import mpinit
from mpinit import registry

# torch.package's own, of every tensor that it saves.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

PAGE = Path(__file__).parents[2] / "docs/reference/limits.md"
LEVELS: dict[str, tuple[str, dict[str, Any]]] = {
    "O1": ("O1", {}),
    "O2": ("O2", {}),
    "O3": ("O3", {}),
    "O5": ("O5", {}),
    'O5, `"split"`': ("O5", {"master_weights": "split"}),
    'O5, `"model"`': ("O5", {"master_weights": "model"}),
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
    with torch.package.PackageExporter(io.BytesIO()) as exporter:
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", model)
    raise AssertionError("it was saved")


def answer_in_child(inbox: Any, outbox: Any) -> None:
    """Run the models that a parent process sends, and send back what they are."""
    torch.set_num_threads(1)
    for level, model in inbox.get().items():
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        outbox.put((level, registry.of(model) is None, weights, model(X).detach()))
    inbox.get()


# The name on the page, and how it is done in this process; None: it takes another one.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{f"pickle, protocol {protocol}": partial(by_pickle, protocol) for protocol in range(2, 6)},
    "cloudpickle": partial(by_package, "cloudpickle"),
    "dill": partial(by_package, "dill"),
    "dill, recurse=True": partial(by_package, "dill", recurse=True),
    "torch.save": by_file,
    "copy.deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "torch.package": by_torch_package,
}
# The rows of the page, and the ways that each of them is about.
ROWS: dict[str, tuple[str, ...]] = {
    "`copy.deepcopy`": ("copy.deepcopy",),
    "`pickle`, `torch.save`, cloudpickle, dill, a process that is spawned": tuple(WAYS)[:8],
    "`copy.copy`": ("copy.copy",),
    "`torch.package`": ("torch.package",),
}
REFUSED = "refused"


def what_it_is(way: str, level: str) -> str:
    """Return what a copy's weights are, or that there is none."""
    model, _ = trained(level)
    try:
        copied = WAYS[way](model)
        copied(X)
    except RuntimeError:
        return REFUSED
    return str(next(copied.parameters()).dtype).removeprefix("torch.")


def skip_without_package_of(way: str) -> None:
    if way.startswith(("cloudpickle", "dill")):
        needs(way.split(",")[0])


def test_the_table_on_the_page() -> None:
    for package in ("cloudpickle", "dill"):
        needs(package)
    lines = ["| way of copying | " + " | ".join(LEVELS) + " |", "| --- |" + " --- |" * len(LEVELS)]
    for row, ways in ROWS.items():
        found = [{what_it_is(way, level) for way in ways} for level in LEVELS]
        assert all(len(cell) == 1 for cell in found), (row, found)
        lines.append(f"| {row} | " + " | ".join(cell.pop() for cell in found) + " |")
    text = PAGE.read_text(encoding="utf-8")
    assert text.split("<!-- copies: begin -->")[1].split("<!-- copies: end -->")[0].strip().splitlines() == lines


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", [way for row in list(ROWS)[:2] for way in ROWS[row]])
def test_a_copy_is_a_model_of_its_own(way: str, level: str) -> None:
    skip_without_package_of(way)
    model, optimizer = trained(level)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(X).detach()
    copied = WAYS[way](model)
    assert type(copied) is Net
    assert registry.of(copied) is None
    has_masters = way == "copy.deepcopy" and LEVELS[level][0] in ("O2", "O5")
    if has_masters:
        reference = Net()
        reference.load_state_dict(values)
        assert torch.equal(copied(X), reference(X))
        assert all(torch.equal(value, values[name]) for name, value in copied.state_dict().items())
    else:
        assert torch.equal(copied(X), expected), "it casts as the model does"
        for name, weight in copied.named_parameters():
            assert weight.dtype is model.get_parameter(name).dtype
            assert torch.equal(weight, model.get_parameter(name)), "the parameters' own bits"
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


@pytest.mark.parametrize("written", ["entry", "master"])
@pytest.mark.parametrize("way", [way for row in list(ROWS)[:2] for way in ROWS[row]])
def test_a_copy_has_the_numbers_written_before_it(way: str, written: str) -> None:
    """Write to an entry of a state dict, or to a master, and copy the model or a part of it before its next use."""
    skip_without_package_of(way)
    for part in ("", "first"):
        model, optimizer = trained("O5")
        state, (master, *_) = model.state_dict(), mpinit.master_params(optimizer)
        with torch.no_grad():
            (state["first.weight"] if written == "entry" else master).fill_(0.5)
        copied = WAYS[way](model.get_submodule(part))
        assert bool((copied.get_submodule("" if part else "first").weight == 0.5).all())


@pytest.mark.parametrize("level", LEVELS)
def test_a_shallow_copy_and_a_package_name_the_way_out(level: str) -> None:
    model, _ = trained(level)
    with pytest.raises(RuntimeError, match=r"shallow copy .*use copy\.deepcopy\(model\)"):
        copy.copy(model)(X)
    with pytest.raises(RuntimeError, match=r"torch\.package cannot save .*state_dict\(\).*mpinit\.undo"):
        by_torch_package(model)
    mpinit.undo(model)
    with pytest.raises(AssertionError, match="it was saved"):
        by_torch_package(model)


CHILD = """
import pickle, sys, torch
model, x, expected = pickle.loads(open(sys.argv[1], "rb").read())
assert type(model).__name__ == "Local", type(model)
assert torch.equal(model(x), expected)
from mpinit import registry
assert registry.of(model) is None
"""


@pytest.mark.long
def test_cloudpickle_takes_a_model_whose_class_another_process_does_not_have(tmp_path: Path) -> None:
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
        assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in weights.items())
        in_child = copy.deepcopy(model) if level == "O1" else model  # no casts are on in the child
        with mpinit.disable_casts() if level == "O1" else contextlib.nullcontext():
            assert torch.equal(output, in_child(X))
        # Parameters moved to shared memory when they were sent.
        alone, by_hand = trained(level)
        for each, own in ((model, optimizer), (alone, by_hand)):
            iterate(each(X).float().square().mean(), own)
        assert all(torch.equal(value, alone.state_dict()[name]) for name, value in model.state_dict().items())
    inbox.put(None)
    process.join(60)
    assert process.exitcode == 0
