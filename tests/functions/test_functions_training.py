"""O1 through initialize: threads, teachers, weight casts, steps, checkpointing, derivatives and transforms."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts import FP32, HALF, LOWER, CheckpointEach, Initialize, in_thread
from torch import nn
from torch.nn import functional as F

import mpinit
from mpinit.torch_internals.native_autocast import is_on

# -- where casts are on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["thread", "model"])
def test_replicas_in_threads_cast_and_train(scope: str, initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.Linear(3, 2))
    initialize(model, cast_scope=scope)
    inputs = [torch.randn(2, 3) for _ in range(4)]
    outputs: list[torch.Tensor | None] = [None] * 4
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))

    def replica(index: int) -> None:
        outputs[index] = model(inputs[index])

    threads = [threading.Thread(target=replica, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [HALF] * 4
    assert [o.dtype for o in outputs if o is not None] == [HALF if scope == "thread" else FP32] * 4
    sum(o.float().sum() for o in outputs if o is not None).backward()  # type: ignore[union-attr]
    assert model[0].weight.grad.dtype is FP32
    assert in_thread(is_on) is False


def test_a_float32_teacher_is_bit_identical_beside_a_model_scoped_student(initialize: Initialize) -> None:
    student = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    teacher = copy.deepcopy(student)
    x = torch.randn(8, 4)
    want = teacher(x)
    want.sum().backward()
    want_grads = [p.grad.clone() for p in teacher.parameters() if p.grad is not None]
    teacher.zero_grad()
    initialize(student, torch.optim.SGD(student.parameters(), lr=0.1), cast_scope="model")
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
def test_a_model_of_another_session_computes_the_bits_that_it_computes_alone(
    level: str, compiled: bool, initialize: Initialize
) -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Linear(4, 2))
    mpinit.initialize(teacher, opt_level=level, keep_fp32=nn.LayerNorm, verbosity=0)
    run = torch.compile(teacher, backend="aot_eager") if compiled else teacher
    x = torch.randn(8, 4)
    want = run(x)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x), run(x)

    alone = nn.Linear(4, 4)
    initialize(alone)
    assert alone(x).dtype is HALF
    assert torch.equal(run(x), want)
    student = initialize(Student())
    inner, got = student(x)
    assert inner.dtype is HALF
    assert torch.equal(got, want)
    mpinit.undo(teacher)


@pytest.mark.parametrize("scope", ["thread", "model"])
def test_casts_end_with_a_session_that_is_dropped(scope: str) -> None:
    model = mpinit.initialize(nn.Linear(4, 4), opt_level="O1", cast_scope=scope, verbosity=0)
    assert model(torch.ones(1, 4)).dtype is (HALF if scope == "thread" else FP32)
    del model
    gc.collect()
    assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype is FP32


def test_losses_are_cast_in_the_thread_that_called_initialize(initialize: Initialize) -> None:
    model = nn.Linear(4, 3)
    initialize(model)
    output = model(torch.randn(2, 4))
    assert output.dtype is HALF
    assert F.cross_entropy(output, torch.tensor([0, 2])).dtype is FP32
    assert F.mse_loss(output, torch.zeros(2, 3)).dtype is FP32
    assert (output**2).sum().dtype is FP32


def test_verbosity_2_logs_each_cast_once_and_the_counts_at_undo(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    with caplog.at_level(logging.DEBUG, "mpinit"):
        mpinit.initialize(model, opt_level="O1", verbosity=2)
        caplog.clear()
        for _ in range(3):
            model(x)
        assert [record.getMessage() for record in caplog.records] == [
            "cast: torch.nn.functional.linear from float32 to float16",
            "cast: torch.layer_norm from float16 to float32",
        ]
        caplog.clear()
        mpinit.undo(model)
        lines = [record.getMessage() for record in caplog.records]
    assert "casts: torch.nn.functional.linear from float32 to float16, 3 times" in lines
    assert "casts: torch.layer_norm from float16 to float32, 3 times" in lines


def test_casts_are_off_in_step_and_on_in_its_closure(initialize: Initialize) -> None:
    model = nn.Linear(3, 1)
    seen: dict[str, bool] = {}

    class Spying(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            seen["step"] = is_on()
            result = super().step(closure)
            seen["after the closure"] = is_on()
            return result

    optimizer = Spying(model.parameters(), lr=0.1)
    initialize(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        seen["closure"] = is_on()
        loss = model(torch.ones(2, 3)).sum()
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    optimizer.step(closure)
    assert seen == {"step": False, "closure": True, "after the closure": False}
    assert is_on()


@pytest.mark.parametrize("scope", ["thread", "model"])
@pytest.mark.parametrize(
    "region", [mpinit.disable_casts, lambda: torch.autocast("cpu", enabled=False)], ids=["disable_casts", "autocast"]
)
def test_regions_without_casts(region: Callable[[], Any], scope: str, initialize: Initialize) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3)
    want = plain(x)
    initialize(model, cast_scope=scope)
    with region():
        assert torch.equal(model(x), want)
        assert torch.equal(in_thread(lambda: plain(x)), want)
    assert not torch.equal(model(x).float(), want)


# -- autograd and transforms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["thread", "model"])
def test_gradient_penalty_matches_float32(scope: str, initialize: Initialize) -> None:
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
    initialize(model, optimizer, cast_scope=scope, loss_scale=256.0)
    scale = mpinit.loss_scale(optimizer)
    assert scale == 256.0
    loss = penalised(model, lambda output: output.float() * scale, scale)
    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == pytest.approx(loss.item() * scale, rel=1e-6)
        scaled_loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.03, atol=3e-3)


def test_custom_functions_with_custom_fwd_and_custom_bwd(initialize: Initialize) -> None:
    seen: list[tuple[str, torch.dtype, bool]] = []

    def make(cast_inputs: torch.dtype | None) -> Any:
        class Matmul(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
            def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a, b)
                seen.append(("forward", a.dtype, torch.is_autocast_enabled("cpu")))
                return a @ b

            @staticmethod
            @torch.amp.custom_bwd(device_type="cpu")
            def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
                a, b = ctx.saved_tensors
                seen.append(("backward", grad.dtype, torch.is_autocast_enabled("cpu")))
                return grad @ b.T, a.T @ grad

        return Matmul

    initialize(nn.Linear(1, 1))
    for cast_inputs, expected in ((None, (HALF, True)), (FP32, (FP32, False))):
        seen.clear()
        a, b = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2, requires_grad=True)
        output = make(cast_inputs).apply(a, b)
        assert output.dtype is expected[0]
        output.float().sum().backward()
        assert seen == [("forward", FP32, expected[1]), ("backward", expected[0], expected[1])]
        assert a.grad is not None
        assert a.grad.dtype is FP32


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
