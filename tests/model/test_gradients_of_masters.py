"""A master that ``master_params`` yields and its weight have one gradient, wherever the gradient comes from."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpinit

LEVELS: dict[str, dict[str, Any]] = {"O2": {"opt_level": "O2", "loss_scale": 128.0}, "O5": {"opt_level": "O5"}}
X = torch.randn(8, 4)


def initialised(level: str) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return model, optimizer, list(mpinit.master_params(optimizer))


def loss_of(model: nn.Module) -> Tensor:
    return model(X).float().square().mean()


def penalty_on(masters: list[nn.Parameter]) -> Tensor:
    return 0.5 * sum(master.square().sum() for master in masters)


def backward(loss: Tensor, optimizer: torch.optim.Optimizer, scaled: bool) -> None:
    if scaled:
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()


def assert_gradients(model: nn.Module, masters: list[nn.Parameter], expected: list[Tensor]) -> None:
    """Compare the gradients of weights and masters, which are the same objects, with those expected."""
    for weight, master, gradient in zip(model.parameters(), masters, expected, strict=True):
        assert weight.grad is master.grad
        torch.testing.assert_close(master.grad, gradient)


@pytest.mark.parametrize(("level", "scaled"), [("O2", True), ("O5", True), ("O5", False)])
@pytest.mark.parametrize("order", ["cleared before the forward", "cleared before the backward", "after a block"])
def test_penalty_on_masters_adds_its_gradient(order: str, level: str, scaled: bool) -> None:
    """Train with a loss that contains the masters: each gradient is that of the data, and the master's value."""
    model, optimizer, masters = initialised(level)
    for _ in range(3):
        if order == "after a block":
            with mpinit.float32_weights(model):
                pass
        optimizer.zero_grad()
        backward(loss_of(model), optimizer, scaled)
        expected = [weight.grad + master.detach() for weight, master in zip(model.parameters(), masters, strict=True)]
        if order == "cleared before the backward":
            loss = loss_of(model) + penalty_on(masters)
            optimizer.zero_grad()
        else:
            optimizer.zero_grad()
            loss = loss_of(model) + penalty_on(masters)
        backward(loss, optimizer, scaled)
        assert_gradients(model, masters, expected)
        before = [master.detach().clone() for master in masters]
        optimizer.step()
        for master, value, gradient in zip(masters, before, expected, strict=True):
            torch.testing.assert_close(master.detach(), value - 0.5 * gradient)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ["p", "pd", "dp", "pp", "bb"])
def test_backward_passes_of_penalty_and_data_add_up(order: str, level: str) -> None:
    """Accumulate passes of the penalty (p), the data (d), and both (b), in scaled losses of their own."""
    model, optimizer, masters = initialised(level)
    backward(loss_of(model), optimizer, scaled=True)
    data = [weight.grad.clone() for weight in model.parameters()]
    optimizer.zero_grad()
    penalties = len(order) - order.count("d")
    expected = [(len(order) - order.count("p")) * g + penalties * m for g, m in zip(data, masters, strict=True)]
    for each in order:
        loss = {"p": lambda: penalty_on(masters), "d": lambda: loss_of(model)}.get(
            each, lambda: loss_of(model) + penalty_on(masters)
        )()
        backward(loss, optimizer, scaled=True)
    assert_gradients(model, masters, [each.detach() for each in expected])


def test_master_gradient_set_between_forward_and_plain_backward_counts() -> None:
    model, _, masters = initialised("O5")
    loss_of(model).backward()
    data = [weight.grad.clone() for weight in model.parameters()]
    for new in (None, torch.ones_like):
        loss = loss_of(model)
        for master in masters:
            master.grad = None if new is None else new(master)
        loss.backward()
        assert_gradients(model, masters, data if new is None else [gradient + 1 for gradient in data])


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("level", "scaled"), [("O2", True), ("O5", True), ("O5", False)])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.usefixtures("process_group")
def test_gradients_of_masters_in_a_process_group_follow_every_write(wrapped: bool, level: str, scaled: bool) -> None:
    """Accumulate two passes, divide, and clip the list that was kept, twice: at first gradients are None, then 0."""
    model, optimizer, masters = initialised(level)
    called = DistributedDataParallel(model) if wrapped else model
    for _ in range(2):
        backward(loss_of(called), optimizer, scaled)
        once = [weight.grad.float().clone() for weight in model.parameters()]
        backward(loss_of(called), optimizer, scaled)
        torch.testing.assert_close([m.grad for m in masters], [2 * g for g in once], rtol=0.01, atol=1e-4)
        for weight in model.parameters():
            weight.grad.div_(4)
        norm = torch.nn.utils.clip_grad_norm_(masters, 0.01)
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in once]).norm() / 2, rtol=0.01, atol=0)
        before = [master.detach().clone() for master in masters]
        optimizer.step()
        for master, value, gradient in zip(masters, before, once, strict=True):
            torch.testing.assert_close(
                master.detach(), value - 0.5 * gradient / 2 * (0.01 / norm), rtol=0, atol=1e-4 * gradient.abs().max()
            )
        optimizer.zero_grad(set_to_none=False)
    del called


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_a_kept_list_after_gradients_were_replaced_is_refused(level: str) -> None:
    """Replace gradients, then clip masters: a list that was made before has the old gradients, a new one is right."""
    model, optimizer, kept = initialised(level)
    norms = []
    for is_kept in (True, False):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer, scaled=True)
        norms.append(torch.stack([weight.grad.norm() for weight in model.parameters()]).norm())
        for weight in model.parameters():
            weight.grad = weight.grad / 4
        masters = kept if is_kept else list(mpinit.master_params(optimizer))
        norms.append(torch.nn.utils.clip_grad_norm_(masters, 0.01))
        if is_kept:
            with pytest.raises(RuntimeError, match=r"'0.weight' was replaced.*master_params\(optimizer\) anew"):
                optimizer.step()
    optimizer.step()
    torch.testing.assert_close(norms[3], norms[2] / 4)


