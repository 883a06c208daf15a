"""Times the first click on a new page until the translation can be played.

Call: `python -m tests.browser.first_sound --json FILE`. The server has run every model once, as `mmdec demo` does. Each
repeat opens the page with an empty cache and presses the first sample. It is not a test, because the time depends on
the load of the machine. The report has the format of `mmdec bench`, so `mmdec bench show` and `--against` accept it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from mmdec.bench.kernels import describe_kernels
from mmdec.bench.report import BenchReport, BenchRun, Quantity
from mmdec.cli.reports import Destinations
from mmdec.demo import samples
from tests.browser.chromium import CHROMIUM, OFFLINE, PATIENCE
from tests.browser.demo_visitor import Visitor
from tests.support.demo_server import Server, serving

LOOKS = 2000  # milliseconds that a visitor looks at the page before the click
# The player makes its <audio> by createElement, inside a shadow tree that hides its events from the document.
WATCH = """(() => {
    window.pressed = 0; window.playable = 0;
    const make = Document.prototype.createElement;
    Document.prototype.createElement = function (name, ...more) {
        const made = make.call(this, name, ...more);
        if (String(name).toLowerCase() === 'audio') made.addEventListener('canplay', () => {
            const host = made.getRootNode().host || made;
            if (host.closest('#mm-translate-speech') && !window.playable) window.playable = performance.now();
        });
        return made;
    };
    document.addEventListener('click', () => { window.pressed ||= performance.now(); }, true);
})()"""


def click(browser: Any, server: Server) -> tuple[float, float]:
    """Milliseconds from the click to the sound, and of the server's processor until all is shown."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(server.address, wait_until="networkidle")
    button = page.get_by_role("button", name=samples.french()[0].text, exact=True)
    button.wait_for()
    page.wait_for_timeout(LOOKS)
    before = server.ask("cpu")
    button.click()
    page.wait_for_function("() => window.playable > 0")
    wall = page.evaluate("window.playable - window.pressed")
    page.locator("#mm-translate-results .mm-status.mm-done").wait_for()
    spent = server.ask("cpu") - before
    context.close()
    return wall, spent


def request(server: Server) -> float:
    """Milliseconds from the request to the sound's bytes, without a browser."""
    with Visitor(server.address) as visitor:
        start = time.perf_counter()
        visitor.press(samples.french()[0].text)
        result = 0.0
        for message in visitor.messages():
            if message["msg"] == "process_generating" and not result and (path := wav(message["output"])):
                assert len(visitor.client.get(f"gradio_api/file={path}").content) > 1000
                result = 1e3 * (time.perf_counter() - start)
        return result


def wav(output: Any) -> str:
    """Return the path of a sound in a message, at any depth; "" where there is none."""
    if isinstance(output, str):
        return output if output.startswith("/") and output.endswith(".wav") else ""
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, list) else ()
    return next((path for part in parts if (path := wav(part))), "")


def quantity(name: str, values: Sequence[float]) -> Quantity:
    """Median and range."""
    return Quantity(name, statistics.median(values), "ms", len(values), min(values), max(values))


def measure(repeats: int) -> BenchReport:
    """Time the whole way, then each of its parts."""
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="mmdec-sound-") as folder,
        serving(Path(folder), "warm") as server,
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", OFFLINE])
        first, *clicks = [click(browser, server) for _ in range(repeats + 1)]
        browser.close()
        requests = [request(server) for _ in range(repeats)]
        handled = [server.ask("sound") for _ in range(repeats)]
    quantities = (
        quantity("the very first click after the start, to canplay", [first[0]]),
        quantity("click to canplay, fresh page", [wall for wall, _ in clicks]),
        quantity("request to the sound's bytes, no browser", requests),
        quantity("handler's start to sound told, wall clock", [wall for wall, _ in handled]),
        quantity("handler's start to sound told, processor", [processor for _, processor in handled]),
        quantity("server's processor until all is drawn", [processor for _, processor in clicks]),
    )
    load = max(load, os.getloadavg()[0])
    title = f"The demo's first sound; load of the machine up to {load:.1f} on {os.cpu_count()} cores. Median and range."
    return BenchReport(
        "demo", title, describe_kernels(), quantities=quantities, details={"load": load, "repeats": repeats}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE|-", help="Write JSON to this file; -: print only that.")
    parser.add_argument("--against", type=Path, metavar="FILE", help="Compare with this saved JSON.")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    to = Destinations(json=options.json, against=options.against)
    to.deliver(BenchRun((measure(options.repeats),)))


if __name__ == "__main__":
    main()
