"""The ``mpinit`` command. A subcommand is a row in ``COMMANDS`` and a file beside this one, imported when it runs."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

# A command's line in `mpinit --help`. Its file has `describe`, which adds its arguments to a parser, and `run`, which
# is given them and returns the exit status.
COMMANDS: Final = {
    "levels": "show what the levels set, with overrides applied",
    "explain": "run a model once and show which operation runs in which type, and why",
    "audit": "show what a training stores, in which types, and which weights cannot move",
    "convert": "turn a checkpoint of apex, torch.amp or mpinit into another's",
    "build-native": "compile what speeds up optimizer steps on this machine's CPU",
    "run": "run a script that was written for apex, unmodified",
}
# Commands of versions before, and what does the same.
_REMOVED: Final = {"doctor": "torch.utils.benchmark.Timer measures a matrix product in each type on a machine"}
# A user's script shows its own errors; of the others what is raised is said in one line, with exit status 2.
_SHOW_THEIR_OWN: Final = ("run",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words else ""
    parser = _parser(chosen)
    if chosen and not chosen.startswith("-") and chosen not in COMMANDS:
        near = difflib.get_close_matches(chosen, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {chosen!r}; {_REMOVED.get(chosen, hint)}")
    own, rest = _split(words)
    arguments, unknown = parser.parse_known_args(own)
    arguments.rest = rest
    name = arguments.command
    if unknown:
        return _fail(name, f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.version:
        print(f"mpinit {importlib.import_module('mpinit').__version__}")
    elif name is None:
        parser.print_help()
    else:
        return _run(name, arguments)
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What is ours and what belongs to the script: all that follows its name, whatever it looks like."""
    end = len(words)
    if words[:1] == ["run"]:
        end = next((index for index, word in enumerate(words) if index and not word.startswith("-")), end) + 1
    return words[:end], words[end:]


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Run a command; what goes wrong is one line on stderr and exit status 2, unless ``--traceback`` is given."""
    try:
        status = int(_file_of(name).run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone, as `head` does; what Python would still write has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if name in _SHOW_THEIR_OWN:
            raise
        _fail(name, "interrupted")
        return 130
    except Exception as error:
        if name in _SHOW_THEIR_OWN or arguments.traceback:
            raise
        text = " ".join(str(error).split()) or "(no message)"
        ours = isinstance(error, (ValueError, OSError)) or type(error) in (RuntimeError, TypeError)
        return _fail(name, text if ours else f"{type(error).__name__}: {text}")


def _fail(name: str | None, text: str) -> int:
    print(f"mpinit{f' {name}' if name else ''}: {text}", file=sys.stderr)
    return 2


def _file_of(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name.replace('-', '_')}")


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; ``--help`` has the rest."""

    def error(self, message: str) -> Any:
        sys.exit(_fail(self.prog.removeprefix("mpinit "), f"{message}; see {self.prog} --help"))


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser; with one command's name, only that one's arguments are described, and imported for it."""
    parser = argparse.ArgumentParser(prog="mpinit", description="Mixed precision for PyTorch training scripts.")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, prog=f"mpinit {name}")
        if name not in _SHOW_THEIR_OWN:
            subparser.__class__ = _OneLineParser
            subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
            subparser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        if chosen is None or name == chosen:
            _file_of(name).describe(subparser)
    return parser
