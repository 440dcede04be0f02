"""``mpinit run``: runs a script that was written for apex, unmodified."""

import argparse


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
    """Run the script or module."""
    from ..compat.running import run_module, run_script

    return (run_module if arguments.is_module else run_script)(arguments.target, arguments.rest)
