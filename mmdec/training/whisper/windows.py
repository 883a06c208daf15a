"""Whisper's windows: utterances of one chapter joined to at most 30 s, in noise and rooms, with their tokens.

Everything of a window follows from its own seed; the batches of an epoch follow from (seed, epoch), whatever the number
of processes does in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperTokenizer

from mmdec.audio import SAMPLE_RATE, load_audio
from mmdec.nn.whisper_encoder import HOP, whisper_mel
from mmdec.training.corpora.librispeech import Utterance
from mmdec.training.whisper.augment import (
    add_babble,
    add_coloured_noise,
    coloured_noise,
    perturb_vocal_tract,
    reverberate,
    speed_perturb,
)

SECONDS = 30
LETTERS = " abcdefghijklmnopqrstuvwxyz'-"  # of the CTC head; its index 0 is the blank
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """B windows, padded to F frames and L tokens."""

    features: Tensor  # (B, mels, F)
    tokens: Tensor  # (B, L) what the decoder reads
    labels: Tensor  # (B, L) what it is to say next, -100 where nothing is asked
    letters: Tensor  # (B, C), padded with 0
    letter_lengths: Tensor  # (B,); 0 where the text of the sound is not known
    times: Tensor  # (B, L) about when each label is said, in seconds; -1 where that is not known
    rows: list[tuple[int, ...]]  # which utterances each window is made of

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        parts = (self.features, self.tokens, self.labels, self.letters, self.letter_lengths, self.times)
        return Batch(*(part.to(device, non_blocking=True) for part in parts), rows=self.rows)


@dataclass(frozen=True)
class Window:
    """What is to be joined, and the seed of all that is random about it."""

    rows: tuple[int, ...]
    seed: int
    seconds: float  # of the whole batch, padding included


@dataclass(frozen=True)
class Composed:
    """A window's sound and what is to be said of it."""

    window: Window
    sound: np.ndarray  # (T,) at 16 kHz
    tokens: list[int]  # what the decoder reads
    labels: list[int]
    times: list[float]  # of the labels, in seconds; -1 where not known
    heard: str  # the text of the sound, "" where it is not known


@dataclass(frozen=True)
class Composition:
    """Shares of the windows that are changed in some way, and how much.

    noise, room: heard in noise, in a room. pace: the largest relative change of speed and pitch. timestamps: labelled
    with times. cut: of those, ending within an utterance. previous: with the text before as a prompt. empty: without
    speech. pause: seconds between utterances, from the shortest to the longest; short ones are more frequent. voice:
    in a voice of another size, through another microphone.
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
) -> list[Window]:
    """One batch of about `total` seconds: windows of some `length` seconds of sound, padded to `padded`.

    A little more is planned than fits, for `compose` drops what does not: windows must be full up to their last second,
    or the decoder never learns to look there.
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
        windows.append(Window(tuple(rows), int(draw.integers(2**62)), padded))
    return windows


def compose(window: Window, utterances: Sequence[Utterance], tokenizer: WhisperTokenizer, how: Composition) -> Composed:
    """What the window's seed makes of it."""
    draw = np.random.default_rng(window.seed)
    limit = round(window.seconds * SAMPLE_RATE)
    special = numbers(tokenizer)
    pace = 1 + draw.uniform(-how.pace, how.pace)
    timed = draw.random() < how.timestamps
    cut = timed and draw.random() < how.cut
    silent = draw.random() < how.empty
    pieces: list[np.ndarray] = []
    spoken: list[tuple[float, float, str]] = []
    at = 0
    for row in () if silent else window.rows:
        gap = round(np.exp(draw.uniform(*np.log(how.pause))) * SAMPLE_RATE)
        samples = speed_perturb(load_audio(utterances[row].path).numpy(), pace)
        gap = gap if spoken else max(0, min(gap, limit - len(samples)))  # the first one fits
        left = limit - at - gap
        full = len(samples) > left
        if full and not (cut and spoken and left > 0.3 * len(samples)):
            break
        pieces += [np.zeros(gap, np.float32), samples]
        at += gap + len(samples)
        spoken.append(((at - len(samples)) / SAMPLE_RATE, at / SAMPLE_RATE, utterances[row].text))
        if full:
            break
    if not spoken:
        sound = coloured_noise(draw, limit) * 10 ** draw.uniform(-4, -1)
        head = [special["<|startoftranscript|>"], special["<|en|>"], special["<|transcribe|>"]]
        tokens = [*head, special["<|notimestamps|>"]]
        labels = [special["<|nospeech|>"], IGNORED, IGNORED, special["<|endoftext|>"]]
        return Composed(window, sound, tokens, labels, [-1.0] * 4, "")
    sound = np.concatenate(pieces)
    cut = at > limit  # the window ends within the last utterance
    sound = sound[:limit]
    if how.voice and draw.random() < how.voice:
        sound = perturb_vocal_tract(sound, draw)
    if draw.random() < how.room:
        sound = reverberate(sound, draw)
    sound = np.pad(sound, (0, max(0, limit - len(sound))))[:limit]
    if draw.random() < how.noise:
        add = add_coloured_noise if draw.random() < 0.75 else add_babble
        noisy = add(sound, draw.uniform(5, 30), draw)
        reach = limit if draw.random() < 0.5 else min(limit, at + round(draw.uniform(0, 1) * SAMPLE_RATE))
        sound[:reach] = noisy[:reach]
    sound *= draw.uniform(0.1, 0.95) / max(float(np.abs(sound).max()), 1e-4)
    previous = ""
    if draw.random() < how.previous:
        other = utterances[window.rows[int(draw.integers(len(window.rows)))]]
        previous = other.text
    tokens, labels, times = written(spoken, tokenizer, timed, cut, previous)
    heard = "" if cut else " ".join(text for _, _, text in spoken)
    return Composed(window, sound.astype(np.float32), tokens, labels, times, heard)


