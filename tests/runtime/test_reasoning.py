"""Tests of reasoning in answers: it is recognised by the chat template, split from the answer, and not
subject to the answer's constraint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_format.bundle import Serving
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime import local
from mlcbuild_runtime.openai import api, responses_request
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.call_syntax import Reader
from mlcbuild_runtime.openai.reasoning import MARKS, Thinking, ThinkingReader, template_variables
from mlcbuild_runtime.openai.response_format import response_format, schema_constraint
from mlcbuild_runtime.openai.tools import Toolbox, constraint

from . import parrot
from .grammars import TOKENIZERS, drawn
from .parrot import say
from .shared import Server
from .tool_forms import ADD, HERMES, NATIVE, SCHEMA, read_in_parts

VOCABULARY = TOKENIZERS["json"].vocabulary
LOOSE = Thinking("<think>", "</think>", False, {})
"""A rendered prompt after which the model may reason before it answers."""
BEGUN = Thinking("<think>", "</think>", True, {})
"""A rendered prompt that ends with the mark which begins reasoning."""


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_templates_imply_reasoning(begin: str, end: str) -> None:
    for template in (f"{{{{ '{begin}' }}}}", f"{{{{ content.split('{end}') }}}}"):
        for prompt, begun in (("<|assistant|>", False), (f"<|assistant|>{begin}\n", True)):
            assert Thinking.of(template, prompt, VOCABULARY) == Thinking(begin, end, begun, {})
        assert Thinking.of(template, f"<|assistant|>{begin}\n\n{end}\n\n", VOCABULARY) is None
    assert Thinking.of("{{ messages }}", "", VOCABULARY) is None


def split(text: str, thinking: Thinking, seed: int | None = None, form: Form | None = None) -> dict[str, str]:
    """Parses an answer with reasoning whose text arrives in parts of random size. Returns kind of piece
    ("reasoning", "text", "call" or "arguments") -> the joined text of all pieces of this kind. thinking: the
    marks of the reasoning; seed: seed of the random sizes, None for one part; form: syntax of tool calls,
    None for no tools."""
    inner = None if form is None else Reader(form, "auto")
    return read_in_parts(ThinkingReader(thinking, inner), text, seed)


@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.parametrize(
    ("text", "thinking", "pieces"),
    [
        ("<think>\na b \n</think>\n\n c", LOOSE, {"reasoning": "a b", "text": "c"}),
        (" \n<think>a </thin b</think>c", LOOSE, {"reasoning": "a </thin b", "text": "c"}),
        ("<think>\n\n</think>\n\nc", LOOSE, {"text": "c"}),
        ("<thin c", LOOSE, {"text": "<thin c"}),
        (" c <think>d</think>", LOOSE, {"text": " c <think>d</think>"}),
        ("<think>a </thi", LOOSE, {"reasoning": "a </thi"}),
        ("<thi", LOOSE, {"text": "<thi"}),
        ("a\n</think>c", BEGUN, {"reasoning": "a", "text": "c"}),
        ("<think>a</think>c", BEGUN, {"reasoning": "a", "text": "c"}),
        ("a", BEGUN, {"reasoning": "a"}),
        ("</think>\n", BEGUN, {}),
    ],
)
def test_reasoning_is_split(text: str, thinking: Thinking, pieces: dict[str, str], seed: int | None) -> None:
    assert split(text, thinking, seed) == pieces


def test_calls_after_reasoning() -> None:
    text = f"<think>{HERMES.write('now', {})}?</think>\n{HERMES.write('add', {'a': 1})}"
    parts = split(text, LOOSE, 1, HERMES)
    assert parts == {"reasoning": HERMES.write("now", {}) + "?", "call": "add", "arguments": '{"a": 1}'}


@settings(max_examples=40, deadline=None)
@given(
    begun=st.booleans(),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["json_schema", "regex", "lark", "tools"]),
)
def test_a_constraint_holds_after_reasoning(begun: bool, seed: int, kind: str) -> None:
    thinking = BEGUN if begun else LOOSE
    schema: Json = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    formats: dict[str, Json] = {"json_schema": schema, "regex": {"type": "regex", "regex": "[a-z]{4}/"}}
    formats["lark"] = {"type": "grammar", "grammar": 'start: x "!"\nx: /[0-9]{3}/'}
    if kind == "tools":
        inner = constraint(Toolbox((ADD,), "required", False), HERMES, False, None, thinking.prose)
    else:
        stated = response_format(formats[kind])
        assert stated is not None
        inner = stated
    bound = thinking.before(inner, False, False)
    # A random text would hardly ever end its reasoning: only the first tokens of it are random.
    text = drawn(_ending(bound.source, bound.param), seed)
    parts = split(text, thinking, seed, HERMES if kind == "tools" else None)
    match kind:
        case "regex":
            assert len(parts["text"]) == 5
        case "lark":
            assert parts["text"][3:] == "!"
        case _:
            jsonschema.validate(json.loads(parts["arguments" if kind == "tools" else "text"]), SCHEMA)


def _ending(source: str, param: str) -> Any:
    """Returns a grammar with at most two letters of reasoning, so that random texts reach the answer after
    it."""
    assert source.count(r"/(.|\n)*/") >= 1
    short = schema_constraint({}, param)
    return type(short)("lark", source.replace(r"/(.|\n)*/", "/[a-z]{0,2}/", 1), param)


def test_special_tokens_are_marks() -> None:
    vocabulary = TOKENIZERS["tools"].vocabulary
    name = "[TOOL_CALLS]"
    token = vocabulary.token_id(name)
    assert token is not None
    thinking = Thinking(name, "[/T]", False, {name: token})
    source = thinking.before(schema_constraint({"type": "object"}, "x"), False, False).source
    assert f"thought: <[{token}]> THOUGHT " in source
    open_end = thinking.before(schema_constraint({"type": "object"}, "x"), False, True).source
    assert "| open" in open_end


def test_variables_of_templates() -> None:
    assert template_variables(None, None) == {}
    assert template_variables("none", None) == {"enable_thinking": False, "thinking": False}
    assert template_variables("low", None) == {
        "reasoning_effort": "low",
        "enable_thinking": True,
        "thinking": True,
    }
    assert template_variables("low", False)["enable_thinking"] is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning_effort": "much"}, 'reasoning_effort must be "none" or "minimal"'),
        ({"enable_thinking": 1}, "enable_thinking must be true or false"),
        ({"reasoning_format": "raw"}, 'reasoning_format must be "none" or "auto" or "deepseek"'),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]},
            r"messages\[0\].reasoning_content must be a text",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
            "reasoning_content is 'b', which this server does not support",
        ),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Json], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        api.chat_call({"messages": [{"role": "user", "content": "hi"}], **fields}, Serving())


def test_items_of_reasoning_become_fields_of_messages() -> None:
    items: Json = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "lost"}]},
        {"role": "user", "content": "e"},
    ]
    call = responses_request.call({"input": items, "reasoning": {"effort": "low", "summary": "auto"}})
    body = call.body(())
    listed = body["messages"]
    assert isinstance(listed, list)
    thoughts = [message.get("reasoning_content") for message in listed if isinstance(message, dict)]
    assert thoughts == [None, "b", "c", None]
    assert body["reasoning_effort"] == "low"
    wrong: list[tuple[dict[str, Json], str]] = [
        ({"input": [{"type": "reasoning", "content": [1]}]}, r"input\[0\].content must be a list of parts"),
        ({"input": "a", "reasoning": {"effort": "much"}}, "reasoning.effort must be one of none, minimal"),
    ]
    for fields, message in wrong:
        with pytest.raises(RequestError, match=message):
            responses_request.call(fields)


TEMPLATE = (
    NATIVE.removesuffix("<|assistant|>").replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content")
    + "{{ reasoning_effort }}<|assistant|>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif open %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = tmp_path_factory.mktemp("thinker") / "toy"
    parrot.write(bundle, TEMPLATE)
    with parrot.serving(bundle) as running:
        yield running


SAID = "<think>\nTwo and two.\n</think>\n\n"


@pytest.fixture
def ai(thinker: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    return {"model": server.name, "messages": [{"role": "user", "content": say(text)}], **fields}


def test_chats(ai: openai.OpenAI, thinker: Server) -> None:
    asks = asked(thinker, f"{SAID}Four.")
    answer = ai.chat.completions.create(**asks)
    message = answer.choices[0].message
    assert (message.content, message.to_dict()["reasoning_content"]) == ("Four.", "Two and two.")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
    reasoning, content = "", ""
    for chunk in ai.chat.completions.create(**asks, stream=True):
        delta = chunk.choices[0].delta
        reasoning += delta.to_dict().get("reasoning_content", "")
        content += delta.content or ""
    assert (content, reasoning) == ("Four.", "Two and two.")
    whole = ai.chat.completions.create(**asks, extra_body={"reasoning_format": "none"})
    assert whole.choices[0].message.content == f"{SAID}Four."
    cut = ai.chat.completions.create(**asks, max_tokens=12).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "")
    begun = ai.chat.completions.create(**asks, extra_body={"chat_template_kwargs": {"open": True}}).choices[0]
    assert begun.message.to_dict()["reasoning_content"] == "Two and two."


def test_fields_reach_the_template(ai: openai.OpenAI, thinker: Server) -> None:
    silent = f"{'-' * len('<think>' + chr(10) * 2 + '</think>' + chr(10) * 2)}Four."
    for fields in ({"reasoning_effort": "none"}, {"extra_body": {"enable_thinking": False}}):
        answer = ai.chat.completions.create(**asked(thinker, silent, **fields)).choices[0].message
        assert (answer.content, "reasoning_content" in answer.to_dict()) == ("Four.", False)
    sizes = []
    for effort in (None, "high"):
        reply = ai.chat.completions.create(**asked(thinker, "Four.", reasoning_effort=effort))
        assert reply.usage is not None
        sizes.append(reply.usage.prompt_tokens)
    assert sizes[1] - sizes[0] == len("high")
    thought: Any = {"role": "assistant", "content": "a", "reasoning_content": "bcd"}
    asks = asked(thinker, "Four.")
    asks["messages"].insert(0, thought)
    before = ai.chat.completions.create(**asks).usage
    thought["reasoning_content"] = "b"
    after = ai.chat.completions.create(**asks).usage
    assert before is not None and after is not None
    assert before.prompt_tokens - after.prompt_tokens == 2


def test_calls_and_formats_after_reasoning(ai: openai.OpenAI, thinker: Server) -> None:
    call = HERMES.write("add", {"a": 1, "b": "x"})
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    for choice in ("auto", "required"):
        asks = asked(thinker, f"{SAID}{call}", tools=tools, tool_choice=choice, parallel_tool_calls=False)
        (actual,) = ai.chat.completions.create(**asks).choices
        assert actual.finish_reason == "tool_calls"
        assert actual.message.to_dict()["reasoning_content"] == "Two and two."
        (created,) = actual.message.tool_calls or []
        assert created.type == "function" and json.loads(created.function.arguments) == {"a": 1, "b": "x"}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    text = '{"a": 7, "b": "x"}'
    answer = ai.chat.completions.create(**asked(thinker, f"{SAID}{text}", response_format=schema)).choices[0]
    assert (answer.message.content, answer.finish_reason) == (text, "stop")
    assert answer.message.to_dict()["reasoning_content"] == "Two and two."
    # Without its end, reasoning is all there is of a free answer.
    asks = asked(thinker, "<think>\nTwo", tools=tools)
    (open_end,) = ai.chat.completions.create(**asks).choices
    assert (open_end.finish_reason, open_end.message.to_dict()["reasoning_content"]) == ("stop", "Two")


def test_responses(ai: openai.OpenAI, thinker: Server) -> None:
    asks: dict[str, Any] = {"model": thinker.name, "input": say(f"{SAID}Four.")}
    answer = ai.responses.create(**asks, reasoning={"effort": "low"})
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content is not None
    assert [part.text for part in thought.content] == ["Two and two."]
    assert (message.type, answer.output_text) == ("message", "Four.")
    assert local.Response(answer.to_dict()).output_text == "Four.", "the Python API differs from the client"
    assert answer.reasoning is not None and answer.reasoning.effort == "low"
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    with ai.responses.stream(**asks) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.reasoning_text.done") == 1
    assert [item.type for item in final.output] == ["reasoning", "message"]
    # The reasoning is sent back together with the answer.
    more: Any = [*(item.to_dict() for item in answer.output), {"role": "user", "content": say("Five.")}]
    assert ai.responses.create(model=thinker.name, input=more).output_text == "Five."
