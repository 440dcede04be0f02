"""The pages and the file of types that are made from code: ``python docs/generate.py`` writes them, a test compares.

Functions and classes are listed by group; their text is in the docstrings and set by autodoc. Properties, levels
and the command line say of themselves what they are.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# Run by a path, and by tests from elsewhere: the file beside this one is found in either case, and so is the package
# of this tree, where another is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import cast_policy

import mpinit
from mpinit import cli
from mpinit.config.properties import Properties

PAGES: Final = Path(__file__).parent
PACKAGE: Final = PAGES.parent / "mpinit"

# Names that a reader looks up together; a test shows that no public name is missing.
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Set up and undo": ("initialize", "add_optimizers", "undo", "Properties", "register_input", "install_as_apex"),
    "Backward and step": (
        "scale_loss",
        "GradScaler",
        "master_params",
        "clip_grad_norm_",
        "loss_scale",
        "DynamicLossScale",
        "compile_steps",
        "step_was_skipped",
        "step_counts",
        "scheduler_step",
    ),
    "Checkpoints, and weights in float32": (
        "state_dict",
        "load_state_dict",
        "TrainState",
        "float32_weights",
    ),
    "Several processes": ("float32_allreduce_hook",),
    "Casts at O1": (
        "disable_casts",
        "half_function",
        "float_function",
        "promote_function",
        "register_half_function",
        "register_float_function",
        "register_promote_function",
    ),
    "See what precision does": (
        "describe",
        "audit",
        "fidelity",
        "explain",
        "overflow_report",
        "watch_overflow",
    ),
    "Results of these functions": (
        "inspect.explain.PrecisionReport",
        "inspect.explain.Row",
        "optimizer.overflow_log.OverflowReport",
        "inspect.overflow.OverflowWatch",
        "inspect.faults.Fault",
        "inspect.audit.Audit",
        "inspect.audit.AuditRow",
        "inspect.fidelity.Fidelity",
    ),
    "In frameworks": (
        "integrations.transformers.enable",
        "integrations.pretrained.save_in",
        "integrations.accelerate.attach",
        "integrations.lightning.MixedPrecision",
    ),
}

# Whose methods are on the page. Those of the rest are a framework's hooks, or an optimizer's.
OPTIONS: Final[Mapping[str, str]] = {
    "Properties": "",
    "inspect.overflow.OverflowWatch": "   :members: first, first_module, kind\n",
    "integrations.lightning.MixedPrecision": "",
}

# In the place of those that would show a page of pydantic's validators.
SIGNATURES: Final[Mapping[str, str]] = {"Properties": "(**properties)"}


def api() -> str:
    """Return the page of public names."""
    parts = ["# Functions and classes\n", "| name | what it does |", "|---|---|"]
    for names in GROUPS.values():
        for name in names:
            anchor = _heading(name).lower().replace(" ", "-")
            parts.append(f"| [`{name.rpartition('.')[2]}`](#{anchor}) | {_first_line(name)} |")
    parts[-1] += "\n"
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            is_class = name.rpartition(".")[2][0].isupper()
            members = OPTIONS.get(name, "   :members:\n") if is_class else ""
            kind = "autoclass" if is_class else "autofunction"
            named = f"mpinit.{name}{SIGNATURES.get(name, '')}"
            parts.append(f"### {_heading(name)}\n\n```{{eval-rst}}\n.. {kind}:: {named}\n{members}```\n")
    return "\n".join(parts)


def _heading(name: str) -> str:
    """Return the heading of a name, with an anchor of its own where a function has the same letters (``audit``)."""
    short = name.rpartition(".")[2]
    functions = {other.rpartition(".")[2] for names in GROUPS.values() for other in names}
    return f"{short} class" if short != short.lower() and short.lower() in functions else short


def _first_line(name: str) -> str:
    """Return the first line of a name's docstring; read an integration's file, because its framework may be missing."""
    module, _, short = name.rpartition(".")
    if module:
        tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        (node,) = (n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == short)
        text = ast.get_docstring(node) or ""
    else:
        text = inspect.getdoc(getattr(mpinit, name)) or ""
    line = " ".join(text.partition("\n\n")[0].split())
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", line).replace("``", "`").replace("|", "\\|")


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{str(value).removeprefix('torch.')}`"


def properties() -> str:
    """Return the page of levels and properties."""
    levels = mpinit.OPT_LEVELS
    of_level = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
    rows = [f"| property | {' | '.join(levels)} |", f"|---{'|---' * len(levels)}|"]
    rows += [
        f"| `{name}` | {' | '.join(_cell(getattr(props, name)) for props in levels.values())} |" for name in of_level
    ]
    parts = [
        "# Levels and properties\n",
        "A level is a row of five properties; every property can be passed as a keyword of `mpinit.initialize`, or in "
        "a [configuration file](configuration.md). O4 and O5 are O1 and O2 in bfloat16. Where the 16-bit type is "
        'bfloat16 and no `loss_scale` is passed, "dynamic" becomes 1.0.\n',
        "\n".join(rows) + "\n",
        "## All properties\n",
        "| property | default | what it is |",
        "|---|---|---|",
    ]
    # A pipe would end the table's cell.
    described = {name: text.replace("|", "\\|") for name, text in _arguments(mpinit.initialize).items()}
    for name, field in Properties.model_fields.items():
        parts.append(f"| `{name}` | {_cell(field.default)} | {described[name]} |")
    return "\n".join(parts) + "\n"


def _arguments(function: Any) -> dict[str, str]:
    """Return what a function's docstring says of each argument."""
    part = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for item in re.split(r"\n(?=    \S)", part):
        names, _, text = " ".join(item.split()).partition(": ")
        plain = re.sub(r":\w+:(?=`)", "", text.replace("``", "`"))
        found |= dict.fromkeys(names.split(", "), plain)
    return found


def command_line() -> str:
    """Return the page of commands."""
    parser = cli._parser()
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = ["# Command line\n", f"{parser.description}\n"]
    for name, command in actions[0].choices.items():
        text = command.format_help().replace(parser.prog + " " + name, f"mpinit {name}")
        parts.append(f"## mpinit {name}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(parts)


MADE: Final = {
    "reference/api.md": api,
    "reference/properties.md": properties,
    "reference/cli.md": command_line,
    "reference/cast-policy.md": cast_policy.page,
}


def main() -> int:
    """Write the pages."""
    for name, make in MADE.items():
        (PAGES / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
