"""``mpinit run``: runs a script that was written for apex, unmodified."""

import argparse


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = "mpinit run [-h] (-m MODULE | SCRIPT) [ARGUMENT ...]"
    parser.description = (
        "Run a script that was written for apex as it is: `import apex` finds mpinit's replacement, in this process "
        "only. Under torchrun: torchrun --nproc-per-node 2 -m mpinit run SCRIPT ..."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT names a module, as in python -m")
    # Optional for argparse, whose message would ask for SCRIPT after -m, too.
    help_text = "path of the script, or a module's dotted name after -m"
    parser.add_argument("target", metavar="SCRIPT", nargs="?", help=help_text)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the script or module."""
    if arguments.target is None:
        missing = "-m needs the name of a module, such as: mpinit run -m package.train"
        arguments.refuse(missing if arguments.is_module else "the following arguments are required: SCRIPT")
    from ..compat.running import run_module, run_script

    return (run_module if arguments.is_module else run_script)(arguments.target, arguments.rest)
