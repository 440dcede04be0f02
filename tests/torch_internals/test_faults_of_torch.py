"""Faults of torch that mpinit works around: a test fails when torch is right, and names the file that can then go."""

import pytest
import torch
from torch import nn


def test_a_write_through_data_is_not_counted() -> None:
    """``torch_internals/parameter_data.py``."""
    weight = nn.Parameter(torch.ones(2))
    before = weight._version
    weight.data.fill_(2.0)
    assert weight._version == before


def test_compilation_refuses_a_gradient_of_another_dtype() -> None:
    """``torch_internals/compiling_with_gradients.py``. Without ``fullgraph`` the model runs uncompiled."""
    weight, x = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), torch.ones(1, 2, dtype=torch.bfloat16)
    weight.grad_dtype = None
    weight.grad = torch.ones_like(weight, dtype=torch.float32)

    def forward(x: torch.Tensor) -> torch.Tensor:  # new code: torch skips what it could not compile once
        return x @ weight

    with pytest.raises(Exception, match="dtype mismatch between tensor and its gradient"):
        torch.compile(forward, backend="eager", fullgraph=True)(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_of_cast_that_is_used_twice_add_up_in_16_bits() -> None:
    """``torch_internals/float32_gradients.py``."""
    weight = nn.Parameter(torch.ones(1))
    cast = weight.to(torch.bfloat16)
    (cast * 256 + cast).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 256
    with pytest.raises(RuntimeError, match="grad_dtype"):
        cast.grad_dtype = torch.float32


@pytest.mark.parametrize("stops", ["embedding", "embedding_bag"])
def test_sums_of_a_cpu_stop_at_256_in_bfloat16(stops: str) -> None:
    """``torch_internals/sums_on_cpu.py``."""
    module = {"embedding": nn.Embedding(2, 8), "embedding_bag": nn.EmbeddingBag(2, 8)}[stops].bfloat16()
    module(torch.zeros(1024, 1, dtype=torch.long, device="cpu")).sum().backward()
    trained = list(module.parameters())[-1].grad
    assert trained is not None and trained.flatten()[0].item() == 256


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="right from torch 2.15 on, when no older one is supported")
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="seen with AVX-512 only")
def test_fused_sgd_leaves_out_16_bit_numbers_on_a_cpu() -> None:
    """``torch_internals/fused_sgd.py``."""
    weight = nn.Parameter(torch.ones(512, dtype=torch.bfloat16, device="cpu"))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    assert not bool((weight == 0.5).all())


def test_autocast_of_cpu_cannot_concatenate_other_16_bit_dtype() -> None:
    """``autocast/cpu_autocast_list.py``."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.cat([torch.ones(1, dtype=torch.float16)])


def test_the_fast_path_of_an_encoder_ignores_a_forward_inside() -> None:
    """``autocast/encoder_fast_path.py``."""
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    inner, calls = layer.linear1.forward, []

    def patched(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return inner(x)

    layer.linear1.forward = patched  # type: ignore[method-assign]
    with torch.inference_mode():
        layer(torch.ones(1, 3, 8))
    assert not calls
