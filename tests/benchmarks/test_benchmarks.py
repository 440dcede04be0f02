"""The benchmark suite runs: every contender trains every task at tiny sizes, and one whole run of the protocol."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mpinit  # noqa: E402
from benchmarks import pieces, tables  # noqa: E402
from benchmarks.case import Unavailable  # noqa: E402
from benchmarks.growth import AXES, Growth  # noqa: E402
from benchmarks.peers import Peer  # noqa: E402
from benchmarks.protocol import FULL, STARTING_MINUTES, Effort, Interpreters, announcement, run_with  # noqa: E402
from benchmarks.roster import ROSTER  # noqa: E402
from benchmarks.suite import workloads  # noqa: E402
from benchmarks.tasks import TASKS  # noqa: E402
from benchmarks.training import Training  # noqa: E402
from benchmarks.with_mpinit import Mpinit  # noqa: E402

# Peers are others' to test, and what compiles takes too long to build here.
FAST = [name for name in ROSTER if name not in ("optimi", "torchao", "bitsandbytes", "flashoptim")]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Interpreters]:
    """One for all tests: it imports torch."""
    with Interpreters(()) as started:
        yield started


def quick(task: str, contender: str) -> Training:
    return Training(task, contender, TASKS[task].sizes["quick"], "cpu")


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_every_contender_trains_every_task(task: str) -> None:
    losses: dict[str, float] = {}
    for name in FAST:
        case = quick(task, name)
        case.warm_up = 2
        try:
            case.prepare()
            losses[name] = case.loss.item()
            assert case.seconds(1) > 0
        except Unavailable:
            continue
        except RuntimeError as error:
            # torch.amp's own 16-bit LSTM has no kernel on CPUs without 16-bit instructions.
            assert task == "lstm" and name in ("amp_fp16", "amp_bf16") and "primitive" in str(error), error
            continue
        finally:
            if hasattr(case, "contender") and isinstance(case.contender, Mpinit):
                mpinit.undo(case.contender.model)
    # In 16 bit, skipped and rounded steps included, a few steps leave the loss near float32's; O3 makes no promise.
    trusted = {name: loss for name, loss in losses.items() if not name.startswith("o3")}
    assert len(trusted) >= 8
    assert all(math.isclose(loss, losses["fp32"], rel_tol=0.35) for loss in trusted.values()), trusted
    assert losses["o0"] == losses["fp32"] == losses["fp32_again"]


def test_contender_without_a_part_is_reported() -> None:
    for task, name, why in (("launch", "tf32", "CUDA"), ("bandwidth", "amp_bf16", "network")):
        with pytest.raises(Unavailable, match=why):
            quick(task, name).prepare()
    task = TASKS["wide"].build(TASKS["wide"].sizes["quick"], CPU)
    with pytest.raises(Unavailable, match="no_such_package"):
        Peer(task, "no_such_package", lambda module, rule, params: torch.optim.SGD(params))


@pytest.mark.parametrize("name", pieces.PIECES)
def test_every_piece_of_a_step_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "has_native_code", lambda: True)
    case = pieces.Piece(name, 64)
    case.prepare()
    assert case.seconds(2) > 0 and case.facts(first=True) == {"numbers": pieces.TENSORS * 64**2}
    monkeypatch.setattr(pieces, "has_native_code", lambda: False)
    if case.work.is_native:
        with pytest.raises(Unavailable, match="mpinit build-native"):
            case.prepare()


@pytest.mark.parametrize("axis", AXES)
def test_growth_is_measured_at_every_point(axis: str) -> None:
    for point in AXES[axis].points["quick"]:
        case = Growth(axis, point, "cpu")
        case.prepare()
        assert case.seconds(2) > 0
        facts = case.facts(first=True)
        assert float(facts["initialize_s"]) > 0 and facts["point"] == point
        # Every step updated every weight: nothing was skipped, nothing left out.
        assert all(part.optimizer.state[p]["step"] >= 3 for part in case.parts for p in part.optimizer.state)
        for models, _ in case.kept:
            mpinit.undo(models)
    assert int(facts["tensors"]) == {"parameters": 16, "tensors": 100, "modules": 99, "optimizers": 10}.get(axis, 2)


@pytest.mark.long
def test_run_writes_results_and_resumes_from_them(tmp_path: Path, interpreters: Interpreters) -> None:
    effort = Effort("quick", rounds=1, most_rounds=1, turns=3, limit_s=0.01)
    words = (interpreters, effort, "cpu", tmp_path, ["o1_linear"], ["o1_bf16"])
    run_with(*words)
    (path,) = tmp_path.glob("*.json")
    written = path.read_bytes()
    results = tables.load(tmp_path, "quick")["o1_linear"]
    measured = {name for name in results.workload.contenders if results.rounds(name)}
    assert measured == {"fp32", "fp32_again", "o1_bf16"}
    assert results.common["torch"] == torch.__version__ and results.common["mpinit"] == mpinit.__version__
    assert not any(str(ROOT) in str(value) for value in results.common.values())
    assert "o1_linear" in tables.summary(tmp_path, "quick")
    run_with(*words)
    assert path.read_bytes() == written, "a finished workload was measured again"
    path.write_bytes(written.replace(str(results.common["source"]).encode(), b"of other sources"))
    run_with(*words)
    assert b"of other sources" not in path.read_bytes()
    # Stopped after its first round of two, it goes on with the second.
    path.write_bytes(written.replace(b'"finished":"yes"', b'"finished":"no"'))
    run_with(interpreters, replace(effort, rounds=2, most_rounds=2), *words[2:])
    again = tables.load(tmp_path, "quick")["o1_linear"]
    assert again.rounds("fp32")[0] == results.rounds("fp32")[0] and set(again.rounds("fp32")) == {0, 1}


@pytest.mark.long
def test_failing_contender_is_a_result_with_its_reason(interpreters: Interpreters) -> None:
    start = {"workload": "o1_linear", "size": "quick", "device": "cpu", "patience_s": 60.0}
    unheard = interpreters.ask(0, ["fp32_again"], start={**start, "workload": "unheard of"})["fp32_again"]
    late = interpreters.ask(0, ["fp32"], start={**start, "patience_s": 1e-4})["fp32"]
    ready = interpreters.ask(0, ["unknown", "fp32"], at_once=2, start=start)
    turn = interpreters.ask(0, ["fp32"], turn=2, untimed=1)["fp32"]
    facts = interpreters.ask(0, ["fp32"], first=True)["fp32"]["facts"]
    assert "KeyError" in unheard["failed"] and "no answer within" in late["failed"]
    assert "KeyError" in ready["unknown"]["failed"] and ready["fp32"]["once"] > 0
    assert turn["seconds"] > 0 and facts["parameters"] == 4 * (32 * 32 + 32)


def test_make_bench_has_less_than_25_minutes_on_a_cpu_and_prints_them() -> None:
    rows = {name: row for name, row in workloads("full").items() if "cpu" in row.devices and row.target == "bench"}
    assert STARTING_MINUTES + sum(row.minutes for row in rows.values()) < 25
    text = announcement(rows, {name: row.contenders for name, row in rows.items()}, FULL)
    assert text.startswith(f"{len(rows)} workloads, at most about 2")
    assert all(f"\n  {name} " in text and row.title in text for name, row in rows.items())
    # Of half the contenders, in half the time.
    few = {name: row.contenders[: len(row.contenders) // 2] for name, row in rows.items()}
    assert announcement(rows, few, FULL).startswith(f"{len(rows)} workloads, at most about 1")
    assert announcement({}, {}, FULL) == "nothing is left to measure"
