"""The demo's page in a process of its own, for tests: it says its port, then answers questions line by line.

"running" -> requests that are being decoded, "memory" -> resident bytes; the end of the input ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Server:
    """The other process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._answer()["address"]

    def ask(self, question: str) -> int:
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


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server whose uploads lie in `folder`; what it wrote to stderr lies there, too."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADIO_TEMP_DIR": str(folder / "uploads")}
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.demo_server"],
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


def main() -> None:
    from mmdec.demo import background, page

    _, address, _ = page.build().launch(
        server_name="127.0.0.1", quiet=True, prevent_thread_lock=True, inbrowser=False, **page.options()
    )
    print(json.dumps({"address": address}), flush=True)
    answers = {
        "running": background.running,
        "memory": lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }
    for line in sys.stdin:
        question = line.strip()
        print(json.dumps({question: answers[question]()}), flush=True)
    os._exit(0)  # Gradio's threads are not waited for


if __name__ == "__main__":
    main()
