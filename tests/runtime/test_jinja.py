"""Tests of rendering chat templates in the test's process: what a template may use, and the three kinds of
results (the prompt, a refusal by the template, and a failure)."""

from __future__ import annotations

from typing import Any

import pytest
from mlcbuild_runtime.text import jinja


def answer(source: str, **variables: Any) -> dict[str, Any]:
    return jinja._answer({"source": source, "variables": variables}, {}, 0)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ name }}", "<&>"),
    ],
)
def test_templates_have_what_transformers_gives_them(source: str, text: str) -> None:
    assert answer(source, name="<&>") == {"text": text}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'<' + a + '>'", '<{"é": [1]}>'),
        ("a ~ ''", '{"é": [1]}'),
        ("a", '{"é": [1]}'),
        ("a | tojson(indent=0)", '{\n"é": [\n1\n]\n}'),
        ("a is mapping and a is not string and 'é' in a", "True"),
        ("a | items | list", "[('é', [1])]"),
    ],
)
def test_arguments_of_tool_calls_are_objects_and_texts(expression: str, text: str) -> None:
    """Checks that templates may read the arguments as an object (transformers) or append them (OpenAI)."""
    source = f"{{% set a = messages[1].tool_calls[0].function.arguments %}}{{{{ {expression} }}}}"
    call = {"function": {"name": "f", "arguments": {"é": [1]}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call, None]}, None]
    assert answer(source, messages=messages) == {"text": text}


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("{{ raise_exception('no system role') }}", {"refused": "no system role"}),
        ("{{ raise_exception('x' * 9999) }}", {"refused": "x" * jinja.ERROR}),
        ("{{ 1 / 0 }}", {"failed": "ZeroDivisionError: division by zero"}),
        ('{{ "\\ud800" }}', {"failed": "there is a part of a character, a surrogate, in its text"}),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {"failed": jinja._reason(RecursionError())}),
    ],
)  # fmt: skip
def test_refusals_of_a_template_are_told_from_its_failures(source: str, result: dict[str, str]) -> None:
    assert answer(source) == result


def test_the_sandbox_is_closed() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ items.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(items) }}",
    ):
        assert answer(source, items=[]).get("failed", "").startswith("SecurityError")


def test_a_text_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja, "TEXT", 10)
    template = jinja.compiled("{% for i in range(n) %}é{% endfor %}")
    assert jinja._written(template, {"n": 5}) == "é" * 5
    with pytest.raises(jinja._TooLongError):
        jinja._written(template, {"n": 6})


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}
    request: dict[str, Any] = {"source": "{{ n }}", "variables": {"n": 1}}
    assert jinja._answer(request, kept, 0) == {"text": "1"} and set(kept) == {"{{ n }}"}
    monkeypatch.setattr(jinja, "compiled", lambda source: pytest.fail("it was compiled before"))
    assert jinja._answer(request, kept, 0) == {"text": "1"}


def test_long_requests_have_more_time() -> None:
    assert jinja.seconds(0) == 2.0 and jinja.seconds((1 << 20) - 1) == 2.0 and jinja.seconds(7 << 20) == 5.5
