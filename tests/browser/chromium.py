"""Debian's Chromium, and a page of the demo opened in it."""

from __future__ import annotations

import shutil
from typing import Any

from tests.support.demo_server import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # the page must not need the network
PATIENCE = 300_000  # milliseconds that a page may take before a test fails


def open_demo(browser: Any, server: Server, **options: Any) -> Any:
    """Open the demo in a new session. Errors of its script are collected in `page.complaints`."""
    context = browser.new_context(reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(server.address)
    page.get_by_role("heading", name="mmdec", exact=True).wait_for()
    return page
