"""The ``mpinit`` command. A subcommand is a row in ``COMMANDS`` and a file beside this one, imported when it runs."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

# Command -> its line in `mpinit --help`. A command's file has `describe`, which adds arguments to a parser, and `run`,
# which is called with the parsed arguments and returns the exit status.
COMMANDS: Final = {
    "levels": "show what the levels set, with overrides applied",
    "audit": "show what a training stores, in which types, and which weights cannot move",
    "convert": "turn a checkpoint of apex, torch.amp or mpinit into another's",
    "run": "run a script that was written for apex, unmodified",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. An error is one line on stderr with exit status 2, unless ``--traceback`` is passed."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    # The words after a script's name are the script's own arguments.
    is_script = {"run": re.compile("[^-]"), "audit": re.compile(r".*\.py$")}.get(name, re.compile(r"(?!)"))
    end = next((index for index, word in enumerate(words) if index and is_script.match(word)), len(words)) + 1
    parser = _parser()
    arguments = parser.parse_args(words[:end])
    arguments.rest = words[end:]
    if not name:
        parser.print_help()
        return 0
    try:
        status = int(_file_of(name).run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader was closed, as `head` does. Python still flushes stdout at exit, so it must be writable.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if name == "run" or arguments.traceback:  # `run` shows the script's own traceback
            raise
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
        print(f"mpinit {name}: {type(error).__name__}: {' '.join(text.split())}", file=sys.stderr)
        return 2


def _file_of(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line; ``--help`` has the usage."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="mpinit", description="Mixed precision for PyTorch training scripts.")
    version = f"mpinit {importlib.import_module('mpinit').__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, prog=f"mpinit {name}")
        if name != "run":
            subparser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        _file_of(name).describe(subparser)
    return parser
