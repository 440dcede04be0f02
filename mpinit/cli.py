"""The ``mpinit`` command. A subcommand is a row in ``COMMANDS``; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        summary: its line in ``mpinit --help``.
        describe: adds its arguments to a parser.
        run: does it; gets the parsed arguments and returns the exit status.
    """

    summary: str
    describe: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _describe_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mpinit run [-h] (-m MODULE | SCRIPT) [ARGUMENT ...]"
    parser.description = (
        "Run a script that was written for apex as it is: `import apex` finds mpinit's stand-in, in this process "
        "only. Under torchrun: torchrun --nproc-per-node 2 -m mpinit run SCRIPT ..."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT names a module, as in python -m")
    parser.add_argument("target", metavar="SCRIPT", help="path of the script, or a module's dotted name after -m")
    parser.set_defaults(rest=[])


def _run(arguments: argparse.Namespace) -> int:
    from .compat.running import run_module, run_script

    run = run_module if arguments.is_module else run_script
    return run(arguments.target, arguments.rest)


def _describe_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the apex names that Python files use, whether `mpinit run` covers them, and mpinit's spelling of each. "
        "Files are read, not run. Exit status: 0 all covered, 1 some not, 2 a file could not be read."
    )
    parser.add_argument("files", metavar="FILE", nargs="+")


def _check(arguments: argparse.Namespace) -> int:
    from .compat.checking import report

    return report(arguments.files)


COMMANDS = {
    "run": Command("run a script that was written for apex, unmodified", _describe_run, _run),
    "check-apex": Command("list which apex names a script uses and what covers them", _describe_check, _check),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for ``sys.argv``.

    Returns:
        The exit status.

    Example:
        >>> main(["check-apex", "no_such_file.py"])
        2
    """
    own, rest = _split(list(sys.argv[1:] if argv is None else argv))
    arguments = _parser().parse_args(own)
    if rest:
        arguments.rest = rest
    return COMMANDS[arguments.command].run(arguments)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours and what belongs to the script: all that follows its name, whatever it looks like."""
    if not argv or argv[0] != "run":
        return argv, []
    for index, word in enumerate(argv[1:], start=1):
        if not word.startswith("-"):
            return argv[: index + 1], argv[index + 1 :]
    return argv, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpinit", description="Mixed precision for PyTorch training scripts.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.describe(subparsers.add_parser(name, help=command.summary))
    return parser
