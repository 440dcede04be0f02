"""After a plain backward pass masters show its gradients at once: to whoever walks over parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpinit

KINDS = pytest.mark.parametrize("masters", [True, "split"])
X = torch.linspace(-1, 1, 12).view(3, 4)


def begin(masters: Any, late: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    keywords: dict[str, Any] = {"opt_level": "O5", "master_weights": masters, "verbosity": 0}
    if late:
        mpinit.initialize(model, await_optimizers=True, **keywords)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if late:
        mpinit.add_optimizers(optimizer)
    else:
        mpinit.initialize(model, optimizer, **keywords)
    return model, optimizer


def in_groups(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(X).square().sum()  # type: ignore[no-any-return]


@KINDS
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_groups_show_the_models_gradients(masters: Any, late: bool, passes: int) -> None:
    model, optimizer = begin(masters, late)
    for _ in range(2):
        for _ in range(passes):
            loss_of(model).backward()
        assert all(p.grad is w.grad is not None for p, w in zip(in_groups(optimizer), model.parameters(), strict=True))
        optimizer.step()
        optimizer.zero_grad()


@KINDS
@pytest.mark.parametrize("how", ["norm", "value", "clear", "scale"])
def test_what_is_done_over_groups_counts(masters: Any, how: str) -> None:
    moved = []
    for over_groups in (True, False):
        model, optimizer = begin(masters)
        loss_of(model).backward()
        parameters = in_groups(optimizer) if over_groups else list(model.parameters())
        if how == "norm":
            nn.utils.clip_grad_norm_(parameters, 0.01)
        elif how == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        for parameter in parameters:
            if how == "clear":
                parameter.grad = None
            elif how == "scale":
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
        before = [values.clone() for values in model.state_dict().values()]
        optimizer.step()
        moved.append([now - was for now, was in zip(model.state_dict().values(), before, strict=True)])
    assert all(map(torch.equal, *moved))
    largest = max(float(change.abs().max()) for change in moved[0])
    assert largest == 0 if how == "clear" else 0 < largest < 2


@KINDS
def test_a_masters_gradient_that_was_replaced_is_not_lost_to_a_backward_pass(masters: Any) -> None:
    model, optimizer = begin(masters)
    loss_of(model).backward()
    entry = in_groups(optimizer)[0]
    assert entry.grad is not None
    entry.grad = torch.ones_like(entry.grad)
    with pytest.raises(RuntimeError, match=r"replaced, and then backward\(\) added to the weight's.*zero_grad"):
        loss_of(model).backward()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


@KINDS
def test_a_gradient_that_a_step_replaces_is_no_write_of_the_users(masters: Any) -> None:
    class Centred(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in in_groups(self):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad - parameter.grad.mean()
            return super().step(closure)

    Centred.steps_per_parameter = True  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = Centred(model.parameters(), lr=0.5)
    mpinit.initialize(model, optimizer, "O5", master_weights=masters, verbosity=0)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        model.zero_grad()


@KINDS
def test_undo_gives_torch_its_backward_back(masters: Any) -> None:
    plain = torch.autograd.backward
    first, second = begin(masters)[0], begin(masters)[0]
    assert torch.autograd.backward is not plain
    mpinit.undo(first)
    assert torch.autograd.backward is not plain
    mpinit.undo(second)
    assert torch.autograd.backward is plain


@KINDS
def test_a_pass_that_fails_shows_what_arrived_and_why_it_failed(masters: Any) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("in the middle")

    model, optimizer = begin(masters)
    hidden = Fails.apply(model[0](X))  # type: ignore[index]
    last = model[2].weight  # type: ignore[index]
    with pytest.raises(ArithmeticError, match="in the middle"):
        model[2](hidden.tanh()).sum().backward()  # type: ignore[index]
    assert last.grad is not None
    assert in_groups(optimizer)[2].grad is last.grad


@KINDS
def test_a_pass_inside_a_pass_is_no_end(masters: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model, optimizer = begin(masters)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).square().sum().backward()
    seen = [p.grad for p in in_groups(optimizer)]
    assert all(g is not None and g is w.grad for g, w in zip(seen, model.parameters(), strict=True))


@KINDS
def test_a_loss_over_several_optimizers_of_which_one_takes_part(masters: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.5) for i in (0, 2)]
    mpinit.initialize(model, optimizers, "O5", master_weights=masters, verbosity=0)
    with mpinit.scale_loss(loss_of(model), optimizers[0]) as loss:
        loss.backward()
    for optimizer, layer in zip(optimizers, (model[0], model[2]), strict=True):
        assert all(p.grad is w.grad is not None for p, w in zip(in_groups(optimizer), layer.parameters(), strict=True))


@KINDS
def test_a_block_that_was_left_without_its_end_holds_nothing_back(masters: Any) -> None:
    model, optimizer = begin(masters)
    block = mpinit.scale_loss(loss_of(model), optimizer)
    block.__enter__()
    del block
    loss_of(model).backward()
    assert all(p.grad is w.grad is not None for p, w in zip(in_groups(optimizer), model.parameters(), strict=True))


@KINDS
def test_a_model_that_is_dropped_is_freed(masters: Any) -> None:
    import gc
    import weakref

    model, optimizer = begin(masters)
    loss_of(model).backward()
    optimizer.step()
    gone = weakref.ref(model[0].weight)  # type: ignore[index]
    del model, optimizer
    gc.collect()
    assert gone() is None


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@KINDS
def test_under_ddp_groups_show_what_the_ranks_have_made_of_them(masters: Any) -> None:
    model, optimizer = begin(masters)
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        loss_of(parallel).backward()
        for entry, weight in zip(in_groups(optimizer), model.parameters(), strict=True):
            assert entry.grad is not None and weight.grad is not None
            assert torch.equal(entry.grad.float(), weight.grad.float())
        nn.utils.clip_grad_norm_(in_groups(optimizer), 0.01)
        before = [values.clone() for values in model.state_dict().values()]
        optimizer.step()
        moved = [(now - was).norm() for now, was in zip(model.state_dict().values(), before, strict=True)]
        assert torch.stack(moved).norm() < 0.0052  # lr times the limit, and the rounding of 16-bit gradients
        optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.usefixtures("_process_group")
@KINDS
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("clear", ["optimizer", "groups", "model"])
def test_accumulation_under_ddp_adds_up_and_is_cleared(masters: Any, view: bool, clear: str) -> None:
    model, optimizer = begin(masters)
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
    alone, by_hand = begin(masters)
    for _ in range(2):
        for target in (parallel, alone):
            for _ in range(2):
                loss_of(target).backward()
        for entry, other in zip(in_groups(optimizer), in_groups(by_hand), strict=True):
            assert entry.grad is not None and other.grad is not None
            torch.testing.assert_close(entry.grad.float(), other.grad.float(), atol=2e-2, rtol=2e-2)
        optimizer.step()
        by_hand.step()
        by_hand.zero_grad()
        if clear == "optimizer":
            optimizer.zero_grad()
        elif clear == "model":
            model.zero_grad()
        else:
            for entry in in_groups(optimizer):
                entry.grad = None


@pytest.mark.usefixtures("_process_group")
def test_under_ddp_an_edited_copy_is_not_lost_to_the_next_backward_pass() -> None:
    model, optimizer = begin(True)
    parallel = nn.parallel.DistributedDataParallel(model)
    loss_of(parallel).backward()
    nn.utils.clip_grad_norm_(in_groups(optimizer), 0.01)
    with pytest.raises(RuntimeError, match=r"replaced, and then backward\(\) added|was changed on the weight"):
        loss_of(parallel).backward()
        optimizer.step()


@pytest.mark.parametrize("backend", ["aot_eager"])
@KINDS
def test_of_compiled_models_too(masters: Any, backend: str) -> None:
    torch._dynamo.reset()
    model, optimizer = begin(masters)
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        loss_of(fast).backward()
        assert all(p.grad is w.grad is not None for p, w in zip(in_groups(optimizer), model.parameters(), strict=True))
        optimizer.step()
        optimizer.zero_grad()


@KINDS
def test_a_replaced_gradient_stays_where_a_pass_does_not_reach_its_weight(masters: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in model]
    mpinit.initialize(model, optimizers, "O5", master_weights=masters, verbosity=0)
    first, second = model
    second(first(X).repeat(1, 2)).sum().backward()
    entry = in_groups(optimizers[0])[0]
    assert entry.grad is not None
    entry.grad = torch.ones_like(entry.grad)
    for backward in (lambda: second(X).sum().backward(), lambda: scaled(second(X).sum(), optimizers[1])):
        backward()
    before = model.state_dict()["0.weight"].clone()
    optimizers[0].step()
    assert torch.equal(model.state_dict()["0.weight"], before - 0.5)


def scaled(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


@KINDS
@pytest.mark.parametrize("when", ["before backward", "after backward", "while leaving"])
def test_a_kept_traceback_does_not_keep_a_block_open(masters: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = begin(masters)
    block: Any = mpinit.scale_loss(loss_of(model), optimizer)

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError) as kept, block as scaled_loss:
        if when != "before backward":
            scaled_loss.backward()
        if when == "while leaving":
            monkeypatch.setattr(block._bystanders, "after_backward", fail)
        else:
            fail()
    there = when == "after backward"  # what has arrived stays, as in plain torch
    assert all((p.grad is not None) is there for p in in_groups(optimizer))
    assert all(p.grad is w.grad for p, w in zip(in_groups(optimizer), model.parameters(), strict=True))
    loss_of(model).backward()
    assert all(p.grad is w.grad is not None for p, w in zip(in_groups(optimizer), model.parameters(), strict=True))
    assert kept.tb is not None and block is not None
