"""The blocks of docs/how-to/recipes.md with the real libraries, beside the same loops written by hand."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_runs import run_code
from frameworks import is_installed, needs
from loops import iterate, same
from models import sgd
from recipe_names import names_of
from snippets import ROOT, blocks, snippets
from torch.nn.functional import cross_entropy, mse_loss

import mpinit
from mpinit.integrations.transformers import enable

PAGE = ROOT / "docs" / "how-to" / "recipes.md"
RECIPES = {snippet.mark: snippet for snippet in snippets(PAGE)}
NEEDED = {"torchrl": ("tensordict",), "trl": ("peft",), "sentence_transformers": ("datasets",)}
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
    assert len(RECIPES) == blocks(PAGE) == 14


@pytest.mark.parametrize("library", CLASSIFIERS)
def test_a_classifier_has_the_bits_of_a_loop_by_hand(library: str, tmp_path: Path) -> None:
    model = run(library, tmp_path / "there")["model"]
    mine, loader = names_of(library, tmp_path)["model"], names_of("ignite", tmp_path)["loader"]
    optimizer = sgd(mine)
    mpinit.initialize(mine, optimizer, opt_level="O2", loss_scale=128.0 if library == "skorch" else None)
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
    mpinit.initialize(model, optimizer, opt_level="O5")
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


def test_torchrl_learns_with_a_target_network_as_in_float32(tmp_path: Path) -> None:
    names = run("torchrl", tmp_path / "there")
    module, optimizer = names["loss_module"], names["optimizer"]
    assert sum(mpinit.step_counts(optimizer)) == 20 and mpinit.step_counts(optimizer)[0] >= 15
    found = {name: value.clone() for name, value in module.state_dict().items()}
    mpinit.undo(module)  # O1 casts in all of torch's functions
    nothing = SimpleNamespace(initialize=lambda *_, **__: None, scale_loss=lambda loss, _: nullcontext(loss))
    by_hand = {"torch": torch, "mpinit": nothing, **names_of("torchrl", tmp_path)}
    RECIPES["torchrl"].run(by_hand)
    expected = by_hand["loss_module"].state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        torch.testing.assert_close(found[name], value, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_ppo_of_torchrl_learns_as_in_float32(level: str, tmp_path: Path) -> None:
    needs("torchrl")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    losses = []
    for initialised in (False, True):
        torch.manual_seed(0)
        inner = torch.nn.Sequential(MLP(4, 4, num_cells=[16]), NormalParamExtractor())
        keys = {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal, "return_log_prob": True}
        actor = ProbabilisticActor(TensorDictModule(inner, ["observation"], ["loc", "scale"]), **keys)
        critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])
        module, advantage = ClipPPOLoss(actor, critic), GAE(gamma=0.9, lmbda=0.95, value_network=critic)
        ends = dict.fromkeys(("done", "terminated"), torch.zeros(32, 1, dtype=torch.bool))
        observation, following = torch.randn(32, 4), torch.randn(32, 4)
        after = {"observation": following, "reward": observation[:, :1], **ends}
        batch = TensorDict({"observation": observation, "next": after}, [32])
        torch.manual_seed(1)
        with torch.no_grad():
            actor(batch)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        if initialised:
            mpinit.initialize([actor, critic], optimizer, level, loss_scale=1.0)
        for _ in range(10):
            with torch.no_grad():
                advantage(batch)
            parts = module(batch)
            loss = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
            assert loss.dtype is torch.float32
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert next(inner.parameters()).dtype is (torch.float16 if level == "O2" else torch.bfloat16)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_monai_has_the_bits_of_a_loop_by_hand(tmp_path: Path) -> None:
    names = run("monai", tmp_path / "there")
    by_hand = names_of("monai", tmp_path)
    model, optimizer, loss_fn = (by_hand[name] for name in ("model", "optimizer", "loss_fn"))
    mpinit.initialize(model, optimizer, opt_level="O2")
    for _ in range(by_hand["epochs"]):
        for batch in by_hand["loader"]:
            iterate(loss_fn(model(batch["image"]), batch["label"]), optimizer)
    assert next(names["model"].parameters()).dtype is torch.float16
    assert mpinit.step_counts(names["optimizer"])[0] > 0
    same(names["model"].state_dict().values(), model.state_dict().values())


def test_diffusers_trains_averages_and_saves_float32(tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    names = run("diffusers", tmp_path / "there")
    by_hand = names_of("diffusers", tmp_path)
    model, optimizer = by_hand["model"], by_hand["optimizer"]
    mpinit.initialize(model, optimizer, opt_level="O5")
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


IN_A_PROCESS = """
import functools, operator, sys, warnings
sys.path[:0] = PATHS
warnings.simplefilter("ignore")
from pathlib import Path
import frameworks
frameworks.let_torchvision_load()
import torch, mpinit
from recipe_names import names_of
from snippets import ROOT, snippets

