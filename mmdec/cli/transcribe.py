"""`mmdec transcribe`: audio files, or standard input while it arrives, to text, subtitles or JSON."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from mmdec import InputError
from mmdec.checks.files import json_text, printable, quote_path
from mmdec.cli.compare import Compare, Comparer
from mmdec.cli.inputs import AUDIO_FILES, input_files, output_paths, try_write
from mmdec.cli.job_options import JobOptions
from mmdec.cli.options import (
    STDOUT,
    Device,
    Dtype,
    JsonLines,
    MaxNewTokens,
    Model,
    is_typed,
    resolve_dtype,
    silence_transformers,
    with_option_groups,
)
from mmdec.cli.outcomes import Outcomes, decode_all, print_note
from mmdec.cli.progress import progress_bar, show_loading
from mmdec.jobs.many import MAX_BYTES_PER_CALL, Work, decode_each, divide_by_bytes
from mmdec.whisper.options import DEFAULT_WHISPER, OnTranscript, TranscribeOptions
from mmdec.whisper.transcript import SUBTITLE_FORMATS, TRANSCRIPT_FORMATS, format_clock, srt, vtt

if TYPE_CHECKING:
    from mmdec import StreamUpdate
    from mmdec.whisper.transcribe import LoadedTranscriber
    from mmdec.whisper.transcript import Transcript

# heading of a separate table of options in the help, because their names are long
FALLBACK = "Long recordings, and windows that are decoded again"
DRAFT = "Another text as the draft"
FILE_OPTIONS = ("batch_size", "min_confidence", "cut_at_pauses")  # options of the call that a stream refuses
SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt"}

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="IN...",
        help="Audio files, or folders: all audio files in them and in their folders. Or -: standard input, transcribed "
        "while it arrives; a wav stream, or samples of 16 kHz and 16 bit in one channel.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="OUT", help="A folder; for one input also a .txt, .json, .srt or .vtt file."
    ),
]
Format = Annotated[str | None, typer.Option("--format", "-f", help="Output format: text, json, srt or vtt.")]
LIVE = "Sound from standard input (-)"
Rate = Annotated[
    int | None,
    typer.Option("--rate", metavar="HZ", rich_help_panel=LIVE, help="Hz of samples without a header. Default: 16000."),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LIVE, help="Samples without a header: s16, s24, s32, u8 or f32, little-endian. Default: s16."
    ),
]
Every = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        rich_help_panel=LIVE,
        help="Seconds after which provisional text is renewed; 0: none. Default: 1.",
    ),
]
Pause = Annotated[
    float | None,
    typer.Option(metavar="S", rich_help_panel=LIVE, help="Seconds of silence after which text is final. Default: 1."),
]


@final
@dataclass(frozen=True)
class LiveOptions:
    """The options of sound from standard input."""

    rate: Rate = None
    encoding: Encoding = None
    every: Every = None
    pause: Pause = None

    @property
    def stream(self) -> dict[str, float | None]:
        """These options as keyword arguments of `LiveTranscriber`."""
        every = 1.0 if self.every is None else self.every or None
        return {"every": every, "pause": 1.0 if self.pause is None else self.pause}


Temperature = Annotated[
    list[float] | None,
    typer.Option(
        metavar="T",
        rich_help_panel=FALLBACK,
        help="0 is greedy decoding. Repeat it to retry a failed window at higher temperatures.",
    ),
]
LogprobThreshold = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        rich_help_panel=FALLBACK,
        help="Retry a window whose mean log-probability is lower. Whisper's own: -1.",
    ),
]
CompressionThreshold = Annotated[
    float | None,
    typer.Option(
        metavar="R", rich_help_panel=FALLBACK, help="Retry a window whose text compresses by more. Whisper's own: 1.35."
    ),
]
NoSpeechThreshold = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        rich_help_panel=FALLBACK,
        help="Skip an unlikely window as silence if its no-speech probability is higher. Whisper's own: 0.6.",
    ),
]
Condition = Annotated[
    bool,
    typer.Option(
        "--condition-on-prev-tokens", rich_help_panel=FALLBACK, help="Give each window the text of the window before."
    ),
]


@final
@dataclass(frozen=True)
class FallbackOptions:
    """The options of `generate` for windows: temperatures to fall back to, and when."""

    temperature: Temperature = None
    logprob_threshold: LogprobThreshold = None
    compression_ratio_threshold: CompressionThreshold = None
    no_speech_threshold: NoSpeechThreshold = None
    condition_on_prev_tokens: Condition = False
    max_new_tokens: MaxNewTokens = None

    @property
    def generate(self) -> dict[str, Any]:
        """Those that are given, as keyword arguments of `generate`."""
        options = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        if self.temperature:
            options["temperature"] = self.temperature[0] if len(self.temperature) == 1 else tuple(self.temperature)
        return options


DraftText = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=DRAFT,
        help="A text like the recording's (.txt, .srt, .vtt): its words are the draft. For several recordings a "
        "folder, with a file of each one's name.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        rich_help_panel=DRAFT,
        help="A faster recogniser, whose words are the draft: a Whisper, or a CTC model of transformers; a name, a "
        "folder or a Hugging Face id.",
    ),
]


@final
@dataclass(frozen=True)
class DraftOptions:
    """The options of `mmdec.hypothesis`."""

    draft_text: DraftText = None
    draft_model: DraftModel = None

    def drafters(self, files: Sequence[Path], device: str | None) -> Callable[[Sequence[Path]], Any]:
        """Return a function that makes the drafter of a batch of these files.

        Args:
            device: Where the model that drafts runs.

        Raises:
            InputError: If a text or the model is missing.
        """
        from mmdec import hypothesis

        if self.draft_model is not None:
            recogniser = hypothesis(Path(self.draft_model), device=device)  # a path is never taken for a text
            return lambda batch: recogniser
        assert self.draft_text is not None
        texts = {file: _draft_file(self.draft_text, file, files) for file in files}
        return lambda batch: hypothesis([texts[file] for file in batch])


def _draft_file(source: Path, recording: Path, recordings: Sequence[Path]) -> Path:
    """Return the text of a recording: `source`, or if that is a folder, the file in it with the recording's name."""
    from mmdec.whisper.hypothesis_call import text_for

    if source.is_dir():
        return text_for(recording, source)
    if len(recordings) > 1:
        raise InputError(
            f"`--draft-text` must be a folder for {len(recordings)} recordings, but is '{quote_path(source)}'. Put a "
            "text of each into one."
        )
    if not source.is_file():
        raise InputError(
            f"`--draft-text` must be a file or a folder, but '{quote_path(source)}' does not exist. Check the path."
        )
    return source


