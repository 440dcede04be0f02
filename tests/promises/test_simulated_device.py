"""The simulated device: it does what it says, and what is marked ``device`` or ``gpu`` holds on it.

It is an accelerator of the whole process, for good, and needs its threads before the first backward pass: in an
ordinary run of the tests one of them starts ``pytest --device sim``.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_device
import torch
from loops import backward, keywords, same
from session_device import device, no_waiting
from torch import nn

import mpinit

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"mark\.(device|gpu)\b")
FILES = [path for path in sorted(ROOT.glob("tests/*/test_*.py")) if MARKED.search(path.read_text("utf-8"))]
# In every run; what else is marked belongs to the long ones.
OFTEN = (
    *("test_simulated_device", "test_gpu", "test_functions_rows", "test_nccl", "test_loss_scaler"),
    *("test_skipping", "test_clipping", "test_closures", "test_accumulation", "test_grad_scaler"),
)


@pytest.mark.parametrize("often", [True, pytest.param(False, marks=pytest.mark.long)], ids=["often", "rest"])
def test_device_tests_pass_on_the_simulated_device(often: bool) -> None:
    if device().type != "cpu":
        pytest.skip("runs there already")
    if why := simulated_device.missing():
        pytest.skip(why)
    files = [str(path) for path in FILES if (path.stem in OFTEN) == often]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short"]
    child = subprocess.run([*command, "--device", "sim", *files], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-20_000:] + child.stderr[-2_000:]
    # A device that is not there skips everything.
    assert int(re.findall(r"(\d+) passed", child.stdout)[-1]) > 100


@pytest.fixture
def sim() -> torch.device:
    if device().type != "sim":
        pytest.skip("of the simulated device alone: pytest --device sim")
    return device()


# Levels, other kinds of masters, encoded states; float16 without masters trains nothing worth a look.
KINDS: dict[str, dict[str, Any]] = {
    **{level: keywords(level) for level in ("O0", "O1", "O2")},
    **{level: keywords(level) for level in ("O4", "O5")},
    "static": keywords("O2") | {"loss_scale": 128.0},
    "split": keywords("O5") | {"master_weights": "split"},
    "model": keywords("O2") | {"master_weights": "model"},
    "int8": keywords("O5") | {"optimizer_state": "int8"},
    "split int8": keywords("O5") | {"master_weights": "split", "optimizer_state": "int8"},
}
WAYS: dict[str, dict[str, Any]] = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def net(where: Any = None) -> nn.Sequential:
    """Large enough for its states to be encoded; the same for the same seed."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 64), nn.LayerNorm(64))
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)).to(where or device())


