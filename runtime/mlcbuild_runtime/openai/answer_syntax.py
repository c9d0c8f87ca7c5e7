"""Defines the syntax of a chat's answers: how an answer is constrained, and how it is split into pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.openai import tools
from mlcbuild_runtime.openai.api import ChatCall
from mlcbuild_runtime.openai.call_forms import Form
from mlcbuild_runtime.openai.call_syntax import AnswerReader, Reader
from mlcbuild_runtime.openai.harmony import Harmony, HarmonyReader
from mlcbuild_runtime.openai.reasoning import Thinking, ThinkingReader
from mlcbuild_runtime.text.tokenizer import Tokenizer


class AnswerSyntax(Protocol):
    """The interface of a syntax of answers: how an answer is constrained, and how its text is split into
    reasoning, text and tool calls."""

    def shown(self, call: ChatCall) -> Mapping[str, int]:
        """Returns text -> number of the token in the vocabulary, for the special tokens that belong to the
        syntax of answers (such as the marks of tool calls) and so must appear in the text of the answer."""
        ...

    def constraint(self, call: ChatCall, space: bool) -> Constraint | None:
        """Returns the constraint (a grammar, JSON schema or regular expression) that the text of an answer
        must match, with its reasoning and tool calls; None if any text is allowed. space: True if the answer
        may begin with a space. Raises RequestError if the request states a grammar beside tools."""
        ...

    def reader(self, call: ChatCall) -> Callable[[], AnswerReader] | None:
        """Returns a function without arguments that creates the parser which splits one answer into
        reasoning, text and tool calls; None if the whole answer is text."""
        ...


def answer_syntax(tokenizer: Tokenizer, form: Form, prompt: str) -> AnswerSyntax:
    """Returns the syntax of the answers to a prompt: how reasoning, text and tool calls are marked, according
    to the tokenizer's chat template. form: the syntax of the model's tool calls; prompt: the rendered prompt,
    which may begin the answer's reasoning or end it."""
    channels = Harmony.of(tokenizer.template.source, tokenizer.vocabulary)
    if channels is not None:
        return ChannelSyntax(channels)
    return MarkedSyntax(form, Thinking.of(tokenizer.template.source, prompt, tokenizer.vocabulary))


@dataclass(frozen=True)
class ChannelSyntax:
    """The syntax of answers that are divided into channels (reasoning, tool calls, text), as gpt-oss writes
    them: OpenAI's harmony format."""

    channels: Harmony

    def shown(self, call: ChatCall) -> Mapping[str, int]:
        """Returns text -> number of the token in the vocabulary, for the special tokens that divide an answer
        into channels, such as "<|channel|>", and so must appear in the text of the answer."""
        return self.channels.tokens

    def constraint(self, call: ChatCall, space: bool) -> Constraint | None:
        """Returns the constraint that the text of an answer must match; None if any text is allowed. space:
        True if the answer may begin with a space, which has no effect here. Raises RequestError if the
        request states a grammar beside tools."""
        return self.channels.constraint(call.toolbox, call.options.constraint)

    def reader(self, call: ChatCall) -> Callable[[], AnswerReader] | None:
        """Returns a function without arguments that creates the parser which splits one answer into
        reasoning, text and tool calls; None if the whole answer is text."""
        has_tools = call.toolbox is not None
        return partial(HarmonyReader, has_tools) if has_tools or call.splits_reasoning else None


@dataclass(frozen=True)
class MarkedSyntax:
    """The syntax of a model's answers in which marks, such as <think> and <tool_call>, surround reasoning and
    tool calls."""

    form: Form
    thinking: Thinking | None

    def shown(self, call: ChatCall) -> Mapping[str, int]:
        """Returns text -> number of the token in the vocabulary, for the marks around tool calls and
        reasoning that are special tokens, such as "<think>", and so must appear in the text of the answer.
        Those of tool calls are included only if the request has tools."""
        call_tokens = {} if call.toolbox is None else self.form.tokens
        return {**call_tokens, **({} if self.thinking is None else self.thinking.tokens)}

    def constraint(self, call: ChatCall, space: bool) -> Constraint | None:
        """Returns the constraint that the text of an answer must match; None if any text is allowed. space:
        True if the answer may begin with a space. Raises RequestError if the request states a grammar beside
        tools."""
        box, constraint = call.toolbox, call.options.constraint
        free = box is not None and box.choice == "auto" and constraint is None
        if box is not None:
            prose = tools.ANY_TEXT if self.thinking is None else self.thinking.prose
            constraint = tools.constraint(box, self.form, space, constraint, prose)
        if constraint is None or self.thinking is None:
            return constraint
        return self.thinking.before(constraint, space, free)

    def reader(self, call: ChatCall) -> Callable[[], AnswerReader] | None:
        """Returns a function without arguments that creates the parser which splits one answer into
        reasoning, text and tool calls; None if the whole answer is text."""
        box, formatted = call.toolbox, call.options.constraint is not None
        texts = {} if box is None else {tool.name: tools.text_parameters(tool) for tool in box.tools}
        inner = None if box is None else partial(Reader, self.form, box.choice, formatted, texts)
        thinking = self.thinking
        if thinking is None or not call.splits_reasoning:
            return inner
        return lambda: ThinkingReader(thinking, None if inner is None else inner())
