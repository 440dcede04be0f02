"""Modules that are kept in float32 by the name of a recipe."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, needs, tiny_model
from torch import Tensor, nn

import mpinit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class RmsNorm(nn.Module):
    """A norm that computes in the type of its input."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm, self.gate, self.head = RmsNorm(eps), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.head(x) * self.gate(x).softmax(-1)[..., :1]


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.layers, self.lm_head = nn.Sequential(Block(eps), Block(eps)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.layers(x))


def kept(model: nn.Module, level: str = "O5", **keywords: Any) -> set[str]:
    mpinit.initialize(model, opt_level=level, **keywords)
    found = {name for name, parameter in model.named_parameters() if parameter.dtype is F32}
    mpinit.undo(model)
    return {name.rpartition(".")[0] for name in found}


def test_each_recipe_keeps_what_it_is_named_after() -> None:
    assert kept(Net(), keep_fp32="@router_gates") == {"layers.0.gate", "layers.1.gate"}
    assert kept(Net(), keep_fp32=["@final_heads"]) == {"lm_head"}, "blocks have heads of their own"
    assert kept(Net(1e-8), "O2", keep_fp32=["@small_eps_norms"]) == {"layers.0.norm", "layers.1.norm"}
    assert kept(Net(), keep_fp32=["@final_heads", "layers.1.norm"]) == {"lm_head", "layers.1.norm"}


def test_rotary_tables_and_heads_of_a_llama() -> None:
    let_torchvision_load()
    needs("transformers")
    model = tiny_model("llama").eval()
    ids = torch.arange(16)[None] % 32
    expected = model(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tables are warned of where they are not kept
        mpinit.initialize(model, opt_level="O5", keep_fp32=["@rotary_tables", "@final_heads"])
    assert model.model.rotary_emb.inv_freq.dtype is model.lm_head.weight.dtype is F32
    assert model.model.layers[0].mlp.gate_proj.weight.dtype is BF16
    assert torch.allclose(model(ids).logits, expected, atol=0.05)


def test_norms_whose_eps_is_0_in_float16_are_named_in_advance_and_kept() -> None:
    x = torch.zeros(2, 8)
    model = Net(1e-8)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"layers\.0\.norm \(1e-08\), layers\.1\.norm.*@small_eps_norms"):
        mpinit.initialize(model, opt_level="O2")
    assert model(x).isnan().any(), "which is what the warning says"
    mpinit.undo(model)
    mpinit.initialize(model, opt_level="O2", keep_fp32="@small_eps_norms")
    assert torch.allclose(model(x), expected, atol=0.01)
    mpinit.undo(model)
    mpinit.initialize(model, opt_level="O2", keep_fp32="layers")
    mpinit.undo(model)
    mpinit.initialize(model, opt_level="O5")  # bfloat16 has 1e-8


def test_norms_of_torch_compute_in_float32_with_any_eps() -> None:
    model = nn.Sequential(nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 2))
    mpinit.initialize(model, opt_level="O2")
    assert model(torch.zeros(2, 8)).isfinite().all()


def test_a_recipe_that_is_none_or_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no recipe '@router_gate'; did you mean '@router_gates'"):
        mpinit.initialize(Net(), opt_level="O2", keep_fp32="@router_gate")
    with pytest.raises(ValueError, match="'@rotary_tables' matches no module"):
        mpinit.initialize(Net(), opt_level="O2", keep_fp32="@rotary_tables")


def test_recipes_in_configurations_and_json(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('opt_level = "O5"\nkeep_fp32 = ["@final_heads"]\n', encoding="utf-8")
    assert kept(Net(), config=str(file)) == {"lm_head"}
    props = mpinit.Properties(keep_fp32=["@final_heads"])
    assert mpinit.Properties.model_validate_json(props.model_dump_json()) == props
