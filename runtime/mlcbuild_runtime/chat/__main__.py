"""The command `mlcbuild-chat BUNDLE`, which talks to a bundle, or to the model of a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlcbuild_format.errors import BundleError

from mlcbuild_runtime import release
from mlcbuild_runtime.chat import chat_options, run
from mlcbuild_runtime.locations import directories
from mlcbuild_runtime.option_values import positive


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line `mlcbuild-chat` and returns the exit code; raises SystemExit after --help and for
    invalid arguments. words: its arguments; None: those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="mlcbuild-chat",
        description="Talks to a model in the terminal.",
        epilog="example: mlcbuild-chat dist/tiny-q4a8_1-host",
    )
    release.add(parser)
    chat_options.add(parser, "a bundle, or a directory with one bundle")
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of the model (default: the fastest number)",
    )
    try:
        return run(parser.parse_args(words), _bundle)
    except BundleError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return error.exit_code


def _bundle(name: str) -> Path:
    """Returns the directory of the only bundle at a path: the path itself, or the one bundle in it. If there
    is none, returns the path, and loading it reports the error. Raises BundleError if there are several."""
    bundles = directories(Path(name))
    if len(bundles) > 1:
        raise BundleError(f"{name}: has {len(bundles)} bundles: name one of them, such as {bundles[0]}")
    return bundles[0] if bundles else Path(name)


if __name__ == "__main__":
    sys.exit(main())
