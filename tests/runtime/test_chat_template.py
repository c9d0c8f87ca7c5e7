"""Tests of chat templates: what they may use, how they fail, and that endless ones are stopped, in servers
and in chats."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from mlcbuild_format.errors import RequestError, SetupError
from mlcbuild_format.fields import Json
from mlcbuild_runtime import Engine
from mlcbuild_runtime.text import chat_template, child, jinja
from mlcbuild_runtime.text.chat_template import ChatTemplate

from . import shared, toy
from .test_chat import talk
from .test_server import CHAT, COMPLETION, HI, post, with_template

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = (
    "{% for m in messages %}{% if m.content == 'loop' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)
"""A chat template that never ends for a message `loop`, and is fast for other messages."""
LOOP = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 2}
QUICK = {"messages": HI, "max_tokens": 2}


LESS = "from mlcbuild_runtime.text import jinja\njinja.SECONDS = 0.2\n"
"""Python code that reduces the CPU time of chat templates to a tenth."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives templates a tenth of their usual CPU time, and the usual wall-clock time."""
    monkeypatch.setattr(jinja, "SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "BUSY", 10 * chat_template.BUSY)
    monkeypatch.setattr(child, "_PROGRAM", LESS + child._PROGRAM)


def render(source: str, **options: str) -> str:
    actual = ChatTemplate(source, {"bos_token": "<s>"})
    try:
        return actual.render(MESSAGES, dict(options))
    finally:
        actual.close()


def test_what_templates_may_use() -> None:
    with closing(ChatTemplate("", {"bos_token": "<s>"})) as template:
        check_what_templates_may_use(template)


def check_what_templates_may_use(template: ChatTemplate) -> None:
    def render(source: str, **options: str) -> str:
        """Renders a template in the process of `template`, since to start another takes 0.1 CPU seconds."""
        template._source = source
        return template.render(MESSAGES, dict(options))

    loop = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m['content'] }}{% endfor %}"
    assert render(loop) == "<s>user:hi"
    assert (
        render("{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }}") == "True True True"
    )
    assert render("{{ {'b': '<é>', 'a': [1]} | tojson }}") == '{"b": "<é>", "a": [1]}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert render("{{ enable_thinking }}", enable_thinking="no") == "no"
    assert render("{{ messages[0].content }}", messages="mine") == "hi"
    assert render("{{ 'x' * 1000000 }}") == "x" * 1_000_000
    check_contents_beside_calls(template)


def check_contents_beside_calls(template: ChatTemplate) -> None:
    """Checks that an empty content beside tool calls is none as well as a text. Templates of DeepSeek R1
    write calls only if it is none; one that comes with vLLM searches a text in it first."""
    template._source = (
        "{% for m in messages %}{{ m['content'] is none }} {{ m.content is not none }} {{ 'x' in m.content }}"
        " {{ m.content + '.' }} {{ m.content | tojson }};{% endfor %}"
    )
    calls: Json = [{"id": "1", "function": {"name": "f", "arguments": {}}}]
    contents: list[dict[str, Json]] = [{"content": ""}, {"content": "x"}, {"content": None}, {}]
    messages = [{"role": "assistant", "tool_calls": calls, **content} for content in contents]
    none, text = 'True False False . "";', 'False True True x. "x";'
    assert template.render([*messages, *contents[:2]], {}) == (
        f'{none}{text}{none}{none}False True False . "";{text}'
    )