@with_option_groups
def transcribe(
    context: typer.Context,
    inputs: Inputs,
    output: Output = None,
    kind: Format = None,
    as_json: JsonLines = False,
    model: Model = DEFAULT_WHISPER,
    device: Device = None,
    dtype: Dtype = None,
    compare: Compare = False,
    options: TranscribeOptions = TranscribeOptions(),
    windows: FallbackOptions = FallbackOptions(),
    drafts: DraftOptions = DraftOptions(),
    live: LiveOptions = LiveOptions(),
    job: JobOptions = JobOptions(),
) -> None:
    """Transcribe speech with a Whisper or an audio language model.

    A drafter makes it faster; the text stays the model's own.

    A Whisper transcribes standard input while it arrives: arecord -f S16_LE -r 16000 -t raw | mmdec transcribe -

    If a file fails, the others are still transcribed. Failed files are listed, and the exit code is 1.
    """
    kind = _format(kind, output, as_json)
    drafter = options.drafter
    given = [f"--{name.replace('_', '-')}" for name, value in vars(drafts).items() if value is not None]
    if len(given) + is_typed(context, "drafter") > 1:
        raise InputError(f"`{given[0]}` cannot be combined with `{given[1] if given[1:] else '--drafter'}`.")
    options = replace(
        options,
        drafter=None if drafter == "none" else drafter,
        timestamps=options.timestamps or ("segment" if kind in SUBTITLE_FORMATS else None),
        batch_size=1 if compare else options.batch_size,
        generate_options=windows.generate,
    )
    of_files = {
        "output": output,
        "compare": compare,
        **{name: getattr(options, name) for name in FILE_OPTIONS if is_typed(context, name)},
        **vars(drafts),
        **vars(job),
    }
    if reads_stdin(inputs, of_files, vars(live)):
        whisper = _load(model, device, dtype, quiet=as_json)
        return _live(whisper, kind, as_json, live, options)
    if job.has_many_inputs(inputs):
        files = SUFFIXES[kind] if kind in SUBTITLE_FORMATS else ""
        work = Work("transcribe", model, options=options.changed(), files=files, device=device, dtype=dtype)
        return job.run(work, inputs, output, AUDIO_FILES, {"compare": compare, **vars(drafts)})
    comparer = Comparer(compare, str(drafter), temperature=bool(windows.temperature))
    files = input_files(inputs, AUDIO_FILES, output)
    targets = output_paths([file.path for file in files], output, tuple(SUFFIXES.values()), SUFFIXES[kind])
    outcomes = Outcomes(files, targets, model)
    drafters = drafts.drafters([file.path for file, _ in outcomes.todo], device) if given else None
    whisper = _load(model, device, dtype, quiet=as_json)

    def report(index: int, result: Transcript | str) -> None:
        file, target = outcomes.todo[index]
        error = result if isinstance(result, str) else try_write(target, result.format(kind))
        if error:
            outcomes.add_failure(file.name, error)
        elif not isinstance(result, str):
            print(
                _report(file.path, target, result, kind, as_json, outcomes.has_many_files, comparer.fields()),
                flush=True,
            )
            print_note(file.name, result.note)
            comparer.print_comparison(file.name, outcomes.has_many_files)
            outcomes.add_output(file.name, result.confidence, result.calibrated)

    _transcribe_all([file.path for file, _ in outcomes.todo], whisper, options, comparer, drafters, report)
    outcomes.finish(comparer.code)


