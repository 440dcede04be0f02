"""Which optimizers may be stepped a few parameters at a time: known, tried, or refused by name."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from mpinit.masters.per_parameter import check_steps_per_parameter, kept_states
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mpinit
from mpinit.masters import per_parameter


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))]


def check(optimizer: torch.optim.Optimizer) -> None:
    check_steps_per_parameter(optimizer, "this", "that")


ADMITTED = ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


class Mine(torch.optim.Optimizer):
    """What a user writes: momentum of normalised gradients, ``couples`` parameters by a norm or a mean where asked."""

    def __init__(self, params: Any, lr: float = 0.1, couples: str = "") -> None:
        super().__init__(params, {"lr": lr, "couples": couples})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([torch.zeros(()), *(p.grad.norm() for p in members)]).norm()
            group["seen"] = group.get("seen", 0) + 1
            for p in members:
                state = self.state[p]
                if not state:
                    state["average"], state["slow"] = torch.zeros_like(p), p.clone()
                grad = p.grad
                if group["couples"] == "clip":
                    grad = grad * (1 / norm).clamp(max=1)
                if group["couples"] == "late" and group["seen"] > 4:
                    grad = grad / norm
                state["average"].lerp_(grad, 0.1)
                state["slow"].lerp_(p, 0.5)
                p.sub_(state["average"], alpha=group["lr"] / group["seen"])


class NeedsAnArgument(Mine):
    def __init__(self, params: Any, something: Any) -> None:
        super().__init__(params)


@pytest.mark.parametrize("name", [*ADMITTED, "SGD", "SparseAdam"])
def test_torch_own_are_known_without_trying(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_parameter, "tried", None)
    check(getattr(torch.optim, name)(parameters(), lr=0.1))


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "RAdam", "ASGD"])
def test_trying_says_of_torch_own_what_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = getattr(torch.optim, name)(parameters(), lr=0.1)
    kept = kept_states(optimizer)
    monkeypatch.setattr(per_parameter, "_known", lambda optimizer: None)
    check(optimizer)
    assert kept_states(optimizer) == kept


def test_others_are_tried_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Mine(parameters())
    before, random = [p.clone() for p in parameters()], torch.get_rng_state()
    tries = []
    tried = per_parameter.tried
    monkeypatch.setattr(per_parameter, "_verdicts", {})
    monkeypatch.setattr(per_parameter, "tried", lambda optimizer: tries.append(1) or tried(optimizer))
    for _ in range(3):
        check(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.5
    assert len(tries) == 1 and not optimizer.state and "seen" not in optimizer.param_groups[0]
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], before))
    assert torch.equal(torch.get_rng_state(), random)
    assert kept_states(optimizer) == {"slow"}


@pytest.mark.parametrize("couples", ["clip", "late"])
def test_what_couples_parameters_is_refused(couples: str) -> None:
    with pytest.raises(ValueError, match="Mine looks across parameters"):
        check(Mine(parameters(), couples=couples))


def test_what_cannot_be_tried_is_taken_at_the_users_word() -> None:
    optimizer = NeedsAnArgument(parameters(), 3)
    with pytest.raises(ValueError, match=r"NeedsAnArgument is not known .* could not be tried .*something"):
        check(optimizer)
    optimizer.steps_per_parameter = True  # type: ignore[attr-defined]
    check(optimizer)


def test_known_couplings_are_refused_by_name() -> None:
    class Prodigy(Mine):
        pass

    with pytest.raises(ValueError, match="LBFGS looks across parameters"):
        check(torch.optim.LBFGS(parameters()))
    with pytest.raises(ValueError, match="Prodigy looks across parameters"):
        check(Prodigy(parameters()))


def test_hooks_of_all_optimizers_do_not_see_the_throwaway() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *args: seen.append(args))
    try:
        check(Mine(parameters(), lr=0.25, couples="no"))
    finally:
        handle.remove()
    assert not seen


@pytest.mark.parametrize("more", [{"master_weights": "split"}, {"optimizer_state": "int8"}])
def test_a_tried_optimizer_trains_as_with_full_masters(more: dict[str, Any]) -> None:
    results = []
    for extra in ({}, more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
        optimizer = Mine(model.parameters())
        mpinit.initialize(model, optimizer, "O5", verbosity=0, split_bucket_bytes=8192, **extra)
        for index in range(5):
            optimizer.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(index))
            with mpinit.scale_loss(model(x).square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
        assert optimizer.param_groups[0]["seen"] == 5
        results.append({name: value.clone() for name, value in model.state_dict().items()})
        mpinit.undo(model)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-2, atol=1e-3)


def test_split_masters_refuse_what_swaps_weights_between_steps() -> None:
    class Swaps(Mine):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Swaps has train\(\) and eval\(\)"):
        mpinit.initialize(model, Swaps(model.parameters()), "O5", master_weights="split")


def test_a_subclass_of_torchs_that_steps_otherwise_is_tried() -> None:
    class Normalises(torch.optim.SGD):
        def _init_group(self, group: Any, params: Any, grads: Any, *more: Any) -> Any:
            found = super()._init_group(group, params, grads, *more)
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            grads[:] = [grad / norm for grad in grads]
            return found

    class Prints(torch.optim.SGD):
        def state_dict(self) -> Any:
            return super().state_dict()

    with pytest.raises(ValueError, match="Normalises looks across parameters"):
        check(Normalises(parameters(), lr=0.1))
    assert per_parameter.is_known(Prints(parameters(), lr=0.1))


def test_every_group_with_options_of_its_own_is_tried() -> None:
    groups = [{"params": parameters()} for _ in range(5)]
    check(Mine(groups))
    with pytest.raises(ValueError, match="looks across parameters"):
        check(Mine([*groups, {"params": parameters(), "couples": "clip"}]))


def test_what_a_group_holds_is_not_lent_to_the_throwaway() -> None:
    class Remembers(Mine):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["memory"].append(1)
            super().step()

    optimizer = Remembers([{"params": parameters(), "memory": []}])
    check(optimizer)
    assert optimizer.param_groups[0]["memory"] == []


PARTS = [{"master_weights": "split"}, {"optimizer_state": "int8"}, {"gradient_release": True}]
in_parts = pytest.mark.parametrize("more", PARTS, ids=["split", "int8", "release"])


def set_up(more: dict[str, Any], optimizer: Any = None) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(16, 32)
    optimizer = Mine(model.parameters()) if optimizer is None else optimizer(model.parameters())
    mpinit.initialize(model, optimizer, "O5", verbosity=0, split_bucket_bytes=512, **more)
    return model, optimizer


def backward(model: nn.Module, optimizer: Any) -> None:
    with mpinit.scale_loss(model(torch.ones(2, 16)).square().mean(), optimizer) as loss:
        loss.backward()


@in_parts
def test_a_step_put_on_the_object_is_refused(more: dict[str, Any]) -> None:
    def clipping(params: Any, **given: bool) -> torch.optim.Optimizer:
        optimizer: Any = torch.optim.SGD(params, lr=0.1)
        inner = optimizer.step

        def step(self: Any, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
            return inner(closure)

        optimizer.step = types.MethodType(step, optimizer)
        vars(optimizer).update(given)
        return optimizer  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=r"step\(\) of this SGD was replaced on the object"):
        set_up(more, clipping)
    with pytest.raises(ValueError, match="replaced on the object"):
        set_up(more, lambda params: with_scheduler(clipping(params)))
    set_up(more, functools.partial(clipping, steps_per_parameter=True))


def with_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


@in_parts
def test_what_torch_puts_around_a_step_is_no_step_of_the_objects_own(more: dict[str, Any]) -> None:
    set_up(more, lambda params: with_scheduler(torch.optim.SGD(params, lr=0.1)))
    model, optimizer = set_up(more, lambda params: with_scheduler(Mine(params)))
    mpinit.undo(model)
    with_scheduler(optimizer)
    mpinit.initialize(model, optimizer, "O5", verbosity=0, **more)


@in_parts
def test_a_group_that_couples_parameters_is_not_added(more: dict[str, Any]) -> None:
    model, optimizer = set_up(more)
    later = nn.Linear(16, 32)
    with pytest.raises(ValueError, match="Mine looks across parameters"):
        optimizer.add_param_group({"params": list(later.parameters()), "couples": "clip"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(later.parameters())})
    backward(nn.Sequential(model, nn.Flatten()), optimizer)
    optimizer.step()


@in_parts
def test_coupling_parameters_later_is_refused_before_a_step(more: dict[str, Any]) -> None:
    model, optimizer = set_up(more)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.param_groups[0]["couples"] = "clip"
    with pytest.raises(ValueError, match="Mine looks across parameters"):
        backward(model, optimizer)
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    optimizer.param_groups[0]["couples"] = ""
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert not torch.equal(model.state_dict()["weight"], before["weight"])


def test_numbers_that_move_are_no_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    tried = per_parameter.tried
    monkeypatch.setattr(per_parameter, "_verdicts", {})
    monkeypatch.setattr(per_parameter, "tried", lambda optimizer: tries.append(1) or tried(optimizer))
    model, optimizer = set_up({"master_weights": "split", "optimizer_state": "int8"})
    for index in range(6):
        backward(model, optimizer)
        optimizer.param_groups[0]["betas"] = (0.5 + index / 100, 0.9)
        optimizer.step()
    # At first, and when the groups had got their counters and betas.
    assert len(tries) <= 3
