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
from transformers.audio_utils import mel_filter_bank

from mmdec.audio import SAMPLE_RATE, load_audio
from mmdec.utterances import Utterance

SECONDS = 30
HOP, FFT = 160, 400
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
    rows: list[tuple[int, ...]]  # which utterances each window is made of

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        parts = (self.features, self.tokens, self.labels, self.letters, self.letter_lengths)
        return Batch(*(part.to(device, non_blocking=True) for part in parts), rows=self.rows)


@dataclass(frozen=True)
class Window:
    """What is to be joined, and the seed of all that is random about it."""

    rows: tuple[int, ...]
    seed: int
    seconds: float  # of the whole batch, padding included


@dataclass(frozen=True)
class Composition:
    """Shares of the windows that are changed in some way, and how much.

    noise, room: heard in noise, in a room. pace: the largest relative change of speed and pitch. timestamps: labelled
    with times. cut: of those, ending within an utterance. previous: with the text before as a prompt. empty: without
    speech. pause: seconds between utterances.
    """

    noise: float = 0.4
    room: float = 0.25
    pace: float = 0.1
    timestamps: float = 0.4
    cut: float = 0.3
    previous: float = 0.1
    empty: float = 0.02
    pause: tuple[float, float] = (0.1, 0.8)


PLAIN = Composition(0, 0, 0, 0, 0, 0, 0)


def plan_windows(
    chapters: Sequence[Sequence[int]],
    seconds: Sequence[float],
    draw: np.random.Generator,
    total: float,
    length: float,
    padded: float,
    pause: tuple[float, float],
) -> list[Window]:
    """One batch of about `total` seconds: windows of up to `length` seconds of sound, padded to `padded`."""
    windows = []
    for _ in range(max(1, round(total / padded))):
        chapter = chapters[int(draw.integers(len(chapters)))]
        rows: list[int] = []
        filled = 0.0
        for index in draw.permutation(len(chapter)):
            more = seconds[chapter[index]] * 1.12 + pause[1]
            if filled + more <= length:
                rows.append(chapter[index])
                filled += more
        rows = rows or [min(chapter, key=lambda row: seconds[row])]
        windows.append(Window(tuple(rows), int(draw.integers(2**62)), padded))
    return windows


def compose(
    window: Window, utterances: Sequence[Utterance], tokenizer: WhisperTokenizer, how: Composition
) -> tuple[np.ndarray, list[int], list[int], str]:
    """Samples (T,) at 16 kHz; tokens and labels; the letters that are heard, "" where they are not known."""
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
        gap = round(draw.uniform(*how.pause) * SAMPLE_RATE)
        samples = faster(load_audio(utterances[row].path).numpy(), pace)
        if at + gap + len(samples) > limit and (spoken or not cut):
            break
        pieces += [np.zeros(gap, np.float32), samples]
        at += gap + len(samples)
        spoken.append(((at - len(samples)) / SAMPLE_RATE, at / SAMPLE_RATE, utterances[row].text))
    if not spoken:
        sound = coloured(draw, limit) * 10 ** draw.uniform(-4, -1)
        head = [special["<|startoftranscript|>"], special["<|en|>"], special["<|transcribe|>"]]
        tokens = [*head, special["<|notimestamps|>"]]
        return sound, tokens, [special["<|nospeech|>"], IGNORED, IGNORED, special["<|endoftext|>"]], ""
    sound = np.concatenate(pieces)
    if cut and len(spoken) > 1:  # the window ends somewhere within the last utterance
        start, end, _ = spoken[-1]
        edge = draw.uniform(start + 0.3 * (end - start), end)
        sound = np.pad(sound[: round(edge * SAMPLE_RATE)], (0, 0))
        cut = len(sound) >= limit - SAMPLE_RATE  # only a full window ends in the middle of speech
        sound = sound if cut else np.concatenate(pieces)
    else:
        cut = False
    if draw.random() < how.room:
        sound = echoed(sound, draw)
    sound = np.pad(sound, (0, max(0, limit - len(sound))))[:limit]
    if draw.random() < how.noise:
        noise = coloured(draw, limit) if draw.random() < 0.75 else murmur(sound, draw)
        level = np.sqrt(np.mean(sound**2) / max(np.mean(noise**2), 1e-12)) * 10 ** (-draw.uniform(5, 30) / 20)
        reach = limit if draw.random() < 0.5 else min(limit, at + round(draw.uniform(0, 1) * SAMPLE_RATE))
        sound[:reach] += noise[:reach] * level
    sound *= draw.uniform(0.1, 0.95) / max(float(np.abs(sound).max()), 1e-4)
    previous = ""
    if draw.random() < how.previous:
        other = utterances[window.rows[int(draw.integers(len(window.rows)))]]
        previous = other.text
    tokens, labels = written(spoken, tokenizer, timed, cut, previous)
    heard = "" if cut else " ".join(text for _, _, text in spoken)
    return sound.astype(np.float32), tokens, labels, heard


