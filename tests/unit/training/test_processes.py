"""Tests that a killed process's children end and its lock is freed, and that folders are written whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder
from mmdec.training.processes import lock_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


def until(happened: Callable[[], bool]) -> None:
    """Wait for another process. What is asserted is that it happened, not when."""
    for _ in range(9000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def alive(pid: int) -> bool:
    """Neither gone nor waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"])


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A killed process leaves a file behind, but no lock."""
    holder = start(
        "import time\nfrom pathlib import Path\nfrom mmdec.training.processes import lock_folder\n"
        f"with lock_folder(Path({str(tmp_path)!r}), 'mmdec train drafter'):\n"
        f"    Path({str(tmp_path / 'held')!r}).touch()\n    time.sleep(600)\n"
    )
    try:
        until((tmp_path / "held").exists)
        with pytest.raises(InputError, match=f"process {holder.pid}"), lock_folder(tmp_path, "mmdec train drafter"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
    with lock_folder(tmp_path, "mmdec train drafter"):
        assert (tmp_path / ".lock").is_file()


CHILD = "{call}; import os, time, pathlib; pathlib.Path({file!r}).write_text(str(os.getpid())); time.sleep(600)"


@LINUX
def test_children_and_grandchildren_end_with_a_killed_parent(tmp_path: Path) -> None:
    """The parent is like a trainer, and the child like the second trainer that it starts."""
    call = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mmdec.training.processes import end_with_named_parent; "
    )
    call += "end_with_named_parent()"
    inner = CHILD.format(call=call, file=str(tmp_path / "inner"))
    starts = f"{call}; import subprocess; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    outer = CHILD.format(call=starts, file=str(tmp_path / "outer"))
    parent = start(
        "import os, subprocess\nfrom mmdec.training.processes import child_environment\n"
        f"subprocess.run([sys.executable, '-c', {outer!r}], env={{**os.environ, **child_environment()}})\n"
    )
    pid_files = [tmp_path / "outer", tmp_path / "inner"]
    try:
        until(lambda: all(path.is_file() and path.read_text() for path in pid_files))
        children = [int(path.read_text()) for path in pid_files]
        assert all(map(alive, children))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
    until(lambda: not any(map(alive, children)))


@LINUX
@pytest.mark.parametrize(
    ("path", "call"),
    [
        (ROOT, "from mmdec.daspeech.training.data import begin_worker as begin"),
        (ROOT / "data" / "build", "from parent import end_with_parent as begin"),
    ],
)
def test_workers_of_a_corpus_end_with_a_killed_parent(tmp_path: Path, path: Path, call: str) -> None:
    parent = start(
        f"sys.path.insert(0, {str(path)!r})\n{call}\nimport os, pathlib\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(2, initializer=begin, initargs=(os.getpid(),)) as pool:\n"
        "    pool.submit(os.getpid).result()\n"
        f"    pathlib.Path({str(tmp_path / 'part')!r}).write_text(' '.join(map(str, pool._processes)))\n"
        f"    os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pids')!r})\n"
        "    import time; time.sleep(600)\n"
    )
    try:
        until((tmp_path / "pids").is_file)
        workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(workers) == 2
        assert all(map(alive, workers))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
    until(lambda: not any(map(alive, workers)))


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "model"
    for text in ("first", "second"):
        with atomic_folder(place) as fresh:
            (fresh / "weights").write_text(text)
            assert not place.exists() or (place / "weights").read_text() == "first"
        assert (place / "weights").read_text() == text
    with pytest.raises(FileNotFoundError), atomic_folder(place) as fresh:
        (fresh / "weights").write_bytes((tmp_path / "missing").read_bytes())
    assert (place / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    place.rename(tmp_path / ".model.old")  # as a process that was killed between two renames leaves it
    with pytest.raises(KeyError), atomic_folder(place):
        raise KeyError("no")
    assert (place / "weights").read_text() == "second"
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"), atomic_folder(tmp_path / "file"):
        pass
