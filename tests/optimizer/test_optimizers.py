"""Optimizers of every kind: torch's, those with methods and groups of their own, and custom ones."""

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import loops
import pytest
import torch
from loops import momentum
from masters_by_hand import as_by_hand
from models import Parts
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import mpinit

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_group_from_outside_the_models_may_have_any_dtype(dtype: torch.dtype) -> None:
    model, optimizer = loops.started("O2", torch.float16, loops.plain_sgd)
    extra = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer.add_param_group({"params": extra})
    loops.iterate(loops.mse(model, loops.batches(1)[0]) + (extra.float() * 0.5).sum(), optimizer)
    assert loops.masters(optimizer)[-1].tolist() == [0.5] * 3 == extra.detach().float().tolist()
    assert loops.masters(optimizer)[-1].dtype == torch.float32 and extra.dtype == dtype


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_cannot_be_added_a_second_time(level: str) -> None:
    model, optimizer = loops.started(level)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1
    loops.train(model, optimizer, loops.batches(2))
    assert level != "O2" or loops.follow(model, optimizer) is None


@pytest.mark.parametrize(
    "given",
    [{}, {"dtype": torch.bfloat16, "loss_scale": 1.0}, {"dtype": torch.bfloat16, "master_weights": "split"}],
    ids=str,
)
def test_what_was_frozen_at_initialize_gets_a_master_later(given: dict[str, Any]) -> None:
    model = loops.mlp()
    model[0].weight.requires_grad_(False)
    optimizer = loops.start(model, "O2", **given)
    model[0].weight.requires_grad_(True)
    before = model.state_dict()["0.weight"].clone()
    loops.train(model, optimizer, loops.batches(1))
    after = model.state_dict()["0.weight"]
    assert not torch.equal(after, before) and not torch.equal(after, after.to(model[0].weight.dtype).float())
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.float32


def adapted() -> Any:
    """A 16-bit base with adapters in float32, as parameter-efficient tuning has them."""
    torch.manual_seed(0)
    low_rank = {"down": nn.Linear(6, 2, bias=False), "up": nn.Linear(2, 3, bias=False)}
    parts = {"base": nn.Linear(6, 3), **low_rank, "shift": nn.Parameter(torch.zeros(3))}
    return Parts(lambda self, x: self.base(x) + self.up(self.down(x)) + self.shift.to(x.dtype), **parts)


each_kind = pytest.mark.parametrize("make", [momentum, loops.adam, lambda p: AdamW(p, lr=0.01, fused=True)])


@each_kind
def test_dtypes_may_mix_in_one_group(make: Callable[..., Optimizer]) -> None:
    model, reference, data = adapted(), adapted(), loops.batches(5)
    optimizer, plain = make(model.parameters()), make(reference.parameters())
    mpinit.initialize(model, optimizer, keep_fp32=["down", "up"], **loops.keywords("O2"))
    assert [p.dtype for p in (model.base.weight, model.down.weight)] == [torch.float16, torch.float32]
    loops.train(model, optimizer, data)
    loops.train_plainly(reference, plain, data)
    loops.close(model.state_dict().values(), reference.parameters(), 0.02)
    assert {p.dtype for p in loops.masters(optimizer)} == {torch.float32}


