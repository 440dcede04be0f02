"""What fine-tuning a bfloat16 checkpoint costs without float32 masters, and what one line of mpinit gives back.

A small Llama learns the source code of Python's standard library in float32 and is saved in bfloat16, as most published
checkpoints are. Transformers 5 loads it in the type it was saved in. Then it learns other text, Python's language
reference, four times with the same ``Trainer``: loaded in float32; loaded as it is; loaded as it is, with
``enable(trainer)``; and the same with split masters. It prints a table and writes a plot to runs/finetune/. What it has
found goes to result.json there, from which README's and the documentation's tables are made once it is in
examples/results/: ``make bench-tables``.

The learning rate is TrainingArguments' default, 5e-5, falling linearly to 0; the lengths are what takes a few minutes
on two cores. Both were chosen before the first whole run, and nothing was tuned afterwards. To run it: ``pip install
"mpinit[transformers]" matplotlib tqdm``, then ``python examples/finetune_16bit_checkpoint.py``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import transformers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

import mpinit
from mpinit.integrations.transformers import enable

LENGTH = 64  # bytes of text in one sample
BATCH = 8
MODULES = ("argparse", "ast", "datetime", "decimal", "difflib", "inspect", "pathlib", "pickle", "tarfile", "typing")


@dataclass
class Way:
    """One way to fine-tune: how the checkpoint is loaded, and what is done to the Trainer."""

    name: str
    dtype: Any
    prepare: Callable[[Trainer], None]
    look: dict[str, Any] = field(default_factory=dict)


WAYS = (
    Way("float32-loaded", torch.float32, lambda trainer: None, {"color": "#b8b8b8", "linewidth": 6.0}),
    Way("bf16-loaded, plain", "auto", lambda trainer: None, {"color": "#009e73", "linewidth": 1.8}),
    Way("bf16-loaded, mpinit O5", "auto", enable, {"color": "#d55e00", "linewidth": 2.4}),
    Way(
        "bf16-loaded, mpinit O5 split",
        "auto",
        lambda trainer: enable(trainer, master_weights="split"),
        {"color": "#0072b2", "linewidth": 1.6, "linestyle": (0, (3, 3))},
    ),
)


@dataclass
class Run:
    """What one way came to."""

    way: Way
    losses: dict[int, float]
    unmoved: float
    norms: float
    bytes_each: float
    seconds: float


def samples(text: str) -> list[dict[str, torch.Tensor]]:
    """Bytes as tokens, LENGTH of them a sample."""
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return [{"input_ids": part, "labels": part} for part in tokens.split(LENGTH)[:-1]]


def texts() -> tuple[list[Any], list[Any], list[Any]]:
    """Samples to learn first, samples to fine-tune on, and samples of the latter's kind to measure the loss with."""
    library = Path(sysconfig.get_paths()["stdlib"])
    source = "".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    reference = samples("\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(reference), generator=generator).tolist()
    held_out = [reference[index] for index in order[:64]]
    return samples(source), [reference[index] for index in order[64:]], held_out


class Watch(TrainerCallback):
    """Moves the progress bar, and counts the bytes around the first step."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self.bar = bar
        self.bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.bytes = held(kwargs["model"], kwargs["optimizer"].optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()
        if state.global_step == 0:
            states = [value for each in kwargs["optimizer"].state.values() for value in each.values()]
            self.bytes += sum(value.nbytes for value in states if torch.is_tensor(value) and value.dim())


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and masters of either kind.

    Split masters' remainders are the 16-bit integers that are alive before the first step, which takes a buffer of its
    own for a bucket of them: at most 16 MiB, however large the model. Left out, too: beside full masters a copy is kept
    of weights of up to 4,096 numbers, most of this small network's, and few of a large one's.
    """
    weights = list(model.parameters())
    masters = list(mpinit.master_params(optimizer))
    found = [*weights, *(parameter.grad for parameter in (*weights, *masters))]
    found += masters
    if set(map(id, masters)) <= set(map(id, weights)):
        found += [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.dtype == torch.int16]
    storages = [tensor.untyped_storage() for tensor in found if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def settings(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    """What all Trainers share."""
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "use_cpu": True}
    return TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, per_device_eval_batch_size=32, **quiet, **more
    )


def pretrain(folder: Path, source: list[Any], steps: int, bar: tqdm[Any]) -> None:
    """Train the small Llama from nothing in float32, and save it in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    args = settings(folder, steps, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=steps // 20)
    trainer = Trainer(model, args, train_dataset=source, callbacks=[Watch(bar)])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.bfloat16().save_pretrained(folder / "checkpoint")


def finetune(way: Way, folder: Path, data: tuple[list[Any], list[Any]], steps: int, bar: tqdm[Any]) -> Run:
    """Fine-tune the checkpoint in one way."""
    bar.set_description(way.name)
    model = LlamaForCausalLM.from_pretrained(folder / "checkpoint", dtype=way.dtype)
    before = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    watch = Watch(bar)
    args = settings(folder, steps, eval_strategy="steps", eval_steps=max(steps // 10, 1), eval_on_start=True)
    trainer = Trainer(model, args, train_dataset=data[0], eval_dataset=data[1], callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    way.prepare(trainer)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    after = {name: value.float() for name, value in model.state_dict().items()}  # float32 masters where there are any
    moved = {name: (after[name] - value).abs() for name, value in before.items()}
    total = sum(value.numel() for value in before.values())
    norms = torch.cat([value for name, value in moved.items() if "norm" in name])
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    still = sum(int((value == 0).sum()) for value in moved.values()) / total
    run = Run(way, losses, still, float(norms.mean()), watch.bytes / total, seconds)
    if mpinit.registry.of(model) is not None:
        mpinit.undo(model)
    return run


def result(runs: list[Run]) -> dict[str, Any]:
    """All figures, as they are shown."""
    first = runs[0]
    gained = first.losses[0] - first.losses[max(first.losses)]
    ways = [
        {
            "way": run.way.name,
            "final loss": round(run.losses[max(run.losses)], 4),
            "best loss": round(min(run.losses.values()), 4),
            "weights that never moved, %": round(100 * run.unmoved, 1),
            "norm weights moved by": round(run.norms, 5),
            "bytes a parameter": round(run.bytes_each, 1),
            "seconds": round(run.seconds),
            "of what float32 gained, %": round(100 * (run.losses[0] - run.losses[max(run.losses)]) / gained),
        }
        for run in runs
    ]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "loss before": round(first.losses[0], 4), "gained by float32": round(gained, 4), "ways": ways}


def table(found: dict[str, Any]) -> str:
    """A Markdown table with one row for each run."""
    rows = [
        "| | final loss | best loss | weights that never moved | norm weights moved by | bytes per parameter | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in found["ways"]:
        rows.append(
            f"| {way['way']} | {way['final loss']:.4f} | {way['best loss']:.4f} | "
            f"{way['weights that never moved, %']:.1f} % | {way['norm weights moved by']:.5f} | "
            f"{way['bytes a parameter']:.1f} | {way['seconds']} s |"
        )
    return "\n".join(rows)


def remarks(found: dict[str, Any]) -> str:
    """What fine-tuning gained in each way, beside float32."""
    before, gained = found["loss before"], found["gained by float32"]
    lines = [f"Loss before fine-tuning: {before:.4f} (float32-loaded). Of what float32 gained ({gained:.4f}):"]
    lines += [f"- {way['way']}: {way['of what float32 gained, %']} %" for way in found["ways"][1:]]
    return "\n".join(lines)


def draw(runs: list[Run], path: Path, result: str) -> None:
    """Draw the loss on held-out text over steps; the picture holds the hash of its run's result.json."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        axes.plot(list(run.losses), list(run.losses.values()), label=run.way.name, **run.way.look)
    axes.set(xlabel="step of fine-tuning", ylabel="loss on held-out text", title="One bfloat16 checkpoint, four ways")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, metadata={"Data": hashlib.sha256(result.encode()).hexdigest()})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=250, help="of each fine-tuning")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="folder for the table and the plot")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a network this small gains nothing from more, and its timing is steadier
    options.out.mkdir(parents=True, exist_ok=True)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("mpinit").setLevel(logging.WARNING)
    source, train, held_out = texts()
    with tqdm(total=options.pretrain_steps + len(WAYS) * options.steps, desc="float32 from nothing") as bar:
        pretrain(options.out, source, options.pretrain_steps, bar)
        runs = [finetune(way, options.out, (train, held_out), options.steps, bar) for way in WAYS]
    found = result(runs)
    text = f"{table(found)}\n\n{remarks(found)}\n"
    print(f"\n{text}")
    (options.out / "table.md").write_text(text, encoding="utf-8")
    written = json.dumps(found, indent=1) + "\n"
    (options.out / "result.json").write_text(written, encoding="utf-8")
    draw(runs, options.out / "loss.png", written)
    print(f"Plot: {options.out / 'loss.png'}")


if __name__ == "__main__":
    main()
