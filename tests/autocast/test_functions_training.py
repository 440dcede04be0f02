"""O1 in training: threads, teachers, transforms, checkpoints, and weight casts that never outlive a change."""

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import pytest
import torch
from casts import FP32, HALF, LOWER, CheckpointEach, Initialize, in_thread
from models import Parts
from torch import nn
from torch.nn import functional as F

import mpinit


@pytest.mark.parametrize("scope", [True, "model"])
def test_replicas_in_threads_cast_and_train(scope: Any, initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.Linear(3, 2))
    initialize(model, patch_torch_functions=scope)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(model, [torch.randn(2, 3) for _ in range(4)]))
    assert seen == [HALF] * 4
    assert [output.dtype for output in outputs] == [HALF if scope is True else FP32] * 4
    sum(output.float().sum() for output in outputs).backward()
    assert model[0].weight.grad.dtype is FP32


@LOWER
def test_products_with_sparse_matrices_have_gradients(lower: torch.dtype, initialize: Initialize) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            hidden = torch.sparse.mm(edges, self.first(x)).relu()
            return torch.sparse.addmm(torch.ones(6, 2), edges, self.second(hidden))

    x, edges = torch.randn(6, 4), (torch.rand(6, 6) > 0.5).float().to_sparse()
    model, plain = Graph(), Graph()
    initialize(model, patch_torch_functions_type=lower)
    for each in (model, plain):
        with nullcontext() if each is model else mpinit.disable_casts():
            loss = each(x, edges).square().mean()
        loss.backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None
        assert (got.grad - want.grad).norm() < 0.02 * want.grad.norm()


@LOWER
@pytest.mark.parametrize("name", ["linalg.matrix_exp", "matrix_exp", "linalg.pinv", "pinverse"])
def test_functions_of_matrices_compute_in_float32(name: str, lower: torch.dtype, initialize: Initialize) -> None:
    matrix = torch.eye(4) + torch.linspace(-0.2, 0.2, 16).view(4, 4)
    expected = attrgetter(name)(torch)(matrix)
    initialize(nn.Linear(1, 1), patch_torch_functions_type=lower)
    x = matrix.clone().requires_grad_()
    result = attrgetter(name)(torch)(x @ torch.eye(4))
    result.sum().backward()
    assert result.dtype is FP32 and (result - expected).norm() < 0.1 * expected.norm()
    assert x.grad is not None and x.grad.isfinite().all()


def test_float32_teacher_is_unchanged_beside_a_scoped_student(initialize: Initialize) -> None:
    student = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    teacher = copy.deepcopy(student)
    x = torch.randn(8, 4)
    want = teacher(x)
    want.sum().backward()
    want_grads = [p.grad.clone() for p in teacher.parameters() if p.grad is not None]
    teacher.zero_grad()
    initialize(student, torch.optim.SGD(student.parameters(), lr=0.1), patch_torch_functions="model")
    output = student(x)
    assert output.dtype is FP32
    assert not torch.equal(output, want)
    for run in (lambda: teacher(x), lambda: in_thread(lambda: teacher(x))):
        got = run()
        assert torch.equal(got, want)
    got.sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(teacher.parameters(), want_grads, strict=True))
    assert F.mse_loss(output, want).dtype is FP32
    assert (x @ x.T).dtype is FP32


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_model_of_another_session_computes_the_bits_of_before(
    level: str, compiled: bool, initialize: Initialize
) -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Linear(4, 2))
    mpinit.initialize(teacher, opt_level=level, keep_fp32=nn.LayerNorm)
    run = torch.compile(teacher, backend="aot_eager") if compiled else teacher
    x = torch.randn(8, 4)
    want = run(x)

    alone = nn.Linear(4, 4)
    initialize(alone)
    assert alone(x).dtype is HALF
    assert torch.equal(run(x), want)
    student = initialize(Parts(lambda self, x: (self.inner(x), run(x)), inner=nn.Linear(4, 4)))
    inner, got = student(x)
    assert inner.dtype is HALF
    assert torch.equal(got, want)


