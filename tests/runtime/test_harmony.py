"""Tests of answers in harmony channels: they are split into reasoning, tool calls and text, and can be
constrained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai.harmony import MARKS, Harmony, HarmonyReader
from mlcbuild_runtime.openai.response_format import response_format, schema_constraint
from mlcbuild_runtime.openai.tools import Toolbox

from . import parrot
from .grammars import TOKENIZERS, drawn
from .parrot import say
from .shared import Server
from .test_server import post
from .tool_forms import ADD, NOW, SCHEMA, read_in_parts

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ reasoning_effort }}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.thinking }}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}<|start|>assistant<|assistant|>"
)
ARGUMENTS = '{"a": 1, "b": "x"}'
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four."
CALL = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
NAMED_FIRST = f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"


def split(text: str, seed: int | None = None, has_tools: bool = True) -> dict[str, str]:
    """Parses an answer in the harmony format whose text arrives in parts of random size. Returns kind of
    piece ("reasoning", "text", "call" or "arguments") -> the joined text of all pieces of this kind. seed:
    seed of the random sizes; None: one part. has_tools: True if the request has tools."""
    return read_in_parts(HarmonyReader(has_tools), text, seed)


@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (f"{THOUGHT}{FINAL}", {"reasoning": "Two and two.", "text": "Four."}),
        (f"{THOUGHT}{FINAL}<|return|>", {"reasoning": "Two and two.", "text": "Four."}),
        (FINAL, {"text": "Four."}),
        (CALL, {"call": "add", "arguments": ARGUMENTS}),
        (f"{THOUGHT}{CALL}", {"reasoning": "Two and two.", "call": "add", "arguments": ARGUMENTS}),
        (f"{THOUGHT}{NAMED_FIRST}", {"reasoning": "Two and two.", "call": "add", "arguments": ARGUMENTS}),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
            {"text": "I look.", "call": "add", "arguments": ARGUMENTS},
        ),
        (f"{THOUGHT}{THOUGHT}{FINAL}", {"reasoning": "Two and two.\n\nTwo and two.", "text": "Four."}),
        ("<|channel|>analysis<|message|>a <|en", {"reasoning": "a <|en"}),
        ("<|channel|>analysis to=browser.search<|message|>q<|call|>", {"reasoning": "q"}),
        ("<|channel|>fin", {}),
        ("Four.", {"text": "Four."}),
    ],
)
def test_channels_are_split(text: str, pieces: dict[str, str], seed: int | None) -> None:
    assert split(text, seed) == pieces


def test_without_tools_a_call_is_text() -> None:
    assert split(CALL, 1, has_tools=False) == {"text": ARGUMENTS}


VOCABULARY = TOKENIZERS["tools"].vocabulary
CHANNELS = Harmony.of(TEMPLATE, VOCABULARY)


def test_templates_imply_channels() -> None:
    assert CHANNELS is not None and set(CHANNELS.tokens) == set(MARKS)
    assert Harmony.of("{{ messages }}", VOCABULARY) is None
    assert Harmony.of(TEMPLATE, TOKENIZERS["json"].vocabulary) is None


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    choice=st.sampled_from(["auto", "required", None]),
    kind=st.sampled_from([None, "schema", "lark"]),
)
def test_every_constrained_answer_is_a_call_or_has_its_format(
    seed: int, choice: Any, kind: str | None
) -> None:
    assert CHANNELS is not None
    if (choice is None and kind is None) or (choice is not None and kind == "lark"):
        return
    answer = schema_constraint(SCHEMA, "x") if kind == "schema" else None
    if kind == "lark":
        answer = response_format({"type": "grammar", "grammar": 'start: x "!"\nx: /[0-9]{3}/'})
    box = None if choice is None else Toolbox((ADD, NOW), choice, True)
    # The embedded model's answers end with <|end|>, so another special token stands for it.
    other = VOCABULARY.token_id("[ARGS]")
    assert other is not None
    channels = Harmony({**CHANNELS.tokens, "<|end|>": other})
    bound = channels.constraint(box, answer)
    assert bound is not None
    # A random text would hardly ever end: reasoning is one letter long.
    short = type(bound)("lark", bound.source.replace(r"TEXT: /(.|\n)*/", "TEXT: /[a-z]/"), bound.param)
    shown = {token: text for text, token in channels.tokens.items()}
    parts = split(drawn(short, seed, "tools", False, shown), seed, box is not None)
    if choice == "required":
        assert "call" in parts
    if "call" in parts:
        (tool,) = (tool for tool in (ADD, NOW) if tool.name == parts["call"])
        jsonschema.validate(json.loads(parts["arguments"]), tool.parameters)
    elif kind == "schema":
        jsonschema.validate(json.loads(parts["text"]), SCHEMA)
    elif kind == "lark":
        assert parts["text"][3:] == "!"


def test_tools_and_a_grammar_are_refused() -> None:
    assert CHANNELS is not None
    grammar = response_format({"type": "grammar", "grammar": 'start: "yes"'})
    with pytest.raises(RequestError, match="cannot be combined"):
        CHANNELS.constraint(Toolbox((ADD,), "auto", True), grammar)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundle = tmp_path_factory.mktemp("harmony") / "toy"
    parrot.write(bundle, TEMPLATE, MARKS)
    manifest = json.loads((bundle / "bundle.json").read_bytes())
    manifest["serving"]["eos_token_ids"] += [
        manifest["model"]["config"]["vocab_size"] - len(MARKS) + MARKS.index("<|call|>")
    ]
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    with parrot.serving(bundle) as running:
        yield running


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


def test_answers_of_a_server(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:

        def asked(text: str, **fields: Any) -> Any:
            messages = [{"role": "user", "content": say(text)}]
            return {"model": server.name, "messages": messages, **fields}

        actual = ai.chat.completions.create(**asked(f"{THOUGHT}{FINAL}"))
        message = actual.choices[0].message
        assert (message.content, message.to_dict()["reasoning_content"]) == ("Four.", "Two and two.")
        assert actual.usage is not None and actual.usage.completion_tokens_details is not None
        assert (actual.usage.completion_tokens_details.reasoning_tokens or 0) > 0
        for choice in ("auto", "required"):
            asks = asked(f"{THOUGHT}{CALL}", tools=TOOLS, tool_choice=choice)
            (answer,) = ai.chat.completions.create(**asks).choices
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            assert answer.message.to_dict()["reasoning_content"] == "Two and two."
            (call,) = answer.message.tool_calls or []
            assert call.type == "function" and call.function.name == "add"
            assert json.loads(call.function.arguments) == {"a": 1, "b": "x"}
            written = "".join(
                part.function.arguments or ""
                for chunk in ai.chat.completions.create(**asks, stream=True)
                for part in chunk.choices[0].delta.tool_calls or []
                if part.function is not None
            )
            assert written == call.function.arguments
        # The call and its result go back, with the tool's name.
        asks = asked(FINAL)
        asks["messages"][:0] = [
            answer.message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        rendered = post(server, "/apply-template", {"messages": asks["messages"]}).json()["prompt"]
        assert '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>' in rendered
        assert "<|message|>Two and two.<|end|>" in rendered
        assert ai.chat.completions.create(**asks).choices[0].message.content == "Four."
        schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        text = f"{THOUGHT}<|channel|>final<|message|>{ARGUMENTS}"
        (answer,) = ai.chat.completions.create(**asked(text, response_format=schema)).choices
        assert (answer.message.content, answer.finish_reason) == (ARGUMENTS, "stop")
        raw = ai.chat.completions.create(**asked(FINAL), extra_body={"reasoning_format": "none"})
        assert raw.choices[0].message.content == FINAL
        thought, said = ai.responses.create(
            model=server.name, input=say(f"{THOUGHT}{FINAL}"), reasoning={"effort": "low"}
        ).output
        assert (thought.type, said.type) == ("reasoning", "message")


def test_the_effort_reaches_the_template(server: Server) -> None:
    body: dict[str, Json] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    sizes = [
        post(server, "/v1/chat/completions", {**body, **fields}).json()["usage"]["prompt_tokens"]
        for fields in ({}, {"reasoning_effort": "high"})
    ]
    assert sizes[1] - sizes[0] == len("high")
