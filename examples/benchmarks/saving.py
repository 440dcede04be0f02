"""Where results go: the committed ones beside the suite, those of a --quick run out of the way."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import machine

ROOT = Path(__file__).resolve().parents[2]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every measuring command has."""
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--out", type=Path, help="folder for the results (default: results/; runs/ with --quick)")


def save(results: dict[str, Any], prefix: str, options: argparse.Namespace) -> Path:
    """Write the results as JSON under a name that says what and where; return the path."""
    default = ROOT / "runs" / "benchmarks" if options.quick else Path(__file__).parent / "results"
    folder: Path = options.out or default
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}-{options.device}-{machine.slug(results['machine'])}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path
