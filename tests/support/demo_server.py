"""The demo's page in a process of its own, for tests: it says its port, then answers questions line by line.

"running" -> requests that are being decoded, "memory" -> resident bytes, "cpu" -> milliseconds of processor time since
the start, "sound" -> milliseconds until a translated sample's sound is told: wall clock and processor; the end of the
input ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Server:
    """The other process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._answer()["address"]

    def ask(self, question: str) -> Any:
        """Raises where the server has died."""
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
    """What the French samples mean: every accepted English text, by the French one, in the page's order."""
    lines = (ROOT / "data" / "samples" / "samples.tsv").read_text(encoding="utf-8").splitlines()
    return {french: english for _, french, *english in (line.split("\t") for line in lines)}


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """A server whose uploads lie in `folder`; what it wrote to stderr lies there, too. words: "warm" runs every model
    before the page is there, as `mmdec demo` does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADIO_TEMP_DIR": str(folder / "uploads")}
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.demo_server", *words],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
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
    """The first sample through the tab's own work, without Gradio."""
    from mmdec.demo import background, translate

    way = translate.own_way()
    wall, processor = time.perf_counter(), time.process_time()
    reports = background.updates(lambda tell: translate.sample_work(tell, 0, way))
    while next(reports).get("speech") is None:
        pass
    spent = [1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)]
    for _ in reports:
        pass
    return spent


def main() -> None:
    from mmdec.demo import guard, page

    if "warm" in sys.argv:
        page.warm()
    with guard.private_uploads():
        blocks = page.build()
        _, address, _ = blocks.launch(
            quiet=True, prevent_thread_lock=True, inbrowser=False, **page.options(blocks, "127.0.0.1", ["demo.example"])
        )
        answer(address)
    os._exit(0)  # Gradio's threads are not waited for


def answer(address: str) -> None:
    """Say the address, then answer questions until the input ends."""
    from mmdec.demo import background

    print(json.dumps({"address": address}), flush=True)
    answers = {
        "running": background.running,
        "cpu": lambda: 1e3 * time.process_time(),
        "sound": sound,
        "memory": lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
    for line in sys.stdin:
        question = line.strip()
        print(json.dumps({question: answers[question]()}), flush=True)


if __name__ == "__main__":
    main()