def images(count: int, where: Any = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(1)
    made = [(torch.randn(8, 1, 8, 8, generator=chance), torch.arange(8) % 3) for _ in range(count)]
    return [(x.to(where or device()), y.to(where or device())) for x, y in made]


class Training:
    """A network with its optimizer under mpinit."""

    def __init__(self, kind: str, way: str = "single", where: Any = None) -> None:
        self.model, self.where = net(where), where
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **WAYS[way])
        mpinit.initialize(self.model, self.optimizer, **KINDS[kind])

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        backward(nn.functional.cross_entropy(self.model(batch[0]), batch[1]) * factor, self.optimizer)
        self.optimizer.step()

    def run(self, count: int, skip: int = 0) -> Training:
        for batch in images(skip + count, self.where)[skip:]:
            self.step(batch)
        return self

    def saved(self) -> dict[str, Any]:
        made = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(made) | {"mpinit": mpinit.state_dict(self.optimizer)}

    def load(self, saved: dict[str, Any]) -> Training:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        mpinit.load_state_dict(saved["mpinit"], self.optimizer)
        return self

    def numbers(self) -> list[torch.Tensor]:
        return [value.detach().cpu().clone() for value in self.model.state_dict().values()]


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["single", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_device_has_the_cpus_bits(kind: str, way: str, sim: torch.device) -> None:
    """Skipped steps too; in memory that is nan before it is written and after it is freed."""
    ends = []
    for where in ("cpu", "sim"):
        with simulated_device.poisoned():
            training = Training(kind, way, where).run(2)
            if training.optimizer.param_groups and isinstance(KINDS[kind].get("loss_scale"), mpinit.DynamicLossScale):
                training.step(images(1, where)[0], float("inf"))
            training.run(2, skip=2)
            numbers, saved = training.numbers(), [v.cpu() for v in _tensors(training.optimizer.state_dict())]
            ends.append((numbers, saved, mpinit.step_counts(training.optimizer), mpinit.state_dict(training.optimizer)))
            mpinit.undo(training.model)
            undone = [value.detach().cpu() for value in training.model.state_dict().values()]
            same(undone, numbers)
    for ours, theirs in zip(ends[0][:2], ends[1][:2], strict=True):
        same(ours, theirs)
    assert ends[0][2:] == ends[1][2:]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_good_step_copies_nothing_and_reads_one_number_at_most(kind: str, way: str, sim: torch.device) -> None:
    """Count reads: one for the overflow, and none with a static scale or a kernel that skips by itself."""
    training = Training(kind, way).run(3)
    batch = images(1)[0]
    with simulated_device.counted() as found:
        training.step(batch)
    scales = isinstance(KINDS[kind].get("loss_scale"), mpinit.DynamicLossScale)
    reads = [name for name in found.names if name.startswith("read")]
    assert reads == (["read item"] if scales and way != "fused" else [])
    assert (found.copies, mpinit.step_counts(training.optimizer)) == (0, (4, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["O2", "O5"])
def test_state_dict_copies_each_master_once(kind: str, sim: torch.device) -> None:
    """Compute nothing for weights that nobody has written to, in the first state dict and in the step after it."""
    training = Training(kind, "fused").run(3)
    batches = images(5)
    with simulated_device.counted() as before:
        training.step(batches[3])
    with simulated_device.counted() as saved:
        training.model.state_dict()
    with simulated_device.counted() as after:
        training.step(batches[4])
    narrow = [weight for weight in training.model.parameters() if weight.dtype != torch.float32]
    assert saved.launches == len(narrow) == 10, saved.names
    assert after.launches == before.launches


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["mpinit", "torch", "values"])
@pytest.mark.parametrize("kind", ["O2", "O5", "split", "model"])
def test_clipping_and_accumulation_need_no_sync(kind: str, clip: str, sim: torch.device) -> None:
    training = Training(kind, "fused").run(2)
    two = images(2)
    with no_waiting():
        training.optimizer.zero_grad()
        for x, y in two:
            backward(nn.functional.cross_entropy(training.model(x), y) / 2, training.optimizer)
        if clip == "mpinit":
            mpinit.clip_grad_norm_(training.optimizer, 1.0)
        elif clip == "torch":
            nn.utils.clip_grad_norm_(mpinit.master_params(training.optimizer), 1.0)
        else:
            nn.utils.clip_grad_value_(mpinit.master_params(training.optimizer), 0.01)
        training.optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["O1", "model"])
def test_compiled_models_train_alike(kind: str, sim: torch.device) -> None:
    """Compile to torch's own operations, because Inductor has no code generator for this device."""
    plain, compiled, generated = Training(kind), Training(kind), Training(kind)
    compiled.model.compile(backend="aot_eager", fullgraph=True)
    same(compiled.run(3).numbers(), plain.run(3).numbers())
    generated.model.compile()
    with pytest.raises(torch._inductor.exc.InductorError, match="sim"):
        generated.run(1)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "static"])
@pytest.mark.parametrize(("first", "then"), [("sim", "cpu"), ("cpu", "sim"), ("sim", "sim:1")])
def test_run_continues_on_another_device(kind: str, first: str, then: str, sim: torch.device) -> None:
    before = Training(kind, where=first).run(3)
    resumed = Training(kind, where=then).load(before.saved()).run(2, skip=3)
    same(resumed.numbers(), before.run(2, skip=3).numbers())


@pytest.mark.gpu
def test_write_through_data_counts_with_exposed_masters(sim: torch.device) -> None:
    """Write through ``data``, which torch does not count: no write may be lost, also if it was read before."""
    training = Training("O5").run(1)
    weight = training.model[-1].weight
    for _ in range(2):
        master = next(p for p in mpinit.master_params(training.optimizer) if p.shape == weight.shape)
        before = master.detach().clone()
        weight.data[0] = 3.0  # type: ignore[index, union-attr]
        expected = before.clone()
        expected[0] = 3.0
        same([training.model.state_dict()["8.weight"]], [expected])


@pytest.mark.gpu
def test_simulated_device_reports_itself(sim: torch.device) -> None:
    x = torch.ones(3, device=sim)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, device="sim:1")
    with simulated_device.counted() as found:
        assert (x * 2).sum().item() == 6.0
        x.cpu()
        torch._foreach_mul_([x, x.clone()], 2.0)
    assert (found.launches, found.reads, found.copies) == (4, 2, 1), found.names
    with simulated_device.failing_at(2), pytest.raises(torch.OutOfMemoryError):
        assert x.mul_(2) is x
        x.mul_(2)
    assert x.tolist() == [4.0] * 3
    with simulated_device.poisoned():
        assert torch.empty(2, device=sim).isnan().all()
    assert x.resize_(5).shape == (5,)
    stream = torch.Stream(sim)
    with stream:
        assert torch.accelerator.current_stream(sim) == stream
