"""optimizer_state: states in fewer bytes between steps, float32 inside of them.

Below the public face: encoded states are recognised by their class and compared by their codes.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import backward, iterate
from models import through_file
from torch import nn

import mpinit
from mpinit import registry
from mpinit.masters.codecs.encoded import EncodedState
from mpinit.masters.codecs.minifloat import Minifloat
from mpinit.optimizer import parts

pytestmark = pytest.mark.device

SPLIT = ("O5", {"master_weights": "split"})
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "split": SPLIT,
    "full": ("O5", {}),
    "model": ("O5", {"master_weights": "model"}),
    "O2": ("O2", {}),
    "O0": ("O0", {}),
    "O4": ("O4", {}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
encodings = pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
Factory = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BUCKET_BYTES", 40_000)


def set_up(
    kind: str, encoding: str, make: Factory = adam, seed: int = 0, **more: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = make(model.parameters())
    level, extra = KINDS[kind]
    mpinit.initialize(model, optimizer, level, optimizer_state=encoding, **extra, **more)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> float:
    loss = torch.zeros(())
    for index in range(first, first + steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(index))
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8]).square().mean()
        backward(loss, optimizer)
        optimizer.step()
    return loss.item()


def numbers(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


@encodings
@kinds
def test_large_states_are_encoded_and_small_ones_are_not(kind: str, encoding: str) -> None:
    model, optimizer = set_up(kind, encoding)
    train(model, optimizer, 2)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert (type(value) is EncodedState) == (key != "step" and parameter.numel() >= 4096)
    assert mpinit.describe(model).count(f"optimizer_state = {encoding}") == 1
    mpinit.undo(model)
    assert all(type(value) is torch.Tensor for value in states(optimizer))


@encodings
@kinds
def test_training_ends_where_float32_states_do(kind: str, encoding: str) -> None:
    with_codes, plain = (train(*set_up(kind, each), 20) for each in (encoding, "float32"))
    assert with_codes == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("bucket", [64, 2**26])
@kinds
def test_parts_of_a_step_do_not_matter(kind: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is together in a part: the codes are the same."""
    results = []
    for size in (bucket, 40_000):
        monkeypatch.setattr(parts, "BUCKET_BYTES", size)
        model, optimizer = set_up(kind, "int8")
        train(model, optimizer, 3)
        results.append(numbers(model))
    assert all(map(torch.equal, *results))


@encodings
@kinds
def test_an_ordinary_state_dict_resumes_to_the_bit(kind: str, encoding: str) -> None:
    model, optimizer = set_up(kind, encoding)
    train(model, optimizer, 4)
    saved = through_file([model.state_dict(), optimizer.state_dict(), mpinit.state_dict(optimizer)])
    assert all(t.dtype == torch.float32 for state in saved[1]["state"].values() for t in state.values())
    train(model, optimizer, 4, first=4)
    other, other_optimizer = set_up(kind, encoding, seed=1)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    mpinit.load_state_dict(saved[2], other_optimizer)
    assert any(type(value) is EncodedState for value in states(other_optimizer))
    train(other, other_optimizer, 4, first=4)
    assert all(map(torch.equal, numbers(other), numbers(model)))


@encodings
def test_the_codes_themselves_resume_to_the_bit(encoding: str) -> None:
    model, optimizer = set_up("split", encoding)
    train(model, optimizer, 4)
    compact = pickle.dumps({i: dict(optimizer.state[p]) for i, p in enumerate(optimizer.param_groups[0]["params"])})
    ordinary = optimizer.state_dict()
    assert len(compact) < 0.7 * len(pickle.dumps(ordinary["state"]))
    weights = model.state_dict()
    saved = copy.deepcopy(weights)
    train(model, optimizer, 4, first=4)
    other, other_optimizer = set_up("split", encoding, seed=1)
    other.load_state_dict(saved)
    other_optimizer.load_state_dict({"state": pickle.loads(compact), "param_groups": ordinary["param_groups"]})
    train(other, other_optimizer, 4, first=4)
    assert all(map(torch.equal, numbers(other), numbers(model)))


