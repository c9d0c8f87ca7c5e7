"""Reads the documents whose code blocks tests execute."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.forkserver import COMMANDS

TOURED = ("README.md", "recipes/TOUR.md", "ci/README.md")
"""Paths of the documents whose blocks are executed, in this order, in one shell."""


DOCUMENTS = (
    *TOURED,
    "recipes/README.md",
    "targets/README.md",
    "runtime/README.md",
    "mlcbuild/README.md",
)


@dataclass(frozen=True)
class Block:
    place: str
    mark: str
    """The text after "tour: " in the HTML comment before a document's code block, which states how the block
    is tested; "" if there is no comment."""
    language: str
    text: str


RESULTS = re.compile(r"<!-- results: .*?<!-- end of results -->", re.DOTALL)
"""Regular expression for the tables of measurements that the program ci/bench/results writes into a Markdown
document, between two HTML comments. The tests of documents skip these comments; tests/ci/test_results.py
tests the tables."""


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    results = []
    for match in re.finditer(
        r"^(?:<!-- tour: ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    ):
        line = text.count("\n", 0, match.start()) + 1
        results.append(Block(f"{document}:{line}", match[1] or "", match[2], match[3]))
    assert 2 * len(results) == len(re.findall(r"^\s*```", text, re.MULTILINE)), "a block was not understood"
    comments = RESULTS.sub("", text).count("<!--")
    assert sum(bool(block.mark) for block in results) == comments, "a comment was not understood"
    return results


def commands(directory: Path) -> dict[str, str]:
    """Returns environment variables with which `mlcbuild` is a command and no setting of the user applies."""
    directory.mkdir()
    COMMANDS.write_script(directory / "mlcbuild", "mlcbuild")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MLCBUILD_")}
    path = os.pathsep.join([str(directory), os.environ["PATH"]])
    return {**outer, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
