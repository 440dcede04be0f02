"""What the tests of the Lightning plug share: a module, a Trainer that says nothing, and a run of it."""

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from lightning import Trainer
from loops import Batch, mlp
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

import mpinit
from mpinit.integrations.lightning import MixedPrecision

MARKS = [
    # Lightning's data loading asks torch's pytree so, and would like processes of its own.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

# The first steps overflow, and later ones let the scale grow.
LARGE = {"opt_level": "O2", "loss_scale": mpinit.DynamicLossScale(init=2.0**21, max=2.0**40, growth_interval=4)}


class Module(lightning.LightningModule):
    """Calls a child with a float32 batch, as many do; forward is for predictions."""

    def __init__(self, make: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> None:
        super().__init__()
        self.net = mlp(batchnorm=True)
        self.make, self.settings = make, {"lr": 1e-2, **settings}
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), **self.settings)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


def trainer(precision: dict[str, Any], **more: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    usual = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "plugins": [MixedPrecision(**precision)]}
    return Trainer(**usual | quiet | more)


def loader(data: list[Any]) -> Any:
    """A bare list would be a list of loaders."""
    return torch.utils.data.DataLoader(data, batch_size=None)


def fit(module: Any, precision: dict[str, Any], data: list[Batch], ckpt: Any = None, **more: Any) -> Trainer:
    run = trainer(precision, **more)
    run.fit(module, loader(data), ckpt_path=ckpt)
    return run


def clip_norm(optimizer: Any) -> None:
    mpinit.clip_grad_norm_(optimizer, 0.5)