@encodings
def test_plain_torch_takes_the_state_dict_over_and_back(encoding: str) -> None:
    model, optimizer = set_up("split", encoding)
    train(model, optimizer, 4)
    plain = nn.Sequential(*(copy.deepcopy(layer) for layer in model)).float()
    plain_optimizer = adam(plain.parameters())
    plain_optimizer.load_state_dict(optimizer.state_dict())
    plain(torch.ones(1, 64)).sum().backward()
    plain_optimizer.step()
    optimizer.load_state_dict(plain_optimizer.state_dict())
    assert any(type(value) is EncodedState for value in states(optimizer))
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", ["split", "full", "O2"])
def test_an_overflow_leaves_the_codes(kind: str) -> None:
    model, optimizer = set_up(kind, "int8", loss_scale="dynamic")
    train(model, optimizer, 3)
    before = {id(v): copy.deepcopy(v.codes) for v in states(optimizer) if type(v) is EncodedState}
    backward(model(torch.ones(1, 64)).sum() * float("inf"), optimizer)
    optimizer.step()
    assert mpinit.step_was_skipped(optimizer) and before
    after = {id(v): v.codes for v in states(optimizer) if type(v) is EncodedState}
    assert all(all(map(torch.equal, after[key], codes)) for key, codes in before.items())


class Fails(torch.optim.Adam):
    """An Adam that fails after its update, when told to."""

    fails = False
    steps_per_parameter = True

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise OSError("the disk is full")
        return result


@kinds
def test_a_step_that_fails_leaves_states_that_go_on(kind: str) -> None:
    model, optimizer = set_up(kind, "int8", lambda parameters: Fails(parameters, lr=1e-3))
    train(model, optimizer, 2)
    optimizer.fails = True  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="disk"):
        train(model, optimizer, 1)
    assert sum(type(value) is EncodedState for value in states(optimizer)) == 4
    assert all(p.grad is not None for p in model.parameters())
    optimizer.fails = False  # type: ignore[attr-defined]
    assert train(model, optimizer, 3) < 5


@kinds
def test_groups_added_later_and_states_from_before(kind: str) -> None:
    torch.manual_seed(0)
    model, extra = nn.Linear(64, 96), nn.Linear(96, 64)
    optimizer = adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    level, more = KINDS[kind]
    options = {"optimizer_state": "int8", "loss_scale": 1.0}
    mpinit.initialize([model, extra], optimizer, level, **options, **more)
    assert sum(type(value) is EncodedState for value in states(optimizer)) == 2
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 1e-2})
    iterate(extra(model(torch.ones(1, 64))).sum(), optimizer)
    assert sum(type(value) is EncodedState for value in states(optimizer)) == 4


@kinds
def test_copies_of_an_optimizer_have_codes_of_their_own(kind: str) -> None:
    model, optimizer = set_up(kind, "int8")
    train(model, optimizer, 2)
    copied = copy.deepcopy(optimizer.state_dict())
    assert all(type(value) is torch.Tensor for state in copied["state"].values() for value in state.values())
    shown = copy.deepcopy(dict(next(iter(optimizer.state.values()))))
    expected = shown["exp_avg"].clone()
    train(model, optimizer, 2)
    assert torch.equal(shown["exp_avg"], expected)


MAKE: dict[str, Factory] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


@pytest.mark.parametrize("name", MAKE)
def test_any_per_parameter_optimizer(name: str) -> None:
    losses = [train(*set_up("split", encoding, MAKE[name]), 12) for encoding in ("float32", "bfloat16", "int8")]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=0.05)


