"""Originals of copies: a step or forward that uses them instead of its copies is refused, and they stay as they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpinit

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def pair(level: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if level is not None:
        mpinit.initialize(model, optimizer, level)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(X).float().square().mean().backward()
    return model, optimizer


def outer_step(model: Any, optimizer: Any) -> Any:
    optimizer.step()


def outer_zero_grad(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()


def outer_model_zero_grad(model: Any, optimizer: Any) -> Any:
    model.zero_grad()


def outer_scheduler(model: Any, optimizer: Any) -> Any:
    optimizer.scheduler.step()


def outer_submodule(model: Any, optimizer: Any) -> Any:
    model[1](torch.randn(4, 8))


@pytest.mark.parametrize("level", [None, "O5"])
@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (outer_step, r"called step\(\) of the optimizer that was passed"),
        (outer_zero_grad, r"called zero_grad\(\) of the optimizer that was passed"),
        (outer_model_zero_grad, r"changed the gradient of '0\.weight'.*were restored"),
        (outer_scheduler, r"changed 'lr'.*step schedulers outside of it"),
        (outer_submodule, r"'1' of the model itself was run inside mpinit\.suggest"),
    ],
)
def test_step_that_uses_the_originals_is_refused(
    outer: Callable[[Any, Any], Any], words: str, level: str | None
) -> None:
    model, optimizer = pair(level)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]

    def step(copied: nn.Module, its_optimizer: torch.optim.Optimizer) -> Tensor:
        loss = copied(X).float().square().mean()
        outer(model, optimizer)
        return loss

    attributes = sorted(vars(optimizer))
    with pytest.raises(ValueError, match=words):
        mpinit.suggest(model, optimizer, step)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    parameters = list(model.parameters())
    assert len(gradients) == len(parameters)
    for parameter, (gradient, values) in zip(parameters, gradients, strict=True):
        assert parameter.grad is gradient and torch.equal(gradient, values)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert sorted(vars(optimizer)) == attributes
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], weights["0.weight"])


def test_writes_to_the_weights_of_the_original_are_refused() -> None:
    model, optimizer = pair(None)

    def step(copied: nn.Module, its_optimizer: torch.optim.Optimizer) -> Tensor:
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
        return copied(X).square().mean()

    with pytest.raises(ValueError, match=r"wrote to '0\.weight' of the model that was passed.*are lost"):
        mpinit.suggest(model, optimizer, step)


class Closing(nn.Module):
    """A model whose head is a lambda that refers to the model itself, so that a copy's head runs the original's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = lambda x: self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x))  # type: ignore[no-any-return]


def test_closure_over_a_module_of_the_original_is_refused() -> None:
    model = Closing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for report in (
        lambda: mpinit.explain(model, X, opt_level="O5"),
        lambda: mpinit.fidelity(model, X),
        lambda: mpinit.suggest(model, optimizer, lambda m, o: m(X).square().mean()),
    ):
        with pytest.raises(
            ValueError, match=r"'norm' of the model itself was run inside mpinit\.\w+, and not the copy"
        ):
            report()
    assert not model.norm.running_mean.any() and not model.norm._forward_pre_hooks


class Shared(nn.Module):
    """A model whose copies share a frozen part with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.teacher(x)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        copied = Shared()
        copied.linear, copied.teacher = copy.deepcopy(self.linear, memo), self.teacher
        return copied


def test_module_that_copies_share_with_the_original_may_run() -> None:
    assert mpinit.explain(Shared(), X).rows
