"""`mmdec.transcribe_stream`: transcribes audio while it arrives. Text is provisional at first, and final later.

A window of speech is decoded again and again while it grows. Its text is provisional until the window closes, at a
pause or when it is full. Then the window is decoded once more, as `transcribe` decodes the same samples. Each decoding
uses the previous text of the window as its draft, so that text which did not change takes only one or two passes of the
decoder.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, final

import numpy as np
from torch import Tensor

from mmdec.checks.arguments import check_choice, format_value, suggesting_options
from mmdec.drafters.previous_text import PreviousTextDrafter
from mmdec.errors import InputError
from mmdec.io.audio import SAMPLE_RATE, Mixer, check_rate
from mmdec.io.audio.pipe import SAMPLE_BYTES, decode_samples
from mmdec.io.audio.voice_activity import SpeechWindow, SpeechWindows, StreamResampler
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.tasks.audio import integer_rate, split_channels, with_note
from mmdec.tasks.options import option_names
from mmdec.tasks.threads import with_threads
from mmdec.whisper.options import TranscribeOptions
from mmdec.whisper.recordings import transcribe_recordings
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.special_tokens import first_timestamp_token
from mmdec.whisper.transcribe import as_whisper
from mmdec.whisper.transcript import Segment, Transcript, shift_segment

# for provisional text: seconds of silence that the encoder reads after the audio, see docs/log/whisper.md
PROVISIONAL_MARGIN = 5.0
MAX_DRAFT_CHAIN = 31  # maximum number of drafted tokens in a round, from the window's previous text
MAX_PREVIOUS_TEXTS = 3  # number of the window's previous texts that are kept for drafts
TIMESTAMPS_PER_SECOND = 50  # number of timestamp tokens per second of audio
MIN_PAUSE, MAX_PAUSE = 0.5, 10.0  # in seconds: minimum and maximum of the argument `pause`
MAX_SAMPLE_VALUE = 8.0  # maximum absolute sample value, 1 is full scale; larger samples are rejected
Chunk = np.ndarray | Tensor | bytes


@dataclass(frozen=True)
class StreamUpdate:
    """The current text of one window of a stream.

    A provisional update replaces the previous update of its window. A final update is the last one of its window, and
    its transcript equals that of `transcribe` for the same samples.
    """

    start: float  # beginning of the window, in seconds from the beginning of the stream
    end: float  # end of the decoded audio, in seconds from the beginning of the stream
    final: bool
    transcript: Transcript  # its times are relative to the beginning of the window

    @property
    def text(self) -> str:
        """The window's text."""
        return self.transcript.text

    @property
    def segments(self) -> list[Segment]:
        """The window's segments and words, with times from the beginning of the stream.

        Empty unless timestamps were requested.
        """
        return [shift_segment(segment, self.start) for segment in self.transcript.segments]


def transcribe_stream(chunks: Iterable[Chunk], **options: Any) -> Iterator[StreamUpdate]:
    """Transcribe sound while it arrives.

    Text is provisional while somebody speaks, and final after a pause, or when a window of 30 s is full. The final text
    of a window is exactly that of `transcribe` on the same samples. Silence is not decoded. Close the iterator to stop.

    Args:
        chunks: Pieces of one recording, of any length: samples (T,) or (T, channels) as for `transcribe`, or bytes of
            one channel. A microphone's queue, a pipe or a socket, for instance.
        sample_rate: Hz of the samples. Default 16000.
        encoding: The format of bytes: "s16" (default), "s24", "s32" or "u8" for integers, "f32" for floats;
            little-endian.
        every: Seconds of new audio after which provisional text is decoded again. Default 1. Text is decoded at most
            once for each chunk, so a slow machine decodes less often and does not fall behind. For provisional text the
            encoder reads 5 s after the sound, instead of up to 30 s in all, and there are no word times. None: no
            provisional text.
        pause: Seconds of silence that end a window. Default 1. Silence is recognised by its level, compared with loud
            speech and with the noise.
        drafter: As for `transcribe`, for a window's first decoding. Later decodings use the window's previous text as
            the draft. None: no drafts at all.
        model: A Whisper, as for `transcribe`; no audio language model.
        processor, timestamps, task, prompt, rule, seed, statistics, device, dtype, threads: As for `transcribe`.
        language: A name or a code. Default None: detected for each window.
        options: Arguments of `generate`, as for `transcribe`.

    Returns:
        An iterator of `StreamUpdate`, in the order of the audio.

    Raises:
        InputError: If an argument is rejected; during iteration, for a chunk that cannot be read, after the updates of
            all earlier chunks.
    """
    live = LiveTranscriber(**options)

    def updates() -> Iterator[StreamUpdate]:
        for chunk in chunks:
            yield from live.feed(chunk)
        yield from live.end()

    return updates()


