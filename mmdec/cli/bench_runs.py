"""`mmdec bench all` and `mmdec bench show`: every benchmark in turn, and saved runs shown again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer

from mmdec import InputError
from mmdec.cli.options import WHISPER_CORPUS, BenchDevice, BenchThreads, log
from mmdec.cli.reports import Against, Destinations, JsonTo, MarkdownTo, PlotsTo, reporting
from mmdec.evaluation.bench.report import BenchRun, load_run, merged, reader

ORDER = (
    "kernels",
    "passes",
    "core",
    "speech",
    "asr",
    "vlm",
    "compressor",
    "paper",
)
SAMPLES = Path("data/samples/english")  # where there is no corpus
SCENES, PICTURES = Path("data/scenes/test.json"), Path("data/samples/images/samples.tsv")  # the same for pictures
GRACE = 10  # seconds that a benchmark out of time has to end

Names = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="One of all; repeat it for several. Default: all.")
]


@reporting
def everything(
    only: Names = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time limit in minutes of each benchmark.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="The fewest repeats, sizes and inputs: does it work?")] = False,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchRun:
    """Each benchmark in turn, in a process of its own, with a time limit; what was left out is named.

    The exit code is 1 if one was left out.
    """
    unknown = sorted(set(only or ()) - set(ORDER))
    if unknown:
        raise InputError(f"`--only` must be one of {', '.join(ORDER)}, but is {unknown[0]!r:.60}. Choose from these.")
    reader()  # each benchmark's report is read again: what that needs is missed before anything is measured
    chosen = [name for name in ORDER if not only or name in only]
    runs: list[BenchRun] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mmdec-bench-") as folder:
        for name in chosen:
            path = Path(folder) / f"{name}.json"
            log(f"{name}: at most {minutes:g} minutes")
            reason = _run(_command(name, path, device, threads, quick), 60 * minutes)
            if reason:
                log(f"{name}: {reason}")
                left_out[name] = reason
            else:
                runs.append(load_run(path))
    return merged([*runs, BenchRun((), left_out)])


QUICK: dict[str, list[str]] = {
    "core": ["--sizes", "2M"],
    "asr": ["--per-bin", "1", "--batch", "2"],
    "vlm": ["--per-task", "1", "--max-new-tokens", "16"],
    "compressor": ["--size", "small", "--visual", "64"],
}


def _command(name: str, path: Path, device: str, threads: int, quick: bool) -> list[str]:
    words = [sys.executable, "-m", "mmdec", "bench", name, "--json", str(path)]
    words += ["--device", device, "--threads", str(threads)]
    return words + (["--repeats", "1", *QUICK.get(name, [])] if quick else [])


def sample_recordings() -> list[Path]:
    """What `bench asr` measures where there is no corpus: the samples of a checkout."""
    return [] if WHISPER_CORPUS.exists() else _told(sorted(SAMPLES.glob("*.flac")), SAMPLES)


def sample_questions() -> Path | None:
    """The same for `bench vlm`."""
    return None if SCENES.exists() else next(iter(_told([PICTURES] if PICTURES.is_file() else [], PICTURES)), None)


def _told(found: list[Path], where: Path) -> list[Path]:
    if found:
        log(f"no corpus is here: the samples are measured, {where}")
    return found


def _run(command: Sequence[str], seconds: float) -> str:
    """Run a benchmark; why there is no report, or "". Its progress goes to stderr, its table is not shown."""
    last = deque[str](maxlen=1)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        reader = Thread(target=_forward, args=(process.stderr, last))
        reader.start()
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            return f"not done in {seconds / 60:g} minutes"
        except BaseException:
            process.kill()
            raise
        finally:
            reader.join(GRACE)
    if code == 0:
        return ""
    return (last[0] if last else f"it ended with exit code {code}").removeprefix("error: ")[:300]


def _forward(lines: Iterable[str], last: deque[str]) -> None:
    for line in lines:
        sys.stderr.write(line)
        if line.strip():
            last.append(line.strip())


def show_saved(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON of `mmdec bench`.")],
    metrics: Annotated[
        Path | None, typer.Option(metavar="CSV", help="With --plots: a metrics.csv of Lightning, as training curves.")
    ] = None,
    json_to: JsonTo = None,
    markdown: MarkdownTo = None,
    plots: PlotsTo = None,
    against: Against = None,
) -> None:
    """Show saved runs again: as a table, as Markdown, as plots, beside another run. Nothing is measured."""
    to = Destinations(None, json_to, markdown, plots, against, metrics)
    to.deliver(merged([load_run(path) for path in files]))
