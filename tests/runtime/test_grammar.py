"""Tests of constrained output: whatever tokens are sampled under the masks, the text satisfies the
constraint."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlcbuild_format.errors import RequestError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.constraints.grammar import Grammars
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.openai.response_format import response_format, schema_constraint

from .grammars import GRAMMARS, RULES, SIZE, TOKENIZERS, allowed_by, drawn

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 200}),
    st.integers(0, 5).map(lambda size: {"type": "string", "maxLength": size}),
    st.lists(st.sampled_from(["a", "é", 'q"', 1, 2.5, None, True]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-z]{2,4}$"}),
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties)[:1],
        "additionalProperties": False,
    }


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "ü c"]), inner, max_size=3).map(_object),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schema=SCHEMAS, seed=st.integers(0, 1000), name=st.sampled_from(["json", "pieces"]), message=st.booleans()
)
def test_every_answer_fits_its_schema(schema: dict[str, Any], seed: int, name: str, message: bool) -> None:
    text = drawn(schema_constraint(schema, "x"), seed, name, message)
    jsonschema.validate(json.loads(text), schema)


def test_references_and_recursion() -> None:
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    schema: dict[str, Any] = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    for seed in range(5):
        jsonschema.validate(json.loads(drawn(schema_constraint(schema, "x"), seed)), schema)


@pytest.mark.parametrize(
    "pattern", ["[0-9]{3}-[0-9]{4}", "(yes|no)( please)?", r"a/b\/c", r"\d+\.\d{2}", "ü+", "a\nb", ""]
)
def test_regular_expressions(pattern: str) -> None:
    for seed in range(4):
        for message in (False, True):
            text = drawn(Constraint("regex", pattern, "x"), seed, message=message)
            assert re.fullmatch(pattern, text), text


def test_text_that_spells_a_special_token() -> None:
    """Checks that text which spells the name of a special token is produced as ordinary text, whether it is
    forced or chosen: the special token itself would end the answer."""
    for text in ("<|end|>", "a <s> b", "[TOOL_CALLS]"):
        schemas: list[dict[str, Json]] = [{"const": text}, {"enum": [text, text + "!"]}]
        for schema in schemas:
            document = json.loads(drawn(schema_constraint(schema, "x"), name="tools"))
            assert document in (text, text + "!")


def test_a_grammar() -> None:
    lark = 'start: "sum(" NUMBER ("," NUMBER)~1..3 ")"\nNUMBER: /[0-9]{1,3}/'
    for seed in range(5):
        assert re.fullmatch(r"sum\(\d{1,3}(,\d{1,3}){1,3}\)", drawn(Constraint("lark", lark, "x"), seed))


def test_json_objects() -> None:
    constraint = response_format({"type": "json_object"})
    assert constraint is not None
    matcher = GRAMMARS["json"].compiled(constraint, message=False).matcher()
    for token in TOKENIZERS["json"].vocabulary.encode('{"a": [1, {"b": null}], "c": "d"}', special=False):
        if token == TOKENIZERS["json"].vocabulary.token_id("▁"):
            continue  # the space that this tokenizer puts before a text
        assert allowed_by(matcher)[token]
        matcher.take(token)
    assert allowed_by(matcher).nonzero()[0].tolist() == sorted(TOKENIZERS["json"].eos)


DEEP: dict[str, Json] = {"type": "object"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


LETTER = next(token for token in range(SIZE) if TOKENIZERS["json"].vocabulary.token_bytes(token) == b"a")

NO_TEXT = (
    "^s cannot be compiled: no text fits it: its conditions exclude each other, a rule or \\$ref leads to"
    " nothing but itself, or the vocabulary cannot spell the text$"
)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("regex", "[a-z", "p.regex"), "p.regex cannot be compiled: invalid regex .* unclosed"),
        (Constraint("regex", "(a)" * 5000 + "[", "p.regex"), r"^.{300,400} error: unclosed character class$"),
        (Constraint("lark", "start: nothing", "p.grammar"), "p.grammar cannot be compiled: .*nothing"),
        (Constraint("lark", "", "p.grammar"), "p.grammar cannot be compiled: "),
        (schema_constraint({"type": "strange"}, "s"), "s cannot be compiled: .*Invalid type: strange"),
        (schema_constraint({"$ref": "#/nowhere"}, "s"), "s cannot be compiled: .*/nowhere"),
        (schema_constraint({"type": "array", "uniqueItems": True}, "s"), "s cannot .*uniqueItems"),
        (schema_constraint({"type": "string", "pattern": "("}, "s"), "s cannot be compiled: "),
        (schema_constraint({"type": "integer", "minimum": 5, "maximum": 2}, "s"), "s cannot be compiled: "),
        (schema_constraint(False, "s"), "s cannot be compiled: "),
        (schema_constraint(DEEP, "s"), "s cannot be compiled: .*recursion limit"),
        (schema_constraint({"$ref": "#"}, "s"), NO_TEXT),
        (schema_constraint({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}, "s"), NO_TEXT),
        (Constraint("regex", r"[^\s\S]", "s"), NO_TEXT),
        (Constraint("lark", "start: start", "s"), NO_TEXT),
        (Constraint("lark", "start: A\nA: /a/ & /b/", "s"), NO_TEXT),
        (
            Constraint("lark", 'start: "a" <|nowhere|>', "s"),
            r'no special token is called "<\|nowhere\|>": write one by its number, such as <\[2\]>$',
        ),
        (
            Constraint("lark", "start: <[99999]>", "s"),
            "s cannot be compiled: Token range end too large: 99999$",
        ),
        (Constraint("regex", "(a{1000}){1000}", "s"), "s cannot be compiled: it is too complex"),
        (Constraint("regex", r"(\w{1,200}){100}", "s"), "s cannot be compiled: it is too complex"),
        (schema_constraint({"const": "x" * 250000}, "s"), "s cannot be compiled: it is too complex"),
        (schema_constraint({"enum": [f"value {i}" for i in range(15000)]}, "s"), "it is too complex"),
        (
            schema_constraint({"type": "integer", "multipleOf": 999983}, "s"),
            "s cannot be compiled: it takes more than 2 s or 128 MiB to compile and begin: simplify it$",
        ),
        (Constraint("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "s"), "too deeply nested"),
        (Constraint("regex", "(" * 3000 + "a" + ")" * 3000, "s"), "s cannot be compiled: "),
        (
            Constraint("lark", f"start: {' | '.join(f'r{i}' for i in range(8000))}\n{RULES}", "s"),
            "it is too complex, since it repeats or branches too often",
        ),
    ],
)
def test_what_cannot_be_compiled(constraint: Constraint, reason: str) -> None:
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(RequestError, match=reason) as caught:
            GRAMMARS["json"].compiled(constraint, message=False).matcher()
        assert (caught.value.param, caught.value.code) == (constraint.param, "invalid_constraint")
        assert "\n" not in str(caught.value)


def taking(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Replaces the clock of CPU time, so that computing the next token masks seems to take `seconds`, one
    number for each mask."""
    times = [time for each in seconds for time in (0.0, each)]
    monkeypatch.setattr("time.thread_time", lambda: times.pop(0))


