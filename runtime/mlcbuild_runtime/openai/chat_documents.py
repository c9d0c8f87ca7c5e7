"""Converts the engine's events of a request, one for each token, to OpenAI's response documents, whole or in
chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mlcbuild_format.errors import RequestError, ServingError
from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.executor.sampling_params import Logprob, Score
from mlcbuild_runtime.openai.call_syntax import AnswerReader
from mlcbuild_runtime.text.vocabulary import Vocabulary


def error_document(error: ServingError) -> dict[str, Json]:
    """Returns an error as the JSON document of OpenAI's API."""
    if isinstance(error, RequestError) and error.status < 500:
        kind, param, code = "invalid_request_error", error.param, error.code
    else:
        kind, param, code = "server_error", None, getattr(error, "code", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Prompt:
    """The properties of an answer's prompt that the response documents need: its index among the prompts, its
    length in tokens, the text to repeat with its tokens, and the parser of the answer."""

    number: int
    size: int
    """Length of the prompt in tokens."""
    echo: str = ""
    """Text of the prompt that the response repeats in front of the answer; "" for none."""
    tokens: Sequence[int] = ()
    """All tokens of the prompt, if the response repeats the prompt's text and reports log-probabilities for
    it; otherwise empty."""
    offsets: Sequence[int] = ()
    """For each of `tokens`, the offset in characters, in the prompt text that the response repeats, at which
    the token's text begins."""
    reader: Callable[[], AnswerReader] | None = None
    """Function that returns a new parser for the reasoning and the tool calls in one answer; None if the
    answer is all text."""


class _Choice:
    """The state of one answer's response documents while the engine's events, one for each token, arrive."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.prefix, self.begun, self.offset = prompt, prompt.echo, False, len(prompt.echo)
        self.reader = prompt.reader() if prompt.reader is not None else None
        self.calls = self.reasoning_tokens = 0
        self.last: Event | None = None
        """The engine's last event of the answer, with its final counts; None until the answer has ended."""

    def finish(self, event: Event) -> str | None:
        return "tool_calls" if event.finish == "stop" and self.calls else event.finish

    def deltas(self, event: Event) -> Iterator[dict[str, Json]]:
        """Yields the changes of a chat message, in the format of OpenAI's streams, that an event of the
        engine (a token, or the end, but no error) causes, and counts tool calls and reasoning tokens."""
        if self.reader is None:
            yield {"content": event.text}
            return
        for piece in self.reader.read(event.text, event.last):
            if piece.kind in ("text", "reasoning"):
                yield {"content" if piece.kind == "text" else "reasoning_content": piece.text}
                continue
            self.calls += piece.kind == "call"
            call: dict[str, Json] = {"index": self.calls - 1}
            if piece.kind == "call":
                call |= {"id": self.reader.call_id(), "type": "function"}
                call["function"] = {"name": piece.text, "arguments": ""}
            else:
                call["function"] = {"arguments": piece.text}
            yield {"tool_calls": [call]}
        if self.reader.is_thinking:
            self.reasoning_tokens = event.tokens


class Reply:
    """Converts the engine's events, one for each token, of the answers to one request to OpenAI's response
    documents: one document for all answers, or chunks of a stream."""

    def __init__(self, chat: bool, model: str, vocabulary: Vocabulary, prompts: Sequence[Prompt]) -> None:
        """Creates the response to a request, before the engine has answered a token. chat: True for chat
        completions, False for text completions; model: its name in the response; prompts: for each answer the
        index, the length in tokens and the text to repeat of its prompt, and the parser of the answer."""
        self._chat, self._vocabulary, self._model, self._created = chat, vocabulary, model, int(time.time())
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.prompts = prompts
        self._choices = [_Choice(prompt) for prompt in prompts]

    def whole(self, answers: Sequence[Sequence[Event]]) -> dict[str, Json]:
        """Returns OpenAI's response document for complete answers. answers: for each answer all of its
        events, one for each token, at least one and none of them an error."""
        choices: list[Json] = []
        for index, events in enumerate(answers):
            choice, last = self._choices[index], events[-1]
            choice.last = last
            message = self._message(choice, events) if self._chat else {}
            shown: dict[str, Json] = {"index": index, "finish_reason": choice.finish(last)}
            if self._chat:
                shown["message"] = message
            else:
                shown["text"] = choice.prefix + "".join(event.text for event in events)
            choices.append(shown | {"logprobs": self._all_logprobs(choice, events)})
        kind = "chat.completion" if self._chat else "text_completion"
        return self._document(kind, choices) | {"usage": self._usage(), **self._timings()}

    def chunks(self, index: int, event: Event, include_usage: bool) -> Iterator[dict[str, Json]]:
        """Yields OpenAI's stream chunks, possibly none, for one event (a token, or the end) of the answer
        with the index `index`; an error becomes an error document. include_usage: True if a further chunk,
        after the end of the last answer, reports the numbers of tokens, unless an answer fails."""
        if event.error is not None:
            yield error_document(event.error)
            return
        choice = self._choices[index]
        for delta, logprobs, finish in self._deltas(choice, event):
            shown: dict[str, Json] = {"index": index, "logprobs": logprobs, "finish_reason": finish}
            if self._chat:
                shown["delta"] = delta
            else:
                shown["text"] = delta.get("content", "")
            document = self._document(self._chunk_kind, [shown])
            yield document | {"usage": None} if include_usage else document
        if event.last:
            choice.last = event
            if include_usage and all(other.last for other in self._choices):
                usage: dict[str, Json] = {"usage": self._usage(), **self._timings()}
                yield self._document(self._chunk_kind, []) | usage

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _deltas(self, choice: _Choice, event: Event) -> Iterator[tuple[dict[str, Json], Json, str | None]]:
        """Yields (delta, logprobs, finish_reason), the fields of a stream chunk's choice in OpenAI's format,
        for each chunk that an event causes.
        """
        if not choice.begun:
            choice.begun = True
            if self._chat:
                yield {"role": "assistant", "content": ""}, None, None
            elif choice.prompt.tokens:
                yield {"content": choice.prefix}, {**self._prompt_logprobs(choice.prompt, event)}, None
            elif choice.prefix:
                yield {"content": choice.prefix}, None, None
        logprobs = self._logprobs(choice, [event])
        for delta in choice.deltas(event) if event.text or event.last else ():
            if delta.get("content") != "":
                yield delta, logprobs, None
                logprobs = None
        if logprobs is not None:
            yield {"content": ""}, logprobs, None
        if event.finish is not None:
            yield {}, None, choice.finish(event)

    @staticmethod
    def _message(choice: _Choice, events: Sequence[Event]) -> dict[str, Json]:
        content, reasoning = list[str](), list[str]()
        calls: list[dict[str, Json]] = []
        for delta in (delta for event in events for delta in choice.deltas(event)):
            match delta:
                case {"reasoning_content": str(more)}:
                    reasoning.append(more)
                case {"content": str(more)}:
                    content.append(more)
                case {"tool_calls": [{"id": id, "function": {"name": name}}]}:
                    calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                case {"tool_calls": [{"function": {"arguments": str(more)}}]}:
                    function = calls[-1]["function"]
                    assert isinstance(function, dict)
                    function["arguments"] = f"{function['arguments']}{more}"
        message: dict[str, Json] = {"role": "assistant", "content": "".join(content), "refusal": None}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message |= {"tool_calls": list(calls), "content": "".join(content) or None}
        return message

    def _document(self, kind: str, choices: list[Json]) -> dict[str, Json]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Json]:
        prompts, cached = dict[int, int](), dict[int, int]()
        answer_tokens = accepted = rejected = reasoning = 0
        for choice in self._choices:
            assert choice.last is not None
            answer_tokens += choice.last.tokens
            reasoning += choice.reasoning_tokens
            accepted += choice.last.accepted
            rejected += choice.last.rejected
            # The answers to one prompt share it, and the first of them computes it for all.
            number = choice.prompt.number
            prompts[number] = choice.prompt.size
            cached[number] = min(choice.last.cached, cached.get(number, choice.last.cached))
        prompt_tokens = sum(prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def _timings(self) -> dict[str, Json]:
        """Returns {"timings": the numbers of tokens of the prompt and of the answer, and the milliseconds
        that the engine spent on each}, named as by llama.cpp's server; {} if no times were measured, and for
        several answers, which share steps of the model."""
        last = self._choices[0].last
        if len(self._choices) > 1 or last is None or last.times is None:
            return {}
        times, size = last.times, self._choices[0].prompt.size
        return {
            "timings": {
                "cache_n": last.cached,
                "prompt_n": size - last.cached,
                "prompt_ms": round(times.prompt * 1000, 3),
                "predicted_n": last.tokens,
                "predicted_ms": round(times.answer * 1000, 3),
            }
        }

    def _all_logprobs(self, choice: _Choice, events: Sequence[Event]) -> Json:
        if not choice.prompt.tokens:
            return self._logprobs(choice, events)
        scored = [event for event in events if event.logprob is not None]
        answer = self._completion_logprobs(choice, scored)
        prompt = self._prompt_logprobs(choice.prompt, events[0])
        return {key: [*listed, *answer[key]] for key, listed in prompt.items()}

    def _logprobs(self, choice: _Choice, events: Sequence[Event]) -> Json:
        scored = [event for event in events if event.logprob is not None]
        if not scored:
            return None
        if self._chat:
            return {"content": [self._chat_logprob(event) for event in scored], "refusal": None}
        return dict(self._completion_logprobs(choice, scored))

    def _chat_logprob(self, event: Event) -> Json:
        assert event.logprob is not None
        document = self._token(event.logprob)
        return document | {"top_logprobs": [self._token(item) for item in event.alternatives]}

    def _token(self, item: Logprob) -> dict[str, Json]:
        data = self._vocabulary.token_bytes(item.token)
        return {"token": self._name(item.token), "logprob": item.logprob, "bytes": list(data)}

    def _prompt_logprobs(self, prompt: Prompt, event: Event) -> dict[str, list[Json]]:
        """Returns the log-probabilities of a prompt's tokens in OpenAI's format, parallel lists; the first
        token's are null. event: the first event of the prompt's answer."""
        tops: list[Json] = [self._top(score) for score in event.prompt]
        return {
            "tokens": [self._name(token) for token in prompt.tokens],
            "token_logprobs": [None, *(chosen.logprob for chosen, _ in event.prompt)],
            "top_logprobs": [None, *tops],
            "text_offset": list(prompt.offsets),
        }

    def _top(self, score: Score) -> dict[str, Json]:
        """Returns text of a token -> log-probability, for a token and its alternatives. Of two tokens with
        equal texts the likelier one is kept."""
        chosen, others = score
        by_name: dict[str, Json] = {}
        for item in (*others, chosen):
            by_name.setdefault(self._name(item.token), item.logprob)
        return by_name

    def _completion_logprobs(self, choice: _Choice, events: Sequence[Event]) -> dict[str, list[Json]]:
        """Returns the log-probabilities of a text completion in OpenAI's format, an object of parallel lists,
        and advances the text offset of the answer. events: the engine's next events, one for each token of
        the answer, with log-probabilities."""
        offsets: list[Json] = []
        for event in events:
            offsets.append(choice.offset)
            choice.offset += len(event.text)
        return {
            "tokens": [self._name(event.logprob.token) for event in events if event.logprob],
            "token_logprobs": [event.logprob.logprob for event in events if event.logprob],
            "top_logprobs": [
                self._top((event.logprob, event.alternatives)) for event in events if event.logprob
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """Returns a token's text; a special token or part of a character is written as in the
        tokenizer file."""
        data = self._vocabulary.token_bytes(token)
        try:
            return data.decode() if data else self._vocabulary.token_name(token)
        except UnicodeDecodeError:
            return self._vocabulary.token_name(token)
