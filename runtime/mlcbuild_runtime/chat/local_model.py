"""Lets a chat use a bundle in this process as its model."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from mlcbuild_format.fields import Json

from mlcbuild_runtime import untrusted
from mlcbuild_runtime.chat.chat_model import Speed
from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.engine_options import EngineOptions
from mlcbuild_runtime.engine.request import Event, Request
from mlcbuild_runtime.openai import api

PATIENCE = 0.5
"""Seconds after which a wait for the model is repeated, so that a signal that arrives just before the wait is
noticed."""
BASE_TOKENS = 256
"""Maximum number of tokens of a base model's answer where the user sets no `max_tokens`."""


class LocalModel:
    """A bundle with an engine in this process, as the model of a chat."""

    def __init__(self, path: Path | str, threads: int | None = None) -> None:
        """Loads the bundle in directory `path`. Raises BundleError for a damaged bundle, SetupError if this
        machine cannot run it.
        """
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
        self._call(messages, settings)

    def _call(self, messages: list[Json], settings: Mapping[str, Json]) -> api.ChatCall:
        """Returns the engine's request for an answer to a chat, checked by the rules of the HTTP API. Raises
        RequestError for settings that the API refuses.
        """
        return api.chat_call({**settings, "messages": messages}, self._engine.manifest.serving)

    @property
    def greeting(self) -> str:
        if self._is_chat:
            return ""
        return "it has no chat template, so it continues your text instead of answering"

    @property
    def _is_chat(self) -> bool:
        return bool(self._engine.tokenizer.template.source)

    def _prompt(self, call: api.ChatCall) -> list[int]:
        """Returns the tokens of a chat's prompt; for a base model, which has no chat template, the tokens of
        all texts in order. Raises RequestError for a prompt that is too long, or that the chat template
        refuses."""
        if self._is_chat:
            return self._engine.tokenizer.chat(call.messages, call.template_options)
        text = "\n".join(str(message.get("content") or "") for message in call.messages)
        return self._engine.tokenizer.encode(text, self._engine.longest_text)

    def _base_tokens(self, size: int) -> int:
        """Returns the maximum length, in tokens, of a base model's continuation of a text if the user has set
        none: base models rarely end a text. size: number of tokens of the prompt.
        """
        return max(1, min(BASE_TOKENS, self._engine.manifest.limits.context_window - size))

    def answer(self, messages: list[Json], settings: Mapping[str, Json]) -> Generator[str, None, None]:
        call = self._call(messages, settings)
        prompt = self._prompt(call)
        options = call.options
        grammar = options.constraint
        is_chat = self._is_chat
        constraint = None if grammar is None else self._engine.grammars.compiled(grammar, message=is_chat)
        request = Request(
            tuple(prompt),
            options.max_tokens if is_chat else options.max_tokens or self._base_tokens(len(prompt)),
            options.sampling,
            options.stop,
            message=is_chat,
            constraint=constraint,
        )
        events: SimpleQueue[Event] = SimpleQueue()
        ticket = self._engine.submit(request, events.put)
        self.speed = Speed(len(prompt))
        try:
            while True:
                try:
                    event = events.get(timeout=PATIENCE)
                except Empty:
                    continue
                if event.error is not None:
                    raise event.error
                self.speed = _speed(len(prompt), event)
                yield event.text
                if event.last:
                    return
        finally:
            ticket.cancel()

    def metrics(self) -> Mapping[str, object]:
        return {name: value for name, value in asdict(self._engine.state()).items() if name != "alive"}


def _speed(prompt_tokens: int, event: Event) -> Speed:
    times = event.times
    if times is None:
        return Speed(prompt_tokens, event.cached, None, event.tokens)
    return Speed(prompt_tokens, event.cached, times.prompt, event.tokens, times.answer)
