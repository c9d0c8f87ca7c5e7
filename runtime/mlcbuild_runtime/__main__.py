"""The command `mlcbuild-serve BUNDLE ...`, which serves bundles over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlcbuild_runtime import release
from mlcbuild_runtime.http import arguments
from mlcbuild_runtime.http.logs import usage_errors
from mlcbuild_runtime.http.serve import serve


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line `mlcbuild-serve` and returns the exit code; raises SystemExit after --help and
    for invalid arguments. words: its arguments; None: those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="mlcbuild-serve",
        description="Serves bundles over an OpenAI-compatible HTTP API, until Ctrl-C.",
        epilog="example: mlcbuild-serve dist/tiny-q4a8_1-host --port 8000",
    )
    release.add(parser)
    arguments.add(parser)
    with usage_errors(sys.argv[1:] if words is None else words):
        parsed = parser.parse_intermixed_args(words)
        try:
            options = arguments.options(parsed)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return serve(parsed.bundles, options)


if __name__ == "__main__":
    sys.exit(main())
