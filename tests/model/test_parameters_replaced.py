"""Parameters, and data of parameters, that were put into a model after ``initialize``."""

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward, batches, iterate, mlp, mse, plain_sgd, start
from torch import nn
from torch.nn.utils import parametrizations

import mpinit

KINDS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, model": {"opt_level": "O5", "master_weights": "model"},
}


def made(kind: str, trained: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD([p for part in model[-trained:] for p in part.parameters()], lr=0.1)
    mpinit.initialize(model, optimizer, **KINDS[kind])
    return model, optimizer


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "O0"])
def test_a_new_head_that_no_optimizer_steps_is_warned_of_by_name(kind: str) -> None:
    model, optimizer = made(kind)
    model[1] = nn.Linear(4, 5, dtype=model[1].weight.dtype)
    before = model[1].weight.detach().clone()
    backward(model(torch.randn(3, 4)).square().mean(), optimizer)
    with pytest.warns(UserWarning, match=r"2 parameters were put into the model .*'1.weight', '1.bias'"):
        optimizer.step()
    assert torch.equal(model[1].weight, before), "as in plain torch"
    backward(model(torch.randn(3, 4)).square().mean(), optimizer)
    optimizer.step()  # once


@pytest.mark.parametrize("kind", KINDS)
def test_other_changes_of_a_model_are_no_reason_to_warn(kind: str) -> None:
    for change in ("none", "an adapter", "a smaller one", "given to the optimizer", "weights that are not trained"):
        model, optimizer = made(kind, trained=1 if change == "weights that are not trained" else 2)
        dtype = model[1].weight.dtype
        match change:
            case "an adapter":
                model.append(nn.Linear(3, 3, dtype=dtype))
            case "a smaller one":
                model[1] = nn.Identity()
            case "given to the optimizer":
                model[1] = nn.Linear(4, 5, dtype=dtype)
                optimizer.add_param_group({"params": list(model[1].parameters())})
            case "weights that are not trained":
                model[0] = nn.Linear(4, 4, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backward(model(torch.randn(3, 4)).square().mean(), optimizer)
            optimizer.step()


def test_weight_norm_after_initialize_is_warned_of() -> None:
    model, optimizer = made("O5")
    parametrizations.weight_norm(model[1])
    backward(model(torch.randn(3, 4)).square().mean(), optimizer)
    with pytest.warns(UserWarning, match=r"'1.parametrizations.weight.original0'"):
        optimizer.step()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
}


def trained_in_16_bits(optimizer: str, dtype: torch.dtype, shape: str, by_hand: bool, late: bool) -> list[torch.Tensor]:
    """Train six iterations, with other data of all weights in the third and the fifth; return all weights of all."""
    model, x = mlp(), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    made = OPTIMIZERS[optimizer](model.parameters())
    if by_hand:
        model.to(dtype)
    else:
        mpinit.initialize(model, made, "O3", cast_model_type=dtype)

    def replace(hidden: int) -> None:
        shapes = [(hidden, 6), (hidden,), (3, hidden), (3,)]
        for parameter, new in zip(model.parameters(), shapes, strict=True):
            values = torch.linspace(-0.5, 0.7, torch.Size(new).numel()).reshape(new)
            parameter.data = values.to(dtype) if by_hand else values

    seen = []
    for iteration in range(6):
        replaces = iteration in (2, 4)
        hidden = iteration + 3 if shape == "another" else 8
        if replaces and shape == "another":
            made.state.clear()  # of the shape before, as are the gradients
            made.zero_grad()
        if replaces and not late:
            replace(hidden)
        loss = model(x.to(dtype) if by_hand else x).float().square().mean()
        if by_hand:
            loss.backward()
        else:
            backward(loss, made)
        if replaces and late:
            replace(hidden)
        del loss  # its graph has the shapes of before
        made.step()
        made.zero_grad()
        seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def test_parameter_with_the_id_of_a_freed_one_is_stepped() -> None:
    """Replace a part in model and optimizer, and make parameters elsewhere until one has the id of a freed one."""
    model, optimizer = made("O5")
    old = set(map(id, model[1].parameters()))
    model[1] = nn.Identity()
    optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if id(p) not in old]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    others: list[nn.Parameter] = []
    while not others or (id(others[-1]) not in old and len(others) < 20_000):
        others.append(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    if id(others[-1]) not in old:
        pytest.skip("the memory is used by something else")
    others[-1].grad = torch.ones(2, dtype=torch.bfloat16)
    torch.optim.SGD(others[-1:], lr=0.5).step()
    assert others[-1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("O0", "O1")])
@pytest.mark.parametrize("which", ["0.weight", "1.weight"])
def test_swap_tensors_after_a_step_trains_the_new_numbers(kind: str, which: str) -> None:
    """Exchange a weight's ``grad_dtype``, too: its next gradient is 16-bit."""

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        chance = torch.Generator().manual_seed(0)
        for index in range(4):
            optimizer.zero_grad()
            backward(model(torch.randn(8, 4, generator=chance)).float().square().mean(), optimizer)
            optimizer.step()
            if index == 1:
                weight = model.get_parameter(which)
                torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.5))
        return [value.float() for value in model.state_dict().values()]

    torch.manual_seed(0)
    ours = trained(*made(kind))
    torch.manual_seed(0)
    by_torch = trained(*made("O0"))
    for mine, its in zip(ours, by_torch, strict=True):
        torch.testing.assert_close(mine, its, rtol=0.01, atol=0.002)


@pytest.mark.parametrize("is_inserted", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_of_a_module_that_is_added_later_are_unscaled(level: str, is_inserted: bool) -> None:
    """Unscale gradients of a module that came in after the first iteration, once an optimizer has it; or refuse."""
    model, reference, data = mlp(), mlp(), batches(2)
    optimizer, plain = start(model, level, make=plain_sgd), plain_sgd(reference.parameters())
    iterate(mse(model, data[0]), optimizer)
    mse(reference, data[0]).backward()
    plain.step()
    plain.zero_grad()
    torch.manual_seed(1)
    head = nn.Linear(3, 3)
    copied = copy.deepcopy(head)
    head.to(model[0].weight.dtype)
    if is_inserted:
        model.insert(4, head)  # calls no hook of torch
    else:
        model.append(head)
    reference.append(copied)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": list(head.parameters())})
    backward(mse(model, data[1]), optimizer)
    mse(reference, data[1]).backward()
    torch.testing.assert_close(head.weight.grad.float(), copied.weight.grad, rtol=1e-2, atol=1e-3)
    plain.add_param_group({"params": list(copied.parameters())})
    optimizer.step()
    plain.step()
    torch.testing.assert_close(head.weight.detach().float(), copied.weight.detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_added_after_backward_are_refused(level: str) -> None:
    model, data = mlp(), batches(2)
    optimizer = start(model, level, make=plain_sgd)
    iterate(mse(model, data[0]), optimizer)
    model.append(nn.Linear(3, 3, dtype=model[0].weight.dtype))
    backward(mse(model, data[1]), optimizer)
    optimizer.add_param_group({"params": list(model[4].parameters())})
    with pytest.raises(RuntimeError, match=r"'4.weight' was added to the optimizer after backward.*add_param_group"):
        optimizer.step()
