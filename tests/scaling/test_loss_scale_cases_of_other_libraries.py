"""The loss scale cases that other libraries test, as tables of traces: equal here, or different on purpose.

The cases are those of DeepSpeed's ``test_dynamic_loss_scale.py``, jmp's ``loss_scale_test.py``, Keras'
``loss_scale_optimizer_test.py`` and optax's ``_conditionality_test.py``. The page about loss scaling lists differences.
"""

from typing import Any, Final

import pytest
import torch
from session_device import placed
from torch import nn
from torch.optim import SGD

import mpinit

pytestmark = pytest.mark.device

START: Final = 2.0**8
BAD: Final = {"i": float("inf"), "m": -float("inf"), "n": float("nan")}


class Product(nn.Module):
    """A model whose weight's gradient is its input."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def started(*values: float, lr: float = 0.5, **more: Any) -> tuple[Product, SGD]:
    model = placed(Product(*values))
    optimizer = SGD(model.parameters(), lr=lr)
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(**more))
    return model, optimizer


def iterate(model: Product, optimizer: SGD, x: Any) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(model(torch.as_tensor(x, device=model.weight.device)), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def trace(outcomes: str, start: float = START, **more: Any) -> list[float]:
    """Return the scale after each step; "." is a good step, other letters are those of ``BAD``."""
    model, optimizer = started(0.0, init=start, max_consecutive_skips=1000, **more)
    found = []
    for outcome in outcomes:
        iterate(model, optimizer, [BAD.get(outcome, 0.01)])
        found.append(mpinit.loss_scale(optimizer))
    assert mpinit.step_counts(optimizer) == (outcomes.count("."), len(outcomes) - outcomes.count("."))
    return found


# Of DeepSpeed: the outcomes, the properties, and its scales over the first one after each step.
DEEPSPEED: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "all overflow": (
        "imnnnnnn",
        {"growth_interval": 2, "min": START / 16},
        [0.5 ** min(k, 4) for k in range(1, 9)],
    ),
    "all overflow, another limit": (
        "imnnnnnn",
        {"growth_interval": 2, "min": START / 8},
        [0.5 ** min(k, 3) for k in range(1, 9)],
    ),
    "hysteresis of 3": ("iiii", {"hysteresis": 3}, [1, 1, 0.5, 0.25]),
    "hysteresis of 1": ("in", {"hysteresis": 1}, [0.5, 0.25]),
    "hysteresis comes back at growth": (
        "ii....ii",
        {"hysteresis": 2, "growth_interval": 4},
        [1, 0.5, 0.5, 0.5, 0.5, 1, 1, 0.5],
    ),
}


@pytest.mark.parametrize("scenario", DEEPSPEED)
def test_scales_of_deepspeed(scenario: str) -> None:
    outcomes, properties, expected = DEEPSPEED[scenario]
    assert [scale / START for scale in trace(outcomes, **properties)] == expected


def test_growth_is_one_step_earlier_than_deepspeeds() -> None:
    """Compare with DeepSpeed, whose first good step after an overflow does not count, unlike torch's."""
    theirs = [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    ours = [scale / START for scale in trace("." * 10, growth_interval=2)]
    assert ours[:-1] == theirs[1:]
    # Two overflows, a window and one step more, an overflow: the ends of the parts are the same.
    some = [scale / START for scale in trace("in...i", growth_interval=2)]
    assert (some[1], some[4], some[5]) == (0.25, 0.5, 0.25) and some[3] == 0.5


def test_good_steps_do_not_fill_hysteresis_up() -> None:
    """Compare with DeepSpeed's ``consecutive_hysteresis``, where single overflows never lower the scale."""
    assert [scale / START for scale in trace("i.i.i.", hysteresis=2)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_hysteresis_survives_a_checkpoint() -> None:
    model, optimizer = started(0.0, init=START, hysteresis=3)
    iterate(model, optimizer, [BAD["i"]])
    state = mpinit.state_dict(optimizer)
    again, its = started(0.0, init=2.0, hysteresis=3)
    mpinit.load_state_dict(state, its)
    found = []
    for _ in range(2):
        iterate(again, its, [BAD["i"]])
        found.append(mpinit.loss_scale(its) / START)
    assert found == [1, 0.5]


# Of jmp: period, factor, smallest scale.
@pytest.mark.parametrize(("period", "factor"), [(20, 2.0), (30, 3.0)])
def test_growth_of_jmp(period: int, factor: float) -> None:
    found = trace("." * (period + 1), start=10.0, growth_interval=period, growth_factor=factor)
    assert found == [10.0] * (period - 1) + [10.0 * factor] * 2


@pytest.mark.parametrize(
    ("factor", "least"), [(2.0, 1.0), (3.0, 1.0), (2.0, 0.3125), (3.0, 0.37), (2.0, None)], ids=str
)
def test_backoff_of_jmp(factor: float, least: float | None) -> None:
    found = trace("n" * 100, start=10.0, backoff_factor=1 / factor, min=least)
    expected = [max(least or 0.0, 10.0 / factor ** (k + 1)) for k in range(100)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0.0)


def test_steps_of_keras() -> None:
    values, gradients = (1.0, 2.0, 3.0, 4.0), [1.0, 6.0, 7.0, 2.0]
    model, optimizer = started(*values, init=1024.0)
    iterate(model, optimizer, gradients)
    assert model.state_dict()["weight"].tolist() == [0.5, -1.0, -0.5, 3.0]
    model, optimizer = started(*values)
    iterate(model, optimizer, [BAD["i"]] * 4)
    assert model.state_dict()["weight"].tolist() == list(values)


def test_scales_of_keras() -> None:
    assert trace("iiii", start=400.0)[-1] == 25.0
    assert trace("." * 8, start=2.0, growth_interval=2)[-1] == 32.0


def test_nan_is_never_applied_as_optax_does_after_forgiving() -> None:
    model, optimizer = started(0.0, lr=1.0, max_consecutive_skips=3, init=1024.0)
    found = []
    for x in (1.0, BAD["n"], BAD["n"], 1.0, BAD["n"], BAD["n"]):
        iterate(model, optimizer, [x])
        found.append(model.state_dict()["weight"].item())
    assert found == [-1.0, -1.0, -1.0, -2.0, -2.0, -2.0]
    assert mpinit.step_counts(optimizer) == (2, 4)
    with pytest.raises(RuntimeError, match="3 steps in a row were skipped"):
        iterate(model, optimizer, [BAD["n"]])
    assert model.state_dict()["weight"].item() == -2.0
