"""Buffers that a model writes to in 16 bits are named once, at the first steps, with the entry that keeps them."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import backward
from models import LEVELS, Parts
from torch import Tensor, nn

import mpinit

F32 = torch.float32
KINDS = ("O2", "O3", "O5", "split", "model")


class Router(nn.Module):
    """Two of four experts, chosen by scores and a bias that evens their load out; batches are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        if self.training:
            load = F.one_hot(chosen, 4).sum((0, 1)).to(self.bias.dtype)
            self.bias += 1e-3 * (load.mean() - load).sign()
            self.count += 1
        return scores.gather(-1, chosen), chosen


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(8, 16), Router(), nn.Linear(16, 1)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        weights, chosen = self.router(hidden)
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        picked = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 16))
        return self.last(hidden + (weights.unsqueeze(-1) * picked).sum(1))


class Codebook(nn.Module):
    """Vectors that follow the inputs nearest to them by averages, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        centres = torch.tensor([[3.0, 0.0], [0.0, 3.0], [-3.0, 0.0], [0.0, -3.0]])
        self.register_buffer("vectors", centres.clone())
        self.register_buffer("sums", 100 * centres)
        self.register_buffer("sizes", torch.full((4,), 100.0))

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x[:, None] - self.vectors).square().sum(-1).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, 4).to(x.dtype)
            self.sizes.data.mul_(0.95).add_(chosen.sum(0), alpha=0.05)
            self.sums.data.mul_(0.95).add_(chosen.T @ x.detach(), alpha=0.05)
            self.vectors.data.copy_(self.sums / self.sizes[:, None])
        quantized = self.vectors[nearest]
        return x + (quantized - x).detach()


class Vq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.codebook = nn.Linear(2, 2), Codebook()
        self.head = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.eye_(self.scale.weight), nn.init.zeros_(self.scale.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.codebook(self.scale(x).detach()))


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def texts_of(model: Any, steps: int = 4, run: Callable[..., Tensor] | None = None, **keywords: Any) -> list[str]:
    """The warnings about small changes while a model trains."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    mpinit.initialize(model, optimizer, **keywords)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            backward((model if run is None else run)(torch.randn(8, 8)).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "small changes" in str(each.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_warning_names_buffers_and_its_entry_makes_them_right(kind: str) -> None:
    (text,) = texts_of(seeded(Moe), **LEVELS[kind])
    assert text.startswith("router.bias, router.count are written to while the model trains")
    model = seeded(Moe)
    model.router.count.fill_(250.0)
    assert "keep_fp32=['router.bias', 'router.count']" in text
    assert texts_of(model, 20, **LEVELS[kind], keep_fp32=["router.bias", "router.count"]) == []
    assert model.router.count.dtype is F32 and model.router.count.item() == 270


def test_a_module_without_trained_weights_is_named_itself() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 2), Codebook(), nn.Linear(2, 1)))
    (text,) = texts_of(model, opt_level="O5")  # which writes through .data
    assert "keep_fp32=['1']" in text and text.startswith("1.vectors, 1.sums, 1.sizes are written")
    kept = seeded(lambda: nn.Sequential(nn.Linear(8, 2), Codebook(), nn.Linear(2, 1)))
    assert texts_of(kept, opt_level="O5", keep_fp32=["1"]) == []
    assert kept[1].sizes.dtype is F32


class Normalised(nn.Module):
    """A policy whose normaliser of observations is updated by a method, after each step of the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.head = nn.Buffer(torch.zeros(8)), nn.Linear(8, 1)

    def update(self, x: Tensor) -> None:
        self.mean = self.mean.lerp(x.mean(0).to(self.mean.dtype), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - self.mean)


def test_a_write_by_a_method_is_named() -> None:
    model = seeded(Normalised)

    def run(x: Tensor) -> Tensor:
        model.update(x)
        return model(x)

    (text,) = texts_of(model, run=run, opt_level="O5")
    assert "keep_fp32=['mean']" in text


def test_a_compiled_model_is_warned_of() -> None:
    torch._dynamo.reset()
    model = seeded(Moe)
    (text,) = texts_of(model, run=torch.compile(model, backend="eager"), opt_level="O5")
    assert "router.count" in text


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_no_warning_where_only_evaluations_and_loads_write(level: str) -> None:
    model = seeded(Moe)
    model.router.eval()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mpinit.initialize(model, optimizer, level)
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.load_state_dict(torch.load(saved))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            backward(model(torch.randn(4, 8)).square().mean(), optimizer)
            optimizer.step()
    assert model.router.bias.dtype is not F32


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_and_batch_norms_are_not_warned_of_at_o3(norm: Callable[..., nn.Module]) -> None:
    model = seeded(lambda: nn.Sequential(norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    assert texts_of(model, opt_level="O3") == []


def test_buffers_that_forward_replaces_are_named() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return x

    model = Parts(
        lambda self, x: self.last(self.counter(self.first(x))),
        first=nn.Linear(8, 8),
        counter=Parts(count, seen=nn.Buffer(torch.full((), 250.0))),
        last=nn.Linear(8, 1),
    )
    (text,) = texts_of(model, opt_level="O5")
    assert "counter.seen is written to" in text and "keep_fp32=['counter']" in text
