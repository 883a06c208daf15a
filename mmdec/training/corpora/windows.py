"""Windows of speech for training: utterances of one speaker joined to at most 30 s, in noise and rooms.

A window has the tokens that a Whisper reads for it. All random choices of a window follow from its seed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from transformers import WhisperTokenizer

from mmdec.io.audio import SAMPLE_RATE
from mmdec.training.corpora.admission import Admission, BadRows, check_apart, seconds_of
from mmdec.training.corpora.augment import (
    add_babble,
    add_coloured_noise,
    coloured_noise,
    perturb_vocal_tract,
    reverberate,
    speed_perturb,
)
from mmdec.training.corpora.librispeech import Utterance

SECONDS = 30


@dataclass(frozen=True)
class WindowPlan:
    """The plan of a window: the utterances to join, and the seed of all its random choices."""

    rows: tuple[int, ...]  # indices of the utterances to join, in this order
    seed: int
    seconds: float  # length of the window, padding included; the same for all windows of a batch


@dataclass(frozen=True)
class Composed:
    """A window's sound and tokens."""

    rows: tuple[int, ...]  # indices of the utterances
    sound: np.ndarray  # (T,) samples at 16 kHz
    tokens: list[int]  # the decoder's inputs: previous text, prompt, transcript with its timestamps


@dataclass(frozen=True)
class Composition:
    """How windows are varied at random: shares of the windows, from 0 to 1, and sizes of changes.

    Args:
        noise, room: Share of windows with noise, and with reverberation.
        pace: Largest relative change of speed and pitch.
        timestamps: Share of windows whose labels have timestamps.
        cut: Share of these that end within an utterance.
        previous: Share of windows with previous text in the prompt.
        empty: Share of windows without speech.
        pause: Shortest and longest pause between utterances, in seconds; short pauses are more frequent.
        voice: Share of windows with another vocal tract length and another microphone.
    """

    noise: float = 0.4
    room: float = 0.25
    pace: float = 0.1
    timestamps: float = 0.4
    cut: float = 0.3
    previous: float = 0.1
    empty: float = 0.02
    pause: tuple[float, float] = (0.05, 2.0)
    voice: float = 0.0


PLAIN = Composition(0, 0, 0, 0, 0, 0, 0, (0.1, 0.8))


def plan_windows(
    chapters: Sequence[Sequence[int]],
    seconds: Sequence[float],
    draw: np.random.Generator,
    total: float,
    length: float,
    padded: float,
    pause: tuple[float, float],
) -> list[WindowPlan]:
    """Plan one batch: about `total` seconds of windows, each of about `length` seconds, padded to `padded` seconds.

    Each window gets slightly more utterances than fit, and `compose` drops the rest: if windows were not full to the
    last second, the decoder would never learn to attend there.

    Args:
        chapters: The utterance indices of each chapter.
        seconds: The duration of each utterance.
        draw: The source of all random choices.
        total: Seconds of the batch, padding included.
        length: Seconds of sound in a window.
        padded: Seconds of a window with its padding.
        pause: Shortest and longest pause between two utterances, in seconds.
    """
    windows = []
    for _ in range(max(1, round(total / padded))):
        chapter = chapters[int(draw.integers(len(chapters)))]
        fitting = [row for row in chapter if seconds[row] * 1.12 + pause[0] <= padded]
        rows: list[int] = []
        filled = 0.0
        for index in draw.permutation(len(fitting)):
            rows.append(fitting[index])
            filled += seconds[rows[-1]] + pause[0]
            if filled > 1.1 * length:
                break
        rows = rows or [min(chapter, key=lambda row: seconds[row])]
        windows.append(WindowPlan(tuple(rows), int(draw.integers(2**62)), padded))
    return windows


