"""Takes the screenshots of the demo for README and documentation: `python -m tests.browser.pictures describe`.

Take them again when the page or the weights have changed, and look at them.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from mmdec.demo import samples
from tests.browser.chromium import CHROMIUM, OFFLINE, PATIENCE
from tests.support.demo_server import ROOT, serving

FOLDER = ROOT / "docs" / "pictures"
WINDOW = {"width": 1280, "height": 1040}
COLOURS = 64  # of the saved file
LARGEST = 120_000  # bytes
TABS = {  # a tab's picture, the name of its sample's button
    "translate": ("demo.png", re.compile(re.escape(samples.french()[0].text))),
    "describe": ("demo_describe.png", re.compile("Menu")),
}


def run_sample(page: Any, tab: str) -> None:
    """Open the tab, press its sample, and wait until all is drawn."""
    page.get_by_role("tab", name=tab.capitalize()).click()
    page.get_by_role("button", name=TABS[tab][1]).click()
    page.locator(f"#mm-{tab}-results .mm-status.mm-done").wait_for()
    page.locator(f"#mm-{tab}-results .mm-lane").last.wait_for()
    page.mouse.move(0, 0)
    page.evaluate("() => {document.activeElement.blur(); scrollTo(0, 0);}")
    page.wait_for_timeout(1000)  # until the player has drawn its wave


def save(shot: bytes, path: Path) -> None:
    """Write a PNG of few colours. Raises where it is too large for a page."""
    few = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, format="PNG", optimize=True)
    if written.tell() > LARGEST:
        raise SystemExit(f"{path.name} must have at most {LARGEST} bytes, but has {written.tell()}. Cut the window.")
    path.write_bytes(written.getvalue())
    print(path, written.tell(), "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tabs", nargs="+", choices=list(TABS))
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory(prefix="mmdec-pictures-") as folder,
        serving(Path(folder), "warm") as server,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", OFFLINE])
        for tab in options.tabs:
            page = browser.new_page(viewport=WINDOW, color_scheme="light", reduced_motion="reduce")
            page.set_default_timeout(PATIENCE)
            page.goto(server.address)
            run_sample(page, tab)
            save(page.screenshot(), options.out / TABS[tab][0])
        browser.close()


if __name__ == "__main__":
    main()
