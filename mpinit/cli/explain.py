"""``mpinit explain``: which operation of a model runs in which type, and why."""

from __future__ import annotations

import argparse

from ..inspect.explain import explain
from ..settings.opt_levels import OPT_LEVELS
from .objects import describe_model, make_inputs, make_loss, make_model, make_optimizer
from .output import show_json


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.description = (
        "Run a model once on random numbers, as it would be at a level, and show which operation runs in which type, "
        "why, what is cast, and bytes a parameter at every level."
    )
    describe_model(parser)
    parser.add_argument(
        "--opt-level", default="O1", metavar="LEVEL", help=f"any of {', '.join(OPT_LEVELS)}. Default O1"
    )
    parser.add_argument("--optimizer", metavar="NAME", help="whose state counts in memory, such as adamw. Default none")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")


def run(arguments: argparse.Namespace) -> int:
    """Run it and show the report."""
    model = make_model(arguments.factory, arguments.device)
    inputs = make_inputs(arguments.input, arguments.batch, arguments.device)
    optimizer = None if arguments.optimizer is None else make_optimizer(arguments.optimizer, model, None)
    loss = make_loss(arguments.loss)
    report = explain(model, *inputs, loss=loss, opt_level=arguments.opt_level, optimizer=optimizer)
    if arguments.html:
        report.to_html(arguments.html)
    if arguments.json:
        show_json(report.as_dict())
    elif arguments.html:
        print(f"{report.title()}: {report.summary()}")
        print(f"written: {arguments.html}")
    else:
        print(report)
    return 0
