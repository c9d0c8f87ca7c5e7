"""Stores responses of /v1/responses in memory, for GET requests and for later responses that continue them,
until newer responses displace them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.openai.responses_request import ResponsesCall
from mlcbuild_runtime.openai.responses_stream import ResponseOutput
from mlcbuild_runtime.openai.service import CompletionJob

MAX_KEPT = 1024
MAX_BYTES = 64 << 20
"""Maximum bytes of all stored responses, estimated from their JSON text; the least recently used ones are
dropped first."""

VALUE_BYTES = 64
"""Bytes of memory that a JSON value is assumed to take at least, however short its text."""

Item = dict[str, Json]


@dataclass(frozen=True)
class Kept:
    document: dict[str, Json]
    before: tuple[Item, ...]
    """The items (messages, reasoning, tool calls, tool results) of the earlier conversation which the request
    continues, without those of its own input."""
    items: tuple[Item, ...]
    """The items (messages, reasoning, tool calls, tool results) of the request's own input, without the
    answer's output, which `document` holds."""

    @property
    def all(self) -> tuple[Item, ...]:
        """Returns all items of the conversation up to this response, its own output included."""
        output = self.document["output"]
        assert isinstance(output, list)
        return (*self.before, *self.items, *(item for item in output if isinstance(item, dict)))


def begun(
    model: str, job: CompletionJob, call: ResponsesCall, before: Sequence[Item]
) -> tuple[ResponseOutput, Kept]:
    """Begins a response of /v1/responses. Returns the response, to which the engine's events are added later,
    and the record that the history stores when the response ends. job: the requests for the engine; call: the
    checked request of the client; before: items of the conversation so far."""
    sampling = job.requests[0].sampling
    shown = {**call.shown, "temperature": sampling.temperature, "top_p": sampling.top_p}
    output = ResponseOutput(model, job.reply.prompts[0], shown)
    return output, Kept(output.document, tuple(before), call.items)


class History:
    """The stored and the running responses of /v1/responses. It is not thread-safe: use it in one event loop,
    or under a lock."""

    def __init__(self, max_kept: int = MAX_KEPT, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, tuple[Kept, int]] = OrderedDict()
        self._running: dict[str, tuple[ResponseOutput, Callable[[], None]]] = {}
        self._bytes, self._max_kept, self._max_bytes = 0, max_kept, max_bytes

    def keep(self, entry: Kept) -> None:
        """Stores a response that has ended, and drops the least recently used responses while there are too
        many or all together are too large. A response that alone is too large is not stored, and the others
        stay."""
        # The items before are shared with the responses that this one continues.
        text = json.dumps([entry.document, entry.items])
        values = text.count(",") + text.count("[") + text.count("{")
        size = max(len(text), VALUE_BYTES * values) + 8 * len(entry.before)
        if size > self._max_bytes:
            return
        self._kept[str(entry.document["id"])] = entry, size
        self._bytes += size
        while self._kept and (len(self._kept) > self._max_kept or self._bytes > self._max_bytes):
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= gone

    def find(self, name: str, param: str | None = None) -> Kept:
        """Returns the stored response with the id `name`, which then counts as the most recently used one.
        Raises RequestError (404) if there is none. param: the request's field with the id, for the error."""
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
        """Returns the items of the conversation up to the stored response with the id `previous`, which
        another response continues; () for None. Raises RequestError (404) if there is no such response."""
        return () if previous is None else self.find(previous, "previous_response_id").all

    def forget(self, name: str) -> None:
        """Deletes the stored response with the id `name`. Raises RequestError (404) if there is none."""
        self.find(name)
        self._bytes -= self._kept.pop(name)[1]

    def start(self, output: ResponseOutput, interrupt: Callable[[], None]) -> None:
        """Registers a response that is being generated, so that a client can cancel it by its id until the
        method `end` is called. interrupt: function that ends the response."""
        self._running[output.id] = output, interrupt

    def end(self, output: ResponseOutput) -> None:
        self._running.pop(output.id, None)

    def cancel(self, name: str) -> dict[str, Json] | None:
        """Ends the running response with the id `name` and returns its document so far, with the status
        "cancelled"; None if no such response is running."""
        if name not in self._running:
            return None
        output, interrupt = self._running[name]
        interrupt()
        return {**output.document, "status": "cancelled", "output": list(output.items)}


def listed(items: Sequence[Item]) -> dict[str, Json]:
    """Returns `items`, those that a stored response's request added to the conversation, as an OpenAI
    document of the type `list`. An item without an id gets item_0, item_1, ... by its index."""
    data: list[Json] = [{"id": f"item_{i}", **item} for i, item in enumerate(items)]
    ids = [item["id"] for item in data if isinstance(item, dict)]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False}
