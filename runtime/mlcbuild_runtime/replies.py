"""Events of one request as OpenAI's response documents, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from mlcbuild_runtime.errors import RequestError, ServingError
from mlcbuild_runtime.fields import Json
from mlcbuild_runtime.request import Event
from mlcbuild_runtime.sampling import Logprob
from mlcbuild_runtime.vocabulary import Vocabulary


def error_document(error: ServingError) -> dict[str, Json]:
    """OpenAI's form of an error."""
    if isinstance(error, RequestError) and error.status < 500:
        kind, param, code = "invalid_request_error", error.param, error.code
    else:
        kind, param, code = "server_error", None, getattr(error, "code", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


class Reply:
    """Turns the events of one request into documents."""

    def __init__(self, chat: bool, model: str, prompt_tokens: int, vocabulary: Vocabulary) -> None:
        self._chat, self._prompt_tokens, self._vocabulary = chat, prompt_tokens, vocabulary
        self._model, self._created = model, int(time.time())
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._offset = 0

    def whole(self, events: Sequence[Event]) -> dict[str, Json]:
        """The document of a complete answer. The last event must not be an error."""
        text, last = "".join(event.text for event in events), events[-1]
        choice: dict[str, Json] = {"index": 0, "finish_reason": last.finish}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(events)
        kind = "chat.completion" if self._chat else "text_completion"
        return self._document(kind, [choice]) | {"usage": self._usage(last)}

    def chunks(self, event: Event, include_usage: bool) -> Iterator[dict[str, Json]]:
        """The documents that one event of a stream makes; perhaps none."""
        if event.error is not None:
            yield error_document(event.error)
            return
        if self._chat and event.tokens == 1:
            yield self._chunk({"role": "assistant", "content": ""}, None, None, include_usage)
        if event.text or event.logprob is not None:
            yield self._chunk({"content": event.text}, None, self._logprobs([event]), include_usage)
        if event.finish is not None:
            yield self._chunk({}, event.finish, None, include_usage)
            if include_usage:
                yield self._document(self._chunk_kind, []) | {"usage": self._usage(event)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(
        self, delta: dict[str, Json], finish: str | None, logprobs: Json, include_usage: bool
    ) -> dict[str, Json]:
        choice: dict[str, Json] = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        document = self._document(self._chunk_kind, [choice])
        return document | {"usage": None} if include_usage else document

    def _document(self, kind: str, choices: list[Json]) -> dict[str, Json]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self, last: Event) -> dict[str, Json]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": last.tokens,
            "total_tokens": self._prompt_tokens + last.tokens,
            "prompt_tokens_details": {"cached_tokens": last.cached},
        }

    def _logprobs(self, events: Sequence[Event]) -> Json:
        known = [event for event in events if event.logprob is not None]
        if not known:
            return None
        if self._chat:
            return {"content": [self._chat_logprob(event) for event in known], "refusal": None}
        return self._completion_logprobs(known)

    def _chat_logprob(self, event: Event) -> Json:
        assert event.logprob is not None
        own = self._token(event.logprob)
        return own | {"top_logprobs": [self._token(item) for item in event.alternatives]}

    def _token(self, item: Logprob) -> dict[str, Json]:
        data = self._vocabulary.token_bytes(item.token)
        return {"token": self._name(item.token), "logprob": item.logprob, "bytes": list(data)}

    def _completion_logprobs(self, events: Sequence[Event]) -> Json:
        """The older form: parallel lists."""
        offsets: list[Json] = []
        for event in events:
            offsets.append(self._offset)
            self._offset += len(event.text)
        return {
            "tokens": [self._name(event.logprob.token) for event in events if event.logprob],
            "token_logprobs": [event.logprob.logprob for event in events if event.logprob],
            "top_logprobs": [
                {self._name(item.token): item.logprob for item in event.alternatives} for event in events
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The token's text; a special token or a part of a character as the tokenizer writes it."""
        data = self._vocabulary.token_bytes(token)
        try:
            return data.decode() if data else self._vocabulary.token_name(token)
        except UnicodeDecodeError:
            return self._vocabulary.token_name(token)
