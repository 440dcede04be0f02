"""compile_steps: the arithmetic of split masters and encoded states in compiled functions, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpinit

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

Factory = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Factory] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
WAYS: dict[str, dict[str, Any]] = {
    "split": {"master_weights": "split"},
    "int8": {"optimizer_state": "int8"},
    "split, int8": {"master_weights": "split", "optimizer_state": "int8"},
    "split, bfloat16": {"master_weights": "split", "optimizer_state": "bfloat16"},
}


def set_up(way: str, make: str, compiled: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # Some weights are small, and one is large enough to be in no piece with others.
    model = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 3000), nn.Tanh(), nn.Linear(3000, 8))
    optimizer = MAKE[make](model.parameters())
    mpinit.initialize(model, optimizer, "O5", **WAYS[way])
    if compiled:
        mpinit.compile_steps(optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with mpinit.scale_loss((model(x) - x[:, :8]).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    found = {name: values.clone() for name, values in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{key} {index}": values.clone() for key, values in state.items() if torch.is_tensor(values)}
    return found


@pytest.mark.parametrize(
    ("way", "make"),
    [("split", "AdamW"), ("split", "SGD"), ("int8", "AdamW"), ("split, int8", "AdamW"), ("split, bfloat16", "SGD")],
)
def test_compiled_steps_have_the_bits_of_eager_ones(way: str, make: str) -> None:
    expected = train(*set_up(way, make, compiled=False), range(20))
    found = train(*set_up(way, make, compiled=True), range(20))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(values, found[name]), name


def test_a_run_resumes_with_compiled_steps_and_is_undone() -> None:
    model, optimizer = set_up("split, int8", "AdamW", compiled=True)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(3, 6))
    for compiled in (True, False):
        other, other_optimizer = set_up("split, int8", "AdamW", compiled)
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        found = train(other, other_optimizer, range(3, 6))
        assert all(torch.equal(values, found[name]) for name, values in expected.items())
    mpinit.undo(model)
    assert all(torch.equal(values, expected[name]) for name, values in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("way", ["split", "int8"])
def test_without_a_compiler_there_is_an_error_by_name(way: str) -> None:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    model, optimizer = set_up(way, "AdamW", compiled=False)
    refused = pytest.raises(RuntimeError, match=r"compile_steps could not compile for cpu.*C\+\+ compiler")
    with fresh_cache(), config.patch({"cpp.cxx": ("no-such-compiler",)}), refused:
        mpinit.compile_steps(optimizer)
    found = train(model, optimizer, range(2))
    expected = train(*set_up(way, "AdamW", compiled=False), range(2))
    assert all(torch.equal(values, found[name]) for name, values in expected.items())


def test_other_results_of_a_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpinit.masters import arithmetic

    def wrong(function: Any, _: Any) -> Any:
        def run(*tensors: torch.Tensor) -> None:
            function(*tensors)
            tensors[-1][-1] += 1

        return run

    monkeypatch.setattr(arithmetic, "_compiled", wrong)
    _, optimizer = set_up("split", "AdamW", compiled=False)
    with pytest.raises(RuntimeError, match=r"'split' for cpu, and its numbers differ"):
        mpinit.compile_steps(optimizer)


def test_nothing_to_compile_and_no_session_are_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="was not initialised"):
        mpinit.compile_steps(optimizer)
    mpinit.initialize(model, optimizer, "O5")
    with pytest.raises(ValueError, match='master_weights="split"'):
        mpinit.compile_steps(optimizer)
