"""What models of transformers list as float32, and the files that ``save_pretrained`` writes after ``initialize``."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import needs, tiny_model
from safetensors.torch import load_file

import mpinit
from mpinit.integrations.pretrained import save_in

transformers = needs("transformers")
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "pad_token_id": 0},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
GATES = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
# Class, what its configuration needs, and the names that it lists.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", SIZES | LATENT, GATES),
    "GLM-4 MoE": ("Glm4MoeForCausalLM", "Glm4MoeConfig", SIZES | {"head_dim": 8}, GATES),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", SIZES | {"head_dim": 8}, GATES),
}
LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "loss_scale": 128.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "model": {"opt_level": "O5", "master_weights": "model"},
}


def trained(model: Any, level: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mpinit.initialize(model, optimizer, verbosity=0, **level)
    x = torch.randint(1, 30, (2, 8), generator=torch.Generator().manual_seed(0))
    with mpinit.scale_loss(model(input_ids=x, labels=x).loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:casts to 16 bits lose")  # of the rotary tables of a model that comes in float32
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_gates_stay_float32_in_memory_steps_and_files(name: str, level: str, tmp_path: Path) -> None:
    kind, config, sizes, listed = MODELS[name]
    made = getattr(transformers, config)(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(made)
    assert model._keep_in_fp32_modules_strict
    narrow = torch.float16 if level == "O2" else torch.bfloat16
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inside: dict[str, torch.dtype] = {}

    def look(module: Any, _: Any, own: str) -> None:
        inside.update({f"{own}.{key}": value.dtype for key, value in module._parameters.items() if value is not None})

    for own, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, given, own=own: look(module, given, own))
    trained(model, LEVELS[level])
    kept = [key for key in before if key.endswith(listed)]
    assert len(kept) == 2
    for key, dtype in inside.items():
        if before[key].is_floating_point():
            assert dtype is (torch.float32 if key in kept else narrow), key
    state = model.state_dict()
    gate = next(key for key in kept if key.endswith("gate.weight"))
    assert not torch.equal(state[gate], before[gate]), "trained"
    save_in(model, narrow)
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    again = type(model).from_pretrained(tmp_path).state_dict()
    for key in kept:
        assert file[key].dtype is again[key].dtype is torch.float32
        assert torch.equal(file[key], state[key]) and torch.equal(again[key], state[key])
    assert {value.dtype for key, value in again.items() if key not in kept} == {narrow}


@pytest.mark.parametrize(("level", "kept"), [("O2", torch.float32), ("O5", torch.bfloat16)])
def test_t5_lists_for_float16_alone(level: str, kept: torch.dtype) -> None:
    model = tiny_model("t5")
    mpinit.initialize(model, torch.optim.AdamW(model.parameters()), verbosity=0, **LEVELS[level])
    assert {p.dtype for name, p in model.named_parameters() if ".wo." in name} == {kept}
    assert model.shared.weight.dtype is (torch.float16 if level == "O2" else torch.bfloat16)


@pytest.mark.parametrize("comes", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", LEVELS)
def test_save_pretrained_writes_what_is_read_with_all_bits(level: str, comes: torch.dtype, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_model("llama").config, dtype=comes)
    config = copy.deepcopy(model.config)
    more = {"keep_fp32": ["*inv_freq"]} if comes is torch.float32 else {}
    trained(model, LEVELS[level] | more)
    model.save_pretrained(tmp_path)
    again, state = type(model).from_pretrained(tmp_path), model.state_dict()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert all(
        value.dtype is torch.float32 and torch.equal(value, state[key]) for key, value in again.named_parameters()
    )
    mpinit.undo(model)
    assert "save_pretrained" not in vars(model) and model.config.vocab_size == config.vocab_size


def test_save_in_is_what_one_chooses(tmp_path: Path) -> None:
    model = tiny_model("llama")
    mpinit.initialize(model, opt_level="O5", verbosity=0, keep_fp32=["*inv_freq"])
    save_in(model, torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in type(model).from_pretrained(tmp_path).parameters()} == {torch.bfloat16}
