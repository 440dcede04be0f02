"""The optimizers under apex's names, against the formulas of their papers in float64 and against torch's own.

Below the public face: these classes are what scripts import as ``apex.optimizers``.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from loops import iterate

import mpinit
from mpinit.compat.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedSGD
from mpinit.optimizer import parts

Step = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]

STEPS = 6


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]


def gradients() -> list[list[torch.Tensor]]:
    torch.manual_seed(2)
    return [[torch.randn(3, 4) * 3, torch.randn(5)] for _ in range(STEPS)]


def train(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
    params = weights()
    optimizer = make(params)
    for grads in gradients():
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return [p.detach() for p in params]


def expect(step: Step, scale: Callable[[list[torch.Tensor]], float] = lambda grads: 1.0) -> list[torch.Tensor]:
    """The same training by a formula for one parameter, in float64."""
    params = [p.detach().double() for p in weights()]
    states: list[dict[str, Any]] = [{}, {}]
    for number, grads in enumerate(gradients(), start=1):
        factor = scale(grads)
        for index, grad in enumerate(grads):
            states[index]["t"] = number
            params[index] = step(params[index], grad.double() * factor, states[index])
    return [p.float() for p in params]


def adam(wd: float = 0.0, l2: bool = False, fix: bool = True) -> Step:
    def step(w: torch.Tensor, g: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
        g = g + wd * w if l2 else g
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
        m, v = (s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])) if fix else (s["m"], s["v"])
        return w - 0.1 * (m / (v.sqrt() + 1e-8) + (0 if l2 else wd) * w)

    return step


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_adam(bias_correction: bool, adam_w_mode: bool) -> None:
    given = {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode}
    got = train(lambda p: FusedAdam(p, lr=0.1, weight_decay=0.05, **given))
    expected = expect(adam(wd=0.05, l2=not adam_w_mode, fix=bias_correction))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_adam_is_torchs_own_bit_for_bit_and_fused() -> None:
    params = weights()
    assert FusedAdam(params).param_groups[0]["fused"], "the CPU has the fused kernel"
    got = train(lambda p: FusedAdam(p, lr=0.1, weight_decay=0.05))
    assert all(map(torch.equal, got, train(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.05, fused=True))))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov: bool) -> None:
    def step(w: torch.Tensor, g: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
        g = g + 0.05 * w
        s["buffer"] = 0.9 * s["buffer"] + g if "buffer" in s else g
        return w - 0.1 * (g + 0.9 * s["buffer"] if nesterov else s["buffer"])

    got = train(lambda p: FusedSGD(p, 0.1, momentum=0.9, weight_decay=0.05, nesterov=nesterov))
    torch.testing.assert_close(got, expect(step), rtol=1e-5, atol=1e-6)


def lamb(wd: float = 0.0, l2: bool = False, fix: bool = True, average: bool = True, nvlamb: bool = False) -> Step:
    def step(w: torch.Tensor, g: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
        g = g + wd * w if l2 else g
        s["m"] = 0.9 * s.get("m", 0) + (0.1 if average else 1.0) * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
        m, v = (s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])) if fix else (s["m"], s["v"])
        update = m / (v.sqrt() + 1e-6) + (0 if l2 else wd) * w
        ratio = w.norm() / update.norm() if (wd or nvlamb) and w.norm() > 0 and update.norm() > 0 else 1.0
        return w - 0.1 * ratio * update

    return step


def shrunk(limit: float) -> Callable[[list[torch.Tensor]], float]:
    """The factor that brings the norm of all gradients down to a limit."""

    def factor(grads: list[torch.Tensor]) -> float:
        norm = torch.stack([grad.double().norm() for grad in grads]).norm().item()
        return min(1.0, limit / norm)

    return factor


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("use_nvlamb", [False, True])
def test_lamb(bias_correction: bool, adam_w_mode: bool, weight_decay: float, use_nvlamb: bool) -> None:
    given = {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode, "use_nvlamb": use_nvlamb}
    got = train(lambda p: FusedLAMB(p, lr=0.1, weight_decay=weight_decay, **given))
    formula = lamb(weight_decay, l2=not adam_w_mode, fix=bias_correction, nvlamb=use_nvlamb)
    torch.testing.assert_close(got, expect(formula, shrunk(1.0)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [0.0, None, 3.0, 1e6])
def test_lamb_clips_the_norm_of_all_groups_together(limit: float | None) -> None:
    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p]} for p in params]
        return FusedLAMB(groups, lr=0.1, max_grad_norm=limit, weight_decay=0.05, grad_averaging=False)

    factor = shrunk(limit) if limit else lambda grads: 1.0
    expected = expect(lamb(0.05, average=False), factor)
    torch.testing.assert_close(train(make), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedAdagrad])
def test_optimizers_equal_a_loop_over_masters(kind: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    half = copy.deepcopy(model).half()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    by_hand = kind(masters, lr=0.01, weight_decay=0.01)
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.01)
    mpinit.initialize(model, optimizer, "O2", loss_scale=1024.0)
    for index in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(index))
        iterate(model(x).square().mean(), optimizer)
        half.zero_grad()
        (half(x.half()).float().square().mean() * 1024).backward()
        with torch.no_grad():
            for weight, master in zip(half.parameters(), masters, strict=True):
                master.grad = weight.grad.float() / 1024
            by_hand.step()
            for weight, master in zip(half.parameters(), masters, strict=True):
                weight.copy_(master)
        assert all(map(torch.equal, model.state_dict().values(), masters))


def test_adagrad() -> None:
    def step(w: torch.Tensor, g: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
        g = g + 0.05 * w
        s["h"] = s.get("h", 0) + g * g
        return w - 0.1 * g / (s["h"].sqrt() + 1e-10)

    got = train(lambda p: FusedAdagrad(p, lr=0.1, weight_decay=0.05))
    torch.testing.assert_close(got, expect(step), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table, other = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Parameter(torch.ones(2))
    optimizer = FusedLAMB([other, table.weight], lr=0.1)
    (table(torch.tensor([1])).sum() + other.sum()).backward()
    with pytest.raises(RuntimeError, match="FusedLAMB takes no sparse gradients"):
        optimizer.step()
    assert torch.equal(other, torch.ones(2))


def test_decoupled_decay_is_refused_where_torch_has_none() -> None:
    with pytest.raises(RuntimeError, match="wd_after_momentum=True: omit it"):
        FusedSGD(weights(), lr=0.1, wd_after_momentum=True)
    with pytest.raises(RuntimeError, match="adagrad_w_mode=True: omit it"):
        FusedAdagrad(weights(), adagrad_w_mode=True)


EVERY = [
    pytest.param(lambda p: FusedAdam(p, lr=0.1, bias_correction=False), id="adam"),
    pytest.param(lambda p: FusedSGD(p, lr=0.1, momentum=0.9), id="sgd"),
    pytest.param(lambda p: FusedLAMB(p, lr=0.1, use_nvlamb=True), id="lamb"),
    pytest.param(lambda p: FusedAdagrad(p, lr=0.1), id="adagrad"),
]


@pytest.mark.parametrize("make", EVERY)
def test_a_state_dict_resumes_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    params, copies = weights(), weights()
    optimizer, resumed = make(params), make(copies)
    for number, grads in enumerate(gradients()):
        if number == 3:
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for p, copied in zip(params, copies, strict=True):
                copied.data.copy_(p.data)
        for group in (params, copies) if number >= 3 else (params,):
            for p, grad in zip(group, grads, strict=True):
                p.grad = grad.clone()
        optimizer.step()
        if number >= 3:
            resumed.step()
    assert all(map(torch.equal, params, copies))


@pytest.mark.parametrize("make", EVERY)
def test_groups_may_be_generators_and_gradients_missing(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    first, second = weights()
    optimizer = make([{"params": (p for p in [first])}, {"params": [second], "lr": 0.5}])
    optimizer.step()
    first.grad = torch.ones_like(first)
    before = second.detach().clone()
    optimizer.step()
    assert torch.equal(second, before)
    optimizer.zero_grad()
    assert first.grad is None or not first.grad.any()


def test_a_checkpoint_of_apexs_own_adam_loads() -> None:
    """Load a state with step counts per group, and without torch's own options."""
    params = weights()
    optimizer = FusedAdam(params, lr=0.1)
    moments = {"exp_avg": torch.ones(3, 4), "exp_avg_sq": torch.full((3, 4), 4.0)}
    group = {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer.load_state_dict({"state": {0: moments}, "param_groups": [{**group, "step": 7, "params": [0, 1]}]})
    state: dict[str, Any] = {"t": 8, "m": torch.ones(3, 4).double(), "v": torch.full((3, 4), 4.0).double()}
    grad = gradients()[0][0]
    expected = adam()(params[0].detach().double(), grad.double(), state)
    params[0].grad = grad
    optimizer.step()
    torch.testing.assert_close(params[0].detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["decoupled_weight_decay"], "adam_w_mode is not lost"


@pytest.mark.parametrize("kind", [FusedLAMB, FusedAdagrad])
def test_a_checkpoint_in_apexs_form_goes_on(kind: Any) -> None:
    """Load states as apex writes them: a step count per group, none of torch's options."""
    params, copies = weights(), weights()
    optimizer, resumed = kind(params, lr=0.1), kind(copies, lr=0.5)
    for number, grads in enumerate(gradients()):
        if number == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            state = {index: {k: v for k, v in own.items() if k != "step"} for index, own in saved["state"].items()}
            names = (
                "lr",
                "eps",
                "weight_decay",
                "betas",
                "bias_correction",
                "grad_averaging",
                "max_grad_norm",
                "params",
            )
            group = {name: value for name, value in saved["param_groups"][0].items() if name in names}
            resumed.load_state_dict({"state": state, "param_groups": [{**group, "step": 3}]})
            for p, copied in zip(params, copies, strict=True):
                copied.data.copy_(p.data)
        for each, own in ((optimizer, params), (resumed, copies))[: 1 + (number >= 3)]:
            for p, grad in zip(own, grads, strict=True):
                p.grad = grad.clone()
            each.step()
    assert all(map(torch.equal, params, copies)) and resumed.param_groups[0]["lr"] == 0.1


def test_amsgrad_is_refused() -> None:
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedAdam(weights(), amsgrad=True)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedLAMB(weights(), amsgrad=True)


def test_sgd_steps_parameters_that_become_16_bit_later() -> None:
    model = torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    model.bfloat16()
    added = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [added]})
    for parameter in (model.weight, added):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (model.weight == 0.5).all() and (added == 0.5).all()


