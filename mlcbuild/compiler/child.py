"""The process in which TVM runs, so that a crash of the compiler becomes an error of one step.

The parent writes request.json into a directory. This process writes the objects and library.json beside it,
keeps the name of the current phase in the file `phase`, and writes an error that a user can fix to
error.json.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild.errors import MlcbuildError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlcbuild.canon import Json
    from mlcbuild.compiler.library import MakeOps

OBJECTS, METADATA, PHASE, ERROR = "objects.json", "library.json", "phase", "error.json"


def main(backend: Callable[[], MakeOps]) -> None:
    """Compiles the request in the directory argv[1]. `backend` imports and returns the backend of a
    device."""
    directory = Path(sys.argv[1])
    request: dict[str, Json] = json.loads((directory / "request.json").read_text())

    def mark(phase: str) -> None:
        (directory / PHASE).write_text(phase)

    mark("start the compiler")
    try:
        gc.disable()  # 0.15 of the 0.8 CPU seconds of importing TVM: what modules create stays
        from mlcbuild.compiler import library

        make_ops = backend()
        gc.freeze()
        gc.enable()
        objects = library.build(request, directory, mark, make_ops)
    except MlcbuildError as error:
        (directory / ERROR).write_text(json.dumps([type(error).__name__, str(error)]))
        sys.exit(1)
    (directory / OBJECTS).write_text(json.dumps([path.name for path in objects]))
