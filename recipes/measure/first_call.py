r"""Measures `mmdec transcribe` in a fresh process, beside what it cannot avoid: imports and a warm call.

python recipes/measure/first_call.py --recording jfk.flac [--model whisper-tiny.en]

In turn, for `--runs` times: the command; a process that only imports torch and transformers' Whisper classes; and a
process that transcribes the recording twice and times its steps, the second call included. CPU time depends less on
other programs than the wall clock does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from mmdec.errors import exit_on_error

IMPORTS = "import torch; from transformers import WhisperForConditionalGeneration, WhisperProcessor"
STEPS = """
import json, sys, time
clock = [(time.perf_counter(), time.process_time())]
seconds = {}
def step(name):
    clock.append((time.perf_counter(), time.process_time()))
    seconds[name] = [after - before for before, after in zip(*clock[-2:])]
import torch
step("import torch")
from transformers import WhisperForConditionalGeneration, WhisperProcessor
step("import transformers' Whisper")
import mmdec
from mmdec.whisper.transcribe import load_transcriber
step("import mmdec")
model = load_transcriber(sys.argv[1], "cpu")
step("load the model")
mmdec.transcribe(sys.argv[2], model=model)
step("first call")
mmdec.transcribe(sys.argv[2], model=model)
step("warm call")
print(json.dumps(seconds))
"""


def run(command: Sequence[str], threads: int) -> tuple[str, tuple[float, float]]:
    """Run a command. Returns what it printed, and its wall-clock and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, (wall, cpu_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="whisper-tiny.en", help="name, folder or Hugging Face id of a Whisper")
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    sound, python = str(options.recording), sys.executable
    whole, imports, steps = [], [], dict[str, list[tuple[float, float]]]()
    command = [str(Path(python).with_name("mmdec")), "transcribe", sound, "--model", options.model, "--device", "cpu"]
    for _ in range(options.runs):
        whole.append(run([*command, "--threads", str(options.threads)], options.threads)[1])
        imports.append(run([python, "-c", IMPORTS], options.threads)[1])
        printed = run([python, "-c", STEPS, options.model, sound], options.threads)[0]
        for name, seconds in json.loads(printed.splitlines()[-1]).items():
            steps.setdefault(name, []).append(seconds)
    rest = [
        tuple(a - b - c for a, b, c in zip(*parts, strict=True))
        for parts in zip(whole, imports, steps["warm call"], strict=True)
    ]
    rows = {"the command": whole, "imports alone": imports, **steps, "the command, less imports and a warm call": rest}
    print("| what | s (least to greatest) | CPU s |\n| --- | --- | --- |")
    for name, runs in rows.items():
        cells = (f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in zip(*runs, strict=True))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    with exit_on_error():
        main()
