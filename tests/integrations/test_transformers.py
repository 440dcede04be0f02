"""The Trainer plug against Transformers itself, beside the same loop written with mpinit alone."""

import copy
import importlib
import itertools
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks import ALL, needs, same_bits, samples, tiny_model
from loops import backward
from models import dynamic
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoConfig, BertTokenizer, Trainer, TrainingArguments, default_data_collator, get_scheduler
from transformers.utils import logging

import mpinit
from mpinit.integrations.pretrained import save_in
from mpinit.integrations.transformers import enable

logging.disable_progress_bar()

MODELS = ["bert", "gpt2", "llama", "t5", "vit"]
# The Trainer counts the labels of these models shifted by one.
CAUSAL = ["llama"]
LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=256.0, growth_interval=3)},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
}
# The scale is too large for float16 at first: steps are skipped, and later it grows again.
OVERFLOWING = {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=2.0**30, max=2.0**40, growth_interval=3)}
DTYPES = ("float32", "bfloat16")


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All combinations; every run has those in which each of one list meets those of the other in turn."""
    fewer = min(len(first), len(second))
    return [
        pytest.param(one, two, marks=() if (i - j) % fewer == 0 else pytest.mark.nightly)
        for (i, one), (j, two) in itertools.product(enumerate(first), enumerate(second))
    ]


def settings(folder: Path, **more: Any) -> TrainingArguments:
    usual = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_strategy": "no"}
    return TrainingArguments(str(folder), train_sampling_strategy="sequential", **(usual | quiet | more))


def trainer_of(name: str, folder: Path, level: dict[str, Any] | None, **more: Any) -> Trainer:
    given = {key: more.pop(key) for key in ("optimizers",) if key in more}
    model = more.pop("model", None) or tiny_model(name)
    data = {"train_dataset": samples(name, 64), "eval_dataset": samples(name, 8, seed=2)}
    trainer = Trainer(model, settings(folder, **more), **data, **given)
    if level is not None:
        enable(trainer, **level)
    return trainer


def trained(*given: Any, **more: Any) -> Trainer:
    trainer = trainer_of(*given, **more)
    trainer.train()
    return trainer


def optimizer_of(model: Any, folder: Path) -> torch.optim.Optimizer:
    """The one that the Trainer would make."""
    made, keywords = Trainer.get_optimizer_cls_and_kwargs(settings(folder), model)
    optimizer: torch.optim.Optimizer = made(model.parameters(), weight_decay=0.0, **keywords)
    return optimizer


def bare(name: str, folder: Path, level: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer does, by hand."""
    model = tiny_model(name)
    optimizer = optimizer_of(model, folder)
    kept = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"] if name == "llama" else []
    if name == "t5" and level["opt_level"] in ("O2", "O3"):  # Transformers lists these modules for float16
        kept = [parameter for parameter, _ in model.named_parameters() if ".wo." in parameter]
    mpinit.initialize(model, optimizer, keep_fp32=kept, **level)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=6)
    model.train()
    loader = iter(DataLoader(samples(name, 64), 4, collate_fn=default_data_collator))
    for _ in range(6):
        halves = [next(loader), next(loader)]
        for half in halves:
            if name == "vit":
                loss = model(**half).loss / 2
            else:  # the model divides by what both halves hold
                labels = half["labels"][..., 1:] if name in CAUSAL else half["labels"]
                loss = model(**half, num_items_in_batch=torch.tensor(2 * labels.numel())).loss
            backward(loss, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mpinit.scheduler_step(scheduler)
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(("name", "level"), in_turn(MODELS, list(LEVELS)))
def test_a_trainer_trains_as_the_bare_loop_does(name: str, level: str, tmp_path: Path) -> None:
    trainer = trainer_of(name, tmp_path, LEVELS[level])
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert mpinit.step_counts(trainer.optimizer.optimizer) == (6, 0)
    assert not same_bits(trainer.model.state_dict(), before)
    assert same_bits(trainer.model.state_dict(), bare(name, tmp_path, LEVELS[level]))


@pytest.mark.parametrize(("name", "save_dtype"), in_turn([*ALL, "O2, overflowing"], DTYPES))
def test_resuming_gives_bits_of_run_that_was_not_interrupted(name: str, save_dtype: str, tmp_path: Path) -> None:
    level = ALL.get(name, OVERFLOWING)
    asked = level | {"save_dtype": save_dtype}
    through = trained("llama", tmp_path, asked, save_strategy="steps", save_steps=3)
    resumed = trainer_of("llama", tmp_path, asked, save_strategy="steps", save_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same_bits(through.model.state_dict(), resumed.model.state_dict())
    inner = [trainer.optimizer.optimizer for trainer in (through, resumed)]
    assert mpinit.state_dict(inner[0]) == mpinit.state_dict(inner[1])
    states = [optimizer.state_dict()["state"] for optimizer in inner]
    assert all(same_bits(state, states[1][index]) for index, state in states[0].items())
    assert through.lr_scheduler.get_last_lr() == resumed.lr_scheduler.get_last_lr()
    if level is OVERFLOWING:
        assert mpinit.step_counts(inner[0])[1] > 0
        assert through.lr_scheduler.get_last_lr() != [0.0], "the scheduler waits for skipped steps"


PLAIN: dict[str, Any] = {"O1": {"opt_level": "O1"}, "O4": {"opt_level": "O4"}, **LEVELS, "no mpinit": None}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(PLAIN, 2)])
def test_a_run_resumes_at_another_level(before: str, after: str, tmp_path: Path) -> None:
    saved = trained("gpt2", tmp_path, PLAIN[before], save_strategy="steps", max_steps=2, save_steps=2)
    resumed = trainer_of("gpt2", tmp_path, PLAIN[after], max_steps=2)
    # The checkpoint's own step is its last: what is there then is what was loaded.
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    there = resumed.model.state_dict()
    assert all(torch.equal(value.float(), there[key]) for key, value in saved.model.state_dict().items())
    if before == "O2" and after == "O1":
        assert mpinit.loss_scale(resumed.model) == mpinit.loss_scale(saved.model)
    goes_on = trainer_of("gpt2", tmp_path, PLAIN[after], max_steps=4)
    goes_on.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert goes_on.state.global_step == 4 and not same_bits(goes_on.model.state_dict(), there)