def _load(model: str, device: str | None, dtype: str | None, quiet: bool) -> LoadedTranscriber:
    with show_loading(model, quiet):
        from mmdec.whisper.transcribe import load_transcriber

        silence_transformers()
        return load_transcriber(model, device, resolve_dtype(dtype, device, integers=True))


def _transcribe_all(
    inputs: Sequence[Path],
    whisper: LoadedTranscriber,
    options: TranscribeOptions,
    comparer: Comparer,
    drafters: Callable[[Sequence[Path]], Any] | None,
    report: Callable[[int, Any], None],
) -> None:
    """Transcribe the inputs in as few calls as memory allows.

    Args:
        comparer: For `--compare`, decodes each input without drafts, too.
        drafters: Makes the drafter of a call; None: it is the option's.
        report: Called with each input's index, and its transcript or an error message.
    """
    from mmdec import transcribe

    with progress_bar(count=False) as progress:

        def transcribe_batch(batch: Sequence[Path], first: int) -> None:
            task = progress.add_task(batch[0].name if len(batch) == 1 else f"{batch[0].name} ...", total=None)

            def call(files: list[Path], on_transcript: OnTranscript | None = None, **drafting: Any) -> list[Transcript]:
                if drafters is not None:
                    drafting = {"drafter": drafters(files), **drafting}
                return transcribe(
                    files,
                    model=whisper,
                    progress=lambda done, total: progress.update(task, completed=done, total=total),
                    on_transcript=on_transcript,
                    **{**options.changed(), **drafting},
                )

            if comparer.on:
                report(first, *decode_each(batch, comparer.both(call)))
            else:
                decode_all(batch, call, lambda index, result: report(first + index, result), options.min_confidence)
            progress.remove_task(task)

        first = 0
        calls = divide_by_bytes(inputs, lambda path: path, MAX_BYTES_PER_CALL, options.batch_size)
        for batch in [[path] for path in inputs] if comparer.on else calls:
            transcribe_batch(batch, first)
            first += len(batch)


