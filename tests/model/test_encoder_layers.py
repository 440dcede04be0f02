"""nn.TransformerEncoder at O2 with modules that stay float32: evaluation computes what training does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpinit

PADDING = torch.tensor([[False, False, False, True]] * 2)


# Attention does not call its output layer, an nn.Linear: kept alone, it keeps the attention.
KEPT = [nn.LayerNorm, nn.MultiheadAttention, nn.Linear, "*linear1", "*.out_proj", nn.TransformerEncoderLayer]


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["all", "padded"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("keep", KEPT, ids=str)
def test_evaluation_and_training_give_the_float32_result(keep: Any, level: str, padding: torch.Tensor | None) -> None:
    model, x = encoder(), torch.randn(2, 4, 8)
    want = model.train()(x, src_key_padding_mask=padding)
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, keep_fp32=[keep], verbosity=0)
    trained = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        evaluated = model.eval()(x, src_key_padding_mask=padding)
    seen = slice(None) if padding is None else slice(0, 3)
    torch.testing.assert_close(evaluated[:, seen], trained[:, seen], rtol=0, atol=0)
    torch.testing.assert_close(evaluated[:, seen].float(), want[:, seen], rtol=0.05, atol=0.05)


def test_the_fast_path_is_off_only_where_it_would_pass_a_module_by() -> None:
    original = torch.backends.mha.get_fastpath_enabled
    plain, first, second = encoder(), encoder(), encoder()
    mpinit.initialize(plain, None, "O2", verbosity=0)
    assert torch.backends.mha.get_fastpath_enabled is original
    for model in (first, second):
        mpinit.initialize(model, None, "O2", keep_fp32=[nn.LayerNorm], verbosity=0)
        assert not torch.backends.mha.get_fastpath_enabled()
    mpinit.undo(first)
    assert not torch.backends.mha.get_fastpath_enabled()
    casts = mpinit.initialize(nn.Linear(2, 2), None, "O1", cast_scope="model", verbosity=0)
    mpinit.undo(second)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.autocast("cpu"):
        assert not torch.backends.mha.get_fastpath_enabled()
    mpinit.undo(casts)
    assert torch.backends.mha.get_fastpath_enabled is original
