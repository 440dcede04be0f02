"""examples/distributed.py twice in the processes of one launch: in one go, and with a worker that is killed.

``distributed_example.py FOLDER step word ...`` is torchrun, with workers that are forked from it, each time with all
that they import; they run :func:`train`, and the last of them dies before that step of the second training. The words
are for both trainings. Started again, the first training is over, and the second goes on.
"""

import os
import runpy
import sys
from pathlib import Path

import quick_process
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


def launch(*words: str) -> None:
    """What the workers import is imported here, once."""
    from torch.distributed import run

    quick_process.prepare()
    runpy.run_path(str(EXAMPLE))
    quick_process.keep()
    torchrun = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    run.main([*torchrun, "--start-method=fork", "--run-path", __file__, *words])


def train(folder: str, step: str, *words: str) -> None:
    """Run it as a user would, twice, with one process group: that of a launch is made once."""
    make, destroy = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = lambda *args: None if dist.is_initialized() else make(*args)
    dist.destroy_process_group = lambda: None
    for name, more in (("whole", ()), ("killed", ("--kill-at", step))):
        sys.argv = [str(EXAMPLE), "--out", str(Path(folder) / name), *more, *words]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    destroy()


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLE.parent))
    (train if "TORCHELASTIC_RUN_ID" in os.environ else launch)(*sys.argv[1:])
