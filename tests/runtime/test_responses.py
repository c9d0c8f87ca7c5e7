"""Tests of /v1/responses with OpenAI's client and real server processes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from mlcbuild_format.errors import RequestError
from mlcbuild_runtime.openai.history import History, Kept
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel

from . import shared
from .shared import Server
from .test_server import CHAT, post

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "sky",
    "parameters": {
        "type": "object",
        "properties": {"day": {"enum": ["today", "tomorrow"]}},
        "required": ["day"],
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def real(tiny_bundle: Path) -> Iterator[Server]:
    with shared.serving(tiny_bundle) as running:
        yield running


@pytest.fixture
def ai(real: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def said(server: Server, messages: list[Any], **body: Any) -> str:
    """Returns the text that the server's /v1/chat/completions answers to `messages` at temperature 0, for
    comparison with its /v1/responses. body: further fields of the request."""
    reply = post(server, CHAT, {"messages": messages, "temperature": 0, **body}).json()
    return str(reply["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_text(ai: openai.OpenAI, real: Server) -> None:
    question = "What is 12 + 30?"
    answer = ai.responses.create(
        model=real.name, input=question, temperature=0, instructions="Be brief.", metadata={"a": "b"}
    )
    system = {"role": "system", "content": "Be brief."}
    assert answer.output_text == said(real, [system, user(question)]) != ""
    assert (answer.status, answer.model, answer.instructions) == ("completed", real.name, "Be brief.")
    assert (answer.temperature, answer.metadata, answer.error) == (0, {"a": "b"}, None)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    message = answer.output[0]
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "completed")


def test_items(ai: openai.OpenAI, real: Server) -> None:
    words = [user("sort 70 8 31"), {"role": "assistant", "content": "8 31 70"}, user("sort 5 2")]
    items: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "sort 70 8 31"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "8 31 70"}]},
        user("sort 5 2"),
    ]
    assert ai.responses.create(model=real.name, input=items, temperature=0).output_text == said(real, words)


def test_a_response_goes_on_from_another(ai: openai.OpenAI, real: Server) -> None:
    def ask(text: str, **more: Any) -> Response:
        inputs: dict[str, Any] = {"temperature": 0, "max_output_tokens": 16, **more}
        answer: Response = ai.responses.create(model=real.name, input=text, **inputs)
        return answer

    first = ask("sort 70 8 31", instructions="Only numbers.")
    second = ask("sort 5 2", previous_response_id=first.id)
    third = ask("sort 9 1", previous_response_id=second.id)
    words = [user("sort 70 8 31"), {"role": "assistant", "content": first.output_text}, user("sort 5 2")]
    assert second.output_text == said(real, words, max_tokens=16)
    words += [{"role": "assistant", "content": second.output_text}, user("sort 9 1")]
    assert third.output_text == said(real, words, max_tokens=16)
    assert third.previous_response_id == second.id
    assert ai.responses.retrieve(second.id).output_text == second.output_text
    listed = ai.responses.input_items.list(second.id).data
    assert [item.to_dict()["role"] for item in listed] == ["user"]
    ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="never stored, or is no longer kept"):
        ai.responses.retrieve(first.id)
    assert ask("sort 9 1", previous_response_id=second.id).output_text == third.output_text
    with pytest.raises(openai.NotFoundError) as caught:
        ask("and?", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    unkept = ask("sort 5 2", store=False)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(unkept.id)


def test_a_stream_tells_the_same(ai: openai.OpenAI, real: Server) -> None:
    question = "What is 12 + 30?"
    whole = ai.responses.create(model=real.name, input=question, temperature=0)
    with ai.responses.stream(model=real.name, input=question, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text == whole.output_text
    assert final.usage is not None and whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert ai.responses.retrieve(final.id).output_text == deltas


def test_an_answer_that_is_cut_off(ai: openai.OpenAI, real: Server) -> None:
    answer = ai.responses.create(model=real.name, input="count", max_output_tokens=1, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = ai.responses.create(model=real.name, input="count", max_output_tokens=1, stream=True)
    assert list(stream)[-1].type == "response.incomplete"


def test_calls_of_functions(ai: openai.OpenAI, real: Server) -> None:
    inputs: dict[str, Any] = {"model": real.name, "tools": [WEATHER], "temperature": 0}
    answer = ai.responses.create(input="How is it?", tool_choice="required", **inputs)
    call = answer.output[0]
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "sky"
    arguments = json.loads(call.arguments)
    assert arguments["day"] in ("today", "tomorrow")
    named: Any = {"type": "function", "name": "sky"}
    with ai.responses.stream(input="How is it?", tool_choice=named, **inputs) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (call_event,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == call_event.arguments == call.arguments
    assert len(deltas) > 1
    assert [item.type for item in final.output] == ["function_call"]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    inputs["parallel_tool_calls"] = False
    (item,) = ai.responses.create(input="How is it?", tool_choice=allowed, **inputs).output
    assert item.type == "function_call" and item.arguments == call.arguments
    # The result goes back, by itself or with the whole conversation.
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    short: dict[str, Any] = {"model": real.name, "temperature": 0, "max_output_tokens": 8}
    after = ai.responses.create(input=[result], previous_response_id=answer.id, **short)
    items: Any = [user("How is it?"), call.to_dict(), result]
    again = ai.responses.create(input=items, **short)
    assert after.output_text == again.output_text
    assert after.usage is not None and again.usage is not None
    assert after.usage.input_tokens == again.usage.input_tokens


class Sum(BaseModel):
    left: int
    right: int


def test_a_parsed_answer(ai: openai.OpenAI, real: Server) -> None:
    parsed = ai.responses.parse(model=real.name, input="12 + 30", text_format=Sum, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Sum)
    regex: Any = {"format": {"type": "regex", "regex": "[0-9]{4}"}}
    year = ai.responses.create(model=real.name, input="When?", text=regex)
    assert year.output_text.isdecimal() and len(year.output_text) == 4


def test_a_response_can_be_cancelled(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(toy_bundle, tmp_path / "slow"))
    with (
        shared.serving(bundle) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        body: dict[str, Any] = {"ignore_eos": True, "priority": 1}
        stream = client.responses.create(model=server.name, input="hi", stream=True, extra_body=body)
        first = next(stream)
        assert first.type == "response.created"
        rest = pool.submit(list, stream)
        cancelled = client.responses.cancel(first.response.id)
        assert cancelled.status in ("cancelled", "incomplete")  # 250 tokens of the toy take few ms
        last: Any = rest.result(shared.WAIT)[-1]
        assert last.type in ("response.failed", "response.incomplete")
        assert last.response.status == cancelled.status
        assert client.responses.retrieve(first.response.id).status == cancelled.status
        end = time.monotonic() + shared.WAIT
        while server.health()["running"]:
            assert time.monotonic() < end
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_nothing")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "a text, or a list of at least one item; it is missing"),
        ({"input": []}, "input", "at least one item"),
        ({"input": ["x"]}, "input[0]", "an object"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]", "takes message, function_call"),
        ({"input": [user("a"), {"role": "user", "content": [{"type": "input_image"}]}]}, None, "text only"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]", "only functions"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].function.name", "1 to 64 letters"),
        ({"input": "a", "background": True}, "background", "does not support: leave it out or send false"),
        ({"input": "a", "truncation": "auto"}, "truncation", 'or send "disabled"'),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format", "json_schema"),
        ({"input": "a", "text": 1}, "text", "an object"),
        ({"input": "a", "max_tokens": 1}, "max_tokens", "did you mean 'max_output_tokens'"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id", "there is no response 'x'"),
    ],
)
def test_errors(real: Server, body: dict[str, Any], param: str | None, message: str) -> None:
    response = post(real, PATH, body)
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert message in error["message"], error
    assert param is None or error["param"] == param


def test_the_history_is_bounded() -> None:
    def kept(name: str, text: str = "") -> Kept:
        return Kept({"id": name, "output": [{"text": text}]}, (), ({"text": name},))

    history = History(max_kept=3, max_bytes=2000)
    for name in "abc":
        history.keep(kept(name))
    history.find("a")
    history.keep(kept("d"))
    with pytest.raises(RequestError):
        history.find("b")
    assert history.find("a").all == ({"text": "a"}, {"text": ""})
    history.keep(kept("e", "x" * 1900))
    for name in "acd":
        with pytest.raises(RequestError):
            history.find(name)
    history.forget("e")
    history.keep(kept("f", "x" * 3000))  # alone too large
    with pytest.raises(RequestError):
        history.find("f")
