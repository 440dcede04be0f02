"""State that a model keeps for itself is kept in float32 once a forward is seen to write to it, or warned of.

Below the public face: the steps whose forwards are watched are thousands.
"""

import copy
import io
import logging
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
from mpinit.model.written_state import is_watched

BF16, F32 = torch.bfloat16, torch.float32
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


def replace_data(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data = key.data * 0.999 + query.data * 0.001


MOMENTUM: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "data =": replace_data,
    "data.mul_": lambda key, query: key.data.mul_(0.999).add_(query.data, alpha=0.001),
    "lerp_": lambda key, query: key.lerp_(query.to(key.dtype), 0.001),
}


class MoCo(nn.Module):
    """An encoder, a second one that follows it, and a queue of the second one's outputs."""

    def __init__(self, follow: Callable[..., Any]) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.follow(ours, theirs)
            key = F.normalize(self.key(x + 0.01), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        place = int(self.place)
        self.queue[:, place : place + len(x)] = key.T
        self.place[0] = (place + len(x)) % 32
        return logits / 0.1


def trained(model: Any, kind: str | None, steps: int, batch: Callable[[torch.Generator], Tensor] | None = None) -> Any:
    """Train a model, at a level or in float32; warnings are errors."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    if kind is not None:
        mpinit.initialize(model, optimizer, **LEVELS[kind])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        output = model(torch.randn(8, 8, generator=generator) if batch is None else batch(generator))
        first = torch.zeros(len(output), dtype=torch.long)
        loss = F.cross_entropy(output, first) if output.shape[1] > 1 else output.square().mean()
        if kind is None:
            loss.backward()
        else:
            backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_counts_and_learns_its_bias_as_in_float32(kind: str) -> None:
    last_exact = 256 if LEVELS[kind]["opt_level"] == "O5" else 2048
    model = seeded(Moe)
    model.router.count.fill_(last_exact - 4)
    expected = trained(copy.deepcopy(model), None, 20)
    trained(model, kind, 20)
    assert model.router.count.dtype is model.router.bias.dtype is F32
    assert model.router.count.item() == expected.router.count.item() == last_exact + 16
    assert torch.allclose(model.router.bias, expected.router.bias, atol=0.0021), "two steps of the rule"
    narrow = F32 if kind == "model" else model.first.weight.dtype
    assert model.router.gate.weight.dtype is model.experts[0][0].weight.dtype is narrow
    assert model.state_dict()["router.bias"].dtype is F32
    kept = model.router.count
    mpinit.undo(model)
    assert model.router.count is kept and kept.dtype is F32
    assert {tensor.dtype for tensor in model.state_dict().values()} == {F32}


@pytest.mark.parametrize("kind", ["O2", "O5", "split", "model"])
def test_writes_of_a_callback_to_a_kept_buffer_count(kind: str) -> None:
    """Write to buffers between steps through references from before the first, as a load balancer does."""
    results = []
    for level in (None, kind):
        model = seeded(Moe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if level is not None:
            mpinit.initialize(model, optimizer, **LEVELS[level])
        bias, count = model.router.bias, model.router.count
        for _ in range(6):
            output = model(torch.ones(4, 8))
            output.mean().backward() if level is None else backward(output.mean(), optimizer)
            optimizer.step()
            with torch.no_grad():
                bias.fill_(0.01 * count.item() + 0.125)
                count.zero_()
        assert model.router.bias is bias and model.router.count is count
        results.append((bias.tolist(), model.state_dict()["router.count"].item()))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_codebook_follows_its_inputs_as_in_float32(kind: str) -> None:
    def batch(generator: torch.Generator) -> Tensor:
        centres = torch.tensor([[3.4, 0.0], [0.0, 3.4], [-3.4, 0.0], [0.0, -3.4]])
        return centres.repeat(4, 1) + 0.1 * torch.randn(16, 2, generator=generator)

    model = seeded(Vq)
    expected = trained(copy.deepcopy(model), None, 60, batch)
    trained(model, kind, 60, batch)
    for name in ("vectors", "sums", "sizes"):
        got, right = getattr(model.codebook, name), getattr(expected.codebook, name)
        moved = float((right - getattr(seeded(Vq).codebook, name)).norm())
        assert got.dtype is F32 and float((got - right).norm()) < 0.1 * moved, name


@pytest.mark.parametrize("how", MOMENTUM)
@pytest.mark.parametrize("kind", ["O2", "O5", "model"])
def test_a_momentum_encoder_follows_as_in_float32_and_its_queue_is_no_alarm(kind: str, how: str) -> None:
    model = seeded(lambda: MoCo(MOMENTUM[how]))
    before = torch.cat([p.flatten() for p in model.key.parameters()])
    expected = trained(copy.deepcopy(model), None, 40)
    trained(model, kind, 40)
    assert {parameter.dtype for parameter in model.key.parameters()} == {F32}
    assert model.queue.dtype is not F32
    got, right = (torch.cat([p.flatten() for p in each.key.parameters()]) for each in (model, expected))
    assert float((got - right).norm()) < 0.25 * float((right - before).norm())


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_observers_of_quantization_aware_training_see_the_range_of_float32() -> None:
    from torch.ao import quantization

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.watch = quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver, averaging_constant=0.002)
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.watch(x))

    def batch(generator: torch.Generator) -> Tensor:
        batch.calls += 1  # type: ignore[attr-defined]
        return (1 + 0.02 * batch.calls) * torch.randn(64, 8, generator=generator)  # type: ignore[attr-defined]

    ranges = []
    for kind in (None, "O5"):
        batch.calls = 0  # type: ignore[attr-defined]
        model = trained(seeded(Net), kind, 60, batch)
        observer = model.watch.activation_post_process
        assert observer.min_val.dtype is observer.max_val.dtype is model.watch.scale.dtype is F32
        ranges.append(torch.stack([observer.min_val, observer.max_val]).flatten())
    start = trained(seeded(Net), None, 1, lambda generator: 1.02 * torch.randn(64, 8, generator=generator))
    first = start.watch.activation_post_process
    moved = (ranges[0] - torch.stack([first.min_val, first.max_val]).flatten()).abs()
    assert ((ranges[1] - ranges[0]).abs() < 0.1 * moved + 0.01).all()


def with_average(decay: float = 0.95) -> Any:
    """A model that subtracts an average of its own: it holds all weights, and cannot be kept as a whole."""

    def run(self: Any, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(decay).add_((x + 0.5).mean(0), alpha=1 - decay)
        return self.head(x - self.average.to(x.dtype))

    return Parts(run, average=nn.Buffer(torch.zeros(8)), head=nn.Linear(8, 1))


@pytest.mark.parametrize("kind", ["O5", "model"])
def test_state_of_a_whole_model_is_warned_of_with_the_entry_that_cures_it(kind: str) -> None:
    with pytest.warns(UserWarning, match="small changes") as caught:
        trained(seeded(with_average), kind, 140)
    assert len(caught) == 1 and "keep_fp32=['average']" in str(caught[0].message)
    model = seeded(with_average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[kind], keep_fp32=["average"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            model(torch.ones(4, 8))
    assert torch.allclose(model.average, torch.full((8,), 1.5 * (1 - 0.95**40)), rtol=1e-3)


class Mean(nn.Module):
    """A running mean, for others to read."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.centre = nn.Buffer(torch.zeros(8)), nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
            self.centre.copy_(self.mean)
        return x

    def centred(self, x: Tensor) -> Tensor:
        return x - self.mean


class ReadsMean(nn.Module):
    def __init__(self, stats: nn.Module) -> None:
        super().__init__()
        self.stats, self.wide, self.last = stats, nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(self.stats(x) - self.stats.mean)))


