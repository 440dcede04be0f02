"""Models of transformers, timm and PEFT: warnings, recomputed activations, compiled outputs and compiled blocks."""

import warnings
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, marked_for, needs, tiny_model
from loops import backward
from models import dynamic, equal_tensors
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
    mpinit.initialize(model, optimizer, "O5", **more)
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
    mpinit.initialize(model, opt_level="O5")
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
    mpinit.initialize(model, optimizer, "O5", **more)
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


SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SPECIAL, "num_key_value_heads": 1}
IMAGES = {"image_size": 8, "num_labels": 3}
SEQ2SEQ = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1, "d_model": 16}
# Class of the model -> its configuration beside SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 2},
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": {**LLAMA, "head_dim": 8},
    "GemmaForCausalLM": {**LLAMA, "head_dim": 8},
    "PhiForCausalLM": SPECIAL,
    "GPT2LMHeadModel": SPECIAL,
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "BloomForCausalLM": {},
    "FalconForCausalLM": {},
    "MambaForCausalLM": {**SPECIAL, "state_size": 4},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": {**SPECIAL, **SEQ2SEQ, **HEADS, "forced_eos_token_id": 2},
    "BertForSequenceClassification": {},
    "DistilBertForSequenceClassification": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "RobertaForSequenceClassification": {"pad_token_id": 0},
    "ElectraForSequenceClassification": {"embedding_size": 16},
    "AlbertForSequenceClassification": {"embedding_size": 16},
    "ViTForImageClassification": {**IMAGES, "patch_size": 4},
    "DeiTForImageClassification": {**IMAGES, "patch_size": 4},
    "ConvNextForImageClassification": {**IMAGES, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "timm": {},
}
# Warnings of mpinit, for every model and level that has any: parts of their texts, in order.
WARNINGS: dict[tuple[str, str], list[str]] = {}


def of_library(name: str) -> nn.Module:
    let_torchvision_load()
    torch.manual_seed(0)
    if name == "timm":
        timm = needs("timm")
        sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
        return timm.create_model("vit_tiny_patch16_224", **sizes)
    cls = getattr(needs("transformers"), name)
    return cls(cls.config_class(**{**SIZES, **MODELS[name]}))


def loss_of(name: str, model: nn.Module) -> Tensor:
    classes = torch.tensor([0, 1, 0])
    if name == "timm":
        return nn.functional.cross_entropy(model(torch.randn(3, 3, 8, 8)), classes)
    if "Image" in name:
        return model(pixel_values=torch.randn(3, 3, 8, 8), labels=classes).loss
    return model(input_ids=IDS, labels=classes if "Classification" in name else IDS).loss


@marked_for("transformers", "timm")
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_library_trains_with_no_warning_but_these(name: str, level: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the libraries deprecate
        model = of_library(name).train()
        loss_of(name, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpinit.initialize(model, optimizer, level, **dynamic(level, init=128.0))
        for _ in range(2):
            loss = loss_of(name, model)
            backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    said = [str(each.message) for each in caught if not issubclass(each.category, (FutureWarning, DeprecationWarning))]
    expected = WARNINGS.get((name, level), [])
    assert len(said) == len(expected), said
    assert all(part in text for part, text in zip(expected, said, strict=True)), said
    assert loss.isfinite()
    mpinit.undo(model)
    # DeiT starts with embeddings of 0. On a CPU the backward of their norm, with an eps of 1e-12, is nan in float16.
    is_skipped = (name, level) == ("DeiTForImageClassification", "O2")
    assert equal_tensors(dict(enumerate(before)), dict(enumerate(model.parameters()))) is is_skipped


@marked_for("transformers")
def test_a_norm_of_rows_of_zeros_trains_in_float16() -> None:
    rows = torch.zeros(2, 16, dtype=torch.float16, requires_grad=True)
    norm = nn.LayerNorm(16, eps=1e-12).half()
    norm(rows).sum().backward()
    assert norm.weight.grad.isnan().all(), "torch keeps 1 / sqrt(eps) in float16"
    name = "DeiTForImageClassification"
    counts = []
    for kept in ((), "deit.layers.0.layernorm_before"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the libraries deprecate
            model = of_library(name).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=4.0), keep_fp32=kept)
        for _ in range(4):
            backward(loss_of(name, model), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(mpinit.step_counts(optimizer))
        mpinit.undo(model)
    assert counts == [(0, 4), (4, 0)]
