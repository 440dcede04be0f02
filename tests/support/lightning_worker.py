"""Two processes of Lightning's Trainer beside DDP and a loop by hand; run by test_lightning.

The second is forked from the first, which has imported everything: to Lightning, a launcher has started both.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from frameworks import let_torchvision_load, same_bits

let_torchvision_load()

import lightning
import quick_process
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from loops import Batch, batches, mlp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import mpinit
from mpinit.integrations.lightning import MixedPrecision

LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "init_loss_scale": 2.0**21, "max_loss_scale": 2.0**30, "growth_interval": 3},
    "O5": {"opt_level": "O5"},
}


class Module(lightning.LightningModule):
    """Its ranks have other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(mine(), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def mine() -> list[Batch]:
    """This rank's batches."""
    return batches(10, seed=dist.get_rank())


def by_hand(level: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the same training comes to without Lightning."""
    module = Module()
    optimizer = module.configure_optimizers()
    mpinit.initialize(module, optimizer, verbosity=0, **level)
    parallel = DistributedDataParallel(module)
    for x, y in mine():
        optimizer.zero_grad()
        with mpinit.scale_loss(mse_loss(parallel(x), y), optimizer) as scaled_loss:
            scaled_loss.backward()
        mpinit.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    mpinit.undo(module)
    return module.state_dict()


def main() -> None:
    outcomes = {}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    for name, level in LEVELS.items():
        module = Module()
        plugin = MixedPrecision(verbosity=0, **level)
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = lightning.Trainer(
            **{"accelerator": "cpu", "devices": 2, "max_epochs": 1, "gradient_clip_val": 0.5, **quiet},
            **{"strategy": strategy, "plugins": [plugin], "use_distributed_sampler": False},
        )
        trainer.fit(module)
        outcomes[name] = same_bits(module.state_dict(), by_hand(level))
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(outcomes), encoding="utf-8")


def launched() -> None:
    """Fork, and tell Lightning which of the two processes it is in."""
    quick_process.prepare()
    mpinit.OPT_LEVELS  # noqa: B018  imports pydantic, which so is imported once
    quick_process.keep()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    child = os.fork()
    os.environ["LOCAL_RANK"] = "0" if child else "1"
    main()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    launched()
