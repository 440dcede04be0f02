"""mpinit.TrainState in one process: files, levels, several optimizers, and states that do not fit.

Below the public face: the state is read.
"""

import copy
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import adam, backward, batches, mlp, momentum, mse, plain_sgd, train, train_plainly
from models import LEVELS
from states_by_name import assert_same
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

import mpinit
from mpinit import TrainState

Pair = tuple[nn.Module, Optimizer]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def build(level: str, seed: int = 0, make: Callable[[Any], Optimizer] = adam, **more: Any) -> Pair:
    model = mlp(seed)
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, **LEVELS[level] | more)
    return model, optimizer


def copied(state: TrainState) -> dict[str, Any]:
    return copy.deepcopy(state.state_dict())


def without_scalers(state: dict[str, Any]) -> dict[str, Any]:
    return {part: entries for part, entries in state.items() if part != "scalers"}


def test_train_state_is_a_stateful_of_torch() -> None:
    assert isinstance(TrainState(*build("O2")), Stateful)


@pytest.mark.parametrize(("level", "steps"), [*((level, 3) for level in LEVELS), ("O0", 0), ("O2", 0), ("split", 0)])
@pytest.mark.parametrize("make", [adam, momentum])
def test_resuming_from_files_changes_no_bit(make: Any, level: str, steps: int, tmp_path: Path) -> None:
    if level == "O3" and make is adam:
        pytest.skip("Adam's epsilon is 0 in float16")
    model, optimizer = build(level, make=make)
    state = TrainState(model, optimizer)
    train(model, optimizer, batches(steps))
    dcp.save({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    train(model, optimizer, batches(3, seed=5))
    end = copied(state)
    mpinit.undo(model)
    again, resumed = build(level, 7, make)
    state = TrainState(again, resumed)
    dcp.load({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    train(again, resumed, batches(3, seed=5))
    assert_same(copied(state), end, dtype=None)


@pytest.mark.parametrize("given", [{}, {"grad_dtype": torch.float32}], ids=["", "grad_dtype"])
@pytest.mark.parametrize("level", ["O2", "split", "int8"])
def test_reading_a_state_creates_no_optimizer_state(level: str, given: dict[str, Any]) -> None:
    model, optimizer = build(level, **given)
    plain, plain_optimizer = build(level, **given)
    TrainState(plain, plain_optimizer).state_dict()
    assert not plain_optimizer.state
    with pytest.raises(ValueError, match="nothing was loaded"):
        TrainState(plain, plain_optimizer).load_state_dict({})
    assert not plain_optimizer.state
    for pair in ((model, optimizer), (plain, plain_optimizer)):
        train(*pair, batches(3))
    assert_same(copied(TrainState(plain, plain_optimizer)), copied(TrainState(model, optimizer)), dtype=None)


@pytest.mark.filterwarnings("ignore:the state was saved where losses were not scaled")
def test_a_state_goes_through_every_level_and_back() -> None:
    levels = [level for level in LEVELS if level not in ("O3", "int8")]
    model, optimizer = build("O2")
    train(model, optimizer, batches(3))
    first = state = copied(TrainState(model, optimizer))
    for level in (*levels, "O2"):
        model, optimizer = build(level, seed=7)
        here = TrainState(model, optimizer)
        here.load_state_dict(copy.deepcopy(state))
        state = copied(here)
        assert_same(without_scalers(state), without_scalers(first), dtype=None)
        mpinit.undo(model)
    plain = mlp(4)
    theirs = TrainState(plain, adam(plain.parameters()))
    theirs.load_state_dict(state)
    assert_same(without_scalers(copied(theirs)), without_scalers(first), dtype=None)


@pytest.mark.parametrize("level", ["O2", "split"])
def test_states_of_an_unstepped_optimizer_have_torchs_names(level: str) -> None:
    model, optimizer = build(level)
    state = copied(TrainState(model, optimizer))
    train(model, optimizer, batches(2))
    assert state["optim"]["state"].keys() == get_state_dict(model, optimizer)[1]["state"].keys()


@pytest.mark.parametrize("level", ["O0", "O2", "split"])
def test_reading_a_state_keeps_gradients_and_masters(level: str) -> None:
    model, optimizer = build(level)
    backward(mse(model, batches(1)[0]), optimizer)
    list(mpinit.master_params(optimizer))
    before = [weight.grad for weight in model.parameters()]
    TrainState(model, optimizer).state_dict()
    assert all(weight.grad is gradient for weight, gradient in zip(model.parameters(), before, strict=True))
    optimizer.step()
    assert mpinit.step_counts(optimizer) == (1, 0)
    assert {float(each["step"]) for each in optimizer.state.values()} == {1.0}


def test_train_state_ignores_the_scale_of_an_unscaled_run() -> None:
    model, optimizer = build("O0")
    train(model, optimizer, batches(1))
    state = copied(TrainState(model, optimizer))
    model, optimizer = build("O2")
    with pytest.warns(UserWarning, match="saved where losses were not scaled.*stays 1024"):
        TrainState(model, optimizer).load_state_dict(state)
    assert mpinit.loss_scale(optimizer) == 1024.0
    train(model, optimizer, batches(2))
    state = copied(TrainState(model, optimizer))
    again, resumed = build("O2", loss_scale=mpinit.DynamicLossScale(init=8.0))
    TrainState(again, resumed).load_state_dict(state)
    assert mpinit.state_dict(resumed) == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 2}}


def test_scales_counters_and_tolerance_resume() -> None:
    model, optimizer = build("O2", num_losses=2, loss_scale=mpinit.DynamicLossScale(hysteresis=3))
    for loss_id in (0, 1):
        for factor in (1.0, float("inf")):
            backward(mse(model, batches(1)[0]) * (factor if loss_id else 1.0), optimizer, loss_id)
    optimizer.zero_grad()
    before = mpinit.state_dict(optimizer)
    assert before["loss_scaler0"] != before["loss_scaler1"]
    state = copied(TrainState(model, optimizer))
    again, resumed = build("O2", num_losses=2, loss_scale=mpinit.DynamicLossScale(hysteresis=3))
    TrainState(again, resumed).load_state_dict(state)
    assert mpinit.state_dict(resumed) == before


def test_state_without_scalers_keeps_the_present_scale() -> None:
    pair = build("O2")
    TrainState(*pair).load_state_dict(without_scalers(copied(TrainState(*pair))))
    assert mpinit.loss_scale(pair[1]) == 1024.0


def test_optimizers_of_several_sessions_have_no_state_of_one() -> None:
    model = nn.Sequential(mlp(), nn.Linear(3, 3))
    optimizers = [adam(part.parameters()) for part in model]
    for part, optimizer in zip(model, optimizers, strict=True):
        mpinit.initialize(part, optimizer, **LEVELS["O5"])
    with pytest.raises(ValueError, match=r"session \d+ .* and session \d+ .*: make a TrainState for the"):
        TrainState(model, optimizers).state_dict()


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_several_optimizers(options: dict[str, bool]) -> None:
    def pair(seed: int) -> tuple[nn.Module, list[Optimizer], TrainState]:
        model = mlp(seed)
        optimizers = [plain_sgd(model[0].parameters()), adam(model[3].parameters())]
        mpinit.initialize(model, optimizers, **LEVELS["O2"])
        return model, optimizers, TrainState(model, iter(optimizers), options=StateDictOptions(**options))

    def run(model: nn.Module, optimizers: list[Optimizer], state: TrainState, seed: int) -> dict[str, Any]:
        for batch in batches(2, seed):
            backward(mse(model, batch), optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return copied(state)

    whole, resumed = pair(0), pair(4)
    saved = run(*whole, 1)
    end = run(*whole, 2)
    resumed[2].load_state_dict(saved)
    assert_same(run(*resumed, 2), end, dtype=None)


def test_only_weights_load_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = build("O2")
    train(model, optimizer, batches(2))
    everything = TrainState(model, optimizer)
    dcp.save({"app": everything}, checkpoint_id=tmp_path, no_dist=True)
    alone = mlp(5)
    state = TrainState(alone)
    assert list(state.state_dict()) == ["model"]
    dcp.load({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(alone.state_dict(), model.state_dict(), dtype=None)
    other = mlp(6)
    TrainState(other).load_state_dict(copied(everything))
    assert_same(other.state_dict(), model.state_dict(), dtype=None)


@pytest.mark.parametrize("level", ["O0", "O2", "split"])
def test_checkpoint_of_a_plain_model_loads(level: str, tmp_path: Path) -> None:
    plain = mlp()
    plain_optimizer = adam(plain.parameters())
    train_plainly(plain, plain_optimizer, batches(3))
    ours, theirs = copy.deepcopy(get_state_dict(plain, plain_optimizer))
    pair = build(level, seed=4)
    TrainState(*pair).load_state_dict({"model": ours, "optim": theirs})
    assert_same(without_scalers(copied(TrainState(*pair))), {"model": ours, "optim": theirs}, dtype=None)
    train(*pair, batches(1))
    dcp.save({"app": {"model": ours, "optim": theirs}}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"app": TrainState(*pair, scalers=False)}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(without_scalers(copied(TrainState(*pair))), {"model": ours, "optim": theirs}, dtype=None)


def test_partial_state_loads_with_strict_false() -> None:
    pair = build("O2")
    state = copied(TrainState(*pair))
    del state["model"]["0.bias"], state["optim"]["state"]["0.bias"]
    state["model"]["3.bias"] = torch.full_like(state["model"]["3.bias"], 0.3)
    before = pair[0].state_dict()["0.bias"].clone()
    TrainState(*pair, options=StateDictOptions(strict=False)).load_state_dict(state)
    assert torch.equal(pair[0].state_dict()["3.bias"], state["model"]["3.bias"])
    assert torch.equal(pair[0].state_dict()["0.bias"], before)


def changed(state: dict[str, Any], *path: Any, to: Any = None) -> dict[str, Any]:
    """A state with another value in one place, or without it."""
    *outer, last = path
    place = functools.reduce(operator.getitem, outer, state)
    if to is None:
        del place[last]
    else:
        place[last] = to
    return state


OF_WEIGHT = ("optim", "state", "0.weight")
WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a state is a mapping such as TrainState.state_dict": lambda state: [state],
    r"there is no 'model'; there is no 'optim'; a state has no 'app'": lambda state: {"app": state},
    "there is no 'optim'": lambda state: changed(state, "optim"),
    r"the model's state lacks '3\.bias'": lambda state: changed(state, "model", "3.bias"),
    "the model has no 'stranger'": lambda state: changed(state, "model", "stranger", to=torch.ones(3)),
    r"'3\.bias' has the shape \(7,\), and here \(3,\)": lambda s: changed(s, "model", "3.bias", to=torch.ones(7)),
    r"'3\.bias' is a float, not a tensor": lambda state: changed(state, "model", "3.bias", to=3.0),
    r"state of '0\.weight' has no 'exp_avg', but step, exp_avg_sq, momentum_buffer": lambda state: changed(
        changed(state, *OF_WEIGHT, "momentum_buffer", to=torch.ones(8, 6)), *OF_WEIGHT, "exp_avg"
    ),
    r"'exp_avg' of '0\.weight' has the shape \(2,\), and here \(8, 6\)": lambda state: changed(
        state, *OF_WEIGHT, "exp_avg", to=torch.ones(2)
    ),
    r"no group .* has the 4 parameters of group 0 \(0\.weight, 0\.bias first; groups saved: 3 parameters\)": (
        lambda state: changed(state, "optim", "param_groups", 0, "params", -1)
    ),
    "has no 'state' and 'param_groups'": lambda state: changed(state, "optim", "param_groups"),
    "'loss_scaler1' is not known here": lambda state: state | {"scalers": state["scalers"].repeat(2, 1)},
    "has loss_scale=nan": lambda state: state | {"scalers": state["scalers"] * float("nan")},
    r"these are \{'loss_scaler0': .* Load .* by mpinit\.load_state_dict": (
        lambda state: state | {"scalers": {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}}}
    ),
    r"rows of loss_scale, unskipped, tolerance, scales; these have the shape \(1, 2\)": (
        lambda state: state | {"scalers": state["scalers"][:, :2]}
    ),
}


@pytest.mark.parametrize(("message", "spoil"), WRONG.items())
def test_state_that_does_not_fit_is_refused_and_changes_nothing(message: str, spoil: Callable[[Any], Any]) -> None:
    pair = build("O2")
    train(*pair, batches(1))
    here = TrainState(*pair)
    state = spoil(copied(here))
    train(*pair, batches(1, seed=8))
    before = copied(here)
    with pytest.raises((TypeError, ValueError), match=message):
        here.load_state_dict(state)
    assert_same(copied(here), before, dtype=None)
    train(*pair, batches(1))


def test_arguments_of_train_state_are_checked() -> None:
    model, optimizer = build("O5")
    with pytest.raises(TypeError, match="make one for each"):
        TrainState([model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module.*got SGD"):
        TrainState(momentum(model.parameters()), model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizers must be a torch"):
        TrainState(model, [model])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="Adam steps parameters that Linear does not have"):
        TrainState(model[0], optimizer).state_dict()


def test_in_scaled_loss_an_optimizer_without_state_is_refused() -> None:
    pair = build("O2")
    with (
        pytest.raises(RuntimeError, match=r"inside `with mpinit\.scale_loss"),
        mpinit.scale_loss(mse(pair[0], batches(1)[0]), pair[1]),
    ):
        TrainState(*pair).state_dict()


@pytest.mark.parametrize("masters", [True, "split"])
def test_state_before_first_step_is_read_in_inference_mode(
    masters: Any,
) -> None:
    """Compare with that of an ordinary call: its tensors are no inference tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    mpinit.initialize(model, optimizer, opt_level="O5", master_weights=masters)
    with torch.inference_mode():
        found = TrainState(model, optimizer).state_dict()
    expected = TrainState(model, optimizer).state_dict()
    mpinit.undo(model)
    torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
    assert not any(value.is_inference() for value in found["model"].values())


@pytest.mark.parametrize("kind", ["O0", "O2", "O5", "split", "model"])
@pytest.mark.parametrize("make", [adam, momentum])
def test_a_state_loads_where_a_layer_was_not_used(kind: str, make: Any) -> None:
    def started() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(4, 2), "spare": nn.Linear(4, 2)})
        optimizer = make(model.parameters())
        mpinit.initialize(model, optimizer, **LEVELS[kind])
        return model, optimizer

    def step(model: Any, optimizer: torch.optim.Optimizer, part: str) -> None:
        optimizer.zero_grad()
        with mpinit.scale_loss(model[part](torch.ones(2, 4)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    model, optimizer = started()
    for _ in range(2):
        step(model, optimizer, "used")
    saved = copy.deepcopy(mpinit.TrainState(model, optimizer).state_dict())
    mpinit.TrainState(model, optimizer).load_state_dict(copy.deepcopy(saved))  # the run that wrote it
    other, its_optimizer = started()
    mpinit.TrainState(other, its_optimizer).load_state_dict(saved)
    for network, own in ((model, optimizer), (other, its_optimizer)):
        for part in ("used", "spare"):
            step(network, own, part)
    for (name, value), expected in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("kind", ["O0", "O5", "split"])
@pytest.mark.parametrize("steps", [0, 2])
def test_lbfgs_resumes_to_the_bit(kind: str, steps: int) -> None:
    def started() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        mpinit.initialize(model, optimizer, **LEVELS[kind])
        return model, optimizer

    def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.eye(4)).float() - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = started()
    for _ in range(steps):
        step(model, optimizer)
    saved = copy.deepcopy(mpinit.TrainState(model, optimizer).state_dict())
    assert bool(optimizer.state) == (steps > 0)
    step(model, optimizer)
    other, its_optimizer = started()
    mpinit.TrainState(other, its_optimizer).load_state_dict(saved)
    step(other, its_optimizer)
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])


class InDicts(torch.optim.Optimizer):
    """Keeps its states in a dict, as Shampoo does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                means = self.state[weight].setdefault("means", {"first": torch.zeros_like(weight)})
                weight.sub_(means["first"].lerp_(weight.grad, 0.5), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("flat", [False, True])
def test_flattened_states_in_dicts_are_refused_and_others_load(flat: bool) -> None:
    model = nn.Linear(4, 2)
    model, optimizer = mpinit.initialize(model, InDicts(model.parameters()), opt_level="O5")
    with mpinit.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    state = TrainState(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    saved = copy.deepcopy(state.state_dict())
    if flat:
        with pytest.raises(ValueError, match=r"flattened states in dicts are not loaded: 'weight.means'"):
            state.load_state_dict(saved)
    else:
        optimizer.state.clear()
        state.load_state_dict(saved)
        assert torch.equal(optimizer.state[model.weight]["means"]["first"], torch.full((2, 4), 0.5))
