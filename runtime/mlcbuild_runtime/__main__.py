"""`mlcbuild-serve BUNDLE`: serves a bundle over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlcbuild_runtime.serve import Options, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="mlcbuild-serve",
        description="Serves a bundle over an OpenAI-compatible HTTP API, until Ctrl-C.",
        epilog="example: mlcbuild-serve dist/tiny-q4f16_1-host --port 8000",
    )
    parser.add_argument("bundle", help="directory that holds bundle.json")
    parser.add_argument("--host", default=defaults.host, help=f"address (default {defaults.host})")
    parser.add_argument(
        "--port", type=int, default=defaults.port, help=f"port; 0: any free one (default {defaults.port})"
    )
    parser.add_argument("--threads", type=_positive, help="threads (default: the physical cores at hand)")
    parser.add_argument(
        "--max-batch", type=_positive, help="requests at a time (default: the library's limit)"
    )
    parser.add_argument(
        "--max-pages", type=_positive, help="pages of 16 tokens in the KV cache (default: enough for all)"
    )
    found = parser.parse_args(arguments)
    return serve(
        found.bundle, Options(found.host, found.port, found.threads, found.max_batch, found.max_pages)
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
