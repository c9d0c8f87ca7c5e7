"""Tests of the check of file names in a published bundle: together they must form one directory tree."""

from __future__ import annotations

import pytest

from mlcbuild.bundles.publish.names import check_names
from mlcbuild.errors import RemoteError


def test_a_tree_is_accepted() -> None:
    check_names(["bundle.json", "tokenizer/a.json", "tokenizer/b/c.json", "tokenizers"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "a/b"], "it names 'a' as a file and as a directory"),
        (["x/y/z", "b", "x/y"], "it names 'x/y' as a file and as a directory"),
        (["ok", "../up"], "up"),
        (["/root"], "root"),
        (["a//b"], "a//b"),
        ([""], ""),
    ],
)
def test_other_names_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(RemoteError) as caught:
        check_names(names)
    assert words in str(caught.value)
