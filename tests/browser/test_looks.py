"""Tests the demo's layout as the browser computes it: contrasts, alignment, and elements that cover others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mmdec.demo import samples
from tests.browser.chromium import open_demo
from tests.support.demo_server import Server

pytestmark = pytest.mark.slow

FAINT = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8").partition("\n")[2]
SAMPLES = {  # a sample's button in each tab
    "translate": re.compile(re.escape(samples.french()[0].text)),
    "transcribe": re.compile(re.escape(samples.english()[0].text[:30])),
    "describe": re.compile("Menu"),
}
LEFT = "at => at.getBoundingClientRect().left"
UNCOVERED = """at => {
    const icon = at.getBoundingClientRect();
    const block = at.closest('.block');
    const label = block.querySelector('[data-testid=block-label]').getBoundingClientRect();
    const frame = block.getBoundingClientRect();
    const apart = icon.left >= label.right || icon.right <= label.left || icon.top >= label.bottom;
    return icon.width > 8 && label.width > 8 && apart && icon.top >= frame.top && icon.bottom <= frame.bottom;
}"""  # a label lets the mouse through: what lies on top for a click says nothing


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_and_icons_have_contrast(browser: Any, server: Server, scheme: str) -> None:
    """WCAG's AA: 4.5 for text, 3 for large text and for icons of buttons. Of each tab, before and after a run."""
    page = open_demo(browser, server, viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    looked = 0
    for tab, button in SAMPLES.items():
        page.get_by_role("tab", name=tab.capitalize()).click()
        page.locator(f"#mm-{tab}-results .mm-status").wait_for()
        before = page.evaluate(FAINT)
        page.get_by_role("button", name=button).click()
        page.locator(f"#mm-{tab}-results .mm-status.mm-done").wait_for()
        page.locator(f"#mm-{tab}-results .mm-lane").last.wait_for()
        page.mouse.move(0, 0)
        page.wait_for_timeout(500)  # colours change slowly below the mouse
        after = page.evaluate(FAINT)
        looked += before["looked"] + after["looked"]
        wrong += [f"{tab}: {result}" for result in (*before["wrong"], *after["wrong"])]
    page.context.close()
    assert wrong == []
    assert looked > 500


def test_contrast_is_measured(page: Any) -> None:
    """The measure itself: colours with known contrasts, and what lies behind by half."""
    page.set_content(
        "<body style='background: white; color: black'>"
        "<p style='color: #777'>grey</p><p style='color: #767676'>darker</p><p style='color: #14b8a6'>teal</p>"
        "<div style='background: rgb(0 0 0 / 40%)'><p style='color: white'>half</p></div>"
        "<p style='color: black; opacity: 0.4'>faint</p><p style='color: #888; font-size: 24px'>large</p>"
        "<button style='background: white; color: #14b8a6' aria-label='send'><svg width=9 height=9></svg></button>"
    )
    assert page.evaluate(FAINT) == {
        "looked": 7,
        "wrong": [
            "“grey”: 4.48 of 4.5",
            "“teal”: 2.49 of 4.5",
            "“half”: 2.85 of 4.5",
            "“faint”: 2.85 of 4.5",
            "icon of “send”: 2.49 of 3",
        ],
    }


def test_headings_begin_where_boxes_begin(page: Any) -> None:
    for tab, button in SAMPLES.items():
        page.get_by_role("tab", name=tab.capitalize()).click()
        panel = page.get_by_role("tabpanel").filter(visible=True)
        places = {
            "title": page.get_by_role("heading", name="mmdec", exact=True),
            "heading": panel.locator("h2"),
            "try": panel.locator("h3").first,
            "box": panel.locator(".block:has(input)").first,
            "run": panel.locator(f"#mm-{tab}-go"),
        }
        left = {name: place.evaluate(LEFT) for name, place in places.items()}
        assert len(set(left.values())) == 1, (tab, left)
        assert page.get_by_role("button", name=button).is_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_covers_the_uploads_icon(browser: Any, server: Server, width: int) -> None:
    page = open_demo(browser, server, viewport={"width": width, "height": 900})
    for tab in SAMPLES:
        page.get_by_role("tab", name=tab.capitalize()).click()
        icon = page.get_by_role("tabpanel").filter(visible=True).locator("[data-testid=upload-icon] svg").first
        icon.scroll_into_view_if_needed()
        assert icon.evaluate(UNCOVERED), tab
    page.context.close()
