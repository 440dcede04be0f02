"""The log line of the first step on a processor that emulates 16-bit arithmetic.

Below the public face: the processor is replaced by one that emulates 16 bits, or does not.
"""

import logging
from typing import Any

import pytest
import torch
from loops import batches, iterate, mlp, mse
from torch.optim import SGD

import mpinit
from mpinit.torch_internals import emulation

BATCH = batches(1)[0]


@pytest.fixture
def product_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> dict[torch.dtype, float]:
    """Set the seconds that a product takes: no test depends on a clock."""
    caplog.set_level(logging.INFO, "mpinit")
    times = {torch.float32: 1.0, torch.float16: 8.0, torch.bfloat16: 6.0}
    monkeypatch.setattr(emulation, "seconds_of_product", lambda device, dtype: times[dtype])
    emulation._ratio.cache_clear()
    return times


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "emulated" in record.getMessage()]
    caplog.clear()
    return found


def trained(level: str, steps: int = 3, **keywords: Any) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, level, **keywords)
    for _ in range(steps):
        iterate(mse(model, BATCH), optimizer)
    mpinit.undo(model)


@pytest.mark.parametrize(
    ("level", "said"), [("O1", "float16"), ("O2", "float16"), ("O4", "bfloat16"), ("O5", "bfloat16")]
)
@pytest.mark.usefixtures("product_times")
def test_first_step_logs_once_that_16_bits_are_emulated(
    level: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained(level, steps=0)
    assert lines(caplog) == []
    trained(level)
    (line,) = lines(caplog)
    assert line.startswith(f"{said} is emulated on this processor") and ("8.0 times" in line or "6.0 times" in line)


@pytest.mark.usefixtures("product_times")
def test_nothing_is_logged_in_float32_or_where_it_is_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    trained("O0")
    trained("O2")
    assert lines(caplog) == []


def test_nothing_is_logged_where_16_bits_are_as_fast(
    product_times: dict[torch.dtype, float], caplog: pytest.LogCaptureFixture
) -> None:
    product_times[torch.float16] = 1.2
    trained("O2")
    assert lines(caplog) == []


def test_measured_ratio_is_a_number_and_leaves_random_numbers_alone() -> None:
    emulation._ratio.cache_clear()
    state = torch.get_rng_state()
    ratio = emulation.slowdown(torch.device("cpu"), torch.bfloat16)
    assert ratio is None or ratio >= 1.5
    assert torch.equal(state, torch.get_rng_state())
    assert emulation.slowdown(torch.device("meta"), torch.bfloat16) is None
