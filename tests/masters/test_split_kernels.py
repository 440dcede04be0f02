"""Kernels that join and take apart large split weights: what torch's own operations do, to the bit, in any mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpinit.masters.split_kernels import join_, long_words, take_apart_, words
from torch import nn

import mpinit
from mpinit.basics.checksum import checksums
from mpinit.masters import buckets, float_split, split_kernels
from mpinit.torch_internals import compiled_kernel

SMALL_LARGE = 128


def all_kinds(count: int) -> torch.Tensor:
    """float32 numbers of random bits, among them infinite ones, nan, zeros and ties."""
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[::7] = bits[::7].bitwise_and(-0x10000).bitwise_or(0x8000)
    values = bits.view(torch.float32)
    values[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    return values


def by_operations(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.empty(len(values), dtype=torch.bfloat16)
    remainder = torch.empty(len(values), dtype=torch.int16)
    float_split.split_(values, weight, remainder)
    return weight, remainder, checksums(weight.view(torch.int16).to(torch.int32))


def by_kernels(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.zeros(len(values), dtype=torch.bfloat16)
    remainder = torch.zeros(len(values), dtype=torch.int16)
    sums = torch.empty(len(values) // 64, 1, dtype=torch.int32)
    take_apart_(long_words(values), words(weight), words(remainder), sums)
    return weight, remainder, sums.view(-1)


def check_kernels() -> None:
    values = all_kinds(64 * 1000)
    expected, got = by_operations(values), by_kernels(values)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    joined = torch.empty_like(values)
    join_(words(got[0]), words(got[1]), long_words(joined))
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))


def test_kernels_do_what_operations_do() -> None:
    check_kernels()


def test_so_do_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_JOIN", "_TAKE_APART"):
        kernel = getattr(split_kernels, name)
        fresh = compiled_kernel.CompiledKernel(kernel._function, kernel._sample)
        if not fresh.compile():
            pytest.skip("no compiler here")
        monkeypatch.setattr(split_kernels, name, fresh)
    check_kernels()


@pytest.mark.gpu
def test_they_are_compiled_on_a_gpu() -> None:
    for kernel in (split_kernels._JOIN, split_kernels._TAKE_APART):
        fresh = compiled_kernel.CompiledKernel(kernel._function, kernel._sample)
        assert fresh.compile("cuda")


class Fails(RuntimeError):
    pass


def trained(fails_at: int | None = None) -> list[torch.Tensor]:
    """Weights of all kinds in one bucket: large, in another order of memory, of odd size, small, and one that moves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 2), nn.Flatten(), nn.Linear(64, 30), nn.Linear(30, 64), nn.Linear(64, 3))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
    x = torch.randn(2, 4, 3, 3)
    for index in range(8):
        if index == 3:  # in the middle of a word, from here on
            memory = torch.empty(model[3].weight.numel() + 1, dtype=torch.bfloat16)[1:].view_as(model[3].weight)
            model[3].weight.data = memory.copy_(model[3].weight.detach())
        if index == 5:
            with torch.no_grad():
                model[3].weight[2:4] += 0.25
        optimizer.zero_grad()
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        if index == 6:
            model[0].weight.grad = None
        if index == fails_at:
            hook = optimizer.register_step_post_hook(fail)
            with pytest.raises(Fails):
                optimizer.step()
            hook.remove()
        else:
            optimizer.step()
    mpinit.undo(model)
    return [parameter.detach() for parameter in model.parameters()]


def fail(*given: Any) -> None:
    raise Fails


@pytest.mark.parametrize("fails_at", [None, 4])
def test_steps_by_kernels_are_steps_by_operations(monkeypatch: pytest.MonkeyPatch, fails_at: int | None) -> None:
    expected = trained(fails_at)
    calls = []

    def counted(*given: torch.Tensor) -> None:
        calls.append(len(given[0]))
        join_(*given)

    monkeypatch.setattr(split_kernels, "_LARGE", SMALL_LARGE)
    monkeypatch.setattr(buckets, "are_ready", lambda device, numbers: True)
    monkeypatch.setattr(buckets, "join_", counted)
    got = trained(fails_at)
    # Conv2d's weight and bias have 256 and 16 numbers, the Linears' weights 1920, 1920 and 192. From the step on where
    # one begins in the middle of a word the bucket goes without kernels.
    assert calls == [4, 30, 30, 3] * 3
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


def stepped_once(error: type[BaseException] | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 32), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
    with mpinit.scale_loss(model(torch.randn(2, 16)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    if error is None:
        optimizer.step()
    else:
        with pytest.raises(error):
            optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.undo(model)
    return state


def test_a_write_back_that_fails_half_way_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stepped_once(None)
    monkeypatch.setattr(split_kernels, "_LARGE", SMALL_LARGE)
    monkeypatch.setattr(buckets, "are_ready", lambda device, numbers: True)
    calls = []

    def flaky(*given: torch.Tensor) -> None:
        calls.append(len(given[0]))
        take_apart_(*given)
        if len(calls) == 1:
            raise MemoryError

    monkeypatch.setattr(buckets, "take_apart_", flaky)
    got = stepped_once(MemoryError)
    assert calls == [4, 4, 8]
    assert all(torch.equal(got[name], value) for name, value in expected.items())
