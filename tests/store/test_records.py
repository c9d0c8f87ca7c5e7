"""Tests of reading records: every field is checked, whether the second line is compared as text or parsed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mlcbuild.build.execute import Options, execute
from mlcbuild.build.graph import Graph, Input, Step
from mlcbuild.canon import Entry, Tree, canonical, canonical_plain, tree_digest
from mlcbuild.store import record_form, records
from mlcbuild.store.records import BuildInfo, Expected, Measured, Preimage, Record
from mlcbuild.store.store import Store

CODE = {f"package/module_{number}.py": f"{number:064x}" for number in range(3)}
INPUT = Tree.of([Entry("a/b.txt", "1" * 64, 7), Entry("c", "2" * 64, 0)])
PREIMAGE = Preimage("module:function", {"text": "é\n", "n": [1, None]}, CODE, {"tvm": "1"}, {"in": INPUT})
FILES = Tree.of([Entry("out.txt", "3" * 64, 12)])
RECORD = Record.create(PREIMAGE.key(), FILES, BuildInfo("step/name", PREIMAGE, Measured(1, 2, 3)))


def rows(tree: Tree) -> bytes:
    return canonical([[entry.path, entry.digest, entry.size] for entry in tree.files])


def expected(preimage: Preimage = PREIMAGE) -> Expected:
    inputs = {argument: rows(tree) for argument, tree in preimage.inputs.items()}
    code, tools = canonical(preimage.code), canonical(preimage.tools)
    return Expected.of(preimage.action, code, inputs, canonical(preimage.params), tools)


@pytest.fixture(autouse=True)
def no_code_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_form, "_codes", {})


def outcome(data: bytes, by: Expected | None = None) -> str:
    """Returns the content of a record as text, or the reason why it is refused."""
    try:
        record = Record.checked(RECORD.key, data, None if by is None else lambda: by)
    except ValueError as error:
        return f"refused: {error}"
    return f"{record} {record.info}"


def test_a_record_has_the_text_that_its_planner_expects() -> None:
    assert expected().matches(RECORD.rest, RECORD.tree)
    assert outcome(RECORD.encode(), expected()) == outcome(RECORD.encode())
    assert "refused" not in outcome(RECORD.encode())


def test_what_an_action_made_is_expected_by_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the records of a real build are read without parsing their second line, which lists a
    step's inputs: it equals the text that the reader expects for the same step."""
    steps = [
        Step("a", "tests.actions:text", {"text": "a"}, {}, tools={"ld": "2"}),
        Step("b", "tests.actions:text", {"text": "b"}, {"x": Input("a"), "y": Input("a", ("*.txt",))}),
    ]
    store, options = Store(tmp_path), Options(executor="inline")
    assert execute(Graph(steps), store, options).ok

    def fail(rest: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(records, "parse_about", fail)
    result = execute(Graph(steps), Store(tmp_path), options)
    assert [step.status for step in result.steps] == ["reused", "reused"]


@pytest.mark.parametrize(
    "other",
    [
        Preimage("module:other", PREIMAGE.params, CODE, PREIMAGE.tools, PREIMAGE.inputs),
        Preimage(PREIMAGE.action, {"text": "e"}, CODE, PREIMAGE.tools, PREIMAGE.inputs),
        Preimage(PREIMAGE.action, PREIMAGE.params, {}, PREIMAGE.tools, PREIMAGE.inputs),
        Preimage(PREIMAGE.action, PREIMAGE.params, CODE, {"tvm": "2"}, PREIMAGE.inputs),
        Preimage(PREIMAGE.action, PREIMAGE.params, CODE, PREIMAGE.tools, {"in": FILES}),
        Preimage(PREIMAGE.action, PREIMAGE.params, CODE, PREIMAGE.tools, {"other": INPUT}),
    ],
    ids=["action", "params", "code", "tools", "files of an input", "name of an input"],
)
def test_a_record_of_another_pre_image_is_refused_under_this_key(other: Preimage) -> None:
    forged = Record.create(RECORD.key, FILES, BuildInfo("step/name", other))
    words = "refused: its key does not follow from the inputs that it lists"
    assert not expected().matches(forged.rest, forged.tree)
    assert outcome(forged.encode(), expected()) == outcome(forged.encode()) == words


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"measured":[1,2,3]', b'"measured":[1,2]'),
        (b'"measured":[1,2,3]', b'"measured":[1,2,-3]'),
        (b'"measured":[1,2,3]', b'"measured":[1,2,3.0]'),
        (b'"measured":[1,2,3]', b'"measured":[1,2,03]'),
        (b'"measured":[1,2,3]', b'"measured":[1,2,true]'),
        (b'"measured":[1,2,3]', b'"measured":[1,2,9223372036854775807]'),
        (b'"shared":true', b'"shared":1'),
        (b'"step":"step/name"', b'"step":""'),
        (b'"step":"step/name"', b'"step":"a\\u0000"'),
        (b'"step":"step/name"', b'"step":7'),
        (b'"step":"step/name"', b'"step":"' + b"x" * 5000 + b'"'),
        (b'"shared":true', b'"shared":true,"shared":true'),
        (b'"code":{', b'"code":{},"code":{'),
        (b'"params":', b'"code":{},"params":'),
        (b'"tree":"' + FILES.digest[:1].encode(), b'"tree":"g'),
        (b"}\n", b',"more":1}\n'),
    ],
)
def test_a_field_of_the_wrong_form_is_refused_on_every_path(old: bytes, new: bytes) -> None:
    head, line = RECORD.encode().split(b"\n", 1)
    assert old in line
    data = head + b"\n" + line.replace(old, new)
    first = outcome(data)
    assert first.startswith("refused: ")
    assert outcome(RECORD.encode()), "now the text of the source files is known"
    assert record_form._codes
    assert outcome(data).startswith("refused: ") and outcome(data, expected()).startswith("refused: ")