class CallsMethod(ReadsMean):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(self.stats.centred(self.stats(x)))))


class ReadsInMethod(ReadsMean):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(self.centred(self.stats[0](x)))))

    def centred(self, x: Tensor) -> Tensor:
        return x - self.stats[0].centre


class ReadsThroughBlock(ReadsMean):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(self.stats(x) - self.stats.inner.mean)))


class AveragesOutput(ReadsMean):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x - self.stats(x).mean()))


READERS: list[Callable[[], nn.Module]] = [
    lambda: ReadsMean(Mean()),
    lambda: CallsMethod(Mean()),
    lambda: ReadsInMethod(nn.ModuleList([Mean()])),
    lambda: ReadsThroughBlock(Parts(lambda self, x: self.inner(x), inner=Mean())),
]


@pytest.mark.parametrize("kind", ["O2", "O5", "model"])
@pytest.mark.parametrize("make", READERS)
def test_module_whose_state_is_read_outside_of_it_is_not_kept(make: Callable[[], nn.Module], kind: str) -> None:
    expected, model = trained(seeded(make), None, 5), trained(seeded(make), kind, 5)
    assert F32 not in {buffer.dtype for buffer in model.buffers()}
    assert torch.allclose(model.state_dict()["wide.weight"], expected.state_dict()["wide.weight"], atol=0.02)


