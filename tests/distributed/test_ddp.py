"""DistributedDataParallel: bits, wrappers, and the example that trains with it."""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_example
import pytest
import torch
import torch.distributed as dist
from engines import BF16, CASE, State, assert_close, assert_one, by_itself, mine, refused, sgd_of, whole
from loops import backward
from models import LEVELS, train
from processes import ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import mpinit


def trained(arguments: dict[str, Any], wraps: bool, late: bool = False, views: bool = False) -> State:
    """Six batches, a step by a GradScaler that clips for two of them.

    Args:
        late: the optimizer comes when the model is wrapped already.
    """
    model: nn.Module = CASE.build()
    optimizer: Any = sgd_of(model)
    mpinit.initialize(
        model, None if late else optimizer, await_optimizers=late, **arguments, **({} if wraps else by_itself())
    )
    runs: Any = DistributedDataParallel(model, gradient_as_bucket_view=views) if wraps else model
    if late:
        mpinit.add_optimizers(optimizer)
    scaler = mpinit.GradScaler(optimizer)
    for index, (x, y) in enumerate(mine(batch) if wraps else batch for batch in CASE.batches(6)):
        with runs.no_sync() if wraps and index % 2 == 0 else contextlib.nullcontext():
            scaler.scale(CASE.loss(runs(x), y) / 2).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert mpinit.step_counts(optimizer) == (3, 0)
    state = whole(model.state_dict())
    mpinit.undo(model)
    return state


@ranks(
    2,
    *[("O2", True), ("split", False)],
    long=[(level, late) for level in ("O0", "O1", "O2", "O3", "O4", "O5", "split") for late in (False, True)],
)
def test_ddp_by_a_grad_scaler_equals_one_process(level: str, late: bool) -> None:
    dynamic = {"loss_scale": mpinit.DynamicLossScale(init=1024.0)} if level in ("O1", "O2", "O3") else {}
    arguments = LEVELS[level] | dynamic | ({"cast_model_type": BF16} if level == "O3" else {}) | {"verbosity": 0}
    both = trained(arguments, wraps=True, late=late, views=not late)
    assert_one(list(both.values()))
    assert_close(both, trained(arguments, wraps=False), 1e-5 if level == "O0" else 3e-2)


def clip(how: str, optimizer: Any, model: nn.Module) -> None:
    if how == "mpinit":
        mpinit.clip_grad_norm_(optimizer, 0.5)
    else:
        nn.utils.clip_grad_norm_(list(mpinit.master_params(optimizer)) if how == "masters" else model.parameters(), 0.5)


@ranks(
    2,
    *[("O5", "mpinit", False), ("O5", "masters", True)],
    long=[
        (level, how, views)
        for level in ("O2", "O5", "split")
        for how in ("mpinit", "masters")
        for views in (False, True)
    ],
)
def test_gradients_that_were_clipped_are_added_to(level: str, how: str, views: bool) -> None:
    """Clip after each pass, and keep the gradients' memory, against the same loop in float32 in one process."""
    states = []
    for opt_level in (level, "O0"):
        model = CASE.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wraps = opt_level != "O0"
        mpinit.initialize(model, optimizer, **LEVELS[opt_level], **({} if wraps else by_itself()))
        runs: Any = DistributedDataParallel(model, gradient_as_bucket_view=views) if wraps else model
        for x, y in (mine(batch) if wraps else batch for batch in CASE.batches(3)):
            optimizer.zero_grad(set_to_none=False)
            for _ in range(2):
                backward(CASE.loss(runs(x), y), optimizer)
                clip(how if wraps else "model", optimizer, model)
            optimizer.step()
        states.append(whole(model.state_dict()))
        mpinit.undo(model)
    assert_one(list(states[0].values()))
    assert_close(*states, 2e-2)


