"""Several processes, mixed precision, checkpoints, and a training that goes on where a killed worker left it.

    torchrun --nproc-per-node 2 examples/distributed.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 2 examples/distributed.py --kill-at 45

(Without the variable processes that torch 2.13 started again may read addresses of those before them, and hang.)
A CNN learns handwritten digits under DistributedDataParallel, and a small transformer the standard library's text, once
under FSDP2 and once in a pipeline with a stage on every process; side by side, over gloo on a CPU and NCCL on GPUs.
Every process is seeded differently; the first one logs.
``--runs digits:O2 digits:O5:master_weights=split text:O5 stages:O2`` chooses models, levels and
properties. Both commands above end with the same fingerprints of weights and optimizer state, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from demo.digits_data import load_digits
from demo.network import digits_net
from demo.stdlib_text import LENGTH, Writer, load_text
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import mpinit

log = logging.getLogger("distributed")


@dataclass
class Run:
    """A model, its optimizer and schedule, and where its batches come from."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def key(self) -> str:
        """Under what a process saves its part: that of a stage is its own."""
        return self.name

    def train_on(self, chosen: torch.Tensor) -> torch.Tensor:
        """One step on the samples with these numbers; returns the loss."""
        x, y = self.inputs[chosen], self.targets[chosen]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        with mpinit.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        mpinit.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        mpinit.scheduler_step(self.scheduler)
        return loss.detach()

    def fingerprint(self) -> str:
        """Of all weights and optimizer states, gathered on rank 0 once; of nothing on the others."""
        gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = mpinit.TrainState(self.model, self.optimizer, options=gathered).state_dict()
        found = hashlib.sha256()
        for name, value in sorted(state.get("model", {}).items()):
            found.update(name.encode() + value.numpy().tobytes())
        for name, entries in sorted(state.get("optim", {}).get("state", {}).items()):
            values = [entries[key].float().numpy() for key in sorted(entries)]  # numpy has no bfloat16
            found.update(name.encode() + b"".join(value.tobytes() for value in values))
        return found.hexdigest()[:16]


class Stage(nn.Module):
    """A process's share of a Writer: the first one reads text, the last one gives scores."""

    def __init__(self, writer: Writer, index: int, count: int) -> None:
        super().__init__()
        first, last, blocks = index == 0, index == count - 1, len(writer.blocks)
        self.bytes, self.places = (writer.bytes, writer.places) if first else (None, None)
        self.blocks = nn.ModuleList(writer.blocks[index * blocks // count : (index + 1) * blocks // count])
        self.norm, self.head = (writer.norm, writer.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bytes is not None and self.places is not None:
            x = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


@dataclass
class Pipeline(Run):
    """A run whose model is one stage of several."""

    scale: torch.Tensor | float = 1.0

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(self.model, self.rank, self.world, self.inputs.device)
        self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=self.scaled_loss)

    @property
    def key(self) -> str:
        return f"{self.name}, stage {self.rank}"

    def scaled_loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), y.flatten()) * self.scale

    def train_on(self, chosen: torch.Tensor) -> torch.Tensor:
        dist.broadcast(chosen, 0)
        x, y = self.inputs[chosen], self.targets[chosen]
        last, losses = self.rank == self.world - 1, []
        self.optimizer.zero_grad()
        # Only the last stage has a loss; all of them enter, to have its scale and to check their gradients.
        with mpinit.scale_loss(torch.ones((), device=x.device), self.optimizer) as self.scale:
            self.schedule.step(*([x] if self.rank == 0 else []), **({"target": y, "losses": losses} if last else {}))
        mpinit.clip_grad_norm_(self.optimizer, 1.0, process_group=dist.group.WORLD)
        self.optimizer.step()
        mpinit.scheduler_step(self.scheduler)
        # What is logged is the mean over processes.
        return torch.stack(losses).mean().detach() / self.scale * self.world if last else torch.zeros_like(self.scale)