def test_costs_that_are_no_list_are_refused_in_the_expected_text_too() -> None:
    start = RECORD.rest.index(b'"measured":[')
    end = RECORD.rest.index(b"]", start)
    data = RECORD.encode().replace(RECORD.rest, RECORD.rest[:end] + b"," + RECORD.rest[end:])
    assert outcome(data).startswith("refused: ") and outcome(data, expected()).startswith("refused: ")


def test_other_lines_are_right_and_differ() -> None:
    """Checks that a record whose second line has another order of fields, such as another version may write,
    is parsed and accepted."""
    parsed = record_form.parse(RECORD.rest)
    head = RECORD.encode().split(b"\n", 1)[0]
    for order in (
        sorted(parsed, reverse=True),
        ["code", "action", *sorted(parsed.keys() - {"code", "action"})],
    ):
        line = json.dumps({name: parsed[name] for name in order}, ensure_ascii=False).encode()
        data = head + b"\n" + line + b"\n"
        assert not expected().matches(line, RECORD.tree)
        assert "refused" not in outcome(data, expected())


def test_all_ways_of_reading_agree_on_damaged_records() -> None:
    """Checks on randomly damaged records that all ways of reading have the same result: parsing the whole
    record, parsing it with unknown source files, and comparing its text with the expected one."""
    chance = random.Random(7)
    data = RECORD.encode()
    texts = [
        b"{",
        b"}",
        b'"',
        b"\\",
        b",",
        b"[",
        b"]",
        b"0",
        b"true",
        b'"code":{}',
        b"\xff",
        b" ",
        b'},"inputs":',
    ]
    accepted = 0
    for _ in range(3000):
        at, length = chance.randrange(len(data)), chance.choice((0, 1, 1, 2, 30))
        damaged = data[:at] + chance.choice([b"", *texts, data[at : at + 9]]) + data[at + length :]
        record_form._codes.clear()
        whole = outcome(damaged)
        outcome(data)
        for other in (outcome(damaged), outcome(damaged, expected())):
            if whole.startswith("refused"):
                assert other.startswith("refused")
            else:
                assert other == whole
        accepted += not whole.startswith("refused")
    assert 0 < accepted < 1000


def test_a_brace_in_a_path_of_the_source_is_read() -> None:
    preimage = Preimage("m:f", {}, {'a"},"inputs":{.py': "1" * 64}, {}, {})
    record = Record.create(preimage.key(), FILES, BuildInfo("s", preimage))
    for _ in range(2):
        assert Record.checked(record.key, record.encode()).info.preimage == preimage


def test_records_of_one_action_share_their_source_files() -> None:
    other = Preimage(PREIMAGE.action, {}, CODE, {}, {})
    second = Record.create(other.key(), FILES, BuildInfo("s", other))
    Record.checked(RECORD.key, RECORD.encode())
    created = [Record.checked(item.key, item.encode()).info for item in (RECORD, second)]
    assert created[0].preimage.code is created[1].preimage.code
    assert created[0].preimage == PREIMAGE and created[1].preimage == other


def test_the_short_way_to_canonical_json_gives_the_same_bytes() -> None:
    values: list[object] = ["", "é\u2028\x7f", {"b": [1, True, None], "a": {"z": "", "é": "\\"}}, [], {}]
    for value in values:
        assert canonical_plain(value) == canonical(value)
    with pytest.raises(ValueError, match="must be UTF-8"):
        canonical_plain("\ud800")
    assert tree_digest(reversed(INPUT.files)) == INPUT.digest, "the order of files does not matter"
