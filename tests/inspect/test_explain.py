"""explain: which operation casts, why, and what that costs.

Below the public face: the report is compared with a count of the dispatcher's operations.
"""

import copy
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import batches, iterate, mse, started
from models import CASES, Parts, prepared, sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpinit
from mpinit import OPT_LEVELS
from mpinit.compat.apex import amp as face
from mpinit.inspect.trace import OperationsSeen

NETWORKS = ["cnn", "lstm", "transformer"]
LEVELS = [None, *OPT_LEVELS]


class Counting(TorchDispatchMode):
    """How often every operation runs: a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def counted(report: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in report.rows:
        found[row.op] += row.count
    return found


def first_forward_checks_inputs(model: nn.Module, x: Any) -> None:
    """Run the forward in which mpinit checks the inputs."""
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NETWORKS)
def test_counts_agree_with_a_count_of_their_own(name: str, level: str | None) -> None:
    model, x, loss = prepared(CASES[name])
    before = mpinit.explain(model, x, loss=loss, opt_level=level)
    if level is not None:
        mpinit.initialize(model, sgd(model), level)
        # An optimizer's masters change what arrives on weights, and so the last operations of the backward pass.
        initialised = mpinit.explain(model, x, loss=loss)
        assert initialised.level == before.level == level
        first_forward_checks_inputs(model, x)
        with Counting() as counting:
            loss(model(x)).backward()
        assert counted(initialised) == counting.seen
        mpinit.undo(model)
        model, x, loss = prepared(CASES[name])
        mpinit.initialize(model, opt_level=level)
        first_forward_checks_inputs(model, x)
    with Counting() as counting:
        loss(model(x)).backward()
    assert counted(before) == counting.seen
    forward = {row.module for row in before.rows if row.phase == "forward"}
    backward = {row.module for row in before.rows if row.why.startswith("backward of")}
    assert backward - {"(loss)"} <= forward, "a backward operation belongs to its forward's module"
    assert len(backward) > 2


def test_in_evaluation_the_paths_are_those_of_evaluation() -> None:
    model, x, _ = prepared(CASES["transformer"])
    model.eval()
    with torch.no_grad():
        report = mpinit.explain(model, x)
        with Counting() as counting:
            model(x)
    assert counted(report) == counting.seen
    assert not [row for row in report.rows if row.phase == "backward"]


def mixed(self: Any, x: Tensor) -> Tensor:
    """Casts of its own, a function without casts, and a softmax."""
    h = self.layer(x)
    with mpinit.disable_casts():
        a = torch.softmax(h, -1)
    b = h.float().mul(2)
    return self.norm(a + b).to(h.dtype)  # type: ignore[no-any-return]


def reasons(report: Any) -> Mapping[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for row in report.rows:
        if row.phase == "forward":
            found.setdefault((row.module, row.op), []).append(row)
    return found


def test_rows_under_the_cast_policy() -> None:
    model = Parts(mixed, layer=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    report = mpinit.explain(model, torch.randn(2, 4), loss=lambda y: F.mse_loss(y, y * 2), opt_level="O1")
    why = reasons(report)
    assert why["layer", "addmm"][0].inputs == ("float16",)
    assert why["layer", "_to_copy"][0].why == "cast: float32 to float16"
    assert why["norm", "native_layer_norm"][0].why == "weights are float32"
    assert why["", "add"][0].why == "promotion: float16 with float32 returns float32"
    (softmax,) = why["", "_softmax"]
    assert softmax.flagged, "casts were switched off there"
    assert [row.op for row in report.flagged] == ["_softmax"]
    casts = [row for row in why["", "_to_copy"] if "float32 to float16" in row.why]
    assert casts[0].cast_bytes >= 2 * 4 * 2


@pytest.mark.parametrize(("level", "lower"), [("O2", "float16"), ("O3", "float16"), ("O5", "bfloat16")])
def test_why_with_16_bit_weights(level: str, lower: str) -> None:
    report = mpinit.explain(CASES["cnn"].build(), torch.randn(2, 1, 8, 8), opt_level=level)
    why = reasons(report)
    assert why["features.0", "convolution"][0].why == f"weights are {lower}"
    assert why["features.0", "convolution"][0].inputs == (lower,)
    assert why["features.2", "relu"][0].why == f"inputs are {lower}"
    norm = why["features.1", "native_batch_norm"][0].why
    assert norm == (
        f"weights are {lower}" if level == "O3" else f"promotion: {lower} with float32 returns {lower}, float32"
    )
    assert [row.why for row in why["", "_to_copy"]] == [f"cast: float32 to {lower}", f"cast: {lower} to float32"]


def test_modules_kept_in_float32_say_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    mpinit.initialize(model, sgd(model), "O2", keep_fp32=nn.LayerNorm)
    report = mpinit.explain(model, torch.randn(2, 4), loss=torch.sum)
    why = reasons(report)
    assert why["1", "native_layer_norm"][0].why == "weights are float32"
    assert report.flagged == ()
    mpinit.undo(model)
    assert [row.module for row in mpinit.explain(model, torch.randn(2, 4), opt_level="O2").flagged] == ["1"]


def test_what_runs_is_a_copy_with_the_sessions_properties() -> None:
    model, apexs = nn.Linear(4, 4), Parts(lambda self, x: F.gelu(self.inner(x)), inner=nn.Linear(4, 4))
    mpinit.initialize(model, opt_level="O2", cast_model_type=False, master_weights=False)
    assert {row.outputs for row in mpinit.explain(model, torch.randn(2, 4)).rows} == {("float32",)}
    mpinit.undo(model)
    face.initialize(apexs, opt_level="O1")
    outputs = {row.op: row.outputs for row in mpinit.explain(apexs, torch.randn(2, 4)).rows}
    assert outputs["gelu"] == ("float32",), "which apex runs in float32, and torch in 16 bits"


@pytest.mark.parametrize("wrapper", [None, nn.DataParallel, torch.compile])
def test_one_of_two_models_and_one_in_a_wrapper(wrapper: Any) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)]
    models[1].add_module("head", nn.Linear(4, 4))
    optimizer = sgd(nn.ModuleList(models))
    mpinit.initialize(models, optimizer, "O2", keep_fp32=["1", "head"])
    given = models[0] if wrapper is None else wrapper(models[0])
    why = reasons(mpinit.explain(given, torch.randn(2, 4)))
    inside = "module." if wrapper is nn.DataParallel else ""
    assert why[f"{inside}0", "addmm"][0].why == "weights are float16"
    assert why[f"{inside}1", "native_layer_norm"][0].why == "weights are float32"
    mpinit.undo(models[0])


def test_loss_may_use_other_tensors_and_original_may_not_run() -> None:
    model, other, x = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), torch.ones(1, 4, requires_grad=True)
    mpinit.explain(model, x, loss=lambda y: (y * other).sum() + model.weight.norm())
    assert other.grad is model.weight.grad is x.grad is None
    with pytest.raises(ValueError, match=r"was run inside mpinit\.explain, and not the copy of it"):
        mpinit.explain(model, x, loss=lambda y: (y - model(x)).sum())
    model(x)


def test_it_prints_a_table() -> None:
    report = mpinit.explain(nn.LayerNorm(4), torch.randn(2, 4), opt_level="O2", loss=torch.sum)
    text = str(report)
    assert "LayerNorm at O2" in text
    assert "! weights are float16" in text
    assert max(map(len, text.splitlines())) < 200


def test_explain_refuses_wrong_arguments() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, not function"):
        mpinit.explain(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss must be a function"):
        mpinit.explain(model, x, loss=1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        mpinit.explain(model, x, loss=lambda y: y)
    with pytest.raises(ValueError, match="'O9' is not a level"):
        mpinit.explain(model, x, opt_level="O9")
    with pytest.raises(ValueError, match="lazy"):
        mpinit.explain(nn.LazyLinear(2), x, opt_level="O2")
    model.lock = (lambda: (yield))()  # generators cannot be copied
    with pytest.raises(ValueError, match=r"Linear cannot be copied.*explain the part"):
        mpinit.explain(model, x, opt_level="O2")
    del model.lock
    mpinit.initialize(model, sgd(model), "O2")
    with pytest.raises(ValueError, match=r"initialised already.*drop opt_level='O5'"):
        mpinit.explain(model, x, opt_level="O5")
    assert copy.deepcopy(model).weight.dtype is torch.float32


class Around(nn.Module):
    """A module of the user's around an initialised model, whose name for it no wrapper documents."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 2


