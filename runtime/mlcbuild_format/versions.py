"""Lists the names and versions of the file formats that the builder writes and the runtime reads.

A step that writes weights depends on this file instead of abi.py, which defines the functions of libraries,
so that an edit of those converts no checkpoint again.
"""

from __future__ import annotations

LIBRARY = "mlcbuild-library/2"
"""The value of `format` in a library's metadata: the version of the functions that libraries export."""
WEIGHTS = "mlcbuild-weights/1"
"""The value of `format` in the metadata of a weights file."""
