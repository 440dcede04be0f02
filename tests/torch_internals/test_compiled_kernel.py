"""Kernels that are compiled for a GPU where that pays: the same bits, and without a compiler the function as it is.

Below the public face: the kernel is compiled and compared alone.
"""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpinit.masters.codecs import minifloat
from mpinit.masters.codecs.codec import noise_arguments
from mpinit.torch_internals import compiled_kernel
from mpinit.torch_internals.compiled_kernel import CompiledKernel


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernel, "is_faster_in_chunks", lambda device: False)
    monkeypatch.setattr(compiled_kernel, "_WORTH_ROWS", 150)


def doubled(values: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(values * 2)


def sample() -> list[torch.Tensor]:
    return [torch.rand(70, 3), torch.empty(70, 3)]


def compile_to(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: function)


@pytest.mark.long
def test_compiled_encoding_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minifloat, "reads_without_sync", lambda device: False)
    values = torch.linspace(-3, 3, 200 * 128).pow(7).view(-1, 128)
    values[::3].square_()
    kernel = CompiledKernel(minifloat._encode)
    results = [(torch.empty(200, 128, dtype=torch.uint8), torch.empty(200, 1)) for _ in range(2)]
    for codes, scales in results:
        kernel(values, codes, scales, *noise_arguments(values))
    assert kernel._compiled["cpu"] is not None
    assert all(map(torch.equal, *results))


def test_kernel_is_compiled_after_enough_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: torch.Tensor) -> None:
        calls.append(len(args[0]))
        doubled(*args)

    compile_to(monkeypatch, counted)
    kernel = CompiledKernel(doubled)
    for _ in range(4):
        values, out = sample()
        kernel(values, out)
        assert torch.equal(out, values * 2)
    assert calls == [70, 70, 70], "tried and used at the third call, and used from then on"


def test_kernel_runs_uncompiled_in_a_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def as_torch_compiles(*arguments: torch.Tensor) -> None:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("torch.compile with fullgraph=True found no compiled frames")
        calls.append(None)
        doubled(*arguments)

    compile_to(monkeypatch, as_torch_compiles)
    kernel, (values, out) = CompiledKernel(doubled), sample()
    for _ in range(4):
        with FlopCounterMode(display=False):
            kernel(values, out.zero_())
        assert torch.equal(out, values * 2)
    assert not calls
    for _ in range(3):
        kernel(values, out)
    assert calls, "it is not tried in there, and is afterwards"


@pytest.mark.parametrize("fault", ["raises", "differs", "raises later"])
def test_kernel_runs_uncompiled_without_compiler_or_with_other_bits(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Later: dynamo switched off since, or told to fail where it would compile once more, in the middle of a step."""
    calls = []

    def faulty(values: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(None)
        if fault == "raises" or len(calls) > 1:
            raise RuntimeError("no C++ compiler found")
        out.copy_(values * (2.0000002 if fault == "differs" else 2))

    compile_to(monkeypatch, faulty)
    kernel, (values, out) = CompiledKernel(doubled), sample()
    for _ in range(5):
        kernel(values, out.zero_())
        assert torch.equal(out, values * 2)
    assert len(calls) == (2 if fault == "raises later" else 1), "it is not tried again"
