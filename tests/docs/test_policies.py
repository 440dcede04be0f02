"""The policies: versions that are named are those of the build, and SECURITY.md lists all that runs or loads code."""

import ast
import re
import tomllib
from pathlib import Path

import mpinit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
POLICIES = (ROOT / "docs/reference/policies.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_versions_tested_are_those_of_makefile_and_package() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| ([\d., ]+) \| (.+?) \|$", POLICIES, re.MULTILINE)
    versions = {torch: words for torch, _, words in rows}
    for variable, command in (
        ("TORCH", "make check"),
        ("NEWEST_TORCH", "make test-newest"),
        ("OLDEST_TORCH", "make test-oldest"),
    ):
        (pinned,) = re.findall(rf"^{variable} \?= torch==(.+)$", MAKEFILE, re.MULTILINE)
        assert command in versions[pinned]
    oldest = min(versions, key=lambda text: tuple(map(int, text.split("."))))
    assert f"torch>={oldest.removesuffix('.0')}" in PROJECT["dependencies"]
    pythons = {python for _, several, _ in rows for python in several.split(", ")}
    classified = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)}
    assert pythons == classified and f">={min(pythons)}" == PROJECT["requires-python"]


def test_badges_say_what_the_package_says() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:6])
    shown = dict(re.findall(r"img\.shields\.io/badge/(\w+)-([^\s)]+?)-\w+\)", first))
    torch = next(text for text in PROJECT["dependencies"] if text.startswith("torch"))
    assert shown == {
        "python": PROJECT["requires-python"].removeprefix(">=") + "%2B",
        "torch": torch.removeprefix("torch>=") + "%2B",
        "licence": PROJECT["license"].replace("-", "--"),
    }


def test_the_citation_is_of_this_version() -> None:
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    assert citation["version"] == mpinit.__version__ and citation["license"] == PROJECT["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{citation['version']}] - {citation['date-released']}" in changelog


# Calls that run code or load it from files. Imports of mpinit's own modules and of torch's are no such thing.
RISKS = re.compile(
    r"^(exec|eval|runpy\.\w+|subprocess\.\w+|os\.(system|popen|exec\w+|spawn\w+)|torch\.load|pickle\.loads?|ctypes\.\w+"
    r"|marshal\.loads?|importlib\.machinery\.ExtensionFileLoader|tomllib\.loads?|urllib\.\w+|socket\.\w+|requests\.\w+)$"
)


def risky_calls(text: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call for call in calls if RISKS.match(ast.unparse(call.func))]


def test_every_file_that_runs_or_loads_code_is_in_security_table() -> None:
    named = set(re.findall(r"^\| .+? \| `(\S+\.py)` \|", SECURITY, re.MULTILINE))
    package = ROOT / "mpinit"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if risky_calls(path.read_text(encoding="utf-8"))
    }
    # Imports what a user names, which is no call of the list above.
    assert named == found | {"cli/audit.py"}


def test_files_are_loaded_with_weights_only_unless_trusted() -> None:
    loads = [
        ast.unparse(call)
        for path in (ROOT / "mpinit").rglob("*.py")
        for call in risky_calls(path.read_text(encoding="utf-8"))
        if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads")
    ]
    assert sorted(re.findall(r"weights_only=(.+)\)", "\n".join(loads))) == ["True", "not trusts"]
    assert len(loads) == 2
