"""Kernels that are compiled where that pays: the same bits, and without a compiler the function as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpinit.masters.codecs import blockwise
from mpinit.torch_internals import compiled_kernel
from mpinit.torch_internals.compiled_kernel import CompiledKernel


def doubled(values: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(values * 2)


def sample() -> list[torch.Tensor]:
    return [torch.rand(70, 3), torch.empty(70, 3)]


def compiled_by(function: Any) -> Any:
    return lambda *args, **kwargs: function


def test_compiled_encoding_gives_the_same_bits() -> None:
    """compile() itself compares all that is written on a sample; here, other numbers than the sample's."""
    kernel = blockwise._ENCODE
    one, other = (CompiledKernel(kernel._function, kernel._sample) for _ in range(2))
    if not other.compile():
        pytest.skip("no compiler here")
    arguments = [torch.cat([t, t.flip(0)]) if t.dim() == 2 else t for t in kernel._sample()]
    twins = [argument.clone() for argument in arguments]
    one(*arguments)
    other(*twins)
    assert all(map(torch.equal, arguments, twins))


def test_it_is_compiled_when_it_pays_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: torch.Tensor) -> None:
        calls.append(len(args[0]))
        doubled(*args)

    monkeypatch.setattr(torch, "compile", compiled_by(counted))
    monkeypatch.setattr(compiled_kernel, "_WORTH_ROWS", 150)
    kernel = CompiledKernel(doubled, sample)
    for _ in range(3):
        values, out = sample()
        kernel(values, out)
        assert torch.equal(out, values * 2)
    # Tried on the sample at the third call, and used from then on; never on a few rows.
    assert calls == [70, 70]
    kernel(values[:5], out[:5])
    assert calls == [70, 70]


def test_inside_of_a_mode_that_sees_operations_it_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_torch_compiles(*arguments: torch.Tensor) -> None:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("torch.compile with fullgraph=True found no compiled frames")
        doubled(*arguments)

    monkeypatch.setattr(torch, "compile", compiled_by(as_torch_compiles))
    monkeypatch.setattr(compiled_kernel, "_WORTH_ROWS", 50)
    kernel, (values, out) = CompiledKernel(doubled, sample), sample()
    for compiled in (False, True):
        out.zero_()
        with FlopCounterMode(display=False):
            kernel(values, out)
        assert torch.equal(out, values * 2)
        assert bool(kernel._compiled) == compiled, "it is not tried in there, and is afterwards"
        kernel(values, out)


@pytest.mark.parametrize("fault", ["raises", "differs", "raises later"])
def test_without_a_compiler_or_with_other_bits_it_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Later: dynamo switched off since, or told to fail where it would compile once more, in the middle of a step."""
    calls = []

    def faulty(values: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(None)
        if fault == "raises" or len(calls) > 1:
            raise RuntimeError("no C++ compiler found")
        out.copy_(values * (2.0000002 if fault == "differs" else 2))

    monkeypatch.setattr(torch, "compile", compiled_by(faulty))
    kernel, (values, out) = CompiledKernel(doubled, sample), sample()
    assert kernel.compile() is (fault == "raises later")
    for _ in range(2):
        out.zero_()
        kernel(values, out)
        assert torch.equal(out, values * 2)
    assert len(calls) == (2 if fault == "raises later" else 1), "it is not tried again"
