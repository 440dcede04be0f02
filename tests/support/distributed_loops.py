"""Checks for two processes of loops that own backward: GradScaler's, and plain ones; entered by distributed_worker."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from models import CASES as MODELS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpinit

CASE = MODELS["transformer"]
DYNAMIC = {"loss_scale": "dynamic", "init_loss_scale": 1024.0}
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"} | DYNAMIC,
    "O2": {"opt_level": "O2"} | DYNAMIC,
    "O3": {"opt_level": "O3", "cast_model_type": torch.bfloat16} | DYNAMIC,
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
CASES = [(level, late, views) for level in LEVELS for late, views in ((False, True), (True, False))]


def ddp_by_a_grad_scaler(level: str, late: bool, views: bool) -> None:
    """Clipped and accumulated over two passes, of which one is in ``no_sync()``: as one process with all data."""
    data = CASE.batches(6)
    alone = _train(level, False, data, lambda model: model)
    rank = dist.get_rank()
    mine = [(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in data]
    both = _train(level, late, mine, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=views))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, both)
    assert all(torch.equal(gathered[0][name], gathered[1][name]) for name in both)
    tolerance = 1e-5 if level == "O0" else 3e-2
    for name in alone:
        torch.testing.assert_close(both[name], alone[name], atol=tolerance, rtol=tolerance, msg=name)


def _train(level: str, late: bool, data: list[Any], wrap: Any) -> dict[str, torch.Tensor]:
    model: nn.Module = CASE.build()
    if late:
        mpinit.initialize(model, await_optimizers=True, verbosity=0, **LEVELS[level])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if not late:
        mpinit.initialize(model, optimizer, verbosity=0, **LEVELS[level])
    wrapped = wrap(model)
    if late:
        mpinit.add_optimizers(optimizer)
    scaler = mpinit.GradScaler(optimizer)
    for index, (x, y) in enumerate(data):
        last = index % 2 == 1
        quiet = wrapped.no_sync() if not last and hasattr(wrapped, "no_sync") else contextlib.nullcontext()
        with quiet:
            scaler.scale(CASE.loss(wrapped(x), y) / 2).backward()
        if last:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    assert mpinit.step_counts(optimizer) == (len(data) // 2, 0)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    mpinit.undo(model)
    return state
