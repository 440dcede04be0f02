"""``audit``: types and bytes against what is there, shares against real steps, and nothing that it changes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import SignDescent, backward, batches, mlp
from models import CASES, prepared
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mpinit
from mpinit import OPT_LEVELS

WIDTHS = (torch.float32, torch.bfloat16)
TOGETHER = {"O0": 16, "O1": 16, "O2": 18, "O3": 8, "O4": 16, "O5": 18, "O5 split": 14}


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def test_bytes_of_each_level_are_those_that_the_papers_count() -> None:
    model = nn.Linear(64, 64)
    found = mpinit.audit(model, adamw(model)).bytes_per_parameter
    assert {level: sum(kinds.values()) for level, kinds in found.items()} == {"now": 16, **TOGETHER}


@pytest.mark.parametrize("level", [*OPT_LEVELS, "O5 split"])
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_bytes_of_an_initialised_pair_are_those_foreseen(name: str, level: str) -> None:
    model, x, loss = prepared(CASES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    foreseen = mpinit.audit(model, optimizer).bytes_per_parameter[level]
    split: Any = {"master_weights": "split"} if "split" in level else {}
    mpinit.initialize(model, optimizer, level[:2], **split)
    assert mpinit.audit(model).bytes_per_parameter["now"] == foreseen
    backward(loss(model(x)), optimizer)
    count = sum(p.numel() for p in model.parameters())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # At O5 gradients of weights with masters are 16-bit until the step.
    if level != "O5" and len(gradients) == len(list(model.parameters())):
        assert sum(g.nbytes for g in gradients) / count == pytest.approx(foreseen["gradients"])
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert sum(v.nbytes for v in states) / count <= foreseen["optimizer state"] + 1e-9
    assert sum(p.nbytes for p in model.parameters()) / count == foreseen["weights"]


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        *[(asked, dtype) for asked in ({}, {"master_weights": "split"}) for dtype in WIDTHS],
        # A bfloat16 model becomes float32 for good, after undo() too.
        ({"master_weights": "model"}, torch.float32),
    ],
)
def test_levels_are_foreseen_from_dtype_that_model_had(asked: dict[str, Any], dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)).to(dtype)
    model[1].requires_grad_(False)
    optimizer = adamw(model)
    before = mpinit.audit(model, optimizer)
    mpinit.initialize(model, optimizer, "O5", **asked)
    after = mpinit.audit(model)
    assert {**after.bytes_per_parameter, "now": None} == {**before.bytes_per_parameter, "now": None}
    is_wide = dtype is torch.float32
    assert ("O4 (weights as loaded)" in str(after)) is not is_wide
    assert ("O1 (weights as loaded)" in str(before)) is not is_wide
    if is_wide:
        assert after.bytes_per_parameter["O1"]["weights"] == 4.0


def test_advice_names_the_parameter_that_moves_least() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64, bias=False)).bfloat16()
    found = mpinit.audit(model, adamw(model, 1e-4))
    assert found.stuck["0.weight"] < found.stuck["1.weight"] == 1.0
    assert "100% of '1.weight'" in found.advice


def test_encoded_states_count_by_their_bytes() -> None:
    model = nn.Linear(128, 128, bias=False)
    optimizer = adamw(model)
    mpinit.initialize(model, optimizer, "O5", optimizer_state="int8")
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    assert mpinit.audit(model).bytes_per_parameter["now"]["optimizer state"] == pytest.approx(2 * (1 + 4 / 128))


@pytest.mark.parametrize("state", ["int8", "bfloat16"])
def test_encoded_states_count_before_the_first_step(state: str) -> None:
    model = nn.Linear(128, 128, bias=False)
    optimizer = adamw(model)
    mpinit.initialize(model, optimizer, "O5", optimizer_state=state)
    before = mpinit.audit(model).bytes_per_parameter["now"]
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    assert before == pytest.approx(mpinit.audit(model).bytes_per_parameter["now"])


def test_rows_say_where_each_number_lives() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5)
    mpinit.initialize(model, optimizer, "O2")
    rows = {row.name: (row.weight, row.master, row.gradient, row.rate) for row in mpinit.audit(model).rows}
    assert rows["0.weight"] == ("float16", "float32", "float32", 0.5)
    assert rows["1.weight"] == ("float32", "", "float32", 0.5)
    assert rows["2.weight"] == ("float16", "", "", None)


def test_share_is_that_of_steps_below_half_unit_in_last_place() -> None:
    """Compute the share by hand for Lion, whose step is its rate."""
    model = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    for rate in (1e-2, 1e-3, 1e-4, 1e-5):
        share = mpinit.audit(model, SignDescent(model.parameters(), rate)).stuck["weight"]
        weight = model.weight.detach().float()
        sides = [((weight + sign * rate).bfloat16().float() == weight).double().mean() for sign in (1, -1)]
        assert share == pytest.approx(float(sum(sides) / 2), abs=0.01)


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-5, 1e-6])
def test_the_share_is_about_that_of_real_steps(rate: float) -> None:
    model = mlp().bfloat16()
    optimizer = adamw(model, rate)
    foreseen = mpinit.audit(model, optimizer).stuck["0.weight"]
    shares = []
    for x, y in batches(24):
        optimizer.zero_grad()
        (model(x.bfloat16()).float() - y).square().mean().backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        shares.append(float((model[0].weight == before).double().mean()))
    assert sum(shares[8:]) / len(shares[8:]) == pytest.approx(foreseen, abs=0.15)


def test_advice_names_masters_and_warns_about_the_rate() -> None:
    model = nn.Linear(64, 64).bfloat16()
    optimizer = adamw(model, 1e-5)
    before = mpinit.audit(model, optimizer)
    assert before.stuck["weight"] > 0.95
    assert "opt_level='O5'" in before.advice and "may be too high" in before.advice
    for split in ({}, {"master_weights": "split"}):
        mpinit.initialize(model, optimizer, "O5", **split)
        after = mpinit.audit(model)
        assert after.stuck["weight"] < 0.05 and after.advice == ""
        mpinit.undo(model)
        model.bfloat16()


def test_sgd_share_depends_on_present_gradients() -> None:
    model = mlp().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = mpinit.audit(model, optimizer)
    assert found.stuck == {} and "audit after a backward pass" in found.advice
    x, y = batches(1)[0]
    (model(x.bfloat16()).float() - y).square().mean().backward()
    foreseen = mpinit.audit(model, optimizer).stuck["0.weight"]
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert foreseen == pytest.approx(float((model[0].weight == before).double().mean()), abs=0.15)
    assert "LBFGS" in mpinit.audit(model, torch.optim.LBFGS(model.parameters())).advice


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile])
def test_wrappers_are_seen_through(wrapper: Any) -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = adamw(model, 1e-6)
    wrapped = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups, state=optimizer.state)
    assert mpinit.audit(wrapper(model), wrapped).stuck == mpinit.audit(model, optimizer).stuck


def test_several_optimizers_are_audited_together() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), adamw(model[1])]
    for passed in (optimizers, tuple(optimizers)):
        found = mpinit.audit(model, passed)
        assert found.bytes_per_parameter["now"]["optimizer state"] == (4 + 8) / 2
        assert [row.rate for row in found.rows] == [0.1, 1e-3] and "no audited" not in found.advice
    one = mpinit.audit(model, optimizers[1]).advice
    assert "1 trainable parameter in no audited optimizer, such as '0.weight': pass a list of all" in one
    mpinit.initialize(model, optimizers, "O5")
    assert mpinit.audit(model).bytes_per_parameter["now"]["optimizer state"] == (4 + 8) / 2
    with pytest.raises(TypeError, match=r"a torch\.optim\.Optimizer, or a list of them, not str"):
        mpinit.audit(model, [optimizers[0], "adamw"])


def test_models_of_several_sessions_are_audited_together() -> None:
    models = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9), adamw(models[1])]
    mpinit.initialize(models[0], optimizers[0], "O2")
    mpinit.initialize(models[1], optimizers[1], "O5", master_weights="split", optimizer_state="int8")
    for found in (mpinit.audit(models), mpinit.audit(models, optimizers)):
        assert [(row.weight, row.master, row.rate) for row in found.rows] == [
            ("float16", "float32", 0.1),
            ("bfloat16", "split", 1e-3),
        ]
        assert [row.state for row in found.rows] == [4.0, pytest.approx(2 * (1 + 4 / 128))]


def test_it_prints_a_table() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])
    found = mpinit.audit(model, adamw(model))
    assert "and 4 more: see .rows" in str(found) and "O5 split" in str(found)
    assert mpinit.audit(model).stuck == {}


def test_audit_refuses_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="needs a module and an optimizer, not int"):
        mpinit.audit(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a torch\.optim\.Optimizer, or a list of them, not str"):
        mpinit.audit(nn.Linear(2, 2), "adamw")


def test_frozen_parameters_of_the_optimizer_are_not_measured() -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    optimizer = adamw(model, 1e-5)
    found = mpinit.audit(model, optimizer)
    assert {row.name: (row.state, row.stuck) for row in found.rows if not row.gradient} == {
        "0.weight": (0.0, None),
        "0.bias": (0.0, None),
    }
    assert found.advice == "" and set(found.stuck) == {"1.weight", "1.bias"}
    trained = sum(p.numel() for p in model[1].parameters()) / sum(p.numel() for p in model.parameters())
    assert found.bytes_per_parameter["O5"]["optimizer state"] == pytest.approx(8 * trained)
    model.requires_grad_(False)
    assert mpinit.audit(model, optimizer).stuck == {}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_shares_do_not_depend_on_the_default_dtype_and_device(default: Any) -> None:
    model = nn.Linear(64, 64).bfloat16()
    expected = mpinit.audit(model, adamw(model, 1e-4)).stuck
    try:
        torch.set_default_device(default) if default == "meta" else torch.set_default_dtype(default)
        assert mpinit.audit(model, adamw(model, 1e-4)).stuck == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_advice_names_the_error_with_which_measuring_failed() -> None:
    model = nn.Linear(4, 4)
    found = mpinit.audit(model, torch.optim.LBFGS(model.parameters()))
    assert found.stuck == {} and "depends on" not in found.advice
    assert "Not measured: updates and states of LBFGS" in found.advice and "closure" in found.advice


def test_step_hooks_of_all_optimizers_do_not_run() -> None:
    model = nn.Linear(4, 1)
    optimizer, ran = adamw(model), []
    hooks = [
        register(lambda *_: ran.append(1))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        mpinit.audit(model, optimizer)
        assert ran == []
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert ran == [1, 1]
    finally:
        for hook in hooks:
            hook.remove()


OTHERS = [torch.uint8, torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", OTHERS)
def test_frozen_parameters_of_other_dtypes_count_by_their_bytes(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.head, model.quantized = nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8, 8, dtype=dtype), False)
    found = mpinit.audit(model, adamw(model.head))
    assert found.bytes_per_parameter["now"]["weights"] == (4 + dtype.itemsize) / 2
    assert {row.name: row.weight for row in found.rows}["quantized"] == str(dtype).removeprefix("torch.")
    if dtype not in (torch.float8_e4m3fn, torch.float64):
        mpinit.initialize(model, adamw(model.head), "O5")
        now = mpinit.audit(model).bytes_per_parameter["now"]
        assert now["weights"] == found.bytes_per_parameter["O5"]["weights"] == (2 + dtype.itemsize) / 2


def test_complex_parameters_are_measured() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
    found = mpinit.audit(model, adamw(model))
    assert found.stuck["weight"] < 0.1 and sum(found.bytes_per_parameter["now"].values()) == 32


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="LazyModule"):
        mpinit.audit(nn.LazyLinear(2))


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize(
    "scheduled",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 100)),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1e-4, total_iters=100),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=100),
    ],
)
def test_share_in_a_warm_up_is_that_of_the_rate_after_it(scheduled: Any, is_tensor: bool) -> None:
    model = nn.Linear(64, 64).bfloat16()

    def optimizer() -> torch.optim.Optimizer:
        return adamw(model, torch.tensor(1e-2) if is_tensor else 1e-2)  # type: ignore[arg-type]

    expected = mpinit.audit(model, optimizer())
    warmed = optimizer()
    scheduled(warmed)
    rate = float(warmed.param_groups[0]["lr"])
    found = mpinit.audit(model, warmed)
    assert rate < 1e-3 and float(warmed.param_groups[0]["lr"]) == rate, "the optimizer keeps its rate"
    assert [row.rate for row in found.rows] == pytest.approx([1e-2, 1e-2]) and " 0.01 " in str(found)
    assert found.stuck["weight"] == pytest.approx(expected.stuck["weight"], abs=0.02)
    assert found.stuck["weight"] < 0.3


def test_callables_on_the_optimizer_do_not_run() -> None:
    """Check a plain function in the place of ``step``, as Accelerate sets: a copy of it would step the original."""
    model = nn.Linear(64, 64).bfloat16()
    optimizer = adamw(model, 1e-5)
    expected = mpinit.audit(model, adamw(model, 1e-5)).stuck
    step, before = optimizer.step, model.weight.detach().clone()
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)  # type: ignore[method-assign]
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    assert mpinit.audit(model, optimizer).stuck == expected
    assert torch.equal(model.weight, before) and not optimizer.state


class Idle(torch.optim.SGD):
    """An optimizer whose copies do nothing: the work is in another object."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_a_step_that_does_nothing_is_not_measured() -> None:
    model = nn.Linear(4, 4).bfloat16()
    found = mpinit.audit(model, Idle(model.parameters(), lr=0.1))
    assert found.stuck == {} and "Not measured" in found.advice and "does nothing" in found.advice
    assert "Not measured" not in mpinit.audit(model, adamw(model, 0.0)).advice


def test_the_advice_comes_before_the_tables() -> None:
    model = nn.Linear(64, 64).bfloat16()
    first = str(mpinit.audit(model, adamw(model, 1e-5))).splitlines()[0]
    assert "of the bfloat16 weights do not change in a step" in first
