"""Fixtures: Debian's Chromium, and the demo's page in a separate process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import CHROMIUM, OFFLINE, open_demo
from tests.support.demo_server import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'mmdec[demo]'")
    with serving(tmp_path_factory.mktemp("demo")) as demo:
        yield demo


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for one file of tests: while playwright runs, no other test of the process can use asyncio."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", OFFLINE, "--autoplay-policy=no-user-gesture-required"],
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = open_demo(browser, server, viewport={"width": 1280, "height": 900})
    yield page
    assert page.complaints == []
    page.context.close()


@pytest.fixture
def phone(browser: Any, server: Server) -> Iterator[Any]:
    page = open_demo(browser, server, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
    yield page
    assert page.complaints == []
    page.context.close()
