"""The endpoints of Ollama's API, /api: the same models and the same engine as OpenAI's paths."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.http.event_stream import EventStream, collected, unless_gone
from mlcbuild_runtime.http.handling import RequestHandling
from mlcbuild_runtime.openai import embeddings, ollama_request, service
from mlcbuild_runtime.openai.body import RequestBody, is_among
from mlcbuild_runtime.openai.embeddings import EmbeddingsJob
from mlcbuild_runtime.openai.ollama_models import shown, tag
from mlcbuild_runtime.openai.ollama_request import EmbeddingInput
from mlcbuild_runtime.openai.ollama_stream import OllamaOutput, moment
from mlcbuild_runtime.openai.service import CompletionJob
from mlcbuild_runtime.openai.streams import AsyncAnswers

VERSION = "0.12.6"
"""The release of Ollama whose API the server's paths below /api implement; they report it, and clients
compare it."""
LINES = "application/x-ndjson"
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class OllamaEndpoints:
    """The endpoints of Ollama's API on this server."""

    def __init__(self, requests: RequestHandling) -> None:
        self._requests = requests

    def routes(self) -> list[Route]:
        """Returns the routes (path, handler, methods) of Ollama's endpoints."""
        return [
            Route("/api/version", self.version),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.running),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.embedding, methods=["POST"]),
        ]

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(self, _request: Request) -> Response:
        return JSONResponse({"models": [tag(entry) for entry in self._requests.models.entries]})

    async def running(self, _request: Request) -> Response:
        loaded = [entry for entry in self._requests.models.entries if entry.engine is not None]
        far = moment(time.time() + 365 * 86400)
        return JSONResponse(
            {"models": [{**tag(entry), "expires_at": far, "size_vram": 0} for entry in loaded]}
        )

    async def show(self, request: Request) -> Response:
        async with self._requests.body(request) as body:
            RequestBody(body, ollama_request.SHOW)
            entry = self._requests.models.find(ollama_request.model_name(body))
        if entry.manifest is None:
            raise entry.error or RequestError("the model cannot be read", status=500)
        return JSONResponse(await run_in_threadpool(shown, entry, entry.manifest))

    async def chat(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self._requests.body(request) as body:
                engine = await self._engine(body, use)
                context = engine.manifest.limits.context_window
                chat = await run_in_threadpool(ollama_request.chat_body, body, context)
                if not chat["messages"]:
                    return JSONResponse(
                        _loaded(engine, body, {"message": {"role": "assistant", "content": ""}})
                    )
                job = await self._requests.prepared(request, service.chat, engine, chat)
            output = OllamaOutput(engine.name, job.reply.prompts[0], "message")
            return await self._answer(request, engine, job, output, use)

    async def generate(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self._requests.body(request) as body:
                engine = await self._engine(body, use)
                context = engine.manifest.limits.context_window
                has_template = bool(engine.tokenizer.template.source)
                translated = await run_in_threadpool(
                    ollama_request.generate_body, body, context, has_template
                )
                if not body.get("prompt"):
                    return JSONResponse(_loaded(engine, body, {"response": ""}))
                prepare = service.chat if "messages" in translated else service.completion
                job = await self._requests.prepared(request, prepare, engine, translated)
                if "max_tokens" not in translated:  # Text completions have OpenAI's short default.
                    job = replace(
                        job, requests=tuple(replace(each, max_tokens=None) for each in job.requests)
                    )
            output = OllamaOutput(engine.name, job.reply.prompts[0], "response")
            return await self._answer(request, engine, job, output, use)

    async def embed(self, request: Request) -> Response:
        began = time.monotonic_ns()
        job, vectors = await self._embedded(request, ollama_request.embed_input)
        spent = time.monotonic_ns() - began
        times: dict[str, Json] = {"total_duration": spent, "load_duration": 0}
        document = {"model": job.model, "embeddings": vectors, **times, "prompt_eval_count": job.tokens}
        content = await run_in_threadpool(embeddings.json_text, document, "embeddings")
        return Response(content, media_type="application/json")

    async def embedding(self, request: Request) -> Response:
        """Returns the response to a request for /api/embeddings, Ollama's older path for the embedding of one
        text. A text that is longer than the context is cut."""
        _, (vector,) = await self._embedded(request, ollama_request.embedding_input)
        return JSONResponse({"embedding": vector})

    async def _embedded(
        self, request: Request, read: Callable[[Mapping[str, Json]], EmbeddingInput]
    ) -> tuple[EmbeddingsJob, list[Json]]:
        """Returns (the requests to the engine, the embeddings as lists of numbers, in the order of the texts)
        for the body of `request`. read: function from a body to (texts, True if long ones are cut, number of
        values of each embedding or None for all). Raises RequestError for a body or a text that cannot be
        served, ClientDisconnect if the client disconnects."""
        with ExitStack() as use:
            async with self._requests.body(request) as body:
                texts, truncate, dimensions = read(body)
                engine = await self._engine(body, use)
                if not texts:
                    return EmbeddingsJob((), engine.name, dimensions, base64=False), []
                translated: dict[str, Json] = {"input": texts, "dimensions": dimensions}
                prepare = partial(embeddings.job, truncate=truncate)
                job = await self._requests.threaded(request, prepare, engine, translated)
            del body, texts, translated  # They may be large, and the embeddings may take long.
            events = await self._requests.embedded(request, engine, job)
            return job, await run_in_threadpool(job.vectors, events)

    async def _engine(self, body: Mapping[str, Json], use: ExitStack) -> Engine:
        return await self._requests.engine({"model": ollama_request.model_name(body)}, use)

    async def _answer(
        self, request: Request, engine: Engine, job: CompletionJob, output: OllamaOutput, use: ExitStack
    ) -> Response:
        answers = self._requests.submit(request, engine, job.requests, job.stream)
        if job.stream:
            return EventStream(answers, _lines(answers, output), use.pop_all(), LINES)
        (received,) = await unless_gone(request, answers, collected(answers, 1))
        return JSONResponse(output.whole(received))


async def _lines(answers: AsyncAnswers, output: OllamaOutput) -> AsyncIterator[str]:
    """Yields the JSON lines of a streamed answer in Ollama's form; the last one states the end or error."""
    async for _, event in answers.events():
        for document in output.documents(event):
            yield f"{_compact(document)}\n"


def _loaded(engine: Engine, body: Mapping[str, Json], empty: Mapping[str, Json]) -> dict[str, Json]:
    """Returns Ollama's document for a request without a prompt, by which clients load and unload models. It
    reports that the model is loaded or, for a `keep_alive` of 0, unloaded; this server then keeps it loaded
    all the same. empty: the fields of an empty answer."""
    reason = "unload" if is_among(body.get("keep_alive"), (0, "0", "0s")) else "load"
    document: dict[str, Json] = {"model": engine.name, "created_at": moment(), **empty}
    return {**document, "done": True, "done_reason": reason}
