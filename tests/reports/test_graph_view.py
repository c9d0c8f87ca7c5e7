"""Tests of a report's drawing in a real browser: zooming, filtering, following edges, and the width of a
phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcbuild.reports import page
from tests.reports.test_runlog import LOG
from tests.runtime.test_page import CHROMIUM, Browser

pytestmark = pytest.mark.xdist_group("chromium")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None or shutil.which("bash") is None:
        pytest.skip("Chromium is not installed")
    (tmp_path / "report.html").write_text(page.html(LOG, None), encoding="utf-8")
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


def test_a_phone_shows_the_page_without_scrolling_sideways(browser: Browser) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=1, mobile=True
    )
    browser.until("innerWidth === 375")
    assert browser.run("document.documentElement.scrollWidth") == 375
