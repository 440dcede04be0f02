"""examples/distributed.py twice in the processes of one launch: in one go, and with a worker that is killed.

``torchrun distributed_example.py FOLDER step word ...``: dies before that step of the second training; the words are
for both. Started again, the first training is over, and the second goes on.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


def main(folder: str, step: str, *words: str) -> None:
    """Run it as a user would, twice, with one process group: that of a launch is made once."""
    sys.path.insert(0, str(EXAMPLE.parent))
    make, destroy = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = lambda *args: None if dist.is_initialized() else make(*args)
    dist.destroy_process_group = lambda: None
    for name, more in (("whole", ()), ("killed", ("--kill-at", step))):
        sys.argv = [str(EXAMPLE), "--out", str(Path(folder) / name), *more, *words]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
