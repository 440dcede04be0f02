"""``mpinit run``: runs a script that was written for apex, unmodified."""

import argparse
import runpy
import sys
from pathlib import Path

from .script import set_arguments


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "mpinit run [-h] (-m MODULE | SCRIPT) [ARGUMENT ...]"
    parser.description = (
        "Run a script that was written for apex as it is: `import apex` finds mpinit's replacement, in this process "
        "only. Under torchrun: torchrun --nproc-per-node 2 -m mpinit run SCRIPT ..."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("target", metavar="SCRIPT or MODULE", help="path of the script, or the module's dotted name")


def run(arguments: argparse.Namespace) -> int:
    """Run the script or module as ``__main__``, with the name ``apex`` provided."""
    from ..compat.importing import BOOTSTRAP, install_as_apex

    target = arguments.target
    set_arguments([target, *arguments.rest], Path() if arguments.is_module else Path(target).parent)
    install_as_apex()
    # Processes that the script spawns inherit sys.path, but no import hooks.
    sys.path.insert(1, BOOTSTRAP)
    if arguments.is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
    return 0
