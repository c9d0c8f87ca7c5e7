"""Syntaxes of tool calls of several models, and tools to call, for tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from mlcbuild_format.fields import Json
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.call_syntax import AnswerReader, CallPiece, Reader
from mlcbuild_runtime.openai.tools import Tool, text_parameters

from .grammars import TOKENIZERS

NATIVE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}<|assistant|>"
)
SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", 'y{"}']}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = Tool("add", "", SCHEMA)
NOW = Tool("now", "The time", {"type": "object", "properties": {}, "additionalProperties": False})
HERMES, PLAIN = Form.of(NATIVE), Form.of("{{ messages }}")
SPECIAL = TOKENIZERS["tools"].vocabulary
GLM = "{{ tools }}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"
LLAMA = '{{ tools }} {"name": x, "parameters": y}'
FORMS = {
    "hermes": HERMES,
    "plain": PLAIN,
    "llama": Form.of(LLAMA),
    "llama, tagged": Form.of(LLAMA, SPECIAL),
    "mistral": Form.of("{{ tools }}[TOOL_CALLS]", SPECIAL),
    "mistral, as text": Form.of("{{ tools }}[TOOL_CALLS]"),
    "granite": Form.of("{{ tools }}<|tool_call|>", SPECIAL),
    "granite, as text": Form.of("{{ tools }}<|tool_call|>"),
    "mistral, newer": Form.of("{{ tools }}[TOOL_CALLS]name[ARGS]", SPECIAL),
    "qwen coder": Form.of("{{ tools }}<tool_call>\n<function=f>"),
    "seed": Form.of("{{ tools }}<seed:tool_call>", SPECIAL),
    "seed, as text": Form.of("{{ tools }}<seed:tool_call>"),
    "minimax": Form.of("{{ tools }}<minimax:tool_call>", SPECIAL),
    "minimax, as text": Form.of("{{ tools }}<minimax:tool_call>"),
    "glm 4.5": Form.of(GLM, SPECIAL),
    "glm 4.5, as text": Form.of(GLM),
    "glm 4.7": Form.of(GLM.replace("\n", ""), SPECIAL),
    "glm 4.7, as text": Form.of(GLM.replace("\n", "")),
    "deepseek v3": Form.of("{{ tools }}<｜tool▁sep｜>f\n```json", SPECIAL),
    "deepseek v3.1": Form.of("{{ tools }}<｜tool▁sep｜>", SPECIAL),
    "kimi": Form.of("{{ tools }}<|tool_calls_section_begin|>", SPECIAL),
    "function gemma": Form.of("{{ tools }}<start_function_call>", SPECIAL),
    "function gemma, as text": Form.of("{{ tools }}<start_function_call>"),
    "gemma 4": Form.of("{{ tools }}<|tool_call>", SPECIAL),
}
TEXTS = {tool.name: text_parameters(tool) for tool in (ADD, NOW)}


def read_in_parts(reader: AnswerReader, text: str, seed: int | None) -> dict[str, str]:
    """Parses an answer whose text arrives in parts of random size. Returns kind of piece ("reasoning",
    "text", "call" or "arguments") -> the joined text of all pieces of this kind. seed: seed of the random
    sizes; None: the text arrives in one part."""
    by_kind: dict[str, str] = {}
    for piece in _arriving(reader, text, seed):
        by_kind[piece.kind] = by_kind.get(piece.kind, "") + piece.text
    return by_kind


def _arriving(reader: AnswerReader, text: str, seed: int | None) -> Iterator[CallPiece]:
    source = random.Random(seed)
    while text:
        size = len(text) if seed is None else source.randrange(1, 8)
        part, text = text[:size], text[size:]
        yield from reader.read(part, last=not text)


def pieces(
    text: str, form: Form, choice: str, seed: int | None = None, formatted: bool = False
) -> list[CallPiece]:
    """Parses an answer whose text arrives in parts, and returns its pieces: texts, beginnings of tool calls,
    and their arguments; consecutive pieces of one kind are joined. form: syntax of tool calls; choice:
    "required" if the answer must be a call, else "auto"; seed: seed of the random sizes of the parts, None
    for one part; formatted: True if an answer without calls follows a JSON format."""
    actual: list[CallPiece] = []
    for piece in _arriving(Reader(form, choice, formatted, TEXTS), text, seed):
        if actual and actual[-1].kind == piece.kind != "call":
            actual[-1] = CallPiece(piece.kind, actual[-1].text + piece.text)
        else:
            actual.append(piece)
    return actual


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}
