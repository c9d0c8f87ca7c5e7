"""The code blocks of mlcbuild/README.md, for the tests that execute them."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def example(heading: str) -> str:
    """Returns the Python block of one section of the guide."""
    text = (ROOT / "mlcbuild" / "README.md").read_text(encoding="utf-8")
    _, _, section = text.partition(f"\n## {heading}\n")
    (block,) = re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    return str(block)
