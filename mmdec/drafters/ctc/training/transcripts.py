"""Training data of a CTC head that drafts for a Whisper: encoder states of windows, and the Whisper's own transcripts.

Recordings are joined to windows of at most 30 s, as in decoding. The stored states are those of the speech and of some
silence after it. The Whisper decodes each window greedily, with timestamps. The known text of the window's recordings
is the draft (speculative decoding), so a transcript needs only a few decoder passes instead of one for each token. With
`agreement`, one decoder pass scores the known text, which becomes the transcript if the model agrees with it. This
takes a third to a half of the time of decoding with drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F

from mmdec.checks.devices import has_fast_bfloat16
from mmdec.core.tree import chain_drafts
from mmdec.drafters.ctc.checkpoint import token_merges
from mmdec.drafters.ctc.tokens import SEGMENT_END, TokenPieces, choose_vocabulary
from mmdec.drafters.ctc.training.data import Distortion, StoredBatches, distort
from mmdec.drafters.medusa.training.data import decode_greedily, end_tokens
from mmdec.errors import InputError
from mmdec.io.audio import SAMPLE_RATE, load_audio, sound_seconds
from mmdec.training.corpora.librispeech import Utterance, read_utterances
from mmdec.training.stores import FrameStore, TokenStore
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.unpadded_encoder import STATE_SAMPLES, whisper_mel
from mmdec.whisper.window_encoder import context_frames, encode

MAX_SILENCE_SECONDS = 3.0  # maximum seconds of silence after the sound whose encoder states are stored
WINDOW_SECONDS = (2.0, 27.0)  # in seconds: windows of joined recordings have a random maximum length in this range
PAUSE_SECONDS = (0.2, 1.0)  # minimum and maximum seconds of silence between two joined recordings
SEARCHED_TOKENS = 12  # after a round, an accepted token is searched among this many next tokens of the known text
DECODED_WINDOWS = 4  # number of windows that the decoder decodes together
WHOLE_WINDOW_INTERVAL = 4  # every 4th batch of augmented windows is padded to 30 s, as in decoding
KNOWN_TEXT_NODES = 11  # number of tokens of the known text that are drafted in a round, the root included
MAX_TRANSCRIPT_TOKENS = 220  # maximum tokens of a transcript; decoding is stopped there
MARGIN_SECONDS = 5.0  # seconds of silence after the sound that the encoder reads if a window is not padded to 30 s


@dataclass
class KnownTextRow:
    """One row's state: its known text, and what was accepted of it."""

    text: Sequence[int]
    place: int = 0  # index of the next token in `text`
    last: int = -1  # the last accepted token; -1: none


