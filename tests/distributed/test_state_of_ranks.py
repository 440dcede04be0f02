"""State that forwards write to, on several ranks: a module is kept in float32 on all of them, or on none."""

from typing import Any

import torch
import torch.distributed as dist
from loops import backward
from processes import ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpinit


class Expert(nn.Module):
    """A layer that counts its batches; a rank whose batches it does not get writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.full((4,), 250.0))

    def forward(self, x: Tensor, is_mine: bool) -> Tensor:
        if self.training and is_mine:
            self.seen += 1
        return x * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(4, 64), Expert(), nn.Linear(4, 1)
        self.middle = nn.Linear(64, 4)

    def forward(self, x: Tensor, is_mine: bool) -> Tensor:
        return self.last(self.expert(self.middle(self.first(x)), is_mine))


@ranks(2, ("O5", True), ("O5", "model"), ("O2", True))
def test_modules_are_kept_on_all_ranks_where_one_rank_writes(level: str, masters: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, level, master_weights=masters)
    runs = DistributedDataParallel(model)
    for _ in range(20):
        backward(runs(torch.randn(2, 4), dist.get_rank() == 0).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.expert.seen.dtype is torch.float32
    # DistributedDataParallel sends rank 0's buffers before each forward.
    assert model.expert.seen.unique().tolist() == [270.0 if dist.get_rank() == 0 else 269.0]
    weights = torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(*both)
    mpinit.undo(model)
