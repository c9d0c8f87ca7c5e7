"""Runs a bundle in this process, called like OpenAI's client: `engine.chat.completions.create(...)`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Self, overload

from mlcbuild_format.fields import Json, plain

from mlcbuild_runtime import untrusted
from mlcbuild_runtime.engine import engine
from mlcbuild_runtime.engine.drafts import Speculate
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Event, State
from mlcbuild_runtime.openai import embeddings, responses_request, service
from mlcbuild_runtime.openai.history import History, Kept, begun
from mlcbuild_runtime.openai.responses_stream import ResponseOutput
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.openai.streams import Answers, AsyncAnswers

_OPTIONAL = frozenset(
    {"content", "refusal", "role", "tool_calls", "usage", "logprobs", "finish_reason", "name"}
)
"""Names of fields that a JSON document may lack; reading them as attributes returns None then, as in OpenAI's
client."""
_Prepare = Callable[[engine.Engine, Mapping[str, Json]], CompletionJob]


class JsonDocument(dict[str, Json]):
    """A JSON object whose fields are also attributes: `reply.choices[0].message.content`. An absent field
    raises AttributeError, except optional ones of OpenAI's documents, such as `usage`, which are None."""

    def __getattr__(self, name: str) -> Json:
        if name in self:
            return _shown(self[name])
        if name in _OPTIONAL:
            return None
        raise AttributeError(f"there is no '{name}' here, only {', '.join(self)}")


def _shown(value: Json) -> Json:
    if isinstance(value, dict):
        return JsonDocument(value)
    return [_shown(item) for item in value] if isinstance(value, list) else value


class _Local:
    """The base class of Engine and AsyncEngine, which answer requests with a bundle in this process instead
    of a server. It loads the bundle and starts an engine, which `close` stops."""

    def __init__(
        self,
        bundle: Path | str,
        threads: int | None = None,
        max_batch: int | None = None,
        speculate: str | Path | Speculate | None = None,
    ) -> None:
        """Loads the bundle in directory `bundle`. Raises BundleError for a damaged bundle, one for another
        processor, or a draft bundle that does not fit; SetupError if the machine lacks something else.

        threads: number of computing threads (default: the physical cores that this process may use; the first
        load of a process decides). max_batch: maximum number of answers that are generated at a time, while
        others wait (default: the maximum of the bundle's library). speculate: source of draft tokens:
        "lookup" for earlier text, or the directory of a smaller bundle with the same vocabulary; None: only
        predictions in requests."""
        executor, tokenizer = untrusted.load(bundle, threads)
        how = Speculate.of(speculate) if isinstance(speculate, str | Path) else speculate
        self._running = engine.Engine(
            executor, tokenizer, EngineOptions(max_batch=max_batch, speculate=how)
        ).start()

    @property
    def model(self) -> str:
        """Returns the bundle's name; `model` in a request may be this or absent."""
        return self._running.name

    def state(self) -> State:
        """Returns a snapshot of the engine: running and waiting requests, free pages of the KV cache, and
        counts of tokens and steps since its start."""
        return self._running.state()

    def tokenize(self, **body: object) -> list[int]:
        """Returns the tokens of the text in the argument `prompt` or, without it, of the chat in `messages`.
        Raises RequestError for an invalid field, messages that the chat template refuses, or a text that is
        too long, TypeError for a value that JSON lacks, SetupError if no child process for the template can
        be started."""
        ids = service.tokenize(self._running, _body(self._running, body | {"with_pieces": False}))["tokens"]
        assert isinstance(ids, list)
        return [token for token in ids if isinstance(token, int)]

    def close(self) -> None:
        """Ends all running and waiting requests with an error, and stops the engine for good."""
        self._running.close()