def test_method_of_an_output_is_no_read_of_state() -> None:
    model = trained(seeded(lambda: AveragesOutput(Mean())), "O5", 3)
    assert model.stats.mean.dtype is F32


def test_a_session_without_an_optimizer_warns_at_the_third_forward() -> None:
    model = mpinit.initialize(seeded(Moe), opt_level="O5")
    model(torch.randn(2, 8)), model(torch.randn(2, 8))
    with pytest.warns(UserWarning, match=r"keep_fp32=\['router.bias', 'router.count'\]"):
        model(torch.randn(2, 8))
    model(torch.randn(2, 8))  # once


def test_the_log_names_the_modules_and_the_entry(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(Moe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.INFO, "mpinit"):
        mpinit.initialize(model, optimizer, "O5")
        for _ in range(2):
            backward(model(torch.randn(4, 8)).mean(), optimizer)
            optimizer.step()
    (line,) = [text for text in caplog.messages if "float32 from this step on" in text]
    assert "router.bias, router.count" in line and "keep_fp32=['router']" in line


def started(kind: str = "O5", steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = seeded(Moe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, **LEVELS[kind])
    for _ in range(steps):
        backward(model(torch.randn(4, 8)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", ["O2", "O5", "split", "model"])
def test_copies_evaluation_and_float32_blocks_after_the_module_is_kept(kind: str) -> None:
    model, _ = started(kind)
    model.eval()
    x = torch.randn(4, 8)
    expected = model(x)
    count = model.router.count.item()
    assert torch.allclose(copy.deepcopy(model)(x), expected, atol=0.05)
    assert torch.allclose(model.router(torch.randn(4, 16))[0].float(), model.router(torch.randn(4, 16))[0], atol=1.0)
    with mpinit.float32_weights(model):
        assert torch.allclose(model(x), expected, atol=0.05)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.allclose(torch.load(file, weights_only=False)(x), expected, atol=0.05)
    fresh = seeded(Moe).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.allclose(fresh(x), expected, atol=0.05)
    assert model.router.count.item() == count == fresh.router.count.item()
    mpinit.undo(model)
    assert torch.equal(fresh(x), model(x)), "every bit of the masters and of the state"


def test_the_gate_of_a_kept_router_trains_by_its_master() -> None:
    model, optimizer = started("O2")
    before = model.state_dict()["router.gate.weight"].clone()
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    for _ in range(20):
        backward(model(torch.randn(4, 8)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.router.gate.weight.dtype is torch.float16
    assert not torch.equal(model.state_dict()["router.gate.weight"], before)


def test_an_entry_of_before_is_loud_and_one_of_after_counts() -> None:
    model, optimizer = started(steps=0)
    backward(model(torch.randn(4, 8)).square().mean(), optimizer)
    old = model.state_dict()["router.bias"]
    optimizer.step()
    old.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"router\.bias"):
        model(torch.randn(4, 8))
    model.state_dict()["router.bias"].fill_(0.5)
    assert model.router.bias.eq(0.5).all()


def test_a_stale_entry_of_a_frozen_parameter_is_named() -> None:
    def follow(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
        return x - self.mean

    average = Parts(follow, mean=nn.Parameter(torch.zeros(8), requires_grad=False))
    model = nn.Sequential(nn.Linear(8, 8), average, nn.Linear(8, 1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    mpinit.initialize(model, optimizer, "O5")
    backward(model(torch.ones(4, 8)).mean(), optimizer)
    old = model.state_dict()["1.mean"]
    optimizer.step()
    old.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"'1\.mean' of a state dict"):
        model(torch.ones(4, 8))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_nothing_is_kept_where_only_evaluations_loads_or_the_user_write(level: str) -> None:
    model = seeded(Moe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level)
    model.router.eval()
    for _ in range(4):
        model.load_state_dict(model.state_dict())
        model.router.bias.fill_(0.1)
        backward(model(torch.randn(4, 8)).square().mean(), optimizer)
        optimizer.step()
    assert model.router.bias.dtype is not F32


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_vectors_of_spectral_norms_and_batch_norms_at_o3_are_no_state(norm: Callable[..., nn.Module]) -> None:
    model = seeded(lambda: nn.Sequential(norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    trained(model, "O3", 5)
    assert F32 not in {tensor.dtype for tensor in (*model.buffers(), *model.parameters())}


def test_running_averages_of_an_instance_norm_are_those_of_float32() -> None:
    def make() -> nn.Module:
        norm = nn.InstanceNorm1d(4, track_running_stats=True, momentum=0.01)
        run = lambda self, x: self.body(self.norm(x.view(-1, 4, 2)).flatten(1))  # noqa: E731
        return Parts(run, norm=norm, body=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))

    shifted = lambda generator: 5 + torch.randn(32, 8, generator=generator)  # noqa: E731
    expected, model = (trained(seeded(make), kind, 60, shifted) for kind in (None, "O5"))
    assert model.norm.running_mean.dtype is F32
    assert torch.allclose(model.norm.running_mean, expected.norm.running_mean, rtol=0.01)


def test_buffers_that_forward_replaces_are_state() -> None:
    def count(self: Any, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return x

    model = Parts(
        lambda self, x: self.last(self.counter(self.first(x))),
        first=nn.Linear(8, 8),
        counter=Parts(count, seen=nn.Buffer(torch.full((), 250.0))),
        last=nn.Linear(8, 1),
    )
    trained(model, "O5", 20)
    assert model.counter.seen.item() == 270


def test_compiled_models_keep_their_state_too() -> None:
    torch._dynamo.reset()
    model = seeded(Moe)
    model.router.count.fill_(250.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mpinit.initialize(model, optimizer, "O5")
    compiled = torch.compile(model, backend="eager")
    for _ in range(20):
        backward(compiled(torch.randn(4, 8)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.router.count.dtype is F32 and model.router.count.item() == 270


def test_checkpointed_modules_are_recomputed_alike_when_one_is_kept() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return self.head(hidden)

    averaged = with_average()
    averaged.head = nn.Linear(8, 8)
    model = Parts(run, body=averaged, head=nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 1)))
    trained(model, "O5", 6)
    assert model.body.average.dtype is F32


def test_forwards_of_an_eighth_of_all_steps_are_watched() -> None:
    watched = [step for step in range(1, 10_000) if is_watched(step)]
    assert watched[:8] == [1, 2, 4, 8, 9, 16, 17, 18]
    assert watched[-1] == 4608 and sum(64 <= step < 128 for step in watched) == 9