def compose(
    window: WindowPlan, utterances: Sequence[Utterance], tokenizer: WhisperTokenizer, composition: Composition
) -> Composed:
    """Build a window's sound and tokens. All random choices follow from its seed.

    Args:
        composition: The random changes.
    """
    draw = np.random.default_rng(window.seed)
    limit = round(window.seconds * SAMPLE_RATE)
    pace = 1 + draw.uniform(-composition.pace, composition.pace)
    timed = draw.random() < composition.timestamps
    cut = timed and draw.random() < composition.cut
    silent = draw.random() < composition.empty
    pieces: list[np.ndarray] = []
    segments: list[tuple[float, float, str]] = []
    at = 0
    for row in () if silent else window.rows:
        gap = round(np.exp(draw.uniform(*np.log(composition.pause))) * SAMPLE_RATE)
        samples = speed_perturb(utterances[row].samples().numpy(), pace)
        # the pause is shortened if the window's first utterance would not fit after it
        gap = gap if segments else max(0, min(gap, limit - len(samples)))
        left = limit - at - gap
        full = len(samples) > left
        if full and not (cut and segments and left > 0.3 * len(samples)):
            break
        pieces += [np.zeros(gap, np.float32), samples]
        at += gap + len(samples)
        segments.append(((at - len(samples)) / SAMPLE_RATE, at / SAMPLE_RATE, utterances[row].text))
        if full:
            break
    if not segments:
        sound = coloured_noise(draw, limit) * 10 ** draw.uniform(-4, -1)
        return Composed(window.rows, sound.astype(np.float32), window_tokens([], tokenizer, False, False, ""))
    sound = np.concatenate(pieces)
    cut = at > limit  # from here on, `cut` says whether the window's end cuts off the last utterance
    sound = sound[:limit]
    if composition.voice and draw.random() < composition.voice:
        sound = perturb_vocal_tract(sound, draw)
    if draw.random() < composition.room:
        sound = reverberate(sound, draw)
    sound = np.pad(sound, (0, max(0, limit - len(sound))))[:limit]
    if draw.random() < composition.noise:
        add = add_coloured_noise if draw.random() < 0.75 else add_babble
        noisy = add(sound, draw.uniform(5, 30), draw)
        reach = limit if draw.random() < 0.5 else min(limit, at + round(draw.uniform(0, 1) * SAMPLE_RATE))
        sound[:reach] = noisy[:reach]
    sound *= draw.uniform(0.1, 0.95) / max(float(np.abs(sound).max()), 1e-4)
    previous = ""
    if draw.random() < composition.previous:
        previous = utterances[window.rows[int(draw.integers(len(window.rows)))]].text
    return Composed(window.rows, sound.astype(np.float32), window_tokens(segments, tokenizer, timed, cut, previous))


def window_tokens(
    segments: Sequence[tuple[float, float, str]], tokenizer: WhisperTokenizer, timed: bool, cut: bool, previous: str
) -> list[int]:
    """Build the decoder's input tokens of a window.

    Args:
        segments: (start, end, text) of each utterance, in seconds.
        timed: Whether there are timestamps.
        cut: Whether the last utterance is cut off; its text is then left out, and only its start is marked.
        previous: Text for the prompt; "": none.
    """
    special = special_token_ids(tokenizer)
    first = special["<|0.00|>"]
    prompt = [special["<|startofprev|>"], *pieces_of(f" {previous}", tokenizer)] if previous else []
    head = [special["<|startoftranscript|>"], special["<|en|>"], special["<|transcribe|>"]]
    text: list[int] = []
    for index, (start, stop, sentence) in enumerate(segments):
        if timed:
            text.append(first + round(start / 0.02))
        if cut and index == len(segments) - 1:
            break
        text += pieces_of(f" {sentence}", tokenizer)
        if timed:
            text.append(first + min(round(stop / 0.02), 1500))
    return [*prompt, *head, *([] if timed else [special["<|notimestamps|>"]]), *text]


@cache
def special_token_ids(tokenizer: WhisperTokenizer) -> dict[str, int]:
    """Return the ids of the special tokens and the timestamp tokens, by name."""
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type] # here always a single number
    return dict(tokenizer.get_added_vocab()) | {"<|endoftext|>": end}


@cache
def pieces_of(text: str, tokenizer: WhisperTokenizer) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def chapters_of(utterances: Sequence[Utterance]) -> Iterator[list[int]]:
    """Yield for each chapter (of each speaker) the list of its utterances' indices."""
    chapters: dict[tuple[str, str], list[int]] = {}
    for index, utterance in enumerate(utterances):
        chapters.setdefault((utterance.speaker, utterance.chapter), []).append(index)
    yield from chapters.values()


def check_utterances_apart(train: Sequence[Utterance], dev: Sequence[Utterance]) -> None:
    """Raise InputError if the splits share a recording, even under two names (symbolic links)."""
    both = ((os.path.realpath(row.path) for row in rows) for rows in (train, dev))
    check_apart(both, "recordings", "Name splits that do not overlap.")


def durations(rows: Sequence[Utterance], cache: Path, admission: Admission, noun: str) -> list[float]:
    """Return the duration of each utterance in seconds; NaN if it cannot be used, which is logged.

    Args:
        cache: Folder that caches the results.
        admission: How many may be bad.
        noun: What the rows are, for messages.

    Raises:
        InputError: If too many are bad.
    """
    seconds, bad = seconds_of([row.path for row in rows], cache), BadRows()
    for row, value in zip(rows, seconds, strict=True):
        if isinstance(value, str):
            bad.add(value, f"{row.path.name} in {row.place}")
    if bad.count:
        admission.check(bad, len(rows), noun, rule="hold usable recordings")
        rank_zero_info(f"{bad.count} of the {len(rows)} {noun} left out: {bad.report()}")
    return [math.nan if isinstance(value, str) else value for value in seconds]