SHORT = [
    ("a message", "{{ messages[5].content }}", "UndefinedError: list object has no element 5"),
    ("the sandbox", "{{ ''.__class__.__mro__ }}", "SecurityError: .*unsafe.*"),
    ("a format", "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "SecurityError: .*unsafe.*"),
    ("a change", "{{ messages.append(1) }}", "SecurityError: .*"),
    ("arithmetic", "{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("types", "{{ messages[0].content + 1 }}", "TypeError: .*"),
    ("syntax", "{% if %}", "TemplateSyntaxError: Expected an expression.*"),
    ("a large range", "{% for i in range(10 ** 12) %}x{% endfor %}", "OverflowError: .*"),
    ("a macro", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "it is nested too deeply, .*"),
    ("brackets", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "it is nested too deeply, .*"),
    ("lists", "{{ " + "[" * 3000 + "]" * 3000 + " }}", "it is nested too deeply, .*"),
    ("ifs", "{% if true %}" * 200 + "{% endif %}" * 200, "IndentationError: too many levels.*"),
    ("loops", "{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many .*nested blocks.*"),
    ("a surrogate", '{{ "\\ud800" }}', "there is a part of a character, a surrogate, in its text"),
    ("a surrogate in it", "\ud800", "there is a part of a character, a surrogate, in its text"),
    ("a block", "{% block a %}{{ self.a() }}{% endblock %}", "it is nested too deeply, .*"),
    ("openings", "{{" * 100_000, "it is nested too deeply, .*"),
    ("a long number", "{{ " + "9" * 5000 + " }}", "ValueError: Exceeds the limit .*"),
    (
        "lists in lists",
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "it is nested too deeply, .*",
    ),
    ("an include", "{% include 'x' %}", "TypeError: no loader.*"),
    ("much text", "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "its text has more than 16 MiB"),
]
MEMORY = "it takes more than 256 MiB of memory"
COSTLY = [
    ("a width", "{{ '%1000000000d' | format(1) }}", MEMORY),
    ("a filter's width", "{{ 'x' | center(2000000000) }}", MEMORY),
    ("a method's width", "{{ 'x'.ljust(10 ** 10) }}", MEMORY),
    ("a width of another", "{{ '%*d' | format(1000000000, 1) }}", MEMORY),
    ("a width in braces", "{{ '{:>2000000000}'.format('a') }}", MEMORY),
    ("digits", "{{ '%.2147483647f' % 1 }}", MEMORY),
    ("a table", "{{ 'a'.translate({97: 'b' * 2000000000}) }}", MEMORY),
    (
        "doubling",
        "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        MEMORY,
    ),
    ("a list", "{{ range(99999) | list * 99999 }}", MEMORY),
    ("an indent", "{{ {'a': [1]} | tojson(indent=1000000000) }}", MEMORY),
]


@pytest.mark.parametrize(("source", "reason"), [case[1:] for case in SHORT], ids=[case[0] for case in SHORT])
def test_templates_that_fail(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"^the bundle's chat template fails: {reason}$") as caught:
        render(source)
    assert (caught.value.status, caught.value.code) == (422, "template_failed")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit memory")
@pytest.mark.parametrize(
    ("source", "reason"), [case[1:] for case in COSTLY], ids=[case[0] for case in COSTLY]
)
def test_templates_that_take_memory(source: str, reason: str) -> None:
    test_templates_that_fail(source, reason)


@pytest.mark.parametrize(
    "source", ["{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2, "{{ (10 ** 4000) ** 4000 % 7 }}"]
)
def test_templates_without_end(source: str, hasty: None) -> None:
    with pytest.raises(RequestError, match=r"chat template fails: it takes more than 0\.2 s$") as caught:
        render(source)
    assert caught.value.status == 422


def test_a_template_refuses_in_one_line() -> None:
    with pytest.raises(RequestError, match=r"refuses these messages: roles \[31m must alternate$") as caught:
        render("{{ raise_exception('roles\\n\x1b[31m must\\talternate') }}")
    assert caught.value.status == 400
    with pytest.raises(RequestError, match=r"refuses these messages: x{250,}\.\.\.$"):
        render("{{ raise_exception('x' * 1000000) }}")


def test_a_surrogate_of_the_client() -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs has a part of a character") as caught:
        render("{{ bos_token }}", bos_token="\ud800")
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
    assert render("{{ bos_token }}", unused="\ud800") == "<s>"


def test_a_renderer_goes_on_after_a_failure(hasty: None) -> None:
    actual = ChatTemplate(ENDLESS, {})
    try:
        assert actual.render(MESSAGES, {}) == "hi"
        with pytest.raises(RequestError, match=r"more than 0\.2 s"):
            actual.render([{"content": "loop"}], {})
        assert actual.render(MESSAGES, {}) == "hi"
        assert actual._short.child.process is not None
        os.kill(actual._short.child.process.pid, signal.SIGSEGV)
        actual._short.child.process.wait()
        assert actual.render(MESSAGES, {}) == "hi"
    finally:
        actual.close()


def test_others_do_not_wait_for_a_template_that_took_too_long(hasty: None) -> None:
    actual = ChatTemplate(ENDLESS, {})
    with ThreadPoolExecutor(6) as pool:
        with pytest.raises(RequestError, match=r"more than 0\.2 s"):
            actual.render([{"content": "loop"}], {})
        asked = [pool.submit(actual.render, [{"content": "loop"}], {}) for _ in range(6)]
        errors = [error for each in asked if isinstance(error := each.exception(), RequestError)]
    actual.close()
    assert sorted(error.status for error in errors) == [422, *[503] * 5]
    assert any("other requests wait for it: try again later" in str(error) for error in errors)


def test_short_messages_do_not_wait_for_long_ones(hasty: None) -> None:
    source = "{% if messages[0].content | length > 1000 %}" + "{% for i in range(99999) %}" * 2
    template = ChatTemplate(source + "{% endfor %}" * 2 + "{% endif %}hi", {})
    long = [{"content": "x" * chat_template.SHORT}]
    assert template.render(MESSAGES, {}) == "hi"  # starts the process of short ones
    with ThreadPoolExecutor(1) as pool:
        endless, answers = pool.submit(template.render, long, {}), 0
        while not endless.done():  # until it has used its CPU seconds
            assert template.render(MESSAGES, {}) == "hi"
            answers += 1
        template.close()
        assert answers > 1
        with pytest.raises(RequestError):
            endless.result()


def test_long_conversations_have_longer() -> None:
    """Checks that a long conversation, 7 MiB in 20,000 messages, may take longer to render than a short
    one."""
    source = "{% for message in messages %}{{ message.role + message.content[::-1] }}{% endfor %}"
    template = ChatTemplate(source, {})
    try:
        text = template.render([{"role": "a", "content": "x" * 350}] * 20_000, {})
    finally:
        template.close()
    assert len(text) == 20_000 * 351


def test_the_time_of_a_template() -> None:
    assert jinja.seconds(chat_template.SHORT) == 2.0 and jinja.seconds(7 << 20) == 5.5


def test_closing_ends_what_is_rendered() -> None:
    actual = ChatTemplate(ENDLESS, {})
    assert actual.render(MESSAGES, {}) == "hi"
    threading.Timer(0.3, actual.close).start()
    begun, computed = time.monotonic(), time.thread_time()
    with pytest.raises(RequestError, match=r"^the server is stopping: use another server$"):
        actual.render([{"content": "loop"}], {})
    assert time.thread_time() - computed < (time.monotonic() - begun) / 2, "it waits without computing"
    process = actual._short.child.process
    assert process is None or process.poll() is not None
    with pytest.raises(RequestError, match=r"^the server is stopping: use another server$"):
        actual.render(MESSAGES, {})


def test_a_renderer_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SetupError, match=r"renders chat templates cannot start: .*/nowhere"):
        render("x")
    monkeypatch.undo()
    broken = child.Child("mlcbuild_runtime.nowhere", "renders chat templates")
    with pytest.raises(SetupError, match="the process that renders chat templates has failed: see the lines"):
        broken.ask({}, 60.0)


def test_a_renderer_that_starts_slowly_is_not_the_templates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("hi", {})
    with monkeypatch.context() as patch:
        patch.setattr(child, "STARTING", 0.0)
        with pytest.raises(
            RequestError, match="the process that renders chat templates was not ready"
        ) as caught:
            template.render(MESSAGES, {})
    try:
        assert (caught.value.code, caught.value.status) == ("overloaded", 503)
        assert template._short._patience == chat_template.LONGEST_WAIT, "others wait as long as before"
        assert template.render(MESSAGES, {}) == "hi"
    finally:
        template.close()


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


IMPATIENT = f"""{LESS}
import sys
from mlcbuild_runtime.__main__ import main
from mlcbuild_runtime.text import chat_template, child
chat_template.BUSY, chat_template.LONGEST_WAIT = 25.0, 1.0
child._PROGRAM = {LESS!r} + child._PROGRAM
sys.exit(main())
"""
"""Program of a server that gives chat templates 0.2 CPU seconds, and lets requests wait 1 s for them."""


def test_a_server_goes_on_while_templates_have_no_end(toy_copy: Path) -> None:
    """Checks that a server answers requests without templates while endless templates are rendered on all
    other routes."""
    with_template(toy_copy, ENDLESS)
    bodies = [
        (CHAT, LOOP),
        ("/tokenize", {"messages": LOOP["messages"]}),
        ("/v1/responses", {"input": "loop"}),
        (CHAT, {**LOOP, "stream": True}),
    ]
    program = shared.program("-c", IMPATIENT, str(toy_copy), "--port", "0")
    with program as server, ThreadPoolExecutor(48) as pool:
        asked = [pool.submit(post, server, *bodies[i % 4]) for i in range(48)]
        served = 0
        while not all(each.done() for each in asked):
            assert post(server, COMPLETION, {"prompt": "a", "max_tokens": 1}).status_code == 200
            assert httpx.get(f"{server.url}/health", timeout=shared.WAIT).status_code == 200
            served += 1
        assert served
        for each in asked:
            status, message = error(each.result())
            assert status in (422, 503) and "chat template" in message
        assert 422 in {each.result().status_code for each in asked}
        while (response := post(server, CHAT, QUICK)).status_code == 503:
            time.sleep(0.1)
        assert response.status_code == 200
        assert server.stop() == 0


def test_timeouts_end_what_is_rendered(toy_copy: Path) -> None:
    with_template(toy_copy, ENDLESS)
    with shared.serving(toy_copy, "--timeout", "0.5") as server:
        for path, body in ((CHAT, LOOP), ("/tokenize", {"messages": LOOP["messages"]})):
            assert error(post(server, path, body)) == (
                504,
                "the request was not finished after 0.5 s: send a shorter one, or raise --timeout",
            )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_what_is_rendered(toy_copy: Path, number: signal.Signals) -> None:
    with_template(toy_copy, ENDLESS)
    with shared.serving(toy_copy) as server, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(httpx.post, f"{server.url}{CHAT}", json=LOOP, timeout=shared.WAIT)
        time.sleep(0.5)
        assert server.stop(number) == 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [SHORT[8][1:], SHORT[9][1:], SHORT[11][1:], SHORT[13][1:], ("{% if %}", "TemplateSyntaxError: .*")],
)
def test_servers_and_chats_say_what_fails(toy_copy: Path, source: str, reason: str) -> None:
    with_template(toy_copy, source)
    result = talk(toy_copy, "hi")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("the bundle's chat template fails: ")
    with shared.serving(toy_copy) as server:
        bodies = ((CHAT, QUICK), ("/tokenize", {"messages": HI}), ("/v1/responses", {"input": "hi"}))
        for path, body in bodies:
            assert error(post(server, path, body)) == (422, lines[0])
    with Engine(toy_copy) as engine, pytest.raises(RequestError) as caught:
        engine.chat.completions.create(messages=HI)
    assert str(caught.value) == lines[0]


def test_a_chat_goes_on_after_a_template_without_end(toy_copy: Path) -> None:
    with_template(toy_copy, ENDLESS)
    result = talk(toy_copy, "/set max_tokens=3", "loop", "hi")
    assert result.returncode == 1
    assert result.stderr == "the bundle's chat template fails: it takes more than 2 s\n"
    assert len(result.stdout.splitlines()) >= 2


def test_a_template_that_is_not_utf8(toy_copy: Path) -> None:
    (toy_copy / "chat_template.jinja").write_bytes(b"caf\xe9 {{ messages }}")
    described = json.loads((toy_copy / "bundle.json").read_bytes())
    file = toy.describe(toy_copy / "chat_template.jinja")
    described["files"]["chat_template.jinja"] = {"blake3": file.blake3, "size": file.size}
    (toy_copy / "bundle.json").write_text(json.dumps(described))
    result = talk(toy_copy, "hi")
    assert result.returncode == 1
    assert "chat_template.jinja: not UTF-8: invalid continuation byte at byte 3" in result.stderr
    assert len(result.stderr.splitlines()) == 1
