"""Tests of tool calls in an answer's text: every syntax is parsed, even if the answer is cut off, and can be
enforced by a grammar."""

from __future__ import annotations

import json
import random

import pytest
from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.call_syntax import CallPiece, Reader
from mlcbuild_runtime.openai.tools import Tool, Toolbox, constraint, text_parameters

from tests.runtime.tool_forms import ADD, FORMS, HERMES, PLAIN, SPECIAL, pieces

from .grammars import GRAMMARS, SIZE, TOKENIZERS, allowed_by


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_text_and_calls(seed: int | None) -> None:
    call = HERMES.write("add", {"a": 1, "b": 'y{"}'})
    parts = pieces(f"Let me <tool see.\n{call}\n{call}", HERMES, "auto", seed)
    assert parts == [
        CallPiece("text", "Let me <tool see.\n"),
        *[CallPiece("call", "add"), CallPiece("arguments", '{"a": 1, "b": "y{\\"}"}')] * 2,
    ]
    assert pieces("no call <tool_cal", HERMES, "auto", seed) == [CallPiece("text", "no call <tool_cal")]
    assert pieces("plain { text", PLAIN, "auto", seed) == [CallPiece("text", "plain { text")]
    assert pieces(PLAIN.write("now", {}), PLAIN, "auto", seed) == [
        CallPiece("call", "now"),
        CallPiece("arguments", "{}"),
    ]


LOOK = "Let me see. "
ARGUMENTS = '{"a": 1, "b": "y{\\"}"}'
CALLED = [CallPiece("call", "add"), CallPiece("arguments", ARGUMENTS)]
ONE = '{"name": "add", "arguments": ' + ARGUMENTS + "}"
OTHER = ONE.replace("arguments", "parameters")
QWEN = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=b>\ny{"}\n</parameter>\n</function>\n</tool_call>'
)
GLM45 = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    '<arg_key>b</arg_key>\n<arg_value>y{"}</arg_value>\n</tool_call>'
)
SEED = (
    "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
    '<parameter=b>y{"}</parameter>\n</function>\n</seed:tool_call>'
)
INVOKED = (
    '<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">y{"}</parameter>\n</invoke>\n'
)
MINIMAX = "<minimax:tool_call>\n" + INVOKED * 2 + "</minimax:tool_call>"
V3 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3_CALL = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
V31_CALL = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
KIMI_CALL = (
    "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>"
)
KIMI = (
    "<|tool_calls_section_begin|>"
    + KIMI_CALL.replace("{}", "0", 1)
    + KIMI_CALL.replace("{}", "1", 1)
    + "<|tool_calls_section_end|>"
)
GEMMA = '<start_function_call>call:add{a:1,b:<escape>y{"}<escape>}<end_function_call>'
GEMMA_4 = '<|tool_call>call:add{a:1,b:<|"|>y{"}<|"|>}<tool_call|>'
STYLES = [
    ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]", [*CALLED, *CALLED]),
    ("mistral", f"{LOOK}[TOOL_CALLS][{ONE}]", [CallPiece("text", LOOK), *CALLED]),
    ("mistral", LOOK, [CallPiece("text", LOOK)]),
    ("mistral, as text", f"{LOOK}[TOOL_CALLS] [{ONE}]", [CallPiece("text", LOOK), *CALLED]),
    ("granite", f"<|tool_call|>[{ONE}, {ONE}]", [*CALLED, *CALLED]),
    ("granite, as text", f"<|tool_call|>[{ONE}]", CALLED),
    ("granite", LOOK, [CallPiece("text", LOOK)]),
    ("mistral, newer", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}" * 2, [*CALLED, *CALLED]),
    ("mistral, newer", f"{LOOK}[TOOL_CALLS]add[ARGS]{ARGUMENTS}", [CallPiece("text", LOOK), *CALLED]),
    ("llama, tagged", f"<|python_tag|>{OTHER}", CALLED),
    ("llama, tagged", f"{OTHER}\n{OTHER}", [*CALLED, *CALLED]),
    ("llama, tagged", f"{LOOK}<|python_tag|>{OTHER}", [CallPiece("text", LOOK), *CALLED]),
    ("llama, tagged", LOOK, [CallPiece("text", LOOK)]),
    ("llama", OTHER, CALLED),
    ("qwen coder", f"{LOOK}{QWEN}\n{QWEN}", [CallPiece("text", LOOK), *CALLED, *CALLED]),
    ("qwen coder", LOOK, [CallPiece("text", LOOK)]),
    ("seed", f"{LOOK}\n{SEED}\n{SEED}", [CallPiece("text", f"{LOOK}\n"), *CALLED, *CALLED]),
    ("seed, as text", SEED, CALLED),
    ("minimax", f"{LOOK}\n{MINIMAX}", [CallPiece("text", f"{LOOK}\n"), *CALLED, *CALLED]),
    ("minimax, as text", MINIMAX, [*CALLED, *CALLED]),
    ("minimax", LOOK, [CallPiece("text", LOOK)]),
    ("glm 4.5", f"{LOOK}\n{GLM45}\n{GLM45}", [CallPiece("text", f"{LOOK}\n"), *CALLED, *CALLED]),
    ("glm 4.5, as text", f"{LOOK}\n{GLM45}", [CallPiece("text", f"{LOOK}\n"), *CALLED]),
    ("glm 4.7", GLM45.replace("\n", "") * 2, [*CALLED, *CALLED]),
    ("glm 4.7, as text", GLM45.replace("\n", ""), CALLED),
    ("deepseek v3", f"{LOOK}{V3.format(V3_CALL)}", [CallPiece("text", LOOK), *CALLED]),
    ("deepseek v3", V3.format(f"{V3_CALL}\n{V3_CALL}"), [*CALLED, *CALLED]),
    ("deepseek v3.1", V3.format(V31_CALL * 2), [*CALLED, *CALLED]),
    ("deepseek v3.1", LOOK, [CallPiece("text", LOOK)]),
    ("kimi", f"{LOOK}{KIMI}", [CallPiece("text", LOOK), *CALLED, *CALLED]),
    ("function gemma", f"{LOOK}{GEMMA}{GEMMA}", [CallPiece("text", LOOK), *CALLED, *CALLED]),
    ("function gemma, as text", f"{LOOK}{GEMMA}", [CallPiece("text", LOOK), *CALLED]),
    ("gemma 4", GEMMA_4 * 2, [*CALLED, *CALLED]),
    ("gemma 4", LOOK, [CallPiece("text", LOOK)]),
]