def test_sentence_transformers_save_float32(tmp_path: Path) -> None:
    modules = needs("sentence_transformers.sentence_transformer.modules")
    tiny_model("bert").bert.save_pretrained(tmp_path / "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    kind = importlib.import_module("sentence_transformers").SentenceTransformer
    model = kind(modules=[modules.Transformer(str(tmp_path / "bert")), modules.Pooling(16), modules.Dense(16, 4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, opt_level="O5")
    model(model.tokenize(["a b", "c"]))["sentence_embedding"].square().mean().backward()
    optimizer.step()
    save_in(model)
    model.save_pretrained(str(tmp_path / "saved"))
    assert same_bits(kind(str(tmp_path / "saved")).state_dict(), model.state_dict())
    mpinit.undo(model)
    assert not any("save_pretrained" in vars(part) for part in model.modules())


@pytest.mark.parametrize(
    ("name", "case"), in_turn(MODELS, [*itertools.product(("O5", "O5, split"), (torch.float32, torch.bfloat16))])
)
def test_from_pretrained_reads_what_save_model_writes(name: str, case: tuple[str, torch.dtype], tmp_path: Path) -> None:
    level, dtype = case
    trainer = trained(name, tmp_path, LEVELS[level] | {"save_dtype": dtype}, max_steps=1)
    trainer.save_model(str(tmp_path / "saved"))
    assert trainer.model.dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path / "saved").dtype == dtype
    read = type(trainer.model).from_pretrained(tmp_path / "saved")
    expected = {key: value.to(dtype) for key, value in trainer.model.state_dict().items()}
    assert same_bits(read.state_dict(), expected)
    mpinit.undo(trainer.model)
    assert "save_pretrained" not in vars(trainer.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["model", "block", "split block"])
def test_saved_weights_have_chosen_dtype_where_they_are_float32(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Save with ``master_weights="model"``, and inside of ``float32_weights`` after a write there."""
    model = tiny_model("gpt2")
    masters = {"model": "model", "block": True, "split block": "split"}[way]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, "O5", master_weights=masters, keep_fp32=["*.ln_f"])
    save_in(model, dtype)
    with mpinit.float32_weights(model) if way != "model" else nullcontext():
        with torch.no_grad():
            model.transformer.wte.weight[0].fill_(1.001)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
    for name, value in written.items():
        assert value.dtype == (torch.float32 if ".ln_f." in name else dtype)
        assert torch.equal(value, expected[name].to(value.dtype))


def test_a_checkpoint_in_bfloat16_gets_masters(tmp_path: Path) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "given")
    loaded = type(tiny_model("llama")).from_pretrained(tmp_path / "given")
    assert loaded.dtype == torch.bfloat16
    trained("llama", tmp_path, {}, model=loaded, learning_rate=1e-6)
    norm = loaded.model.norm.weight
    assert torch.equal(norm, torch.ones_like(norm)), "bfloat16 cannot hold such a step from 1"
    assert not torch.equal(loaded.state_dict()["model.norm.weight"], torch.ones(16)), "but the master can"


def test_an_optimizer_may_be_given(tmp_path: Path) -> None:
    created = trained("gpt2", tmp_path, {"opt_level": "O2"})
    model = tiny_model("gpt2")
    optimizers = optimizer_of(model, tmp_path), None
    given = trained("gpt2", tmp_path, {"opt_level": "O2"}, model=model, optimizers=optimizers)
    assert same_bits(created.model.state_dict(), given.model.state_dict())


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    when = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trained("bert", tmp_path, {}, load_best_model_at_end=True, greater_is_better=True, **when)
    assert trainer.state.best_global_step < 6, "else this shows nothing"
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    assert best.dtype == torch.float32
    assert same_bits(trainer.model.state_dict(), best.state_dict())
    first = next(mpinit.master_params(trainer.optimizer.optimizer))
    assert torch.equal(first, best.bert.embeddings.word_embeddings.weight)


def test_checkpointed_activations_give_the_same_bits(tmp_path: Path) -> None:
    runs = [trained("llama", tmp_path, {}, activation_checkpointing=checkpoints) for checkpoints in (False, True)]
    assert same_bits(*(run.model.state_dict() for run in runs))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generation_is_that_of_the_16_bit_model(name: str, tmp_path: Path) -> None:
    trainer = trained(name, tmp_path, {})
    saved = tmp_path / "saved"
    trainer.save_model(str(saved))
    plain = type(trainer.model).from_pretrained(saved, dtype=torch.bfloat16)
    words = torch.stack([sample["input_ids"] for sample in samples(name, 4)])
    told = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(words)}
    for model in (plain, trainer.model):
        model.eval()
    assert torch.equal(trainer.model.generate(words, **told), plain.generate(words, **told))


@pytest.mark.parametrize("name", MODELS)
def test_outputs_keep_their_class(name: str, tmp_path: Path) -> None:
    batch = default_data_collator(samples(name, 4))
    trainer = trainer_of(name, tmp_path, None)
    plain = trainer.model(**batch)
    enable(trainer)
    output = trainer.model(**batch)
    assert type(output) is type(plain) and output.keys() == plain.keys()
    assert output.logits.dtype == torch.float32
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_adapters_are_float32_over_a_16_bit_model_and_resume(kind: str, tmp_path: Path) -> None:
    import peft

    def adapted() -> Any:
        torch.manual_seed(0)
        task = {"task_type": "CAUSAL_LM"}
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **task)
        config = lora if kind == "lora" else peft.PromptTuningConfig(num_virtual_tokens=2, **task)
        return peft.get_peft_model(tiny_model("llama"), config)

    when = {"save_strategy": "steps", "save_steps": 3}
    trainers = [trainer_of("llama", tmp_path, {}, model=adapted(), **when) for _ in range(2)]
    before = copy.deepcopy(trainers[0].model.state_dict())
    trainers[0].train()
    trainers[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    states = [trainer.model.state_dict() for trainer in trainers]
    assert same_bits(*states)
    dtypes = {weight.requires_grad: weight.dtype for weight in trainers[0].model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    trained = {name for name, weight in trainers[0].model.named_parameters() if weight.requires_grad}
    assert all(torch.equal(before[name], states[0][name]) != (name in trained) for name in before)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bf16": ({"bf16": True}, {}, r"trainer\.args\.bf16 is set, .* pass bf16=False \(in TRL's configurations"),
    "eval": ({"bf16_full_eval": True}, {}, r"trainer\.args\.bf16_full_eval is set, .* omit it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_conflicting_trainer_arguments_are_refused(case: str, tmp_path: Path) -> None:
    more, asked, message = REFUSED[case]
    trainer = trainer_of("gpt2", tmp_path, None, **more)
    with pytest.raises(ValueError, match=message):
        enable(trainer, **asked)
    assert trainer.model.dtype == torch.float32 and "create_optimizer" not in vars(trainer)


@pytest.mark.parametrize(("level", "hint"), [("o5", "O5"), ("O9", "The levels are 'O0'"), (5, "did you mean 'O5'")])
def test_enable_names_the_level_that_is_meant(level: Any, hint: str, tmp_path: Path) -> None:
    trainer = trainer_of("gpt2", tmp_path, None)
    with pytest.raises(ValueError, match=hint):
        enable(trainer, level)
    assert trainer.model.dtype == torch.float32


def test_enable_needs_a_trainer_and_works_once(tmp_path: Path) -> None:
    trainer = trainer_of("gpt2", tmp_path, None)
    with pytest.raises(TypeError, match=r"needs a transformers\.Trainer, not GPT2"):
        enable(trainer.model)
    for name in ("models", "await_optimizers", "level"):
        with pytest.raises(ValueError, match=rf"enable\(\) has no keyword '{name}'"):
            enable(trainer, **{name: None})
    with pytest.raises(ValueError, match="unsupported dtype 'bf17'"):
        enable(trainer, save_dtype="bf17")
    enable(trainer)
    with pytest.raises(ValueError, match=r"is initialised already.*mpinit\.undo"):
        enable(trainer)
    trainer.train()


def test_audit_of_a_trainer_measures_and_steps_nothing(tmp_path: Path) -> None:
    trainer = trainer_of("gpt2", tmp_path, None, model=tiny_model("gpt2").bfloat16())
    trainer.train()
    weights = copy.deepcopy(trainer.model.state_dict())
    found = mpinit.audit(trainer.model, trainer.optimizer)
    trained = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert set(found.stuck) == set(trained) and any(share < 0.9 for share in found.stuck.values())
    assert same_bits(weights, trainer.model.state_dict())
    trainer = trainer_of("gpt2", tmp_path, {"opt_level": "O5"})
    trainer.train()
    weights = copy.deepcopy(trainer.model.state_dict())
    assert max(mpinit.audit(trainer.model, trainer.optimizer).stuck.values()) < 0.5
    assert same_bits(weights, trainer.model.state_dict())


def test_undo_leaves_a_float32_trainer(tmp_path: Path) -> None:
    trainer = trained("gpt2", tmp_path, {"opt_level": "O2"})
    masters = copy.deepcopy(trainer.model.state_dict())
    mpinit.undo(trainer.model)
    assert same_bits(masters, trainer.model.state_dict())
    assert trainer.accelerator.scaler is None and "create_optimizer" not in vars(trainer)
    trainer.train()
    assert trainer.model.dtype == torch.float32


def test_disabled_it_does_nothing(tmp_path: Path) -> None:
    trainer = trained("gpt2", tmp_path, {"enabled": False})
    assert trainer.model.dtype == torch.float32 and trainer.accelerator.scaler is None


PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "a classifier": ("bert", {"task_type": "SEQ_CLS"}),
    "a classifier and biases": ("bert", {"task_type": "SEQ_CLS", "bias": "all"}),
    "lm_head": ("llama", {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embeddings and norms": (
        "llama",
        {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "norm"]},
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("case", PEFT)
def test_trained_layers_beside_adapters_are_16_bit_with_masters(
    case: str, level: str, checkpointing: bool, tmp_path: Path
) -> None:
    import peft

    name, asked = PEFT[case]
    losses, weights = [], []
    for given in (None, {"opt_level": level} | dynamic(level, init=256.0)):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(name), peft.LoraConfig(r=2, **asked))
        before = copy.deepcopy(model.state_dict())
        trainer = trained(name, tmp_path, given, model=model, activation_checkpointing=checkpointing)
        losses.append(trainer.evaluate()["eval_loss"])
        weights.append(copy.deepcopy(model.state_dict()))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    # But for biases of keys, whose gradients are 0 but for rounding.
    keys = [key for key, p in model.named_parameters() if p.requires_grad and "lora_" not in key and "key" not in key]
    expected, found = (torch.cat([(each[key] - before[key]).flatten() for key in keys]) for each in weights)
    assert expected.abs().max() > 0.008 and (expected - found).abs().mean() < 0.2 * expected.abs().mean()
    dtypes = {name: weight.dtype for name, weight in model.named_parameters() if weight.requires_grad}
    narrow = torch.float16 if level == "O2" else torch.bfloat16
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {narrow}
    optimizer = trainer.optimizer.optimizer
    assert {p.dtype for p in mpinit.master_params(optimizer)} == {torch.float32}


def kept_in_the_model(case: str) -> tuple[Any, str, str]:
    """Make a model, its data's name, and a part of the names of what stays float32 in it."""
    torch.manual_seed(0)
    if case == "adapters":
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_model("llama"), config), "llama", "lora_"
    if case == "outputs of T5":
        return tiny_model("t5"), "t5", ".wo."
    return routed(), "llama", ".gate."


def routed() -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = transformers.Glm4MoeConfig(vocab_size=128, pad_token_id=0, **sizes, **heads, **experts)
    return transformers.Glm4MoeForCausalLM(config)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("case", ["adapters", "outputs of T5", "routers"])
def test_what_is_kept_is_float32_in_a_forward_of_model(case: str, tmp_path: Path) -> None:
    """Parameters are all float32 with masters in the model; what the forward computes with is not."""
    model, name, kept = kept_in_the_model(case)
    level = "O2" if case == "outputs of T5" else "O5"
    given = {"opt_level": level, "loss_scale": 128.0} if level == "O2" else {"opt_level": level}
    trainer = trained(name, tmp_path, given | {"master_weights": "model"}, model=model, max_steps=2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    inside: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda module, _, path=path: inside.update(
                {f"{path}.{own}": weight for own, weight in module._parameters.items() if weight is not None}
            )
        )
    with torch.no_grad():
        trainer.model(**default_data_collator(samples(name, 4)))
    narrow = torch.float16 if level == "O2" else torch.bfloat16
    own = {path: weight for path, weight in inside.items() if kept in path}
    assert own and {weight.dtype for weight in own.values()} == {torch.float32}
    for path, weight in own.items():
        assert torch.equal(weight, model.get_parameter(path)), "all of its bits"
    assert {weight.dtype for path, weight in inside.items() if kept not in path} == {narrow}


def test_experts_are_chosen_by_the_float32_router_of_model(tmp_path: Path) -> None:
    trainer = trained("llama", tmp_path, {"opt_level": "O5", "master_weights": "model"}, model=routed(), max_steps=2)
    gate = trainer.model.model.layers[1].mlp.gate
    seen: list[torch.Tensor] = []
    gate.register_forward_hook(lambda _, given, found: seen.extend([given[0], found[2]]))
    with torch.no_grad():
        trainer.model(torch.randint(1, 128, (32, 128), generator=torch.Generator().manual_seed(0)))
    x, weight = seen[0].flatten(0, -2).float(), gate.weight.detach()
    chosen, exact, rounded = (
        each.sort(-1).values
        for each in (seen[1], *((x @ each.T).topk(4).indices for each in (weight, weight.bfloat16().float())))
    )
    assert len(x) == 4096 and torch.equal(chosen, exact)
    assert (rounded != exact).any(-1).sum() >= 20


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", ["VeRA", "copies of norms"])
def test_tuners_with_buffers_and_with_copies_of_norms_train(kind: str, level: str, tmp_path: Path) -> None:
    import peft

    losses = []
    for given in (None, {"opt_level": level} | dynamic(level, init=256.0)):
        torch.manual_seed(0)
        task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
        vera = peft.VeraConfig(r=2, target_modules=["q_proj"], **task)
        asked = vera if kind == "VeRA" else peft.LNTuningConfig(target_modules=["input_layernorm"], **task)
        model = peft.get_peft_model(tiny_model("llama"), asked)
        before = copy.deepcopy(model.state_dict())
        losses.append(trained("llama", tmp_path, given, model=model).evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    narrow = torch.float16 if level == "O2" else torch.bfloat16
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    for name in changed - trainable:  # a frozen weight keeps its rounding
        assert torch.equal(model.state_dict()[name], before[name].to(narrow).float())
    changed &= trainable
    assert changed
    assert {model.get_parameter(name).dtype for name in changed} == {torch.float32 if kind == "VeRA" else narrow}


@pytest.mark.parametrize(("level", "kept"), [("O2", True), ("O5", False), ("O1", False)])
def test_modules_that_transformers_lists_stay_float32(
    level: str, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("t5")
    assert model._keep_in_fp32_modules == {"wo"}
    with caplog.at_level("INFO", "mpinit"):
        trainer = trained("t5", tmp_path, {"opt_level": level} | dynamic(level, init=256.0), model=model, max_steps=2)
    outputs = {name: p.dtype for name, p in model.named_parameters() if ".wo." in name}
    assert len(outputs) == 4 and set(outputs.values()) == {torch.float32 if kept or level == "O1" else torch.bfloat16}
    assert model.shared.weight.dtype is {"O1": torch.float32, "O2": torch.float16, "O5": torch.bfloat16}[level]
    assert any("as the library lists them: encoder.block.0" in record.message for record in caplog.records) is kept
    expected = trained("t5", tmp_path, None, max_steps=2).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=2**-7)  # a bfloat16 loss


@pytest.mark.parametrize("level", LEVELS)
def test_a_tied_head_computes_in_float32_in_a_trainer(level: str, tmp_path: Path) -> None:
    files, logits = [], []
    for more in ({}, {"compute_fp32": ["lm_head"]}):
        trainer = trained("gpt2", tmp_path, LEVELS[level] | more, max_steps=2)
        assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
        trainer.save_model(str(tmp_path / str(len(files))))
        files.append(load_file(tmp_path / str(len(files)) / "model.safetensors"))
        with torch.no_grad():
            logits.append(trainer.model(torch.arange(8)[None]).logits)
        narrow = trainer.model.lm_head.weight.dtype
        assert narrow is (torch.float16 if level == "O2" else torch.bfloat16)
    assert files[0].keys() == files[1].keys() and {each.dtype for each in files[1].values()} == {torch.float32}
    rounded = [torch.equal(each, each.to(narrow).float()) for each in logits]
    assert rounded == [True, False]


def test_lists_of_parts_and_strict_ones_count() -> None:
    from mpinit.basics.modules import ModelIndex
    from mpinit.model.selection import declared_float32

    model = torch.nn.ModuleDict(
        {"part": torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2), "gates": torch.nn.Linear(2, 2)})}
    )
    model["part"]._keep_in_fp32_modules_strict = ["gate"]
    for dtype in (torch.float16, torch.bfloat16):
        assert list(declared_float32(ModelIndex([model]), dtype)) == ["part.gate.weight", "part.gate.bias"]
    model["part"]._keep_in_fp32_modules = {"gates"}
    index = ModelIndex([model])
    assert len(declared_float32(index, torch.float16)) == 4 and len(declared_float32(index, torch.bfloat16)) == 2


