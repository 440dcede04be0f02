"""An optimizer for each parameter, stepped by torch's hook inside of backward(): same bits, and no gradients."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import backward, bytes_held
from models import Parts
from states_by_name import assert_same
from torch import Tensor, nn

import mpinit

SPLIT: dict[str, Any] = {"master_weights": "split"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("O5", {}),
    "float16": ("O2", {"loss_scale": 1.0}),
    "split": ("O5", SPLIT),
    "full-int8": ("O5", {"optimizer_state": "int8"}),
    "split-int8": ("O5", SPLIT | {"optimizer_state": "int8"}),
    "model": ("O5", {"master_weights": "model"}),
    "O0": ("O0", {}),
    "O4": ("O4", {}),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda members: torch.optim.AdamW(members, lr=3e-3, weight_decay=0.1),
    "Adam fused": lambda members: torch.optim.Adam(members, lr=0.01, fused=True),
    "SGD": lambda members: torch.optim.SGD(members, lr=0.1, momentum=0.9, foreach=False),
}


def net() -> Any:
    """Tied weights, a layer used twice, and one that is frozen."""

    def run(self: Any, x: Tensor) -> Tensor:
        hidden = self.twice(self.embedding(x)).tanh()
        hidden = hidden + self.frozen(self.twice(hidden).tanh())
        return self.head(self.norm(self.once(hidden)))  # type: ignore[no-any-return]

    layers = {name: nn.Linear(24, 24) for name in ("twice", "once", "frozen")}
    others = {"norm": nn.LayerNorm(24), "head": nn.Linear(24, 200, bias=False)}
    model: Any = Parts(run, embedding=nn.Embedding(200, 24), **layers, **others)
    model.frozen.requires_grad_(False)
    model.head.weight = model.embedding.weight
    return model


def step_in_backward(optimizers: dict[nn.Parameter, torch.optim.Optimizer]) -> None:
    def step(parameter: Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randint(200, (4, 6), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_ordinary_loop(kind: str, name: str) -> None:
    ends = []
    level, extra = KINDS[kind]
    for is_in_backward in (True, False):
        torch.manual_seed(0)
        model = net()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizers = {parameter: OPTIMIZERS[name]([parameter]) for parameter in trained}
        every = list(optimizers.values())
        mpinit.initialize(model, every, level, skip_nonfinite=False, **extra)
        if is_in_backward:
            step_in_backward(optimizers)
        for seed in range(4):
            if is_in_backward:
                loss_of(model, seed).backward()
                continue
            backward(loss_of(model, seed), every)
            for optimizer in every:
                optimizer.step()
                optimizer.zero_grad()
        states = {name: optimizers[p].state_dict() for name, p in model.named_parameters() if p in optimizers}
        ends.append([model.state_dict(), states])
        assert all(parameter.grad is None for parameter in model.parameters())
        assert mpinit.step_counts(optimizers[model.once.weight]) == (4, 0)
        mpinit.undo(model)
    assert_same(*ends, dtype=None)


@pytest.mark.parametrize(("kind", "bytes_each"), [("split-int8", 6.15), ("full", 14.05), ("O0", 12.05)])
def test_bytes_a_parameter_with_adam_in_and_after_backward(kind: str, bytes_each: float) -> None:
    gc.collect()
    before, seen = bytes_held(), []
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    optimizers: Any = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}
    level, extra = KINDS[kind]
    mpinit.initialize(model, list(optimizers.values()), level, skip_nonfinite=False, **extra)
    step_in_backward(optimizers)
    for _ in range(2):
        loss = model(torch.ones(1, 512)).sum()
        model[0].weight.register_hook(lambda _: seen.append(bytes_held()))
        loss.backward()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    buffers = 1 if kind == "split-int8" else 0  # one weight's master and gradient in float32, of eight
    held = [(each - before) / numbers - buffers for each in (bytes_held(), seen[1])]
    assert held[0] <= bytes_each and held[1] <= bytes_each + 0.6  # in the pass also one weight's gradient


def test_step_in_backward_refuses_scaled_loss() -> None:
    model = nn.Linear(4, 2)
    optimizers: Any = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    every = list(optimizers.values())
    mpinit.initialize(model, every, "O2")
    step_in_backward(optimizers)
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside .*scale_loss"):
        backward(model(torch.ones(1, 4)).sum(), every)
    assert mpinit.step_counts(every[0]) == (0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # by that package's import
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_optimizers_that_torch_puts_into_backward_train(level: str) -> None:
    """Call torch's function after ``initialize``: a change of dtype drops the hooks that it registers."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    def train(model: nn.Module) -> list[Tensor]:
        before = [weight.detach().float().clone() for weight in model.parameters()]
        for _ in range(2):
            model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
        return [weight.detach().float() - old for weight, old in zip(model.parameters(), before, strict=True)]

    def apply(model: nn.Module) -> list[torch.optim.Optimizer]:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        return [made for weight in model.parameters() for made in weight._in_backward_optimizers]  # type: ignore[attr-defined]

    torch.manual_seed(0)
    plain, model = nn.Linear(4, 2), nn.Linear(4, 2)
    model.load_state_dict(plain.state_dict())
    early = copy.deepcopy(plain)
    apply(plain)
    apply(early)
    expected = train(plain)
    if level == "O5":
        with pytest.raises(ValueError, match=r"_apply_optimizer_in_backward.*await_optimizers.*add_optimizers"):
            mpinit.initialize(early, opt_level=level)
    else:
        torch.testing.assert_close(train(mpinit.initialize(early, opt_level=level)), expected)
    mpinit.initialize(model, opt_level=level, await_optimizers=True)
    mpinit.add_optimizers(apply(model))
    torch.testing.assert_close(train(model), expected, rtol=0.05, atol=0.01)
