"""Tests of variables in recipes, ${name}: their values and types, and the messages about wrong references."""

from __future__ import annotations

import pytest

from mlcbuild.documents.document import parse
from mlcbuild.recipe import variables
from mlcbuild.recipe.variables import Substitution, substitute


def replaced(text: str, **settings: str) -> Substitution:
    return substitute(parse(text.encode(), "recipe.yaml"), settings)


def problems(substitution: Substitution) -> list[tuple[int, str]]:
    return [(problem.line, problem.message) for problem in substitution.problems]


def test_a_text_that_is_one_reference_becomes_the_value_with_its_type() -> None:
    substitution = replaced("vars: {ctx: 4096, on: true}\nsize: ${ctx}\nflag: ${on}\nname: c-${ctx}\n")
    assert substitution.document.get(("size",)) == 4096
    assert substitution.document.get(("flag",)) is True
    assert substitution.document.get(("name",)) == "c-4096"
    assert not substitution.problems


def test_inside_a_text_a_number_stays_as_it_is_written() -> None:
    assert replaced("vars: {v: 1.10}\nname: v${v}\n").document.get(("name",)) == "v1.10"


def test_two_dollars_write_a_literal_reference() -> None:
    assert replaced("vars: {a: 1}\nx: $${a} ${a}\n").document.get(("x",)) == "${a} 1"


def test_settings_take_the_place_of_values_of_the_same_kind() -> None:
    text = "vars: {ctx: 4096}\nsize: ${ctx}\n"
    assert replaced(text, ctx="8192").document.get(("size",)) == 8192
    ((_, message),) = problems(replaced(text, ctx="large"))
    assert message == "--set ctx=large: variable 'ctx' is a number here, and 'large' is not"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("vars: {ctx: 1}\nx: ${ctx} ${cxt}\n", 2, "variable 'cxt' is unknown; did you mean 'ctx'"),
        ("vars: {ctx: 1}\nx: ${ctx} ${ctx\n", 2, "'${' has no '}'"),
        ("vars: {ctx: 1}\nx: 2\n", 1, "variable 'ctx' is never used"),
        ('vars: {a: 1, b: "${a}"}\nx: ${a}${b}\n', 1, "a variable cannot use another"),
    ],
)
def test_a_wrong_reference_is_a_problem_at_its_place(text: str, line: int, words: str) -> None:
    ((place, message),) = problems(replaced(text))
    assert place == line and words in message


def test_a_misspelt_reference_does_not_make_its_variable_unused() -> None:
    assert len(replaced("vars: {ctx: 1}\nx: ${cxt}\n").problems) == 1


def test_replaced_texts_have_a_limit_which_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "LARGEST", 100)
    substitution = replaced(f"vars: {{a: {'x' * 60}}}\nx: a${{a}}\ny: b${{a}}\nz: c${{a}}\n")
    ((_, message),) = problems(substitution)
    assert "more than 100 letters" in message and "'a' stands for 60" in message
