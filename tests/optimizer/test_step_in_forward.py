"""Steps inside a model's own method (``training_step`` with manual optimization): what follows uses the new weights."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Batch, backward, batches, mlp
from torch import Tensor, nn

import mpinit

SETTINGS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "loss_scale": 128.0},
    "O4": {"opt_level": "O4"},
    "O4 of the model": {"opt_level": "O4", "patch_torch_functions": "model"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
Backward = Callable[[Tensor], None]


class Sharpness(torch.optim.SGD):
    """SGD in two halves, with a method of its own that changes the weights."""

    @torch.no_grad()
    def first_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["climb"] = weight.grad.clone()
            weight.add_(weight.grad, alpha=0.5)

    @torch.no_grad()
    def second_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.sub_(self.state[weight]["climb"], alpha=0.5)
        self.step()

    @torch.no_grad()
    def halve(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.mul_(0.5)


class Trained(nn.Module):
    """A model whose own method trains it, and records the loss of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def evaluate(self, batch: Batch, optimizer: Any, run_backward: Backward, losses: list[float]) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.forward(batch[0]).float(), batch[1].float())
        losses.append(loss.item())
        run_backward(loss)
        return loss

    def training_step(self, batch: Batch, way: str, optimizer: Any, run_backward: Backward) -> list[float]:
        losses: list[float] = []
        evaluate = functools.partial(self.evaluate, batch, optimizer, run_backward, losses)
        for _ in range(3):
            if way == "closure":
                optimizer.step(evaluate)
                continue
            evaluate()
            if way == "halves":
                optimizer.first_step()
                evaluate()
                optimizer.second_step()
            elif way == "own method":
                optimizer.halve()
            else:
                optimizer.step()
        return losses


def losses_of(way: str, **settings: Any) -> list[float]:
    model = Trained()
    optimizer: Any = Sharpness(model.parameters(), lr=0.5)
    if way == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
    if not settings:
        return model.training_step(batches(1)[0], way, optimizer, lambda loss: loss.backward())  # type: ignore[no-untyped-call]
    mpinit.initialize(model, optimizer, entry_points=["training_step"], **settings)
    return model.training_step(batches(1)[0], way, optimizer, lambda loss: backward(loss, optimizer))


@pytest.mark.parametrize("way", ["step", "closure", "halves", "own method"])
@pytest.mark.parametrize("name", SETTINGS)
def test_forwards_after_a_step_in_one_method_use_new_weights(name: str, way: str) -> None:
    want = losses_of(way)
    assert min(abs(after - before) for before, after in zip(want, want[2:], strict=False)) > 0.15
    torch.testing.assert_close(losses_of(way, **SETTINGS[name]), want, rtol=0.05, atol=0.05)