def test_replaced_gradients_are_not_refused_after_clipping_and_accumulation() -> None:
    """Write to gradients in place, and replace them after that, in every iteration."""
    model, optimizer, masters = initialised("O5")
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(model).backward()
        for weight in model.parameters():
            weight.grad = weight.grad / 2
        assert next(iter(mpinit.master_params(optimizer))).grad is model[0].weight.grad
        torch.nn.utils.clip_grad_norm_(masters, 0.01)
        optimizer.step()


def test_writes_to_masters_count_if_another_layer_leaves_model_and_optimizer() -> None:
    """Write to a master and to its gradient, and remove the last layer before the step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mpinit.initialize(model, optimizer, "O5")
    masters = list(mpinit.master_params(optimizer))
    loss_of(model).backward()
    del model[2]
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:4]
    expected = masters[0].detach() / 2 - 0.5
    with torch.no_grad():
        masters[0].mul_(0.5)
    masters[0].grad = torch.ones_like(masters[0])
    optimizer.step()
    assert torch.equal(model.state_dict()["0.weight"], expected)


@pytest.mark.parametrize("place", ["in the block", "after the block", "after a clip"])
@pytest.mark.parametrize(("level", "scaled"), [("O2", True), ("O5", True), ("O5", False)])
def test_gradient_may_be_replaced_after_mpinit_has_scaled_it(level: str, scaled: bool, place: str) -> None:
    """Scaling and unscaling are no writes of the user's: the replacement counts, and is no contradiction."""
    model, optimizer, masters = initialised(level)
    backward(loss_of(model), optimizer, scaled)
    once = [master.grad.clone() for master in masters if master.grad is not None]
    if place == "in the block" and scaled:
        with mpinit.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
            for weight in model.parameters():
                weight.grad = weight.grad / 2
        expected = once
    else:
        backward(loss_of(model), optimizer, scaled)
        if place == "after a clip":
            mpinit.clip_grad_norm_(optimizer, 1e6)
        for weight in model.parameters():
            weight.grad = weight.grad / 4
        expected = [gradient / 2 for gradient in once]
    list(mpinit.master_params(optimizer))
    assert_gradients(model, masters, expected)
    optimizer.step()
    mpinit.undo(model)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_and_attributes_of_a_master_stay_after_a_block(level: str) -> None:
    """Register a hook on a master: inside a block the parameter has the weight's hooks, after it its own again."""
    model, optimizer, masters = initialised(level)
    calls: list[str] = []
    masters[0].register_hook(lambda _: calls.append("master"))
    masters[0].tag = "own"  # type: ignore[attr-defined]
    model[0].weight.mark = "weight"
    for _ in range(2):
        with mpinit.float32_weights(model):
            assert model[0].weight.mark == "weight" and not hasattr(model[0].weight, "tag")
            model[0].weight.register_hook(lambda _: calls.append("weight"))
    assert masters[0].tag == "own" and not hasattr(masters[0], "mark")  # type: ignore[attr-defined]
    assert model[0].weight.mark == "weight" and not hasattr(model[0].weight, "tag")
    backward(loss_of(model), optimizer, scaled=True)
    assert calls == ["weight", "weight"]
    optimizer.zero_grad()
    backward(penalty_on(masters), optimizer, scaled=True)
    assert calls == ["weight", "weight", "master"]
    mpinit.undo(model)
