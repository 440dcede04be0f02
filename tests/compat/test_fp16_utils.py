"""Manual mixed precision: conversions, master lists, FP16_Optimizer against a hand-written float32-master loop."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from torch import nn

from mpinit.compat.apex import fp16_utils
from mpinit.compat.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


def test_network_to_half_casts_its_input_and_keeps_batchnorm() -> None:
    model = fp16_utils.network_to_half(net())
    inside = model[1]
    assert inside[0].weight.dtype == torch.float16
    assert inside[1].weight.dtype == inside[1].running_mean.dtype == torch.float32
    output = model(torch.randn(8, 4))
    assert output.dtype == torch.float16
    output.float().sum().backward()
    assert inside[0].weight.grad.dtype == torch.float16


def test_convert_network_leaves_affine_batchnorm_only() -> None:
    model = fp16_utils.convert_network(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)), torch.float16)
    assert model[0].running_mean.dtype == torch.float32
    assert model[1].running_mean.dtype == torch.float16
    assert model[0].num_batches_tracked.dtype == torch.int64
    assert fp16_utils.FP16Model(nn.Linear(2, 2))(torch.ones(1, 2)).dtype == torch.float16


def test_convert_module_casts_gradients_and_not_children() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.grad = torch.ones(2, 2)
    fp16_utils.convert_module(model, torch.float16)
    assert model[0].weight.dtype == torch.float32
    fp16_utils.convert_module(model[0], torch.float16)
    assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float16


def test_masters_by_hand() -> None:
    model = nn.Linear(4, 2).half()
    params, masters = fp16_utils.prep_param_lists(model)
    assert len(masters) == 2
    model(torch.ones(1, 4).half()).sum().backward()
    fp16_utils.model_grads_to_master_grads(params, masters)
    torch.optim.SGD(masters, lr=0.5).step()
    expected = [p.detach().float() - 0.5 * p.grad.float() for p in params]
    fp16_utils.master_params_to_model_params(params, masters)
    assert all(torch.equal(p.detach(), value.half()) for p, value in zip(params, expected, strict=True))


def test_small_helpers() -> None:
    assert fp16_utils.to_python_float([2.0]) == fp16_utils.to_python_float(torch.tensor([2.0])) == 2.0
    assert fp16_utils.tofp16()(torch.ones(1)).dtype == torch.float16


def losses_by_hand(steps: int, scale: float) -> list[float]:
    model = fp16_utils.network_to_half(net())
    params = list(model.parameters())
    masters = [p.detach().clone().float() if p.dtype == torch.float16 else p for p in params]
    momenta = [torch.zeros_like(m, dtype=torch.float32) for m in masters]
    losses = []
    for step in range(steps):
        for p in params:
            p.grad = None
        loss = loss_of(model, step)
        (loss * scale).backward()
        with torch.no_grad():
            for p, master, momentum in zip(params, masters, momenta, strict=True):
                assert p.grad is not None
                momentum.mul_(0.9).add_(p.grad.float() / scale)
                master.sub_(0.1 * momentum)
                p.copy_(master)
        losses.append(loss.item())
    return losses


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


def test_fp16_optimizer_is_a_float32_master_loop() -> None:
    model = fp16_utils.network_to_half(net())
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), static_loss_scale=64.0)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == losses_by_hand(5, 64.0)
    assert losses[-1] < losses[0]


def test_fp16_optimizer_accumulates_and_clips_float32_gradients() -> None:
    model = nn.Linear(4, 1, bias=False).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=8.0)
    x = torch.ones(1, 4).half()
    for _ in range(2):
        optimizer.backward(model(x).float().sum(), update_master_grads=False)
    optimizer.update_master_grads()
    (master,) = optimizer.fp32_from_fp16_groups[0]
    assert torch.equal(master.grad, torch.full((1, 4), 2.0))  # type: ignore[arg-type]
    assert optimizer.clip_master_grads(1.0) == pytest.approx(4.0)
    torch.testing.assert_close(master.grad, torch.full((1, 4), 0.5))


def test_an_overflow_skips_the_step_and_lowers_the_scale(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1).half()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**20}
    )
    before = model.weight.detach().clone()
    with caplog.at_level(logging.INFO, "mpinit"):
        optimizer.backward(model(torch.ones(1, 2).half()).float().sum())
        assert optimizer.overflow
        assert optimizer.clip_master_grads(1.0) == -1
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.loss_scale == 2.0**19
    assert "skipped" in caplog.text


def test_the_scale_grows_after_a_window_of_good_steps() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=3)
    for overflow in (True, False, False, False):
        scaler.update_scale(overflow)
    assert scaler.loss_scale == 8.0, "halved once, doubled once"
    scaler.cur_scale = 1.0
    scaler.update_scale(True)
    assert scaler.loss_scale == 1.0, "not below 1"


def test_a_closure_is_refused() -> None:
    optimizer = FP16_Optimizer(torch.optim.SGD(nn.Linear(2, 1).half().parameters(), lr=0.5))
    with pytest.raises(TypeError, match=r"takes no closure here: mpinit\.initialize"):
        optimizer.step(lambda: None)  # type: ignore[arg-type]


def test_a_checkpoint_resumes_with_the_masters_bits_and_loads_weights_only() -> None:
    def make() -> tuple[nn.Module, FP16_Optimizer]:
        model = nn.Linear(4, 2).half()
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        return model, FP16_Optimizer(sgd, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0})

    def train(model: nn.Module, optimizer: FP16_Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad(set_grads_to_None=True)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).half()
            optimizer.backward(model(x).float().square().sum())
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    other, resumed = make()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, range(3, 6))
    assert all(map(torch.equal, optimizer.fp32_from_fp16_groups[0], resumed.fp32_from_fp16_groups[0]))
    assert resumed.loss_scaler.state() == optimizer.loss_scaler.state()


def test_an_old_checkpoints_scaler_object_loads() -> None:
    saved = DynamicLossScaler(init_scale=32.0)
    saved.cur_iter = 5
    scaler = DynamicLossScaler()
    scaler.load_state(saved)
    assert (scaler.loss_scale, scaler.cur_iter) == (32.0, 5)
