"""Runs TVM in a child process, so that a crash of the compiler becomes a CompileError of one step.

The parent writes request.json into a directory. The child writes the objects and library.json, the library's
metadata, beside it, keeps the name of the current phase in the file `phase` and "done total unit" in the file
`progress`, such as "30 90 functions", and writes an error that a user can fix to error.json."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlcbuild import child_progress
from mlcbuild.errors import MlcbuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from mlcbuild.canon import Json

    Build: TypeAlias = Callable[[Mapping[str, Json], Path, Callable[[str], None]], Sequence[Path]]

OBJECTS, METADATA, PHASE, ERROR = "objects.json", "library.json", "phase", "error.json"
PROGRESS = "progress"


def main(backend: Callable[[], Build]) -> None:
    """Runs the child process: compiles request.json in the directory named by sys.argv[1], and writes the
    names of the object files to objects.json there. Meanwhile the files `phase` and `progress` there hold the
    name of the current phase and the last progress report, for the parent process. For an MlcbuildError it
    writes error.json, a list of the name of the error's class and its message, and exits with code 1; other
    exceptions propagate.

    backend: function that imports a device's code generator and returns the function that compiles: (request
    as JSON, directory, callback that receives the name of each phase) -> object files.
    """
    directory = Path(sys.argv[1])
    request: dict[str, Json] = json.loads((directory / "request.json").read_text())

    def mark(phase: str) -> None:
        (directory / PHASE).write_text(phase)

    child_progress.write_to(directory / PROGRESS)
    mark("start the compiler")
    try:
        # Importing TVM takes 0.8 CPU seconds, 0.15 of them for garbage collection that frees nothing.
        gc.disable()
        build = backend()
        gc.freeze()
        gc.enable()
        objects = build(request, directory, mark)
    except MlcbuildError as error:
        (directory / ERROR).write_text(json.dumps([type(error).__name__, str(error)]))
        sys.exit(1)
    (directory / OBJECTS).write_text(json.dumps([path.relative_to(directory).as_posix() for path in objects]))
