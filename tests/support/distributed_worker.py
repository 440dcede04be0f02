"""What two processes check together; run by distributed_launch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import distributed_by_name
import distributed_loops
import distributed_replicas as replicas
import distributed_sharded as sharded
import distributed_verdicts as verdicts
import torch
import torch.distributed as dist
from distributed_pairs import (
    BF16,
    CASE,
    F16,
    F32,
    GRID,
    TOLERANCE,
    alone,
    assert_close,
    assert_ranks_agree,
    full,
    mine,
    pair,
)
from models import train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpinit

CHECKS: dict[str, Callable[[], None]] = {}


def check(*cases: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function into the table, once for each tuple of arguments."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        for arguments in cases or ((),):
            words = [function.__name__, *(str(a).removeprefix("torch.") for a in arguments)]
            CHECKS["-".join(words)] = functools.partial(function, *arguments)
        return function

    return enter


@check(*GRID, ("O2", BF16, True), ("O1", F16, True), ("O0", F32, True))
def ddp_equals_one_process_with_the_large_batch(level: str, dtype: torch.dtype, views: bool = False) -> None:
    batches = CASE.batches(5)
    expected = alone(level, dtype, batches)
    model, optimizer = pair(level, dtype)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    train(wrapped, optimizer, [mine(batch) for batch in batches], CASE.loss)
    state = full(model.state_dict())
    assert_ranks_agree(state)
    assert_close(state, expected, TOLERANCE[dtype])


@check(*[(*row, index % 2 == 1) for index, row in enumerate(GRID)])
def no_sync_accumulates_what_is_averaged_later(level: str, dtype: torch.dtype, views: bool) -> None:
    batches = CASE.batches(9)
    scale = {"loss_scale": "dynamic"} if level == "O3" and dtype is F16 else {}

    def cycles(model: nn.Module, optimizer: Any, part: Callable[[Any], Any], quiet: Callable[[], Any]) -> None:
        for start in range(0, 9, 3):
            optimizer.zero_grad()
            for index in range(start, start + 3):
                with quiet() if index < start + 2 else contextlib.nullcontext():
                    x, y = part(batches[index])
                    with mpinit.scale_loss(CASE.loss(model(x), y) / 3, optimizer) as scaled_loss:
                        scaled_loss.backward()
            optimizer.step()

    model, optimizer = pair(level, dtype, **scale)
    cycles(model, optimizer, lambda batch: batch, contextlib.nullcontext)
    expected = full(model.state_dict())
    mpinit.undo(model)
    model, optimizer = pair(level, dtype, **scale)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    cycles(wrapped, optimizer, mine, wrapped.no_sync)
    state = full(model.state_dict())
    assert_ranks_agree(state)
    assert_close(state, expected, TOLERANCE[dtype])


@check(("O1", False), ("O2", False), ("O1", True), ("O2", True))
def an_overflow_on_one_rank_skips_on_all(level: str, unsynced: bool) -> None:
    model, optimizer = pair(level, F16)
    wrapped = DistributedDataParallel(model)
    batches = CASE.batches(6)
    before = full(model.state_dict())
    for step in range(3):
        optimizer.zero_grad()
        for index, micro in enumerate(batches[2 * step : 2 * step + 2]):
            x, y = mine(micro)
            bad = step == 1 and dist.get_rank() == 1 and index == (0 if unsynced else 1)
            with wrapped.no_sync() if index == 0 else contextlib.nullcontext():
                loss = CASE.loss(wrapped(x), y) * (float("inf") if bad else 1.0)
                with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
        optimizer.step()
        assert mpinit.step_was_skipped(optimizer) == (step == 1)
        after = full(model.state_dict())
        assert_ranks_agree(after)
        assert_ranks_agree(mpinit.loss_scale(optimizer))
        assert all(torch.equal(after[name], before[name]) for name in after) == (step == 1)
        before = after
    assert mpinit.loss_scale(optimizer) == 2.0**15


@check()
def only_the_first_rank_logs() -> None:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mpinit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    mpinit.initialize(CASE.build(), opt_level="O2")
    logger.removeHandler(handler)
    assert bool(said) == (dist.get_rank() == 0), said


class CastByHand(nn.Module):
    """A float32 model whose forward runs on bfloat16 casts of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        casts = {name: parameter.to(BF16) for name, parameter in self.model.named_parameters()}
        result: Tensor = torch.func.functional_call(self.model, casts, x)
        return result.float()


