"""Of the tests of one launch only that one fails which hangs, ends its process, or is wrong on one rank."""

from pathlib import Path

from processes import launch

CASES = """
import os, time
import torch.distributed as dist
from processes import ranks

@ranks(2)
def test_right():
    pass

@ranks(2)
def test_wrong_on_one_rank():
    assert dist.get_rank() == 0

@ranks(2)
def test_ended():
    dist.get_rank() == 0 and os._exit(3)
    time.sleep(60)

@ranks(2)
def test_hangs():
    time.sleep(60)

@ranks(2)
def test_right_again():
    dist.barrier()
"""


def test_failure_in_a_process_fails_one_test(tmp_path: Path) -> None:
    path = tmp_path / "cases_to_run.py"
    path.write_text(CASES, encoding="utf-8")
    names = [line[4:].partition("(")[0] for line in CASES.splitlines() if line.startswith("def ")]
    outcomes = launch(path, dict.fromkeys(names, 2), 5.0)
    assert [name for name, said in outcomes.items() if said == "ok"] == [name for name in names if "right" in name]
    assert "rank 1: Traceback" in outcomes["test_wrong_on_one_rank"] and "rank 0" not in outcomes[names[1]]
    # Which rank it was, and where the others were then.
    assert "rank 0 ended with 3" in outcomes["test_ended"] and "in test_ended" in outcomes["test_ended"]
    assert "no test was finished in 5 s" in outcomes["test_hangs"]
    assert outcomes["test_hangs"].count("in test_hangs") == 2


SETS = """
import torch.distributed as dist
from processes import ranks

@ranks(2)
def test_sets_differ():
    orders = [None, None]
    dist.all_gather_object(orders, list({str(number) for number in range(100)}))
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
"""


def test_ranks_have_hash_seeds_of_their_own(tmp_path: Path) -> None:
    """Check that each rank has another hash seed: comparisons must not depend on the order of a set."""
    path = tmp_path / "cases_to_hash.py"
    path.write_text(SETS, encoding="utf-8")
    assert launch(path, {"test_sets_differ": 2}) == {"test_sets_differ": "ok"}
