"""Constrained output: whatever tokens are drawn under the masks, the text is what the constraint asks for."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import resource
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlcbuild_format.errors import RequestError, SetupError
from mlcbuild_format.fields import Json
from mlcbuild_runtime.constraints import grammar, trial
from mlcbuild_runtime.constraints.grammar import Grammars, Matcher
from mlcbuild_runtime.constraints.lark import Constraint
from mlcbuild_runtime.engine.request import Event, Request, Ticket
from mlcbuild_runtime.engine.sampler import Backoff
from mlcbuild_runtime.engine.sequence import Rows, Sequence
from mlcbuild_runtime.executor.batch import Mask
from mlcbuild_runtime.executor.executor import StepResult
from mlcbuild_runtime.executor.sampling_params import SKIP, Floats, Sample, Sampling
from mlcbuild_runtime.openai.response_format import response_format, schema_constraint
from mlcbuild_runtime.text.tokenizer import Tokenizer
from mlcbuild_runtime.text.turns import CrowdedError, NewestFirst, in_nice_thread
from mlcbuild_runtime.text.vocabulary import JsonVocabulary, PieceVocabulary
from numpy.typing import NDArray

from . import shared
from .test_sampling import chi_squared

TINY = shared.ROOT / "recipes" / "models" / "tiny"
SIZE = 512


def _tokenizers() -> dict[str, Tokenizer]:
    """The embedded model's tokenizer, from both kinds of files."""
    both = Tokenizer.load(TINY)
    special = {"bos_token": "<s>", "eos_token": "<|end|>"}
    config = json.loads((TINY / "tokenizer_config.json").read_bytes())
    pieces = PieceVocabulary(TINY / "tokenizer.model", config, special)
    assert isinstance(both.vocabulary, JsonVocabulary)
    return {"json": both, "pieces": Tokenizer(pieces, both.template, both.bos, both.eos)}


TOOL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