@final
@dataclass(frozen=True)
class TranscribeStreamOptions:
    """The options of `transcribe_stream` that `transcribe` does not have, or for which it has another default.

    Args:
        sample_rate: Sample rate in Hz.
        encoding: Format of bytes, such as "s16".
        every: Seconds of new audio between two provisional texts; None: no provisional text.
        pause: Seconds of silence that end a window.
    """

    sample_rate: int = SAMPLE_RATE
    encoding: str = "s16"
    every: float | None = 1.0
    pause: float = 1.0

    def __post_init__(self) -> None:
        check_rate(integer_rate(self.sample_rate))
        check_choice("encoding", self.encoding, tuple(SAMPLE_BYTES), "s16 is the usual one.")
        if self.every is not None:
            _check_seconds("every", self.every, 0.1, 30.0)
        _check_seconds("pause", self.pause, MIN_PAUSE, MAX_PAUSE)


STREAM_OPTION_NAMES = tuple(entry.name for entry in fields(TranscribeStreamOptions))
UNSUPPORTED_OPTIONS = {  # option of `transcribe` that a stream refuses -> the reason, and what to do
    "batch_size": "A stream is one recording.",
    "cut_at_pauses": "A stream is always cut at pauses. Set `pause`.",
    "min_confidence": "A stream does not end at an unsure text. Compare `transcript.confidence` of each final update.",
    "num_speculative_tokens": "A window is decoded again with its previous text as the draft.",
    "on_round": "A window is decoded again and again. Read `transcript.rounds` of its updates.",
    "on_transcript": "Each update has its transcript.",
    "progress": "The end of a stream is not known. Read `end` of its updates.",
    "strict": "It is about damaged files, and a stream has samples.",
}
STREAM_NAMES = (option_names(TranscribeOptions) | {*STREAM_OPTION_NAMES}) - {*UNSUPPORTED_OPTIONS}


