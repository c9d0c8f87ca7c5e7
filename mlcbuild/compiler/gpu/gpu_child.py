"""The process in which TVM lowers the kernels of a GPU program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild.compiler.child import ERROR, OBJECTS, PHASE
from mlcbuild.errors import MlcbuildError

if TYPE_CHECKING:
    from mlcbuild.canon import Json


def main() -> None:
    """Makes the program that the directory in argv[1] asks for; see mlcbuild.compiler.child."""
    directory = Path(sys.argv[1])
    request: dict[str, Json] = json.loads((directory / "request.json").read_text())
    (directory / PHASE).write_text("start the compiler")
    try:
        from mlcbuild.compiler.gpu import program_library

        files = program_library.build(request, directory)
    except MlcbuildError as error:
        (directory / ERROR).write_text(json.dumps([type(error).__name__, str(error)]))
        sys.exit(1)
    (directory / OBJECTS).write_text(json.dumps(files))
