"""The scripts of ``mpinit completion``, run by the shells themselves.

Below the public face: the shells that have a script are listed in the package.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from mpinit.cli import COMMANDS, main
from mpinit.cli.completion import SHELLS

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_mpinit
echo "${COMPREPLY[@]}"
"""
# zsh's own functions for completion do not run outside of its line editor.
ZSH = """
compdef() { :; }; _files() { :; }
compadd() { shift; local current=${words[CURRENT]}; print -- ${(M)@:#${current}*}; }
source "$1"; shift
words=("$@"); CURRENT=$#
_mpinit; true
"""
FISH = 'source $argv[1]; complete -C "$argv[2]" | string split -f 1 \\t; true'


def completed(shell: str, line: str, script: Path) -> list[str]:
    """Return the words that a shell offers at the end of a line."""
    words = line.split(" ")
    command = {
        "bash": ["bash", "--norc", "-c", BASH, "bash", str(script), *words],
        "zsh": ["zsh", "-f", "-c", ZSH, "zsh", str(script), *words],
        "fish": ["fish", "--no-config", "-c", FISH, str(script), line],
    }[shell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=script.parent)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture
def script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mpinit ", set(COMMANDS)),
        ("mpinit ex", {"explain"}),
        ("mpinit b", {"build-native"}),
        ("mpinit levels O", {"O0", "O1", "O2", "O3", "O4", "O5"}),
        ("mpinit levels --c", {"--config"}),
        ("mpinit levels --set max_l", {"max_loss_scale="}),
        ("mpinit explain m:f --opt-level ", {"O0", "O1", "O2", "O3", "O4", "O5"}),
        ("mpinit audit m:f --dtype bf", {"bf16", "bfloat16"}),
        ("mpinit convert a b --to ", {"mpinit", "apex", "torch"}),
        ("mpinit completion ", set(SHELLS)),
    ],
)
def test_a_shell_offers_commands_options_and_values(line: str, offered: set[str], shell: str, script: Path) -> None:
    found = set(completed(shell, line, script))
    assert offered <= found
    assert not {word for word in found - offered if not word.startswith("-") and word != script.name}


def test_bash_completes_files_where_nothing_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    assert "compopt -o default" in capsys.readouterr().out
