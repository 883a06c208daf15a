"""Training windows of a Whisper: sound of at most 30 s, its tokens, and batches of windows.

A window joins utterances of one chapter, with noise and reverberation. The tokenizer has Whisper's format and is
learned from the texts. All randomness of a window follows from its seed, and the batches of an epoch from (seed,
epoch).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, WhisperTokenizer

from mmdec.audio import SAMPLE_RATE
from mmdec.nn.whisper_encoder import HOP, whisper_mel
from mmdec.training.checkpoints import token_list
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission, BadRows, check_apart, seconds_of
from mmdec.training.corpora.librispeech import Utterance, read_splits, read_utterances
from mmdec.training.optim import rows_of
from mmdec.training.whisper.augment import (
    add_babble,
    add_coloured_noise,
    coloured_noise,
    perturb_vocal_tract,
    reverberate,
    speed_perturb,
)
from mmdec.types import InputError

END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = {"translate": "<|translate|>", "transcribe": "<|transcribe|>"}
OTHERS = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
PRECISION = 0.02  # seconds between two successive timestamp tokens
SECONDS = 30
LETTERS = " abcdefghijklmnopqrstuvwxyz'-"  # the CTC layer's classes, from 1; class 0 is the blank
IGNORED = -100  # label of positions that have no loss: the value that torch's cross-entropy ignores


@dataclass
class Batch:
    """A batch of B windows of sound, padded to F frames and L tokens."""

    features: Tensor  # (B, mels, F) log mel spectrograms
    tokens: Tensor  # (B, L) the decoder's input tokens
    labels: Tensor  # (B, L) the token that follows each input; -100 where no loss is computed
    letters: Tensor  # (B, C) the text as CTC classes, indices from 1 into `LETTERS`, padded with 0
    letter_lengths: Tensor  # (B,) number of letters of each window; 0 where the text is unknown
    times: Tensor  # (B, L) estimated time of each label, in seconds from the window's start; -1: unknown
    rows: list[tuple[int, ...]]  # indices of the utterances that each window is joined from


@dataclass(frozen=True)
class Window:
    """The plan of a window: the utterances to join, and the seed of all its random choices."""

    rows: tuple[int, ...]  # indices of the utterances to join, in this order
    seed: int
    seconds: float  # length of the window, padding included; the same for all windows of a batch


@dataclass(frozen=True)
class Composed:
    """A window as it is trained on: its sound, input tokens and labels."""

    rows: tuple[int, ...]  # indices of the window's utterances
    sound: np.ndarray  # (T,) samples at 16 kHz
    tokens: list[int]  # the decoder's inputs
    labels: list[int]  # the token that follows each input; -100 where no loss is computed
    times: list[float]  # estimated time of each label, in seconds from the window's start; -1: unknown
    heard: str  # the whole text of the window; "" if unknown


@dataclass(frozen=True)
class Composition:
    """How windows are varied at random: shares of the windows, from 0 to 1, and sizes of changes.

    noise, room: share of windows with noise, and with reverberation.
    pace: largest relative change of speed and pitch.
    timestamps: share of windows whose labels have timestamps. cut: share of these that end within an utterance.
    previous: share of windows with previous text in the prompt. empty: share of windows without speech.
    pause: shortest and longest pause between utterances, in seconds; short pauses are more frequent.
    voice: share of windows with another vocal tract length and another microphone.
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
    """Plan one batch of about `total` seconds: windows with about `length` seconds of sound, padded to `padded`
    seconds.

    chapters: the utterance indices of each chapter. seconds: the duration of each utterance. pause: shortest and
    longest pause in seconds. Each window gets slightly more utterances than fit, and `compose` drops the rest: if
    windows were not full to the last second, the decoder would never learn to attend there.
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
    """Build a window's sound and tokens. All random choices follow from its seed. how: the random changes."""
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
        samples = speed_perturb(utterances[row].samples().numpy(), pace)
        # the pause is shortened if the window's first utterance would not fit after it
        gap = gap if spoken else max(0, min(gap, limit - len(samples)))
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
        return Composed(window.rows, sound, tokens, labels, [-1.0] * 4, "")
    sound = np.concatenate(pieces)
    cut = at > limit  # from here on, `cut` says whether the window's end cuts off the last utterance
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
        previous = utterances[window.rows[int(draw.integers(len(window.rows)))]].text
    tokens, labels, times = written(spoken, tokenizer, timed, cut, previous)
    heard = "" if cut else " ".join(text for _, _, text in spoken)
    return Composed(window.rows, sound.astype(np.float32), tokens, labels, times, heard)