def build(level: str, seed: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASE.build()
    if seed is not None:
        torch.manual_seed(seed)  # building has seeded for itself
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
    optimizer = sgd_of(model)
    mpinit.initialize(model, optimizer, **LEVELS[level])
    return model, optimizer


@ranks(2)
def test_a_wrapped_part_has_the_first_ranks_masters() -> None:
    model, optimizer = build("O5", seed=dist.get_rank())
    before = [master.clone() for master in mpinit.master_params(optimizer)]
    model.layer = DistributedDataParallel(model.layer)
    # Rank 0's own are sent, and the other's differed.
    changed = [not torch.equal(*pair) for pair in zip(before, mpinit.master_params(optimizer), strict=True)]
    assert any(changed) == (dist.get_rank() == 1)
    x, y = mine(CASE.batches(1)[0])
    backward(CASE.loss(model(x), y), optimizer)
    optimizer.step()
    assert_one(model.layer.module)


@ranks(2)
def test_wrappers_are_found_wherever_they_are() -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    inside = CASE.build()
    wrapped = DistributedDataParallel(inside)
    optimizer = optimizer_of(inside)
    mpinit.initialize(inside, optimizer, "O2")
    wrapped(CASE.batches(1)[0][0]).sum().backward()
    with refused(RuntimeError, "made before mpinit.initialize", "wrap the model in DistributedDataParallel afterwards"):
        optimizer.step()
    mpinit.undo(inside)
    with refused(ValueError, "DistributedDataParallel"):
        mpinit.initialize(torch.compile(wrapped, backend="eager"), optimizer_of(inside), "O5")
    with refused(ValueError, "torch.compile", "DistributedDataParallel"):
        mpinit.initialize(torch.compile(wrapped, backend="eager"), optimizer_of(inside), "O1")
    around = nn.Sequential(wrapped)
    with refused(ValueError, "'0' is wrapped"):
        mpinit.initialize(around, optimizer_of(around), "O5")
    assert {parameter.dtype for parameter in inside.parameters()} == {torch.float32}
    del wrapped, around
    mpinit.initialize(inside, optimizer_of(inside), "O5")


@ranks(2)
def test_float32_gradients_of_16_bit_weights_are_refused() -> None:
    """Refuse them where DDP wraps the model; with "model" masters they train."""
    for masters in (True, "split", "model"):
        model = CASE.build()
        optimizer = sgd_of(model)
        mpinit.initialize(model, optimizer, "O5", master_weights=masters, grad_dtype=torch.float32)
        if masters == "model":
            train(DistributedDataParallel(model), optimizer, [mine(CASE.batches(1)[0])], CASE.loss)
            assert mpinit.step_counts(optimizer) == (1, 0)
        else:
            with refused(ValueError, "grad_dtype=torch.float32", "DistributedDataParallel", "master_weights='model'"):
                DistributedDataParallel(model)
        mpinit.undo(model)


@ranks(2)
def test_a_step_inside_of_backward_is_refused() -> None:
    """Step in backward by torch's hook, as in one process."""
    model, optimizer = build("O5", seed=0)
    wrapped = DistributedDataParallel(model)
    model.head.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = whole(model.state_dict())
    x, y = mine(CASE.batches(1)[0])
    with refused(RuntimeError, "inside of backward()", "train in one process"):
        CASE.loss(wrapped(x), y).backward()
    assert all(map(torch.equal, whole(model.state_dict()).values(), before.values()))


@ranks(2)
def test_fsdp1_is_sent_to_fsdp2() -> None:
    model = FullyShardedDataParallel(CASE.build(), device_id=torch.device("cpu"))
    for given in (model, nn.Sequential(model)):
        with refused(ValueError, "FSDP1", "fully_shard(model)"):
            mpinit.initialize(given, torch.optim.SGD(model.parameters(), lr=0.1), "O1")


@ranks(2, (False,), long=[(True,)])
def test_training_on_after_undo_asks_for_another_wrapper(compiled: bool) -> None:
    batches = [mine(batch) for batch in CASE.batches(4)]
    model, optimizer = build("O5", seed=0)
    wrapped: Any = DistributedDataParallel(model)
    runs: Callable[..., Tensor] = torch.compile(wrapped, backend="eager") if compiled else wrapped
    train(runs, optimizer, batches[:2], CASE.loss)
    mpinit.undo(model)
    with torch.no_grad():
        runs(batches[0][0])
    with refused(RuntimeError, "Wrap the model again"):
        runs(batches[0][0])
    again = DistributedDataParallel(model)
    CASE.loss(again(batches[2][0]), batches[2][1]).backward()
    assert_one([parameter.grad for parameter in model.parameters()])
    del again
    mpinit.initialize(model, optimizer, "O5")
    train(DistributedDataParallel(model), optimizer, batches[2:], CASE.loss)
    assert_one(model)


@ranks(2)
def test_undo_of_float32_weights_keeps_the_wrapper() -> None:
    batches = [mine(batch) for batch in CASE.batches(2)]
    model, optimizer = build("O1", seed=0)
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, batches, CASE.loss)
    mpinit.undo(model)
    CASE.loss(wrapped(batches[0][0]), batches[0][1]).backward()
    optimizer.step()
    assert_one(model)


