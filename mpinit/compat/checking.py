"""``mpinit check-apex``: which apex names a script uses, read from its syntax tree. Nothing is run or imported."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .coverage import COVERED, KERNEL_MODULES, MODULES, OPTIMIZER_ATTRIBUTES


@dataclass(frozen=True, order=True)
class Use:
    """One apex name in a script.

    Attributes:
        line: where it is first used.
        name: the full dotted name, or "optimizer._amp_stash" and the like.
        covered: whether ``mpinit run`` provides it.
        spelling: how mpinit or torch spells it; "" where it is not covered.
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
        verdict = f"covered      {use.spelling}" if use.covered else "NOT COVERED"
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

    Example:
        >>> find_uses("from apex import amp")[0].spelling
        'mpinit.amp'
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old scripts hold invalid escapes, which are not our business
        tree = ast.parse(source, filename)
    bound = _bindings(tree)
    first: dict[str, int] = {}
    for line, name in (*_imported(tree), *_named(tree, bound), *_of_optimizers(tree)):
        first[name] = min(line, first.get(name, line))
    return sorted(_judge(line, name) for name, line in _without_prefixes(first).items())


def _is_apex(dotted: str) -> bool:
    top = dotted.split(".")[0]
    return top == "apex" or top in KERNEL_MODULES


def _imported(tree: ast.AST) -> Iterable[tuple[int, str]]:
    """Every apex name in an import statement or a literal ``import_module`` call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_apex(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_apex(node.module or ""):
            yield from ((node.lineno, f"{node.module}.{alias.name}".removesuffix(".*")) for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            literals = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, name) for name in literals if _is_apex(name))


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _bindings(tree: ast.AST) -> dict[str, str]:
    """Local names that stand for apex names, wherever in the file they are bound."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_apex(alias.name):
                    bound[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_apex(node.module or ""):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _named(tree: ast.AST, bound: dict[str, str]) -> Iterable[tuple[int, str]]:
    """Every dotted chain that starts at a bound name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in bound:
                yield node.lineno, ".".join([bound[inner.id], *reversed(parts)])


def _of_optimizers(tree: ast.AST) -> Iterable[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OPTIMIZER_ATTRIBUTES:
            yield node.lineno, f"optimizer.{node.attr}"


def _known(name: str) -> str:
    """The covered name that ``name`` is or is an attribute of; "" where there is none."""
    parts = name.split(".")
    candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    covered = next((candidate for candidate in candidates if candidate in COVERED), "")
    return name if name in MODULES else covered


def _without_prefixes(first: dict[str, int]) -> dict[str, int]:
    """Names by what is judged: attributes of a covered object count as it, inner links of a longer chain go."""
    merged: dict[str, int] = {}
    for name, line in first.items():
        key = name if name.startswith("optimizer.") else _known(name) or _first_unknown(name)
        merged[key] = min(line, merged.get(key, line))
    unknown = [name for name in merged if not _known(name)]
    for name in unknown:
        longer = [other for other in unknown if other.startswith(name + ".")]
        for other in longer:
            merged[other] = min(merged[name], merged[other])
        if longer:
            del merged[name]
    return merged


def _first_unknown(name: str) -> str:
    """``apex.contrib.x.Y`` is missing from ``apex.contrib`` on, but is reported as far as the script names it."""
    parts = name.split(".")
    inside = max((end for end in range(len(parts) + 1) if ".".join(parts[:end]) in MODULES), default=0)
    # Past the first missing name in a known module, further attributes say nothing more.
    return ".".join(parts[: inside + 1]) if inside > 1 else name


def _judge(line: int, name: str) -> Use:
    if name.startswith("optimizer."):
        return Use(line, name, True, OPTIMIZER_ATTRIBUTES[name.removeprefix("optimizer.")])
    spelling = MODULES.get(name) or COVERED.get(name, "")
    return Use(line, name, bool(spelling), spelling)
