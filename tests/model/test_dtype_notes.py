"""What mpinit adds to torch's errors of dtypes in a 16-bit forward: one note with the ways out, and no cause."""

from collections.abc import Callable

import pytest
import torch
from models import ways
from torch import Tensor, nn

import mpinit

LEVELS = ways("O2", "O5", "model")


class Computes(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


MISSING: dict[str, Callable[[Tensor], Tensor]] = {
    "fft": lambda x: torch.fft.fft(x).real,
    "inv": lambda x: torch.linalg.inv(x @ x.mT),
    "lu": lambda x: torch.linalg.lu_factor(x)[0],
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "float32 constant": lambda x: x @ torch.eye(4),
}


@pytest.mark.parametrize("level", ["O5", "model"])
@pytest.mark.parametrize("name", MISSING)
def test_errors_of_dtypes_have_the_ways_out(name: str, level: str) -> None:
    model = Computes(MISSING[name])
    mpinit.initialize(model, **LEVELS[level])
    with pytest.raises((RuntimeError, TypeError)) as raised:
        model(torch.randn(4, 4))
    notes = raised.value.__notes__
    assert len(notes) == 1
    assert all(word in notes[0] for word in ("Computes", "bfloat16", "keep_fp32", "entry_points", "O4"))


@pytest.mark.parametrize("level", LEVELS)
def test_the_way_out_works(level: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.head = Computes(MISSING["fft"])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    for keywords in (LEVELS[level] | {"keep_fp32": ["head"]}, {"opt_level": "O4"}):
        model = Outer()
        mpinit.initialize(model, **keywords)
        assert model(torch.randn(2, 4)).dtype == torch.float32
        mpinit.undo(model)


def test_functional_call_of_a_state_dict_has_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.ones(1, 4)
    expected = model(x)
    mpinit.initialize(model, opt_level="O5")
    with pytest.raises(RuntimeError) as raised:
        torch.func.functional_call(model, model.state_dict(), x)
    assert "mpinit.float32_weights(model)" in raised.value.__notes__[0]
    with mpinit.float32_weights(model):
        assert torch.allclose(torch.func.functional_call(model, model.state_dict(), x), expected, atol=0.02)


def test_a_layer_after_compute_fp32_has_the_way_out() -> None:
    for keyword in ("compute_fp32", "keep_fp32"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        mpinit.initialize(model, opt_level="O5", **{keyword: ["1"]})
        if keyword == "compute_fp32":
            with pytest.raises(RuntimeError, match="dtype") as raised:
                model(torch.randn(2, 4))
            assert "compute_fp32, it returns float32" in raised.value.__notes__[0]
        else:
            assert model(torch.randn(2, 4)).dtype == torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_other_errors_have_no_note(level: str) -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("too many sheep")

    model = Computes(refuse)
    mpinit.initialize(model, opt_level=level)
    with pytest.raises(ValueError, match="too many sheep") as raised:
        model(torch.randn(2, 4))
    assert not getattr(raised.value, "__notes__", [])


def test_no_note_where_the_forward_is_float32() -> None:
    model = Computes(lambda x: x @ torch.eye(4, dtype=torch.float64))
    mpinit.initialize(model, opt_level="O0")
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(2, 4))
    assert not getattr(raised.value, "__notes__", [])


def test_methods_are_the_models_own() -> None:
    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def encode(self, x: Tensor) -> Tensor:
            return x @ self.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    model = Encodes()
    mpinit.initialize(model, opt_level="O5", entry_points=["encode"])
    assert model.encode(torch.ones(1, 4)).dtype == torch.float32
    mpinit.undo(model)
    model = Encodes()
    mpinit.initialize(model, opt_level="O5")
    assert "encode" not in vars(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model.encode(torch.ones(1, 4))
