"""Runs checks of several processes over gloo, forked from one that has imported what they need; test_distributed reads.

``python distributed_launch.py outcomes.json [word ...]`` runs those that have one of the words in their names, and
``python distributed_launch.py outcomes.json nightly`` those of the night.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import distributed_engines
import distributed_matrix
import distributed_sharded
import distributed_split
import distributed_states
import distributed_train_state
import distributed_verdicts
import distributed_worker
import quick_process
import torch
import torch.distributed as dist

from mpinit import registry

# How many processes run which checks.
CHECKS = {
    2: distributed_worker.CHECKS | distributed_states.CHECKS,
    4: distributed_matrix.CHECKS | distributed_split.CHECKS | distributed_train_state.CHECKS,
}
NIGHTLY = {4: distributed_matrix.NIGHTLY}
# They belong to a process group.
MESHES = (distributed_sharded.MESH, distributed_verdicts.mesh_of_two, distributed_engines.mesh)
TIMEOUT = datetime.timedelta(seconds=30)


def main(report: Path, *words: str) -> int:
    """Run every check on all of its ranks; write what came of each."""
    quick_process.prepare()
    # What is slow to import or to start is so once, and not on every rank.
    torch.compile(torch.ones_like, backend="eager")(torch.ones(1))
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    status = 0
    tonight = words == ("nightly",)
    for processes, checks in (NIGHTLY if tonight else CHECKS).items():
        wanted = ("",) if tonight or not words else words
        chosen = {name: run for name, run in checks.items() if any(word in name for word in wanted)}
        if chosen:
            status |= fork(processes, chosen, report)
    return status


def fork(processes: int, checks: dict[str, Callable[[], None]], report: Path) -> int:
    """Run checks on so many processes; the largest of their exit statuses."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    quick_process.keep()
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_all(checks, report, connect(rank, processes, readable, writable), rank, processes)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    statuses = []
    while children:
        child, status = os.wait()
        children.remove(child)
        statuses.append(status)
        if status:
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return max(statuses)


def connect(rank: int, processes: int, readable: int, writable: int) -> dist.Store:
    """A store that all ranks share: the first one's, which tells the others its port."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, processes, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        os.write(writable, b"%8d" % store.port * (processes - 1))
        return store
    return dist.TCPStore("127.0.0.1", int(os.read(readable, 8)), processes, is_master=False, timeout=TIMEOUT)


def run_all(checks: dict[str, Callable[[], None]], report: Path, store: dist.Store, rank: int, processes: int) -> None:
    """Run checks; after one that has failed, and may have left others waiting, with a process group of its own."""
    outcomes: dict[str, str] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    for number, (name, run) in enumerate(checks.items()):
        if not dist.is_initialized():
            prefixed = dist.PrefixStore(f"group {number}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=processes, timeout=TIMEOUT)
        start = time.perf_counter(), time.process_time()
        store.set(f"outcome {number} {rank}", outcome_of(run))
        all_of_them = [store.get(f"outcome {number} {other}").decode() for other in range(processes)]
        outcomes[name] = "\n".join(outcome for outcome in all_of_them if outcome != "ok") or "ok"
        if rank == 0:
            seconds = time.perf_counter() - start[0], time.process_time() - start[1]
            print(f"{seconds[0]:6.2f} s, {seconds[1]:5.2f} s computing  {name}", flush=True)
            report.write_text(json.dumps(outcomes), encoding="utf-8")
        if outcomes[name] != "ok":
            dist.destroy_process_group()
            for cached in MESHES:
                cached.cache_clear()
    store.set(f"done {rank}", "")
    if rank == 0:  # whose store it is
        store.wait([f"done {other}" for other in range(processes)])


def outcome_of(run: Callable[[], None]) -> str:
    """ "ok", or what went wrong on this rank."""
    torch.manual_seed(0)
    try:
        run()
        for left_over in reversed(registry.live()):
            left_over.undo()
        return "ok"
    except Exception:
        said = f"rank {dist.get_rank()}: {traceback.format_exc()}"
    for left_over in reversed(registry.live()):
        with contextlib.suppress(Exception):
            left_over.undo()
    return said


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
