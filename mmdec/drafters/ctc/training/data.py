"""Training data of a CTC head on a frozen speech encoder: stored encoder states, and transcripts as subword pieces.

Encoder states are computed once and stored on disk. Recordings may be augmented before they are encoded, with room
acoustics, noise or a telephone's frequency band.
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

from mmdec.daspeech.checkpoint import ENCODER_KINDS, load_encoder
from mmdec.errors import InputError
from mmdec.hub.find import find_model, model_kind
from mmdec.io.audio import SAMPLE_RATE, load_audio, sound_seconds
from mmdec.phonetics.pieces import CTC_SPECIAL_PIECES, PieceTokenizer, normalise_for_speech
from mmdec.training.corpora.augment import (
    FRAME,
    add_babble,
    add_coloured_noise,
    limit_to_telephone_band,
    perturb_vocal_tract,
    reverberate,
)
from mmdec.training.corpora.librispeech import Utterance, read_utterances
from mmdec.training.corpora.text_files import held_out_sources, read_training_pairs, sentence_key
from mmdec.training.optim import batches_by_size, rows_of
from mmdec.training.stores import FrameStore
from mmdec.whisper.checkpoint import WHISPER_KIND
from mmdec.whisper.unpadded_encoder import STATES_TAIL, UnpaddedEncoder, read_states

ENCODER_FILES = ("*.json", "model.safetensors", "model-*.safetensors")
STATES_PER_SECOND = 50  # encoder states per second of sound; the same for all supported encoders


class FrozenEncoder(Protocol):
    """Interface of a frozen encoder that turns speech into hidden states."""

    @property
    def width(self) -> int:
        """The number of channels of an encoder state."""
        ...

    def encode(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        """Encode recordings.

        Args:
            sounds: 16 kHz samples, a tensor (T,) for each recording.
            tail: Seconds of silence after each recording that are also encoded.

        Returns:
            States (B, S, width), padded, and the number of states of each recording (B,).
        """
        ...


@dataclass(frozen=True)
class WhisperSpeechEncoder:
    """The encoder of a Whisper, without its last `top` layers.

    If `top` is not 0, `encode` ignores `tail` and returns the states of all silence after a recording. These states are
    input of the last layers, which are trained later and attend to all of them.
    """

    encoder: UnpaddedEncoder
    top: int = 0

    @property
    def width(self) -> int:
        return self.encoder.config.d_model

    @torch.inference_mode()
    def encode(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        return read_states(self.encoder, sounds, tail=None if self.top else tail, top=self.top)


@dataclass(frozen=True)
class TransformersSpeechEncoder:
    """A speech encoder of the library transformers with its feature extractor.

    The encoder is wav2vec 2.0, HuBERT, w2v-BERT 2.0 or similar. Recordings are encoded one by one, because padding
    changes the output of some of these models.
    """

    model: Any
    extractor: Any

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @torch.inference_mode()
    def encode(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        rows = []
        for sound in sounds:
            samples = F.pad(sound, (0, round(tail * SAMPLE_RATE))).numpy()
            inputs = self.extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            rows.append(self.model(**inputs).last_hidden_state[0])
        states = pad_sequence(rows, batch_first=True)
        return states, torch.tensor([len(row) for row in rows])


def load_speech_encoder(model: str, top: int = 0) -> FrozenEncoder:
    """Load a speech encoder in float32, with frozen weights.

    Args:
        model: Name of a shipped model, folder or Hugging Face id.
        top: Number of last layers of a Whisper encoder to leave out.

    Raises:
        InputError: If there is no such model, or if transformers has no encoder and feature extractor for it.
    """
    folder = find_model(model, WHISPER_KIND, ENCODER_FILES)
    if model_kind(folder) in ENCODER_KINDS:
        return WhisperSpeechEncoder(load_encoder(folder), top)
    if top:
        raise InputError(f"`top` must be 0 for encoders other than Whisper, but is {top} for '{model}'. Leave it out.")
    from transformers import AutoFeatureExtractor, AutoModel

    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        network = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
        width = network.config.hidden_size
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise InputError(
            f"`encoder` must be a Whisper or an encoder of speech that transformers knows, with its feature extractor, "
            f"as safetensors, but '{model}' is not ({error!s:.200}). Give another folder or Hugging Face id."
        ) from None
    if not isinstance(width, int) or getattr(extractor, "sampling_rate", None) != SAMPLE_RATE:
        raise InputError(f"`encoder` must read {SAMPLE_RATE} Hz sound, but '{model}' does not. Give another model.")
    return TransformersSpeechEncoder(network.eval().requires_grad_(False), extractor)


ENCODER_BATCH = 16  # number of recordings in a batch of the encoder
SORTED_RECORDINGS = 512  # number of recordings that are sorted by length together, so that batches need little padding


@dataclass(frozen=True)
class Distortion:
    """The probability of each random augmentation of a recording. The recording's loudness is always changed.

    Args:
        voice: Another vocal tract length.
        room: Reverberation.
        noise: Added noise.
        telephone: A telephone's frequency band.
        silence: No probability, but seconds: up to this much silence is added at each end, because users' recordings
            have silence there and corpora do not.
    """

    voice: float = 0.5
    room: float = 0.25
    noise: float = 0.35
    telephone: float = 0.1
    silence: float = 0.6
    # minimum of a recording's largest sample after its volume was changed at random; 1 is full scale
    quietest: float = 0.05


NO_DISTORTION = Distortion(0, 0, 0, 0, 0, 0.5)


def distort(sound: np.ndarray, distortion: Distortion, draw: np.random.Generator) -> np.ndarray:
    """Augment a recording at random, with room acoustics, noise, silence at both ends and more.

    Args:
        sound: 16 kHz samples (T,).
        distortion: The probabilities.
        draw: Source of random numbers.

    Returns:
        Samples (T',).
    """
    if len(sound) > FRAME and draw.random() < distortion.voice:
        sound = perturb_vocal_tract(sound, draw)
    sound = np.pad(sound, [int(draw.uniform(0, distortion.silence) * SAMPLE_RATE) for _ in range(2)])
    if draw.random() < distortion.room:
        sound = reverberate(sound, draw)
    if draw.random() < distortion.noise:
        add = add_coloured_noise if draw.random() < 0.75 else add_babble
        sound = add(sound, draw.uniform(5, 30), draw)
    if draw.random() < distortion.telephone:
        sound = limit_to_telephone_band(sound, draw)
    peak = distortion.quietest * (0.95 / distortion.quietest) ** draw.random()
    return (sound * (peak / max(float(np.abs(sound).max()), 1e-4))).astype(np.float32)


def state_name(row: Utterance, view: int) -> str:
    """Return the key under which a recording's states are stored.

    Args:
        view: 0 for the recording itself; n for its n-th augmented version.
    """
    return f"{row.path.parent.name}/{row.path.stem}@{view}"


def keep_states(
    rows: Sequence[tuple[Utterance, int]], encoder: FrozenEncoder, folder: Path, distortion: Distortion
) -> FrameStore:
    """Compute the encoder states that the store in `folder` lacks, and return the store.

    It first logs the number of missing recordings, and the size of their states in GB. A killed process loses at most
    the last `SORTED_RECORDINGS` recordings.

    Args:
        rows: (recording, version) pairs; version 0 is the recording itself, n its n-th augmented version.
        distortion: The probabilities of augmentations.
    """
    store = FrameStore(folder, encoder.width)
    missing = [(row, view) for row, view in rows if state_name(row, view) not in store]
    if not missing:
        return store
    seconds = sum(sound_seconds(row.path) + STATES_TAIL + (distortion.silence if view else 0) for row, view in missing)
    size = seconds * STATES_PER_SECOND * store.width * 2 / 1e9
    rank_zero_info(f"states of {len(missing)} sounds, {seconds / 3600:.2f} hours, {size:.2f} GB, go to {folder}")
    for start in range(0, len(missing), SORTED_RECORDINGS):
        sounds = [
            (state_name(row, view), load_view(row, view, distortion))
            for row, view in missing[start : start + SORTED_RECORDINGS]
        ]
        # recordings of about equal length form a batch, so that it needs little padding
        sounds.sort(key=lambda item: len(item[1]))
        for begin in range(0, len(sounds), ENCODER_BATCH):
            batch = sounds[begin : begin + ENCODER_BATCH]
            states, counts = encoder.encode([sound for _, sound in batch], STATES_TAIL)
            store.add({name: states[at, : counts[at]] for at, (name, _) in enumerate(batch)})
    return store


def load_view(row: Utterance, view: int, distortion: Distortion) -> Tensor:
    """Load one version of a recording as 16 kHz samples (T,).

    Args:
        view: 0: the recording itself; n: its n-th augmented version, with a random seed from the recording's name and
            n.
        distortion: The probabilities of augmentations.
    """
    sound = load_audio(row.path)
    if view == 0:
        return sound
    seed = int.from_bytes(hashlib.blake2b(state_name(row, view).encode(), digest_size=8).digest())
    return torch.from_numpy(distort(sound.numpy(), distortion, np.random.default_rng(seed)))


@dataclass
class CtcBatch:
    """A batch of B recordings as encoder states, padded to S, with their transcripts as subword pieces."""

    states: Tensor  # (B, S, D) encoder states of width D
    lengths: Tensor  # (B,) number of states of each recording
    pieces: Tensor  # (B, T) ids of the pieces, padded with 0
    piece_lengths: Tensor  # (B,) number of pieces of each transcript
    rows: list[str]  # the recordings' names in the store of states


class StateDataset(Dataset[CtcBatch]):
    """A dataset of batches. The encoder states of a batch are read from `store` when the batch is loaded.

    Args:
        texts: Name of a recording -> piece ids of its transcript.
        batches: The names of the recordings in each batch.
    """

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
    """Base class of the data modules of CTC heads: it makes their data loaders. Subclasses set its fields.

    The batch of each process has at most `batch_states` encoder states, padding included.
    """

    store: FrameStore
    texts: dict[str, list[int]]  # name of a training recording -> piece ids of its transcript
    dev_texts: dict[str, list[int]]  # name of a development recording -> piece ids of its transcript
    batch_states: int
    steps_per_epoch: int
    seed: int

    def train_dataloader(self) -> DataLoader:
        """Load random batches of recordings of about equal length, other ones in each epoch.

        Within an epoch, every recording is used once before any is repeated.
        """
        assert self.trainer is not None
        world, names = self.trainer.world_size, list(self.texts)
        batches: list[list[str]] = []
        turn = 0
        while len(batches) < self.steps_per_epoch:
            draw = np.random.default_rng([self.seed, self.trainer.current_epoch, turn])
            shared = [batch for batch in self.group_by_length(names, draw, world) if len(batch) >= world]
            if not shared:
                raise InputError(
                    f"`batch_states` must hold a recording for each of {world} processes, but no batch has so many. "
                    "Raise it, add recordings, or train in one process."
                )
            batches += shared
            turn += 1
        mine = rows_of(batches[: self.steps_per_epoch], self.trainer.global_rank, world)
        return DataLoader(StateDataset(self.store, self.texts, mine), batch_size=None, shuffle=False)

    def val_dataloader(self) -> DataLoader:
        batches = self.group_by_length(list(self.dev_texts))
        return DataLoader(StateDataset(self.store, self.dev_texts, batches), batch_size=None, shuffle=False)

    def group_by_length(
        self, names: list[str], draw: np.random.Generator | None = None, world: int = 1
    ) -> list[list[str]]:
        """Group recordings of about equal length into batches.

        Args:
            draw: Source of random numbers for the batches' order; None: by length.
            world: Number of processes that share each batch; a batch is larger by this factor.

        Returns:
            The names of each batch's recordings.
        """
        noise = np.zeros(len(names)) if draw is None else draw.normal(0, 0.15, len(names))
        lengths = [self.store.length(name) for name in names]
        order = sorted(range(len(names)), key=lambda at: np.log(lengths[at]) + noise[at])
        batches = [[names[at] for at in batch] for batch in batches_by_size(order, lengths, self.batch_states * world)]
        return batches if draw is None else [batches[at] for at in draw.permutation(len(batches))]


class SentenceData(StoredBatches, LightningDataModule):
    """A data module for CTC heads: recordings of sentences as stored encoder states, with their transcripts.

    Args:
        corpus: A manifest (list of sound files with texts), or a folder in LibriSpeech's format.
        encoder: Name, folder or Hugging Face id of a Whisper, wav2vec 2.0, HuBERT or similar model. The head's option
            `d_states` must be its width.
        states: Folder where the encoder states are stored. Missing ones are computed first, so a corpus may grow later.
        pieces: File of the subword tokenizer. If it does not exist, a tokenizer of `count` pieces is learned from the
            training sentences of `text` and saved there.
        text: Folders with sentences and their translations. Sentences of their dev and test splits are left out of
            training.
        views: Number of versions of each recording to train on. 1: an augmented one; 2: also the recording itself;
            above 2: more augmented ones.
        batch_states: Maximum number of encoder states in one process's batch, padding included.
        limit: Use only the first `limit` training recordings; None: all.
        top: Number of last Whisper layers that are trained together with the head. The stored states are the input of
            these layers.
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
        self.pieces = PieceTokenizer.load_or_learn(Path(pieces), self._sentences, count, CTC_SPECIAL_PIECES)

    def _sentences(self) -> Iterator[str]:
        return (normalise_for_speech(pair.source) for pairs in read_training_pairs(self.text) for pair in pairs)

    @property
    def units(self) -> list[str]:
        """The subword pieces, ordered by id. The command line passes them to the model."""
        return self.pieces.names

    def rows(self, split: str) -> list[Utterance]:
        """Return the recordings of a split that have a transcript.

        Of the training split, return at most `limit`, without sentences that are in a dev or test split of `text`.
        """
        rows = [
            row for row in read_utterances(self.corpus, split) if self.pieces.encode(normalise_for_speech(row.text))
        ]
        if split != self.splits[0]:
            return rows
        held_out = held_out_sources(self.text)
        return [row for row in rows if sentence_key(row.text) not in held_out][: self.limit]

    def prepare_data(self) -> None:
        """Compute the missing encoder states.

        Lightning calls this in one process only: two processes would damage the store's files.
        """
        self.setup("fit")

    def setup(self, stage: str) -> None:
        if self.texts:
            return
        train, dev = (self.rows(split) for split in self.splits)
        views = (*range(1, max(self.views, 2)), *([0] if self.views > 1 else []))
        train_views = [(row, view) for view in views for row in train]
        encoder = load_speech_encoder(self.encoder, self.top)
        self.store = keep_states([*((row, 0) for row in dev), *train_views], encoder, self.folder, self.distortion)
        self.texts = {
            state_name(row, view): self.pieces.encode(normalise_for_speech(row.text)) for row, view in train_views
        }
        self.dev_texts = {state_name(row, 0): self.pieces.encode(normalise_for_speech(row.text)) for row in dev}
