"""The rules for words, as a script: openings of docstrings, long sentences and banned verbs.

    python tests/support/words.py [PATH ...]

lists what it finds below the paths, one line each with its place; without paths it counts tests/ and benchmarks/.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]

OPENINGS: Final = frozenset({"What", "Whether", "Those", "Of", "Which", "Whichever", "By"})
LONGEST_SENTENCE: Final = 35

_VERBS: Final = {
    "take": "take takes taken taking took",
    "give": "give gives given giving gave",
    "note": "note notes noted noting",
    "settle": "settle settles settled settling",
    "leave": "leave leaving left",
    "tell": "tell tells telling told",
    "say": "say says said saying",
    "look": "look looks looked looking",
    "stand": "stand stands stood standing",
    "hold": "hold holds held holding",
    "forget": "forget forgets forgot forgotten forgetting",
}
BANNED: Final = {form: verb for verb, forms in _VERBS.items() for form in forms.split()}
# "come in" is banned, "come" alone is not.
_COME_IN: Final = re.compile(r"(?:^|_)(?:come|comes|came|coming)_in(?:_|$)")
_WORD_IN_NAME: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


class Finding(NamedTuple):
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{place}:{self.line}: {self.text}"


# --- names ------------------------------------------------------------------------------------------------------------


def banned_verb_in(name: str) -> str:
    """Return the banned verb that is a word of ``name``, or ""."""
    words = [word.lower() for word in _WORD_IN_NAME.findall(name)]
    if _COME_IN.search("_".join(words)):
        return "come in"
    return next((BANNED[word] for word in words if word in BANNED), "")


def verbs_in(text: str) -> list[str]:
    """List the banned verbs of a message, without what it quotes; "forget" and "left" are words of their own there."""
    plain = re.sub(r"`[^`]*`|\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)", "quoted", text)
    found = [BANNED[word] for word in re.findall(r"[a-z_]+", plain.lower()) if word in BANNED]
    return sorted({*found, *(["come in"] if re.search(r"\b(?:come|comes|came|coming) in\b", plain) else [])})


def names_defined_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a file defines: classes, functions, arguments, variables, attributes and slots."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, 0
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


# --- prose ------------------------------------------------------------------------------------------------------------

# Names of libraries begin a sentence in lower case.
_END: Final = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`A-Z0-9]|(?:torch|mpinit|apex|bfloat16|float\d+)\b)")
# A list of names in backticks, which is counted as one.
_NAMES: Final = re.compile(r"code(?:,\s+code)+")
_ABBREVIATIONS: Final = re.compile(r"\b(e\.g|i\.e|cf|vs|No|etc|approx)\.", re.IGNORECASE)
_ITEM: Final = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
# An argument in a docstring's section, an attribute: "name: text", "name (type): text".
_ENTRY: Final = re.compile(r"^\s*[*`\w.,| ()\[\]/=-]{1,60}:\s+(?=\S)")
_SECTION: Final = re.compile(
    r"^\s*(?:Args|Arguments|Attributes|Returns|Yields|Raises|Example|Examples|Note|Warns):\s*$"
)


def sentences(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join lines of one paragraph and yield (line of the paragraph, sentence)."""
    numbered = list(lines)
    if not numbered:
        return
    text = " ".join(line.strip() for _, line in numbered)
    text = _ABBREVIATIONS.sub(lambda found: found[1], text)
    for sentence in _END.split(text):
        yield numbered[0][0], sentence.strip()


def words_in(sentence: str) -> int:
    """Count words: code in backticks and a link's address are one word, signs alone are none."""
    plain = re.sub(r"\]\([^)]*\)", "]", sentence)
    plain = _NAMES.sub("code", re.sub(r"``[^`]*``|`[^`]*`", "code", plain))
    return sum(1 for word in plain.split() if re.search(r"\w", word))


def paragraphs(text: str, first_line: int = 1, entries: bool = False) -> Iterator[list[tuple[int, str]]]:
    """Split prose into paragraphs, list items and table cells, without code blocks.

    Args:
        text: Markdown or a docstring.
        first_line: the number of the text's first line.
        entries: whether "name: text" begins a paragraph, as in sections of docstrings.
    """
    fenced, indent_of_code = False, -1
    found: list[tuple[int, str]] = []
    in_sections = False
    for number, line in enumerate(text.splitlines(), first_line):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            fenced = not fenced
            yield found
            found = []
            continue
        if fenced:
            continue
        indent = len(line) - len(line.lstrip())
        if indent_of_code >= 0 and stripped:
            if indent > indent_of_code:
                continue
            indent_of_code = -1
        if not stripped:
            yield found
            found = []
            continue
        if stripped.startswith((">>>", "...", "<", ".. ", ":::", "![", "|---", "#")) or _SECTION.match(line):
            yield found
            found = []
            in_sections = in_sections or bool(_SECTION.match(line))
            if stripped.startswith(">>>"):
                indent_of_code = indent - 1
            continue
        if stripped.startswith("|"):
            yield found
            found = []
            for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                yield [(number, cell)]
            continue
        if _ITEM.match(line) or (entries and in_sections and _ENTRY.match(line)):
            yield found
            found = []
            line = _ITEM.sub("", line)
            if entries and in_sections:
                line = _ENTRY.sub("", line)
        found.append((number, line))
        if entries and stripped.endswith("::"):
            yield found
            found = []
            indent_of_code = indent
    yield found


