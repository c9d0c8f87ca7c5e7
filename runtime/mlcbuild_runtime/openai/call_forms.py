"""Lists the syntaxes of tool calls, each with the chat templates that imply it. The parser of answers and the
grammar that constrains them are both made from this table."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlcbuild_format.fields import Json

from mlcbuild_runtime.openai import bare_arguments
from mlcbuild_runtime.openai.tagged_arguments import Tags
from mlcbuild_runtime.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class NamedCall:
    """The syntax of a tool call that begins with the tool's name: BEFORE NAME AFTER, followed by the
    arguments."""

    after: str = ""
    before: str = ""
    numbered: bool = False
    """True if NAME, the name of the called function, is followed by a colon and the number of the call,
    counted from 0 over the whole chat. BEFORE NAME : NUMBER is then the call's id in the chat template."""
    tags: Tags | None = None
    """Texts before the key, between key and value, and after the value of each argument of a tool call, such
    as "<parameter=", ">" and "</parameter>"; None: the arguments are one JSON object."""
    quote: str = ""
    """Text, such as "<escape>", on both sides of each string in the arguments of a tool call, for models that
    write an object whose keys have no quotation marks; "" for models that write JSON."""


@dataclass(frozen=True)
class Form:
    """The syntax of the tool calls in a model's text. If calls are JSON objects, they are written as FIRST
    OPENING LEAD {"name": TOOL, KEY: ARGUMENTS} END LAST; each further call is BETWEEN LEAD {...} END before
    LAST. Otherwise `by_name` describes what stands instead of the object. FIRST, OPENING, LEAD, KEY, END,
    LAST and BETWEEN are the texts in the attributes of these names."""

    key: str = "arguments"
    native: bool = True
    """True if the model's chat template itself describes tools to the model."""
    first: str = ""
    opening: str = ""
    """Text, such as "[", that opens the list of tool calls in an answer, "" for none; a space may come before
    it."""
    lead: str = ""
    end: str = ""
    between: str = "\n"
    last: str = ""
    by_name: NamedCall | None = None
    """The texts around name and arguments in a model's tool calls, if each begins with the called tool's
    name; None: calls are JSON objects."""
    optional: bool = False
    """True if a model may leave out the text `first` that precedes all tool calls of an answer. If that text
    is not a special token of the vocabulary, it is then dropped from the syntax altogether."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Text -> number of the token in the vocabulary, for the special tokens that occur in the texts of this
    syntax of tool calls."""
    short_ids: bool = False
    """True if the template accepts only call ids of nine letters and digits."""

    @classmethod
    def of(cls, template: str, vocabulary: Vocabulary | None = None) -> Form:
        """Returns the syntax of tool calls that a chat template implies: that of the first row of SYNTAXES
        whose texts the template all has, or plain JSON objects if there is none, or the template does not
        mention tools. vocabulary: provides the special tokens; None for none."""
        if "tools" not in template:
            return cls(native=False)
        for syntax in SYNTAXES:
            if all(text in template for text in syntax.texts):
                tokens = special_tokens(vocabulary, *syntax.special)
                form = replace(syntax.form, tokens=tokens)
                return replace(form, first="") if form.optional and form.first not in tokens else form
        return cls()

    @property
    def tags(self) -> Tags | None:
        """Returns the texts before a key, between key and value, and after the value, which a model writes
        for each argument of a tool call; None if it writes all arguments as one JSON object."""
        return None if self.by_name is None else self.by_name.tags

    @property
    def quote(self) -> str:
        """Returns the quotation mark, such as "<escape>", that models write on both sides of each string in
        arguments of tool calls whose keys are bare (unquoted); "" for other arguments."""
        return "" if self.by_name is None else self.by_name.quote

    @property
    def mark(self) -> str:
        """Returns the text at the beginning of tool calls that prose never contains, such as "<tool_call>";
        "" if the syntax has no such text, so that a call is recognised by its opening brace."""
        return self.first or self.lead

    def head(self, name: str) -> str:
        """Returns the text with which a call of the tool `name` begins, up to its arguments, without the text
        in front of each call that distinguishes it from prose. Where calls are numbered, the number is 0."""
        if self.by_name is not None:
            called = self.numbered_id(name, 0) or f"{self.by_name.before}{name}"
            return called + self.by_name.after
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.key}": '

    def numbered_id(self, name: str, number: int) -> str | None:
        """Returns the id that the chat template expects for a call of the tool `name`, such as
        "functions.NAME:0"; None if the syntax does not number calls, so that any id is right. number: number
        of calls before it in the chat."""
        if self.by_name is None or not self.by_name.numbered:
            return None
        return f"{self.by_name.before}{name}:{number}"

    @property
    def tail(self) -> str:
        """Returns the text that ends a tool call in this syntax, after the arguments; it begins with the
        closing brace if calls are JSON objects."""
        return "}" + self.end if self.by_name is None else self.end

    def write(self, name: str, arguments: Json) -> str:
        """Returns the text of one tool call as a model that uses this syntax would write it, without the
        texts that stand before the first call, between calls and after the last one."""
        written = json.dumps(arguments, ensure_ascii=False)
        if self.quote:
            written = bare_arguments.write(arguments, self.quote)
        if self.tags is not None and isinstance(arguments, dict):
            written = self.tags.write(arguments)
        return self.lead + self.head(name) + written + self.tail

    def head_rule(self, name: str) -> str:
        """Returns the text with which a call of the tool `name` begins as a Lark expression; where calls are
        numbered, any number of up to three digits is allowed."""
        if self.by_name is not None and self.by_name.numbered:
            begun = self.literal(f"{self.by_name.before}{name}:")
            return f"{begun} /[0-9]{{1,3}}/ {self.literal(self.by_name.after)}"
        return self.literal(self.head(name))

    def literal(self, text: str) -> str:
        """Returns a text as a Lark expression, in which the special tokens of this syntax of tool calls stand
        as tokens."""
        parts = re.split("(" + "|".join(map(re.escape, self.tokens)) + ")", text) if self.tokens else [text]
        literals = [
            f"<[{self.tokens[part]}]>" if part in self.tokens else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(literals)

    def call_id(self) -> str:
        """Returns a new random id for a tool call: "call_" and 24 hexadecimal digits, or nine of them alone
        if the template accepts only such ids."""
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class CallSyntax:
    """One syntax of tool calls, with the texts by which its chat templates are recognised."""

    texts: tuple[str, ...]
    """Texts that a chat template must all contain to be recognised as one with this syntax of tool calls."""
    form: Form
    special: tuple[str, ...] = ()
    """Texts of one syntax of tool calls, such as "<tool_call>", that are special tokens in the vocabularies
    of some models."""


_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SYNTAXES = (
    CallSyntax(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        ("<tool_call>", "<function="),
        Form(
            lead="<tool_call>\n<function=",
            by_name=NamedCall(">\n", tags=Tags("<parameter=", ">\n", "\n</parameter>\n")),
            end="</function>\n</tool_call>",
        ),
    ),
    CallSyntax(  # Seed-OSS
        ("<seed:tool_call>",),
        Form(
            lead="<seed:tool_call>",
            by_name=NamedCall(">\n", before="\n<function=", tags=Tags("<parameter=", ">", "</parameter>\n")),
            end="</function>\n</seed:tool_call>",
        ),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    CallSyntax(  # MiniMax M2
        ("<minimax:tool_call>",),
        Form(
            first="<minimax:tool_call>",
            lead='\n<invoke name="',
            by_name=NamedCall('">\n', tags=Tags('<parameter name="', '">', "</parameter>\n")),
            end="</invoke>",
            between="",
            last="\n</minimax:tool_call>",
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    CallSyntax(  # GLM 4.7
        ("<tool_call>", "</arg_key><arg_value>"),
        Form(
            lead="<tool_call>",
            by_name=NamedCall(tags=Tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
            end="</tool_call>",
            between="",
        ),
        _GLM,
    ),
    CallSyntax(  # GLM 4.5 and 4.6
        ("<tool_call>", "<arg_key>"),
        Form(
            lead="<tool_call>",
            by_name=NamedCall("\n", tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
            end="</tool_call>",
        ),
        _GLM,
    ),
    CallSyntax(  # Hermes, Qwen 2.5 and 3
        ("<tool_call>",), Form(lead="<tool_call>\n", end="\n</tool_call>")
    ),
    CallSyntax(  # Mistral since Small 3.2
        ("[TOOL_CALLS]", "[ARGS]"),
        Form(lead="[TOOL_CALLS]", by_name=NamedCall("[ARGS]"), between="", short_ids=True),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    CallSyntax(  # Mistral before
        ("[TOOL_CALLS]",),
        Form(first="[TOOL_CALLS]", opening="[", between=", ", last="]", short_ids=True),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    CallSyntax(  # Granite 3
        ("<|tool_call|>",),
        Form(first="<|tool_call|>", opening="[", between=", ", last="]"),
        ("<|tool_call|>",),
    ),
    CallSyntax(  # DeepSeek V3 and R1
        ("<｜tool▁sep｜>", "```json"),
        Form(
            first=_DEEPSEEK[0],
            lead="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            by_name=NamedCall("\n```json\n"),
            end="\n```<｜tool▁call▁end｜>",
            last=_DEEPSEEK[1],
        ),
        _DEEPSEEK,
    ),
    CallSyntax(  # DeepSeek V3.1
        ("<｜tool▁sep｜>",),
        Form(
            first=_DEEPSEEK[0],
            lead="<｜tool▁call▁begin｜>",
            by_name=NamedCall("<｜tool▁sep｜>"),
            end="<｜tool▁call▁end｜>",
            between="",
            last=_DEEPSEEK[1],
        ),
        _DEEPSEEK,
    ),
    CallSyntax(  # Kimi K2
        ("<|tool_calls_section_begin|>",),
        Form(
            first=_KIMI[0],
            lead="<|tool_call_begin|>",
            by_name=NamedCall("<|tool_call_argument_begin|>", before="functions.", numbered=True),
            end="<|tool_call_end|>",
            between="",
            last=_KIMI[1],
        ),
        _KIMI,
    ),
    CallSyntax(  # FunctionGemma
        ("<start_function_call>",),
        Form(
            lead="<start_function_call>",
            by_name=NamedCall(before="call:", quote="<escape>"),
            end="<end_function_call>",
            between="",
        ),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    CallSyntax(  # Gemma 4
        ("<|tool_call>",),
        Form(
            lead="<|tool_call>",
            by_name=NamedCall(before="call:", quote='<|"|>'),
            end="<tool_call|>",
            between="",
        ),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    CallSyntax(  # Llama 3
        ('"parameters"',), Form(key="parameters", first="<|python_tag|>", optional=True), ("<|python_tag|>",)
    ),
)
"""The syntaxes of tool calls. A chat template that mentions tools has the syntax of the first row whose texts
it all contains. In any other case calls are plain JSON objects."""


def special_tokens(vocabulary: Vocabulary | None, *names: str) -> dict[str, int]:
    """Returns name -> number of the token in the vocabulary, for those of `names` that are special tokens,
    which ordinary text cannot contain. Other names are left out; without a vocabulary, all are."""
    tokens = {name: vocabulary.token_id(name) for name in names} if vocabulary is not None else {}
    return {
        name: token
        for name, token in tokens.items()
        if token is not None and vocabulary is not None and not vocabulary.token_bytes(token)
    }
