"""Every message of an error or a warning, read from the package's source: what ``reference/all-messages.md`` lists.

A message is the first argument of an exception that is raised, or of ``warn_user``. What is known only when it is
raised (a name, a number) is shown as "...". A text that a function of the same module makes is followed into it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1] / "mpinit"

# The user's activity when a message appears -> the modules that have such messages.
ROOMS: Final[dict[str, tuple[str, ...]]] = {
    "Calling initialize": (
        *("__init__", "amp", "initialization", "session", "registry", "checks", "settings", "model", "basics"),
        *("functions", "torch_internals"),
    ),
    "Backward and step": ("optimizer", "masters", "scaling", "distributed", "grad_scaler"),
    "Saving and loading": ("checkpoint", "train_state"),
    "Looking": ("inspect",),
    "In a framework": ("integrations",),
    "On the command line": ("cli", "torch_internals/native_build"),
    "Under apex's names": ("compat",),
}


@dataclass(frozen=True)
class Message:
    """A text, the class of the error (or "warning", "note"), and the module it is in."""

    text: str
    kind: str
    module: str


def collect() -> list[Message]:
    """Collect all messages, in the order of files and lines."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for message in _of_module(path, module):
            found.setdefault((message.text, message.kind), message)
    return list(found.values())


def _of_module(path: Path, module: str) -> Iterator[Message]:
    names = names_of(path)
    for scope in functions_of(parsed(path)):
        for kind, argument in raised(scope):
            for text in texts(argument, names.inside(scope)):
                if has_text(text):
                    yield Message(text, kind, module)


