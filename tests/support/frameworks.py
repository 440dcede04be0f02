"""What the tests of frameworks share."""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., object])
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2, static": {"opt_level": "O2", "loss_scale": 128.0},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
}
# Every level and every store, for runs that are resumed.
ALL: dict[str, dict[str, Any]] = LEVELS | {
    "O3": {"opt_level": "O3", "cast_model_type": torch.bfloat16},  # Adam in float16 divides by 0
    "O2, model": {"opt_level": "O2", "master_weights": "model"},
    "O5, model": {"opt_level": "O5", "master_weights": "model"},
    "O5, int8": {"opt_level": "O5", "optimizer_state": "int8"},
    "O5, split, int8": {"opt_level": "O5", "master_weights": "split", "optimizer_state": "int8"},
}

# The names that a marked snippet uses without making them come from these.
NEEDED_BY_MARK = {"a Trainer": "transformers", "a LightningModule": "lightning", "accelerate": "accelerate"}

_libraries: list[torch.library.Library] = []


def is_installed(name: str) -> bool:
    """Return whether the package that a module belongs to is installed, whether or not it can be imported."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def needs(name: str) -> Any:
    """Import a module, and skip the test or file if its package is not installed.

    An import that fails for another reason, such as a torchvision of another index than torch's, fails the test:
    ``pytest.importorskip`` would skip it.
    """
    if not is_installed(name):
        pytest.skip(f"{name.partition('.')[0]} is not installed", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a package deprecates; as pytest.importorskip does
        return importlib.import_module(name)


def marks_for(*packages: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that needs more than the extra ``test``: ``make test-long`` runs it, and installs all.

    Args:
        packages: names that the test imports.
    """
    missing = [package for package in packages if not is_installed(package)]
    return [pytest.mark.long, pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]


def marked_for(*packages: str) -> Callable[[Test], Test]:
    """Return a decorator that puts the marks of :func:`marks_for` on one test."""

    def mark(test: Test) -> Test:
        for each in marks_for(*packages):
            test = each(test)
        return test

    return mark


def framework_of(module: str) -> str | None:
    """Return the package that a module of ``mpinit.integrations`` imports; None for any other module."""
    folder, _, name = module.rpartition(".")
    return {"pretrained": "transformers"}.get(name, name) if folder == "mpinit.integrations" else None


def let_torchvision_load() -> None:
    """Let ``import torchvision``, and with it peft, lightning and timm, load where its operators do not.

    Package indexes give a torchvision built for CUDA beside a torch built for the CPU. Its compiled operators cannot be
    loaded there, and importing it then fails on the first operator that it writes a meta kernel for. Declaring those
    is enough: nothing here calls them.
    """
    if _libraries or not is_installed("torchvision") or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        import torchvision
    except (RuntimeError, AttributeError):
        pass
    else:
        assert torchvision.__version__
        return
    library = torch.library.Library("torchvision", "DEF")
    arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library.define(f"nms{arguments}")
    library.define(f"qnms{arguments}")
    _libraries.append(library)


def tiny_model(name: str, seed: int = 0) -> Any:
    """A float32 model of Transformers without dropout, the same for the same seed."""
    import transformers as hf

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(seed)
    match name:
        case "bert":
            config = hf.BertConfig(vocab_size=32, max_position_embeddings=16, num_labels=3, **sizes, **quiet)
            return hf.BertForSequenceClassification(config)
        case "gpt2":
            drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **drops, **tokens)
            )
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
        case "t5":
            small = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
            config = hf.T5Config(vocab_size=32, dropout_rate=0.0, decoder_start_token_id=0, **small)
            return hf.T5ForConditionalGeneration(config)
        case "vit":
            config = hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes, **quiet)
            return hf.ViTForImageClassification(config)
    raise ValueError(name)


def names_for(mark: str, folder: Path) -> dict[str, Any]:
    """The names that a snippet with this mark uses without making them."""
    let_torchvision_load()
    match mark:
        case "a Trainer":
            return what_a_trainer_needs(folder)
        case "a LightningModule":
            return what_lightning_needs()
        case "accelerate":
            import accelerate

            return {"accelerator": accelerate.Accelerator(cpu=True)}
    return {}


def what_a_trainer_needs(folder: Path) -> dict[str, Any]:
    """The names that snippets about a Trainer use without making them."""
    let_torchvision_load()
    import transformers as hf

    args = hf.TrainingArguments(str(folder), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    return {"Trainer": hf.Trainer, "model": tiny_model("gpt2"), "args": args, "dataset": samples("gpt2", 8)}


def what_lightning_needs() -> dict[str, Any]:
    """The names that snippets about Lightning's Trainer use without making them."""
    let_torchvision_load()
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 2)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = functools.partial(lightning.Trainer, accelerator="cpu", **quiet)
    data = [(torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))] * 4
    return {"Trainer": trainer, "module": Module(), "loader": torch.utils.data.DataLoader(data, batch_size=None)}


def samples(name: str, count: int = 32, seed: int = 1) -> list[dict[str, Any]]:
    """What :func:`tiny_model` learns from, one dict a sample."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        words = torch.randint(3, 32, (8,), generator=generator)
        match name:
            case "bert":
                rows.append({"input_ids": words, "labels": words[0] % 3})
            case "vit":
                pixels = torch.randn(3, 8, 8, generator=generator)
                rows.append({"pixel_values": pixels, "labels": words[0] % 3})
            case _:
                rows.append({"input_ids": words, "labels": words})
    return rows


def same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two state dicts hold the same tensors, to the bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items()
    )