@each_kind
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_that_has_stepped_keeps_its_state(level: str, make: Callable[..., Optimizer]) -> None:
    model, reference, data = loops.mlp(), loops.mlp(), loops.batches(6)
    optimizer, plain = make(model.parameters()), make(reference.parameters())
    loops.train_plainly(model, optimizer, data[:3])
    loops.train_plainly(reference, plain, data[:3])
    before = copy.deepcopy(loops.states(optimizer))
    mpinit.initialize(model, optimizer, **loops.keywords(level))
    loops.same(loops.states(optimizer), before)
    loops.train(model, optimizer, data[3:])
    loops.train_plainly(reference, plain, data[3:])
    loops.close(loops.masters(optimizer), reference.parameters(), 0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_optimizer_over_no_parameter_of_the_models_is_refused(level: str) -> None:
    model, own = loops.mlp(), momentum(loops.mlp().parameters())
    copied, strange = momentum(loops.mlp(seed=5).parameters()), SGD([nn.Parameter(torch.zeros(5))], lr=0.5)
    left_over = r"none of the parameters of SGD belongs to the models \(\w+\).*make the optimizer from.*was copied"
    other = r"make the optimizer from.*a loss"
    for optimizers, text in ((copied, left_over), ([own, copied], left_over), (strange, other)):
        with pytest.raises(ValueError, match=text):
            mpinit.initialize(model, optimizers, **loops.keywords(level))
    assert model[0].weight.dtype is torch.float32
    mpinit.initialize(model, strange, await_optimizers=True, **loops.keywords(level))


def test_a_loss_functions_own_parameters_are_no_orphans() -> None:
    model, center = loops.mlp(), nn.Parameter(torch.zeros(5))
    optimizer = SGD([center], lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpinit.initialize(model, [momentum(model.parameters()), optimizer], **loops.keywords("O2"))
    loops.iterate((center - 1).pow(2).sum() / 2, optimizer)
    assert center.tolist() == [0.5] * 5


def _variants() -> list[tuple[str, dict[str, bool]]]:
    """Every optimizer of torch.optim that steps on dense gradients, without a closure, in every way it offers."""
    found: list[tuple[str, dict[str, bool]]] = []
    for name, value in sorted(vars(torch.optim).items()):
        if isinstance(value, type) and name not in {"Optimizer", "LBFGS", "SparseAdam"}:
            offered = inspect.signature(value).parameters
            found.append((name, {"foreach": False} if "foreach" in offered else {}))
            found += [(name, {way: True}) for way in ("foreach", "fused") if way in offered]
    return found


@pytest.mark.parametrize("setting", ["O2", "split"])
@pytest.mark.parametrize(("name", "way"), _variants(), ids=str)
def test_every_optimizer_of_torch_steps_masters_as_by_hand(name: str, way: dict[str, bool], setting: str) -> None:
    def make(parameters: Iterable[Any]) -> Optimizer:
        given = [p for p in parameters if name != "Muon" or p.dim() == 2]
        made: Optimizer = getattr(torch.optim, name)(given, lr=0.01, **way)
        return made

    as_by_hand(setting, make, count=4)


class Lookahead(Optimizer):
    """Wraps another optimizer and forwards its groups, without calling ``Optimizer.__init__``."""

    def __init__(self, inner: Optimizer, every: int = 2, alpha: float = 0.5) -> None:
        self.inner, self.every, self.alpha, self.count = inner, every, alpha, 0
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict)
        # torch's own bookkeeping, which such wrappers learn to keep the hard way.
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._warned_capturable_if_run_uncaptured = True

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if self.count % self.every == 0:
                    slow.lerp_(parameter, self.alpha)
                    parameter.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


FOREIGN: dict[str, Callable[[Any], Optimizer]] = {
    "sign descent": loops.SignDescent,
    "lookahead": lambda p: Lookahead(momentum(p)),
    "forwarding": lambda p: loops.Forwarding(momentum(p)),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("setting", ["O2", "O5"])
def test_an_optimizer_from_elsewhere_equals_a_hand_written_loop(setting: str, name: str) -> None:
    as_by_hand(setting, FOREIGN[name])


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_optimizer_from_elsewhere_may_have_stepped_and_grow(level: str, name: str) -> None:
    model, reference, data = loops.mlp(), loops.mlp(), loops.batches(7)
    optimizer, plain = FOREIGN[name](model[0].parameters()), FOREIGN[name](reference[0].parameters())
    loops.train_plainly(model, optimizer, data[:2])
    loops.train_plainly(reference, plain, data[:2])
    mpinit.initialize(model, optimizer, **loops.keywords(level))
    loops.train(model, optimizer, data[2:4])
    loops.train_plainly(reference, plain, data[2:4])
    optimizer.add_param_group({"params": list(model[3].parameters())})
    plain.add_param_group({"params": list(reference[3].parameters())})
    loops.train(model, optimizer, data[4:])
    loops.train_plainly(reference, plain, data[4:])
    loops.close(model.state_dict().values(), reference.parameters(), 0.03)


@pytest.mark.parametrize("wrap", [loops.Forwarding, Lookahead], ids=["shows the groups", "keeps the old groups"])
def test_fused_sgd_stays_fused_in_a_wrapper_and_after_loading(wrap: Callable[[Optimizer], Optimizer]) -> None:
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    optimizer = wrap(inner)
    mpinit.initialize(model, optimizer, "O2", cast_model_type=torch.bfloat16)
    inner.load_state_dict(inner.state_dict())
    model.weight.grad = torch.ones_like(model.weight, dtype=model.weight.grad_dtype)
    optimizer.step()
    assert (model.weight != 1).all()
    assert optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("when", ["before the backward pass", "after it"])
def test_gradients_of_a_group_added_in_the_block_are_unscaled(when: str) -> None:
    model, more = nn.Linear(4, 1), nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    mpinit.initialize([model, more], optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=64.0))
    more.weight.grad = torch.full_like(more.weight, 0.25, dtype=more.weight.grad_dtype or more.weight.dtype)
    with mpinit.scale_loss(model(torch.ones(1, 4)).sum() + more(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        calls = [lambda: optimizer.add_param_group({"params": list(more.parameters())}), scaled_loss.backward]
        for call in calls if when == "before the backward pass" else reversed(calls):
            call()
    assert [p.grad.unique().tolist() for p in mpinit.master_params(optimizer)] == [[1.0], [1.0], [1.25], [1.0]]
    before = model.state_dict()["weight"] - 0.1, more.state_dict()["weight"] - 0.1 * 1.25
    optimizer.step()
    torch.testing.assert_close((model.state_dict()["weight"], more.state_dict()["weight"]), before)


class Coded(torch.optim.Optimizer):
    """SGD with momentum kept as codes of a table, and a scale for them: as 8-bit optimizers keep their states."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    table = torch.linspace(-1, 1, 255)
                    state.update(codes=torch.full(p.shape, 127, dtype=torch.uint8), table=table, scale=torch.ones(1))
                assert state["table"].dtype == state["scale"].dtype == torch.float32, "a kernel reads float32"
                momentum = 0.9 * state["table"][state["codes"].int()] * state["scale"] + p.grad.float()
                state["scale"] = momentum.abs().max().reshape(1)
                state["codes"] = ((momentum / state["scale"] + 1) * 127).round().to(torch.uint8)
                p.add_(momentum.to(p.dtype), alpha=-group["lr"])


def test_8_bit_codes_and_tables_are_not_cast() -> None:
    model = nn.Linear(4, 2)
    optimizer = Coded(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    model(x).sum().backward()
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    mpinit.initialize(model, optimizer, opt_level="O3", cast_model_type="bfloat16")
    after = optimizer.state[model.weight]
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())
    weight, grad = model.weight.detach().clone(), torch.full((2, 4), 2.0, dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    momentum = 0.9 * before["table"][before["codes"].int()] * before["scale"] + grad.float()
    optimizer.step()
    assert torch.equal(model.weight, weight.add(momentum.to(torch.bfloat16), alpha=-0.1))
    mpinit.undo(model)
    assert optimizer.state[model.weight]["table"].dtype == torch.float32


def contrastive() -> nn.Module:
    """A layer and a 0-dimensional parameter, as CLIP's ``logit_scale``."""
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(4, 3), "logit_scale": nn.Parameter(torch.tensor(0.5))}
    return Parts(lambda self, x: self.layer(x) * self.logit_scale, **parts)


@pytest.mark.filterwarnings("ignore:the eps=1e-08 of NAdam")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad])
def test_state_of_0_dimensional_weight_is_cast_without_masters(make: Callable[..., Optimizer]) -> None:
    """Step before ``initialize`` at O3, in the session, and after its undo, beside a run in float32."""
    runs = []
    for level in ("O3", "O0"):
        model = contrastive()
        optimizer = make(model.parameters(), lr=0.01)

        def iterate(model: nn.Module = model, optimizer: Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()

        iterate()
        known = {key: value.dtype for key, value in optimizer.state[model.logit_scale].items() if value is not None}
        mpinit.initialize(model, optimizer, opt_level=level)
        iterate()
        mpinit.undo(model)
        iterate()
        after = {key: value.dtype for key, value in optimizer.state[model.logit_scale].items() if value is not None}
        assert after == known
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*runs, rtol=0.01, atol=2e-3)


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch's kernel is right from 2.15 on")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_sgd_of_16_bit_weights_is_refused_on_a_cpu(dtype: torch.dtype) -> None:
    """Its kernel leaves most numbers as they are, with AVX-512."""
    model = nn.Linear(16, 4, device="cpu")
    optimizer = SGD(model.parameters(), lr=0.5, fused=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"fused=False"):
        mpinit.initialize(model, optimizer, "O3", cast_model_type=dtype)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    mpinit.initialize(model, optimizer, "O2", cast_model_type=dtype)