@cache
def parsed(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield every function and method, also those inside others."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def raised(scope: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield (class of the error, "warning" or "note", its first argument) for each message of a function."""
    for node in _own(scope):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield _name(node.exc.func), node.exc.args[0]
        elif isinstance(node, ast.Call) and _name(node.func) in ("warn_user", "warn") and node.args:
            yield "warning", node.args[0]
        elif isinstance(node, ast.Call) and _name(node.func) == "add_note" and node.args:
            yield "note", node.args[0]
        elif isinstance(node, ast.Call) and _name(node.func) == "break_graph_if_written":
            yield "RuntimeError", node.args[1]


def _own(scope: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without the functions inside it."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            waiting[:0] = ast.iter_child_nodes(node)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def names_of(path: Path) -> Names:
    """Return the names of a file, outside of any function."""
    return Names.of(path)


@dataclass(frozen=True)
class Names:
    """The values of names: a module's functions and constants, those of modules it imports, and a function's own."""

    functions: dict[str, ast.FunctionDef]
    constants: dict[str, ast.expr]
    modules: dict[str, Path]
    origins: dict[str, Path]
    scope: ast.FunctionDef | None = None
    depth: int = 0

    @classmethod
    def of(cls, path: Path) -> Names:
        tree = parsed(path)
        constants, modules, origins = {}, {}, {}
        for node in tree.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if isinstance(node, (ast.AnnAssign, ast.Assign)) and node.value is not None:
                constants |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.ImportFrom):
                start = path.parents[node.level - 1] if node.level else PACKAGE.parent
                folder = start.joinpath(*(node.module or "").split("."))
                paths = {alias.asname or alias.name: folder / f"{alias.name}.py" for alias in node.names}
                modules |= {name: file for name, file in paths.items() if file.exists()}
                origin = folder.with_name(f"{folder.name}.py")
                origins |= dict.fromkeys((alias.asname or alias.name for alias in node.names), origin)
        origins = {name: file for name, file in origins.items() if file.exists()}
        return cls({node.name: node for node in functions_of(tree)}, constants, modules, origins)

    def inside(self, scope: ast.FunctionDef | None) -> Names:
        """Return the names inside a function, one call further."""
        return replace(self, scope=scope, depth=self.depth + 1)

    def imported(self, name: str) -> Names | None:
        """Return the names of an imported module."""
        path = self.modules.get(name)
        return None if path is None else replace(names_of(path), depth=self.depth)

    def assigned(self, name: str) -> list[ast.expr]:
        """Return the values assigned to a name in the function, or in the module."""
        values = []
        for node in _own(self.scope) if self.scope else ():
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                values.append(node.value)
        if values or name in self.constants:
            return values or [self.constants[name]]
        return names_of(self.origins[name]).assigned(name) if name in self.origins else []

    def that_know(self, function: str) -> Names:
        """Return these names, or those of the first imported file that has such a function or method."""
        others = (names_of(path) for path in dict.fromkeys(self.origins.values()))
        found = next((each for each in (self, *others) if function in each.functions), self)
        return replace(found, depth=self.depth)


def texts(node: ast.expr, names: Names) -> list[str]:
    """List every text that an expression may have, with "..." for parts that only a run knows."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return _joined([texts(part, names) for part in node.values])
    if isinstance(node, ast.FormattedValue):
        return texts(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([texts(node.left, names), texts(node.right, names)])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return [re.sub(r"\{[^{}]*\}", "...", text) for text in texts(node.func.value, names)]
    if isinstance(node, ast.IfExp):
        return texts(node.body, names) + texts(node.orelse, names)
    return _texts_of(node, names) or ["..."]


def _texts_of(node: ast.expr, names: Names) -> list[str]:
    """List the texts of a name, or of a call of one of the package's functions."""
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        names = names.imported(function.value.id) or names
    name = _name(function)
    if names.depth > 4:
        return []
    if isinstance(node, ast.Call):
        knows = names.that_know(name)
        if name not in knows.functions:
            return []
        inner = knows.inside(knows.functions[name])
        returned = [each.value for each in _own(knows.functions[name]) if isinstance(each, ast.Return) and each.value]
        found = [text for value in returned for text in texts(value, inner)]
        # Only functions of another file that return whole sentences, not numbers and names.
        return found if knows.functions is names.functions else list(filter(_is_sentence, found))
    return [text for value in names.assigned(name) for text in texts(value, names.inside(names.scope))]


def _joined(parts: Sequence[list[str]]) -> list[str]:
    """List the joined texts of several parts; if there are too many, parts that vary are "..."."""
    total = 1
    for part in parts:
        total *= len(part)
    found = [""]
    for part in parts:
        choices = part if total <= 4 or len(part) == 1 else ["..."]
        found = [before + text for before in found for text in choices]
    return found


def _is_sentence(text: str) -> bool:
    return len(text) >= 80


def has_text(text: str) -> bool:
    return len(re.sub(r"\W|\.\.\.", "", text)) >= 8


def page() -> str:
    """Return the page that lists all messages."""
    messages = collect()
    parts = [
        # For searching, so not in the sidebar.
        "---\norphan: true\n---\n",
        "# All messages\n",
        "Every error and warning of mpinit, made from its source (`python docs/generate.py`): search this page for a "
        "part of yours. `...` stands for a name or a number. [Messages and what to do](messages.md) explains those "
        "that are asked about most.\n",
    ]
    for title, rooms in ROOMS.items():
        rows = [message for message in messages if _place_of(message.module) in rooms]
        parts += [f"## {title}\n", *(f"- {_cell(row)}" for row in sorted(rows, key=lambda row: row.text.lower())), ""]
    return "\n".join(parts)


def _place_of(module: str) -> str:
    """Return what ``ROOMS`` lists a module under: itself, or its folder."""
    listed = {place for rooms in ROOMS.values() for place in rooms}
    return module if module in listed else module.split("/")[0]


def _cell(message: Message) -> str:
    text = re.sub(r"(\.\.\.[\s,]*){2,}", "... ", message.text)
    text = " ".join(text.split()).replace("`", "'")
    return f"**{message.kind}**: `{text}`"