@pytest.mark.parametrize("scope", [True, "model"])
def test_gradient_penalty_matches_float32(scope: Any, initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4)

    def penalised(net: nn.Module, scaled: Callable[[torch.Tensor], Any], scale: float) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        output = net(leaf).sum()
        (grad,) = torch.autograd.grad(scaled(output), leaf, create_graph=True)
        return output.float() * 0.1 + ((grad / scale).norm(2, dim=1) - 1).square().mean()

    penalised(reference, lambda loss: loss, 1.0).backward()
    initialize(model, optimizer, patch_torch_functions=scope, loss_scale=256.0)
    scale = mpinit.loss_scale(optimizer)
    assert scale == 256.0
    loss = penalised(model, lambda output: output.float() * scale, scale)
    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == pytest.approx(loss.item() * scale, rel=1e-6)
        scaled_loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.03, atol=3e-3)


def test_functional_call_vmap_and_grad(initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    reference = copy.deepcopy(model)
    initialize(model)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.randn(5, 3)
    output = torch.func.functional_call(model, parameters, (x,))
    assert output.dtype is HALF
    doubled = {name: 2 * value for name, value in parameters.items()}
    assert not torch.equal(torch.func.functional_call(model, doubled, (x,)), output)

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor, net: nn.Module = model) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (row,)).float().square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    with mpinit.disable_casts():
        plain = torch.func.vmap(torch.func.grad(lambda weights, row: loss(weights, row, reference)), in_dims=(None, 0))(
            parameters, x
        )
    for name, value in per_sample.items():
        assert value.dtype is FP32
        torch.testing.assert_close(value, plain[name], rtol=0.1, atol=0.05)


@LOWER
def test_checkpointing_gives_the_gradients_of_the_run_without(lower: torch.dtype, initialize: Initialize) -> None:
    models = [CheckpointEach(True), CheckpointEach(False), CheckpointEach(False)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    models[2].eval()  # evaluation does not checkpoint
    x = torch.randn(2, 3, requires_grad=True)
    for model in models:
        initialize(model, patch_torch_functions_type=lower)
        model(x).sum().backward()
    plain = [p.grad for p in models[2].parameters()]
    for model in models[:2]:
        for parameter, want in zip(model.parameters(), plain, strict=True):
            assert torch.equal(parameter.grad, want)  # type: ignore[arg-type]


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def by_ema(model: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    by_hand(average.module)
    for parameter, mean in zip(model.parameters(), average.module.parameters(), strict=True):
        parameter.data.lerp_(mean.data, 1.0)


def by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [by_hand, by_data, by_ema, by_loading])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scope", [True, "model"])
def test_a_weight_cast_never_outlives_a_change(
    change: Callable[[nn.Module], None], context: Callable[[], Any], scope: Any, initialize: Initialize
) -> None:
    model = nn.Linear(4, 2, bias=False)
    nn.init.constant_(model.weight, 0.5)
    initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), patch_torch_functions=scope)
    x = torch.ones(1, 4)
    with context():
        assert model(x)[0, 0].item() == 2.0
        assert F.linear(x, model.weight)[0, 0].item() == 2.0
    change(model)
    with context():
        assert model(x)[0, 0].item() == 4.0
        assert F.linear(x, model.weight)[0, 0].item() == 4.0
    output = model(x)
    output.sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0] * 4] * 2


def test_a_weight_shared_by_two_models_and_a_model_called_twice(initialize: Initialize) -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    reference = copy.deepcopy(first)
    models = nn.ModuleList([first, second])
    initialize(first)
    initialize(second)
    x = torch.randn(2, 3)
    loss = sum(model(x).float().sum() for model in (first, second, first))
    loss.backward()  # type: ignore[union-attr]
    with mpinit.disable_casts():
        (3 * reference(x).sum()).backward()
    torch.testing.assert_close(first.weight.grad, reference.weight.grad, rtol=1e-2, atol=1e-2)
    assert len(list(models.parameters())) == 1


def test_evaluating_inside_the_training_forward(initialize: Initialize) -> None:
    def distilled(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.net(x)
        return F.mse_loss(self.net(x + 1), target)

    model = Parts(distilled, net=nn.Linear(3, 3))
    initialize(model)
    model(torch.randn(2, 3)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_memory_is_constant_over_1000_iterations(initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    initialize(model, optimizer)
    x = torch.randn(2, 4)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    def iterate(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    iterate(10)
    before, objects = tensors(), len(gc.get_objects())
    iterate(1000)
    assert tensors() <= before
    assert len(gc.get_objects()) <= objects + 20
