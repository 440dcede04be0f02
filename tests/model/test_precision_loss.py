"""Set-up names numbers that a cast spoils for good, with the entry that keeps them, and no others.

Below the public face: the criterion is tried on many tensors, without a model.
"""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, Parts, quietly
from torch import Tensor, nn

import mpinit
from mpinit.model.precision_loss import loss_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BOTH = (F16, BF16)


def inverse_frequencies(dim: int = 64, base: float = 10000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def sinusoidal(length: int = 600, dim: int = 32) -> Tensor:
    angles = torch.arange(length)[:, None] * inverse_frequencies(dim)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


SPOILT: dict[str, tuple[Callable[[], Tensor], tuple[torch.dtype, ...], str]] = {
    "position ids": (lambda: torch.arange(4096.0)[None], BOTH, "whole numbers up to 4,095"),
    "few position ids": (lambda: torch.arange(512.0), (BF16,), "whole numbers up to 511"),
    "a counter": (lambda: torch.tensor(4097.0), BOTH, "whole numbers up to 4,097"),
    "rotary": (inverse_frequencies, BOTH, "table from 1 to 0.000133"),
    "Fourier features": (lambda: torch.logspace(0, 3, 16), BOTH, "table"),
    "reference energies": (lambda: torch.tensor([-13.6, -1029.9, -2042.42]), BOTH, "contains -"),
    "a reference energy": (lambda: torch.tensor(-2042.42), (F16,), "contains -2,042.42, which is -2,042 in float16"),
    "energies of two heads": (lambda: torch.tensor([[-13.6], [-2042.42]]), (BF16,), "which is -2,040 in bfloat16"),
    "a noise schedule": (lambda: torch.linspace(1e-4, 0.02, 1000), BOTH, "table"),
}

WHOLE: dict[str, Callable[[], Tensor]] = {
    "mean in bytes": lambda: torch.tensor([123.675, 116.28, 103.53]),
    "constants of masks": lambda: torch.tensor([-1e4, -1e9, 0.0, torch.finfo(F32).min]),
    "weights of classes": lambda: torch.tensor([0.1, 0.7, 1.5, 4.0]),
    "embedding of positions": sinusoidal,
    "causal mask": lambda: torch.full((8, 8), float("-inf")).triu(1),
    "mask of 10001": lambda: torch.full((1, 8), 10001.0).triu(1),
    "random": lambda: torch.rand(512, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-6,
    "a grid": lambda: torch.linspace(0, 1, 33),
    "powers of two": lambda: 2.0 ** torch.arange(8),
    "nan": lambda: torch.tensor([float("nan"), 5000.0]),
    "nothing": lambda: torch.empty(0),
}


@pytest.mark.parametrize(("make", "dtypes", "words"), SPOILT.values(), ids=SPOILT)
def test_damaging_casts_are_found(make: Callable[[], Tensor], dtypes: tuple[torch.dtype, ...], words: str) -> None:
    for dtype in BOTH:
        found = loss_of(make(), dtype)
        assert (found is not None and words in found) is (dtype in dtypes), (dtype, found)


class Energies(nn.Module):
    """A reference energy of each atom, and what a network learns beside their sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.references = nn.Buffer(torch.tensor([-13.6, -1029.9, -2042.42]))
        self.learned = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, kinds: Tensor) -> Tensor:
        counts = nn.functional.one_hot(kinds, 3).sum(1).to(self.learned[0].weight.dtype)
        return self.references[kinds].sum(1) + self.learned(counts).squeeze(-1)  # type: ignore[no-any-return]


def test_reference_energies_are_learned_with_the_warned_entry() -> None:
    def error(level: str, **more: Any) -> float:
        model, kinds = Energies(), torch.randint(0, 3, (64, 4), generator=torch.Generator().manual_seed(0))
        truth = model.references[kinds].double().sum(1) + nn.functional.one_hot(kinds, 3).sum(1).sin().sum(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mpinit.initialize(model, optimizer, level, verbosity=0, **more)
        for _ in range(200):
            loss = (model(kinds).double() - truth).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach()) ** 0.5

    with pytest.warns(UserWarning, match=r"references contains .* in bfloat16.*keep_fp32=\['references'\]"):
        assert error("O5") > 3
    plain = error("O0")
    assert plain < 0.5 and error("O5", keep_fp32=["references"]) < 1.5 * plain + 0.05


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_float64_constants_are_not_cast_and_not_named(level: str) -> None:
    model = Energies()
    model.references = nn.Buffer(model.references.double())
    mpinit.initialize(model, opt_level=level, verbosity=0)
    assert model.references.dtype is torch.float64 and model.references[2].item() == Energies().references[2].item()


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
@pytest.mark.parametrize("comes", ["first", "later"])
def test_eps_of_an_optimizer_that_is_0_in_float16_is_warned_of(comes: str, eps: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if comes == "first":
            mpinit.initialize(model, optimizer, "O3", verbosity=0)
        else:
            mpinit.initialize(model, opt_level="O3", verbosity=0, await_optimizers=True)
            mpinit.add_optimizers(optimizer)
    x = torch.randn(8, 4)
    x[:, 0] = 0.0
    (model(x).square().mean() * 1e-3).backward()
    optimizer.step()
    assert bool(model.weight.isnan().any()) is (eps == 1e-8)
    assert [bool(re.search(r"eps=1e-08 of Adam is 0 in float16.*O2", str(each.message))) for each in caught] == (
        [True] if eps == 1e-8 else []
    )


@pytest.mark.parametrize("level", ["O2", "O5", "bfloat16", "fused"])
def test_eps_of_an_optimizer_with_masters_or_in_bfloat16_is_fine(level: str) -> None:
    model = nn.Linear(4, 4)
    how = (
        {"opt_level": "O3", "cast_model_type": BF16}
        if level == "bfloat16"
        else {"opt_level": "O3" if level == "fused" else level}
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=level == "fused")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpinit.initialize(model, optimizer, verbosity=0, **how)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_rounded_values_do_not_warn(make: Callable[[], Tensor]) -> None:
    assert [loss_of(make(), dtype) for dtype in BOTH] == [None, None]


@pytest.mark.parametrize("level", ["O3", "O5"])
@pytest.mark.parametrize("case", CASES)
def test_trained_models_do_not_warn(case: str, level: str) -> None:
    model = CASES[case].build()
    model(CASES[case].batches(1)[0][0])
    quietly(model, level)  # a warning is an error


def network() -> Any:
    """Angles for positions, from a table of frequencies, and a layer with whole numbers."""

    def rotate(self: Any, x: Tensor) -> Tensor:
        return x + torch.outer(torch.arange(x.shape[0]).to(self.inv_freq), self.inv_freq).cos()

    rotary, layer = Parts(rotate, inv_freq=nn.Buffer(inverse_frequencies())), nn.Linear(2, 2)
    layer.register_buffer("ids", torch.arange(1.0, 3001.0))
    return Parts(lambda self, x: self.layer(self.rotary(x)[:, :2]), rotary=rotary, layer=layer)


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_one_warning_names_them_and_its_entries_keep_them(level: str) -> None:
    x, model = torch.randn(1000, 32), network()
    expected = model.rotary(x)
    with pytest.warns(UserWarning, match="lose values for good") as caught:
        quietly(model, level)
    (warning,) = caught
    words = str(warning.message)
    assert "keep_fp32=['rotary', 'layer.ids']" in words
    assert "rotary.inv_freq is a table" in words
    mpinit.undo(model)
    quietly(model, level, keep_fp32=["rotary", "layer.ids"])
    assert model.rotary.inv_freq.dtype is model.layer.ids.dtype is F32
    assert model.layer.weight.dtype is not F32
    assert torch.equal(model.rotary(x), expected), "the angles are those of float32"
    assert model(x).isfinite().all()
    mpinit.undo(model)
    quietly(model, "O1")  # casts no buffer: no warning


def test_frozen_parameters_are_tables_and_trained_ones_are_not() -> None:
    model = nn.Module()
    model.frozen = nn.Parameter(inverse_frequencies(), requires_grad=False)
    model.trained = nn.Parameter(inverse_frequencies())
    with pytest.warns(UserWarning, match=r"frozen is a table[^;]*keep_fp32=\['frozen'\]"):
        quietly(model, "O5")


def scaled() -> Any:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second((x.float() * self.gain + self.shift).to(x.dtype))

    third = torch.full((4,), 1 / 3)
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    return Parts(run, **layers, gain=nn.Parameter(third.clone()), shift=nn.Buffer(third))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (["gain", "shift"], {"gain", "shift"}),
        ("*.bias", {"first.bias", "second.bias"}),
        ("first*", {"first.weight", "first.bias"}),
        (["second", "shift"], {"second.weight", "second.bias", "shift"}),
    ],
)
def test_names_of_parameters_and_buffers_keep_them_float32(entry: str, expected: set[str]) -> None:
    model = scaled()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O2", keep_fp32=entry, loss_scale=1.0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name for name, tensor in tensors.items() if tensor.dtype is F32} == expected
    if entry != "*.bias":  # there the code would have to cast
        for _ in range(2):
            optimizer.zero_grad()
            with mpinit.scale_loss(model(torch.randn(3, 4)).square().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert not torch.equal(model.gain, before["gain"])
        model.load_state_dict(before)
    mpinit.undo(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in expected)
    assert model.shift.dtype is model.gain.dtype is F32


def test_name_of_module_means_module_and_no_tensor_besides() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "rest": nn.Linear(2, 2)})
    model.embed_scale = nn.Parameter(torch.ones(2))
    quietly(model, "O2", keep_fp32="embed*")
    assert model["embed"].weight.dtype is F32
    assert model.embed_scale.dtype is F16


def target_and_net(**more: object) -> tuple[nn.Module, nn.Module]:
    net = nn.Linear(4, 4)
    target = copy.deepcopy(net).requires_grad_(False)
    mpinit.initialize([net, target], torch.optim.SGD(net.parameters(), lr=0.1), "O5", **more)
    return net, target


def test_a_target_network_without_an_optimizer_is_named() -> None:
    with pytest.warns(UserWarning, match=r"models\[1\], a Linear, is like models\[0\].*\"model\""):
        target_and_net()


def test_a_target_network_in_float32_follows() -> None:
    net, target = target_and_net(master_weights="model")
    with torch.no_grad():
        target.weight.fill_(0.0), net.weight.fill_(1.0)
        for _ in range(200):
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
    torch.testing.assert_close(target.weight[0, 0].item(), 1 - 0.99**200, rtol=1e-4, atol=0)


def test_a_discriminator_is_no_target_network() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    # A warning is an error.
    mpinit.initialize([first, second], torch.optim.SGD(first.parameters(), lr=0.1), "O5")


# -- states of recurrent networks --------------------------------------------------------------------------------------


def slow(network: nn.Module) -> nn.Module:
    """Make a network whose state moves a little in each step: an LSTM that counts, a GRU that hardly forgets."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            size = weight.shape[0] // 4 if isinstance(network, (nn.LSTM, nn.LSTMCell)) else 16
            if isinstance(network, (nn.RNN, nn.RNNCell)):
                weight.copy_(torch.eye(16) if "weight_hh" in name else torch.full_like(weight, 0.25 * ("ih" in name)))
                weight.mul_("weight" in name)
            elif "weight" in name:
                weight.mul_(0.1)
            elif "bias_ih" in name:
                weight[:size] = 8.0 if size * 4 == len(weight) else 0.0
                weight[size : 2 * size] = 20.0 if size * 4 == len(weight) else 6.0
                weight[2 * size : 3 * size] = 1.0
    return network


class Reader(nn.Module):
    """Reads a sequence and returns the last state."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state: Any = None
        if isinstance(self.network, nn.RNNBase):
            _, state = self.network(x)
        else:
            for step in x:
                state = self.network(step, state)
        hidden, last = state if isinstance(state, tuple) else (state, state)
        return self.head(hidden.to(self.head.weight.dtype)), last


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "LSTM": (lambda: nn.LSTM(4, 16), {"keep_fp32": [nn.LSTM]}),
    "GRU": (lambda: nn.GRU(4, 16), {"keep_fp32": [nn.GRU]}),
    "RNN": (lambda: nn.RNN(4, 16, nonlinearity="relu"), {"keep_fp32": [nn.RNN]}),
    "LSTMCell": (lambda: nn.LSTMCell(4, 16), {"compute_fp32": [nn.LSTMCell]}),
    "GRUCell": (lambda: nn.GRUCell(4, 16), {"compute_fp32": [nn.GRUCell]}),
    "RNNCell": (lambda: nn.RNNCell(4, 16, nonlinearity="relu"), {"compute_fp32": [nn.RNNCell]}),
}


def last_states(make: Callable[[], nn.Module], level: str, keywords: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the last state at a level, and in float32."""
    torch.manual_seed(0)
    model = Reader(slow(make()))
    plain, x = copy.deepcopy(model), torch.ones(400, 2, 4)
    mpinit.initialize(model, opt_level=level, verbosity=0, **keywords)
    found = model(x)[1]
    mpinit.undo(model)
    return found, plain(x)[1]


@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_state_in_bfloat16_is_warned_of_and_its_entry_is_right(name: str, level: str) -> None:
    make, entry = NETWORKS[name]
    if level == "O4":
        entry = {"compute_fp32": [getattr(nn, name)]}
    keyword = next(iter(entry))
    with pytest.warns(UserWarning, match=rf"torch\.nn\.{name} is bfloat16.*{keyword}=\[torch\.nn\.{name}\]"):
        found, exact = last_states(make, level, {})
    assert (found - exact).norm() > 0.05 * exact.norm(), "18 % (LSTM), 8 % (GRU), 36 % (RNN)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, exact = last_states(make, level, entry)
    assert (found - exact).norm() < 0.003 * exact.norm()


def test_a_state_in_float16_is_not_warned_of() -> None:
    found, exact = last_states(NETWORKS["LSTM"][0], "O2", {})
    assert (found - exact).norm() < 0.03 * exact.norm()
