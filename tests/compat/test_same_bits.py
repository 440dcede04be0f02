"""Training through the old names is training through mpinit's own, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpinit
from mpinit.compat.apex import amp as face
from mpinit.compat.apex.optimizers import FusedAdam

Train = Callable[[nn.Module, torch.optim.Optimizer], None]

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "adam": (
        lambda p: FusedAdam(p, lr=0.01, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01, fused=True),
    ),
}


class Net(nn.Module):
    """Convolution, BatchNorm, GELU (float32 under the stricter policy), attention-like softmax, linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv(x))).transpose(1, 2)
        x = F.softmax(self.mix(x), dim=-1) @ x.transpose(1, 2)
        out: torch.Tensor = self.head(x.mean(2)[:, :4])
        return out


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(6, 2, 8, generator=generator) for _ in range(8)]
    # One batch overflows in float16, so that a skipped step is part of what is compared.
    batches[3] = batches[3] * 1e6
    return [(x, x.mean((1, 2)).unsqueeze(1)) for x in batches]


def loop(amp: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    seen = []
    for index, (x, y) in enumerate(data()):
        loss = F.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer, delay_unscale=index % 2 == 0) as scaled:
            scaled.backward()
        seen.append(loss.detach())
        if index % 2:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_same_bits(level: str, kind: str) -> None:
    make_theirs, make_ours = OPTIMIZERS[kind]
    theirs = Net()
    their_optimizer = make_theirs(theirs.parameters())
    theirs, their_optimizer = face.initialize(theirs, their_optimizer, opt_level=level, verbosity=0)
    their_losses = loop(face, theirs, their_optimizer)
    their_state, their_scale = theirs.state_dict(), face.state_dict()
    mpinit.undo(theirs)

    ours = Net()
    our_optimizer = make_ours(ours.parameters())
    # apex looks at gradients only where the scale moves.
    mpinit.initialize(ours, our_optimizer, opt_level=level, cast_policy="apex", skip_nonfinite=False, verbosity=0)
    our_losses = loop(mpinit, ours, our_optimizer)
    our_state, our_scale = ours.state_dict(), mpinit.state_dict(our_optimizer)
    mpinit.undo(ours)

    torch.testing.assert_close(their_losses, our_losses, rtol=0, atol=0, equal_nan=True)
    assert their_state.keys() == our_state.keys()
    torch.testing.assert_close(dict(their_state), dict(our_state), rtol=0, atol=0, equal_nan=True)
    # apex's states have these two words and no other.
    assert dict(their_scale) == {
        name: {word: part[word] for word in ("loss_scale", "unskipped")} for name, part in our_scale.items()
    }
    if level in ("O1", "O2"):
        assert our_scale["loss_scaler0"]["loss_scale"] < 2.0**16, "the overflow was seen"
        assert all(torch.isfinite(p).all() for p in ours.parameters()), "and its step was skipped"
        assert not torch.equal(ours.head.weight, Net().head.weight), "the others were not"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_undo_takes_back_what_the_face_did(level: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    face.initialize(model, optimizer, opt_level=level, verbosity=0)
    mpinit.undo(model)
    after = model.state_dict()
    assert all(after[name].dtype == before[name].dtype for name in before)
    if level != "O3":  # which keeps no float32 masters to restore from
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
