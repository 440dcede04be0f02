"""torch.nn.DataParallel: replicas run their own weights, with the model's casts, in threads of their own."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import LEVELS
from torch import Tensor, nn
from torch.nn.parallel import replicate

import mpinit

REPLICAS = 3
X = torch.randn(2 * REPLICAS, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU())
        self.head = nn.Linear(16, 2)
        self.register_buffer("table", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.table)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's ``replicate`` copy weights on the CPU, as ``comm.broadcast_coalesced`` copies them to devices."""

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[(each.detach() if detach else each).clone() for each in tensors] for _ in devices]

    module = sys.modules["torch.nn.parallel.replicate"]  # whose name is the function's
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)


def data_parallel(model: nn.Module, x: Tensor) -> Tensor:
    """Do as DataParallel's forward: scatter, replicate, run in threads as ``parallel_apply`` does, gather."""
    replicas: Any = replicate(model, list(range(REPLICAS)), not torch.is_grad_enabled())
    parts = x.chunk(REPLICAS)
    found: list[Any] = [None] * REPLICAS
    grad_enabled, autocast_enabled = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def work(index: int) -> None:
        torch.set_grad_enabled(grad_enabled)
        try:
            with torch.amp.autocast("cpu", enabled=autocast_enabled):
                found[index] = replicas[index](parts[index])
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise errors[0]
    return torch.cat(found)


def trained(model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], optimizer: Any) -> list[Any]:
    """Train three steps; return outputs and weights."""
    seen: list[Any] = []
    for index in range(3):
        optimizer.zero_grad()
        output = forward(model, X + index)
        with mpinit.scale_loss(output.square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        seen.append(output.detach())
    return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]


def in_one(model: nn.Module, x: Tensor) -> Tensor:
    """Run the same parts one after the other."""
    return torch.cat([model(part) for part in x.chunk(REPLICAS)])


ASKED: dict[str, dict[str, Any]] = {
    "O0": LEVELS["O0"],
    "O1": LEVELS["O1"],
    "O4": LEVELS["O4"],
    "O4 in the model": LEVELS["O4"] | {"patch_torch_functions": "model"},
    "O1 with a kept part": LEVELS["O1"] | {"keep_fp32": ["head"]},
}


@pytest.mark.parametrize("asked", ASKED)
def test_training_has_the_numbers_of_one_model(asked: str, copies: None) -> None:
    """Check that each replica has its own weights, in the dtypes in which the model computes."""
    results = []
    for forward in (data_parallel, in_one):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, **ASKED[asked])
        results.append(trained(model, forward, optimizer))
        assert mpinit.step_counts(optimizer) == (3, 0)
        mpinit.undo(model)
    assert torch.equal(results[0][0], results[1][0])  # the casts are the same, to the bit
    for ours, one in zip(*results, strict=True):
        torch.testing.assert_close(ours, one, atol=2e-3, rtol=2e-3)


def test_replicas_have_weights_of_their_own(copies: None) -> None:
    model = mpinit.initialize(Net(), opt_level="O4")
    with torch.no_grad():
        expected = in_one(model, X)
        replicas: Any = replicate(model, [0, 1], True)
        replicas[1].head.weight.zero_()
        replicas[1].head.bias.fill_(3.0)
        assert torch.equal(replicas[0](X[:2]), expected[:2])
        assert torch.equal(replicas[1](X[:2]), torch.full((2, 2), 3.0))
        assert torch.equal(model(X[:2]), expected[:2])


@contextlib.contextmanager
def off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        yield


@pytest.mark.parametrize("asked", ["O4", "O4 in the model"])
def test_casts_that_the_caller_switches_off_are_off_in_replicas(asked: str, copies: None) -> None:
    model = mpinit.initialize(Net(), **ASKED[asked])
    with torch.no_grad():
        for block in (contextlib.nullcontext, off, mpinit.disable_casts):
            with block():
                assert torch.equal(data_parallel(model, X), in_one(model, X)), block
        with off():
            plain = in_one(model, X)
        assert not torch.equal(data_parallel(model, X), plain)


@pytest.mark.parametrize("level", ["O2", "O3", "O5", "split", "model"])
def test_replicas_of_16_bit_weights_are_refused(level: str, copies: None) -> None:
    model = Net()
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **LEVELS[level])
    with pytest.raises(RuntimeError, match=r"DataParallel makes copies of Net.*DistributedDataParallel.*'O1' or 'O4'"):
        data_parallel(model, X)


def test_replicas_after_an_undo_are_plain(copies: None) -> None:
    model = Net()
    with torch.no_grad():
        expected = in_one(model, X)
        mpinit.undo(mpinit.initialize(model, opt_level="O4"))
        assert "_replicate_for_data_parallel" not in vars(model)
        assert torch.equal(data_parallel(model, X), expected)


def test_a_forward_of_the_instance_runs_on_the_replica(copies: None) -> None:
    """Check that the method is bound to the replica."""
    model: Any = Net()
    own = type(model).forward
    model.forward = (lambda self, x: own(self, x) * 2).__get__(model)
    mpinit.initialize(model, opt_level="O4")
    with torch.no_grad():
        replica: Any = replicate(model, [0], True)[0]
        replica.head.weight.zero_()
        replica.head.bias.fill_(3.0)
        assert torch.equal(replica(X[:2]), torch.full((2, 2), 6.0))
