"""Models of transformers and PEFT: recomputed activations, compiled outputs, blocks compiled one by one."""

from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, marked_for, needs, tiny_model
from loops import backward
from models import equal_tensors
from torch import Tensor, nn

import mpinit

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo asks for it
    pytest.mark.filterwarnings("ignore:casts to 16 bits lose"),  # rotary frequencies
]

IDS = torch.arange(24).reshape(3, 8) % 32


def adapted(base: torch.dtype, reentrant: bool | None, **more: Any) -> Any:
    let_torchvision_load()
    peft = needs("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(tiny_model("llama").to(base), lora)
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def trained(model: nn.Module, **more: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    mpinit.initialize(model, optimizer, "O5", verbosity=0, **more)
    for _ in range(2):
        backward(model(input_ids=IDS, labels=IDS).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    mpinit.undo(model)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@marked_for("transformers", "peft")
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", [True, "model"])
def test_adapters_kept_in_float32_train_alike_when_recomputed(
    base: torch.dtype, more: dict[str, Any], kind: Any
) -> None:
    plain, *recomputed = (
        trained(adapted(base, reentrant, **more), keep_fp32=["*lora_*"], master_weights=kind)
        for reentrant in (None, False, True)
    )
    assert all(equal_tensors(plain, each) for each in recomputed)


@marked_for("transformers")
def test_a_compiled_model_returns_every_entry() -> None:
    let_torchvision_load()
    needs("transformers")
    model = tiny_model("llama")
    names = list(model(input_ids=IDS, labels=IDS))  # the last, a cache's, is another in each version of the library
    mpinit.initialize(model, opt_level="O5", verbosity=0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    expected, output = model(input_ids=IDS, labels=IDS), compiled(input_ids=IDS, labels=IDS)
    assert type(output) is type(expected)
    assert list(output) == list(expected) == names and names[:2] == ["loss", "logits"] and len(names) == 3
    assert torch.equal(output.loss, expected.loss)
    assert output.logits.dtype is torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(torch.relu(self.first(self.norm(x))))
        return result


@pytest.mark.parametrize(
    "more", [{}, {"keep_fp32": [nn.LayerNorm]}, {"master_weights": "model"}], ids=["full", "kept norms", "model"]
)
def test_blocks_compiled_one_by_one_all_run_compiled(more: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*[Block() for _ in range(24)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5", verbosity=0, **more)
    graphs, runs = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *arguments: runs.append(graph) or graph(*arguments)

    for block in model:
        block.compile(backend=backend)
    for _ in range(3):
        runs.clear()
        backward(model(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
        assert len(runs) == 24
    assert len(graphs) <= 2, "one for the first, whose input takes no gradient"