@pytest.mark.parametrize(("name", "text", "expected"), STYLES)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_styles_of_models_are_read_and_allowed(
    name: str, text: str, expected: list[CallPiece], seed: int | None
) -> None:
    form = FORMS[name]
    assert pieces(text, form, "auto", seed) == expected
    assert_allowed(text, form, ADD)


def assert_allowed(text: str, form: Form, tool: Tool) -> None:
    """Asserts that the constraint for calls of `tool` allows the answer `text`, in which the names of special
    tokens stand for these tokens."""
    compiled = GRAMMARS["tools"].compiled(constraint(Toolbox((tool,), "auto", True), form, False), False)
    matcher = compiled.matcher()
    by_name = {token: SPECIAL.token_bytes(token) for token in range(SIZE)}
    by_name |= {token: name.encode() for name, token in form.tokens.items()}
    left = text.encode()
    while left:
        fitting = [token for token in allowed_by(matcher).nonzero()[0].tolist() if by_name[token]]
        token = next((token for token in fitting if left.startswith(by_name[token])), None)
        assert token is not None, left
        matcher.take(token)
        left = left.removeprefix(by_name[token])
    assert allowed_by(matcher)[sorted(TOKENIZERS["tools"].eos)].all(), text


TEXT: dict[str, Json] = {"type": "string"}
EDIT = Tool(
    "edit",
    "",
    {
        "type": "object",
        "properties": {
            "code": {"type": "string"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            "force": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "any": True,
        },
        "required": ["code"],
        "$defs": {"line": {"type": "integer"}},
    },
)
CODE = 'if a < b:\n\tprint("<x>")\n'
TYPED = (
    "qwen coder",
    "seed",
    "seed, as text",
    "minimax",
    "minimax, as text",
    "glm 4.5",
    "glm 4.5, as text",
    "glm 4.7",
    "hermes",
    "kimi",
    "function gemma",
    "gemma 4",
)


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"code": CODE, "lines": [1, 22], "force": True, "note": "null", "any": {"a": [None]}},
        {"code": "12", "note": ""},
        {"code": ""},
    ],
)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_arguments_of_every_type(name: str, arguments: dict[str, Json], seed: int | None) -> None:
    """Checks arguments of every type: text arguments are written without quotes in some syntaxes, and are
    read as texts even if they look like JSON."""
    form, reader_texts = FORMS[name], {"edit": text_parameters(EDIT)}
    text = f"{LOOK}{form.first}{form.write('edit', arguments)}{form.last}"
    reader, source, written = Reader(form, "auto", False, reader_texts), random.Random(seed), ""
    left = text
    while left:
        size = len(left) if seed is None else source.randrange(1, 8)
        part, left = left[:size], left[size:]
        written += "".join(
            piece.text for piece in reader.read(part, last=not left) if piece.kind == "arguments"
        )
    assert json.loads(written) == arguments
    assert_allowed(text, form, EDIT)


@pytest.mark.parametrize("name", ["qwen coder", "glm 4.5", "glm 4.5, as text"])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_line_breaks_around_the_tag_after_a_text_may_be_missing(name: str, seed: int | None) -> None:
    form, tool = FORMS[name], Tool("edit", "", {"properties": {"code": TEXT, "note": TEXT}})
    assert form.tags is not None
    texts: dict[str, Json] = {"code": "a", "note": "b"}
    unbroken = form.write("edit", texts).replace(form.tags.after, form.tags.closing)
    text = f"{unbroken}{form.between}{form.write('edit', texts)}"
    assert (
        pieces(text, form, "auto", seed)
        == [
            CallPiece("call", "edit"),
            CallPiece("arguments", json.dumps(texts)),
        ]
        * 2
    )
    assert_allowed(text, form, tool)


@pytest.mark.parametrize(
    "code", ["<parameter name='a'>1</parameter>\n", "\n</parameter>\n</function>", "\n\n"]
)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_text_may_contain_the_tag_after_it(code: str, seed: int | None) -> None:
    form, tool = FORMS["qwen coder"], Tool("edit", "", {"properties": {"code": TEXT, "note": TEXT}})
    text = form.write("edit", {"code": code, "note": code})
    assert pieces(text, form, "auto", seed)[1].text == json.dumps({"code": code, "note": code})
    assert_allowed(text, form, tool)


def test_an_answer_that_is_cut_off_keeps_whole_arguments() -> None:
    text = FORMS["qwen coder"].write("add", {"a": 1, "b": "x"})
    parts = pieces(text[: text.index("x\n")], FORMS["qwen coder"], "auto", 1)
    assert parts == [CallPiece("call", "add"), CallPiece("arguments", '{"a": 1')]