def test_masks_that_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the limit of CPU time for computing one token mask of a constraint. The slowest mask of an
    answer may exceed it, because on a loaded machine a thread may be charged with the work of others."""
    for seconds in ((0.0, 0.0, 1.0, 0.26), (0.26, 1.0), (1.0, 0.0, 0.26)):
        matcher = GRAMMARS["json"].compiled(Constraint("regex", "[a-z]+", "x"), message=False).matcher()
        taking(monkeypatch, *seconds)
        for _ in seconds[1:]:
            matcher.mask()
            matcher.take(LETTER)
        with pytest.raises(RequestError, match=r"it took 0\.26 s to see which tokens may come next"):
            matcher.mask()


def test_masks_that_take_long_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the limit for the average time of masks: each is fast enough alone, but together they would
    delay all other requests during the whole answer."""
    matcher = GRAMMARS["json"].compiled(Constraint("regex", "[a-z]+", "x"), message=False).matcher()
    taking(monkeypatch, *[0.12] * 4)
    for _ in range(3):
        matcher.mask()
        matcher.take(LETTER)
    with pytest.raises(
        RequestError, match=r"it took 0\.36 s to see which of the tokens may come next 3 times"
    ):
        matcher.after([]).mask()


@settings(max_examples=30)
@given(
    name=st.sampled_from(["json", "pieces"]),
    constraint=st.sampled_from(
        [
            *(
                Constraint("regex", it, "x")
                for it in ("(yes|no)+", ".*", "[^a]{3}", r"\d+(, \d+)*", "[a-c]{2}x?")
            ),
            schema_constraint({"type": "object"}, "x"),
            schema_constraint(
                _object({"a": {"type": "string", "maxLength": 5}, "b": {"enum": ["x", 1]}}), "x"
            ),
            Constraint("lark", 'start: "a" (NUMBER | "b" start)\nNUMBER: /[0-9]{1,3}/', "x"),
        ]
    ),
    seed=st.integers(0, 1 << 30),
)
def test_masks_and_questions_agree(name: str, constraint: Constraint, seed: int) -> None:
    matcher = GRAMMARS[name].compiled(constraint, message=seed % 2 == 1).matcher()
    draws, ends = np.random.default_rng(seed), TOKENIZERS[name].eos
    for _ in range(12):
        allowed = allowed_by(matcher)
        if matcher.free:
            accepted = [token for token in range(SIZE) if token not in ends and matcher.accepted([token])]
            assert accepted == [token for token in allowed.nonzero()[0].tolist() if token not in ends]
        token, other = int(draws.choice(allowed.nonzero()[0])), matcher.after([])
        if matcher.free and draws.random() < 0.5:  # asked and taken at once
            wrong = [token for token in range(SIZE) if not allowed[token]]
            assert not any(matcher.tries(int(token)) for token in draws.permutation(wrong)[:3])
            assert matcher.tries(token) == (token not in ends)
        matcher.take(token)
        other.take(token)
        assert matcher.finished == other.finished and np.array_equal(matcher.mask(), other.mask())
        if matcher.finished:
            break


