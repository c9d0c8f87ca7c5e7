"""Runs a server of mlcbuild_runtime that reports what it has allocated on its GPU.

    python counted_server.py FILE BUNDLE [OPTION ...]

On SIGUSR1 it writes the number of wgpu's objects and the bytes of their buffers to FILE, as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from mlcbuild_runtime.__main__ import main
from wgpu import diagnostics


def write(file: Path) -> None:
    total = diagnostics.object_counts.get_dict()["total"]
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps({"objects": total["count"], "bytes": total["resource_mem"]}))
    new.replace(file)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    signal.signal(signal.SIGUSR1, lambda number, frame: write(out))
    sys.exit(main(sys.argv[2:]))
