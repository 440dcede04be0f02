"""What every test of the benchmarks starts from and leaves."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A process that measures sets a seed and a precision for itself, which here is everybody.

    Backends' flags are opened for it: torch's own test helpers freeze them for good where they are imported.
    """
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with torch.random.fork_rng(), torch.backends.__allow_nonbracketed_mutation():
        yield
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
