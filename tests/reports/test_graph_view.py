"""Tests of a report's drawing in a real browser: zooming, filtering, following edges, and the width of a
phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlcbuild.reports import graph_view, page
from tests.reports.test_runlog import LOG
from tests.runtime.test_page import CHROMIUM, Browser

pytestmark = pytest.mark.xdist_group("chromium")


WEIGHTS = LOG.steps[1]
TALL = replace(LOG, steps=(*LOG.steps, *(replace(WEIGHTS, name=f"weights/a/s{i}") for i in range(60))))
"""The log of a run with 60 steps more, whose drawing is higher than its area on the page."""


@pytest.fixture
def browser(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Yields a browser that shows the report of LOG, or of the log that is the fixture's parameter."""
    if CHROMIUM is None or shutil.which("bash") is None:
        pytest.skip("Chromium is not installed")
    log = getattr(request, "param", LOG)
    (tmp_path / "report.html").write_text(page.html(log, None), encoding="utf-8")
    page_browser = Browser(tmp_path / "profile")
    page_browser.call("Page.navigate", url=(tmp_path / "report.html").as_uri())
    page_browser.until(
        "document.readyState === 'complete' && !!document.querySelector('[data-node][tabindex]')"
    )
    yield page_browser
    page_browser.close()


OPACITIES = """Object.fromEntries([...document.querySelectorAll('[data-node]')].map(
    (node) => [node.querySelector('text').textContent, +node.style.opacity || 1]))"""
WIDTH = "+document.querySelector('.graph svg').getAttribute('width')"


def test_the_drawing_is_enlarged_filtered_and_followed(browser: Browser) -> None:
    before = browser.run(WIDTH)
    browser.run("document.querySelectorAll('.graph button')[0].click()")
    assert browser.run(WIDTH) == pytest.approx(before * 1.25)
    browser.run("document.querySelectorAll('.graph button')[1].click()")
    assert browser.run(WIDTH) == pytest.approx(before)
    assert set(browser.run(OPACITIES).values()) == {1}
    for text, dim in (("library/x", {"weights/a/q4"}), ("", set())):
        browser.run(f"document.querySelector('.graph input').value = {json.dumps(text)}")
        browser.run("document.querySelector('.graph input').dispatchEvent(new Event('input'))")
        opacities = browser.run(OPACITIES)
        assert {name for name, opacity in opacities.items() if opacity < 1} == dim
    node = "[...document.querySelectorAll('[data-node]')].find((n) => n.textContent.includes('weights/a/q4'))"
    browser.run(f"{node}.dispatchEvent(new Event('mouseenter'))")
    followed = browser.run(OPACITIES)
    assert followed["weights/a/q4"] == followed["config/a"] == 1 > followed["library/x"]
    browser.run(f"{node}.dispatchEvent(new Event('mouseleave'))")
    assert set(browser.run(OPACITIES).values()) == {1}


@pytest.mark.parametrize("browser", [TALL], indirect=True)
def test_a_high_drawing_moves_to_a_filtered_step_and_keeps_the_place_when_enlarged(browser: Browser) -> None:
    filter_steps = """document.querySelector('.graph input').value = {};
        document.querySelector('.graph input').dispatchEvent(new Event('input'))"""
    node = (
        "[...document.querySelectorAll('[data-node]')].find((n) => n.textContent.includes('weights/a/s9:'))"
    )
    area, box = "document.querySelector('.graph>div')", f"{node}.getBoundingClientRect()"
    browser.run(f"{area}.scrollTop = 1e6")
    browser.run(filter_steps.format("'weights/a/s9'"))
    assert browser.run("document.querySelector('.graph output').textContent").startswith("1 of ")
    shown = f"{area}.getBoundingClientRect()"
    assert browser.run(f"{box}.top >= {shown}.top && {box}.bottom <= {shown}.bottom")
    browser.run(filter_steps.format("'no such step'"))
    assert browser.run("document.querySelector('.graph output').textContent").startswith("0 of ")
    browser.run(f"{node}.scrollIntoView({{ block: 'center' }})")
    before = browser.run(f"{box}.top - {shown}.top")
    browser.run(f"""{area}.dispatchEvent(new WheelEvent('wheel', {{ deltaY: -100, ctrlKey: true,
        cancelable: true, clientX: {box}.left, clientY: {box}.top }}))""")
    assert browser.run(f"{box}.top - {shown}.top") == pytest.approx(before, abs=2)


def test_a_phone_shows_the_page_without_scrolling_sideways(browser: Browser) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=1, mobile=True
    )
    browser.until("innerWidth === 375")
    assert browser.run("document.documentElement.scrollWidth") == 375


class Outline(HTMLParser):
    """An HTML parser that collects the tags of a page, each with the tags around it, and the texts in
    them."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.paths: list[str] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        path = "/".join([*self._open, tag])
        self.paths.append(path)
        if tag not in ("input", "rect"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        path = "/".join(self._open)
        self.texts[path] = self.texts.get(path, "") + data


def test_the_picture_stands_between_its_controls_and_their_program() -> None:
    outline = Outline()
    outline.feed(graph_view.view("<svg><title>a</title></svg>"))
    outline.close()
    assert outline.paths == [
        *("div", "div/button", "div/button", "div/button", "div/input", "div/output"),
        *("div/div", "div/div/svg", "div/div/svg/title", "script"),
    ]
    # The program assigns its handlers to the buttons in this order.
    assert outline.texts["div/button"] == "LargerSmallerFit"
    assert "const [larger, smaller, fit]" in outline.texts["script"]
    assert outline.texts["div/div/svg/title"] == "a"
    assert ".graph>div" in graph_view.STYLE and ".graph svg" in graph_view.STYLE