@ranks(2)
def test_only_the_first_rank_logs() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mpinit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    mpinit.initialize(CASE.build(), opt_level="O2")
    logger.removeHandler(handler)
    assert bool(said) == (dist.get_rank() == 0), said


PROPERTIES = (
    "O0", "O1:patch_torch_functions=model", "O2", "O3:cast_model_type=bfloat16", "O4:patch_torch_functions=model",
    "O5", "O5:master_weights=split", "O5:master_weights=model",
)  # fmt: skip
RUNS = (*(f"digits:{properties}" for properties in PROPERTIES), "text:O2", "stages:O2")
# Processes that torch 2.13 started again share a store with addresses of those before them, and may wait for one that
# is gone; with this each start has a store of its own.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(folder: Path) -> str:
    """What the processes log, launcher included."""
    torchrun = [sys.executable, distributed_example.__file__, str(folder), "3"]
    ran = subprocess.run(
        [*torchrun, "--steps=4", "--save-every=2", "--batch=8", "--runs", *RUNS],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | OWN_STORE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return ran.stdout


@pytest.mark.long
def test_example_resumes_after_a_killed_worker_bit_for_bit(tmp_path: Path) -> None:
    log = launch(tmp_path)
    said = [line for line in log.splitlines() if line.startswith(("from step", "step", *RUNS))]
    starts = [line for line in said if line.startswith("from")]
    # In one go; until it is killed; what is over, and the other from its checkpoint on.
    assert starts == ["from step 0", "from step 0", "from step 4", "from step 2"]
    for line in (line for line in said if line.startswith("step")):
        losses = dict(part.split() for part in line.split(": ", 1)[1].split(", "))
        assert tuple(losses) == RUNS
        assert all(0 < float(loss) < 7 for loss in losses.values()), losses
    ends = [line for line in said if " ends as " in line]
    count = len(RUNS)
    assert len(ends) == 3 * count and len(set(ends)) == count
    assert ends[:count] == ends[count : 2 * count] == ends[2 * count :]
    assert len({line.split()[-1] for line in ends}) == count


MIXED = """
import pathlib, sys, time, torch, mpinit
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = time.monotonic()
try:
    mpinit.initialize(model, optimizer, "O2", loss_scale=128.0 * 2**rank)
    torch.nn.parallel.DistributedDataParallel(model)
except Exception as error:
    folder = pathlib.Path(sys.argv[1])
    (folder / f"{rank}.part").write_text(f"{time.monotonic() - start} {error}")
    (folder / f"{rank}.part").rename(folder / f"{rank}.txt")
    # The launcher ends the other process as soon as this one has failed: that one's own error comes first.
    while not (folder / f"{1 - rank}.txt").exists() and time.monotonic() - start < 60:
        time.sleep(0.01)
    raise
"""


@pytest.mark.long
def test_keywords_that_differ_end_a_launch_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mixed.py"
    script.write_text(MIXED, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 1
    errors = [(tmp_path / f"{rank}.txt") for rank in range(2)]
    assert all(error.exists() for error in errors), ended.stderr[-4000:]
    for error in errors:
        waited, text = error.read_text(encoding="utf-8").split(" ", 1)
        assert "loss_scale is 128.0 on rank 0 and 256.0 on rank 1" in text
        assert float(waited) < 15


@ranks(1)
def test_reports_run_a_copy_of_the_model_inside_ddp() -> None:
    model = CASE.build()
    optimizer = sgd_of(model)
    mpinit.initialize(model, optimizer, "O5")
    wrapped, (x, _) = DistributedDataParallel(model), CASE.batches(1)[0]
    assert mpinit.fidelity(wrapped, x) and mpinit.fidelity(wrapped, x).first_module is None
    assert mpinit.explain(wrapped, x).rows == mpinit.explain(model, x).rows
