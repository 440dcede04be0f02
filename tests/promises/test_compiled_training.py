"""Training whose model and loss are compiled: eager numbers, one graph, and none more when the scale moves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mpinit

compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Forward = Callable[[Tensor, Tensor], Tensor]
STEPS = 5
OVERFLOWING = 2  # the step whose gradients overflow, where losses are scaled
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 4e-3}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))


def train(level: str, dynamic: bool, backend: str | None) -> tuple[list[Tensor], list[float], list[int]]:
    """Five steps; the float32 parameters, the scale after each step, and the graphs there are then."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = {"loss_scale": mpinit.DynamicLossScale(init=1024.0, growth_interval=2)} if dynamic else {}
    mpinit.initialize(model, optimizer, level, **scale)

    def loss_of(inputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs), target)

    forward: Forward = torch.compile(loss_of, backend=backend) if backend else loss_of
    scales, graphs = [], []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        inputs, target = torch.randn(4, 8, generator=random), torch.randn(4, 2, generator=random)
        if dynamic and step == OVERFLOWING:
            target.fill_(float("inf"))
        with mpinit.scale_loss(forward(inputs, target), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(mpinit.loss_scale(optimizer))
        graphs.append(counters["stats"]["unique_graphs"])
    parameters = [parameter.detach().clone() for parameter in mpinit.master_params(optimizer)]
    mpinit.undo(model)
    return parameters, scales, graphs


# Graphs are dynamo's and autograd's, whose every backend has them: kernels for one level are enough in every run.
@pytest.mark.parametrize(
    ("level", "backend"),
    [
        *(("O1", "aot_eager"), ("O2", "inductor"), ("O5", "aot_eager")),
        *(pytest.param(level, "inductor", marks=pytest.mark.nightly) for level in ("O1", "O5")),
    ],
)
def test_compiled_training_is_eager_training_in_one_graph(level: str, backend: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    dynamic = level != "O5"
    compiled, scales, graphs = train(level, dynamic, backend)
    assert sum(counters["graph_break"].values()) == 0
    assert graphs == [1] * STEPS
    if dynamic:
        # Two good steps: up; an overflow: down; two good ones: up.
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    eager, eager_scales, _ = train(level, dynamic, None)
    assert scales == eager_scales
    tolerance = TOLERANCE[torch.bfloat16 if level == "O5" else torch.float16]
    before = network()
    for ours, theirs, start in zip(compiled, eager, before.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert (ours - start.detach()).abs().max() > 4 * tolerance, "training moved nothing that could differ"


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_compiled_autograd_computes_the_same_gradients(level: str) -> None:
    """Run a backward pass under compiled autograd: weights have no grad_dtype, which it does not know."""
    enable = compiled_autograd._enable
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, loss_scale=1.0)
    with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        scaled.backward(retain_graph=True)
    plain = [parameter.grad for parameter in mpinit.master_params(optimizer)]
    optimizer.zero_grad()

    def backward() -> None:
        loss = model(torch.ones(1, 4)).sum()
        compiles = compiled_autograd._enable(torch.compile(backend="eager"))
        with mpinit.scale_loss(loss, optimizer) as scaled, compiles:
            scaled.backward()

    backward()
    for parameter, expected in zip(mpinit.master_params(optimizer), plain, strict=True):
        assert expected is not None and parameter.grad is not None
        assert torch.equal(parameter.grad, expected)
    mpinit.undo(model)
    assert compiled_autograd._enable is enable


@pytest.mark.filterwarnings("ignore")  # those of dynamo, whose own code makes errors of them
def test_a_compiled_iteration_computes_eager_numbers() -> None:
    """Compile the backward pass, too: what runs while dynamo compiles is not compiled itself, which took minutes."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()  # a deque that forgets: other tests may have filled it
    trained = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mpinit.initialize(model, optimizer, "O5")

        def iteration(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            with mpinit.scale_loss(model(x).square().sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        run = torch.compile(iteration, backend="aot_eager") if compiles else iteration
        for _ in range(2):
            run(torch.linspace(-1, 1, 8).view(2, 4))
        trained.append([master.detach().clone() for master in mpinit.master_params(optimizer)])
        mpinit.undo(model)
    torch.testing.assert_close(trained[1], trained[0])
    compiled = [metric.co_name for metric in torch._dynamo.utils.get_compilation_metrics()]
    assert "iteration" in compiled and "_hide" not in compiled


@pytest.mark.parametrize(
    "others",
    [{"compute_fp32": ["3"]}, {"keep_fp32": ["1"]}, {"keep_fp32": ["2"]}, {"entry_points": ["3.forward"]}],
    ids=str,
)
def test_a_compiled_model_follows_other_arguments(others: dict[str, list[str]]) -> None:
    model, inputs = network(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager")
    for keywords in ({}, others, {}):
        mpinit.initialize(model, opt_level="O5", **keywords)
        assert torch.equal(compiled(inputs), model(inputs)), keywords
        with mpinit.float32_weights(model):
            assert torch.equal(compiled(inputs), model(inputs)), keywords
        mpinit.undo(model)
        assert torch.equal(compiled(inputs), model(inputs))