class Engine(_Local):
    """A bundle that runs in this process, with the interface of OpenAI's client; calls block until the answer
    is complete, or return an iterator for a stream. Any number of threads may call at the same time."""

    def __init__(
        self,
        bundle: Path | str,
        threads: int | None = None,
        max_batch: int | None = None,
        speculate: str | Path | Speculate | None = None,
    ) -> None:
        super().__init__(bundle, threads, max_batch, speculate)
        self.completions = Completions(self._running, service.completion)
        self.chat = Chat(Completions(self._running, service.chat))
        self.embeddings = Embeddings(self._running)
        self.responses = Responses(self._running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Chat:
    def __init__(self, completions: Completions) -> None:
        self.completions = completions


class Completions:
    """The chat or the text completions of a bundle in this process. Requests have the same fields and rules
    as in the HTTP API."""

    def __init__(self, running: engine.Engine, prepare: _Prepare) -> None:
        self._running, self._prepare = running, prepare

    @overload
    def create(self, *, stream: Literal[True], **body: object) -> Iterator[JsonDocument]: ...
    @overload
    def create(self, *, stream: Literal[False] = False, **body: object) -> JsonDocument: ...
    def create(self, *, stream: bool = False, **body: object) -> JsonDocument | Iterator[JsonDocument]:
        """Generates an answer to the request whose fields are the keyword arguments. Returns OpenAI's
        document of the whole answer; with `stream`, an iterator over its chunks.

        Raises RequestError at once if a field is invalid or the request cannot be served, TypeError for a
        value that JSON lacks, and ServingError if the answer fails later; with `stream`, the iterator raises
        it."""
        job = self._prepare(self._running, _body(self._running, {**body, "stream": stream}))
        answers = Answers(self._running, job.requests)
        if stream:
            return self._chunks(answers, job)
        events_of: list[list[Event]] = [[] for _ in job.requests]
        for index, event in answers.events():
            events_of[index].append(event)
        return JsonDocument(job.reply.whole(events_of))

    @staticmethod
    def _chunks(answers: Answers, job: CompletionJob) -> Iterator[JsonDocument]:
        for index, event in answers.events():
            for document in job.reply.chunks(index, event, job.include_usage):
                yield JsonDocument(document)


class Embeddings:
    def __init__(self, running: engine.Engine) -> None:
        self._running = running

    def create(self, **body: object) -> JsonDocument:
        """Returns OpenAI's document with the embeddings of the texts in the argument `input`. Raises
        RequestError for an invalid field or a text that cannot be served, TypeError for a value that JSON
        lacks, ServingError if the computation fails."""
        job = embeddings.job(self._running, _body(self._running, body))
        last_events: list[Event] = []
        for wave in job.waves():
            events = dict(Answers(self._running, wave).events())
            last_events += [events[index] for index in range(len(wave))]
        return JsonDocument(job.document(last_events))


class Response(JsonDocument):
    """A response of /v1/responses, or an event of its stream, as a JSON object."""

    @property
    def output_text(self) -> str:
        """Returns the joined texts of all messages in the response, without reasoning; "" if it has none."""
        contents = _values(self.get("output"), "message", "content")
        return "".join(str(text) for parts in contents for text in _values(parts, "output_text", "text"))


def _values(items: Json, kind: str, name: str) -> list[Json]:
    """Returns the field `name` of the objects with the `type` `kind` in a list; [] if `items` is no list."""
    listed = items if isinstance(items, list) else []
    return [item[name] for item in listed if isinstance(item, dict) and item["type"] == kind]


class _Responses:
    """Checks requests to /v1/responses, and stores up to 1024 of their responses in memory, dropping the
    least recently used; the base class for callers that block and for those in an event loop."""

    def __init__(self, running: engine.Engine) -> None:
        self._running, self._history, self._lock = running, History(), threading.Lock()

    def _begun(self, stream: bool, body: Mapping[str, object]) -> tuple[CompletionJob, ResponseOutput, Kept]:
        """Checks the fields of a request to /v1/responses. Returns (the requests for the engine, the response
        that their events fill, the record to store at its end). Raises RequestError for an invalid field, or
        a request that cannot be served, TypeError for a value that JSON lacks."""
        call = responses_request.call(_body(self._running, {**body, "stream": stream}))
        with self._lock:
            before = self._history.before(call.previous)
        job = service.chat(self._running, call.body(before))
        return job, *begun(self._running.name, job, call, before)

    def _keep(self, output: ResponseOutput, entry: Kept) -> None:
        if output.document["store"]:
            with self._lock:
                self._history.keep(entry)

    def retrieve(self, response_id: str) -> Response:
        """Returns the stored response with this id. Raises RequestError if there is none."""
        with self._lock:
            return Response(self._history.find(response_id).document)

    def delete(self, response_id: str) -> None:
        """Deletes the stored response with this id. Raises RequestError if there is none."""
        with self._lock:
            self._history.forget(response_id)


class Responses(_Responses):
    """OpenAI's endpoint /v1/responses for Python programs that run a bundle in their own process. `create`
    blocks until the response is complete or, with `stream`, returns an iterator over its events."""

    @overload
    def create(self, *, stream: Literal[True], **body: object) -> Iterator[Response]: ...
    @overload
    def create(self, *, stream: Literal[False] = False, **body: object) -> Response: ...
    def create(self, *, stream: bool = False, **body: object) -> Response | Iterator[Response]:
        """Generates a response to the request whose fields are the keyword arguments. Returns the whole
        response; with `stream`, an iterator over its events.

        Raises RequestError at once if a field is invalid or the request cannot be served, TypeError for a
        value that JSON lacks, and ServingError if the response fails later; with `stream`, the iterator
        raises it."""
        job, output, entry = self._begun(stream, body)
        events = self._events(Answers(self._running, job.requests), output, entry)
        if stream:
            return events
        for _ in events:
            pass
        return Response(output.document)

    def _events(self, answers: Answers, output: ResponseOutput, entry: Kept) -> Iterator[Response]:
        yield from map(Response, output.begin())
        for _, event in answers.events():
            yield from map(Response, output.events(event))
        self._keep(output, entry)


class AsyncEngine(_Local):
    """A bundle that runs in this process, with the interface of OpenAI's asynchronous client."""

    def __init__(
        self,
        bundle: Path | str,
        threads: int | None = None,
        max_batch: int | None = None,
        speculate: str | Path | Speculate | None = None,
    ) -> None:
        super().__init__(bundle, threads, max_batch, speculate)
        self.completions = AsyncCompletions(self._running, service.completion)
        self.chat = AsyncChat(AsyncCompletions(self._running, service.chat))
        self.embeddings = AsyncEmbeddings(self._running)
        self.responses = AsyncResponses(self._running)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()


class AsyncChat:
    def __init__(self, completions: AsyncCompletions) -> None:
        self.completions = completions


class AsyncCompletions:
    """Generates the answers of a bundle that is loaded in this process, chat answers or text completions, for
    callers in an asyncio event loop."""

    def __init__(self, running: engine.Engine, prepare: _Prepare) -> None:
        self._running, self._prepare = running, prepare

    @overload
    async def create(self, *, stream: Literal[True], **body: object) -> AsyncIterator[JsonDocument]: ...
    @overload
    async def create(self, *, stream: Literal[False] = False, **body: object) -> JsonDocument: ...
    async def create(
        self, *, stream: bool = False, **body: object
    ) -> JsonDocument | AsyncIterator[JsonDocument]:
        """Generates an answer to the request whose fields are the keyword arguments. Returns OpenAI's
        document of the whole answer; with `stream`, an asynchronous iterator over its chunks.

        Raises RequestError at once if a field is invalid or the request cannot be served, TypeError for a
        value that JSON lacks, and ServingError if the answer fails later; with `stream`, the iterator raises
        it."""
        checked_body = _body(self._running, {**body, "stream": stream})
        job = await asyncio.to_thread(self._prepare, self._running, checked_body)
        answers = AsyncAnswers(self._running, job.requests)
        if stream:
            return self._chunks(answers, job)
        return JsonDocument(job.reply.whole(await _collected(answers, len(job.requests))))

    @staticmethod
    async def _chunks(answers: AsyncAnswers, job: CompletionJob) -> AsyncIterator[JsonDocument]:
        try:
            async for index, event in answers.events():
                if event.error is not None:
                    raise event.error
                for document in job.reply.chunks(index, event, job.include_usage):
                    yield JsonDocument(document)
        finally:
            answers.cancel()


class AsyncEmbeddings:
    def __init__(self, running: engine.Engine) -> None:
        self._running = running

    async def create(self, **body: object) -> JsonDocument:
        """Returns OpenAI's document with the embeddings of the texts in the argument `input`. Raises
        RequestError for an invalid field or a text that cannot be served, TypeError for a value that JSON
        lacks, ServingError if the computation fails."""
        job = await asyncio.to_thread(embeddings.job, self._running, _body(self._running, body))
        last_events: list[Event] = []
        for wave in job.waves():
            events = await _collected(AsyncAnswers(self._running, wave), len(wave))
            last_events += [answer_events[-1] for answer_events in events]
        return JsonDocument(job.document(last_events))


class AsyncResponses(_Responses):
    """OpenAI's endpoint /v1/responses for asyncio programs that run a bundle in their own process. `create`
    returns the complete response or, with `stream`, an asynchronous iterator over its events."""

    @overload
    async def create(self, *, stream: Literal[True], **body: object) -> AsyncIterator[Response]: ...
    @overload
    async def create(self, *, stream: Literal[False] = False, **body: object) -> Response: ...
    async def create(self, *, stream: bool = False, **body: object) -> Response | AsyncIterator[Response]:
        """Generates a response to the request whose fields are the keyword arguments. Returns the whole
        response; with `stream`, an asynchronous iterator over its events.

        Raises RequestError at once if a field is invalid or the request cannot be served, TypeError for a
        value that JSON lacks, and ServingError if the response fails later; with `stream`, the iterator
        raises it."""
        job, output, entry = await asyncio.to_thread(self._begun, stream, body)
        events = self._events(AsyncAnswers(self._running, job.requests), output, entry)
        if stream:
            return events
        async for _ in events:
            pass
        return Response(output.document)

    async def _events(
        self, answers: AsyncAnswers, output: ResponseOutput, entry: Kept
    ) -> AsyncIterator[Response]:
        try:
            for document in output.begin():
                yield Response(document)
            async for _, event in answers.events():
                if event.error is not None:
                    raise event.error
                for document in output.events(event):
                    yield Response(document)
            self._keep(output, entry)
        finally:
            answers.cancel()


async def _collected(answers: AsyncAnswers, count: int) -> list[list[Event]]:
    """Returns one list of events for each of `count` answers, once all have ended. Raises the error of the
    first answer that fails, and cancels the others."""
    received: list[list[Event]] = [[] for _ in range(count)]
    try:
        async for index, event in answers.events():
            if event.error is not None:
                raise event.error
            received[index].append(event)
    finally:
        answers.cancel()
    return received


def _body(running: engine.Engine, fields: Mapping[str, object]) -> dict[str, Json]:
    """Returns keyword arguments as the JSON object of a request body; tuples become lists, and JsonDocuments
    plain objects. Raises RequestError if `model` names another model, TypeError for a value that JSON lacks.
    """
    body = plain(fields)
    assert isinstance(body, dict)
    service.check_model(running, body.get("model"))
    return body