def written(
    spoken: Sequence[tuple[float, float, str]], tokenizer: WhisperTokenizer, timed: bool, cut: bool, previous: str
) -> tuple[list[int], list[int], list[float]]:
    """Build a window's input tokens, their labels, and the labels' times in seconds, estimated from the letters'
    positions.

    spoken: (start, end, text) of each utterance, in seconds. timed: whether the labels have timestamps.
    cut: whether the last utterance is cut off; its text is then left out, and only its start is labelled.
    previous: text for the prompt; "": none.
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
    """Return the ids of the special tokens and the timestamp tokens, by name."""
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type] # here always a single number
    return dict(tokenizer.get_added_vocab()) | {"<|endoftext|>": end}


@cache
def pieces_of(text: str, tokenizer: WhisperTokenizer) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return a text's token ids, and for each token the middle of its letters as a fraction (0 to 1) of the text."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return tuple(encoded.input_ids), tuple((a + b) / 2 / len(text) for a, b in encoded.offset_mapping)


def collate(items: Sequence[Composed], end: int) -> Batch:
    """Make a batch. Sounds are padded with silence; input tokens with `end`, the id of the end-of-text token."""
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
    return Batch(whisper_mel(sounds), tokens, labels, spelled, lengths, times, [item.rows for item in items])


def letters_of(text: str) -> list[int]:
    return [index + 1 for letter in text.lower() if (index := LETTERS.find(letter)) >= 0]


def chapters_of(utterances: Sequence[Utterance]) -> Iterator[list[int]]:
    """Yield for each chapter (of each speaker) the list of its utterances' indices."""
    chapters: dict[tuple[str, str], list[int]] = {}
    for index, utterance in enumerate(utterances):
        chapters.setdefault((utterance.speaker, utterance.chapter), []).append(index)
    yield from chapters.values()


SHORTEST = 4.0  # seconds; lower limit of the random window lengths. Most sentences are shorter


class Windows(Dataset[Composed]):
    """A dataset whose index is a `Window`. A window's sound and tokens are composed when the window is read. how: the
    random changes."""

    def __init__(self, utterances: Sequence[Utterance], tokenizer: WhisperTokenizer, how: Composition) -> None:
        self.utterances, self.tokenizer, self.how = utterances, tokenizer, how

    def __getitem__(self, window: Window) -> Composed:
        return compose(window, self.utterances, self.tokenizer, self.how)

    def collate(self, items: Sequence[Composed]) -> Batch:
        return collate(items, int(self.tokenizer.convert_tokens_to_ids(END)))  # type: ignore[arg-type] # one id


@dataclass(frozen=True)
class WindowOptions:
    """Options of `WindowData` that a recipe (YAML file) sets.

    train_split: one split or several. pieces: vocabulary size of a new tokenizer, without special tokens.
    batch_seconds: seconds of sound in one process's batch, padding included.
    lengths: (epoch, seconds) pairs: from this epoch on, windows have at most about this length of sound.
    whole: share of the batches that are padded to 30 s.
    longer: exponent; below 1, long windows are drawn more often than short ones; above 1, less often.
    max_bad_share: largest share of bad recordings. allow_absolute_paths: allow paths that lead out of the corpus's
        folder.
    """

    train_split: str | list[str] = "train"
    pieces: int = 800
    batch_seconds: float = 90.0
    steps_per_epoch: int = 100
    lengths: Sequence[tuple[int, float]] = ((0, 30.0),)
    whole: float = 0.25
    longer: float = 1.0
    composition: Composition | None = None
    dev_windows: int = 48
    workers: int = 0
    seed: int = 0
    max_bad_share: float = MAX_BAD_SHARE
    allow_absolute_paths: bool = False

    def __post_init__(self) -> None:
        starts, ends = zip(*self.lengths, strict=True) if self.lengths else ((), ())
        if not starts or int(starts[0]) != 0 or any(not 0 < end <= SECONDS for end in ends):
            raise InputError(
                f"`lengths` must begin at epoch 0 and be up to {SECONDS} s, but is {self.lengths}. Set [[0, 30]]."
            )