def long_sentences_in(text: str, first_line: int = 1, entries: bool = False) -> Iterator[tuple[int, str]]:
    for paragraph in paragraphs(text, first_line, entries):
        for line, sentence in sentences(paragraph):
            count = words_in(sentence)
            if count > LONGEST_SENTENCE:
                yield line, f"{count} words: {sentence}"


# First words of docstrings of functions that begin with a noun, a pronoun or a preposition instead of a verb.
_NO_VERBS: Final = re.compile(
    r"(?:The|A|An|All|Any|Each|Every|Everything|It|Its|One|No|None|Nothing|Not|As|After|Before|In|On|For|From|With|"
    r"Without|Up|Why|Whose|Where|When|How|Never|Only|Other|Several|That|This|These|Two|Three|[A-Za-z]+'s)\b|[^A-Z]"
)


def begins_with_verb(node: ast.AST, text: str) -> bool:
    """Return whether a function's docstring may begin with a verb; properties and classes are named by nouns."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return True
    if any("property" in ast.unparse(each) for each in node.decorator_list):
        return True
    return not _NO_VERBS.match(text.strip())


def docstrings_of(tree: ast.AST) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield (node, first line, text) of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node, node.body[0].lineno, text


def opening_of(text: str) -> str:
    """Return the first word of a text."""
    found = re.match(r"\W*(\w+)", text)
    return found[1] if found else ""


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line of each comment that has lines of its own."""
    before = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            if token.start[0] != before + 1:
                yield token.start[0], token.string.lstrip("#: ")
            before = token.start[0]


# --- files ------------------------------------------------------------------------------------------------------------


def findings_in_python(path: Path, allowed: Iterable[str] = ()) -> Iterator[tuple[str, Finding]]:
    """Yield (kind, finding) of a Python file; kinds are "opening", "sentence" and "name"."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    for node, line, text in docstrings_of(tree):
        if opening_of(text) in OPENINGS or not begins_with_verb(node, text):
            name = getattr(node, "name", "module")
            yield "opening", Finding(path, line, f"{name}: {text.strip().splitlines()[0]}")
        for where, sentence in long_sentences_in(text, line, entries=True):
            yield "sentence", Finding(path, where, sentence)
    for line, text in comments_of(source):
        if opening_of(text) in OPENINGS:
            yield "opening", Finding(path, line, f"comment: {text}")
    seen: set[str] = set()
    for name, line in names_defined_in(tree):
        verb = banned_verb_in(name)
        if verb and name not in seen and name not in allowed:
            seen.add(name)
            yield "name", Finding(path, line, f"{name} ({verb})")


_SNIPPET: Final = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def findings_in_markdown(path: Path, allowed: Iterable[str] = ()) -> Iterator[tuple[str, Finding]]:
    """Yield (kind, finding) of a page: long sentences, and banned verbs among the names its snippets define."""
    text = path.read_text("utf-8")
    for line, sentence in long_sentences_in(text):
        yield "sentence", Finding(path, line, sentence)
    for snippet in _SNIPPET.finditer(text):
        try:
            tree = ast.parse(snippet[1])
        except SyntaxError:  # a part of a program; tests/docs runs the whole
            continue
        first = text.count("\n", 0, snippet.start()) + 1
        for name, line in names_defined_in(tree):
            verb = banned_verb_in(name)
            if verb and name not in allowed:
                yield "name", Finding(path, first + line, f"{name} ({verb})")


def findings_below(paths: Iterable[Path], allowed: Iterable[str] = ()) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of all Python and Markdown files below the paths."""
    allowed = frozenset(allowed)
    for path in paths:
        files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        for each in files:
            yield from (findings_in_python if each.suffix == ".py" else findings_in_markdown)(each, allowed)


def main(arguments: list[str]) -> None:
    """Print findings below the paths, or the counts of tests/ and benchmarks/."""
    counts: dict[tuple[str, str], int] = {}
    for root in arguments or ["tests", "benchmarks"]:
        for kind, finding in findings_below([Path(root).resolve()]):
            counts[root, kind] = counts.get((root, kind), 0) + 1
            if arguments:
                print(kind, finding)
    for (root, kind), count in sorted(counts.items()):
        print(f"{root}: {kind} {count}")


if __name__ == "__main__":
    main(sys.argv[1:])
