"""The blocks of docs/how-to/recipes.md with the real libraries, beside the same loops written by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import needs
from loops import iterate, same
from models import sgd
from recipe_names import names_of
from snippets import ROOT, blocks, snippets
from torch.nn.functional import cross_entropy, mse_loss

import mpinit
from mpinit.integrations.transformers import enable

PAGE = ROOT / "docs" / "how-to" / "recipes.md"
RECIPES = {snippet.mark: snippet for snippet in snippets(PAGE)}
NEEDED = {"trl": ("peft",), "sentence_transformers": ("datasets",)}
CLASSIFIERS = ("ignite", "mmengine", "fastai", "skorch")
# What libraries say of each other and of torch; mpinit's own warnings are errors, as everywhere.
THEIRS = ("DeprecationWarning", "FutureWarning", "PendingDeprecationWarning")
IGNORED = (*(f"ignore::{kind}" for kind in THEIRS), "ignore:'pin_memory' argument is set as true:UserWarning")
pytestmark = [*map(pytest.mark.filterwarnings, IGNORED)]


def run(library: str, folder: Path) -> dict[str, Any]:
    """The names that a reader has after the block of a library."""
    for needed in (library, *NEEDED.get(library, ())):
        needs(needed)
    folder.mkdir()
    names = {"torch": torch, "mpinit": mpinit, **names_of(library, folder)}
    RECIPES[library].run(names)
    return names


def test_every_block_has_a_library() -> None:
    assert len(RECIPES) == blocks(PAGE) == 10


@pytest.mark.parametrize("library", CLASSIFIERS)
def test_a_classifier_has_the_bits_of_a_loop_by_hand(library: str, tmp_path: Path) -> None:
    model = run(library, tmp_path / "there")["model"]
    mine, loader = names_of(library, tmp_path)["model"], names_of("ignite", tmp_path)["loader"]
    optimizer = sgd(mine)
    mpinit.initialize(mine, optimizer, opt_level="O2", verbosity=0)
    for _ in range(2):
        for x, y in loader:
            loss = mine(x, y, mode="loss")["loss"] if library == "mmengine" else cross_entropy(mine(x), y)
            iterate(loss, optimizer)
    assert next(model.parameters()).dtype is torch.float16
    assert {value.dtype for value in mine.state_dict().values()} == {torch.float32}
    same(model.state_dict().values(), mine.state_dict().values())


def test_ema_pytorch_averages_float32_masters(tmp_path: Path) -> None:
    names = run("ema_pytorch", tmp_path / "there")
    by_hand = names_of("ema_pytorch", tmp_path)
    model, optimizer = by_hand["model"], by_hand["optimizer"]
    mpinit.initialize(model, optimizer, opt_level="O5", verbosity=0)
    expected: list[torch.Tensor] = []
    for number, (x, y) in enumerate(by_hand["loader"]):
        iterate(cross_entropy(model(x), y), optimizer)
        values = [value.clone() for value in model.state_dict().values()]
        weight = (1 + number) ** (-2 / 3)  # as EMA begins: the first update copies
        means = expected or values
        expected = [mean + weight * (value - mean) for mean, value in zip(means, values, strict=True)]
    average = names["average"].ema_model.state_dict().values()
    assert {value.dtype for value in average} == {torch.float32}
    for mean, value in zip(expected, average, strict=True):
        torch.testing.assert_close(value, mean, atol=1e-6, rtol=1e-5)


def test_a_policy_of_stable_baselines_learns(tmp_path: Path) -> None:
    agent = run("stable_baselines3", tmp_path / "there")["agent"]
    assert {p.dtype for p in agent.policy.parameters()} == {torch.bfloat16}
    assert mpinit.step_counts(agent.policy.optimizer)[0] > 0
    assert all(value.isfinite().all() for value in agent.policy.state_dict().values())


def test_diffusers_trains_averages_and_saves_float32(tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    names = run("diffusers", tmp_path / "there")
    by_hand = names_of("diffusers", tmp_path)
    model, optimizer = by_hand["model"], by_hand["optimizer"]
    mpinit.initialize(model, optimizer, opt_level="O5", verbosity=0)
    average = [value.clone() for value in model.state_dict().values()]
    for number, (images, noise, times) in enumerate(by_hand["batches"]):
        predicted = model(by_hand["noise_scheduler"].add_noise(images, noise, times), times).sample
        mse_loss(predicted, noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.9, (1 + number) / (10 + number)) if number else 0.0  # as EMAModel begins
        for mean, value in zip(average, model.state_dict().values(), strict=True):
            mean.sub_((1 - decay) * (mean - value))
    saved = UNet2DModel.from_pretrained(names["folder"]).state_dict()
    for (name, value), mean, shadow in zip(
        model.state_dict().items(), average, names["average"].shadow_params, strict=True
    ):
        assert saved[name].dtype is shadow.dtype is torch.float32
        assert torch.equal(saved[name], value) and torch.equal(shadow, mean)


def test_peft_trains_adapters_over_a_16_bit_model(tmp_path: Path) -> None:
    names = run("peft", tmp_path / "there")
    model = names["model"]
    adapters = {name: p for name, p in model.named_parameters() if "lora" in name}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in adapters.values()) and len(adapters) == 8
    assert mpinit.step_counts(names["optimizer"]) == (4, 0)
    values = model.state_dict()
    # Begun as zeros, and moved by some 1e-3 a step of AdamW.
    moved = [values[name].abs().max() for name in adapters if "lora_B" in name]
    assert all(1e-3 < move < 5e-3 for move in moved) and values[next(iter(adapters))].dtype is torch.float32


@pytest.mark.parametrize("library", ["trl", "sentence_transformers"])
def test_trainers_of_others_learn_as_in_float32(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(library, tmp_path / "there")
    from mpinit.integrations import transformers as plug

    monkeypatch.setattr(plug, "enable", lambda trainer: None)
    expected = run(library, tmp_path / "float32")["trainer"]
    trainer = names["trainer"]
    dtypes = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert torch.bfloat16 in {p.dtype for p in trainer.model.parameters()}
    assert dtypes == {torch.float32 if library == "trl" else torch.bfloat16}
    assert {p.dtype for p in expected.model.parameters()} == {torch.float32}
    losses = [each.state.log_history[-1]["train_loss"] for each in (trainer, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    masters = trainer.model.state_dict()
    for name, value in expected.model.state_dict().items():
        assert masters[name].float() == pytest.approx(value, abs=5e-4)
    if library == "sentence_transformers":
        from sentence_transformers import SentenceTransformer

        again = SentenceTransformer(f"{names['folder']}/final", device="cpu").state_dict()
        assert all(torch.equal(value, again[name]) for name, value in masters.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_dpo_trains_adapters_with_checkpointed_activations(reentrant: bool, tmp_path: Path) -> None:
    trl, datasets = needs("trl"), needs("datasets")
    losses = []
    for level in (None, "O5"):
        names = names_of("trl", tmp_path)
        pairs = {"prompt": ["a b", "c d"] * 8, "chosen": [" e f", " g h"] * 8, "rejected": [" h h", " a a"] * 8}
        how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        args = trl.DPOConfig(str(tmp_path), bf16=False, max_steps=12, report_to="none", learning_rate=2e-2, **how)
        data = datasets.Dataset.from_dict(pairs)
        given = {"args": args, "train_dataset": data, "peft_config": names["lora"]}
        trainer = trl.DPOTrainer(names["model"], processing_class=names["tokenizer"], **given)
        if level is not None:
            enable(trainer, level, verbosity=0)
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
    assert next(trainer.model.parameters()).dtype is torch.bfloat16
    assert losses[0] < 0.68 and losses[1] == pytest.approx(losses[0], rel=0.02)