def build(name: str, steps: int, device: torch.device) -> Run:
    """``digits:O2``, ``text:O3:cast_model_type=bfloat16`` and the like: sharded or replicated, and initialised."""
    task, level, *properties = name.split(":")
    asked: dict[str, Any] = dict(given.split("=", 1) for given in properties)
    if task == "digits":
        digits = load_digits()
        inputs, targets = digits.train_images, digits.train_labels
        model: nn.Module = digits_net(8).to(device)
    else:
        inputs = load_text().unfold(0, LENGTH + 1, LENGTH).long()
        inputs, targets = inputs[:, :-1], inputs[:, 1:]
        model = Writer().to(device)
    if task == "stages":
        model = Stage(model, dist.get_rank(), dist.get_world_size())
        asked["process_group"] = dist.group.WORLD  # all stages skip a step together
    elif task == "text":
        # FSDP2 replaces the parameters, so it comes before the optimizer, which comes before initialize ...
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    mpinit.initialize(model, optimizer, level, **asked)
    if task == "digits":
        # ... and DistributedDataParallel takes the parameters' types down, so it comes last.
        model = nn.parallel.DistributedDataParallel(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    kind = Pipeline if task == "stages" else Run
    return kind(name, model, optimizer, scheduler, inputs.to(device), targets.to(device))


class Progress:
    """How many steps were made, in a checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Checkpoints:
    """What is saved of several runs, in folders, and a file that says which folder is whole."""

    def __init__(self, runs: list[Run], progress: Progress, out: Path) -> None:
        self.states: dict[str, Any] = {"progress": progress}
        for run in runs:
            self.states[run.key] = mpinit.TrainState(run.model, run.optimizer)
            self.states[f"{run.name} schedule"] = run.scheduler
        self.out = out
        self.latest = out / "latest"

    def load(self) -> None:
        """Go on from the last checkpoint that is whole, where there is one."""
        if self.latest.exists():
            dcp.load(self.states, checkpoint_id=self.out / self.latest.read_text())

    def save(self, step: int) -> None:
        """A crash at any moment leaves this checkpoint or the one before."""
        # Ranks' BatchNorm statistics differ, and DDP goes on with rank 0's: those are to be saved.
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        before = self.latest.read_text() if self.latest.exists() else None
        dcp.save(self.states, checkpoint_id=self.out / f"step-{step}", planner=planner)
        if dist.get_rank() == 0:
            (self.out / "latest.new").write_text(f"step-{step}")
            (self.out / "latest.new").replace(self.latest)
            if before is not None:
                shutil.rmtree(self.out / before)


def train(runs: list[Run], options: argparse.Namespace) -> None:
    """All runs, step by step, from the last checkpoint on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    progress = Progress()
    checkpoints = Checkpoints(runs, progress, options.out)
    checkpoints.load()
    log.info("from step %d", progress.step)
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while progress.step < options.steps:
        if progress.step == options.kill_at and is_first_attempt and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # Which samples depends on step and rank alone: nothing of it has to be saved.
        chance = torch.Generator().manual_seed(progress.step * world + rank)
        losses = [
            run.train_on(torch.randint(len(run.inputs), (options.batch,), generator=chance).to(run.inputs.device))
            for run in runs
        ]
        progress.step += 1
        if progress.step % options.save_every == 0 or progress.step == options.steps:
            mean = torch.stack(losses) / world
            dist.all_reduce(mean)
            both = zip(runs, mean.tolist(), strict=True)
            log.info("step %d: %s", progress.step, ", ".join(f"{run.name} {loss:.4f}" for run, loss in both))
            checkpoints.save(progress.step)
    for run in runs:
        log.info("%s ends as %s", run.name, run.fingerprint())


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", nargs="+", default=["digits:O2", "text:O2", "stages:O2"], help="task:level[:property=value ...]"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples a process")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=-1, help="the last process dies before this step, once")
    parser.add_argument("--out", type=Path, default=Path("runs/distributed"), help="folder for checkpoints")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank = dist.get_rank()
    logging.basicConfig(format="%(message)s", level=logging.INFO if rank == 0 else logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)
    train([build(name, options.steps, device) for name in options.runs], options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
