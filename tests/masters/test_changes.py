"""``mpinit.changes``: a mirror that is fed with it has the weights' bits, whatever happens to them."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from loops import batches, mlp, mse
from torch import nn

import mpinit

WAYS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "init_loss_scale": 2.0**8},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "O3": {"opt_level": "O3", "cast_model_type": "bf16"},
}


def pair(way: str, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(batchnorm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, verbosity=0, **WAYS[way], **more)
    return model, optimizer


def mirrored(model: nn.Module) -> dict[str, torch.Tensor]:
    lower = (torch.float16, torch.bfloat16)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype in lower}


def feed(mirror: dict[str, torch.Tensor], taken: list[Any]) -> int:
    for name, places, values in taken:
        assert places.dtype is torch.int64 and values.dtype is mirror[name].dtype
        mirror[name].view(-1).index_copy_(0, places, values)
    return sum(len(places) for _, places, _ in taken)


def same_bits(mirror: dict[str, torch.Tensor], model: nn.Module) -> bool:
    now = mirrored(model)
    return all(torch.equal(now[name].view(torch.int16), mirror[name].view(torch.int16)) for name in mirror)


def step(model: nn.Module, optimizer: Any, batch: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    with mpinit.scale_loss(mse(model, batch) * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["O2", "O5", "split"])
def test_exactly_the_elements_that_a_step_changed(way: str) -> None:
    model, optimizer = pair(way)
    data = batches(6)
    with mpinit.changes(model) as log:
        for batch in data:
            before = mirrored(model)
            step(model, optimizer, batch)
            taken = {name: (places, values) for name, places, values in log.take()}
            for name, new in mirrored(model).items():
                moved = (new != before[name]).reshape(-1).nonzero().reshape(-1)
                places, values = taken.get(name, (moved[:0], new.reshape(-1)[:0]))
                assert torch.equal(places, moved) and torch.equal(values, new.reshape(-1)[moved])
        assert log.take() == []
    assert not any("3." in name and "1." in name for name in taken)


@pytest.mark.parametrize("way", WAYS)
def test_a_mirror_has_equal_bits_after_a_thousand_random_steps(way: str) -> None:
    chance, data = random.Random(7), batches(8)
    model, optimizer = pair(way, max_consecutive_skips=1000)
    mirror, done = mirrored(model), Counter[str]()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    lower = [p for p in model.parameters() if p.dtype != torch.float32]
    with mpinit.changes(model) as log:
        for number in range(1000):
            what = chance.choices(
                ["step", "skip", "load", "copy_", "data", "master", "float32", "numpy"], [20, *[1] * 7]
            )[0]
            weight = chance.choice(lower)
            if what in ("step", "skip") or (what == "master" and way == "O3"):
                step(model, optimizer, data[number % 8], 1.0 if what == "step" else float("inf"))
            elif what == "load":
                model.load_state_dict({name: value * chance.uniform(0.5, 1.5) for name, value in kept.items()})
            elif what == "copy_":
                weight.detach().view(-1)[0] = chance.uniform(-1, 1)
            elif what == "data":
                weight.data.mul_(1 - 2.0**-6)
            elif what == "numpy":
                weight.detach().view(torch.int16).numpy().reshape(-1)[-1:] ^= 1
            elif what == "master":
                with torch.no_grad():
                    chance.choice(list(mpinit.master_params(optimizer))).mul_(0.99)
            else:
                with mpinit.float32_weights(model), torch.no_grad():
                    next(model.parameters()).mul_(1.001)
            done[what] += 1
            if chance.random() < 0.2:
                feed(mirror, log.take())
                assert same_bits(mirror, model), (number, what)
        feed(mirror, log.take())
        assert same_bits(mirror, model)
        assert min(done.values()) > 10
        step(model, optimizer, data[0])
        expected = mirrored(model)
        mpinit.undo(model)
        feed(mirror, log.take())
    assert all(torch.equal(mirror[name], value) for name, value in expected.items())
    assert log.take() == []


def test_what_is_left_after_the_block_is_given_once_and_the_next_block_begins_anew() -> None:
    model, optimizer = pair("O5")
    mirror = mirrored(model)
    with mpinit.changes(model) as log:
        step(model, optimizer, batches(1)[0])
        with pytest.raises(RuntimeError, match="followed already"), mpinit.changes(model):
            pass
    assert feed(mirror, log.take()) > 0 and same_bits(mirror, model) and log.take() == []
    step(model, optimizer, batches(1)[0])
    with mpinit.changes(model) as log:
        assert log.take() == []


@pytest.mark.parametrize("way", ["O2", "O5", "split"])
def test_followed_or_not_the_bits_of_training_are_the_same(way: str) -> None:
    ends = []
    for follows in (True, False):
        model, optimizer = pair(way)
        with mpinit.changes(model) if follows else torch.enable_grad():
            for batch in batches(5):
                step(model, optimizer, batch)
        ends.append(model.state_dict())
        mpinit.undo(model)
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_weights_laid_out_in_another_order_are_counted_in_their_own() -> None:
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", master_weights="split", verbosity=0)
    mirror = {"weight": model.weight.detach().clone(memory_format=torch.contiguous_format)}
    with mpinit.changes(model) as log:
        (model(torch.randn(1, 3, 5, 5)) ** 2).sum().backward()
        optimizer.step()
        feed(mirror, log.take())
    assert torch.equal(mirror["weight"], model.weight)


def test_what_cannot_be_followed_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="was not initialised"), mpinit.changes(model):
        pass
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5", master_weights="model", verbosity=0)
    with pytest.raises(ValueError, match=r"no 16-bit weights at O5.*state_dict"), mpinit.changes(model):
        pass
