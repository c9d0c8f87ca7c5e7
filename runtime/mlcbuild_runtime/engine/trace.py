"""Writes a trace of the engine's steps, a JSON array in the trace event format of Chrome and Perfetto.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. On the row
`engine` every step is a slice, labelled with its requests, with two parts: the model's work, including
sampling, and the delivery of tokens. Each request is a row of its own from arrival to end. Counters show the
running and waiting requests and the free pages.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TextIO

log = logging.getLogger(__name__)

_PROCESS, _ENGINE = 1, 1

Args = Mapping[str, object]


class Trace:
    """An open trace file. If the process is killed, only the closing bracket of the JSON array is missing,
    which viewers accept. If a write fails, the trace ends there, with a line in the log. Any thread may call
    its methods."""

    def __init__(self, path: Path | str) -> None:
        """Opens the trace file for writing, and replaces the content of an existing one. Raises OSError if it
        cannot be opened."""
        self._out: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (open until close)
        self._start, self._lock, self._empty = time.perf_counter(), Lock(), True
        self._event("M", "process_name", args={"name": "mlcbuild-serve"})
        self._event("M", "thread_name", args={"name": "engine"})

    def step(self, kind: str, tokens: Mapping[int, int], moments: tuple[float, float, float]) -> None:
        """Adds one step of the engine to the trace. kind: what the step computes, such as "decode"; tokens:
        request number -> tokens in the step; moments: times of time.perf_counter at the beginning, at the
        model's result, and at the end of delivery.
        """
        begun, computed, ended = moments
        args = {"batch": len(tokens), "requests": list(tokens), "tokens": list(tokens.values())}
        self._slice(f"{kind} {sum(tokens.values())}", begun, ended, args)
        self._slice("model", begun, computed)
        self._slice("tokens", computed, ended)

    def counters(self, args: Args) -> None:
        for name, value in args.items():
            self._event("C", name, args={name: value})

    def request(self, number: int, phase: str, args: Args | None = None) -> None:
        """Adds an event of a request to the trace. number: the request's number; phase: "b" at its arrival,
        "n" at its first token, "e" at its end; args: values that a viewer shows with the event."""
        self._event(phase, "first token" if phase == "n" else "request", id=number, args=args)

    def close(self) -> None:
        with self._lock:
            if not self._out.closed:
                with suppress(OSError):
                    self._out.write("\n]\n")
                    self._out.close()

    def _slice(self, name: str, begun: float, ended: float, args: Args | None = None) -> None:
        self._event("X", name, at=begun, dur=round(1e6 * (ended - begun), 1), args=args)

    def _event(self, phase: str, name: str, at: float | None = None, **more: object) -> None:
        moment = (time.perf_counter() if at is None else at) - self._start
        event = {"ph": phase, "name": name, "cat": "engine", "ts": round(1e6 * moment, 1)}
        complete_event = event | {"pid": _PROCESS, "tid": _ENGINE}
        complete_event |= {key: value for key, value in more.items() if value is not None}
        line = json.dumps(complete_event, separators=(",", ":"))
        with self._lock:
            if self._out.closed:
                return
            try:
                self._out.write(("[\n" if self._empty else ",\n") + line)
            except OSError as error:  # If the disk is full, only the trace ends.
                log.warning("the trace cannot be written any more: %s", error)
                with suppress(OSError):
                    self._out.close()
            self._empty = False