def written(
    spoken: Sequence[tuple[float, float, str]], tokenizer: WhisperTokenizer, timed: bool, cut: bool, previous: str
) -> tuple[list[int], list[int]]:
    """Tokens read and labels said: times of each utterance where `timed`; of one cut off, its beginning alone."""
    special = numbers(tokenizer)
    begin, end = special["<|startoftranscript|>"], special["<|endoftext|>"]
    prompt = [special["<|startofprev|>"], *pieces_of(f" {previous}", tokenizer)] if previous else []
    head = [begin, special["<|en|>"], special["<|transcribe|>"]]
    text: list[int] = []
    for index, (start, stop, said) in enumerate(spoken):
        if not timed:
            text += pieces_of(f" {said}", tokenizer)
        elif cut and index == len(spoken) - 1:
            text.append(special["<|0.00|>"] + round(start / 0.02))
        else:
            text += [
                special["<|0.00|>"] + round(start / 0.02),
                *pieces_of(f" {said}", tokenizer),
                special["<|0.00|>"] + min(round(stop / 0.02), 1500),
            ]
    if not timed:
        head.append(special["<|notimestamps|>"])
    tokens = [*prompt, *head, *text]
    labels = [*[IGNORED] * len(prompt), head[1], *[IGNORED] * (len(head) - 2), *text, end]
    return tokens, labels


@cache
def numbers(tokenizer: WhisperTokenizer) -> dict[str, int]:
    """Special and timestamp tokens by name."""
    return dict(tokenizer.get_added_vocab()) | {"<|endoftext|>": int(tokenizer.eos_token_id)}  # type: ignore[arg-type]


@cache
def pieces_of(text: str, tokenizer: WhisperTokenizer) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def collate(items: Sequence[tuple[Window, np.ndarray, list[int], list[int], str]], end: int) -> Batch:
    """Pad sounds with silence, tokens with `end`."""
    longest, text = max(len(sound) for _, sound, *_ in items), max(len(tokens) for _, _, tokens, _, _ in items)
    longest += -longest % (2 * HOP)
    sounds = torch.zeros(len(items), longest)
    tokens = torch.full((len(items), text), end)
    labels = torch.full((len(items), text), IGNORED)
    letters = [letters_of(heard) for *_, heard in items]
    spelled = torch.zeros(len(items), max(1, max(map(len, letters))), dtype=torch.long)
    for row, (_, sound, read_, said, _) in enumerate(items):
        sounds[row, : len(sound)] = torch.from_numpy(sound)
        tokens[row, : len(read_)] = torch.tensor(read_)
        labels[row, : len(said)] = torch.tensor(said)
        spelled[row, : len(letters[row])] = torch.tensor(letters[row])
    lengths = torch.tensor([len(row) for row in letters])
    return Batch(log_mel(sounds), tokens, labels, spelled, lengths, [window.rows for window, *_ in items])


def letters_of(text: str) -> list[int]:
    return [place + 1 for letter in text.lower() if (place := LETTERS.find(letter)) >= 0]


@cache
def _filters(mels: int) -> Tensor:
    bank = mel_filter_bank(1 + FFT // 2, mels, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(bank).float().T.contiguous()


def log_mel(samples: Tensor, mels: int = 80) -> Tensor:
    """Whisper's features (B, mels, T / 160) of samples (B, T): log10 of mel energies, the quietest 80 dB below the
    loudest, scaled to about -1 to 1 (Radford et al. 2022, section 2.2)."""
    window = torch.hann_window(FFT, device=samples.device)
    power = torch.stft(samples, FFT, HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    energies = (_filters(mels).to(samples.device) @ power).clamp(min=1e-10).log10()
    loudest = energies.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(energies, loudest - 8.0) + 4.0) / 4.0


def faster(samples: np.ndarray, pace: float) -> np.ndarray:
    """Speed and pitch times `pace`, by linear interpolation: what it adds lies 40 dB below speech."""
    count = round(len(samples) / pace)
    return np.interp(np.arange(count) * pace, np.arange(len(samples)), samples).astype(np.float32)


def coloured(draw: np.random.Generator, count: int) -> np.ndarray:
    """White, pink or brown noise, or something between."""
    spectrum = np.fft.rfft(draw.standard_normal(count).astype(np.float32))
    frequency = np.maximum(np.fft.rfftfreq(count, 1 / SAMPLE_RATE), 20)
    noise = np.fft.irfft(spectrum / frequency ** (draw.uniform(0, 2) / 2), count)
    return (noise / max(float(np.abs(noise).max()), 1e-9)).astype(np.float32)


def murmur(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Voices that say nothing: the speech itself, reversed and shifted."""
    return np.sum([np.roll(sound[::-1], int(draw.integers(len(sound)))) for _ in range(4)], axis=0)


def echoed(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """In a room: decaying noise as its response, RT60 0.1 to 0.5 s."""
    count = int(draw.uniform(0.1, 0.5) * SAMPLE_RATE)
    response = draw.standard_normal(count) * 10 ** (-3 * np.arange(count) / count) * draw.uniform(0.02, 0.08)
    response[0] = 1.0
    size = 1 << (len(sound) + count).bit_length()
    return np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(response, size), size)[: len(sound)].astype(np.float32)


def chapters_of(utterances: Sequence[Utterance]) -> Iterator[list[int]]:
    """Indices of each chapter's utterances."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, utterance in enumerate(utterances):
        found.setdefault((utterance.speaker, utterance.chapter), []).append(index)
    yield from found.values()
