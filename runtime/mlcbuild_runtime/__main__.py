"""`mlcbuild-serve BUNDLE ...`: serves bundles over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlcbuild_runtime.http import arguments
from mlcbuild_runtime.http.serve import serve


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="mlcbuild-serve",
        description="Serves bundles over an OpenAI-compatible HTTP API, until Ctrl-C.",
        epilog="example: mlcbuild-serve dist/tiny-q4f16_1-host --port 8000",
    )
    arguments.add(parser)
    found = parser.parse_args(given)
    try:
        options = arguments.options(found)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return serve(found.bundles, options)


if __name__ == "__main__":
    sys.exit(main())