def _format(kind: str | None, output: Path | None, as_json: bool) -> str:
    """Choose the output format: `--format` (`kind`), else the suffix of `--output`, else text."""
    named = next((name for name, suffix in SUFFIXES.items() if output and output.suffix.lower() == suffix), None)
    if output is not None and os.path.isdir(output):
        named = None
    if kind is not None and kind not in TRANSCRIPT_FORMATS:
        raise InputError(f"`--format` must be one of {', '.join(TRANSCRIPT_FORMATS)}, but is {kind!r}.")
    if kind is not None and named is not None and kind != named:
        raise InputError(f"`--format` must fit `--output`, '{output}', but is {kind!r}. Leave it out.")
    kind = kind or named or "text"
    if as_json and output is None and kind not in ("text", "json"):
        raise InputError(f"`--format` must be left out with `--json`, but is {kind!r}. Name an `--output` for it.")
    return kind


def _report(
    source: Path,
    target: Path | None,
    result: Transcript,
    kind: str,
    as_json: bool,
    has_many_files: bool,
    compared: dict[str, Any],
) -> str:
    """Format the lines to print for one file.

    Args:
        kind: text, json, srt or vtt.
        target: The file that has the transcript; None: there is none.
        has_many_files: Whether there are other files; then this file's name is printed.
        compared: Fields of the comparison with plain decoding, for JSON; {} without `--compare`.
    """
    if as_json:
        paths = {"input": str(source), "output": None if target is None else str(target)}
        return json_text({**paths, **result.to_dict(), **compared})
    if target is not None:
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in result.timings.items())
        confidence = "no confidence" if result.confidence is None else f"confidence {result.confidence:.2f}"
        return (
            f"{printable(str(source))} -> {printable(str(target))}\n  {result.text}\n"
            f"  {result.seconds:.2f} s of audio in "
            f"{result.timings['total']:.3f} s: {stages}; {result.tokens_per_round:.2f} tokens per round; "
            f"{confidence}{'' if result.calibrated else ', not calibrated for this model'}"
        )
    if kind != "text":
        return result.format(kind).rstrip("\n")
    lines = [f"[{format_clock(part.start)} --> {format_clock(part.end)}] {part.text}" for part in result.segments] or [
        result.text
    ]
    return "\n".join([f"{printable(str(source))}:", *(f"  {line}" for line in lines)] if has_many_files else lines)


STDIN = STDOUT  # "-"
ERASE = "\r\x1b[K"  # moves to the start of a terminal's line, and clears it


def reads_stdin(inputs: list[str], of_files: Mapping[str, object], of_live: Mapping[str, object]) -> bool:
    """Return whether the input is standard input.

    Args:
        of_files: Name -> value of the options for files only; None or False: not given.
        of_live: The same for the options of standard input only.

    Raises:
        InputError: If standard input is not the only input, or a given option does not fit the input.
    """
    given_of_files, given_of_live = (
        [f"`--{name.replace('_', '-')}`" for name, value in options.items() if value is not None and value is not False]
        for options in (of_files, of_live)
    )
    if STDIN not in inputs:
        if given_of_live:
            raise InputError(
                f"{given_of_live[0]} must come with {STDIN}, standard input, but files are given. Leave it out."
            )
        return False
    if len(inputs) > 1:
        raise InputError(f"`IN` must be {STDIN} alone, for standard input, or files, but is both. Call it twice.")
    if given_of_files:
        remedy = (
            "Redirect the output, for instance with > talk.srt."
            if "`--output`" in given_of_files
            else "Name a file for it."
        )
        raise InputError(f"{given_of_files[0]} cannot be combined with standard input. {remedy}")
    return True


