"""Tests of reading YAML with positions: which values a text has, what is refused, and which position an error
states."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlcbuild.documents.document import (
    MAX_BYTES,
    MAX_DEPTH,
    Data,
    Document,
    Place,
    Where,
    parse,
    read,
    scalar,
)
from mlcbuild.errors import InputError

NO_SPACE = "is not a space in YAML: type a plain space, or put the text in quotes"
QUOTE = 'a text with a brace or bracket must be in quotes: "dist/{model}", "${name}"'


def problems(data: bytes) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse(data, "f")
    return [str(problem).removeprefix("f:") for problem in caught.value.problems]


def test_places_of_every_key_and_value() -> None:
    document = parse(b"# about\na: 1\nb:\n  - x\n  - {c: [2, 'd']}\n\xc3\xa9\xc3\xa9: {f: g}\n", "f")
    assert document.data == {"a": 1, "b": ["x", {"c": [2, "d"]}], "éé": {"f": "g"}}
    assert document.values == {
        (): (2, 1),
        ("a",): (2, 4),
        ("b",): (4, 3),
        ("b", 0): (4, 5),
        ("b", 1): (5, 5),
        ("b", 1, "c"): (5, 9),
        ("b", 1, "c", 0): (5, 10),
        ("b", 1, "c", 1): (5, 13),
        ("éé",): (6, 5),
        ("éé", "f"): (6, 9),
    }
    assert document.keys == {
        ("a",): (2, 1),
        ("b",): (3, 1),
        ("b", 1, "c"): (5, 6),
        ("éé",): (6, 1),
        ("éé", "f"): (6, 6),
    }
    assert document.place(("b", 1, "c", 9)) == Place("f", 5, 9)
    assert document.key_place(("b", 0)) == Place("f", 4, 5)
    assert document.get(("b", 1, "c")) == [2, "d"]
    assert document.get(("b", "c")) is None


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_newlines_and_byte_order_marks(mark: bytes, newline: bytes) -> None:
    document = parse(mark + newline.join([b"a: 1", b"b:", b"  c: x", b""]), "f")
    assert document.data == {"a": 1, "b": {"c": "x"}}
    assert document.values["b", "c"] == (3, 6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("0", 0),
        ("-12", -12),
        ("+7", 7),
        ("1.50", 1.5),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("3.", 3.0),
        ("-2.5E+3", -2500.0),
        ("9" * 18, 10**18 - 1),
        ("-" + "9" * 18, 1 - 10**18),
        # What versions of YAML read differently, or cannot be held, is text.
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("y", "y"),
        ("012", "012"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("e5", "e5"),
        (".", "."),
        ("1.2.3", "1.2.3"),
        ("9" * 5000, "9" * 5000),
        ("١٢", "١٢"),
    ],
)
def test_scalars(text: str, value: Data) -> None:
    actual = scalar(text)
    assert actual == value
    assert type(actual) is type(value)


def test_quoted_and_block_text_stays_text() -> None:
    document = parse(b"""a: '1'\nb: "true"\nc: |\n  2\nd: >-\n  3\ne: 4\nf: true\n""", "f")
    assert document.data == {"a": "1", "b": "true", "c": "2\n", "d": "3", "e": 4, "f": True}
    assert document.texts == {("e",): "4", ("f",): "true"}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ["1:1: the file is empty"]),
        (b"# only a comment\n", ["1:1: the file is empty"]),
        (b"---\n...\n", ["1:1: the file is empty"]),
        (b"a: 1\nb: \xff\xfe", ["2:4: the file is not UTF-8: byte 0xff (invalid start byte)"]),
        (b"\xef\xbb\xbf\xc3\xa9: \xc3", ["1:4: the file is not UTF-8: byte 0xc3 (unexpected end of data)"]),
        ("a: é".encode("utf-16"), ["1:1: the file is UTF-16: save it as UTF-8"]),
        (b"a: 1\nb: x\0y", ["2:5: the control character U+0000 may not appear in a YAML file: remove it"]),
        (b"a:\n\tb: 1", ["2:1: a tab may not indent a line: use spaces"]),
        (b"a:\n  b: 1\n \tc: 2", ["3:2: a tab may not indent a line: use spaces"]),
        (b"a: @x", ["1:4: a value may not start with '@': put it in quotes"]),
        (b"a: `x`", ["1:4: a value may not start with '`': put it in quotes"]),
        (b"a: b: c", ["1:5: ': ' may not stand here: start a new line, or put the text in quotes"]),
        (b"a: *x\nb: &y 1", [
            "1:4: the alias *x is not allowed: write the value out",
            "2:4: the anchor &y is not allowed: there are no aliases",
        ]),
        (b"a: {<<: {b: 1}}", ["1:5: the merge key << is not allowed: write the keys out"]),
        ("a: 1\n\ufeffb: 2".encode(), [
            "2:1: the byte order mark U+FEFF may not appear in a YAML file: remove it"
        ]),
        ("a: x\u2028b: 2".encode(), [
            "1:5: the character U+2028 (LINE SEPARATOR) may not appear in a YAML file: remove it"
        ]),
        ("a: x\x85".encode(), ["1:5: the control character U+0085 may not appear in a YAML file: remove it"]),
        ("a:\xa01\nb: 2".encode(), [
            f"1:3: the character U+00A0 (NO-BREAK SPACE) {NO_SPACE}",
            "2:2: ': ' may not stand here: start a new line, or put the text in quotes",
        ]),
        ("a:\n  b: 1\n \u3000c: 2".encode(), [f"3:2: the character U+3000 (IDEOGRAPHIC SPACE) {NO_SPACE}"]),
        (b"a: {b: dist/{model}}", [
            f"1:13: this is not YAML: while parsing a flow mapping, "
            f"did not find expected ',' or '}}'; {QUOTE}"
        ]),
        (b"a: {b: ${x}}", [
            f"1:9: this is not YAML: while parsing a flow mapping, did not find expected ',' or '}}'; {QUOTE}"
        ]),
        (b"a: [x{y}]", [
            f"1:6: this is not YAML: while parsing a flow sequence, did not find expected ',' or ']'; {QUOTE}"
        ]),
        (b"a:\n  b: {model}/x\n", [
            f"2:13: this is not YAML: while parsing a block mapping, did not find expected key; {QUOTE}"
        ]),
        (b"? [a, b]\n: 1\n? {c: d}\n: {e: f}\n", [
            "1:3: a list or a mapping cannot be a key",
            "3:3: a list or a mapping cannot be a key",
        ]),
        (b"*a : 1", ["1:1: the alias *a is not allowed: write the value out"]),
    ],
)  # fmt: skip
def test_unreadable(data: bytes, expected: list[str]) -> None:
    assert problems(data) == expected


@pytest.mark.parametrize(
    "data", [b"{a: 1", b"[1, 2", b"a: 'x", b"a: 1\n b: 2", b"%FOO\n---\na", b"- a\nb: c"]
)
def test_broken_syntax_has_a_place(data: bytes) -> None:
    (actual,) = problems(data)
    assert "this is not YAML: " in actual or "': ' may not stand here" in actual
    assert all(part.isdigit() for part in actual.split(":")[:2])


@pytest.mark.parametrize(
    ("data", "value", "expected"),
    [
        (b"a: 1\nb: 2\na: {c: 3}\n", {"a": 1, "b": 2}, ["3:1: the key 'a' appears twice; first on line 1"]),
        (b"a: 1\n'a': 2", {"a": 1}, ["2:1: the key 'a' appears twice; first on line 1"]),
        (b"x: {b: 1, b: [2], b: 3}", {"x": {"b": 1}}, [
            "1:11: the key 'b' appears twice; first on line 1",
            "1:19: the key 'b' appears twice; first on line 1",
        ]),
        (b"a: 1\n---\nb: 2\n---\nc: [", {"a": 1}, ["2:1: a second document starts here: a file holds one"]),
        (b"a: !!str 5", {"a": 5}, [
            "1:4: the tag tag:yaml.org,2002:str is not allowed: quote a value to make it text"
        ]),
        (b"a: !x {b: 1}", {"a": {"b": 1}}, ["1:4: the tag !x is not allowed: quote a value to make it text"]),
        (b"a: &x 1", {"a": 1}, ["1:4: the anchor &x is not allowed: there are no aliases"]),
        (b'a: "x\\0y"', {"a": "x?y"}, ["1:4: the control character U+0000 may not appear in text"]),
        ("a:\xa01".encode(), "a:\xa01", [f"1:3: the character U+00A0 (NO-BREAK SPACE) {NO_SPACE}"]),
        ("a: 4\u200b # c\n".encode(), {"a": "4\u200b"}, [
            f"1:5: the character U+200B (ZERO WIDTH SPACE) {NO_SPACE}"
        ]),
        ("\xa0a: 4\n".encode(), {"\xa0a": 4}, [f"1:1: the character U+00A0 (NO-BREAK SPACE) {NO_SPACE}"]),
        (b"a: \"x\\uFEFF\"", {"a": "x?"}, ["1:4: the byte order mark U+FEFF may not appear in text"]),
        (b'"a\\e": 1', {"a?": 1}, ["1:1: the control character U+001B may not appear in text"]),
    ],
)  # fmt: skip
def test_faults_that_leave_the_rest_readable(data: bytes, value: Data, expected: list[str]) -> None:
    if b"[" in data[-2:]:  # what follows the first document must still be YAML
        assert problems(data)[0] == expected[0]
        return
    document = parse(data, "f")
    assert document.data == value
    assert [str(problem) for problem in document.problems] == [f"f:{item}" for item in expected]


def test_quoted_text_holds_what_plain_text_may_not() -> None:
    data = "a: '\xa0x\u3000'\nb: x\xa0y\n\"<<\": {c: 1}\n"
    assert parse(data.encode(), "f").data == {"a": "\xa0x\u3000", "b": "x\xa0y", "<<": {"c": 1}}


def test_keys_are_text() -> None:
    assert parse(b"no: a\n1.10: b\ntrue: c\n~: d\n", "f").data == {
        "no": "a",
        "1.10": "b",
        "true": "c",
        "~": "d",
    }


@pytest.mark.parametrize("bracket", [b"[", b"{a: ", b"- ", b"? "])
def test_depth_is_limited(bracket: bytes) -> None:
    count = (MAX_BYTES - 10) // len(bracket)
    assert f"nested more than {MAX_DEPTH} levels deep" in problems(bracket * count)[-1]
    parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, "f")


def test_a_billion_laughs_are_refused() -> None:
    lines = ["a0: &a0 [ha, ha]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "2:10: the alias *a0 is not allowed: write the value out" in problems("\n".join(lines).encode())


def test_size_is_limited() -> None:
    expected = f"the file is larger than {MAX_BYTES} bytes, the limit for a file written by hand"
    assert problems(b"a: 1\n" * MAX_BYTES) == [f" {expected}"]
    document = parse(b"a: " + b"x" * (MAX_BYTES - 3), "f")
    assert isinstance(document.data, dict)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(InputError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: cannot read this file: ")
        assert reason in str(caught.value)
    (tmp_path / "f.yaml").write_bytes(b"a: 1")
    assert read(tmp_path / "f.yaml").data == {"a": 1}


def test_the_pure_python_parser_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"a: [1, {b: 'c'}]\nd:\n  - e\n  -\nf: |\n  text\ng: *x\n"
    with pytest.raises(InputError) as first:
        parse(data, "f")
    document = parse(data[:-6], "f")
    monkeypatch.delattr(yaml, "CSafeLoader")
    with pytest.raises(InputError) as second:
        parse(data, "f")
    assert str(first.value) == str(second.value)
    assert parse(data[:-6], "f") == document


@given(st.binary(max_size=200))
def test_any_bytes_give_data_or_problems(data: bytes) -> None:
    _parse_or_fail(data)


@given(st.lists(st.sampled_from([*"ab:-?[]{},&*!|>'\"%@#\n\t\r1~\\\0é ", "---", "...", "\n  "])))
def test_any_punctuation_gives_data_or_problems(parts: list[str]) -> None:
    _parse_or_fail("".join(parts).encode())


def _parse_or_fail(data: bytes) -> None:
    try:
        document = parse(data, "f")
    except InputError as error:
        assert error.problems
        return
    # Every value and key has its place inside the file.
    lines = data.count(b"\n") + data.count(b"\r") + 2
    for where in _paths(document.data):
        assert 1 <= document.values[where][0] <= lines
        assert isinstance(document, Document)


def _paths(data: Data, where: Where = ()) -> list[Where]:
    if isinstance(data, dict):
        return [where, *(path for key, value in data.items() for path in _paths(value, (*where, key)))]
    if isinstance(data, list):
        return [where, *(path for i, value in enumerate(data) for path in _paths(value, (*where, i)))]
    return [where]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text("abc no:-#'\"é\n", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abn", max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(_JSON)
def test_what_pyyaml_writes_is_read_back(value: Data) -> None:
    if value is not None:
        text = yaml.safe_dump({"top": value}, allow_unicode=True)
        assert parse(text.encode(), "f").data == {"top": value}
