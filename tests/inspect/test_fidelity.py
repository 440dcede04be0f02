"""``fidelity``: to the bit where it is promised, and planted differences found."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, marks_for, needs, tiny_model
from loops import iterate
from models import LEVELS
from torch import Tensor, nn
from torch._inductor import config as inductor_config

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
    mpinit.initialize(model, optimizer, **asked)
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
    assert found and (found.mean, found.largest, found.equal, found.first_module) == (0.0, 0.0, 1.0, None)
    assert "bit for bit" in str(found)
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


def test_split_masters_round_ties_away_from_zero() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0 + 2.0**-8, 1.0]]))  # a tie between two bfloat16 numbers
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **WAYS["split"])
    assert model.weight[0, 0] == 1.0 + 2.0**-7, "even would be 1"
    assert mpinit.fidelity(model, torch.ones(1, 2))


@pytest.mark.parametrize("way", ["O5", "split"])
def test_with_lora(way: str) -> None:
    peft = needs("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama").bfloat16(), lora).train()
    learnt(model, **WAYS[way])
    assert all(p.detach().abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    # The adapters came in float32 and stay so; a bfloat16 model rounds them.
    found = compared(model)
    assert not found and "lora_A" in str(found.first_module)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_float32_weights_part_from_what_is_served(level: str) -> None:
    model = tiny_model("gpt2")
    learnt(model, opt_level=level)
    found = compared(model)
    assert not found and 0 < found.mean <= found.largest < 1.0 and 0 <= found.equal < 1
    assert found.first_module is not None and found.first_module in str(found)
    assert found.served == ("float16" if level == "O1" else "bfloat16")


def test_torch_autocast_around_it_counts_for_model_trained() -> None:
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


class MergedInEvaluation(nn.Linear):
    """A LoRA layer as loralib has it: ``train`` merges the adapter into the weight, and separates it again."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.down, self.up = nn.Parameter(torch.randn(4, 8) * 0.3), nn.Parameter(torch.randn(8, 4) * 0.3)
        self.is_merged = False

    def train(self, mode: bool = True) -> "MergedInEvaluation":
        super().train(mode)
        if mode is self.is_merged:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        return y if self.is_merged else y + (x @ self.down.T) @ self.up.T


class Writing(nn.Module):
    """A forward that writes to a buffer and to its input, and has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
        return self.linear(x) + torch.randn(8, generator=self.generator).to(self.linear.weight.dtype)


@pytest.mark.parametrize("way", ["O2", "O5", "split", "model"])
def test_weights_that_evaluation_mode_merges_stay_separate(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MergedInEvaluation(), nn.Linear(8, 4))
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **WAYS[way])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mpinit.fidelity(model, torch.randn(2, 8))
    assert found or way == "model", str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and model[0].training and not model[0].is_merged


@pytest.mark.parametrize("is_served", [False, True])
def test_buffers_and_inputs_that_a_forward_writes_do_not_change(is_served: bool) -> None:
    model, served = Writing(), Writing()
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O5")
    x = torch.zeros(2, 8)
    served.load_state_dict(model.state_dict())
    found = mpinit.fidelity(model, x, served=served.bfloat16() if is_served else None)
    assert found and not x.any(), str(found)
    assert not model.mean.any() and not served.mean.any()


def test_model_that_cannot_be_copied_runs_without_eval() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MergedInEvaluation(), nn.BatchNorm1d(8), Writing()).train()
    model[1].eval()
    served = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.lock = (lambda: (yield))()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mpinit.fidelity(model, torch.randn(2, 8), served=served)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [each.training for each in model] == [True, False, True] and not model[0].is_merged


class Gated(nn.Module):
    """A gated feed-forward block, whose pointwise operations inductor fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_compared_as_it_is_trained(in_place: bool) -> None:
    """Check against a comparison by hand; with emulated casts the bits are equal."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.Sequential(Gated(), nn.Linear(32, 8)), torch.randn(16, 32)
    plain = copy.deepcopy(model).bfloat16().eval()
    mpinit.initialize(model, torch.optim.AdamW(model.parameters()), "O5")
    if in_place:
        model.compile()
    compiled: Any = model if in_place else torch.compile(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mpinit.fidelity(compiled, x)
    model.eval()
    with torch.no_grad():
        expected = (compiled(x) == plain(x.bfloat16()).float()).double().mean()
    assert found.compiled and 0 < found.equal < 1 and found.equal == pytest.approx(float(expected))
    assert found.first_module is None and "emulate_precision_casts" in str(found) and "equal" in str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not mpinit.fidelity(compiled, x, served=plain)
    torch._dynamo.reset()
    with inductor_config.patch(emulate_precision_casts=True):
        assert mpinit.fidelity(compiled, x).equal == 1.0


def test_a_compiled_model_on_another_backend_is_equal() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    mpinit.initialize(model, opt_level="O5")
    found = mpinit.fidelity(torch.compile(model, backend="eager"), torch.randn(2, 8))
    assert found and found.compiled and "bit for bit" in str(found) and model.training


def test_buffers_that_no_forward_writes_are_not_written_here(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_buffer("table", torch.ones(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, "O5")
    loss = model(torch.randn(4, 8)).mean()
    mpinit.fidelity(model, torch.randn(4, 8))
    iterate(loss, optimizer)
    assert not [each for each in recwarn if "written to while the model trains" in str(each.message)]
