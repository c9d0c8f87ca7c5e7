"""Tests of the chat page in a real browser, controlled through Chromium's debugging pipe."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import parrot, shared, toy
from .shared import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


pytestmark = pytest.mark.xdist_group("chromium")  # several browsers at once take too long


def _high_pipe() -> tuple[int, int]:
    """Returns the two ends of a pipe, with descriptor numbers that are above those which the shell
    assigns."""
    low = os.pipe()
    reading, writing = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in low)
    for descriptor in low:
        os.close(descriptor)
    return reading, writing


class Browser:
    """One page of a headless Chromium, controlled through pipes. Each message is JSON, followed by a zero
    byte."""

    def __init__(self, profile: Path, gpu: tuple[str, ...] = ("--disable-gpu",)) -> None:
        assert CHROMIUM is not None
        to_read, self._to = _high_pipe()
        self._from, to_write = _high_pipe()
        # The browser reads messages from descriptor 3 and writes its own to 4.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        options = ["--headless=new", "--no-sandbox", *gpu, "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._held, self._count, self._session = b"", 0, ""
        try:
            self._attach()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(item["targetId"] for item in targets if item["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    @contextmanager
    def other_tab(self, url: str = "about:blank", *, isolated: bool = False) -> Iterator[None]:
        """Opens a second tab of the browser with the page `url`. While the context is open, all other methods
        act on that tab; afterwards the tab is closed, and they act on the first one again. isolated: True for
        a tab that shares neither storage nor cookies with other pages."""
        first, self._session = self._session, ""
        context = self.call("Target.createBrowserContext") if isolated else {}
        target = self.call("Target.createTarget", url=url, **context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            yield
        finally:
            self._session = ""
            if isolated:
                self.call("Target.disposeBrowserContext", **context)
            else:
                self.call("Target.closeTarget", targetId=target)
            self._session = first

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                data = os.read(self._from, 1 << 16)
                assert data, "the browser has gone"
                self._held += data
            actual, _, self._held = self._held.partition(b"\0")
            reply = json.loads(actual)
            if reply.get("id") == self._count:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression on the page."""
        actual = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in actual, actual
        return actual["result"].get("value")

    def until(self, script: str, progress: str = "document.body?.innerText ?? ''") -> None:
        """Waits until the JavaScript expression `script` is true on the page. Fails if the value of the
        expression `progress`, by default the page's text, has not changed for WAIT seconds."""
        last, end = None, 0.0
        while not self.run(script):
            value = self.run(progress)
            if value != last:
                last, end = value, time.monotonic() + shared.WAIT
            assert time.monotonic() < end, (script, value)
            time.sleep(0.02)

    def send(self, text: str) -> None:
        self.run(f"$('input').value = {json.dumps(text)}; $('form').requestSubmit()")

    def press(self, key: str) -> None:
        """Presses and releases a key, with the effects that the browser gives it: "Tab", "Enter" or
        "Escape"."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13, "Escape": 27}[key]}
        down: dict[str, Any] = {**event, "text": "\r"} if key == "Enter" else event
        self.call("Input.dispatchKeyEvent", type="keyDown" if "text" in down else "rawKeyDown", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def tab_to(self, text: str) -> None:
        """Presses the Tab key until an element with exactly this text has the focus. Fails after 20 times."""
        for _ in range(20):
            self.press("Tab")
            if self.run("document.activeElement.textContent") == text:
                return
        raise AssertionError(f"the Tab key does not reach {text!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._to)
        os.close(self._from)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yields one browser for all tests of this module, since its start takes 0.6 CPU seconds. Skips the test
    without Chromium."""
    if CHROMIUM is None or shutil.which("bash") is None:
        pytest.skip("Chromium is not installed")
    actual = Browser(tmp_path_factory.mktemp("profile"))
    yield actual
    actual.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Yields a browser with an empty page, for one test."""
    with chromium.other_tab(isolated=True):
        yield chromium


IDLE = "!$('send').hidden"
ANSWERS = "[...document.querySelectorAll('.assistant')].map((box) => box.textContent)"


def test_a_conversation(browser: Browser, server: Server) -> None:
    browser.call("Page.navigate", url=server.url)
    browser.until(f"document.title === {json.dumps(server.name)}")
    browser.run("$('max_tokens').value = 12; $('temperature').value = 0")
    browser.send("hi <b>there</b>")
    browser.until(f"{IDLE} && $('rate').textContent")
    (first,) = browser.run(ANSWERS)
    assert first
    assert browser.run("document.querySelector('.user').textContent") == "hi <b>there</b>"
    assert "+ 12 tokens, the first after" in browser.run("$('rate').textContent")
    browser.send("again")
    browser.until(f"{IDLE} && {ANSWERS}.length === 2")
    assert browser.run("history.length") == 4
    browser.run("$('reset').click()")
    assert browser.run("history.length + $('log').children.length") == 0
    browser.send("hi <b>there</b>")
    browser.until(f"{IDLE} && {ANSWERS}.length === 1 && history.length === 2")
    assert browser.run(ANSWERS) == [first]


def test_errors_are_shown_and_stop_stops(browser: Browser, server: Server) -> None:
    browser.call("Page.navigate", url=server.url)
    browser.until(f"document.title === {json.dumps(server.name)}")
    browser.send("x" * 300)
    browser.until("!!document.querySelector('.error')")
    assert "but the context has 256" in browser.run("document.querySelector('.error').textContent")
    assert browser.run("history.length") == 0  # what cannot be answered is not asked again
    browser.run("$('reset').click()")
    browser.send("hi")
    browser.until("!$('stop').hidden || history.length === 2")
    browser.run("$('stop').click()")
    browser.until(IDLE)
    assert not browser.run("!!document.querySelector('.error')")
    assert server.wait_idle()["running"] == 0


def test_an_answer_is_edited_regenerated_and_kept(browser: Browser, server: Server) -> None:
    browser.call("Page.navigate", url=server.url)
    browser.until(f"document.title === {json.dumps(server.name)}")
    browser.run("localStorage.clear(); $('max_tokens').value = 20; $('temperature').value = 0")
    browser.run("$('max_tokens').dispatchEvent(new Event('change'))")
    browser.send("first")
    browser.until(f"{IDLE} && history.length === 2")
    assert " tokens/s" in browser.run("$('rate').textContent"), "20 tokens are enough for a rate"
    press = "[...document.querySelectorAll('.actions button')].find((b) => b.textContent === '{}').click()"
    (before,) = browser.run(ANSWERS)
    browser.run(press.format("Regenerate"))
    browser.until(f"{IDLE} && history.length === 2")
    assert browser.run(ANSWERS) == [before]
    browser.run("window.isOld = true")
    browser.call("Page.reload")
    browser.until("!window.isOld && typeof list === 'function' && document.readyState === 'complete'")
    browser.until("!$('conversations').hidden && $('max_tokens').value === '20'")
    browser.run("$('conversations').selectedIndex = 1; $('conversations').dispatchEvent(new Event('change'))")
    assert browser.run("history.map((message) => message.content)")[0] == "first"
    browser.run(press.format("Edit"))
    assert browser.run("[$('input').value, history.length]") == ["first", 0]
    browser.run("open($('conversations').value); $('remove').click()")
    assert browser.run("[history.length, $('conversations').hidden]") == [0, True]


def test_markdown_becomes_elements_and_never_markup(browser: Browser, server: Server) -> None:
    browser.call("Page.navigate", url=server.url)
    browser.until(f"document.title === {json.dumps(server.name)}")
    text = (
        "# Title\n<b>x</b> **bold** `c*d*`\n\n- one\n- two\n\n```py\nif a:\n  <i>b</i>\n```\n"
        "[a](https://example.org/b) [c](javascript:alert(1))\n\n2. third\n"
    )
    drawn = (
        f"(() => {{ const box = make('div'); box.append(...markdown({json.dumps(text)})); return box; }})()"
    )
    tags = browser.run(f"[...{drawn}.querySelectorAll('*')].map((each) => each.tagName)")
    assert tags == [
        *("H2", "P", "STRONG", "CODE", "UL", "LI", "LI", "PRE", "CODE", "BUTTON", "P", "A", "OL", "LI")
    ]
    assert browser.run(f"{drawn}.querySelector('pre code').textContent") == "if a:\n  <i>b</i>"
    assert browser.run(f"{drawn}.querySelector('a').href") == "https://example.org/b"
    assert browser.run(f"{drawn}.querySelector('ol').start") == 2
    unfinished = "['```', '* ', '#', '**a', '1.', '| a |'].map((each) => markdown(each).length)"
    assert browser.run(unfinished) == [1, 1, 1, 1, 1, 1], "a text that is still growing is drawn, too"


def test_a_key_is_asked_for_and_a_lost_server_keeps_the_message(browser: Browser, toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--api-key", "secret") as server:
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=1, mobile=True
        )
        browser.call("Page.navigate", url=server.url)
        browser.until(f"document.title === {json.dumps(server.name)}")
        assert browser.run("document.documentElement.scrollWidth") <= 375, "it fits a phone"
        assert browser.run("$('send').getBoundingClientRect().height") >= 44
        browser.run("$('max_tokens').value = 2")
        browser.send("hi")
        browser.until("!!document.querySelector('.error')")
        assert "enter it under Settings, Key" in browser.run("document.querySelector('.error').textContent")
        assert browser.run("[$('input').value, document.activeElement.id]") == ["hi", "key"]
        browser.run("$('key').value = 'secret'; $('form').requestSubmit()")
        browser.until(f"{IDLE} && history.length === 2")
        server.stop()
    browser.send("more")
    browser.until("!!document.querySelector('.error')")
    assert "cannot be reached. Your message is kept" in browser.run("$('log').textContent")
    assert browser.run("[$('input').value, history.length]") == ["more", 2]


def test_a_key_is_entered_by_keyboard(browser: Browser, toy_bundle: Path) -> None:
    with shared.serving(toy_bundle, "--api-key", "secret") as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("typeof settle === 'function' && $('settings').open")
        assert "requires a key" in browser.run("$('rate').textContent"), "before a message is written"
        browser.run("$('max_tokens').value = 2; $('input').focus()")
        browser.call("Input.insertText", text="hi")
        browser.press("Enter")
        browser.until("document.activeElement.id === 'key'")
        browser.call("Input.insertText", text="wrong")
        browser.press("Enter")
        browser.until("!!document.querySelector('.error')?.textContent.includes('does not accept this key')")
        browser.run("$('key').select()")
        browser.call("Input.insertText", text="secret")
        browser.press("Enter")
        browser.until(f"{IDLE} && history.length === 2 && !$('settings').open")
        assert "secret" not in browser.run("JSON.stringify([localStorage, sessionStorage, location.href])")


def test_the_focus_and_what_is_drawn_stay(browser: Browser, server: Server) -> None:
    """Checks that keys alone are enough to regenerate and edit, and that nothing is drawn again, which a
    screen reader would read out again."""
    browser.call("Page.navigate", url=server.url)
    browser.until(f"document.title === {json.dumps(server.name)}")
    browser.run("$('max_tokens').value = 20; $('temperature').value = 0; $('input').focus()")
    for count in (2, 4):
        browser.call("Input.insertText", text="hi")
        browser.press("Enter")
        browser.until(f"{IDLE} && history.length === {count}")
        assert browser.run("document.activeElement.id") == "input"
    browser.run("window.before = [...$('log').children]")
    browser.tab_to("Regenerate")
    browser.press("Enter")
    browser.until(f"{IDLE} && history.length === 4")
    assert browser.run("document.activeElement.id") == "input"
    same = browser.run("[...$('log').children].map((turn, index) => turn === before[index])")
    assert same == [True, True, True, False]
    assert "limit of tokens" in browser.run("$('log').innerText")
    assert browser.run("[...$('log').children].map((turn) => turn.ariaLabel)") == ["You", "Answer"] * 2
    browser.tab_to("Edit")
    browser.press("Enter")
    assert browser.run("[document.activeElement.id, history.length, $('input').value]") == ["input", 0, "hi"]
    browser.press("Escape")
    assert browser.run("[history.length, $('input').value]") == [4, ""]


def test_an_answer_outlives_the_server(browser: Browser, tmp_path: Path) -> None:
    parrot.write(tmp_path / "parrot")
    with parrot.serving(tmp_path / "parrot") as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("typeof settle === 'function' && document.readyState === 'complete'")
        browser.send(parrot.say("all is well " * 100))
        browser.until(f"{ANSWERS}[0]?.startsWith('all is')")
        server.process.kill()
    browser.until(IDLE)
    (kept,) = browser.run(ANSWERS)
    assert kept.startswith("all is") and "broke off" in browser.run("$('log').innerText")
    browser.tab_to("Retry")
    browser.press("Enter")
    browser.until("$('log').innerText.includes('cannot be reached')")
    assert browser.run(ANSWERS) == [kept], "a retry that fails costs nothing"
    assert browser.run("kept(KEPT, [])[0].messages[1].content").strip() == kept.strip()


def test_a_conversation_is_kept_when_another_is_begun(browser: Browser, tmp_path: Path) -> None:
    parrot.write(tmp_path / "parrot")
    with parrot.serving(tmp_path / "parrot") as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("typeof settle === 'function' && document.readyState === 'complete'")
        browser.send(parrot.say("all is well " * 100))
        browser.until(f"{ANSWERS}[0]?.startsWith('all is')")
        browser.run("$('reset').click()")
        browser.until(f"{IDLE} && !history.length")
        assert browser.run("kept(KEPT, [])[0].messages.length") == 2
        assert browser.run("kept(KEPT, [])[0].messages[1].note") == "stopped"


def test_reasoning_is_shown_apart(browser: Browser, tmp_path: Path) -> None:
    template = toy.TEMPLATE + "{# <think> </think> #}"
    parrot.write(tmp_path / "parrot", template)
    with parrot.serving(tmp_path / "parrot") as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("typeof settle === 'function' && document.readyState === 'complete'")
        browser.send(parrot.say("<think>two and two</think>four"))
        browser.until(f"{IDLE} && history.length === 2")
        assert browser.run(ANSWERS) == ["four"]
        assert browser.run("document.querySelector('.reasoning').textContent").strip() == "two and two"
        assert browser.run("history[1].reasoning").strip() == "two and two"
        assert "two and two" not in browser.run("JSON.parse(body()).messages[1].content")


def test_nothing_overlaps_on_a_phone(browser: Browser, server: Server) -> None:
    size = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Page.navigate", url=server.url)
    browser.until(f"document.title === {json.dumps(server.name)}")
    browser.run("$('max_tokens').value = 20; $('settings').open = true")
    browser.send("a title which is longer than a phone is wide, for the list of conversations")
    browser.until(f"{IDLE} && history.length === 2")
    browser.run("$('name').textContent = 'smollm2-135m-instruct-q4a8_1-x86-64-v4-vnni'")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("$('name').getBoundingClientRect().height") < 80, "two or three lines, no column"
    assert browser.run("$('log').getBoundingClientRect().height") >= 90
    boxes = browser.run(
        "[...document.body.children].map((each) => each.getBoundingClientRect())"
        ".filter((box) => box.height).map((box) => [box.top, box.bottom])"
    )
    assert all(below[0] >= above[1] for above, below in itertools.pairwise(boxes)), boxes


def test_a_model_is_chosen(browser: Browser, toy_bundle: Path, tmp_path: Path) -> None:
    other = shutil.copytree(toy_bundle, tmp_path / "other")
    with shared.serving(toy_bundle, f"second={other}") as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("!!document.body && typeof models === 'function' && !$('model').hidden")
        assert browser.run("[...$('model').options].map((option) => option.value)")[1:] == ["second"]
        browser.run("$('model').value = 'second'; $('max_tokens').value = 4")
        browser.send("hi")
        browser.until(f"{IDLE} && {ANSWERS}.length === 1 && history.length === 2")
        metrics = httpx.get(f"{server.url}/metrics").text
        assert re.search(r'model="second"', metrics) and not re.search(rf'model="{toy_bundle.name}"', metrics)
