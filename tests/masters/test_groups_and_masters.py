"""Between steps groups contain the model's parameters; while an optimizer's own code runs, they contain masters.

Below the public face: an encoded state is recognised by its class.
"""

import copy
import gc
import sys
import warnings
from typing import Any

import pytest
import torch
from loops import backward, keywords, plain_sgd
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer

import mpinit
from mpinit.masters.codecs.encoded import EncodedState
from mpinit.optimizer import parts

# No 16-bit type holds these; every one holds the gradient.
START = torch.tensor([[1.0001, -2.0003, 0.3337], [-0.7003, 5.0007, 3.0001]])
INPUT = torch.tensor([[1.0, 2.0, -1.0]])
GRADIENT = INPUT.expand(2, 3)
MODES = [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "split")]
each_mode = pytest.mark.parametrize(("dtype", "masters"), MODES, ids=["float16", "bfloat16", "split"])


def begin(dtype: torch.dtype, masters: Any, make: Any = plain_sgd) -> tuple[nn.Linear, Any]:
    """One weight that is START, and an optimizer whose step subtracts the gradient."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(START)
    optimizer = make(model.parameters())
    mpinit.initialize(model, optimizer, **keywords("O2", dtype) | {"master_weights": masters})
    return model, optimizer


def pull(model: nn.Module, optimizer: Any, times: float = 1.0) -> None:
    """A backward pass that adds ``times`` GRADIENT."""
    backward(model(INPUT).sum() * times, optimizer)


def members(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def number(model: nn.Module) -> torch.Tensor:
    """The weight's float32 number, from a checkpoint."""
    value: torch.Tensor = model.state_dict()["weight"]
    assert value.dtype is torch.float32
    return value.clone()


def after(written: torch.Tensor, known: torch.Tensor, masters: Any) -> torch.Tensor:
    """What a weight means that has become ``written``, and was ``known``: the law, in plain numbers."""
    if masters == "split":
        bits = known.contiguous().view(torch.int32)
        low = bits - (((bits + 0x8000) >> 16) << 16)
        low = torch.where(written == 0, low.clamp(min=0), low)
        return (written.float().contiguous().view(torch.int32) + low).view(torch.float32)
    return torch.where(known.to(written.dtype) == written, known, written.float())


