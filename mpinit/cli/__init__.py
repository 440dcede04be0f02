"""The ``mpinit`` command. A subcommand is a row in ``COMMANDS``; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """One subcommand: its line in ``mpinit --help``, what adds its arguments to a parser, and what does it.

    ``run`` returns the exit status. With ``says_errors`` what it raises is said in one line, with exit status 2; a
    user's script shows its own.
    """

    summary: str
    describe: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    says_errors: bool = False


def _in_file(name: str, summary: str) -> Command:
    """A command whose arguments and work are in a file of this folder, imported when it is called."""

    def module() -> Any:
        return importlib.import_module(f"{__package__}.{name}")

    return Command(summary, lambda parser: module().describe(parser), lambda args: int(module().run(args)), True)


def _describe_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mpinit run [-h] (-m MODULE | SCRIPT) [ARGUMENT ...]"
    parser.description = (
        "Run a script that was written for apex as it is: `import apex` finds mpinit's stand-in, in this process "
        "only. Under torchrun: torchrun --nproc-per-node 2 -m mpinit run SCRIPT ..."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT names a module, as in python -m")
    parser.add_argument("target", metavar="SCRIPT", help="path of the script, or a module's dotted name after -m")


def _run(arguments: argparse.Namespace) -> int:
    from ..compat.running import run_module, run_script

    run = run_module if arguments.is_module else run_script
    return run(arguments.target, arguments.rest)


def _describe_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the apex names that Python files use, whether `mpinit run` covers them, and mpinit's spelling of each. "
        "Files are read, not run. Exit status: 0 all covered, 1 some not, 2 a file could not be read."
    )
    parser.add_argument("files", metavar="FILE", nargs="+")


def _check(arguments: argparse.Namespace) -> int:
    from ..compat.checking import report

    return report(arguments.files)


COMMANDS = {
    "levels": _in_file("levels", "show what the levels set, with overrides applied"),
    "doctor": _in_file("doctor", "show what this machine can do in 16 bits, and which level suits it"),
    "explain": _in_file("explain", "run a model once and show which operation runs in which type, and why"),
    "audit": _in_file("audit", "show what a training stores, in which types, and which weights cannot move"),
    "convert": _in_file("convert", "turn a checkpoint of apex, torch.amp or mpinit into another's"),
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
    parser = _parser(own[0] if own else "")
    if own and not own[0].startswith("-") and own[0] not in COMMANDS:
        near = difflib.get_close_matches(own[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {own[0]!r}; {hint}")
    arguments, unknown = parser.parse_known_args(own)
    command = COMMANDS.get(arguments.command)
    if unknown and command is not None and command.says_errors:
        print(f"mpinit {arguments.command}: unrecognized arguments: {' '.join(unknown)}", file=sys.stderr)
        return 2
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.version:
        print(f"mpinit {importlib.import_module('mpinit').__version__}")
        return 0
    if command is None:
        parser.print_help()
        return 0
    arguments.rest = rest
    return _in_one_line(command, arguments) if command.says_errors else command.run(arguments)


def _in_one_line(command: Command, arguments: argparse.Namespace) -> int:
    """Run a command; whatever goes wrong is one line on stderr and exit status 2, unless ``--traceback`` is given."""
    try:
        status = command.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever reads has gone, as `head` does; what Python would still write has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"mpinit {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.traceback:
            raise
        text = " ".join(str(error).split()) or "(no message)"
        ours = isinstance(error, (ValueError, OSError)) or type(error) in (RuntimeError, TypeError)
        print(f"mpinit {arguments.command}: {text if ours else f'{type(error).__name__}: {text}'}", file=sys.stderr)
        return 2


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours and what belongs to the script: all that follows its name, whatever it looks like."""
    if not argv or argv[0] != "run":
        return argv, []
    for index, word in enumerate(argv[1:], start=1):
        if not word.startswith("-"):
            return argv[: index + 1], argv[index + 1 :]
    return argv, []


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; ``--help`` has the rest."""

    def error(self, message: str) -> Any:
        """Say so and end."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser; with one command's name, only that one's arguments are described, and imported for it."""
    parser = argparse.ArgumentParser(prog="mpinit", description="Mixed precision for PyTorch training scripts.")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, prog=f"mpinit {name}")
        if command.says_errors:
            subparser.__class__ = _OneLineParser
            subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
            subparser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        if chosen is None or name == chosen:
            command.describe(subparser)
    return parser