def test_module_around_an_initialised_model_runs_with_its_casts() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, "O2")
    outer = Around(model)
    assert reasons(mpinit.explain(outer, x))["net.0", "addmm"][0].inputs == ("float16",)
    assert mpinit.fidelity(outer, x).served == "float16"
    assert {row.master for row in mpinit.audit(outer).rows} == {"float32"}


def test_part_of_an_initialised_model_is_refused_by_what_runs_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    mpinit.initialize(model, sgd(model), "O2")
    for part in (model[0], model[1], nn.Sequential(model[0])):
        for tool in (mpinit.explain, mpinit.fidelity):
            with pytest.raises(
                ValueError, match=r"is a part of an initialised model.*pass mpinit\.\w+ the whole model"
            ):
                tool(part, x)
    assert [row.master for row in mpinit.audit(model[0]).rows] == ["float32", "float32"]
    other = nn.Sequential(nn.Linear(4, 4), model[1])
    assert mpinit.explain(other, x).level == "", "a shared module without parameters makes no part"
    mpinit.initialize(other[0], sgd(other[0]), "O5")
    with pytest.raises(ValueError, match="contains models of several sessions"):
        mpinit.explain(nn.Sequential(model, other[0]), x)


OWN = str(Path(mpinit.__file__).parent)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    iterate(mse(model, batches(1)[0]), optimizer)


def operations_and_calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], Counter[str]]:
    """Operations, and Python calls of the package's own code by file and function, of one good step."""
    operations: list[str] = []
    calls: Counter[str] = Counter()

    def around(operation: Any, args: Any, kwargs: Any, run: Any) -> Any:
        operations.append(str(operation))
        return run()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    one_step(model, optimizer)
    with OperationsSeen(around):
        one_step(model, optimizer)
    sys.setprofile(profile)
    try:
        one_step(model, optimizer)
    finally:
        sys.setprofile(None)
    return operations, calls


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_reports_cost_nothing_on_good_steps(level: str) -> None:
    model, optimizer = started(level)
    _, calls = operations_and_calls(model, optimizer)
    watching = ("overflow_log.py", "operations.py")
    assert not [name for name in calls if name.startswith(f"{OWN}/inspect") or name.split(":")[0].endswith(watching)]
    told = [calls[name] for name in calls if name.endswith("note_overflow")]
    assert sum(told) <= 1, "once a backward pass, whatever the number of parameters"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_reports_leave_no_operation_behind(level: str) -> None:
    model, optimizer = started(level)
    before = operations_and_calls(model, optimizer)
    with mpinit.watch_overflow(model):
        one_step(model, optimizer)
    assert operations_and_calls(model, optimizer) == before
