"""Responses that are kept for a while, in memory: for GET, and for those that go on from them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.openai.responses_request import Call
from mlcbuild_runtime.openai.responses_stream import Output
from mlcbuild_runtime.openai.service import Job

MAX_KEPT = 1024
MAX_BYTES = 64 << 20
"""Of all responses that are kept, as JSON. Those that were not used for longest go first."""

VALUE_BYTES = 64
"""That a value takes, however short its text."""

Item = dict[str, Json]


@dataclass(frozen=True)
class Kept:
    document: dict[str, Json]
    before: tuple[Item, ...]
    """What was said before, by all."""
    items: tuple[Item, ...]
    """Of the request."""

    @property
    def all(self) -> tuple[Item, ...]:
        """The conversation up to and with this response."""
        output = self.document["output"]
        assert isinstance(output, list)
        return (*self.before, *self.items, *(item for item in output if isinstance(item, dict)))


def begun(model: str, job: Job, call: Call, before: Sequence[Item]) -> tuple[Output, Kept]:
    """The response that a job is to make, and what is kept of it at its end."""
    sampling = job.requests[0].sampling
    shown = {**call.shown, "temperature": sampling.temperature, "top_p": sampling.top_p}
    output = Output(model, job.reply.prompts[0], shown)
    return output, Kept(output.document, tuple(before), call.items)


class History:
    """Belongs to one event loop, or to a lock."""

    def __init__(self, max_kept: int = MAX_KEPT, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, tuple[Kept, int]] = OrderedDict()
        self._running: dict[str, tuple[Output, Callable[[], None]]] = {}
        self._bytes, self._max_kept, self._max_bytes = 0, max_kept, max_bytes

    def keep(self, kept: Kept) -> None:
        """Keeps a response that has ended."""
        # What came before is shared with the responses that this one goes on from.
        text = json.dumps([kept.document, kept.items])
        values = text.count(",") + text.count("[") + text.count("{")
        size = max(len(text), VALUE_BYTES * values) + 8 * len(kept.before)
        self._kept[str(kept.document["id"])] = kept, size
        self._bytes += size
        while self._kept and (len(self._kept) > self._max_kept or self._bytes > self._max_bytes):
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= gone

    def find(self, name: str, param: str | None = None) -> Kept:
        """Raises RequestError (404) for one that is not kept; `param` is the field that names it."""
        if name not in self._kept:
            raise RequestError(
                f"there is no response {name[:80]!r}: it was never stored, or is no longer kept",
                param=param,
                code="response_not_found",
                status=404,
            )
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def before(self, previous: str | None) -> tuple[Item, ...]:
        """The conversation up to a response that another goes on from. Raises RequestError."""
        return () if previous is None else self.find(previous, "previous_response_id").all

    def forget(self, name: str) -> None:
        """Raises RequestError (404) for one that is not kept."""
        self.find(name)
        self._bytes -= self._kept.pop(name)[1]

    def start(self, output: Output, interrupt: Callable[[], None]) -> None:
        """A response that is being made."""
        self._running[output.id] = output, interrupt

    def end(self, output: Output) -> None:
        self._running.pop(output.id, None)

    def cancel(self, name: str) -> dict[str, Json] | None:
        """Ends a response that is being made, and says what it is then; None where none is."""
        if name not in self._running:
            return None
        output, interrupt = self._running[name]
        interrupt()
        return {**output.document, "status": "cancelled", "output": list(output.items)}


def listed(items: Sequence[Item]) -> dict[str, Json]:
    """OpenAI's list of the items of a request."""
    data: list[Json] = [{"id": f"item_{i}", **item} for i, item in enumerate(items)]
    ids = [item["id"] for item in data if isinstance(item, dict)]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False}
