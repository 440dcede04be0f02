"""``mpinit completion``: a script by which a shell completes commands, options and their values."""

import argparse
from typing import Final

from ..basics.dtypes import NAMES
from ..settings.properties import OPT_LEVELS, field_names
from . import COMMANDS, command_parsers

SHELLS: Final = ("bash", "zsh", "fish")

# The words that an argument with this metavar may be.
_VALUES: Final = {
    "LEVEL": tuple(OPT_LEVELS),
    "DTYPE": tuple(NAMES),
    "NAME=VALUE": tuple(f"{name}=" for name in field_names()),
}

_BASH: Final = """\
# mpinit: completion for bash. In ~/.bashrc: eval "$(mpinit completion bash)"
_mpinit() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}} $previous" in
{values}        *)
            case "${{COMP_WORDS[1]}}" in
{options}            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${{#COMPREPLY[@]}} -eq 0 ]]; then compopt -o default 2>/dev/null; fi
}}
complete -F _mpinit mpinit
"""

_ZSH: Final = """\
#compdef mpinit
# mpinit: completion for zsh. In ~/.zshrc, after compinit: eval "$(mpinit completion zsh)"
_mpinit() {{
    local -a found
    if (( CURRENT == 2 )); then
        found=({commands} --help --version)
    else
        case "${{words[2]}} ${{words[CURRENT-1]}}" in
{values}            *)
                case "${{words[2]}}" in
{options}                esac ;;
        esac
    fi
    compadd -- $found
    (( CURRENT > 2 )) && _files
}}
compdef _mpinit mpinit
"""


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Print a script by which a shell completes mpinit's commands, options and their values. For bash, add "
        '`eval "$(mpinit completion bash)"` to ~/.bashrc; for zsh the same with zsh to ~/.zshrc, after compinit; for '
        "fish, write it to ~/.config/fish/completions/mpinit.fish. The script starts no Python: make it again after an "
        "update."
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(_fish() if arguments.shell == "fish" else _of_words(_ZSH if arguments.shell == "zsh" else _BASH), end="")
    return 0


def _of_words(script: str) -> str:
    """Fill the script of a shell that completes from lists of words."""
    assignment, indent = ("found=({})", 16) if script is _ZSH else ('words="{}"', 12)
    values, options = "", ""
    for name, parser in command_parsers().items():
        words: list[str] = []
        for action in _visible(parser):
            words += action.option_strings or _values(action)
            if action.option_strings and action.nargs != 0:
                cases = "|".join(f'"{name} {option}"' for option in action.option_strings)
                values += f"{' ' * (indent - 4)}{cases}) {assignment.format(' '.join(_values(action)))} ;;\n"
        options += f"{' ' * indent}{name}) {assignment.format(' '.join(words))} ;;\n"
    return script.format(commands=" ".join(COMMANDS), values=values, options=options)


def _fish() -> str:
    lines = ["# mpinit: completion for fish, for ~/.config/fish/completions/mpinit.fish"]
    for name, summary in COMMANDS.items():
        lines.append(f"complete -c mpinit -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}")
    lines.append("complete -c mpinit -n __fish_use_subcommand -f -l version -d 'show the version and exit'")
    for name, parser in command_parsers().items():
        begin = f"complete -c mpinit -n '__fish_seen_subcommand_from {name}'"
        for action in _visible(parser):
            values = _values(action)
            described = f" -d {_quoted((action.help or '').replace('%%', '%'))}"
            needed = f" -x -a {_quoted(' '.join(values))}" if values else " -r" if action.nargs != 0 else ""
            for option in action.option_strings:
                flag = f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
                lines.append(f"{begin}{flag}{needed}{described}")
            if values and not action.option_strings:
                lines.append(f"{begin} -f -a {_quoted(' '.join(values))}")
    return "\n".join(lines) + "\n"


def _visible(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _values(action: argparse.Action) -> list[str]:
    """Return the words that an argument may be, as far as they can be listed."""
    if action.choices is not None:
        return list(map(str, action.choices))
    return list(_VALUES.get(str(action.metavar), ()))


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
