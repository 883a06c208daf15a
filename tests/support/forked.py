"""Runs pieces of Python, each in a process of its own: `python -m tests.support.forked < jobs.json > results.json`.

torch, transformers, mmdec and the models that calls use by default are loaded once; each piece then runs in a fork of
that process, in namespace and folder of its own. A piece takes its own seconds instead of another import of everything,
which is most of a small example.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

SECONDS = 300
DEFAULTS = ("daspeech-everyday", "whisper-phrasebook", "vlm-scenes")  # models of calls that name none


def run(job: dict[str, Any]) -> dict[str, Any]:
    """job: "name", "code" and the "folder" that it runs in. Gives its name, returncode, stdout and stderr."""
    folder = Path(job["folder"])
    paths = folder / "stdout.txt", folder / "stderr.txt"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, path in enumerate(paths, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(folder)
            signal.alarm(SECONDS)
            exec(compile(job["code"], job["name"], "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    out, err = (path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in paths)
    return {"name": job["name"], "returncode": os.waitstatus_to_exitcode(status), "stdout": out, "stderr": err}


def results_of(jobs: list[dict[str, Any]], cache: Path) -> dict[str, dict[str, Any]]:
    """What `run` gives of each job, by its name. Hub ids are those in `cache`; warnings are errors."""
    root = Path(__file__).parents[2]
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.forked"],
        input=json.dumps(jobs),
        cwd=root,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {result["name"]: result for result in json.loads(done.stdout)}


def main() -> None:
    """Command line."""
    import torch
    import transformers

    import mmdec

    assert torch.__version__
    assert transformers.__version__
    for name in ("translate_speech", "transcribe", "describe", "generate"):
        getattr(mmdec, name)  # what they import
    for name in DEFAULTS:
        mmdec.load(name)  # once here, else in each piece
    gc.freeze()  # pieces need not look through what they share
    print(json.dumps([run(job) for job in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
