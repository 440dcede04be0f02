"""Watched parameters: .data access is noticed, and nothing is left behind."""

from __future__ import annotations

import gc

import torch
from mpinit.torch_internals.parameter_watching import Watcher
from torch import nn


def test_reading_and_replacing_data_is_noticed_for_watched_parameters_only() -> None:
    watcher = Watcher()
    read, replaced, untouched, stranger = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    for parameter in (read, replaced, untouched):
        watcher.watch(parameter)
    read.data.add_(1)
    replaced.data = torch.ones(2)
    stranger.data.add_(1)
    assert set(watcher.handed_out) == {read, replaced}
    assert torch.equal(read, torch.ones(2)) and torch.equal(replaced, torch.ones(2))
    watcher.close()


def test_the_class_is_as_before_when_nothing_is_watched() -> None:
    before = dict(vars(nn.Parameter))
    first, second, parameter = Watcher(), Watcher(), nn.Parameter(torch.zeros(1))
    first.watch(parameter)
    second.watch(nn.Parameter(torch.zeros(1)))
    assert "data" in vars(nn.Parameter)
    first.unwatch(parameter)
    assert "data" in vars(nn.Parameter)
    second.close()
    assert dict(vars(nn.Parameter)) == before


def test_a_watcher_that_is_dropped_leaves_nothing_behind() -> None:
    gc.collect()
    before = dict(vars(nn.Parameter))
    watcher, parameter = Watcher(), nn.Parameter(torch.zeros(1))
    watcher.watch(parameter)
    del watcher
    gc.collect()
    assert dict(vars(nn.Parameter)) == before
    parameter.data.add_(1)
