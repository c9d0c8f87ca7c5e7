"""Tests of reading the section `cache` of a recipe, and of the messages about its faults, each with its
position."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcbuild.recipe.cache import read_remotes
from mlcbuild.remotes import Remote
from tests.recipes import HEAD, NAME_RULE, faults, project, reading, reported

__all__ = ["project"]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "remotes of unknown kinds": (
        HEAD
        + "cache:\n  remotes:\n"
        + "".join(
            f"    - {{url: '{url}'}}\n"
            for url in (
                "ftp://a/b",
                "https://me:secret@host/x",
                "https:///x",
                "https://h/x?y=1",
                "file://host/x",
                "http://h:x/",
            )
        ),
        [
            "7:13: 'ftp://a/b' must start with https://, http://, s3://, oci:// or file:///",
            "8:13: a URL must not hold a user name or password: put them into netrc or the environment "
            "(MLCBUILD_TOKEN_<HOST>, MLCBUILD_LOGIN_<HOST>)",
            "9:13: 'https:///x' names no host",
            "10:13: 'https://h/x?y=1' must be an address alone, without '?', '#' and spaces",
            "11:13: 'file://host/x' must name a directory of this machine: file:///path",
            "12:13: the URL cannot be parsed",
        ],
    ),
    "remotes that contradict": (
        HEAD
        + "cache:\n  remotes:\n    - {url: 'https://h/x', mode: read, write: ci-only}\n"
        + "    - {url: 'https://h/x/', mode: both, trust: [ed25519:short]}\n    - {mode: read}\n",
        [
            "7:47: 'write' says when results are sent, but 'mode: read' sends none",
            "8:13: https://h/x is named twice",
            "8:35: 'mode' must be 'read' or 'write' or 'readwrite', not 'both'",
            "8:49: item 1 of 'trust' must be 'ed25519:' and 43 characters, as `mlcbuild keys show` prints "
            "them, not 'ed25519:short'",
            "9:7: item 3 of 'remotes' lacks the key 'url': file:///directory, https://host/path, "
            "s3://bucket/prefix or oci://host/repository, without credentials: those come from netrc, "
            "MLCBUILD_TOKEN_<HOST> or MLCBUILD_LOGIN_<HOST>",
        ],
    ),
    "duplicate key": (HEAD + "name: a\nname: b\n", ["6:1: the key 'name' appears twice; first on line 5"]),
    "a second document and a wrong value": (
        HEAD + "compile: {max_batch: -1}\n---\n",
        [
            "5:22: 'max_batch' must be at least 1, not -1",
            "6:1: a second document starts here: a file holds one",
        ],
    ),
    "bad name of the recipe": (HEAD + "name: a b\n", [f"5:7: 'name' {NAME_RULE}, not 'a b'"]),
    "name that ends with a newline": (HEAD + 'name: "a\\n"\n', [f"5:7: 'name' {NAME_RULE}, not 'a\\n'"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(project: Path, fault: str) -> None:
    text, expected = FAULTS[fault]
    assert faults(text) == expected


def test_remotes_are_read_in_order() -> None:
    recipe = reading(
        "cache:\n  remotes:\n    - {url: 'https://host/a/', write: ci-only, trust: ['ed25519:x']}\n"
        "    - {url: 'ftp://b'}\n    - {url: 'file:///c', mode: read}\n    - {mode: read}\n"
    )
    assert read_remotes(recipe) == (
        Remote("https://host/a", "readwrite", True, ("ed25519:x",)),
        Remote("file:///c", "read"),
    )
    assert [problem.partition(":")[0] for problem in reported(recipe)] == ["4"]
    assert read_remotes(reading("a: 1")) == ()
