"""`mmdec transcribe -`: sound from standard input to text, while it arrives."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, final

from mmdec import InputError
from mmdec.checks.files import json_text
from mmdec.cli.options import STDOUT
from mmdec.pipelines.transcription.transcript import clock, srt, vtt

if TYPE_CHECKING:
    from mmdec import StreamUpdate

STDIN = STDOUT  # "-"
ERASE = "\r\x1b[K"


def check_live(inputs: list[str], **refused: object) -> bool:
    """Whether the input is standard input. Raises InputError if it is not alone, or an option does not fit."""
    if STDIN not in inputs:
        return False
    if len(inputs) > 1:
        raise InputError(f"`IN` must be {STDIN} alone, for standard input, or files, but is both. Call it twice.")
    for name, given in refused.items():
        if given:
            raise InputError(
                f"`--{name.replace('_', '-')}` must be left out for standard input, but is given. Redirect the output "
                "instead, for instance with > talk.srt."
            )
    return True


def transcribe_input(
    stream: BinaryIO,
    kind: str,
    as_json: bool,
    form: tuple[int | None, str | None],
    live: Callable[..., Any],
    whole: Callable[[BinaryIO], str],
) -> None:
    """Print the text of a stream: while it arrives for samples or a wav, at its end for another sound file.

    kind: text, json, srt or vtt. form: rate and encoding, where they were given; then the stream is samples.
    live: makes a `LiveTranscriber` from the stream's rate. whole: the lines for a file object.
    """
    from mmdec.pipelines.transcription.live import piped

    sound = piped(stream, *form)
    if not isinstance(sound, tuple):
        print(whole(sound), flush=True)
        return
    rate, pieces = sound
    transcriber, printer = live(sample_rate=rate), Printer(kind, as_json)
    failure: InputError | None = None
    try:
        for piece in pieces:
            for update in transcriber.feed(piece):
                printer.show(update)
    except KeyboardInterrupt:  # the recording ends here, and what was said is still written down
        pass
    except InputError as error:
        failure = error
    for update in transcriber.end():
        printer.show(update)
    if not transcriber.seconds and failure is None:
        failure = InputError("`audio` must hold at least one sample, but standard input is empty. Pipe sound into it.")
    if failure is not None:
        raise failure


@final
@dataclass
class Printer:
    """Prints updates: final text on stdout; provisional text on stderr in a line that is overwritten, on a terminal."""

    kind: str
    as_json: bool
    cues: int = 0  # subtitles printed so far
    terminal: bool = field(default_factory=lambda: sys.stderr.isatty())

    def show(self, update: StreamUpdate) -> None:
        """Print one update."""
        if self.as_json:
            print(json_text(as_fields(update)), flush=True)
            return
        if self.terminal:
            columns = shutil.get_terminal_size().columns - 1
            print(ERASE + ("" if update.final else update.text[-columns:]), end="", file=sys.stderr, flush=True)
        if update.final and update.text:
            print(self._lines(update), flush=True)

    def _lines(self, update: StreamUpdate) -> str:
        if self.kind == "text":
            lines = [f"[{clock(part.start)} --> {clock(part.end)}] {part.text}" for part in update.segments]
            return "\n".join(lines or [update.text])
        if self.kind == "json":
            return json_text(as_fields(update))
        first, self.cues = self.cues + 1, self.cues + 1
        if self.kind == "vtt":
            content = vtt(update.segments)
            return content if first == 1 else content.removeprefix("WEBVTT\n\n")
        content = srt(update.segments, first)
        self.cues += content.count(" --> ") - 1
        return content


def as_fields(update: StreamUpdate) -> Mapping[str, Any]:
    """An update as a dict for JSON: its transcript's fields, with times from the stream's beginning."""
    from dataclasses import asdict

    own = {"start": update.start, "end": update.end, "final": update.final}
    return {**own, **update.transcript.to_dict(), "segments": [asdict(segment) for segment in update.segments]}