class VideoDenoiser(torch.nn.Module):
    """A transformer of Diffusers that denoises, with its loss, as Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "rope_max_seq_len": 32}
        widths = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
        self.net = needs("diffusers").WanTransformer3DModel(patch_size=(1, 2, 2), **sizes, **widths)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.sin(31.0 * latents)
        found = self.net(latents + noise, timestep, text, return_dict=False)[0]
        return {"loss": (found.float() - noise.float()).square().mean()}


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_modules_that_diffusers_lists_stay_float32(level: str, tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    data = [
        {
            "latents": torch.randn(4, 2, 8, 8, generator=chance),
            "timestep": torch.randint(1000, (), generator=chance),
            "text": torch.randn(5, 16, generator=chance),
        }
        for _ in range(32)
    ]

    def losses(level: str | None) -> tuple[VideoDenoiser, float]:
        model = VideoDenoiser()
        trainer = Trainer(model, settings(tmp_path), train_dataset=data)
        if level is not None:
            enable(trainer, level)
        trainer.train()
        with torch.no_grad():
            batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
            return model, model(**batch)["loss"].item()

    model, loss = losses(level)
    listed = model.net._keep_in_fp32_modules
    assert listed
    dtypes = {name: parameter.dtype for name, parameter in model.net.named_parameters()}
    kept = {name for name in dtypes if set(listed) & set(name.split("."))}
    narrow = torch.float16 if level == "O2" else torch.bfloat16
    # Diffusers' own list is for float16 and bfloat16 alike; Transformers' list of this name for float16 alone.
    assert kept and {dtypes[name] for name in dtypes if name not in kept} == {narrow}
    assert {dtypes[name] for name in kept} == {torch.float32}
    assert loss == pytest.approx(losses(None)[1], rel=0.02)


def test_every_model_of_model_init_is_initialised(tmp_path: Path) -> None:
    made: list[Any] = []

    def model_init() -> Any:
        made.append(tiny_model("gpt2"))
        return made[-1]

    data = {"train_dataset": samples("gpt2", 64), "eval_dataset": samples("gpt2", 8, seed=2)}
    trainer = Trainer(model_init=model_init, args=settings(tmp_path), **data)
    enable(trainer, "O5")
    for runs in (2, 3):
        trainer.train()
        assert len(made) == runs and trainer.model is made[-1] and trainer.model.dtype is torch.bfloat16
        assert mpinit.step_counts(trainer.optimizer.optimizer) == (6, 0)
        assert same_bits(trainer.model.state_dict(), trained("gpt2", tmp_path, LEVELS["O5"]).model.state_dict())
        assert {p.dtype for p in made[-2].parameters()} == {torch.float32}, "undone"
    mpinit.undo(trainer.model)
    assert "call_model_init" not in vars(trainer) and "create_optimizer" not in vars(trainer)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_search_for_hyperparameters_trains_with_masters(tmp_path: Path) -> None:
    optuna = needs("optuna")
    optuna.logging.disable_default_handler()
    trainer = Trainer(
        model_init=lambda: tiny_model("gpt2"),
        args=settings(tmp_path, eval_strategy="steps", eval_steps=6),
        train_dataset=samples("gpt2", 64),
        eval_dataset=samples("gpt2", 8, seed=2),
    )
    enable(trainer, "O5")
    rates, seen = [1e-2, 1e-6], list[torch.dtype]()
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        n_trials=4,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),  # without a seed all four trials may have one rate
        direction="minimize",
        compute_objective=lambda metrics: seen.append(trainer.model.dtype) or metrics["eval_loss"],
    )
    assert best.hyperparameters["learning_rate"] == 1e-2 and best.objective < 3.45
    assert set(seen) == {torch.bfloat16} and len(seen) >= 4


class GaLore(torch.optim.AdamW):
    """AdamW with the arguments that Transformers passes to GaLore's."""

    def __init__(self, params: Any, **given: Any) -> None:
        groups = [{key: group[key] for key in ("params", "lr") if key in group} for group in params]
        super().__init__(groups, weight_decay=0.0, **given)