def test_what_must_come_next_is_the_same_with_and_without_a_mask() -> None:
    draws, asked = np.random.default_rng(3), 0
    for pattern in ("(first|second){9}", "[a-z]{2}abc[0-9]xyz", r"\d+, hello .*", "a{9}b*"):
        actual = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
        while not actual.finished:
            forces = len(actual._matcher.compute_ff_bytes()) >= 2
            asked += forces
            assert actual.after([]).forces == forces
            allowed = allowed_by(actual).nonzero()[0]
            actual.mask()
            assert actual.forces == forces
            actual.take(int(draws.choice(allowed)))
    assert asked > 5


def test_a_model_without_an_end_cannot_be_constrained() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, ())
    with pytest.raises(RequestError, match="no end token"):
        grammars.compiled(Constraint("regex", "a", "x"), message=False).matcher()


class Words:
    """A vocabulary of two words and an end-of-sequence token."""

    leading_space = False

    def encode(self, text: str, special: bool) -> list[int]:
        return [0] if text.startswith("yes") else []

    def token_bytes(self, token: int) -> bytes:
        return (b"yes", b"no", b"")[token]

    def token_name(self, token: int) -> str:
        return ("yes", "no", "</s>")[token]

    def token_id(self, name: str) -> int | None:
        return None


def test_a_text_that_the_vocabulary_cannot_spell() -> None:
    grammars = Grammars(Words(), 3, {2})
    grammars.compiled(Constraint("regex", "(yes|no)+", "x"), message=False)
    with pytest.raises(RequestError, match=r"no text fits it: .* or the vocabulary cannot spell the text$"):
        grammars.compiled(Constraint("regex", "yes[{]a", "x"), message=False)


@pytest.mark.parametrize(
    "actual",
    [
        "json",
        {},
        {"type": "xml"},
        {"type": "regex"},
        {"type": "grammar", "grammar": 1},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 1}},
    ],
)
def test_formats_that_are_none(actual: Json) -> None:
    with pytest.raises(RequestError, match="response_format must be ") as caught:
        response_format(actual)
    assert caught.value.param == "response_format"


def test_plain_text_is_no_constraint() -> None:
    assert response_format(None) is response_format({"type": "text"}) is None
