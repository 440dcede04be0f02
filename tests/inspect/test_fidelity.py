"""``fidelity``: to the bit where it is promised, and planted differences found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, marks_for, needs, tiny_model
from loops import iterate
from models import LEVELS
from torch import Tensor, nn

import mpinit
from mpinit.integrations.pretrained import save_in

IDS = torch.arange(24).reshape(3, 8) % 32
let_torchvision_load()
WAYS = LEVELS | {"O2": {"opt_level": "O2"}, "model": {"opt_level": "O5", "master_weights": "model"}}
with_masters = pytest.mark.parametrize("way", ["O2", "O5", "split", "model"])
pytestmark = [
    *marks_for("transformers", "peft"),
    pytest.mark.filterwarnings("ignore:casts to 16 bits lose"),  # rotary frequencies
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # peft asks for it
]


def learnt(model: Any, steps: int = 3, **asked: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    mpinit.initialize(model, optimizer, verbosity=0, **asked)
    for _ in range(steps):
        iterate(model(input_ids=IDS, labels=IDS).loss, optimizer)
    return optimizer


def logprobs(output: Any) -> Tensor:
    return output.logits.float().log_softmax(-1)  # type: ignore[no-any-return]


def compared(model: Any, **more: Any) -> Any:
    return mpinit.fidelity(model, input_ids=IDS, output=logprobs, **more)


@with_masters
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_trained_is_what_is_served_to_the_bit(name: str, way: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    learnt(model, **WAYS[way])
    found = compared(model)
    assert found and (found.mean, found.largest, found.share, found.first_module) == (0.0, 0.0, 0.0, None)
    assert "to the bit" in str(found)
    dtype = torch.float16 if way == "O2" else torch.bfloat16
    save_in(model, dtype)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    with torch.no_grad():
        served, trained = loaded(IDS).logits.float(), model.eval()(input_ids=IDS).logits.float()
    # A server's loader leaves the rotary frequencies, which no file holds, in float32.
    assert torch.equal(served, trained) if name == "gpt2" else torch.allclose(served, trained, atol=0.02)
    if name == "gpt2":
        assert compared(model, served=loaded)


@with_masters
def test_after_a_resume_too(way: str) -> None:
    first = tiny_model("gpt2")
    optimizer = learnt(first, **WAYS[way])
    state = mpinit.TrainState(first, optimizer).state_dict()
    mpinit.undo(first)
    model = tiny_model("gpt2", seed=1)
    again = learnt(model, steps=0, **WAYS[way])
    mpinit.TrainState(model, again).load_state_dict(state)
    assert compared(model)


def test_split_masters_round_ties_away_from_zero_and_are_served_as_they_are() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0 + 2.0**-8, 1.0]]))  # a tie between two bfloat16 numbers
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **WAYS["split"], verbosity=0)
    assert model.weight[0, 0] == 1.0 + 2.0**-7, "even would be 1"
    assert mpinit.fidelity(model, torch.ones(1, 2))


@pytest.mark.parametrize("way", ["O5", "split"])
def test_with_lora(way: str) -> None:
    peft = needs("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama").bfloat16(), lora).train()
    learnt(model, **WAYS[way])
    assert all(p.detach().abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    assert compared(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_float32_weights_part_from_what_is_served(level: str) -> None:
    model = tiny_model("gpt2")
    learnt(model, opt_level=level)
    found = compared(model)
    assert not found and 0 < found.mean <= found.largest < 1.0 and 0 < found.share <= 1
    assert found.first_module is not None and found.first_module in str(found)
    assert found.served == ("float16" if level == "O1" else "bfloat16")
    loose = compared(model, tolerance=found.largest)
    assert loose.share == 0.0 and loose.mean == found.mean


def test_torch_autocast_around_it_counts_for_the_model_that_is_trained() -> None:
    model = tiny_model("gpt2")
    with torch.autocast("cpu", torch.bfloat16):
        inside = compared(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trained = logprobs(model.eval()(input_ids=IDS))
    with torch.no_grad():
        served = logprobs(tiny_model("gpt2").bfloat16().eval()(input_ids=IDS))
    assert inside.mean == pytest.approx(float((trained - served).abs().mean()))


def test_a_module_that_is_kept_in_float32_is_named() -> None:
    model = tiny_model("gpt2")
    learnt(model, opt_level="O5", keep_fp32=["transformer.h.1.ln_2"])
    assert compared(model).first_module == "transformer.h.1.ln_2"


def test_a_weight_that_was_written_after_the_export_is_named() -> None:
    model = tiny_model("gpt2")
    learnt(model, opt_level="O5")
    served = tiny_model("gpt2").bfloat16()
    served.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    assert compared(model, served=served)
    with torch.no_grad():
        served.transformer.h[1].mlp.c_fc.weight[0, 0] += 1.0
    assert compared(model, served=served).first_module == "transformer.h.1.mlp.c_fc"


def test_fidelity_refuses_wrong_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="needs a module and its inputs, not int"):
        mpinit.fidelity(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to compare"):
        mpinit.fidelity(model, torch.ones(1, 2), output=lambda y: None)
    model.lock = (lambda: (yield))()
    with pytest.raises(ValueError, match=r"cannot be copied.*served="):
        mpinit.fidelity(model, torch.ones(1, 2))
