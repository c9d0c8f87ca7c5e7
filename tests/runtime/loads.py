"""Loads the bundle in the directory that is its only argument, and prints the error if it is refused."""

from __future__ import annotations

import sys

from mlcbuild_format.errors import ServingError
from mlcbuild_runtime import untrusted

if __name__ == "__main__":
    try:
        untrusted.load(sys.argv[1])
    except ServingError as error:
        print(error)  # noqa: T201
