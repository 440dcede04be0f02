"""Self-supervised training with LARC in the three ways that public code writes it. Run with --opt_level."""

import argparse
import math

import apex
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex.parallel.LARC import LARC

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 16))
        self.prototypes = nn.Linear(16, 5, bias=False)

    def forward(self, views):
        features = F.normalize(torch.cat([self.backbone(view) for view in views]), dim=1)
        return features, self.prototypes(features)


def make():
    torch.manual_seed(0)
    return Encoder()


@torch.no_grad()
def balanced(scores):
    codes = torch.exp(scores.float() / 0.5).t()
    for _ in range(3):
        codes = codes / codes.sum(1, keepdim=True) / codes.shape[0]
        codes = codes / codes.sum(0, keepdim=True) / codes.shape[1]
    return (codes * codes.shape[1]).t()


def clusters(steps=12):
    """Clustering of two views: prototypes are normalised by hand and frozen at first, lr is written step by step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9, weight_decay=1e-6)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.02, clip=False)
    schedule = [0.3 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    apex.amp._amp_state.loss_scalers[0]._loss_scale = 256.0
    generator = torch.Generator().manual_seed(1)
    losses = []
    x = torch.randn(12, 1, 6, 6, generator=generator)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule[step]
        with torch.no_grad():
            w = model.prototypes.weight.data.clone()
            w = F.normalize(w, dim=1, p=2)
            model.prototypes.weight.copy_(w)
        _, output = model([x, x + 0.01])
        first, second = output.float().chunk(2)
        loss = -(balanced(first) * F.log_softmax(second / 0.2, dim=1)).sum(1).mean()
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if step < 1:
            for name, p in model.named_parameters():
                if "prototypes" in name:
                    p.grad = None
        before = model.prototypes.weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, model.prototypes.weight) == (step < 1), "frozen in the first step alone"
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    saved = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": apex.amp.state_dict()}
    other = make()
    again = LARC(torch.optim.SGD(other.parameters(), lr=0.6, momentum=0.9), trust_coefficient=0.02, clip=False)
    other, again = apex.amp.initialize(other, again, opt_level=args.opt_level, verbosity=0)
    other.load_state_dict(saved["state_dict"])
    again.load_state_dict(saved["optimizer"])
    apex.amp.load_state_dict(saved["amp"])
    assert again.param_groups[0]["lr"] == schedule[-1] and len(again.state) == len(optimizer.state)


def from_a_configuration():
    """A wrapper made from a dictionary before initialize; regularised and other parameters in two groups."""
    model = make()
    config = {"clip": False, "eps": 1e-8, "trust_coefficient": 0.001}
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = LARC(optimizer=torch.optim.SGD(groups, lr=2.0, momentum=0.9, nesterov=True), **config)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0, loss_scale=64.0)
    for _ in range(3):
        features, _ = model([torch.ones(4, 1, 6, 6)])
        with apex.amp.scale_loss(features.float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-4, 0.0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def with_a_scheduler():
    """A scheduler over the wrapper, which it takes for an optimizer, as trainers write it."""
    model = make()
    optimizer = apex.parallel.LARC.LARC(torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-4))
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0, loss_scale=64.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    rates = []
    for _ in range(4):
        features, _ = model([torch.ones(4, 1, 6, 6)])
        with apex.amp.scale_loss(features.float().abs().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert [round(rate, 3) for rate in rates] == [0.427, 0.25, 0.073, 0.0], rates


clusters()
from_a_configuration()
with_a_scheduler()
print("passed")
