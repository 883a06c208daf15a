"""Scores a Whisper on a split: word and character error rate, and the cost of decoding with and without drafts.

`mmdec.transcribe` is scored and timed; transformers' own loops, through `model.generate`, get the same features and
arguments. `mmdec eval asr` prints the report. The corpus has LibriSpeech's folders, or is a manifest with paths and
texts; `corpora/librispeech.py` reads both.

mmdec's costs are those that `mmdec.transcribe` returns. A call's seconds have four parts: reading (checks of samples),
features (log-mel), encoder (all encoder passes, also of an assistant's encoder) and decoder (all the rest up to the
text: decoder passes, drafting, verification, logits processors and transformers' own preparation).
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, final

from torch import Tensor

from mmdec.checks.sampling import evenly_spaced
from mmdec.core.budget import DraftSize
from mmdec.core.timing import Stopwatch, time_passes
from mmdec.drafters.medusa.checkpoint import HEADS_FILE
from mmdec.errors import InputError
from mmdec.evaluation.harness import (
    Harness,
    Log,
    Measurement,
    Method,
    count_passes,
    cut_at_end,
    describe_measurement,
    no_log,
    parse_language,
    parse_plan,
    transformers_errors_only,
)
from mmdec.evaluation.options import AsrEvalOptions
from mmdec.generation.drafter_choice import resolve_drafter
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.io.audio import SAMPLE_RATE
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.tasks.audio import Audio, read_audio
from mmdec.tasks.generate_options import MAX_NEW_TOKENS
from mmdec.tasks.threads import keep_threads
from mmdec.training.corpora.admission import Admission
from mmdec.training.corpora.librispeech import Utterance, read_recordings, read_utterances
from mmdec.training.metrics import text as metrics
from mmdec.training.metrics.text import Edits, character_edits, rate, ratio, word_edits
from mmdec.whisper.checkpoint import MEDUSA, LoadedWhisper, load_whisper
from mmdec.whisper.options import DEFAULT_WHISPER, TranscribeOptions
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.transcribe import transcribe


@final
class TranscriptionHarness(Harness[Tensor]):
    """Transcribes recordings with one loaded Whisper, in at most `max_new_tokens` a window, and measures the calls.

    Args:
        language: None: detect it. For a model of one language, this argument is ignored.
    """

    def __init__(self, whisper: LoadedWhisper, language: str | None = "en", max_new_tokens: int | None = None) -> None:
        self.whisper, self.model = whisper, whisper.model
        multilingual = getattr(self.model.generation_config, "is_multilingual", False)
        self.language = language if multilingual else None
        self.options = {"num_beams": 1, "max_new_tokens": max_new_tokens}

    def read(self, audio: Audio) -> Tensor:
        """Read a recording as `transcribe` does: 16 kHz (T,).

        Raises:
            InputError: If `transcribe` would refuse it.
        """
        samples = read_audio(audio)
        self._request(1).check(samples)
        return samples

    def is_long(self, samples: Tensor) -> bool:
        """Return whether samples (T,) fill more than one window: then transformers' long-form code decodes them."""
        return self.whisper.is_long(len(samples))

    def features(self, samples: Tensor) -> Tensor:
        """Compute the features (1, mels, F), F frames, of samples (T,) that `transcribe` gives to the model."""
        return self._request(1).features([samples])["input_features"]

    def measure(self, inputs: Sequence[Tensor], method: Method) -> Measurement:
        """Decode recordings (T,) of 16 kHz as one batch; recordings of more than a window form a batch of their own."""
        measure = self._transcribe if method.loop == "mmdec" else self._generate
        with (
            transformers_errors_only(),
            count_passes(self.model.get_decoder()) as passes,
            count_passes(self.model.get_encoder()) as windows,
        ):
            measurement = measure(inputs, method)
        return replace(measurement, passes=len(passes), windows=len(windows))

    def _transcribe(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """Call `mmdec.transcribe`; seconds and rounds are taken from the transcripts."""
        stopwatch = Stopwatch(self.model.device)
        transcripts = transcribe(
            list(recordings),
            sample_rate=SAMPLE_RATE,
            model=self.whisper,
            language=self.language,
            batch_size=len(recordings),
            **self.options,
            **method.options,
        )
        total = stopwatch.lap()
        seconds = {
            stage: sum(transcript.timings[stage] for transcript in transcripts)
            for stage in ("features", "encoder", "drafter", "total")
        }
        # Each window begins with a pass over the prompt, which does not count as a round.
        rounds = [transcript.rounds - transcript.windows for transcript in transcripts]
        return Measurement(
            tokens=[transcript.tokens for transcript in transcripts],
            texts=[transcript.text for transcript in transcripts],
            features=seconds["features"],
            encoder=seconds["encoder"],
            decoder=seconds["total"] - seconds["features"] - seconds["encoder"],
            drafter=seconds["drafter"],
            total=total,
            rounds=sum(rounds),
            drafted_tokens=sum(
                round(transcript.tokens_per_round * count)
                for transcript, count in zip(transcripts, rounds, strict=True)
                if count
            ),
        )

    def _generate(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        """Call `model.generate` once for the recordings of up to one window, and once for the longer ones.

        `generate` decodes recordings longer than one window differently.
        """
        tokens: list[list[int]] = [[] for _ in recordings]
        device, features, rest, encoder = self.model.device, 0.0, 0.0, list[float]()
        total, stopwatch = Stopwatch(device), Stopwatch(device)
        samples = [read_audio(recording, SAMPLE_RATE) for recording in recordings]
        request = self._request(len(recordings))
        with ExitStack() as stack:
            for network in (self.model, *method.networks):
                if network.config.is_encoder_decoder:
                    stack.enter_context(
                        time_passes(network.get_encoder(), device, lambda seconds, *_: encoder.append(seconds))
                    )
            for long in (False, True):
                batch = [index for index, row in enumerate(samples) if self.whisper.is_long(len(row)) == long]
                if not batch:
                    continue
                stopwatch.lap()
                inputs = request.features([samples[index] for index in batch])
                features += stopwatch.lap()
                options = request.generate_options(0, long)
                output: Any = self.model.generate(
                    **inputs, **options, **method.options, return_segments=True, return_dict_in_generate=False
                )
                for index, segments in zip(batch, output["segments"], strict=True):
                    tokens[index] = [token for segment in segments for token in segment["tokens"].tolist()]
                rest += stopwatch.lap()
        stopwatch.lap()
        texts = [self.whisper.tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]
        return Measurement(
            tokens=tokens,
            texts=texts,
            features=features,
            encoder=sum(encoder),
            decoder=rest + stopwatch.lap() - sum(encoder),
            drafter=0.0,
            total=total.lap(),
        )

    def _request(self, recordings: int) -> TranscriptionRequest:
        plain = Speculation(DecodingOptions(drafter=None))
        options = TranscribeOptions(language=self.language, generate_options=self.options)
        return TranscriptionRequest.from_options(self.whisper, options, recordings, plain)


@final
class AudioLmHarness(Harness[Tensor]):
    """Transcribes recordings with one loaded audio language model, one at a time, and measures the calls."""

    def __init__(self, loaded: LoadedAudioLm, max_new_tokens: int | None = None) -> None:
        self.loaded, self.model = loaded, loaded.model
        config: Any = self.model.generation_config
        longest = max_new_tokens or config.max_new_tokens or MAX_NEW_TOKENS
        self.options = {"do_sample": False, "num_beams": 1, "max_new_tokens": longest}

    def read(self, audio: Audio) -> Tensor:
        """Read a recording as `transcribe` does: 16 kHz (T,).

        Raises:
            InputError: If `transcribe` would refuse it.
        """
        samples = read_audio(audio)
        self.loaded.check(samples)
        return samples

    def measure(self, inputs: Sequence[Tensor], method: Method) -> Measurement:
        """Transcribe one recording (T,) of 16 kHz, in a list, with this method, and measure it."""
        decoder: Any = self.model.get_decoder()
        with transformers_errors_only(), count_passes(decoder) as passes:
            measurement = self._transcribe(inputs, method) if method.loop == "mmdec" else self._generate(inputs, method)
        return replace(measurement, passes=len(passes), windows=1)

    def _transcribe(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        stopwatch = Stopwatch(self.model.device)
        (transcript,) = transcribe(
            list(recordings), sample_rate=SAMPLE_RATE, model=self.loaded, **self.options, **method.options
        )
        seconds, rounds = transcript.timings, transcript.rounds - 1
        return Measurement(
            tokens=[transcript.tokens],
            texts=[transcript.text],
            features=seconds["features"],
            encoder=seconds["encoder"],
            decoder=seconds["total"] - seconds["features"] - seconds["encoder"],
            drafter=seconds["drafter"],
            total=stopwatch.lap(),
            rounds=rounds,
            drafted_tokens=round(transcript.tokens_per_round * rounds) if rounds else 0,
        )

    def _generate(self, recordings: Sequence[Tensor], method: Method) -> Measurement:
        total, stopwatch = Stopwatch(self.model.device), Stopwatch(self.model.device)
        inputs = self.loaded.inputs(list(recordings))
        features = stopwatch.lap()
        generate: Any = self.model.generate
        generated: Any = generate(**inputs, **self.options, **method.options)
        row = cut_at_end(generated[0, inputs["input_ids"].shape[1] :].tolist(), self.model)
        text = self.loaded.tokenizer.decode(row, skip_special_tokens=True).strip()
        rest = stopwatch.lap()
        return Measurement([row], [text], features, encoder=0.0, decoder=rest, drafter=0.0, total=total.lap())


ENGLISH = ("en", "english")
LOG_INTERVAL = 50  # utterances between two lines of progress


@dataclass(frozen=True)
class ScoredTranscript:
    """One utterance and its transcript, which is empty if the recording was refused."""

    row: Utterance
    text: str
    seconds: float  # length of the recording; 0 if it was refused
    identical: bool = True  # whether the tokens equal those of transformers' own loop
    error: str = ""


def evaluate_asr(
    model: str | os.PathLike[str] | LoadedWhisper = DEFAULT_WHISPER,
    options: AsrEvalOptions | None = None,
    log: Log = no_log,
) -> dict[str, Any]:
    """Score a Whisper, with mmdec's loop and with transformers' own right after it, batch by batch.

    A recording that `mmdec.transcribe` refuses counts as an empty transcript and is listed. A recording of more than a
    window (30 s) is decoded alone, by transformers' long-form code. Without Medusa heads, transformers decodes, and the
    report has no speedup.

    Args:
        model: A shipped name, a folder, a Hugging Face id, or a loaded Whisper.
        options: What is decoded, and how; None: the test split of the project's English corpus.
        log: Receives lines of progress.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: If an option, the model or the corpus is refused.
    """
    options = options or AsrEvalOptions()
    nodes, language, split = parse_plan(options.plan), parse_language(options.language), options.split or None
    results = (
        read_recordings([os.fspath(path) for path in options.audio])
        if options.audio
        else read_utterances(os.fspath(options.corpus), split, Admission(options.allow_absolute_paths))
    )
    rows = evenly_spaced(results, options.limit)
    keep_threads(options.threads)
    whisper = model if isinstance(model, LoadedWhisper) else load_whisper(model, options.device)
    methods = _methods(whisper, options.heads, nodes, options.plain)
    harness = TranscriptionHarness(whisper, language, options.max_new_tokens)
    transcribed, measured = _decode_all(harness, methods, rows, options.batch_size, log)
    normalise, normaliser_name = normaliser(whisper.tokenizer, language)
    return {
        "model": whisper.directory.name if whisper.directory else "given",
        "split": "own recordings" if options.audio else split,
        "n": len(rows),
        "source_seconds": sum(result.seconds for result in transcribed),
        "batch_size": options.batch_size,
        "language": language,
        "normaliser": normaliser_name,
        **_report(transcribed, measured, normalise, options.worst),
        "hardware": describe_measurement(whisper.model, options.batch_size),
    }


def _report(
    transcribed: Sequence[ScoredTranscript],
    measured: Mapping[str, Sequence[Measurement]],
    normalise: Callable[[str], str],
    worst: int,
) -> dict[str, Any]:
    """Summarise the transcripts: errors, cost, speedup, refused recordings, and the worst transcripts.

    At most `worst` transcripts are listed, those with most errors.

    Args:
        measured: method's name -> the measurements of all calls.
        normalise: Normalises a text before words are compared.
    """
    report: dict[str, Any] = {
        **_scores(transcribed, normalise),
        "by_speaker": _by_speaker(transcribed, normalise),
        "worst": _worst(transcribed, normalise, worst),
        "refused": {result.row.path.name: result.error for result in transcribed if result.error},
        "decoding": {method: _cost(calls, transcribed) for method, calls in measured.items()},
    }
    if len(measured) == 2:
        report |= _speedup(transcribed, *measured.values())
    return report


def normaliser(tokenizer: Any, language: str | None) -> tuple[Callable[[str], str], str]:
    """Return Whisper's own text normaliser for the language, and its name.

    The English normaliser writes numbers and spellings in one way ("twenty five" as "25"; British spellings only if the
    tokenizer has them, in normalizer.json). The basic normaliser removes case, punctuation and bracketed text.
    """
    if language is None or language.lower() not in ENGLISH:
        return tokenizer.basic_normalize, "basic"
    if tokenizer.english_spelling_normalizer is not None:
        return tokenizer.normalize, "english"
    bare = copy.copy(tokenizer)
    bare.english_spelling_normalizer = {}
    return bare.normalize, "english, without British spellings"


def _methods(
    whisper: LoadedWhisper, heads: str | os.PathLike[str] | None, plan: DraftSize, plain: bool
) -> list[Method]:
    has_heads = whisper.directory is not None and (whisper.directory / MEDUSA / HEADS_FILE).is_file()
    if heads is None and not has_heads:
        return [Method.greedy()]
    drafted = Method.with_drafter("medusa", resolve_drafter(heads or MEDUSA, whisper), plan)
    return [drafted, Method.greedy()] if plain else [drafted]


def _decode_all(
    harness: TranscriptionHarness, methods: Sequence[Method], rows: Sequence[Utterance], batch_size: int, log: Log
) -> tuple[list[ScoredTranscript], dict[str, list[Measurement]]]:
    """Decode all utterances.

    Returns:
        For each utterance, the transcript by the first method; and method's name -> the measurement of each batch.
    """
    transcribed: list[ScoredTranscript] = []
    measured: dict[str, list[Measurement]] = {method.name: [] for method in methods}
    for start in range(0, len(rows), batch_size):
        before = len(transcribed)
        _decode(harness, methods, rows[start : start + batch_size], transcribed, measured)
        if len(transcribed) // LOG_INTERVAL > before // LOG_INTERVAL or len(transcribed) == len(rows):
            log(f"transcribed {len(transcribed)} of {len(rows)}")
    return transcribed, measured


def _decode(
    harness: TranscriptionHarness,
    methods: Sequence[Method],
    rows: Sequence[Utterance],
    transcribed: list[ScoredTranscript],
    measured: dict[str, list[Measurement]],
) -> None:
    """Decode one batch by all methods in turn; each recording of more than a window is decoded alone.

    Args:
        transcribed, measured: The results are appended to these.
    """
    recordings: list[tuple[Utterance, Tensor]] = []
    for row in rows:
        try:
            recordings.append((row, harness.read(row.path)))
        except InputError as error:
            transcribed.append(ScoredTranscript(row, "", 0.0, error=str(error)))
    short = [pair for pair in recordings if not harness.is_long(pair[1])]
    for batch in [short, *([pair] for pair in recordings if harness.is_long(pair[1]))]:
        if not batch:
            continue
        inputs = [samples for _, samples in batch]
        if not any(measured.values()):
            for method in methods:
                harness.measure(inputs, method)  # not timed, because first calls take longer than later ones
        results = [harness.measure(inputs, method) for method in methods]
        for method, result in zip(methods, results, strict=True):
            measured[method.name].append(result)
        drafted, greedy = results[0], results[-1]
        for (row, samples), text, a, b in zip(batch, drafted.texts, drafted.tokens, greedy.tokens, strict=True):
            transcribed.append(ScoredTranscript(row, text, len(samples) / SAMPLE_RATE, identical=a == b))


def _speedup(
    transcribed: Sequence[ScoredTranscript], drafted: Sequence[Measurement], greedy: Sequence[Measurement]
) -> dict[str, Any]:
    accepted = [result for result in transcribed if not result.error]
    return {
        "identical": {"count": sum(result.identical for result in accepted), "n": len(accepted)},
        "speedup": {
            "what": "transformers' greedy seconds over ours, same batches in turn",
            "decoder": _ratio(drafted, greedy, lambda measurement: measurement.decoder),
            "wall": _ratio(drafted, greedy, lambda measurement: measurement.total),
        },
    }


def _scores(transcribed: Sequence[ScoredTranscript], normalise: Callable[[str], str]) -> dict[str, Any]:
    plain = [(normalise(result.row.text), normalise(result.text)) for result in transcribed]
    raw = [(" ".join(result.row.text.split()), " ".join(result.text.split())) for result in transcribed]
    return {
        "wer": rate([word_edits(*pair) for pair in plain]),
        "cer": rate([character_edits(*pair) for pair in plain]),
        "wer_raw": rate([word_edits(*pair) for pair in raw]),
        "cer_raw": rate([character_edits(*pair) for pair in raw]),
        "exact": metrics.Rate(sum(a == b for a, b in plain), len(plain)).summary(),
        "exact_raw": metrics.Rate(sum(a == b for a, b in raw), len(raw)).summary(),
    }


def _by_speaker(transcribed: Sequence[ScoredTranscript], normalise: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    edits: dict[str, list[Edits]] = defaultdict(list)
    for result in transcribed:
        edits[result.row.speaker].append(word_edits(normalise(result.row.text), normalise(result.text)))
    return {speaker: {"n": len(rows), "wer": rate(rows)["value"]} for speaker, rows in sorted(edits.items())}


def _worst(
    transcribed: Sequence[ScoredTranscript], normalise: Callable[[str], str], count: int
) -> list[dict[str, Any]]:
    """List the `count` transcripts with most errors; among equal numbers of errors, shorter references come first."""
    scored = [(word_edits(normalise(result.row.text), normalise(result.text)), result) for result in transcribed]
    scored.sort(key=lambda pair: (-pair[0].errors, pair[0].length))
    return [
        {
            "path": result.row.path.name,
            "speaker": result.row.speaker,
            "errors": edits.errors,
            "words": edits.length,
            "reference": result.row.text,
            "transcript": result.text,
        }
        for edits, result in scored[:count]
        if edits.errors
    ]


def _cost(calls: Sequence[Measurement], transcribed: Sequence[ScoredTranscript]) -> dict[str, Any]:
    """Sum up the seconds, passes and rounds of one method's calls.

    Args:
        calls: One measurement for each batch.
    """
    if not calls:
        return {}
    total = sum(call.total for call in calls)
    rounds, tokens = sum(call.rounds for call in calls), sum(call.drafted_tokens for call in calls)
    latencies = [call.total for call in calls]
    return {
        "seconds": {
            "features": sum(call.features for call in calls),
            "encoder": sum(call.encoder for call in calls),
            "decoder": sum(call.decoder for call in calls),  # the drafter's seconds included
            "drafter": sum(call.drafter for call in calls),
            "total": total,  # from samples in memory to text: reading the files is not included
        },
        "decoder_share": sum(call.decoder for call in calls) / total,
        "decoder_passes": sum(call.passes for call in calls),
        "rounds": rounds,  # summed over utterances, without passes over prompts
        "tokens_per_round": tokens / rounds if rounds else None,
        "latency": {"median": median(latencies), "p90": metrics.percentile(latencies, 0.9), "of": "a batch"},
        "real_time_factor": total / sum(result.seconds for result in transcribed if not result.error),
    }


def _ratio(
    drafted: Sequence[Measurement], greedy: Sequence[Measurement], seconds: Callable[[Measurement], float]
) -> dict[str, float]:
    value, low, high = ratio([seconds(call) for call in greedy], [seconds(call) for call in drafted])
    return {"value": value, "low": low, "high": high}
