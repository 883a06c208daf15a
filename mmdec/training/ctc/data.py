"""Training data of a CTC head: encoder states, which are computed once and stored, and the pieces of transcripts.

Encoders are frozen. Recordings may be distorted before they are encoded, as by rooms, noise or a telephone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from mmdec.audio import SAMPLE_RATE, load_audio, sound_seconds
from mmdec.hub.find import find, kind
from mmdec.hub.whisper import KIND, KINDS, load_encoder
from mmdec.nn.whisper_encoder import TAIL, WhisperEncoder, read_states
from mmdec.phonetics.pieces import HEARD, Pieces, heard
from mmdec.training.corpora.librispeech import Utterance, read_utterances
from mmdec.training.corpora.text_files import held_sources, read_training_pairs, sentence_key
from mmdec.training.optim import rows_of, sized_batches
from mmdec.training.stores import FrameStore
from mmdec.training.whisper.augment import (
    FRAME,
    add_babble,
    add_coloured_noise,
    perturb_vocal_tract,
    reverberate,
    telephone,
)
from mmdec.types import InputError

FILES = ("*.json", "model.safetensors", "model-*.safetensors")
STATES = 50  # encoder states per second; the same for all supported encoders


class SpeechEncoder(Protocol):
    """An encoder that turns speech into states."""

    @property
    def width(self) -> int:
        """Return the number of channels of a state."""
        ...

    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        """Encode 16 kHz samples, each (T,), with up to `tail` seconds of the padding silence after each sound.

        Returns: states (B, S, width) and their lengths (B,).
        """
        ...


@dataclass(frozen=True)
class WhisperReader:
    """A Whisper's encoder without its last `top` layers. If `top` is not 0, `read` returns the states of all padding
    silence, too, because the left-out layers, which run later, attend to them."""

    encoder: WhisperEncoder
    top: int = 0

    @property
    def width(self) -> int:
        return self.encoder.config.d_model

    @torch.inference_mode()
    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        return read_states(self.encoder, sounds, tail=None if self.top else tail, top=self.top)


@dataclass(frozen=True)
class TransformersReader:
    """An encoder of transformers with its feature extractor: wav2vec 2.0, HuBERT, w2v-BERT 2.0 or similar.

    Sounds are encoded one by one, because padding changes the output of some of these models.
    """

    model: Any
    extractor: Any

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @torch.inference_mode()
    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        rows = []
        for sound in sounds:
            samples = F.pad(sound, (0, round(tail * SAMPLE_RATE))).numpy()
            inputs = self.extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            rows.append(self.model(**inputs).last_hidden_state[0])
        states = pad_sequence(rows, batch_first=True)
        return states, torch.tensor([len(row) for row in rows])


def load_speech_encoder(model: str, top: int = 0) -> SpeechEncoder:
    """Load a speech encoder by shipped name, directory or hub id, in float32 and frozen.

    top: number of last layers of a Whisper encoder to leave out.

    Raises InputError where there is no such model, or transformers has no encoder and feature extractor for it.
    """
    folder = find(model, KIND, FILES)
    if kind(folder) in KINDS:
        return WhisperReader(load_encoder(folder), top)
    if top:
        raise InputError(f"`top` must be 0 but for a Whisper, but is {top} for '{model}'. Leave it out.")
    from transformers import AutoFeatureExtractor, AutoModel

    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        network = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
        width = network.config.hidden_size
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise InputError(
            f"`encoder` must be a Whisper or an encoder of speech that transformers knows, with its feature extractor, "
            f"as safetensors, but '{model}' is none ({error!s:.200}). Name another."
        ) from None
    if not isinstance(width, int) or getattr(extractor, "sampling_rate", None) != SAMPLE_RATE:
        raise InputError(f"`encoder` must read {SAMPLE_RATE} Hz sound, but '{model}' does not. Name another.")
    return TransformersReader(network.eval().requires_grad_(False), extractor)


BATCH = 16  # number of sounds that are encoded at once
CHUNK = 512  # number of sounds that are sorted by length together


@dataclass(frozen=True)
class Distortion:
    """The probability of each distortion: voice (vocal tract length), room, noise, telephone. The gain always changes.

    silence: the most seconds of silence that are added at each end, because users' recordings have silence there and
        corpora do not.
    """

    voice: float = 0.5
    room: float = 0.25
    noise: float = 0.35
    telephone: float = 0.1
    silence: float = 0.6
    quietest: float = 0.05  # lowest peak level that the random gain gives


CLEAN = Distortion(0, 0, 0, 0, 0, 0.5)


def distort(sound: np.ndarray, how: Distortion, draw: np.random.Generator) -> np.ndarray:
    """Distort a sound (T,) as a microphone might record it, with silence at both ends. how: the distortions'
    probabilities. Returns (T',)."""
    if len(sound) > FRAME and draw.random() < how.voice:
        sound = perturb_vocal_tract(sound, draw)
    sound = np.pad(sound, [int(draw.uniform(0, how.silence) * SAMPLE_RATE) for _ in range(2)])
    if draw.random() < how.room:
        sound = reverberate(sound, draw)
    if draw.random() < how.noise:
        add = add_coloured_noise if draw.random() < 0.75 else add_babble
        sound = add(sound, draw.uniform(5, 30), draw)
    if draw.random() < how.telephone:
        sound = telephone(sound, draw)
    peak = how.quietest * (0.95 / how.quietest) ** draw.random()
    return (sound * (peak / max(float(np.abs(sound).max()), 1e-4))).astype(np.float32)


def state_name(row: Utterance, view: int) -> str:
    """Return the store's key of one version of a recording. view: 0 is the recording itself, all others are distorted
    versions."""
    return f"{row.path.parent.name}/{row.path.stem}@{view}"


def keep_states(
    rows: Sequence[tuple[Utterance, int]], encoder: SpeechEncoder, folder: Path, how: Distortion
) -> FrameStore:
    """Compute the states of all (recording, view) that the store in `folder` lacks, and return the store.

    It first logs how many are missing and how many GB they need. A killed process loses at most the last `CHUNK`
    sounds.
    """
    store = FrameStore(folder, encoder.width)
    missing = [(row, view) for row, view in rows if state_name(row, view) not in store]
    if not missing:
        return store
    seconds = sum(sound_seconds(row.path) + TAIL + (how.silence if view else 0) for row, view in missing)
    size = seconds * STATES * store.width * 2 / 1e9
    rank_zero_info(f"states of {len(missing)} sounds, {seconds / 3600:.2f} hours, {size:.2f} GB, go to {folder}")
    for start in range(0, len(missing), CHUNK):
        sounds = [(state_name(row, view), heard_sound(row, view, how)) for row, view in missing[start : start + CHUNK]]
        sounds.sort(key=lambda item: len(item[1]))  # a batch has sounds of about equal length: there is little padding
        for begin in range(0, len(sounds), BATCH):
            batch = sounds[begin : begin + BATCH]
            states, counts = encoder.read([sound for _, sound in batch], TAIL)
            store.add({name: states[at, : counts[at]] for at, (name, _) in enumerate(batch)})
    return store


def heard_sound(row: Utterance, view: int, how: Distortion) -> Tensor:
    """Load the 16 kHz samples of one version of a recording: as it is for `view` 0, else distorted. The distortion's
    random seed follows from the recording's name and `view`."""
    sound = load_audio(row.path)
    if view == 0:
        return sound
    seed = int.from_bytes(hashlib.blake2b(state_name(row, view).encode(), digest_size=8).digest())
    return torch.from_numpy(distort(sound.numpy(), how, np.random.default_rng(seed)))


@dataclass
class CtcBatch:
    """B sounds, padded to S encoder states, and the pieces of their transcripts."""

    states: Tensor  # (B, S, D) encoder states of width D
    lengths: Tensor  # (B,) number of states of each sound
    pieces: Tensor  # (B, T) ids of the pieces, padded with 0
    piece_lengths: Tensor  # (B,) number of pieces of each transcript
    rows: list[str]  # the sounds' names in the store


class KeptStates(Dataset[CtcBatch]):
    """A dataset of batches, whose states are read from the store when a batch is loaded. texts: piece ids of each
    sound's transcript, by the sound's name. batches: the names of the sounds in each batch."""

    def __init__(self, store: FrameStore, texts: dict[str, list[int]], batches: Sequence[Sequence[str]]) -> None:
        self.store, self.texts, self.batches = store, texts, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> CtcBatch:
        names = list(self.batches[number])
        states = [self.store.get(name) for name in names]
        texts = [torch.tensor(self.texts[name]) for name in names]
        return CtcBatch(
            pad_sequence(states, batch_first=True),
            torch.tensor([len(row) for row in states]),
            pad_sequence(texts, batch_first=True),
            torch.tensor([len(row) for row in texts]),
            names,
        )


class StoredBatches(LightningDataModule):
    """Base of the data modules of CTC heads: their data loaders. A subclass sets the fields.

    A process's part of a batch has at most `batch_states` encoder states, padding included.
    """

    store: FrameStore
    texts: dict[str, list[int]]  # piece ids of each training sound's transcript, by the sound's name
    dev_texts: dict[str, list[int]]  # the same for the development sounds
    batch_states: int
    steps_per_epoch: int
    seed: int

    def train_dataloader(self) -> DataLoader:
        """Load batches of sounds of about equal length, drawn anew in each epoch. All sounds are used once before one
        is repeated."""
        assert self.trainer is not None
        world, names = self.trainer.world_size, list(self.texts)
        batches: list[list[str]] = []
        turn = 0
        while len(batches) < self.steps_per_epoch:
            draw = np.random.default_rng([self.seed, self.trainer.current_epoch, turn])
            shared = [batch for batch in self.grouped(names, draw, world) if len(batch) >= world]
            if not shared:
                raise InputError(
                    f"`batch_states` must hold a recording for each of {world} processes, but no batch has so many. "
                    "Raise it, add recordings, or train in one process."
                )
            batches += shared
            turn += 1
        mine = rows_of(batches[: self.steps_per_epoch], self.trainer.global_rank, world)
        return DataLoader(KeptStates(self.store, self.texts, mine), batch_size=None, shuffle=False)

    def val_dataloader(self) -> DataLoader:
        batches = self.grouped(list(self.dev_texts))
        return DataLoader(KeptStates(self.store, self.dev_texts, batches), batch_size=None, shuffle=False)

    def grouped(self, names: list[str], draw: np.random.Generator | None = None, world: int = 1) -> list[list[str]]:
        """Group the sounds `names` into batches of about equal length, each to be shared by `world` processes. The
        batches are in random order if `draw` is given, else ordered by length."""
        noise = np.zeros(len(names)) if draw is None else draw.normal(0, 0.15, len(names))
        lengths = [self.store.length(name) for name in names]
        order = sorted(range(len(names)), key=lambda at: np.log(lengths[at]) + noise[at])
        batches = [[names[at] for at in batch] for batch in sized_batches(order, lengths, self.batch_states * world)]
        return batches if draw is None else [batches[at] for at in draw.permutation(len(batches))]


class SentenceData(StoredBatches, LightningDataModule):
    """A data module: sentence recordings as stored encoder states, with their transcripts.

    corpus: manifest or folder, as `read_utterances` takes it.
    encoder: name, folder or hub id of a Whisper, wav2vec 2.0, HuBERT or similar model. Its width is the head's
        `d_states`.
    states: folder where the encoder states are stored. Missing states are computed first, so a corpus may grow between
        runs.
    pieces: the tokenizer's file. If it does not exist, a tokenizer with `count` pieces is learned from the training
        sentences of `text` (folders of text pairs) and saved there.
    views: number of versions of each recording. 1: one distorted version; 2: also the undistorted recording; above 2:
        also further distorted versions.
    batch_states: the most encoder states in one process's batch, padding included.
    limit: use only the first `limit` training recordings; None: all.
    top: number of last Whisper layers that are trained together with the head; the stored states are taken before them.
    text: folders of text pairs. Sentences of their dev and test splits are left out of training.
    """

    def __init__(
        self,
        corpus: str,
        encoder: str,
        states: str,
        pieces: str,
        text: list[str],
        top: int = 0,
        count: int = 1001,
        train_split: str = "train",
        dev_split: str = "dev",
        views: int = 1,
        distortion: Distortion | None = None,
        batch_states: int = 4000,
        steps_per_epoch: int = 200,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.corpus, self.encoder, self.top, self.views = corpus, encoder, top, views
        self.folder = Path(states) / f"below_{top}" if top else Path(states)
        self.distortion = distortion or Distortion()
        self.splits, self.limit = (train_split, dev_split), limit
        self.batch_states, self.steps_per_epoch, self.seed = batch_states, steps_per_epoch, seed
        self.text = text
        self.texts: dict[str, list[int]] = {}
        self.pieces = Pieces.kept(Path(pieces), self._sentences, count, HEARD)

    def _sentences(self) -> Iterator[str]:
        return (heard(pair.source) for pairs in read_training_pairs(self.text) for pair in pairs)

    @property
    def units(self) -> list[str]:
        """Return the pieces, ordered by id. The command line passes them to the model."""
        return self.pieces.names

    def rows(self, split: str) -> list[Utterance]:
        """List the recordings of a split whose transcript is not empty. The training split has at most `limit` of them,
        and none that a folder in `text` holds out for dev or test."""
        rows = [row for row in read_utterances(self.corpus, split) if self.pieces.encode(heard(row.text))]
        if split != self.splits[0]:
            return rows
        held = held_sources(self.text)
        return [row for row in rows if sentence_key(row.text) not in held][: self.limit]

    def prepare_data(self) -> None:
        """Compute the missing states in one process only: two processes would corrupt the store's files."""
        self.setup("fit")

    def setup(self, stage: str) -> None:
        if self.texts:
            return
        train, dev = (self.rows(split) for split in self.splits)
        views = (*range(1, max(self.views, 2)), *([0] if self.views > 1 else []))
        train_views = [(row, view) for view in views for row in train]
        encoder = load_speech_encoder(self.encoder, self.top)
        self.store = keep_states([*((row, 0) for row in dev), *train_views], encoder, self.folder, self.distortion)
        self.texts = {state_name(row, view): self.pieces.encode(heard(row.text)) for row, view in train_views}
        self.dev_texts = {state_name(row, 0): self.pieces.encode(heard(row.text)) for row in dev}