@check((False,), (True,))
def ddp_reduces_float32_parameters_as_by_hand(views: bool) -> None:
    states = []
    for by_hand in (True, False):
        # Every rank has its own weights, until DDP sends those of the first.
        model = CASE.build(seed=dist.get_rank())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if not by_hand:
            mpinit.initialize(model, optimizer, "O5", master_weights="model", verbosity=0)
        wrapped = DistributedDataParallel(CastByHand(model) if by_hand else model, gradient_as_bucket_view=views)
        for index, batch in enumerate(CASE.batches(8)):
            x, y = mine(batch)
            with wrapped.no_sync() if index % 2 == 0 else contextlib.nullcontext():
                loss = CASE.loss(wrapped(x), y)
                if by_hand:
                    loss.backward()
                else:
                    with mpinit.scale_loss(loss, optimizer) as scaled_loss:
                        scaled_loss.backward()
            if index % 2:
                assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
                optimizer.step()
                optimizer.zero_grad()
        states.append(full(model.state_dict()))
        assert_ranks_agree(states[-1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


check()(sharded.casts_in_forwards_of_a_sharded_model_are_refused)
check(*[(*row, index % 2 == 1) for index, row in enumerate(GRID)])(sharded.fsdp_equals_one_process_with_the_large_batch)
check(("O1",), ("O2",))(sharded.fsdp_skips_on_all_ranks_when_one_shard_overflows)
check((F16,), (BF16,))(sharded.fsdp_loads_float32_and_clips)
check()(sharded.a_group_of_two_dtypes_is_refused_and_batchnorm_by_itself_works)
check(*distributed_by_name.DDP_CASES)(distributed_by_name.ddp_states_by_name)
check(*distributed_by_name.FSDP_CASES)(distributed_by_name.fsdp_states_by_name)
check(*distributed_loops.CASES)(distributed_loops.ddp_by_a_grad_scaler)

check(*replicas.MASTERS, ("O5", True))(replicas.different_seeds_train_the_first_ranks_masters)
check()(replicas.a_wrapped_part_has_the_first_ranks_masters)
check(*replicas.MASTERS)(replicas.join_with_uneven_inputs_ends_with_one_models_masters)
check(("O1",), *replicas.MASTERS)(replicas.a_checkpoint_of_one_rank_reaches_all)
check()(replicas.broadcasting_refuses_what_it_cannot_send)
check()(replicas.wrappers_are_found_wherever_they_are)
check()(replicas.fsdp1_is_sent_to_fsdp2)
check((False,), (True,))(replicas.training_on_after_undo_asks_for_another_wrapper)
check()(replicas.undo_of_float32_weights_leaves_the_wrapper_be)
check(("ddp",), ("fsdp",))(verdicts.a_cycle_takes_one_round_and_replicas_none)
check(*verdicts.OVERFLOWS)(verdicts.random_overflows_leave_all_ranks_one)
check(("O1",), ("O2",))(verdicts.an_expert_without_tokens_keeps_nobody_waiting)
check(("plain",), ("mesh",))(verdicts.stages_skip_together)
check()(verdicts.parameters_outside_of_the_wrapper_skip_with_it)
check()(verdicts.process_groups_are_checked)
check((1.0,), (2.0,), (float("inf"),))(verdicts.gradients_of_any_meshes_are_clipped_as_in_one_process)
check()(verdicts.stages_are_clipped_as_one_model)
check()(verdicts.what_is_made_before_sharding_is_refused)
check(("O2",), ("O5",))(verdicts.shards_are_the_masters)
check()(verdicts.a_policy_that_contradicts_the_level_is_refused)
check(("O1",), ("O2",))(verdicts.undo_after_a_failed_forward)
check()(verdicts.zero_redundancy_is_sent_to_fsdp2)
check()(verdicts.a_step_without_any_gradient_is_told_once)
