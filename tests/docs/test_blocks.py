"""Each Python block of the README and of the model cards runs, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import soundfile

from tests.conftest import RATE
from tests.support.hub_stand_in import write_cache
from tests.support.sample_files import put_samples

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "models").rglob("README.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{page.relative_to(ROOT)}:{number}": code
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
}
PROCESSES, SECONDS = 2, 300


def run(code: str, folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """A block in a fresh interpreter, in a folder that holds recordings and pictures of the names that it reads."""
    folder.mkdir()
    put_samples(folder, code)
    for name in ("models", "data"):
        (folder / name).symlink_to(ROOT / name)
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Future]]]:
    """All blocks at once, two at a time: most of a process is its imports."""
    place = tmp_path_factory.mktemp("blocks")
    cache = write_cache(place / "cache", " ".join(BLOCKS.values()))
    with ThreadPoolExecutor(PROCESSES) as pool:
        yield {
            name: (place / str(number), pool.submit(run, code, place / str(number), cache))
            for number, (name, code) in enumerate(BLOCKS.items())
        }


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs_by_itself(name: str, started: dict[str, tuple[Path, Future]]) -> None:
    folder, future = started[name]
    done = future.result()
    assert done.returncode == 0, f"{name}\n{done.stderr}"
    for saved in re.findall(r'\.save\("(\w+\.wav)"\)', BLOCKS[name]):
        assert soundfile.info(folder / saved).samplerate == RATE
    assert ("print(" in BLOCKS[name]) == bool(done.stdout.strip())


def test_every_page_has_blocks() -> None:
    assert {name.partition(":")[0] for name in BLOCKS} == {str(page.relative_to(ROOT)) for page in PAGES}