@final
class KnownTextDrafter:
    """A drafter that drafts texts which are known beforehand, one text for each row of the batch.

    The model may write numbers, names and punctuation differently. So after each round, the drafter uses the accepted
    tokens to find its place in the text again.

    Args:
        texts: Token ids of each row's known text.
        first_time: Id of the first timestamp token.
    """

    needs = Needs()
    name = "known-text"

    def __init__(self, texts: Sequence[Sequence[int]], first_time: int) -> None:
        self.texts, self.first_time = texts, first_time

    def check(self, target: Target) -> None:
        """Accept every target: this drafter works for all models."""

    def start(self, context: Context) -> list[KnownTextRow]:
        return [KnownTextRow(list(text)) for text in self.texts]

    def propose(self, state: list[KnownTextRow], roots: Tensor, plan: Plan) -> Draft:
        """Draft the rest of each row's text.

        After the timestamp that ends a segment, the same timestamp is drafted first, because the next segment begins
        with it.
        """
        drafts = []
        for row in state:
            again = [row.last] if row.last >= self.first_time and row.place else []
            drafts.append([*again, *row.text[row.place :]][: min(plan.nodes, plan.depth)])
        return chain_drafts(roots, drafts)

    def update(self, state: list[KnownTextRow], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """After a round, find each row's place in its known text again: after the accepted tokens."""
        for row, tokens in zip(state, verdict.new_tokens, strict=True):
            for token in tokens:
                if token < self.first_time:
                    near = row.text[row.place : row.place + SEARCHED_TOKENS]
                    row.place += near.index(token) + 1 if token in near else 0
                # a repeated timestamp begins the next segment; -1: do not draft it again
                row.last = -1 if token == row.last else token

    def select(self, state: list[KnownTextRow], live: Tensor) -> None:
        state[:] = [state[index] for index in live.tolist()]


@dataclass(frozen=True)
class JoinedWindow:
    """A window of sound: several recordings, one after the other.

    Args:
        language: A code such as "en".
        view: 0: the recordings as they are; n: the n-th augmented version.
    """

    rows: tuple[Utterance, ...]
    language: str
    view: int

    @property
    def name(self) -> str:
        return f"{self.rows[0].path.stem}+{len(self.rows)}@{self.view}"

    @property
    def text(self) -> str:
        return " ".join(row.text for row in self.rows)

    @property
    def seconds(self) -> float:
        """The sum of the recordings' durations in seconds, without the pauses between them."""
        return sum(sound_seconds(row.path) for row in self.rows)

    def sound(self, distortion: Distortion) -> Tensor:
        """Load the window as 16 kHz samples (T,).

        Args:
            distortion: Probabilities of augmentations, which are used unless `view` is 0.
        """
        draw = np.random.default_rng([*self.name.encode()])
        parts = []
        for row in self.rows:
            parts += [
                load_audio(row.path).numpy(),
                np.zeros(int(draw.uniform(*PAUSE_SECONDS) * SAMPLE_RATE), np.float32),
            ]
        samples = np.concatenate(parts[:-1])
        return torch.from_numpy(distort(samples, distortion, draw) if self.view else samples)


def join_windows(rows: Sequence[Utterance], language: str, view: int, seed: int) -> list[JoinedWindow]:
    """Join recordings, in their order, into windows.

    Each window's maximum length is drawn at random from `WINDOW_SECONDS`.

    Args:
        view: 0: the recordings as they are; n: the n-th augmented version, with other random lengths.
    """
    windows: list[JoinedWindow] = []
    utterances: list[Utterance] = []
    seconds = 0.0
    draw = np.random.default_rng([seed, view])
    bound = draw.uniform(*WINDOW_SECONDS)
    for row in rows:
        length = sound_seconds(row.path)
        if utterances and seconds + length > bound:
            windows.append(JoinedWindow(tuple(utterances), language, view))
            utterances, seconds, bound = [], 0.0, draw.uniform(*WINDOW_SECONDS)
        utterances.append(row)
        seconds += length + PAUSE_SECONDS[1]
    return [*windows, JoinedWindow(tuple(utterances), language, view)] if utterances else windows


@dataclass(frozen=True)
class WindowTranscriber:
    """Runs a Whisper on windows of sound, to compute encoder states and greedy transcripts."""

    whisper: LoadedWhisper

    @property
    def first_time(self) -> int:
        """The id of the first timestamp token."""
        settings: Any = self.whisper.model.generation_config
        return int(settings.no_timestamps_token_id) + 1

    @property
    def end(self) -> int:
        """The id of the token that ends a text."""
        return end_tokens(self.whisper.model)[0]

    def prompt(self, language: str) -> list[int]:
        """Return the token ids of the decoder's prompt for a transcript with timestamps.

        Args:
            language: A code such as "en".
        """
        settings: Any = self.whisper.model.generation_config
        begin = [int(settings.decoder_start_token_id)]
        if not getattr(settings, "is_multilingual", False):
            return begin
        return [*begin, settings.lang_to_id[f"<|{language}|>"], settings.task_to_id["transcribe"]]

    @torch.inference_mode()
    def states(self, sounds: Sequence[Tensor], whole: bool = True) -> Tensor:
        """Compute the encoder states (B, S, D) of B recordings, each 16 kHz samples (T,).

        Args:
            whole: Pad the recordings to 30 s. False: only to the longest of them and `MARGIN_SECONDS` seconds of
                silence.
        """
        features = [self._features(sound) for sound in sounds]
        frames = features[0].shape[-1] if whole else max(context_frames(row, MARGIN_SECONDS) for row in features)
        with _half(features[0].device):
            states = [encode(self.whisper.model.model.encoder, row, frames) for row in features]
        return torch.cat(states).float()

    def _features(self, sound: Tensor) -> Tensor:
        """Compute the log-mel spectrogram (1, mels, frames) of samples (T,), padded or cut to 30 s."""
        config = self.whisper.model.config
        window = F.pad(sound, (0, config.max_source_positions * STATE_SAMPLES - len(sound)))
        return whisper_mel(window[None], config.num_mel_bins)

    @torch.inference_mode()
    def check_known_text(
        self, window: JoinedWindow, distortion: Distortion, min_share: float
    ) -> tuple[str, Tensor, list[int]] | None:
        """Turn a window's known text into its transcript, with one decoder pass over this text.

        The words stay as they are; punctuation and capital letters become the model's likeliest. A segment ends where
        the timestamp tokens together are likelier than any other token. Its timestamp is always 0.00, because the time
        is not used.

        Args:
            distortion: Probabilities of augmentations.
            min_share: Share of the words' tokens, from 0 to 1, that must be the model's likeliest.

        Returns:
            Name, encoder states (S, D) and transcript's token ids of the window; None if the model agrees with fewer
            words.
        """
        model, first = self.whisper.model, self.first_time
        tokens = self.whisper.tokenizer.encode(" " + window.text.replace('"', ""), add_special_tokens=False)
        sound, prompt = window.sound(distortion), [*self.prompt(window.language), first]
        tokens = tokens[: model.config.max_target_positions - len(prompt)]
        features = self._features(sound)
        with _half(features.device):
            states = encode(model.model.encoder, features, context_frames(features, MARGIN_SECONDS)).float()
        ids = torch.tensor([[*prompt, *tokens]])
        scores = model(encoder_outputs=(states,), decoder_input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        scores = scores.float().log_softmax(-1)
        best, likely = scores[:, : self.end].max(-1), scores[:, first:].logsumexp(-1)
        liked, timed = best.indices.tolist(), (likely > best.values).tolist()
        words = [(a, b) for a, b in zip(tokens, liked, strict=False) if not self._sign(a)]
        if not words or sum(a == b or self._same(a, b) for a, b in words) < min_share * len(words):
            return None
        text = [first]
        for token, other, ends_here in zip(tokens, liked, timed, strict=False):
            text += [first] if ends_here and text[-1] != first else []
            signs = self._sign(token) and self._sign(other)
            text.append(other if signs or self._same(token, other) else token)
        return (
            window.name,
            states[0, : int((len(sound) / SAMPLE_RATE + MAX_SILENCE_SECONDS) * SAMPLE_RATE) // STATE_SAMPLES],
            text,
        )

    def _same(self, token: int, other: int) -> bool:
        return self.whisper.tokenizer.decode([token]).lower() == self.whisper.tokenizer.decode([other]).lower()

    def _sign(self, token: int) -> bool:
        return not any(letter.isalnum() for letter in self.whisper.tokenizer.decode([token]))

    @torch.inference_mode()
    def transcribe(
        self, windows: Sequence[JoinedWindow], distortion: Distortion, whole: bool = True
    ) -> Iterable[tuple[str, Tensor, list[int]]]:
        """Encode and decode windows.

        If a transcript has no end token after `MAX_TRANSCRIPT_TOKENS` tokens, the model has repeated itself; then an
        empty transcript is yielded.

        Args:
            windows: The windows, a batch.
            distortion: Probabilities of augmentations.
            whole: Pad the windows to 30 s, as in decoding.

        Yields:
            For each window its name, encoder states (S, D) and transcript's token ids.
        """
        sounds = [window.sound(distortion) for window in windows]
        states = self.states(sounds, whole)
        token_ids = [self.whisper.tokenizer.encode(" " + w.text, add_special_tokens=False) for w in windows]
        prompts, timed = [self.prompt(window.language) for window in windows], [True] * len(windows)
        drafter = KnownTextDrafter(token_ids, self.first_time)
        texts = decode_greedily(
            self.whisper.model, states, prompts, timed, MAX_TRANSCRIPT_TOKENS, drafter, KNOWN_TEXT_NODES
        )
        for window, sound, row, text in zip(windows, sounds, states, texts, strict=True):
            seconds = len(sound) / SAMPLE_RATE + MAX_SILENCE_SECONDS
            endless = len(text) >= MAX_TRANSCRIPT_TOKENS and text[-1] != self.end
            yield window.name, row[: int(seconds * SAMPLE_RATE) // STATE_SAMPLES], [] if endless else text


def _half(device: torch.device) -> torch.autocast:
    """Return a context that computes in bfloat16 on devices where this is fast.

    States are stored in half precision anyway.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bfloat16(device))


class TranscriptData(StoredBatches, LightningDataModule):
    """A data module for CTC drafters: windows of recordings with the Whisper's own transcripts.

    The windows are stored as encoder states.

    Args:
        corpora: Maps each corpus to its language code. A corpus is a manifest (list of sound files with texts), or a
            folder in LibriSpeech's format.
        model: The Whisper that the head will draft for.
        states: Folder where states and transcripts are stored. Missing ones are computed first, so a corpus may grow
            later.
        pieces: File of the draft vocabulary. If it does not exist, at most `count` pieces are chosen from the
            transcripts.
        views: Number of augmented versions of each training window.
        hours: Use at most this many hours of each corpus for training.
        agreement: A training window's known text becomes its transcript if the model agrees with at least this share of
            its words, from 0 to 1. Other windows are left out. None: the Whisper decodes all windows.
        batch_states: Maximum number of encoder states in one process's batch, padding included.
    """

    def __init__(
        self,
        corpora: dict[str, str],
        model: str,
        states: str,
        pieces: str,
        count: int = 1200,
        views: int = 1,
        distortion: Distortion | None = None,
        hours: float | None = None,
        agreement: float | None = None,
        batch_states: int = 12000,
        steps_per_epoch: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.corpora, self.folder, self.views, self.hours = corpora, Path(states), views, hours
        self.distortion = distortion or Distortion()
        self.whisper = load_whisper(model)
        self.store = FrameStore(self.folder / "states", self.whisper.model.config.d_model)
        self.transcripts = TokenStore(self.folder / "transcripts")
        self.steps_per_epoch, self.seed, self.batch_states = steps_per_epoch, seed, batch_states
        merges = token_merges(self.whisper.tokenizer)
        self.windows = {split: self._windows(split) for split in ("train", "dev")}
        stores, train = (self.store, self.transcripts), self.windows["train"]
        keep_transcripts(self.windows["dev"], self.whisper, *stores, self.distortion)
        keep_transcripts(train, self.whisper, *stores, self.distortion, agreement)
        if not Path(pieces).is_file():
            texts = (self.transcripts.get(window.name) or [] for window in self.windows["train"])
            Path(pieces).write_text(json.dumps(choose_vocabulary(texts, merges, count)), encoding="utf-8")
        self.pieces = TokenPieces(merges, read_draft_vocabulary(Path(pieces)))

    @property
    def units(self) -> list[str]:
        """The draft vocabulary as pieces ordered by id. The command line passes it to the model."""
        return self.pieces.names

    def _windows(self, split: str) -> list[JoinedWindow]:
        windows = []
        for corpus, language in self.corpora.items():
            rows, left = [], self.hours and self.hours * 3600
            for row in read_utterances(corpus, split):
                if left is not None and split == "train":
                    left -= sound_seconds(row.path)
                    if left < 0:
                        break
                rows.append(row)
            views = range(1, self.views + 1) if split == "train" else (0,)
            windows += [window for view in views for window in join_windows(rows, language, view, self.seed)]
        return windows

    def setup(self, stage: str) -> None:
        first_time = WindowTranscriber(self.whisper).first_time
        texts = {
            split: {
                window.name: labels(self.transcripts.get(window.name) or [], self.pieces, first_time)
                for window in windows
            }
            for split, windows in self.windows.items()
        }
        self.texts, self.dev_texts = ({name: text for name, text in rows.items() if text} for rows in texts.values())
        for split, rows in (("train", self.texts), ("dev", self.dev_texts)):
            if not rows:
                raise InputError(
                    f"`corpora` must have recordings in which the model recognises words, but the "
                    f"{len(self.windows[split])} windows of {split} have none. Look at the recordings."
                )


def read_draft_vocabulary(path: Path) -> list[int]:
    """Read the draft vocabulary from a JSON file: a list of token ids of the Whisper.

    Raises:
        InputError: For any other file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"`pieces` must be a file of tokens, but '{path}' is not ({error}). Give the file that the training wrote."
        ) from None
    if not isinstance(content, list) or not all(type(token) is int for token in content):
        raise InputError(f"`pieces` must hold a list of tokens, but '{path}' holds something else. Remove it.")
    return content


def labels(transcript: Sequence[int], pieces: TokenPieces, first_time: int) -> list[int]:
    """Return the CTC target of a transcript: the pieces of its text tokens, and `SEGMENT_END` after each segment.

    Args:
        transcript: Token ids.
        first_time: Id of the first timestamp token.
    """
    ids: list[int] = []
    for token in transcript:
        if token >= first_time:
            if ids and ids[-1] != SEGMENT_END:
                ids.append(SEGMENT_END)
        else:
            ids += pieces.of_token(token)
    return ids


def keep_transcripts(
    windows: Sequence[JoinedWindow],
    whisper: LoadedWhisper,
    store: FrameStore,
    transcripts: TokenStore,
    distortion: Distortion,
    agreement: float | None = None,
) -> None:
    """Compute and store the encoder states and transcripts that the stores lack.

    Windows of similar length are read together. Windows that are not augmented are padded to 30 s, as in decoding; so
    are the augmented windows of every fourth batch. All other windows, and all windows if `agreement` is given, have
    `MARGIN_SECONDS` seconds of silence after them, which is cheaper.

    Args:
        distortion: Probabilities of augmentations.
        agreement: A window's known text becomes its transcript if the model agrees with this share of its words, from 0
            to 1. Otherwise an empty transcript is stored. None: the Whisper decodes all windows.
    """
    missing = [window for window in windows if window.name not in store or transcripts.get(window.name) is None]
    missing.sort(key=lambda window: window.seconds)
    if missing:
        rank_zero_info(f"states and transcripts of {len(missing)} windows go to {store.lines.folder.parent}")
    transcriber = WindowTranscriber(whisper)
    # in random order, so that windows of all lengths are stored if the process is killed
    starts = np.random.default_rng(len(missing)).permutation(range(0, len(missing), DECODED_WINDOWS)).tolist()
    for number, start in enumerate(starts):
        batch = missing[start : start + DECODED_WINDOWS]
        if agreement is None:
            new_transcripts = list(
                transcriber.transcribe(
                    batch, distortion, number % WHOLE_WINDOW_INTERVAL == 0 or not all(window.view for window in batch)
                )
            )
        else:
            none = torch.zeros(1, store.width)
            new_transcripts = [
                transcriber.check_known_text(window, distortion, agreement) or (window.name, none, [])
                for window in batch
            ]
        store.add({name: states for name, states, _ in new_transcripts})
        transcripts.add({name: text for name, _, text in new_transcripts})
