"""The endpoints of llama.cpp's server: /completion, /apply-template, /props and /slots."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace

from mlcbuild_format.fields import Json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.http.event_stream import EventStream, collected, unless_gone
from mlcbuild_runtime.http.handling import RequestHandling
from mlcbuild_runtime.openai import llama_completion, service
from mlcbuild_runtime.openai.llama_completion import LlamaOutput
from mlcbuild_runtime.openai.streams import AsyncAnswers

_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class LlamaEndpoints:
    """The endpoints of llama.cpp's server that OpenAI's API does not have: /completion, /apply-template,
    /props and /slots."""

    def __init__(self, requests: RequestHandling) -> None:
        self._requests = requests

    def routes(self) -> list[Route]:
        """Returns the routes (path, handler, methods) of llama.cpp's endpoints."""
        return [
            Route("/completion", self.completion, methods=["POST"]),
            Route("/apply-template", self.template, methods=["POST"]),
            Route("/props", self.properties),
            Route("/slots", self.slots),
        ]

    async def completion(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self._requests.body(request) as body:
                completion = llama_completion.completion_body(body)
                engine = await self._requests.engine(completion, use)
                job = await self._requests.prepared(request, service.completion, engine, completion)
                if "max_tokens" not in completion:  # OpenAI's default length is short.
                    requests = tuple(replace(each, max_tokens=None) for each in job.requests)
                    job = replace(job, requests=requests)
                output = LlamaOutput(job, engine.name, completion)
            answers = self._requests.submit(request, engine, job.requests, job.stream)
            if job.stream:
                return EventStream(answers, _lines(answers, output), use.pop_all())
            events = await unless_gone(request, answers, collected(answers, len(job.requests)))
            return JSONResponse(output.whole(events))

    async def template(self, request: Request) -> Response:
        with ExitStack() as use:
            async with self._requests.body(request) as body:
                engine = await self._requests.engine(body, use)
                return JSONResponse(
                    await self._requests.threaded(request, llama_completion.template, engine, body)
                )

    async def properties(self, request: Request) -> Response:
        return await self._described(request, llama_completion.properties)

    async def slots(self, request: Request) -> Response:
        return await self._described(request, llama_completion.slots)

    async def _described(self, request: Request, describe: Callable[[Engine], Json]) -> Response:
        """Returns the response of an endpoint that describes a model: the one that the query parameter
        `model` names, or the first one, loaded if necessary. describe: function from the model's engine to
        the JSON document. Raises RequestError if there is no such model (404) or it cannot be loaded (500,
        503)."""
        with ExitStack() as use:
            engine = await self._requests.engine({"model": request.query_params.get("model")}, use)
            return JSONResponse(await run_in_threadpool(describe, engine))


async def _lines(answers: AsyncAnswers, output: LlamaOutput) -> AsyncIterator[str]:
    """Yields the server-sent events of a streamed answer in llama.cpp's form, one text each; an error of the
    engine is the last event."""
    async for index, event in answers.events():
        for document in output.documents(index, event):
            yield f"data: {_compact(document)}\n\n"
