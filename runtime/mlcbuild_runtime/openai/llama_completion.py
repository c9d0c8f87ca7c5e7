"""Implements the API of llama.cpp's server: completions of /completion, and descriptions of the model and its
slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mlcbuild_format.fields import Json

from mlcbuild_runtime.engine.engine import Engine
from mlcbuild_runtime.engine.request import Event
from mlcbuild_runtime.openai import api
from mlcbuild_runtime.openai.body import Table, boolean
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.chat_documents import error_document
from mlcbuild_runtime.openai.foreign_fields import checked, translated
from mlcbuild_runtime.openai.service import CompletionJob, rendered

Document = dict[str, Json]
_OWN = ("echo", "logprobs", "n", "stream_options")
"""Fields of OpenAI's completions that llama.cpp's API defines differently or lacks."""
TABLE: Table = {
    **{name: field for name, field in api.COMPLETION.items() if name not in _OWN},
    "n_predict": api.COMMON["max_tokens"],
    "repeat_penalty": api.SAMPLING["repetition_penalty"],
    "cache_prompt": boolean("Ignored: prompts are always cached."),
    "json_schema": api.CHAT["chat_template_kwargs"],
}
"""Fields of llama.cpp's /completion that this server's API document lists: name -> schema and description.
Other fields are accepted only with values that change nothing."""


def completion_body(body: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the body of OpenAI's /v1/completions that means the same as a body of llama.cpp's /completion.
    Raises RequestError for a field that this endpoint lacks, or fields that contradict each other; the values
    of other fields are not checked yet."""
    fields = translated(body)
    unknown = {key: value for key, value in fields.items() if key not in api.COMPLETION or key in _OWN[:2]}
    checked(unknown, TABLE)
    return fields


class LlamaOutput:
    """The answers to one request to llama.cpp's endpoint /completion while they are generated."""

    def __init__(self, job: CompletionJob, model: str, body: Mapping[str, Json]) -> None:
        """Creates the answers of a request to llama.cpp's /completion, before the engine has answered a
        token. job: the requests for the engine; model: its name in the answers; body: the body of OpenAI's
        /v1/completions, with the prompts, to which the request was converted."""
        self._model, self._prompts = model, job.reply.prompts
        prompt = body.get("prompt")
        self._is_list = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        self._stated: list[Json] = prompt if self._is_list and isinstance(prompt, list) else [prompt]

    def documents(self, index: int, event: Event) -> Iterator[Document]:
        """Yields the JSON document of llama.cpp's stream that one event of the engine (a token, or the end)
        causes; none for a token without text unless it is the last, and an error document for an error.
        index: index of the answer to which the event belongs."""
        if event.error is not None:
            yield error_document(event.error)
        elif event.text or event.last:
            yield self._document(index, event.text, event)

    def whole(self, answers: Sequence[Sequence[Event]]) -> Json:
        """Returns llama.cpp's document of a complete answer, or a list of documents if the request had a list
        of prompts or demanded several answers. answers: for each answer all of its events, one for each
        token, at least one and none of them an error."""
        listed: list[Json] = [
            self._document(index, "".join(event.text for event in events), events[-1])
            for index, events in enumerate(answers)
        ]
        return listed if self._is_list or len(listed) > 1 else listed[0]

    def _document(self, index: int, text: str, event: Event) -> Document:
        prompt = self._prompts[index]
        document: Document = {
            "index": index,
            "content": text,
            "tokens": [],
            "stop": event.last,
            "id_slot": 0,
            "tokens_predicted": event.tokens,
            "tokens_evaluated": prompt.size,
        }
        if not event.last:
            return document
        stated = self._stated[prompt.number]
        return document | {
            "model": self._model,
            "prompt": stated if isinstance(stated, str) else "",
            "truncated": False,
            "stop_type": "limit" if event.finish == "length" else "eos",
            "stopping_word": "",
            "tokens_cached": event.cached,
            "timings": _timings(event, prompt.size),
        }


def _timings(event: Event, size: int) -> Document:
    """Returns the times that the engine spent on an answer, as the field `timings` of llama.cpp's server:
    numbers of tokens, milliseconds in all and per token, and tokens per second, for the prompt's tokens that
    were not cached and for the answer; only numbers of tokens if no times were measured. event: the answer's
    last event; size: number of tokens of the prompt."""
    computed = size - event.cached
    times: Document = {"cache_n": event.cached, "prompt_n": computed, "predicted_n": event.tokens}
    if event.times is None:
        return times
    for name, count, seconds in (
        ("prompt", computed, event.times.prompt),
        ("predicted", event.tokens, event.times.answer),
    ):
        times[f"{name}_ms"] = round(seconds * 1000, 3)
        times[f"{name}_per_token_ms"] = round(seconds * 1000 / max(1, count), 3)
        times[f"{name}_per_second"] = round(count / seconds, 3) if seconds > 0 else 0.0
    return times


def template(running: Engine, body: Mapping[str, Json]) -> Document:
    """Returns the response to a request to llama.cpp's /apply-template, whose body is that of a chat:
    {"prompt": the rendered text with messages and tools}. Raises RequestError for an invalid field, messages
    that the chat template refuses, a prompt that is too long, or too many requests that wait (503);
    SetupError if no child process can be started."""
    tokenizer = running.tokenizer
    form = Form.of(tokenizer.template.source, tokenizer.vocabulary)
    return {"prompt": rendered(running, api.chat_call(body, running.manifest.serving), form)}


def properties(running: Engine) -> Document:
    """Returns the JSON document of llama.cpp's endpoint /props, which describes the served model."""
    manifest, names = running.manifest, running.tokenizer.vocabulary.token_name
    serving, bos, eos = manifest.serving, running.tokenizer.bos, sorted(running.tokenizer.eos)
    chosen: Document = {
        "temperature": 1.0 if serving.temperature is None else serving.temperature,
        "top_p": 1.0 if serving.top_p is None else serving.top_p,
        "top_k": serving.top_k or 0,
    }
    return {
        "default_generation_settings": {"n_ctx": manifest.limits.context_window, "params": chosen},
        "total_slots": running.max_batch,
        "model_alias": running.name,
        "model_path": running.name,
        "chat_template": running.tokenizer.template.source,
        "bos_token": "" if bos is None else names(bos),
        "eos_token": names(eos[0]) if eos else "",
        "modalities": {"vision": False, "audio": False},
    }


def slots(running: Engine) -> list[Json]:
    """Returns the document of llama.cpp's endpoint /slots: one slot for each sequence that a batch may have,
    the busy ones first."""
    busy, context = running.state().running, running.manifest.limits.context_window
    return [
        {"id": i, "n_ctx": context, "speculative": False, "is_processing": i < busy}
        for i in range(running.max_batch)
    ]