@pytest.fixture
def galore(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a Trainer with GaLore's layer-wise optimizer, with AdamW in the place of its own."""
    from transformers import trainer_optimizer

    names = dict.fromkeys(("GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"), GaLore)
    monkeypatch.setitem(sys.modules, "galore_torch", SimpleNamespace(**names))
    monkeypatch.setattr(trainer_optimizer, "is_galore_torch_available", lambda: True)
    return {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear", "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("level", ["O4", "O5", "O5, split", "O5, model"])
def test_layer_wise_optimizers_train_as_one_does(level: str, galore: dict[str, Any], tmp_path: Path) -> None:
    masters = {"split": "split", "model": "model"}.get(level.partition(", ")[2])
    given: dict[str, Any] = {"opt_level": level[:2], **({"master_weights": masters} if masters else {})}
    more = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    layer_wise = trained("llama", tmp_path, given, **more, **{**galore, "save_strategy": "steps", "save_steps": 2})
    galore["optim"] = "adamw_torch"
    one = trained("llama", tmp_path, given, **more, **galore)
    is_same = same_bits(layer_wise.model.state_dict(), one.model.state_dict())
    assert is_same
    has_trained = not same_bits(layer_wise.model.state_dict(), tiny_model("llama").state_dict())
    assert has_trained


PACKAGES = {"galore_adamw": "galore_torch", "apollo_adamw": "apollo_torch"}


@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
@pytest.mark.parametrize("level", ["O2", "O5", "O5, split", "O5, model"])
@pytest.mark.parametrize("optim", [*PACKAGES, "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_galore_and_apollo_train_as_in_float32(optim: str, level: str, tmp_path: Path) -> None:
    kind, is_layer_wise = optim.removesuffix("_layerwise"), optim.endswith("_layerwise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bitsandbytes
        needs(PACKAGES[kind])
    masters = {"split": "split", "model": "model"}.get(level.partition(", ")[2])
    given: dict[str, Any] = {"opt_level": level[:2], **({"master_weights": masters} if masters else {})}
    if level == "O2":
        given["loss_scale"] = mpinit.DynamicLossScale(init=256.0)
    more: dict[str, Any] = {"optim": optim, "optim_target_modules": "all-linear", "lr_scheduler_type": "constant"}
    more |= {"gradient_accumulation_steps": 1, "optim_args": "rank=4, update_proj_gap=2, scale=1.0"}
    if is_layer_wise:
        more["max_grad_norm"] = 0.0
    if is_layer_wise and level == "O2":
        with pytest.raises(ValueError, match=rf"{optim.upper()}.*steps each weight inside of the backward pass"):
            trained("llama", tmp_path, given, **more)
        return
    weights, losses = [], []
    for asked in (None, given):
        torch.manual_seed(0)
        trainer = trained("llama", tmp_path, asked, **more)
        losses.append(trainer.evaluate()["eval_loss"])
        weights.append(trainer.model.state_dict())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    before = tiny_model("llama").state_dict()
    moved, apart = (
        torch.cat([(value - other[name]).abs().flatten() for name, value in weights[0].items()])
        for other in (before, weights[1])
    )
    assert apart.mean() < 0.2 * moved.mean()


def test_layer_wise_optimizers_are_refused_with_a_scale(galore: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps each weight inside of the backward pass"):
        trained("llama", tmp_path, {"opt_level": "O2"}, **galore)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("level", ["O2", "O5", "O5, split", "O5, model"])
def test_embeddings_resized_before_enable(name: str, level: str, tmp_path: Path) -> None:
    masters = {"split": {"master_weights": "split"}, "model": {"master_weights": "model"}}
    given = {"opt_level": level[:2], **masters.get(level.partition(", ")[2], {})}
    losses = []
    for enabled in (given, None):
        trainer = trainer_of(name, tmp_path, None, gradient_accumulation_steps=1)
        torch.manual_seed(5)
        trainer.model.resize_token_embeddings(36)
        if enabled is not None:
            enable(trainer, **enabled)
        before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        losses.append(trainer.train().training_loss)
        state = trainer.model.state_dict()
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert not any(torch.equal(value, before[key]) for key, value in state.items())
        assert state["lm_head.weight"].shape[0] == 36
        beyond = state["lm_head.weight"] != state["lm_head.weight"].bfloat16().float()
        assert beyond.double().mean() > 0.9, "bits beyond the 16-bit weight"
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize("masters", [True, "split"])
def test_embeddings_resized_after_enable_are_refused(masters: Any, tmp_path: Path) -> None:
    """Their data gets another shape than their masters have."""
    trainer = trainer_of("llama", tmp_path, {"opt_level": "O5", "master_weights": masters})
    own = trainer.model.get_input_embeddings().weight.data
    trainer.model.resize_token_embeddings(36)
    with pytest.raises(RuntimeError, match=r"embed_tokens.weight' was replaced by a tensor of .* shape \(36, 16\)"):
        trainer.train()
    trainer.model.get_input_embeddings().weight.data = own