class WindowData(LightningDataModule):
    """A data module for training a Whisper: windows of up to 30 s, joined from utterances of one chapter.

    corpus: a folder in LibriSpeech's format, or a manifest (list of sound files with texts). tokenizer: folder of the
        tokenizer. If the folder has none, a tokenizer is learned from the training text and saved there. options:
        fields of `WindowOptions`.
    """

    def __init__(self, corpus: str, tokenizer: str, **options: Any) -> None:
        super().__init__()
        self.options = WindowOptions(**options)
        self.admission = Admission(self.options.allow_absolute_paths, self.options.max_bad_share)
        self.corpus, self.composition = corpus, self.options.composition or Composition()
        self.train_rows = read_splits(corpus, self.options.train_split, self.admission)
        self.dev_rows = read_utterances(corpus, "dev", self.admission)
        check_utterances_apart(self.train_rows, self.dev_rows)
        self.tokenizer = kept_tokenizer(Path(tokenizer), self.train_rows, self.options.pieces)

    @property
    def units(self) -> list[str]:
        """Return the vocabulary as tokens ordered by id. The command line passes it to the model."""
        return token_list(self.tokenizer)

    def prepare_data(self) -> None:
        """Measure and store the durations of all recordings. Lightning calls this in one process only."""
        self._seconds()

    def _seconds(self) -> list[list[float]]:
        """Return the durations in seconds of the training utterances, and of the development utterances."""
        root = Path(self.corpus)
        kept = root if root.is_dir() else root.parent
        named = (("train", self.train_rows), ("dev", self.dev_rows))
        return [durations(rows, kept, self.admission, f"{part} recordings in '{root}'") for part, rows in named]

    def setup(self, stage: str) -> None:
        self.train_seconds, heard = self._seconds()
        self.dev_order = [row for row, seconds in enumerate(heard) if seconds > 0]
        chapters = ([row for row in chapter if self.train_seconds[row] > 0] for chapter in chapters_of(self.train_rows))
        self.chapters = [chapter for chapter in chapters if chapter]
        if not self.chapters or not self.dev_order:
            raise InputError(
                f"`corpus` must hold usable recordings in both splits, but '{self.corpus}' has none in one. Check them."
            )

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        epoch, world, options = self.trainer.current_epoch, self.trainer.world_size, self.options
        longest, pause = [seconds for begin, seconds in options.lengths if begin <= epoch][-1], self.composition.pause
        seeds = [options.seed, epoch]
        sizes, draw = np.random.default_rng(seeds), np.random.default_rng([*seeds, 1])
        batches = []
        for _ in range(options.steps_per_epoch):
            shortest = min(SHORTEST, longest)
            length = shortest + (longest - shortest) * sizes.random() ** options.longer
            whole = sizes.random() < options.whole
            padded = SECONDS if whole else min(SECONDS, length + sizes.uniform(0.3, 2.0))
            # seconds of sound in all: enough for at least one window in each process
            total = world * max(options.batch_seconds, padded)
            batches.append(plan_windows(self.chapters, self.train_seconds, draw, total, length, padded, pause))
        dataset = Windows(self.train_rows, self.tokenizer, self.composition)
        mine = rows_of(batches, self.trainer.global_rank, world)
        return DataLoader(dataset, batch_sampler=mine, collate_fn=dataset.collate, num_workers=options.workers)

    def val_dataloader(self) -> DataLoader:
        """Load the same development windows each time: without noise or timestamps, padded to 30 s."""
        assert self.trainer is not None
        draw = np.random.default_rng([self.options.seed, 1])
        dataset = Windows(self.dev_rows, self.tokenizer, replace(PLAIN, pause=self.composition.pause))
        order = draw.permutation(self.dev_order).tolist()
        windows = [
            Window(tuple(order[(8 * number + item) % len(order)] for item in range(8)), number, SECONDS)
            for number in range(self.options.dev_windows)
        ]
        mine = windows[self.trainer.global_rank :: self.trainer.world_size]
        batches = [mine[start : start + 12] for start in range(0, len(mine), 12)]
        return DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collate)


