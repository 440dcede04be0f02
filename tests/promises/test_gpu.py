"""What only an accelerator can show: no wait for it on the good path, skipping inside kernels, CUDA graphs."""

import copy
import warnings
from typing import Any

import pytest
import torch
from session_device import device, no_waiting, peak_of_memory, placed
from torch import nn

import mpinit

pytestmark = pytest.mark.gpu

LEVELS = [("O0", {}), ("O1", {}), ("O2", {}), ("O3", {}), ("O4", {}), ("O5", {}), ("O5", {"master_weights": "split"})]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model: nn.Sequential = placed(
        nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(8 * 64, 32), nn.LayerNorm(32)),
        )
    )
    return model


def data() -> torch.Tensor:
    x: torch.Tensor = placed(torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    return x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, factor: Any = 1.0) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean() * factor
    with mpinit.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return loss.detach()


def plain_losses(steps: int) -> list[float]:
    model, x = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("level", "more"), LEVELS)
def test_training_follows_float32(level: str, more: dict[str, Any]) -> None:
    expected = plain_losses(10)  # before the casts of O1 are on
    model, x = net(), data()
    # Without masters the states are float16, which holds no smaller epsilon than 6e-8.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    mpinit.initialize(model, optimizer, level, **more)
    losses = [step(model, optimizer, x).item() for _ in range(10)]
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("level", "more"), LEVELS)
def test_the_good_path_never_waits_for_the_device(level: str, more: dict[str, Any]) -> None:
    model, x = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mpinit.initialize(model, optimizer, level, **more)
    for _ in range(3):
        step(model, optimizer, x)
    with no_waiting():
        for _ in range(5):
            step(model, optimizer, x)
    assert mpinit.step_counts(optimizer) == (8, 0)
    mpinit.undo(model)


OVERFLOW_AT = (2, 5, 6)


def run_with_overflows(**kind: Any) -> tuple[list[torch.Tensor], float, tuple[int, int]]:
    model, x = net(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3, **kind)
    mpinit.initialize(model, optimizer, "O2")
    for index in range(10):
        step(model, optimizer, x, float("inf") if index in OVERFLOW_AT else 1.0)
        assert mpinit.step_was_skipped(optimizer) == (index in OVERFLOW_AT)
    result = [p.detach().clone() for p in mpinit.master_params(optimizer)]
    scale, counts = mpinit.loss_scale(optimizer), mpinit.step_counts(optimizer)
    mpinit.undo(model)
    return result, scale, counts


def test_fused_foreach_and_single_tensor_agree_with_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    fused = run_with_overflows(fused=True)
    for kind in ({"foreach": True}, {"foreach": False}):
        masters, scale, counts = run_with_overflows(**kind)
        assert (scale, counts) == fused[1:] == (2.0**13, (7, 3))
        for ours, theirs in zip(masters, fused[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_iteration_can_be_captured_in_a_cuda_graph() -> None:
    if device().type != "cuda":
        pytest.skip("graphs are CUDA's own")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=True)
    mpinit.initialize(model, optimizer, "O2")
    x, factor = torch.randn(8, 32, device="cuda"), torch.ones((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer, x, factor)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, optimizer, x, factor)
    scale_before = mpinit.loss_scale(optimizer)
    good_before, skipped_before = mpinit.step_counts(optimizer)
    first = next(mpinit.master_params(optimizer))
    for value in (1.0, float("inf"), 1.0):
        before = first.detach().clone()
        factor.fill_(value)
        graph.replay()
        assert torch.equal(before, first.detach()) == (value == float("inf"))
    assert mpinit.loss_scale(optimizer) == scale_before / 2
    assert mpinit.step_counts(optimizer) == (good_before + 2, skipped_before + 1)


def test_a_peak_of_memory_below_float32() -> None:
    def train(level: str | None) -> None:
        model = placed(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if level is not None:
            mpinit.initialize(model, optimizer, level)
        x = torch.randn(4096, 64, device=device())
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if level is None:
                loss.backward()
            else:
                with mpinit.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()

    train("O3")  # so that cuBLAS has its workspace
    peak = {level: peak_of_memory(lambda level=level: train(level)) for level in ("O3", "O2", None)}  # type: ignore[misc]
    assert peak["O3"] < peak["O2"] < peak[None]


NETWORKS: dict[str, dict[str, Any]] = {
    "LSTM": {},
    "LSTM with projections": {"proj_size": 3},
    "GRU": {"bidirectional": True, "num_layers": 2},
    "RNN": {"batch_first": True, "bias": False},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_recurrent_networks_run_in_the_dtype_of_the_casts(dtype: torch.dtype, name: str, packed: bool) -> None:
    """Compare with networks cast by hand: torch.amp runs cuDNN's in float16, whatever its dtype is."""
    if "projections" in name and device().type == "sim":
        pytest.skip("projections are cuDNN's and the CPU's")
    network = getattr(nn, name.split()[0])(6, 5, **NETWORKS[name])
    model, by_hand = placed(network), placed(copy.deepcopy(network).to(dtype))
    given: Any = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(0))
    if packed:
        given = nn.utils.rnn.pack_padded_sequence(given, [3, 2, 1], batch_first=network.batch_first)
    given = given.to(device())
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    before = [weight.detach().clone() for weight in model.parameters()]
    mpinit.initialize(model, None, "O1", patch_torch_functions_type=dtype)
    with warnings.catch_warnings():
        # RNNBase.flatten_parameters excludes bfloat16, and casts to it are tensors by themselves.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        model(given)
        found, expected = outputs[0], by_hand(given.to(dtype))[0]
    found, expected = (found.data, expected.data) if packed else (found, expected)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.01, atol=0.01)
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    for ours, before_, theirs in zip(model.parameters(), before, by_hand.parameters(), strict=True):
        assert torch.equal(ours, before_)
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=0.05, atol=0.05)
    mpinit.undo(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_recurrent_function_called_by_keywords_is_cast_too(dtype: torch.dtype) -> None:
    network = placed(nn.GRU(6, 5))
    mpinit.initialize(network, None, "O1", patch_torch_functions_type=dtype)
    x = placed(torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0)))
    hidden = torch.zeros(1, 2, 5, device=device())
    settings = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        with torch.autocast(device().type, dtype):
            output, _ = torch.gru(input=x, hx=hidden, params=network._flat_weights, batch_first=False, **settings)
    assert output.dtype is dtype
    mpinit.undo(network)
    torch.testing.assert_close(output.float(), network(x)[0], rtol=0.02, atol=0.02)
