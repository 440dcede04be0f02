"""Lightning's Trainer on two processes, with its average of weights, beside DDP and a loop by hand."""

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import assert_same
from frameworks import let_torchvision_load, needs
from loops import Batch, backward, batches, mlp
from processes import ranks
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import mpinit

let_torchvision_load()
lightning = needs("lightning")

LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=2.0**21, max=2.0**30, growth_interval=3)},
    "O5": {"opt_level": "O5"},
}


class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
    """Its ranks have other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batches(10, seed=dist.get_rank()), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def by_hand(level: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = Module()
    optimizer = module.configure_optimizers()
    mpinit.initialize(module, optimizer, **level)
    parallel = DistributedDataParallel(module)
    average: Any = None
    for x, y in batches(10, seed=dist.get_rank()):
        optimizer.zero_grad()
        backward(mse_loss(parallel(x), y), optimizer)
        mpinit.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        with mpinit.float32_weights(module):
            average = average or AveragedModel(module, avg_fn=get_ema_avg_fn(0.9))
            average.update_parameters(module)
    mpinit.undo(module)
    return average.module.state_dict()


@ranks(2, long=[("O2",), ("O5",)])
def test_two_processes_have_the_bits_of_ddp_by_hand(level: str) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.strategies import DDPStrategy

    from mpinit.integrations.lightning import MixedPrecision

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    # To Lightning, a launcher has started both.
    launched = {"LOCAL_RANK": str(dist.get_rank()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, launched):
        trainer = lightning.Trainer(
            **{"accelerator": "cpu", "devices": 2, "max_epochs": 1, "gradient_clip_val": 0.5, **quiet},
            **{"strategy": DDPStrategy(process_group_backend="gloo"), "use_distributed_sampler": False},
            plugins=[MixedPrecision(**LEVELS[level])],
            callbacks=[EMAWeightAveraging(decay=0.9, use_buffers=False)],
        )
        trainer.fit(module)
    assert_same(module.state_dict(), by_hand(LEVELS[level]))
