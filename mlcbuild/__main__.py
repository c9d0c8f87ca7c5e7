"""Starts mlcbuild. If the command is `run`, and the receipt of an earlier run (a file that lists all that the
run depended on) shows that nothing has changed, the program prints the report of a run without work and exits
with code 0; otherwise it runs the command line.
"""

from __future__ import annotations

import os
import sys

from mlcbuild.store import receipt


def main() -> int:
    if (
        sys.argv[1:2] == ["run"]
        and sys.stdout is not None
        and (output := receipt.check(sys.argv[1:])) is not None
    ):
        try:
            print(output, flush=True)
        except OSError:  # Standard output is closed, which the command line handles.
            pass
        else:
            # All files are closed: the interpreter's cleanup would only add a tenth to the duration.
            os._exit(0)
    from mlcbuild.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
