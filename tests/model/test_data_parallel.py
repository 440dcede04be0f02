"""torch.nn.DataParallel: its replicas would omit the casts around forwards, so they are refused."""

import sys
import threading
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


def in_one(model: nn.Module, x: Tensor) -> Tensor:
    """Run the same parts one after the other."""
    return torch.cat([model(part) for part in x.chunk(REPLICAS)])


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O2", "O3", "O5", "split", "model"])
def test_replicas_without_casts_are_refused(level: str, copies: None) -> None:
    model = Net()
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **LEVELS[level])
    with pytest.raises(RuntimeError, match=r"DataParallel makes copies of Net.*DistributedDataParallel.*mpinit.undo"):
        data_parallel(model, X)


def test_replicas_after_an_undo_are_plain(copies: None) -> None:
    model = Net()
    with torch.no_grad():
        expected = in_one(model, X)
        mpinit.undo(mpinit.initialize(model, opt_level="O4"))
        assert torch.equal(data_parallel(model, X), expected)