@pytest.mark.parametrize("make", [torch.optim.ASGD, torch.optim.SparseAdam])
def test_states_that_need_all_bits_are_refused(make: Factory) -> None:
    """Copies of weights, and the states of sparse gradients."""
    with pytest.raises(ValueError, match=r"steps_per_parameter"):
        set_up("full", "int8", make)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_have_float32_states() -> None:
    model = nn.Embedding(200, 64, sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters())
    mpinit.initialize(model, optimizer, "O0", optimizer_state="int8")
    for _ in range(2):
        backward(model(torch.tensor([1, 5])).sum(), optimizer)
        optimizer.step()
    assert all(type(value) is not EncodedState for value in states(optimizer))


def test_optimizer_that_reads_several_parameters_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r'optimizer_state="int8".*whether LBFGS updates'):
        mpinit.initialize(model, torch.optim.LBFGS(model.parameters()), "O0", optimizer_state="int8")
    assert registry.of(model) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("encoding", ["int8", "bfloat16"])
def test_states_of_weights_without_masters_are_refused(encoding: str, dtype: str) -> None:
    """They have the weights' dtype, and nothing was done to them at O3, without a word."""
    model = nn.Linear(128, 64)
    before = model.weight
    with pytest.raises(ValueError, match=rf'optimizer_state="{encoding}" contradicts master_weights=False.*{dtype}'):
        mpinit.initialize(
            model, torch.optim.AdamW(model.parameters()), "O3", cast_model_type=dtype, optimizer_state=encoding
        )
    assert model.weight is before and before.dtype is torch.float32


def test_other_spellings_are_refused() -> None:
    for given in ("float16", "bf16", torch.int8):
        with pytest.raises(ValueError, match="'float32', 'bfloat16' or 'int8'"):
            mpinit.Properties(optimizer_state=given)


def trained_after(kind: str, encoding: str, make: Factory, asks: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Train; with ``asks``, after masters were requested once. Return float32 weights, and numbers of steps."""
    model, optimizer = set_up(kind, encoding, make)
    if asks:
        list(mpinit.master_params(optimizer))
    train(model, optimizer, 3)
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    found = numbers(model), counts
    mpinit.undo(model)
    return found


@pytest.mark.parametrize("make", [adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)], ids=["Adam", "SGD"])
@encodings
@pytest.mark.parametrize("kind", ["split", "full", "model", "O2"])
def test_each_weight_is_stepped_once_after_master_params(kind: str, encoding: str, make: Factory) -> None:
    """Compare with masters that nobody has: those that users have are bound to gradients between steps."""
    (expected, counted), (found, counts) = (trained_after(kind, encoding, make, asks) for asks in (False, True))
    assert counts == counted and set(counts) <= {3.0}
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("inputs", ["every second one is small", "one is large"])
def test_weights_beside_large_gradients_are_trained(inputs: str) -> None:
    """Gradients 1000 times as small as others of their block: second moments are 1,000,000 times as small."""
    scale, small = torch.ones(256), torch.ones(256, dtype=torch.bool)
    if inputs == "one is large":
        scale[:], scale[7], small[7] = 0.03, 30.0, False
        small[128:] = False  # another block
    else:
        scale[1::2], small[::2] = 1e-3, False
    moved = []
    for encoding in ("float32", "int8"):
        torch.manual_seed(0)
        model, target = nn.Linear(256, 64), torch.randn(64, 256)
        before = model.weight.detach().clone()
        optimizer = adam(model.parameters())
        mpinit.initialize(model, optimizer, "O5", optimizer_state=encoding)
        for _ in range(200):
            x = torch.randn(32, 256)
            iterate((model(x * scale) - x @ target.t()).square().mean(), optimizer)
        moved.append((model.state_dict()["weight"] - before).abs()[:, small].mean().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.05)


def test_pickled_codes_of_another_format_are_refused() -> None:
    state = EncodedState.of(torch.rand(8192), Minifloat())
    function, (*arguments, _) = state.__reduce_ex__(2)
    with pytest.raises(ValueError, match=r"format 1.*save optimizer.state_dict\(\)"):
        function(*arguments)
