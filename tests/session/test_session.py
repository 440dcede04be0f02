"""Sessions: independent of one another, found from their objects, gone with them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from models import CASES, OPTIMIZERS, level_arguments, train
from torch import nn

import mpinit
from mpinit import registry
from mpinit.functions.installation import INSTALLATION
from mpinit.torch_internals import native_autocast

LEVELS = ["O0", "O1", "O2", "O3"]


def pair(**keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASES["cnn"].build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    mpinit.initialize(model, optimizer, verbosity=0, **keywords)
    return model, optimizer


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    return train(model, optimizer, CASES["cnn"].batches(steps), CASES["cnn"].loss)


@pytest.mark.parametrize("function", [mpinit.state_dict, lambda: mpinit.load_state_dict({})])
def test_without_an_optimizer_there_must_be_one_session(function: Any) -> None:
    with pytest.raises(RuntimeError, match=r"none.*initialize"):
        function()
    pairs = pair(opt_level="O2"), pair(opt_level="O3")
    with pytest.raises(RuntimeError) as caught:
        function()
    for (model, optimizer), level in zip(pairs, ("O2", "O3"), strict=True):
        assert level in str(caught.value)
        assert type(model).__name__ in str(caught.value)
        assert type(optimizer).__name__ in str(caught.value)
    mpinit.undo(pairs[0][0])
    assert "loss_scaler0" in mpinit.state_dict()


@pytest.mark.parametrize("function", [lambda o: mpinit.scale_loss(torch.ones(()), o), mpinit.loss_scale])
def test_an_optimizer_of_no_session_is_told_which_there_are(function: Any) -> None:
    pair(opt_level="O5")
    stranger = OPTIMIZERS["adam"](nn.Linear(1, 1).parameters())
    kept = pair(opt_level="O5")
    with pytest.raises(RuntimeError, match=r"Adam was not initialised.*session \d+ \(O5: Cnn; SGD\)"):
        function(stranger)
    mpinit.undo(kept[0])


def test_one_loss_cannot_belong_to_two_sessions() -> None:
    (_, first), (_, second) = pair(opt_level="O2"), pair(opt_level="O3")
    with pytest.raises(ValueError, match=r"O2.*O3.*one initialize call"):
        mpinit.scale_loss(torch.ones(()), [first, second])


def test_models_and_optimizers_find_their_session_and_undo_ends_it() -> None:
    models = [CASES["cnn"].build(), CASES["unet"].build()]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    mpinit.initialize(models, optimizers, "O2", verbosity=0)
    found = {registry.of(owner) for owner in (*models, *optimizers)}
    assert len(found) == 1 and registry.live() == list(found)
    mpinit.undo(optimizers[1])
    assert all(registry.of(owner) is None for owner in (*models, *optimizers))
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="nothing to undo"):
        mpinit.undo(models[0])


@pytest.mark.parametrize(("level", "more"), [*((level, {}) for level in LEVELS), ("O2", {"master_weights": "split"})])
def test_nothing_is_kept_alive(level: str, more: dict[str, Any]) -> None:
    keywords = level_arguments(level, torch.bfloat16) | more
    model = CASES["cnn"].build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    mpinit.initialize(model, optimizer, **keywords)
    run(model, optimizer)
    held = [model, optimizer, model.head, model.head.weight, registry.of(model), next(mpinit.master_params(optimizer))]
    watched = [weakref.ref(thing) for thing in held]
    del held, model, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    assert "data" not in vars(nn.Parameter)
    assert not native_autocast.is_on(), "casts go with their session"
    mpinit.initialize(CASES["cnn"].build(), opt_level="O1", verbosity=0)
    assert len(INSTALLATION._sessions) == 1, "what stood in torch's namespaces goes at the next initialize at O1"
