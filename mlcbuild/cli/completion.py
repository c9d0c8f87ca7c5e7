"""The verb that prints completion scripts for shells, made from the parser's verbs, options and values."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from mlcbuild import cli

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    """All spellings of a command-line option, such as ("--output", "-o")."""
    help: str
    values: tuple[str, ...]
    """The values that a command-line option accepts; () if there is no list of them."""
    takes_value: bool


@dataclass(frozen=True)
class _Verb:
    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]
    """Words that shell completion offers as a verb's first argument; () if it offers names of files."""


def completion(arguments: argparse.Namespace) -> int:
    verbs = _verbs()
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](verbs), end="")
    return 0


def _verbs() -> list[_Verb]:
    top = cli.parser()
    (parsers,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return [_verb(name, cli.VERBS[name].help, parser) for name, parser in parsers.choices.items()]


def _verb(name: str, text: str, parser: argparse.ArgumentParser) -> _Verb:
    options, words = list[_Option](), tuple[str, ...]()
    for action in parser._actions:
        values = tuple(map(str, action.choices or ()))
        if action.option_strings:
            shown = (action.help or "").replace("%(default)s", str(action.default))
            options.append(_Option(tuple(action.option_strings), shown, values, action.nargs != 0))
        else:
            words = words or values
    return _Verb(name, text, tuple(options), words)


def _names(verb: _Verb) -> list[str]:
    return [name for option in verb.options for name in option.names if name.startswith("--")]


def _bash(verbs: Iterable[_Verb]) -> str:
    """Returns a completion script for bash: it completes verbs, options and their values, else names of
    files.
    """
    listed = list(verbs)
    lines = [
        "# Put it to use with: source <(mlcbuild completion bash)",
        "_mlcbuild() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=",
        "    if [ $COMP_CWORD -eq 1 ]; then",
        f"        words='{' '.join([*(verb.name for verb in listed), '--help', '--version'])}'",
        "    else",
        '        case "${COMP_WORDS[1]} $before" in',
        *(f"            {line}" for line in _value_cases(listed, "words='{}'")),
        "            *) case ${COMP_WORDS[1]}$word in",
        *(f"                {verb.name}-*) words='{' '.join(_names(verb))}' ;;" for verb in listed),
        *(
            f"                {verb.name}*) words='{' '.join(verb.words)}' ;;"
            for verb in listed
            if verb.words
        ),
        "            esac ;;",
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _mlcbuild mlcbuild",
    ]
    return "\n".join(lines) + "\n"


def _value_cases(verbs: Iterable[_Verb], command: str) -> list[str]:
    """Returns lines of a shell's `case`, one for each spelling of an option that accepts certain values:
    `'VERB OPTION') COMMAND ;;`. command: shell code that offers the option's values for completion; {} stands
    for these values, separated by spaces."""
    return [
        f"'{verb.name} {name}') {command.format(' '.join(option.values))} ;;"
        for verb in verbs
        for option in verb.options
        for name in option.names
        if option.values
    ]


def _zsh(verbs: Iterable[_Verb]) -> str:
    """Returns a completion script for zsh, to be sourced or put into a directory of $fpath as _mlcbuild."""
    listed = list(verbs)
    lines = [
        "#compdef mlcbuild",
        "# Put it to use with: source <(mlcbuild completion zsh), after compinit",
        "_mlcbuild() {",
        "    if (( CURRENT == 2 )); then",
        "        local -a verbs=(",
        *(f"            {shlex.quote(f'{verb.name}:{verb.help}')}" for verb in listed),
        "        )",
        "        _describe verb verbs",
        "        return",
        "    fi",
        '    case "$words[2] $words[CURRENT-1]" in',
        *(f"        {line}" for line in _value_cases(listed, "compadd -- {}; return")),
        "    esac",
        '    case "$words[2]$PREFIX" in',
        *(f"        {verb.name}-*) compadd -- {' '.join(_names(verb))} ;;" for verb in listed),
        *(f"        {verb.name}*) compadd -- {' '.join(verb.words)} ;;" for verb in listed if verb.words),
        "        *) _files ;;",
        "    esac",
        "}",
        "compdef _mlcbuild mlcbuild",
    ]
    return "\n".join(lines) + "\n"


def _fish(verbs: Iterable[_Verb]) -> str:
    """Returns a completion script for fish, for ~/.config/fish/completions/mlcbuild.fish."""
    lines = ["# Put it to use with: mlcbuild completion fish | source"]
    for verb in verbs:
        lines.append(
            f"complete -c mlcbuild -n __fish_use_subcommand -f -a {verb.name} -d {shlex.quote(verb.help)}"
        )
        condition = f"complete -c mlcbuild -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.words:
            lines.append(f"{condition} -f -a '{' '.join(verb.words)}'")
        for option in verb.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
            )
            value = f" -x -a '{' '.join(option.values)}'" if option.values else " -r" * option.takes_value
            lines.append(f"{condition} {names}{value} -d {shlex.quote(option.help)}")
    return "\n".join(lines) + "\n"