library, folder = LIBRARY, Path(FOLDER)
recipe = next(each for each in snippets(ROOT / "docs" / "how-to" / "recipes.md") if each.mark == library)
warnings.filterwarnings("error", module="mpinit")


def run(**more):
    names = {"torch": torch, "mpinit": mpinit, **names_of(library, folder), **more}
    recipe.run(names)
    return names


"""


def run_in_a_process(library: str, folder: Path, program: str) -> None:
    """Run a block whose library changes its process, such as ``torch.save`` or the threads of torch."""
    needed = {"PATHS": sys.path, "LIBRARY": library, "FOLDER": str(folder)}
    assert is_installed(library)
    done = run_code("\n".join(f"{name} = {value!r}" for name, value in needed.items()) + IN_A_PROCESS + program)
    assert done.stdout.strip().splitlines()[-1:] == ["done"], done.stderr


RAY = """
from loops import iterate
names = run(number=NUMBER)
found = {key.removeprefix("module."): value for key, value in torch.load(folder / "model.pt").items()}
model = names["make_model"]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mpinit.initialize(model, optimizer, opt_level="O2")
for x, y in names["batches"]:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    iterate(loss, optimizer)
expected = model.state_dict()
assert mpinit.step_counts(optimizer) == (4, 0)
assert found.keys() == expected.keys()
for key, value in expected.items():
    # Two workers reduce their equal gradients in float16.
    torch.testing.assert_close(found[key], value, atol=0 if NUMBER == 0 else 1e-4, rtol=0)
assert abs(names["result"].metrics["loss"] - loss.item()) < 1e-4
print("done")
"""


@pytest.mark.skipif(not is_installed("ray"), reason="ray is not installed")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_workers_of_ray_have_the_numbers_of_a_loop_by_hand(workers: int, tmp_path: Path) -> None:
    run_in_a_process("ray", tmp_path, f"NUMBER = {workers}\n{RAY}")


ULTRALYTICS = """
from types import SimpleNamespace
from ultralytics import YOLO

train = YOLO.train


def train_and_watch(self, **given):
    self.losses = []
    self.add_callback("on_train_batch_end", lambda trainer: self.losses.append(float(trainer.loss)))
    return train(self, **given)


YOLO.train = train_and_watch
nothing = SimpleNamespace(initialize=lambda *_, **__: None, GradScaler=lambda _: torch.amp.GradScaler(enabled=False))
# Without this the first steps are skipped.
small = functools.partial(mpinit.initialize, loss_scale=mpinit.DynamicLossScale(init=8.0))
initialised = SimpleNamespace(initialize=small, GradScaler=mpinit.GradScaler)
mixed, plain = (run(mpinit=each)["model"] for each in (initialised, nothing))
assert next(mixed.trainer.model.parameters()).dtype is torch.float16
assert next(plain.trainer.model.parameters()).dtype is torch.float32
assert len(mixed.losses) == len(plain.losses) == 4
torch.testing.assert_close(torch.tensor(mixed.losses), torch.tensor(plain.losses), rtol=0.02, atol=0)
assert mpinit.step_counts(mixed.trainer.optimizer) == (4, 0)
for part in ("model", "ema.ema"):
    one, other = (operator.attrgetter(part)(each.trainer).state_dict() for each in (mixed, plain))
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name].dtype == value.dtype
        torch.testing.assert_close(one[name], value, rtol=0.02, atol=0.02)


def start(trainer):
    mpinit.initialize(trainer.model, trainer.optimizer, opt_level="O5")


model = YOLO("yolo11n.yaml")
model.add_callback("on_pretrain_routine_end", start)
try:
    model.train(data=f"{folder}/data.yaml", amp=False, **names_of(library, folder)["few"])
except RuntimeError as error:
    assert "Where forward computes the loss too, initialize the parts" in "".join(error.__notes__), error
else:
    raise AssertionError("a loss in bfloat16")
print("done")
"""


@pytest.mark.skipif(not is_installed("ultralytics"), reason="ultralytics is not installed")
def test_layers_of_ultralytics_train_as_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    run_in_a_process("ultralytics", tmp_path, ULTRALYTICS)


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
            enable(trainer, level)
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
    assert next(trainer.model.parameters()).dtype is torch.bfloat16
    assert losses[0] < 0.68 and losses[1] == pytest.approx(losses[0], rel=0.02)