def written(
    spoken: Sequence[tuple[float, float, str]], tokenizer: WhisperTokenizer, timed: bool, cut: bool, previous: str
) -> tuple[list[int], list[int], list[float]]:
    """Tokens read, labels said, and when: times of each utterance where `timed`; of one cut off, its beginning alone.

    A piece of an utterance is taken to be said where its letters stand in the text.
    """
    special = numbers(tokenizer)
    begin, end, first = special["<|startoftranscript|>"], special["<|endoftext|>"], special["<|0.00|>"]
    prompt = [special["<|startofprev|>"], *pieces_of(f" {previous}", tokenizer)[0]] if previous else []
    head = [begin, special["<|en|>"], special["<|transcribe|>"]]
    text: list[int] = []
    when: list[float] = []
    for index, (start, stop, sentence) in enumerate(spoken):
        if timed:
            text.append(first + round(start / 0.02))
            when.append(start)
        if cut and index == len(spoken) - 1:
            break
        pieces, shares = pieces_of(f" {sentence}", tokenizer)
        text += pieces
        when += [start + share * (stop - start) for share in shares]
        if timed:
            text.append(first + min(round(stop / 0.02), 1500))
            when.append(stop)
    if not timed:
        head.append(special["<|notimestamps|>"])
    tokens = [*prompt, *head, *text]
    labels = [*[IGNORED] * len(prompt), head[1], *[IGNORED] * (len(head) - 2), *text, end]
    return tokens, labels, [*[-1.0] * (len(prompt) + len(head) - 1), *when, -1.0]


@cache
def numbers(tokenizer: WhisperTokenizer) -> dict[str, int]:
    """Special and timestamp tokens by name."""
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type] # a single number, whatever the declaration allows
    return dict(tokenizer.get_added_vocab()) | {"<|endoftext|>": end}


@cache
def pieces_of(text: str, tokenizer: WhisperTokenizer) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The text's tokens, and the middle of each as a part of the whole."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return tuple(encoded.input_ids), tuple((a + b) / 2 / len(text) for a, b in encoded.offset_mapping)


def collate(items: Sequence[Composed], end: int) -> Batch:
    """Pad sounds with silence, tokens with `end`."""
    longest, text = max(len(item.sound) for item in items), max(len(item.tokens) for item in items)
    longest += -longest % (2 * HOP)
    sounds = torch.zeros(len(items), longest)
    tokens = torch.full((len(items), text), end)
    labels = torch.full((len(items), text), IGNORED)
    times = torch.full((len(items), text), -1.0)
    letters = [letters_of(item.heard) for item in items]
    spelled = torch.zeros(len(items), max(1, max(map(len, letters))), dtype=torch.long)
    for row, item in enumerate(items):
        sounds[row, : len(item.sound)] = torch.from_numpy(item.sound)
        tokens[row, : len(item.tokens)] = torch.tensor(item.tokens)
        labels[row, : len(item.labels)] = torch.tensor(item.labels)
        times[row, : len(item.times)] = torch.tensor(item.times)
        spelled[row, : len(letters[row])] = torch.tensor(letters[row])
    lengths = torch.tensor([len(row) for row in letters])
    return Batch(whisper_mel(sounds), tokens, labels, spelled, lengths, times, [item.window.rows for item in items])


def letters_of(text: str) -> list[int]:
    return [index + 1 for letter in text.lower() if (index := LETTERS.find(letter)) >= 0]


def chapters_of(utterances: Sequence[Utterance]) -> Iterator[list[int]]:
    """Indices of each chapter's utterances."""
    chapters: dict[tuple[str, str], list[int]] = {}
    for index, utterance in enumerate(utterances):
        chapters.setdefault((utterance.speaker, utterance.chapter), []).append(index)
    yield from chapters.values()
