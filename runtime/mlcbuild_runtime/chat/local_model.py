"""Lets a chat use a bundle in this process as its model."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from mlcbuild_format.fields import Json

from mlcbuild_runtime import untrusted
from mlcbuild_runtime.chat.chat_model import AnswerPart, Speed
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai import api, service

PATIENCE = 0.5
"""Seconds after which a wait for the model is repeated, so that a signal that arrives just before the wait is
noticed."""
BASE_TOKENS = 256
"""Maximum number of tokens of a base model's answer where the user sets no `max_tokens`; fewer if the context
window has less room."""


class LocalModel:
    """A bundle with an engine in this process, as the model of a chat."""

    def __init__(self, path: Path | str, threads: int | None = None) -> None:
        """Loads the bundle in directory `path` and starts an engine for it. threads: computing threads; None:
        as many as compute fastest, at most one per physical core. Raises BundleError for a damaged bundle or
        one for another device or processor, SetupError if the machine lacks something else that loading
        needs."""
        executor, tokenizer = untrusted.load(path, threads)
        self._engine = Engine(executor, tokenizer, EngineOptions(max_batch=1)).start()
        self.speed = Speed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._engine.close()

    @property
    def name(self) -> str:
        return self._engine.manifest.name

    def check(self, messages: list[Json], settings: Mapping[str, Json]) -> None:
        """Raises RequestError for settings, or messages, that the HTTP API refuses for this model."""
        serving = self._engine.manifest.serving
        if self._is_chat:
            api.chat_call({**settings, "messages": messages}, serving)
        else:
            api.completion_call({**settings, "prompt": _text(messages)}, serving)

    @property
    def greeting(self) -> str:
        if self._is_chat:
            return ""
        return "it has no chat template, so it continues your text instead of answering"

    @property
    def _is_chat(self) -> bool:
        return bool(self._engine.tokenizer.template.source)

    def _job(self, messages: list[Json], settings: Mapping[str, Json]) -> service.CompletionJob:
        """Returns the engine's request for an answer to a chat, by the rules of the HTTP API; for a base
        model, which has no chat template, for a continuation of all texts in order, of BASE_TOKENS tokens if
        no max_tokens is set. Raises RequestError for settings that the API refuses, and for a prompt that is
        too long or that the chat template refuses."""
        if self._is_chat:
            return service.chat(self._engine, {**settings, "messages": messages})
        job = service.completion(self._engine, {**settings, "prompt": _text(messages)})
        if settings.get("max_tokens"):
            return job
        (request,) = job.requests
        room = self._engine.manifest.limits.context_window - len(request.prompt)
        return replace(job, requests=(replace(request, max_tokens=max(1, min(BASE_TOKENS, room))),))

    def answer(self, messages: list[Json], settings: Mapping[str, Json]) -> Generator[AnswerPart, None, None]:
        job = self._job(messages, settings)
        (request,), (prompt,) = job.requests, job.reply.prompts
        reader = None if prompt.reader is None else prompt.reader()
        events: SimpleQueue[Event] = SimpleQueue()
        ticket = self._engine.submit(request, events.put)
        self.speed = Speed(len(request.prompt))
        try:
            while True:
                try:
                    event = events.get(timeout=PATIENCE)
                except Empty:
                    continue
                if event.error is not None:
                    raise event.error
                self.speed = _speed(len(request.prompt), event)
                if reader is None:
                    yield AnswerPart(event.text)
                else:
                    for piece in reader.read(event.text, event.last):
                        yield AnswerPart(piece.text, piece.kind == "reasoning")
                if event.last:
                    return
        finally:
            ticket.cancel()

    def metrics(self) -> Mapping[str, object]:
        return {name: value for name, value in asdict(self._engine.state()).items() if name != "alive"}


def _text(messages: list[Json]) -> str:
    """Returns the texts of a chat's messages, joined by line breaks, as the prompt of a base model."""
    return "\n".join(str(message.get("content") or "") for message in messages if isinstance(message, dict))


def _speed(prompt_tokens: int, event: Event) -> Speed:
    times = event.times
    if times is None:
        return Speed(prompt_tokens, event.cached, None, event.tokens)
    return Speed(prompt_tokens, event.cached, times.prompt, event.tokens, times.answer)