def trained_in_16_bit(
    make: Callable[[Any], torch.optim.Optimizer], bucket: int = 40_000, **keywords: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
    optimizer = make(model.parameters())
    with mock.patch.object(parts, "BUCKET_BYTES", bucket):
        mpinit.initialize(model, optimizer, "O5", **keywords)
        for index in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(index))
            iterate((model(x) - x).square().mean(), optimizer)
    return model, optimizer


@pytest.mark.parametrize("keywords", [{"optimizer_state": "int8"}, {"master_weights": "split"}])
@pytest.mark.parametrize("name", ["adam", "adam, no correction", "sgd"])
def test_parameters_are_stepped_few_at_time_to_same_numbers(name: str, keywords: dict[str, Any]) -> None:
    """Compare with torch's optimizer; where it has no such option, with a step of all parameters together."""
    kinds: dict[str, tuple[Any, Any]] = {
        "adam": (lambda p: FusedAdam(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0, fused=True)),
        "adam, no correction": (lambda p: FusedAdam(p, lr=0.01, bias_correction=False), None),
        "sgd": (lambda p: FusedSGD(p, 0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    }
    make, reference = kinds[name]
    model, optimizer = trained_in_16_bit(make, **keywords)
    if reference is None:
        other, other_optimizer = trained_in_16_bit(make, bucket=2**24, **keywords)
    else:
        other, other_optimizer = trained_in_16_bit(reference, **keywords)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    states, other_states = (each.state_dict()["state"] for each in (optimizer, other_optimizer))
    assert states.keys() == other_states.keys()
    for index, state in states.items():
        other_state = other_states[index]
        assert all(torch.equal(state[key], other_state[key]) for key in state if torch.is_tensor(state[key]))
        assert name == "sgd" or state["step"] == 4


def test_subclass_mixing_parameters_is_refused_encoded_states() -> None:
    """Check that what is known of FusedAdam is not believed of a class derived from it."""

    class WithNorm(FusedAdam):
        def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
            found = super()._init_group(group, *lists)
            torch._foreach_div_(lists[1], torch.nn.utils.get_total_norm(lists[1]))
            return found

    model = torch.nn.Linear(64, 96)
    with pytest.raises(ValueError, match="does not know whether WithNorm updates each parameter by itself"):
        mpinit.initialize(model, WithNorm(model.parameters()), "O5", optimizer_state="int8")


@pytest.mark.parametrize("make", EVERY)
def test_copied_and_unpickled_optimizers_clear_gradients(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    for copied in (copy.deepcopy(make(weights())), pickle.loads(pickle.dumps(make(weights())))):
        for parameter in copied.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        copied.step()
        copied.zero_grad()
        assert all(p.grad is None or not p.grad.any() for p in copied.param_groups[0]["params"])
