"""Calls of parts of copied models, from outside and within: copies and replicas run their own weights."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autoencoder import BF16, F16, F32, Autoencoder, by_hand
from models import quietly
from torch import Tensor, nn

import mpinit


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_parts_of_a_copy_run_their_own_weights(duplicate: Callable[[Any], Any]) -> None:
    model = quietly(Autoencoder())
    twin = duplicate(model)
    x = torch.randn(3, 4)
    expected = model.encoder(x)
    if duplicate is copy.deepcopy:
        # In float32, with the masters' bits.
        torch.testing.assert_close(twin.encoder(x), expected, rtol=1e-2, atol=1e-3)
        expected = twin.encoder(x)
    assert torch.equal(twin.encoder(x), expected)
    mpinit.undo(model)
    assert torch.equal(twin.encoder(x), expected), "the copy does not notice"
    nn.init.zeros_(twin.encoder[2].weight), nn.init.zeros_(twin.encoder[2].bias)
    assert not twin.encoder(x).any()
    assert twin(x).dtype is F32


def test_a_copied_part_works_inside_the_model_it_is_put_into() -> None:
    model = quietly(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seen: list[torch.dtype] = []
    model.append(copy.deepcopy(model[0]))
    model.append(nn.Linear(4, 4).half())
    model[2].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert model(torch.randn(2, 4)).dtype is F32
    assert seen == [F16]


def test_a_copy_can_be_initialised_at_another_level() -> None:
    model = quietly(Autoencoder())
    twin = copy.deepcopy(model)
    quietly(twin, "O5")
    x = torch.randn(3, 4)
    assert torch.equal(twin.encoder(x), by_hand(twin, x, BF16))
    twin(x)


def test_replicas_of_a_part_run_the_replicas_weights_in_threads_of_their_own() -> None:
    model = quietly(Autoencoder())
    part = model.encoder[0]
    replica = part._replicate_for_data_parallel()
    for name, parameter in part.named_parameters():
        setattr(replica, name, torch.zeros_like(parameter))
    results: dict[str, Tensor] = {}

    def run() -> None:
        results["16"], results["32"] = replica(torch.ones(1, 4, dtype=F16)), replica(torch.ones(1, 4))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert {key: value.dtype for key, value in results.items()} == {"16": F16, "32": F32}
    assert not results["16"].any() and not results["32"].any()