@final
class LiveTranscriber:
    """Transcribes a stream by method calls: `feed` each chunk when it arrives, then `end`.

    It loads the model, and holds the open window and its texts.

    Args:
        options: The options of `transcribe_stream`.

    Raises:
        InputError: If an option is rejected.
    """

    def __init__(self, **options: Any) -> None:
        for name, reason in UNSUPPORTED_OPTIONS.items():
            if name in options:
                raise InputError(f"`{name}` must be left out for a stream, but is given. {reason}")
        stream = TranscribeStreamOptions(**{name: options.pop(name) for name in STREAM_OPTION_NAMES if name in options})
        chosen = TranscribeOptions.from_keywords(options)
        if isinstance(chosen.model, LoadedAudioLm):
            raise InputError(
                "`model` must be a Whisper to transcribe a stream, but is "
                f"{type(chosen.model.model).__name__}. Transcribe whole recordings with it."
            )
        whisper = as_whisper(chosen)
        with suggesting_options(STREAM_NAMES):
            self._request = request = TranscriptionRequest.from_options(whisper, chosen, 1)
        self._drafts = request.speculation.drafter_for(whisper.model) is not None
        # options for provisional text: no word times, and less silence after the audio than up to 30 s; the shorter
        # silence hardly ever changes a token
        self._provisional_request = replace(
            request,
            margin=PROVISIONAL_MARGIN,
            timestamps="segment" if request.timestamps == "word" else request.timestamps,
        )
        self._threads, self._encoding = chosen.threads, stream.encoding
        self._every = None if stream.every is None else round(stream.every * SAMPLE_RATE)
        self._partial_sample = b""  # the first bytes of a sample of which the other bytes have not arrived yet
        self._rate = integer_rate(stream.sample_rate)
        self._mixer, self._channels = Mixer(self._rate), 1
        self._notes = list[str]()  # those of earlier mixers
        self._noted = False  # whether a final update had a note about channels
        self._resampler = StreamResampler(self._rate)
        self._windows = SpeechWindows(stream.pause, whisper.extractor.n_samples)
        # the window as it was when it was last decoded; None: the open window was not decoded yet
        self._decoded: SpeechWindow | None = None
        # The transcript of `_decoded`, if it was made with the options of final text, so that it equals that of
        # `transcribe`; else None.
        self._final_transcript: Transcript | None = None
        self._texts: list[list[int]] = []  # token ids of the window's previous texts, the newest first

    @property
    def seconds(self) -> float:
        """The seconds of audio that were passed to `feed` so far."""
        return self._windows.sample_count / SAMPLE_RATE

    def feed(self, chunk: Chunk) -> Generator[StreamUpdate]:
        """Add a chunk of samples or bytes to the stream.

        Yields:
            New texts of windows.

        Raises:
            InputError: For a chunk that cannot be read.
        """
        for window in self._windows.add(self._resampler.add(self._samples(chunk))):
            yield self._final(window)
        provisional = self._provisional()
        if provisional is not None:
            yield provisional

    def end(self, note: str = "") -> Generator[StreamUpdate]:
        """End the stream.

        Args:
            note: About the whole stream. The last update has it; if no window is open, an update without text has it.

        Yields:
            The final updates.

        Raises:
            InputError: After these updates, if the last chunk ended inside a sample.
        """
        closed = self._windows.add(self._resampler.add(self._mixer.end(), last=True))
        last = [*closed, *self._windows.end()]
        for index, window in enumerate(last):
            update = self._final(window)
            yield update if index < len(last) - 1 else replace(update, transcript=with_note(update.transcript, note))
        if not last and (note or (self._channel_note and not self._noted)):
            end, note = self.seconds, "; ".join(filter(None, (note, self._channel_note)))
            nothing = Transcript("", None, [], [], 0, 1.0, {}, confidence=None, windows=0, note=note)
            yield StreamUpdate(end, end, True, nothing)
        if self._partial_sample:
            raise InputError(
                f"`chunks` must hold whole samples of {SAMPLE_BYTES[self._encoding]} bytes, but end with "
                f"{len(self._partial_sample)} of one. Check `encoding`, which is {self._encoding!r}."
            )

    def _samples(self, chunk: Chunk) -> np.ndarray:
        """Convert a chunk to mono samples (T,) in [-1, 1]; raise InputError if it cannot be read."""
        if isinstance(chunk, (bytes, bytearray, memoryview)):
            content = self._partial_sample + bytes(chunk)
            used = len(content) - len(content) % SAMPLE_BYTES[self._encoding]
            self._partial_sample = content[used:]
            sound = decode_samples(content[:used], self._encoding)[:, None]
        elif isinstance(chunk, (np.ndarray, Tensor)):
            sound = split_channels(chunk)
        else:
            raise InputError(f"`chunks` must hold arrays or bytes, but one is {format_value(chunk)}. Convert it.")
        wrong = ~(np.abs(sound) <= MAX_SAMPLE_VALUE)  # written with ~, so that NaN counts as wrong, too
        if wrong.any():
            raise InputError(
                f"`chunks` must hold samples from -1 to 1, but {int(wrong.sum())} of {sound.size} of one are NaN or "
                f"beyond {MAX_SAMPLE_VALUE:g}. Check `encoding`, or scale them: a stream's peak is not known before "
                "its end."
            )
        return self._mix(sound).clip(-1.0, 1.0)

    def _mix(self, sound: np.ndarray) -> np.ndarray:
        """Mix the next samples (T, channels) down. The mixer holds back those of the last twentieth of a second."""
        if sound.shape[1] == self._channels:
            return self._mixer.add(sound)
        rest = self._mixer.end()  # the chunks have another number of channels from here on
        self._notes.append(self._mixer.note)
        self._mixer, self._channels = Mixer(self._rate), sound.shape[1]
        return np.concatenate([rest, self._mixer.add(sound)])

    def _final(self, window: SpeechWindow) -> StreamUpdate:
        """Return the final update of a closed window.

        The window is decoded, unless its last decoding had the same samples and options.
        """
        decoded, transcript = self._decoded, self._final_transcript
        if decoded is None or (decoded.start, decoded.end) != (window.start, window.end) or transcript is None:
            transcript = self._transcript(window, self._request)
        self._decoded = self._final_transcript = None
        self._texts = []  # as drafts for the next window they would be useless
        note = self._channel_note
        self._noted |= bool(note)
        return _update(window, with_note(transcript, note), final=True)

    @property
    def _channel_note(self) -> str:
        return "; ".join(filter(None, (*self._notes, self._mixer.note)))

    def _provisional(self) -> StreamUpdate | None:
        """Decode the open window, if enough audio was added to it or a pause has begun.

        Returns:
            The window's provisional update, or None.
        """
        window = None if self._every is None else self._windows.open()
        if window is None or self._every is None:
            return None
        sound, pausing = window
        previous = self._decoded
        decoded_samples = 0 if previous is None or previous.start != sound.start else previous.end - sound.start
        if len(sound.samples) - decoded_samples < (1 if pausing else self._every):
            return None
        transcript = self._transcript(sound, self._request if pausing else self._provisional_request)
        self._decoded, self._final_transcript = sound, transcript if pausing else None
        return _update(sound, transcript, final=False)

    def _transcript(self, window: SpeechWindow, request: TranscriptionRequest) -> Transcript:
        """Decode a window with its previous text as draft.

        Args:
            request: The options, those for final or for provisional text.
        """
        if self._texts and self._texts[0] and self._drafts:
            last, *older = self._texts
            drafter = PreviousTextDrafter(last, older, self._ending(window, request, last[-1]))
            request = replace(request, speculation=request.speculation.with_drafter(drafter, MAX_DRAFT_CHAIN))
        request.check(window.samples)
        with with_threads(self._threads, request.whisper.model):
            transcripts = dict[int, Transcript]()
            for finished in transcribe_recordings(request, {0: window.samples}, 1):
                transcripts |= finished
        transcript = transcripts[0]
        self._texts = [transcript.tokens, *(text for text in self._texts if text != transcript.tokens)][
            :MAX_PREVIOUS_TEXTS
        ]
        return transcript

    def _ending(self, window: SpeechWindow, request: TranscriptionRequest, last: int) -> list[int]:
        """Guess how a window's text ends, as a draft: the token ids after its last word.

        Args:
            last: Last token of the window's previous text.
            request: The options of this decoding.
        """
        settings: Any = request.whisper.model.generation_config
        ends: list[int] = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        first = first_timestamp_token(request.whisper.model)
        if last < first:  # the text has no timestamp tokens, so only the end token follows
            return ends[:1]
        # provisional text ends with the audio's end, rounded up to seconds
        short = request is self._provisional_request
        return [
            first + TIMESTAMPS_PER_SECOND * math.ceil(len(window.samples) / SAMPLE_RATE) if short else last,
            *ends[:1],
        ]


def _update(window: SpeechWindow, transcript: Transcript, final: bool) -> StreamUpdate:
    return StreamUpdate(window.start / SAMPLE_RATE, window.end / SAMPLE_RATE, final, transcript)


def _check_seconds(name: str, value: object, minimum: float, maximum: float) -> None:
    """Raise InputError unless an argument is a number of seconds from `minimum` to `maximum`.

    Args:
        name: The argument's name.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        raise InputError(
            f"`{name}` must be {minimum} to {maximum} seconds, but is {format_value(value)}. Leave it out."
        )
