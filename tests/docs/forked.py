"""Runs pieces of Python, each in a separate process: `python -m tests.docs.forked < jobs.json > results.json`.

torch, transformers, mmdec and the models that calls use by default are loaded once. Each piece then runs in a fork of
that process, with its own namespace and folder. So the import, which takes most of a small example's time, is done
once.
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

SECONDS = 300  # time limit of a piece
DEFAULTS = ("daspeech-everyday", "whisper-tiny.en", "vlm-scenes")  # models of calls that name none


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one piece in a fork. job: its "name", its "code" and the "folder" to run in. Returns its "name",
    "returncode", "stdout" and "stderr"."""
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
    """Run all jobs in a new process. Returns name -> result of `run`. cache: a hub cache, used without network.
    Warnings are errors, but for that of drafts that bring nothing: models and drafters of the hub have stand-ins."""
    root = Path(__file__).parents[2]
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:drafter:UserWarning", "-m", "tests.docs.forked"],
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
    """Run the command line."""
    import torch
    import transformers

    import mmdec

    assert torch.__version__
    assert transformers.__version__
    for name in ("translate_speech", "transcribe", "describe", "generate"):
        getattr(mmdec, name)  # imports the modules that the call needs
    for name in DEFAULTS:
        mmdec.load(name)  # the forks share the loaded model
    gc.freeze()  # the forks' garbage collectors need not scan the shared objects
    print(json.dumps([run(job) for job in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
