"""``mpinit check-apex``: which apex names a script uses, and what covers them."""

from __future__ import annotations

import argparse


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.description = (
        "List the apex names that Python files use, whether `mpinit run` covers them, and mpinit's spelling of each. "
        "Files are read, not run. Exit status: 0 all covered, 1 some not, 2 a file could not be read."
    )
    parser.add_argument("files", metavar="FILE", nargs="+")


def run(arguments: argparse.Namespace) -> int:
    """Read them and say."""
    from ..compat.checking import report

    return report(arguments.files)