def check_utterances_apart(train: Sequence[Utterance], dev: Sequence[Utterance]) -> None:
    """Raise InputError if the splits share a recording, even under two names (symbolic links)."""
    both = ((os.path.realpath(row.path) for row in rows) for rows in (train, dev))
    check_apart(both, "recordings", "Name splits that do not overlap.")


def data_options(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recipe's data module. The value of `composition` becomes a `Composition`."""
    options = dict(recipe["data"]["init_args"])
    if options.get("composition") is not None:
        options["composition"] = Composition(**options["composition"])
    return options


def build_tokenizer(texts: Iterable[str], pieces: int) -> WhisperTokenizer:
    """Build an English tokenizer in Whisper's format: byte-level BPE learned from `texts`, then Whisper's special
    tokens in their order, then the timestamps of a 30 s window (Radford et al. 2022, section 2.3).
    pieces: vocabulary size of the BPE, the 256 bytes included."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(
        (f" {text}" for text in texts), vocab_size=max(pieces, 256), min_frequency=2, show_progress=False
    )
    with tempfile.TemporaryDirectory() as folder:
        learner.save_model(folder)
        vocab = json.loads((Path(folder) / "vocab.json").read_text(encoding="utf-8"))
        lines = (Path(folder) / "merges.txt").read_text(encoding="utf-8").splitlines()
        # an empty normaliser, because Whisper's own would convert British spellings
        (Path(folder) / "normalizer.json").write_text("{}", encoding="utf-8")
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer = WhisperTokenizer(
            vocab=vocab, merges=merges, normalizer_file=str(Path(folder) / "normalizer.json"), pad_token=END
        )
    special = [START, "<|en|>", *TASKS.values(), *OTHERS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})  # type: ignore[arg-type] # a list is taken
    stamps = round(SECONDS / PRECISION) + 1
    tokenizer.add_tokens([f"<|{step * PRECISION:.2f}|>" for step in range(stamps)])
    tokenizer.set_prefix_tokens(language="english", task="transcribe")
    return tokenizer


def generation_config(tokenizer: WhisperTokenizer, positions: int) -> GenerationConfig:
    """Return a Whisper's generation settings for this tokenizer. positions: the decoder's number of positions."""
    number: Any = tokenizer.convert_tokens_to_ids
    end, start = number(END), number(START)
    special = [number(name) for name in (START, "<|en|>", *TASKS.values(), *OTHERS[:3])]
    return GenerationConfig(
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_length=positions,
        begin_suppress_tokens=[number("Ġ"), end],
        suppress_tokens=special,
        is_multilingual=True,
        lang_to_id={"<|en|>": number("<|en|>")},
        task_to_id={task: number(name) for task, name in TASKS.items()},
        no_timestamps_token_id=number("<|notimestamps|>"),
        prev_sot_token_id=number("<|startofprev|>"),
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )


def kept_tokenizer(folder: Path, rows: Sequence[Utterance], pieces: int) -> WhisperTokenizer:
    """Load the tokenizer in `folder`. If there is none, learn one of size `pieces` from the texts and save it there."""
    if not (folder / "tokenizer.json").is_file():
        tokenizer = build_tokenizer(sorted({row.text for row in rows}), pieces)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        (folder / "normalizer.json").write_text("{}\n", encoding="utf-8")
    return WhisperTokenizer.from_pretrained(folder)


def durations(rows: Sequence[Utterance], kept: Path, admission: Admission, of: str) -> list[float]:
    """Return the duration of each utterance in seconds; NaN if it cannot be used, which is logged.

    kept: folder that caches the results. admission: how many may be bad. of: what the rows are, for messages. Raises
    InputError if too many are bad.
    """
    found, bad = seconds_of([row.path for row in rows], kept), BadRows()
    for row, value in zip(rows, found, strict=True):
        if isinstance(value, str):
            bad.add(value, f"{row.path.name} in {row.place}")
    if bad.count:
        admission.check(bad, len(rows), of, rule="hold usable recordings")
        rank_zero_info(f"{bad.count} of the {len(rows)} {of} left out: {bad.report()}")
    return [math.nan if isinstance(value, str) else value for value in found]