def _with_tool_tokens() -> Tokenizer:
    """The embedded model's tokenizer with special tokens as other models have them."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Json

    tokenizer = Json.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TOOL_TOKENS])
    with tempfile.TemporaryDirectory() as area:
        tokenizer.save(f"{area}/tokenizer.json")
        vocabulary = JsonVocabulary(Path(area, "tokenizer.json"))
    both = Tokenizer.load(TINY)
    return Tokenizer(vocabulary, both.template, both.bos, both.eos)


TOKENIZERS = {**_tokenizers(), "tools": _with_tool_tokens()}
GRAMMARS = {name: Grammars(found.vocabulary, SIZE, found.eos) for name, found in TOKENIZERS.items()}


def allowed_by(matcher: Matcher) -> NDArray[np.bool_]:
    """bool [SIZE]: tokens that may come next."""
    return np.unpackbits(matcher.mask().view(np.uint8), count=SIZE, bitorder="little").astype(np.bool_)


def drawn(
    constraint: Constraint,
    seed: int = 0,
    name: str = "json",
    message: bool = False,
    shown: Mapping[int, str] | None = None,
) -> str:
    """The text of tokens drawn at random from those that are allowed."""
    source, tokenizer = random.Random(seed), TOKENIZERS[name]
    matcher = GRAMMARS[name].compiled(constraint, message).matcher()
    stream = tokenizer.stream((), message, shown)
    text = ""
    for _ in range(2000):
        allowed = allowed_by(matcher).nonzero()[0].tolist()
        assert allowed, text
        token = source.choice(allowed)
        matcher.take(token)
        if token in tokenizer.eos:
            break
        text += stream.push(token)
        if matcher.finished:
            break
    else:
        pytest.fail(f"no end: {text}")
    return text + stream.finish()


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
    """It is forced as text, or chosen as text; an end token would end the answer."""
    for text in ("<|end|>", "a <s> b", "[TOOL_CALLS]"):
        schemas: list[dict[str, Json]] = [{"const": text}, {"enum": [text, text + "!"]}]
        for schema in schemas:
            found = json.loads(drawn(schema_constraint(schema, "x"), name="tools"))
            assert found in (text, text + "!")


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


NO_TEXT = (
    "^s cannot be compiled: no text fits it: its conditions exclude each other, a rule or \\$ref leads to"
    " nothing but itself, or the vocabulary cannot spell the text$"
)
RULES = "\n".join(f'r{i}: "a{i}" start?' for i in range(8000))


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


def test_a_mask_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = GRAMMARS["json"].compiled(Constraint("regex", "[a-z]+", "x"), message=False).matcher()
    monkeypatch.setattr("mlcbuild_runtime.constraints.grammar.STEP_SECONDS", 0.0)
    with pytest.raises(RequestError, match=r"it took 0\.\d\d s to see which tokens may come next"):
        matcher.mask()


def test_masks_that_take_long_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is quick enough, and together they would hold up everybody else for the whole answer."""
    matcher = GRAMMARS["json"].compiled(Constraint("regex", "[a-z]+", "x"), message=False).matcher()
    monkeypatch.setattr("mlcbuild_runtime.constraints.grammar.TOKEN_SECONDS", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr("time.thread_time", lambda: next(clock) * 0.06)
    letter = next(token for token in range(SIZE) if TOKENIZERS["json"].vocabulary.token_bytes(token) == b"a")
    for _ in range(4):
        matcher.mask()
        matcher.take(letter)
    with pytest.raises(
        RequestError, match=r"it took 0\.30 s to see which of the tokens may come next 4 times"
    ):
        matcher.after([]).mask()


def test_the_newest_is_first() -> None:
    turns, order = NewestFirst(2), list[str]()

    def work(name: str) -> None:
        with turns.turn():
            order.append(name)

    with ThreadPoolExecutor(4) as pool:
        with turns.turn():
            waiting = []
            for count, name in enumerate(["oldest", "older", "newest"]):
                waiting.append(pool.submit(work, name))
                while turns.waiting < min(count + 1, 2) or (count == 2 and not waiting[0].done()):
                    time.sleep(0.001)
        assert isinstance(waiting[0].exception(), CrowdedError)
        assert [each.exception() for each in waiting[1:]] == [None, None]
    assert order == ["newest", "older"]
    with turns.turn(), ThreadPoolExecutor(1) as pool, pytest.raises(CrowdedError):
        pool.submit(turns.turn(0.01).__enter__).result()  # it waits no longer than it may
    with turns.turn():
        assert turns.waiting == 0


def test_work_in_a_nice_thread() -> None:
    assert in_nice_thread(0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_nice_thread(0, lambda: 1 // 0)
    if sys.platform == "linux":
        before = os.getpriority(os.PRIO_PROCESS, 0)

        def niceness() -> int:
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        assert in_nice_thread(min(before + 3, 19), niceness) == min(before + 3, 19)
        assert niceness() == before


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
        found = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
        while not found.finished:
            forces = len(found._matcher.compute_ff_bytes()) >= 2
            asked += forces
            assert found.after([]).forces == forces
            allowed = allowed_by(found).nonzero()[0]
            found.mask()
            assert found.forces == forces
            found.take(int(draws.choice(allowed)))
    assert asked > 5


def sequence(sample: Sample, pattern: str, sampling: Sampling) -> Sequence:
    matcher = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
    request = Request((1,), 40, sampling)
    ticket = Ticket(lambda: None, None)
    return Sequence(request, lambda event: None, ticket, TOKENIZERS["json"], sample, matcher)


def told(sample: Sample, sequence: Sequence, row: Floats) -> Event:
    """Returns the event of the next token, from logits [vocab]."""
    sequence.length = len(sequence.tokens) - 1
    logits, params = row[None].copy(), sequence.sampling_params(1)
    masks = [] if sequence.mask is None else [(0, sequence.mask)]
    result = StepResult(sample(logits, params, masks), lambda: logits)
    return sequence.consume(Rows(result, 0, 1))[0]


def answer(sample: Sample, sequence: Sequence, rows: Floats) -> tuple[int, ...]:
    for row in rows:
        assert told(sample, sequence, row).error is None
    return tuple(sequence.tokens[1:])


@pytest.mark.parametrize("top_k", [0, SIZE - 1])
def test_constrained_answers_are_as_likely_as_among_those_that_fit(sample: Sample, top_k: int) -> None:
    """Whether what the model wants is tried first (there is no filter) or not."""
    pattern, draws, total = "[a-d][ef]{4}", np.random.default_rng(3), 4000
    rows = draws.normal(0, 0.5, (2, SIZE)).astype(np.float32)
    matcher = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
    known = np.zeros(SIZE, np.bool_)
    known[allowed_by(matcher)] = True
    rows[:, known] += 4  # about half of what the model wants
    exact: dict[tuple[int, ...], float] = {}
    for first in allowed_by(matcher).nonzero()[0].tolist():
        after = matcher.after([first])
        for second in allowed_by(after).nonzero()[0].tolist():
            p, q = (
                np.exp(row[token]) / np.exp(row[allowed_by(open_)]).sum()
                for row, token, open_ in ((rows[0], first, matcher), (rows[1], second, after))
            )
            exact[first, second] = float(p * q)
    assert sum(exact.values()) == pytest.approx(1)
    counts = Counter(
        answer(sample, sequence(sample, pattern, Sampling(1.0, top_k=top_k, seed=seed)), rows)
        for seed in range(total)
    )
    assert chi_squared(counts, exact, total) < 5


def test_the_most_likely_of_those_that_fit(sample: Sample) -> None:
    draws, pattern = np.random.default_rng(5), "([a-z]{1,3} |[0-9]+;)*"
    rows = draws.standard_normal((12, SIZE)).astype(np.float32)
    found = sequence(sample, pattern, Sampling(0))
    matcher = GRAMMARS["json"].compiled(Constraint("regex", pattern, "x"), message=False).matcher()
    for row in rows:
        assert not told(sample, found, row).last
        wanted = int(np.where(allowed_by(matcher), row, -np.inf).argmax())
        assert found.tokens[-1] == wanted
        matcher.take(wanted)


def test_answers_that_follow_by_themselves_need_no_mask(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Matcher, "_bits", None)
    text = "abcabcabcabc"
    for sampling in (Sampling(0), Sampling(1.0, seed=1)):
        follows = sequence(sample, "[abc]*", sampling)
        for token in TOKENIZERS["json"].vocabulary.encode(text, special=False)[1:]:
            row = np.zeros(SIZE, np.float32)
            row[token] = 100
            assert told(sample, follows, row).error is None


@pytest.mark.parametrize(("top_k", "follows", "expected"), [(0, False, 11), (0, True, 0), (5, True, 11)])
def test_masks_are_there_before_the_model_is_asked(
    sample: Sample, top_k: int, follows: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one will be needed: what the model wants did not fit, or cannot be tried."""
    monkeypatch.setattr(Backoff, "LONGEST", 1 << 30)
    found = sequence(sample, "[ab]{50}", replace(Sampling(1.0, seed=1), top_k=top_k))
    token_id = TOKENIZERS["json"].vocabulary.token_id
    row, masks = np.zeros(SIZE, np.float32), 0
    row[token_id("a" if follows else "z")] = 100
    for _ in range(11):
        told(sample, found, row)
        found.length += 1
        masks += found.sampling_params(1) != [SKIP] and found.mask is not None
    assert abs(masks - expected) <= 3, "tries that are made between"


def test_where_a_text_must_come_no_mask_is_made(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    made, bits = list[Matcher](), Matcher._bits

    def counted(self: Matcher) -> Mask:
        made.append(self)
        return bits(self)

    monkeypatch.setattr(Matcher, "_bits", counted)
    found, logits = sequence(sample, "[ab]hello[cd]", Sampling(0)), np.zeros((1, SIZE), np.float32)
    result = StepResult(sample(logits, found.sampling_params(1), []), lambda: logits)
    assert found.advance(Rows(result, 0, 1))
    assert found.next_input() is None and len(made) == 1
    assert "".join(event.text for event in found.take_events()) in ("ahello", "bhello")


def test_a_guess_leaves_logits_as_they_are(sample: Sample) -> None:
    """How far it is ahead of others is looked at after it."""
    found, row = sequence(sample, "[ab]{9}", Sampling(0)), np.zeros(SIZE, np.float32)
    assert found.propose(row) and not row.any()
    assert TOKENIZERS["json"].vocabulary.token_bytes(found.draft.tokens[0]).strip(b"ab") == b""


def test_log_probabilities_are_of_all_tokens(sample: Sample) -> None:
    """So the library must not mask them."""
    found = sequence(sample, "[ab]{50}", Sampling(0, top_k=5))
    found.request = replace(found.request, logprobs=1, sampling=Sampling(1.0, top_k=5, seed=1))
    row = np.zeros(SIZE, np.float32)
    row[TOKENIZERS["json"].vocabulary.token_id("z")] = 100
    event = told(sample, found, row)
    assert found.mask is None and event.text in "ab" and event.logprob is not None
    assert event.logprob.logprob == pytest.approx(-100)
    assert event.alternatives[0].logprob == pytest.approx(0)


def test_backoff_skips_more_tokens_after_each_violation() -> None:
    """Tries in vain become rare, and come back with success."""

    def tries(fits: List[bool], start: int) -> list[bool]:
        found = []
        for place, fit in enumerate(fits, start):
            found.append(backoff.due(place))
            if found[-1]:
                backoff.settle(place, fit)
        return found

    backoff = Backoff()
    assert all(tries([True] * 20, 0))
    assert 5 <= sum(tries([False] * 100, 20)) <= 7
    assert sum(tries([True] * 100, 120)) > 70


def test_a_trial_survives_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial.Trial(GRAMMARS["json"]._tokens, 2.0)
    try:
        assert found.run('start: "a"').error == ""
        assert found._child.process is not None
        found._child.process.kill()
        found._child.process.wait()
        assert "nothing" in found.run("start: nothing").error
        found._child.end()
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(SetupError, match=r"that tries constraints cannot start: .*/nowhere/python"):
            found.run('start: "a"')
        monkeypatch.undo()
        monkeypatch.setattr(found._child, "_module", "nowhere")
        with pytest.raises(SetupError, match="has failed: see the lines above"):
            found.run('start: "a"')
    finally:
        found.close()


def test_a_trial_ends_with_its_grammars() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    grammars.compiled(Constraint("regex", "a", "x"), message=False)
    child = grammars._trials[0]._child.process
    assert child is not None and child.poll() is None
    del grammars
    gc.collect()
    assert child.poll() is not None


def test_a_trial_takes_no_more_than_its_time_and_memory() -> None:
    found = trial.Trial(GRAMMARS["json"]._tokens, 0.2)
    try:
        for multiple in (999983, 1999993):  # the second reaches its memory first
            found._seconds = 0.2 if multiple < 1_000_000 else 60.0
            with pytest.raises(trial.TooCostlyError):
                found.run(f'start: %json {{"type": "integer", "multipleOf": {multiple}}}')
        assert found.run('start: "a"').error == ""
    finally:
        found.close()


def test_only_so_many_wait_for_a_second_trial() -> None:
    """Quick constraints pass meanwhile."""
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    costly = [schema_constraint({"type": "integer", "multipleOf": 999983 + i}, "s") for i in range(5)]
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(grammars.compiled, constraint, False) for constraint in costly]
        while grammars._slow_turn.waiting < grammar.SLOW_WAITING:
            time.sleep(0.01)
        grammars.compiled(Constraint("regex", "quick", "x"), message=False)
        assert not all(each.done() for each in asked)
        refused = [error for each in asked if isinstance(error := each.exception(), RequestError)]
    assert len(refused) == 5 and {error.status for error in refused} == {400, 503}
    for error in refused:
        expected = "and so do others that came later" if error.status == 503 else "more than 2 s or 128 MiB"
        assert expected in str(error)


def test_a_model_without_an_end_cannot_be_constrained() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, ())
    with pytest.raises(RequestError, match="no end token"):
        grammars.compiled(Constraint("regex", "a", "x"), message=False).matcher()


def test_constraints_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    constraints = [Constraint("regex", f"number {i}", "x") for i in range(20)]
    first = grammars.compiled(constraints[0], message=False)
    monkeypatch.setattr("mlcbuild_runtime.constraints.grammar.KEPT_BYTES", 3 * first.bytes + first.bytes // 2)
    assert grammars.compiled(constraints[0], message=False) is first
    for constraint in constraints:
        grammars.compiled(constraint, message=False)
    assert 2 <= len(grammars._kept) <= 4
    assert grammars.compiled(constraints[-1], message=False) is not first
    assert grammars.compiled(constraints[0], message=False) is not first


LATE = "[a-z]{40}(a{1000}){1000}"
"""A regular expression that can be followed for 40 letters only."""


def test_a_constraint_that_fails_is_forgotten_with_its_memory() -> None:
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    constraint = Constraint("regex", LATE, "x")
    compiled = weakref.ref(grammars.compiled(constraint, message=False))
    found = compiled()
    assert found is not None
    matcher, letter = found.matcher(), TOKENIZERS["json"].vocabulary.token_id("a")
    del found
    with pytest.raises(RequestError, match="the constraint cannot be followed: it is too complex"):
        for _ in range(60):
            matcher.mask()
            matcher.take(letter or 0)
    assert not grammars._kept
    del matcher
    assert compiled() is None


class Words:
    """A vocabulary of two words and an end."""

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


def test_outcomes_of_trials_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constraint that was refused, or that had to make room for others, is not tried again."""
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    wanted = Constraint("regex", "quick", "x")
    first = grammars.compiled(wanted, message=False)
    for _ in range(3):
        with pytest.raises(RequestError, match="it is too complex"):
            grammars.compiled(Constraint("regex", "(a{1000}){1000}", "x"), message=False)
        grammars.close()
        grammars._kept.clear()
        assert grammars.compiled(wanted, message=False) is not first
    monkeypatch.setattr("mlcbuild_runtime.constraints.grammar.TRIALS", 1)
    grammars = Grammars(TOKENIZERS["json"].vocabulary, SIZE, TOKENIZERS["json"].eos)
    for source in ("one", "two"):
        grammars.compiled(Constraint("regex", source, "x"), message=False)
    assert [source for _, source, _ in grammars._outcomes] == ["two"]


def resident(pid: int) -> int:
    """Returns the memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def form(kind: str, source: str) -> dict[str, Any]:
    return {"type": kind, kind: source}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


ATTACKS: dict[str, list[dict[str, Any]]] = {
    "counts": [form("regex", f"(a{{{1000 - i}}}){{1000}}") for i in range(40)],
    "late counts": [form("regex", f"[a-z]{{{20 + i}}}(a{{1000}}){{1000}}") for i in range(40)],
    "texts": [of_schema({"const": "x" * (250_000 - i)}) for i in range(40)],
    "shorter texts": [of_schema({"const": "x" * (20_000 - i)}) for i in range(40)],
    "enums": [of_schema({"enum": [f"{i} {j}" for j in range(6000)]}) for i in range(40)],
    "multiples": [of_schema({"type": "integer", "multipleOf": 99991 + i}) for i in range(40)],
    "rules": [form("grammar", f"start: r0\n{RULES}\nx{i}: 'x'") for i in range(40)],
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_constraints_do_not_take_a_servers_memory(toy_bundle: Path, attack: str) -> None:
    """Others are answered meanwhile."""
    with shared.serving(toy_bundle) as server, ThreadPoolExecutor(30) as pool:

        def answer(wanted: dict[str, Any] | None, timeout: float = shared.WAIT) -> httpx.Response:
            body = {"prompt": "a", "max_tokens": 60, "response_format": wanted}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout, verify=shared.PLAIN)

        answer(form("regex", "[a-z]{3}"))
        rest = resident(server.process.pid)
        asked = [pool.submit(answer, wanted, 4 * shared.WAIT) for wanted in ATTACKS[attack]]
        gaps = list[float]()
        while not all(each.done() for each in asked):
            begun = time.monotonic()
            assert answer(None).status_code == answer(form("regex", "[a-z]{3}")).status_code == 200
            gaps.append(time.monotonic() - begun)
        for each in asked:
            response = each.result()
            assert response.status_code in (200, 400, 503), response.text
        server.wait_idle()
        assert max(gaps) < shared.WAIT / 3, "nobody waits for the end of an attack"
        grown = resident(server.process.pid) - rest
        assert grown < 400 << 20


@pytest.mark.parametrize(
    "found",
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
def test_formats_that_are_none(found: Json) -> None:
    with pytest.raises(RequestError, match="response_format must be ") as caught:
        response_format(found)
    assert caught.value.param == "response_format"


def test_plain_text_is_no_constraint() -> None:
    assert response_format(None) is response_format({"type": "text"}) is None
