"""Helpers that read the code blocks of the project's guides (Markdown), so that tests can execute them."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def example(heading: str, document: str = "mlcbuild/README.md") -> str:
    """Returns the text of the Python code block in one section of a guide."""
    text = (ROOT / document).read_text(encoding="utf-8")
    _, _, section = text.partition(f"\n## {heading}\n")
    (block,) = re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    return str(block)
