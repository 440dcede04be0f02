"""``mpinit check-apex``: which apex names a script uses, read from its syntax tree. Nothing is run or imported."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .coverage import COVERED, MISSING, MODULES, OPTIMIZER_ATTRIBUTES


@dataclass(frozen=True, order=True)
class Use:
    """One apex name in a script.

    Attributes:
        line: where it is first used.
        name: the full dotted name, or "optimizer._amp_stash" and the like.
        covered: whether ``mpinit run`` provides it.
        spelling: how mpinit or torch spells it; where it is not covered, what to use instead, or "".
    """

    line: int
    name: str
    covered: bool
    spelling: str


def report(files: Sequence[str]) -> int:
    """Print a table of the apex names in each file.

    Args:
        files: paths of Python files.

    Returns:
        0 where every name is covered, 1 where one is not, 2 where a file could not be read.
    """
    status = 0
    for name in files:
        try:
            uses = find_uses(Path(name).read_bytes(), name)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # The parser's own stack is small: an expression may be too deep for it that Python would never meet.
            too_deep = isinstance(error, (RecursionError, MemoryError))
            reason = "an expression in it is nested too deeply to be parsed" if too_deep else error
            print(f"{name}: cannot be read: {reason}", file=sys.stderr)
            status = 2
            continue
        _print_table(name, uses)
        if not all(use.covered for use in uses):
            status = max(status, 1)
    return status


def _print_table(name: str, uses: Sequence[Use]) -> None:
    missing = sum(not use.covered for use in uses)
    if not uses:
        print(f"{name}: uses no apex name")
        return
    print(f"{name}: {len(uses)} apex names, {len(uses) - missing} covered, {missing} not")
    width = max(len(use.name) for use in uses)
    for use in uses:
        instead = f"  use {use.spelling}" if use.spelling else ""
        verdict = f"covered      {use.spelling}" if use.covered else f"NOT COVERED{instead}"
        print(f"  line {use.line:>4}  {use.name:<{width}}  {verdict}")


def find_uses(source: str | bytes, filename: str = "<script>") -> list[Use]:
    """Find the apex names that a script uses.

    Args:
        source: the script's text.
        filename: for error messages.

    Returns:
        One entry for each name, at the line of its first use.

    Raises:
        SyntaxError: the text is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old scripts hold invalid escapes, which are not ours to tell
        nodes = list(ast.walk(ast.parse(source, filename)))
    bound: dict[str, str] = {}
    found = [use for node in nodes for use in _imported(node, bound)]
    found += [use for node in nodes if isinstance(node, ast.Attribute) for use in _named(node, bound)]
    first: dict[str, int] = {}
    for line, name in found:
        judged = name if name.startswith("optimizer.") else _judged(name)
        first[judged] = min(line, first.get(judged, line))
    return sorted(_use(line, name) for name, line in first.items())


def _is_apex(dotted: str) -> bool:
    return dotted.split(".")[0] == "apex"


def _imported(node: ast.AST, bound: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Apex names in an import or a literal ``import_module`` call; the local names that stand for them are bound."""
    if isinstance(node, ast.Import):
        for alias in filter(lambda alias: _is_apex(alias.name), node.names):
            bound[alias.asname or "apex"] = alias.name if alias.asname else "apex"
            yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom) and not node.level and _is_apex(node.module or ""):
        for alias in node.names:
            bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            yield node.lineno, f"{node.module}.{alias.name}".removesuffix(".*")
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__") and _is_apex(str(node.args[0].value)):
            yield node.lineno, str(node.args[0].value)


def _named(node: ast.Attribute, bound: dict[str, str]) -> Iterator[tuple[int, str]]:
    """A dotted chain that starts at a bound name, and what apex puts on optimizers."""
    if node.attr in OPTIMIZER_ATTRIBUTES:
        yield node.lineno, f"optimizer.{node.attr}"
    parts = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and inner.id in bound:
        yield node.lineno, ".".join([bound[inner.id], *reversed(parts)])


def _judged(name: str) -> str:
    """What a name counts as: a covered object that it is an attribute of, or itself as far as that says something."""
    parts = name.split(".")
    outer = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    covered = next((each for each in outer if each in COVERED), "")
    if name in MODULES or covered:
        return name if name in MODULES else covered
    inside = next((each for each in outer if each in MODULES), "")
    # In a known module the first missing name is enough; a missing package is named as far as the script does.
    return ".".join(parts[: inside.count(".") + 2]) if "." in inside else name


def _use(line: int, name: str) -> Use:
    spelling = MODULES.get(name) or COVERED.get(name) or OPTIMIZER_ATTRIBUTES.get(name.removeprefix("optimizer."))
    instead = next((way for gone, way in MISSING.items() if f"{name}.".startswith(f"{gone}.")), "")
    return Use(line, name, bool(spelling), spelling or instead)
