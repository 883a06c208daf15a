"""Each Python block of the README and of the model cards runs, in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import soundfile

from tests.conftest import RATE
from tests.support.forked import results_of
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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each block in a process of its own, in a folder that holds recordings and pictures of the names that it reads."""
    place = tmp_path_factory.mktemp("blocks")
    cache = write_cache(place / "cache", " ".join(BLOCKS.values()))
    jobs = []
    for number, (name, code) in enumerate(BLOCKS.items()):
        folder = place / str(number)
        folder.mkdir()
        put_samples(folder, code)
        for linked in ("models", "data"):
            (folder / linked).symlink_to(ROOT / linked)
        jobs.append({"name": name, "code": code, "folder": str(folder)})
    done = results_of(jobs, cache)
    return {job["name"]: {**done[job["name"]], "folder": Path(job["folder"])} for job in jobs}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs_by_itself(name: str, results: dict[str, dict[str, Any]]) -> None:
    done = results[name]
    assert done["returncode"] == 0, f"{name}\n{done['stderr']}"
    for saved in re.findall(r'\.save\("(\w+\.wav)"\)', BLOCKS[name]):
        assert soundfile.info(done["folder"] / saved).samplerate == RATE
    assert ("print(" in BLOCKS[name]) == bool(done["stdout"].strip())


def test_every_page_has_blocks() -> None:
    assert {name.partition(":")[0] for name in BLOCKS} == {str(page.relative_to(ROOT)) for page in PAGES}