def _live(whisper: LoadedTranscriber, kind: str, as_json: bool, live: LiveOptions, options: TranscribeOptions) -> None:
    """Transcribe standard input and print the text.

    Samples and wav are transcribed while they arrive, another sound file at its end.

    Args:
        kind: text, json, srt or vtt.
        as_json: Print each update as a line of JSON.
        live: If it has a rate or an encoding, the input is samples without a header.
        options: `strict`: a sound file that is damaged or cut off is an error; after its text, if it is a wav stream.
    """
    from mmdec import transcribe
    from mmdec.io.audio.pipe import read_pipe
    from mmdec.io.audio.structure import AudioLoss
    from mmdec.whisper.live import LiveTranscriber

    loss, remarks = AudioLoss(), list[str]()
    sound = read_pipe(sys.stdin.buffer, live.rate, live.encoding, loss, remarks)
    if not isinstance(sound, tuple):
        result = transcribe(sound, model=whisper, **options.changed())
        print_note("standard input", result.note)
        print(_report(Path("-"), None, result, kind, as_json, False, {}), flush=True)
        return
    sample_rate, pieces = sound
    transcriber = LiveTranscriber(
        sample_rate=sample_rate, model=whisper, **live.stream, **replace(options, strict=False).changed()
    )
    printer = Printer(kind, as_json)
    failure: InputError | None = None
    try:
        for piece in pieces:
            for update in transcriber.feed(piece):
                printer.show(update)
    except KeyboardInterrupt:  # Ctrl-C ends the recording; the sound that has arrived is still transcribed
        pass
    except InputError as error:
        failure = error
    note = "; ".join(filter(None, (loss.note, *remarks)))
    for update in transcriber.end(note):
        printer.show(update)
    if loss.note and options.strict and failure is None:
        failure = InputError(f"`audio` must be whole with `--strict`, but is not: {loss.note}. Send it again.")
    print_note("standard input", note)
    if not transcriber.seconds and failure is None:
        failure = InputError("`audio` must hold at least one sample, but standard input is empty. Pipe sound into it.")
    if failure is not None:
        raise failure


@final
@dataclass
class Printer:
    """Prints final text on stdout. On a terminal, prints provisional text on stderr, in a line that is overwritten."""

    kind: str  # text, json, srt or vtt
    as_json: bool  # print every update, also provisional ones, as a line of JSON
    cues: int = 0  # subtitles printed so far
    terminal: bool = field(default_factory=lambda: sys.stderr.isatty())

    def show(self, update: StreamUpdate) -> None:
        """Print one update."""
        if self.as_json:
            print(json_text(update_fields(update)), flush=True)
            return
        if self.terminal:
            columns = shutil.get_terminal_size().columns - 1
            print(ERASE + ("" if update.final else update.text[-columns:]), end="", file=sys.stderr, flush=True)
        if update.final and update.text:
            print(self._lines(update), flush=True)

    def _lines(self, update: StreamUpdate) -> str:
        if self.kind == "text":
            lines = [
                f"[{format_clock(part.start)} --> {format_clock(part.end)}] {part.text}" for part in update.segments
            ]
            return "\n".join(lines or [update.text])
        if self.kind == "json":
            return json_text(update_fields(update))
        first, self.cues = self.cues + 1, self.cues + 1
        if self.kind == "vtt":
            content = vtt(update.segments)
            return content if first == 1 else content.removeprefix("WEBVTT\n\n")
        content = srt(update.segments, first)
        self.cues += content.count(" --> ") - 1
        return content


def update_fields(update: StreamUpdate) -> Mapping[str, Any]:
    """Return an update as a dict for JSON: its transcript's fields, with times from the stream's beginning."""
    from dataclasses import asdict

    fields = {"start": update.start, "end": update.end, "final": update.final}
    return {**fields, **update.transcript.to_dict(), "segments": [asdict(segment) for segment in update.segments]}
