"""Debian's Chromium, and the demo's page in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.demo_server import Server, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # the page must need nothing from elsewhere
PATIENCE = 300_000  # milliseconds that a page may take before a test fails


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'mmdec[demo]'")
    with serving(tmp_path_factory.mktemp("demo")) as one:
        yield one


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        one = play.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", OFFLINE, "--autoplay-policy=no-user-gesture-required"],
        )
        yield one
        one.close()


def opened(browser: Any, server: Server, **options: Any) -> Any:
    """A page of its own session; what its script complains of is kept in `page.complaints`."""
    context = browser.new_context(reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(server.address)
    page.get_by_role("heading", name="mmdec", exact=True).wait_for()
    return page


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    one = opened(browser, server, viewport={"width": 1280, "height": 900})
    yield one
    assert one.complaints == []
    one.context.close()


@pytest.fixture
def phone(browser: Any, server: Server) -> Iterator[Any]:
    one = opened(browser, server, viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
    yield one
    assert one.complaints == []
    one.context.close()
