"""Tests of the shell completion scripts, in those shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mlcbuild import cli
from mlcbuild.cli import completion


@pytest.fixture(params=completion.SHELLS)
def script(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, Path]:
    """Returns (name of a shell, file with its completion script). Skips the test if the shell is not
    installed."""
    shell = str(request.param)
    assert cli.main(["completion", shell]) == 0
    path = tmp_path / shell
    path.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return shell, path


BASH = 'source "$0"; COMP_WORDS=(mlcbuild "$@"); COMP_CWORD=$#; _mlcbuild; printf "%s\\n" "${COMPREPLY[@]}"'
# The functions of zsh's completion are replaced by ones that print what they get.
ZSH = """
compdef() { }
_files() { print FILES }
_describe() { print -l -- ${(P)2%%:*} }
compadd() { shift; print -l -- $@ }
source "$0"
words=(mlcbuild "$@"); CURRENT=$(( $# + 1 )); PREFIX=$@[-1]
_mlcbuild
"""
FISH = 'source $argv[1]; complete -C (string join " " -- mlcbuild $argv[2..])'


def offered(script: tuple[str, Path], *words: str) -> list[str]:
    """Returns the completions that a shell offers for the last of `words`, which follow `mlcbuild` on the
    command line."""
    shell, path = script
    command = {
        "bash": ["bash", "--norc", "-c", BASH, str(path), *words],
        "zsh": ["zsh", "-fc", ZSH, str(path), *words],
        "fish": ["fish", "--no-config", "-c", FISH, str(path), *words],
    }[shell]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not result.stderr, result.stderr
    begun = words[-1]
    # zsh itself drops what does not begin like the word.
    return [line.split("\t")[0] for line in result.stdout.splitlines() if line.startswith(begun) and line]


def test_verbs_options_and_values(script: tuple[str, Path]) -> None:
    assert set(offered(script, "")) >= set(cli.VERBS)
    assert offered(script, "gra") == ["graph"]
    assert "--keep-going" in offered(script, "run", "--k")
    assert offered(script, "graph", "recipe.yaml", "--format", "m") == ["mermaid"]
    assert offered(script, "cache", "g") == ["gc"]
    assert "--keep-going" not in offered(script, "plan", "--")


def test_every_verb_has_its_options() -> None:
    listed = {verb.name: verb for verb in completion._verbs()}
    assert set(listed) == set(cli.VERBS)
    assert {"--json", "--only"} <= {name for option in listed["plan"].options for name in option.names}


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "choose from" in capsys.readouterr().err
