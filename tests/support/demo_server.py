"""The demo's page in a separate process, for tests. It prints its address, then answers questions line by line.

"running" -> number of requests that are being decoded; "memory" -> resident bytes; "cpu" -> milliseconds of processor
time since the start; "sound" -> milliseconds until a translated sample's sound is reported, wall clock and processor.
The process ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Server:
    """The page's process, for the test that started it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._answer()["address"]

    def ask(self, question: str) -> Any:
        """Ask a question and return the answer. Raises AssertionError if the server has died."""
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._answer()[question]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise AssertionError("the server has died")


def true_english() -> dict[str, list[str]]:
    """Return the French samples' accepted translations: French text -> English texts, in the page's order."""
    lines = (ROOT / "data" / "samples" / "samples.tsv").read_text(encoding="utf-8").splitlines()
    return {french: english for _, french, *english in (line.split("\t") for line in lines)}


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """Run a server with its uploads and its stderr in `folder`. words: "warm": run every model once before the page is
    served, as `mmdec demo` does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADIO_TEMP_DIR": str(folder / "uploads")}
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.demo_server", *words],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def sound() -> list[float]:
    """Translate the first sample with the tab's function, without Gradio. Returns milliseconds until its sound was
    reported: wall clock and processor."""
    from mmdec.demo import background, translate

    way = translate.default_way()
    wall, processor = time.perf_counter(), time.process_time()
    reports = background.updates(lambda tell: translate.sample_work(tell, 0, way))
    while next(reports).get("speech") is None:
        pass
    spent = [1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)]
    for _ in reports:
        pass
    return spent


def main() -> None:
    from mmdec.demo import limits as guard
    from mmdec.demo import page

    if "warm" in sys.argv:
        page.warm_up()
    with guard.private_uploads():
        blocks = page.build_page()
        _, address, _ = blocks.launch(
            quiet=True, prevent_thread_lock=True, inbrowser=False, **page.options(blocks, "127.0.0.1", ["demo.example"])
        )
        answer(address)
    os._exit(0)  # do not wait for Gradio's threads


def count_requests() -> int:
    """Count the demo's requests whose work has not ended."""
    from mmdec.demo.background import WORK_THREAD

    return sum(thread.name == WORK_THREAD for thread in threading.enumerate())


def answer(address: str) -> None:
    """Print the address, then answer questions until the input ends."""
    print(json.dumps({"address": address}), flush=True)
    answers = {
        "running": count_requests,
        "cpu": lambda: 1e3 * time.process_time(),
        "sound": sound,
        "memory": lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
    for line in sys.stdin:
        question = line.strip()
        print(json.dumps({question: answers[question]()}), flush=True)


if __name__ == "__main__":
    main()