@each_mode
def test_gradients_replaced_over_model_are_clipped_over_groups(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    by_hand = nn.Parameter(START.clone())
    by_hand.grad_dtype = None
    by_hand.grad = model.weight.grad.clone() * 1024  # type: ignore[union-attr]
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 1024  # type: ignore[operator]
    clip_grad_norm_([by_hand], 0.5)
    clip_grad_norm_(members(optimizer), 0.5)
    optimizer.step()
    assert torch.equal(number(model), START - by_hand.grad.float())
    assert (number(model) - START).norm() < 0.51


@pytest.mark.filterwarnings("ignore:gradients were written to while they were multiplied by the loss scale")
@each_mode
@pytest.mark.parametrize("how", ["cleared", "zeroed", "halved", "halved after"])
def test_gradients_edited_through_groups_inside_block_stay_so(dtype: torch.dtype, masters: Any, how: str) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    with mpinit.scale_loss(model(INPUT).sum(), optimizer) as scaled:
        if how == "halved after":
            scaled.backward()
        for parameter in members(optimizer):
            if how == "cleared":
                parameter.grad = None
            else:
                parameter.grad.mul_(0.0 if how == "zeroed" else 0.5)
        if how != "halved after":
            scaled.backward()
    expected = {"cleared": 1.0, "zeroed": 1.0, "halved": 1.5, "halved after": 1.0}[how] * GRADIENT
    assert torch.equal(model.weight.grad.float(), expected)  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(number(model), START - expected)


@each_mode
def test_flat_buffer_of_gradients_after_initialize_is_stepped(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    buffer = torch.zeros(6, dtype=torch.float32 if masters is True else dtype)
    model.weight.grad = buffer.view(2, 3)
    pull(model, optimizer)
    assert torch.equal(buffer.view(2, 3).float(), GRADIENT)
    buffer.mul_(0.5)
    optimizer.step()
    assert torch.equal(number(model), START - 0.5 * GRADIENT)
    buffer.zero_()
    pull(model, optimizer)
    buffer.zero_()
    optimizer.step()
    assert torch.equal(number(model), START - 0.5 * GRADIENT)


@each_mode
def test_averages_swapped_in_and_out_leave_every_bit(dtype: torch.dtype, masters: Any) -> None:
    (model, optimizer), (untouched, reference) = begin(dtype, masters), begin(dtype, masters)
    held = model.weight.data
    for _ in range(3):
        for each, owner in ((model, optimizer), (untouched, reference)):
            owner.zero_grad()
            pull(each, owner)
            owner.step()
        backup = model.weight.data.clone()
        model.weight.data.mul_(0.75)
        model(INPUT)
        model.weight.data.copy_(backup)
    known = number(model)
    assert torch.equal(known, number(untouched))
    held.fill_(0.25)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(number(model), after(torch.full_like(held, 0.25), known, masters))


@each_mode
def test_zeroing_data_over_groups_counts(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    for parameter in members(optimizer):
        parameter.data.zero_()
    assert number(model).abs().max() < 1e-38
    pull(model, optimizer)
    optimizer.step()
    assert torch.equal(number(model), -GRADIENT)


def _a_part(model: Any) -> torch.Tensor:
    memory = torch.zeros(100)
    model[0].weight.data = memory[:9].view(3, 3).copy_(model[0].weight.data)
    return memory


def _shared(model: Any) -> None:
    model[0].weight.data = model[1].weight.data


def _gradients(model: Any) -> torch.Tensor:
    memory = torch.zeros(18)
    for index, module in enumerate(model):
        module.weight.grad = memory[9 * index : 9 * index + 9].view(3, 3)
    return memory


@each_mode
@pytest.mark.parametrize(
    ("share", "text"),
    [
        (_a_part, "'0.weight' is a part of larger memory.*clone"),
        (_shared, "'1.weight' shares memory with '0.weight'.*one parameter"),
        (_gradients, "'0.weight' has a gradient that is a part of larger memory.*after mpinit.initialize"),
    ],
)
def test_memory_shared_from_before_is_refused(dtype: torch.dtype, masters: Any, share: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    held = share(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = plain_sgd(model.parameters())
    with pytest.raises(ValueError, match=text):
        mpinit.initialize(model, optimizer, **keywords("O2", dtype) | {"master_weights": masters})
    assert held is None or held.dtype is torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None
    mpinit.initialize(model, optimizer, **keywords("O2", dtype) | {"master_weights": masters})


@each_mode
def test_tied_weights_and_those_of_an_rnn_share_memory(dtype: torch.dtype, masters: Any) -> None:
    model = nn.ModuleDict({"rnn": nn.GRU(3, 3), "one": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    model["other"].weight = model["one"].weight
    flat = torch.cat([weight.detach().view(-1) for weight in model["rnn"].parameters()])
    for weight in model["rnn"].parameters():
        weight.data, flat = flat[: weight.numel()].view_as(weight), flat[weight.numel() :]
    mpinit.initialize(model, plain_sgd(model.parameters()), **keywords("O2", dtype) | {"master_weights": masters})


@pytest.mark.parametrize("masters", [True, "split"])
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("how", ["data", "data =", "copy_"])
def test_what_is_written_to_an_encoded_state_is_stepped(masters: Any, kind: str, how: str) -> None:
    model = nn.Linear(80, 64, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=1.0)
    more = {"master_weights": masters, "optimizer_state": kind}
    mpinit.initialize(model, optimizer, **keywords("O2", torch.bfloat16) | more)
    backward(model(torch.ones(1, 80)).sum(), optimizer)
    optimizer.step()
    state = optimizer.state[model.weight]["momentum_buffer"]
    assert isinstance(state, EncodedState)
    values = torch.full((64, 80), 2.0)
    if how == "data =":
        state.data = values
    else:
        (state.data if how == "data" else state).copy_(values)
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["momentum_buffer"], torch.full((64, 80), 2.0))
    optimizer.zero_grad()
    before = number(model)
    backward(model(torch.ones(1, 80)).sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(number(model), before - 3.0)
    with pytest.raises(ValueError, match="put that in the state"):
        state.data = torch.ones(3)


@each_mode
def test_a_new_optimizer_over_an_initialised_model_is_refused(dtype: torch.dtype, masters: Any) -> None:
    model, optimizer = begin(dtype, masters)
    pull(model, optimizer)
    new = SGD(model.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=r"mpinit.add_optimizers\(optimizer\) before its first step"):
        new.step()
    assert torch.equal(number(model), START)
    optimizer.step()
    mpinit.add_optimizers(new)
    optimizer.zero_grad()
    pull(model, new)
    new.step()
    assert torch.equal(number(model), (START - GRADIENT) - GRADIENT)


@each_mode
def test_reading_state_dicts_leaks_nothing(dtype: torch.dtype, masters: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    optimizer = Adam(model.parameters())
    mpinit.initialize(model, optimizer, **keywords("O2", dtype) | {"master_weights": masters})
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()

    def read() -> None:
        for _ in range(500):
            model.state_dict(), optimizer.state_dict(), mpinit.state_dict(optimizer)
        gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read()
        blocks, objects = sys.getallocatedblocks(), len(gc.get_objects())
        read()
    assert sys.getallocatedblocks() - blocks < 300
    assert len(gc.get_objects()) - objects < 50


KINDS: dict[str, dict[str, Any]] = {
    "split, parts": {"master_weights": "split"},
    "split, whole": {"master_weights": "split"},
    "int8": {"optimizer_state": "int8"},
    "split, int8": {"master_weights": "split", "optimizer_state": "int8"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _small_buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = request.node.callspec.params.get("kind") if hasattr(request.node, "callspec") else None
    if kind in KINDS and kind != "split, whole":
        monkeypatch.setattr(parts, "BUCKET_BYTES", 512)


class Own(torch.optim.Optimizer):
    """Momentum; ``way`` is what else its step does, which makes no difference to a loop that clears gradients."""

    steps_per_parameter = False

    def __init__(self, params: Any, lr: float = 0.05, way: str = "") -> None:
        super().__init__(params, {"lr": lr, "way": way})

    def update(self, parameter: torch.Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["average"] = torch.zeros_like(parameter)
        state["average"].mul_(0.9).add_(parameter.grad)
        parameter.add_(state["average"], alpha=-lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group["lr"], group["way"])
        if group["way"].startswith("zero_grad"):
            self.zero_grad(set_to_none=group["way"] == "zero_grad")

    def _step_one(self, parameter: torch.Tensor, lr: float, way: str) -> None:
        if way == "contiguous":
            parameter.data = parameter.data.contiguous()
        if way == "copy":
            parameter.data = parameter.data.clone()
        if way == "calls a method of its own":
            self.update(parameter, lr)
        else:
            Own.update(self, parameter, lr)
        if way == "clears":
            parameter.grad = None
        if way == "zeroes":
            parameter.grad.zero_()


def trained(kind: str, way: str, clears: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 80), nn.Tanh(), nn.Linear(80, 64))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = Own(model.parameters(), way=way)
    optimizer.steps_per_parameter = kind != "split, whole"
    mpinit.initialize(model, optimizer, "O5", **KINDS[kind])
    for index in range(4):
        if clears:
            optimizer.zero_grad()
        x = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(index))
        with mpinit.scale_loss(model(x).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@kinds
@pytest.mark.parametrize("way", ["contiguous", "copy", "calls a method of its own"])
def test_ways_of_writing_to_parameters(kind: str, way: str) -> None:
    torch.testing.assert_close(trained(kind, way), trained(kind, ""), rtol=0, atol=0)


@kinds
@pytest.mark.parametrize("way", ["clears", "zeroes", "zero_grad", "zero_grad to zero"])
def test_ways_of_clearing_gradients(kind: str, way: str) -> None:
    torch.testing.assert_close(trained(kind, way, clears=False), trained(kind, ""), rtol=0, atol=0)
