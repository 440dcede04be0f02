"""The ``mpinit`` command. A subcommand is a row in ``COMMANDS`` and a file beside this one, imported when it runs."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

# Command -> its line in `mpinit --help`. A command's file has `describe`, which adds arguments to a parser, and `run`,
# which is called with the parsed arguments and returns the exit status.
COMMANDS: Final = {
    "levels": "show what the levels set, with overrides applied",
    "explain": "run a model once and show which operation runs in which type, and why",
    "audit": "show what a training stores, in which types, and which weights cannot move",
    "convert": "turn a checkpoint of apex, torch.amp or mpinit into another's",
    "build-native": "compile what speeds up optimizer steps on this machine's CPU",
    "run": "run a script that was written for apex, unmodified",
}
# `run` shows the script's own traceback. Errors of other commands are one line on stderr, with exit status 2.
_SHOW_THEIR_OWN: Final = ("run",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words else ""
    parser = _parser(chosen)
    if chosen and not chosen.startswith("-") and chosen not in COMMANDS:
        near = difflib.get_close_matches(chosen, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {chosen!r}; {hint}")
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
    """Split the words at the script's name: mpinit's own, and the script's arguments."""
    end = len(words)
    if words[:1] == ["run"]:
        end = next((index for index, word in enumerate(words) if index and not word.startswith("-")), end) + 1
    elif words[:1] == ["audit"]:
        end = next((index for index, word in enumerate(words) if word.endswith(".py")), end) + 1
    return words[:end], words[end:]


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Run a command. An error is one line on stderr and exit status 2, unless ``--traceback`` is set."""
    try:
        status = int(_file_of(name).run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader was closed, as `head` does. Python still flushes stdout at exit, so it must be writable.
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
    """A parser whose errors are one line; ``--help`` has the usage."""

    def error(self, message: str) -> Any:
        sys.exit(_fail(self.prog.removeprefix("mpinit "), f"{message}; see {self.prog} --help"))


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Make the parser.

    Args:
        chosen: the command whose arguments are added; other commands are not imported. Default None: all.
    """
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
