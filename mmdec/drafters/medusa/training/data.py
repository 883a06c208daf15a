"""Training data of Medusa heads: windows of a corpus, prompts, and the text that the model itself decodes greedily.

The text is the one that the model's `generate` would give: with the same prompts, suppressed tokens and timestamp
rules. Windows are decoded in batches. The heads in training serve as the drafter, which saves time and does not change
the text.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperForConditionalGeneration

from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.tree_shape import HeadAccuracy, default_probabilities
from mmdec.core.verify import MatchRule
from mmdec.drafters.medusa.drafter import MedusaDrafter
from mmdec.errors import InputError
from mmdec.io.audio import SAMPLE_RATE, split_at_pauses
from mmdec.training.checkpoints import check_positive, token_list
from mmdec.training.corpora.admission import MAX_BAD_SHARE, Admission
from mmdec.training.corpora.librispeech import Utterance, read_splits
from mmdec.training.corpora.windows import (
    PLAIN,
    SECONDS,
    Composition,
    WindowPlan,
    chapters_of,
    check_utterances_apart,
    compose,
    durations,
    plan_windows,
)
from mmdec.training.optim import rows_of
from mmdec.types import Drafter
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from mmdec.whisper.target import WhisperTarget, generate_processors
from mmdec.whisper.unpadded_encoder import whisper_mel


def decode_greedily(
    model: WhisperForConditionalGeneration,
    states: Tensor,
    prompts: Sequence[Sequence[int]],
    timed: Sequence[bool],
    limit: int,
    drafter: Drafter | None = None,
    nodes: int = 0,
) -> list[list[int]]:
    """Decode the greedy text of each window.

    Args:
        states: (B, S, H) the encoder's outputs.
        prompts: The decoder's first token ids in each window.
        timed: For each window, whether the model's rules for timestamps apply.
        limit: Maximum number of new tokens of a window; the decoder's number of positions is a further limit.
        drafter: Speculative decoding with `nodes` drafted tokens in each round; None: without drafts.

    Returns:
        Its new token ids, with the end token if it was reached.
    """
    shape = (
        HeadAccuracy(default_probabilities(drafter.heads.config.heads)) if isinstance(drafter, MedusaDrafter) else None
    )
    texts: list[list[int]] = [[] for _ in prompts]
    for under_rules in (False, True):
        rows = [row for row, flag in enumerate(timed) if flag == under_rules]
        if not rows:
            continue
        ids, mask = _pad_left([prompts[row] for row in rows], int(model.config.pad_token_id or 0), states.device)
        longest = min(ids.shape[1] + limit, model.config.max_target_positions)
        stop = Stop(longest, frozenset(end_tokens(model)))
        rules = generate_processors(model.generation_config, model.device, ids.shape[1], under_rules)
        text = Sequences(ids, stop, rules)
        inputs: dict[str, Any] = {"input_ids": ids, "encoder_outputs": (states[rows],)}
        if not bool(mask.all()):
            inputs["decoder_attention_mask"] = mask
        depth = None if shape is None else min(shape.depth, max(nodes - 1, 1))
        budget = FixedBudget(0) if drafter is None else FixedBudget(nodes, depth)
        for _ in decode(WhisperTarget(model), inputs, text, MatchRule(), drafter, budget, shape):
            pass
        for row, tokens in zip(rows, text.tokens, strict=True):
            texts[row] = tokens
    return texts


def end_tokens(model: WhisperForConditionalGeneration) -> list[int]:
    """Return the ids of the tokens that end a text, from the model's generation settings."""
    end = model.generation_config.eos_token_id
    return list(end) if isinstance(end, list) else [int(end)]


def decoding_fingerprint(model: WhisperForConditionalGeneration) -> str:
    """Return a hash of the model: of its sizes, its generation settings and some numbers of each weight.

    Models with different hashes may decode different texts, so they do not share stored texts.
    """
    digest = hashlib.blake2b(digest_size=8)
    sizes = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    digest.update(json.dumps(sizes, sort_keys=True, default=str).encode())
    digest.update(json.dumps(model.generation_config.to_dict(), sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        numbers = weight.flatten()[:: max(1, weight.numel() // 512)]
        digest.update(name.encode() + numbers.double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _pad_left(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


LANGUAGE_PLACEHOLDER = -1  # in a prompt: replaced later by the token of the language that the model detects
# seconds; the windows of a batch are filled with speech of a random length, which is at least this
MIN_WINDOW_SECONDS = 4.0
# first numbers of seeds: training windows, development windows, order of batches
TRAIN_SEED, DEV_SEED, ORDER_SEED = [1], [2], [3]
LABEL_FORMAT = 1  # part of the windows' keys: after a change, stored labels are not found and are decoded again


@dataclass
class HeadBatch:
    """A batch of B windows of sound, 30 s each.

    If the decoder states of all windows are stored, `features` is None, and `prompts`, `truth` and `timed` are empty.
    """

    features: Tensor | None  # log mel (B, mels, frames); None if the decoder states of all windows are stored
    prompts: list[list[int]]  # ids of the decoder's first tokens in each window, before the text
    truth: list[list[int]]  # token ids of each window's transcript, EOS included
    timed: list[bool]  # whether each window's prompt asks for timestamps
    names: list[str]  # the keys under which the windows' labels and decoder states are stored
    rows: list[tuple[int, ...]]  # indices of the utterances that each window is joined from


class WindowTokenizer:
    """A Whisper's tokenizer, used to compose training windows.

    It adds the special tokens that the model's `generate` would use.

    State: `head`, the prompt's token ids for the language and the task; `names`, the special tokens' ids by name.

    Args:
        config: The model's generation settings.
        language: A code such as "en"; None: the model detects it.
        task: "transcribe" or "translate".

    Raises:
        InputError: For a language or task that the model lacks.
    """

    def __init__(self, tokenizer: Any, config: Any, language: str | None, task: str) -> None:
        self.tokenizer, self.multilingual = tokenizer, bool(getattr(config, "is_multilingual", False))
        added = dict(tokenizer.get_added_vocab())
        self.start, self.quiet = int(config.decoder_start_token_id), config.no_timestamps_token_id
        end = config.eos_token_id
        self.eos_token_id = int(end[0] if isinstance(end, list) else end)
        self.head = [self.start]
        if self.multilingual:
            languages, tasks = config.lang_to_id, config.task_to_id
            if language is not None and f"<|{language}|>" not in languages:
                raise InputError(
                    f"`language` must be one of the model's, {', '.join(sorted(name[2:-2] for name in languages))}, or "
                    f"null to detect it, but is {language!r}."
                )
            if task not in tasks:
                raise InputError(f"`task` must be one of {', '.join(sorted(tasks))}, but is {task!r}.")
            self.head += [LANGUAGE_PLACEHOLDER if language is None else languages[f"<|{language}|>"], tasks[task]]
        elif language not in (None, "en") or task != "transcribe":
            raise InputError(
                f"`language` must be en for an English-only model, but is {language!r} to {task}. Leave it out."
            )
        self.names = {
            **added,
            "<|startoftranscript|>": self.start,
            "<|notimestamps|>": self.quiet,
            "<|endoftext|>": self.eos_token_id,
            "<|0.00|>": self.quiet + 1,
        }
        previous = getattr(config, "prev_sot_token_id", None)
        if previous is not None:
            self.names["<|startofprev|>"] = previous
        # whether this Whisper has the token that introduces previous text in a prompt
        self.recalls = "<|startofprev|>" in self.names
        # `compose` looks up these names. If the model lacks the tokens, EOS stands for them; `split` removes it.
        for name in ("<|en|>", "<|transcribe|>", "<|nospeech|>"):
            self.names.setdefault(name, self.eos_token_id)

    def get_added_vocab(self) -> dict[str, int]:
        return self.names

    def __call__(self, *texts: str, **options: Any) -> Any:
        return self.tokenizer(*texts, **options)

    def split(self, tokens: Sequence[int]) -> tuple[list[int], list[int], bool]:
        """Split a window's token ids, as `compose` builds them.

        Returns:
            The prompt in this model's form, the text with EOS, and whether the text has timestamps.
        """
        at = tokens.index(self.start)
        timed = self.quiet not in tokens[at : at + 4]
        prompt = [*tokens[:at], *self.head, *([] if timed else [self.quiet])]
        return prompt, [*tokens[at + (3 if timed else 4) :], self.eos_token_id], timed


class HeadWindows(Dataset[HeadBatch]):
    """A dataset of batches. A batch's sound and tokens are composed when it is read.

    Args:
        composition: Random changes of the windows.
        mels: Number of mel bands.
        batches: The windows of each batch.
        stored: Keys of windows whose decoder states are stored. If all windows of a batch are stored, the batch is
            returned without sound.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        spelling: WindowTokenizer,
        composition: Composition,
        mels: int,
        batches: Sequence[Sequence[WindowPlan]],
        stored: Container[str] = (),
    ) -> None:
        self.utterances, self.spelling, self.composition, self.mels = utterances, spelling, composition, mels
        self.batches, self.stored = batches, stored

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> HeadBatch:
        windows = self.batches[number]
        names, rows = [self.name(window) for window in windows], [window.rows for window in windows]
        if all(name in self.stored for name in names):
            return HeadBatch(None, [], [], [], names, rows)
        spelling: Any = self.spelling  # Any: no tokenizer, but it has all that `compose` needs
        composed = [compose(window, self.utterances, spelling, self.composition) for window in windows]
        sounds = torch.zeros(len(composed), SECONDS * SAMPLE_RATE)
        for row, example in enumerate(composed):
            sounds[row, : len(example.sound)] = torch.from_numpy(np.ascontiguousarray(example.sound))
        prompts, truth, timed = zip(*(self.spelling.split(example.tokens) for example in composed), strict=True)
        return HeadBatch(whisper_mel(sounds, self.mels), list(prompts), list(truth), list(timed), names, rows)

    def name(self, window: WindowPlan) -> str:
        """Return the key of a window and its prompt: a hash of everything from which window and prompt are made."""
        digest = hashlib.blake2b(digest_size=12)
        for row in window.rows:
            utterance = self.utterances[row]
            digest.update(f"{utterance.path.name} {utterance.path.stat().st_size} {utterance.text}\n".encode())
            digest.update(repr(utterance.part).encode() if utterance.part else b"")
        settings = (LABEL_FORMAT, window.seed, window.seconds, astuple(self.composition), self.spelling.head)
        digest.update(repr(settings).encode())
        return digest.hexdigest()


def split_long(
    rows: Sequence[Utterance], seconds: Sequence[float], longest: float
) -> tuple[list[Utterance], list[float]]:
    """Cut utterances longer than `longest` seconds into parts, at pauses.

    The parts' texts are unknown and therefore "".

    Args:
        seconds: The duration of each utterance.

    Returns:
        All utterances and parts, and the duration of each in seconds.
    """
    cut, lengths = list[Utterance](), list[float]()
    for row, length in zip(rows, seconds, strict=True):
        parts: list[tuple[int, int] | None] = [None]
        if length > longest:
            parts = [*split_at_pauses(row.samples(), longest, long_pause=math.inf)]
        for part in parts:
            cut.append(row if part is None else replace(row, text="", part=part))
            lengths.append(length if part is None else (part[1] - part[0]) / SAMPLE_RATE)
    return cut, lengths


@dataclass(frozen=True)
class HeadDataOptions:
    """Options of `HeadData` that a recipe (YAML file) sets.

    Args:
        train_split, dev_split: Folders in the corpus, or values in a manifest's column `split`; null: the whole
            manifest.
        longest: Seconds; about the longest speech in a window.
        repeat_after: After this many epochs the same windows come again, in another order, so that they need not be
            decoded again; 0: never.
        composition: Random changes of windows, such as the shares with noise, timestamps or previous text.
        language: A code such as "en"; null: the model detects it.
        dev_batches: Number of batches at each validation.
        cache_dir: Folder where labels and durations are stored.
        max_bad_share: The largest share of unusable recordings; more are an error.
        allow_absolute_paths: Allow paths that lead out of the corpus's folder.
    """

    train_split: str | list[str] | None = "train"
    dev_split: str | list[str] | None = "dev"
    batch_size: int = 8
    steps_per_epoch: int = 50
    longest: float = 30.0
    repeat_after: int = 0
    composition: Composition | None = None
    language: str | None = None
    task: str = "transcribe"
    dev_batches: int = 6
    cache_dir: str = "runs/medusa/cache"
    workers: int = 0
    seed: int = 0
    max_bad_share: float = MAX_BAD_SHARE
    allow_absolute_paths: bool = False

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, steps_per_epoch=self.steps_per_epoch, dev_batches=self.dev_batches)
        if not 0 < self.longest <= SECONDS:
            raise InputError(f"`longest` must be above 0 and up to {SECONDS} s, but is {self.longest}. Set 30.")


class HeadData(LightningDataModule):
    """A data module for Medusa heads: 30 s windows of sound, each joined from utterances of one chapter.

    Args:
        base: The Whisper: a folder, a Hugging Face id or a shipped model's name.
        corpus: A folder in LibriSpeech's format, or a manifest (list of sound files with texts).
        options: Fields of `HeadDataOptions`.
    """

    def __init__(self, base: str, corpus: str, **options: Any) -> None:
        super().__init__()
        self.options = HeadDataOptions(**options)
        self.admission = Admission(self.options.allow_absolute_paths, self.options.max_bad_share)
        self.base, self.corpus, self.cache_dir = base, corpus, Path(self.options.cache_dir)
        self.composition = self.options.composition or Composition()
        self.stored: Container[str] = ()  # keys of windows whose decoder states are stored: their sound is not loaded
        self.cut: dict[str, list[Utterance]] = {}  # split -> utterances, long ones cut into parts
        self.plans: dict[str, tuple[list[list[int]], list[float]]] = {}  # split -> (chapters' indices, durations in s)

    # Files are read at first use, not in `__init__`, whose errors the command line's parser would hide.
    @cached_property
    def whisper(self) -> LoadedWhisper:
        whisper = load_whisper(self.base, "cpu")
        positions = whisper.model.config.max_source_positions
        if positions != 50 * SECONDS:
            raise InputError(
                f"`base` must read windows of {SECONDS} s, but its encoder has {positions} positions, not "
                f"{50 * SECONDS}. Use another model."
            )
        return whisper

    @cached_property
    def spelling(self) -> WindowTokenizer:
        return WindowTokenizer(
            self.whisper.tokenizer, self.whisper.model.generation_config, self.options.language, self.options.task
        )

    @cached_property
    def rows(self) -> dict[str, list[Utterance]]:
        """The utterances of each split, by the names "train" and "dev"."""
        rows = {
            part: read_splits(self.corpus, splits, self.admission)
            for part, splits in (("train", self.options.train_split), ("dev", self.options.dev_split))
        }
        check_utterances_apart(rows["train"], rows["dev"])
        return rows

    def seconds(self, split: str) -> list[float]:
        """Return the duration of each utterance of a split in seconds; NaN if it cannot be used."""
        noun = f"{split} recordings in '{self.corpus}'"
        return durations(self.rows[split], self.cache_dir, self.admission, noun)

    @property
    def units(self) -> list[str]:
        """The vocabulary as tokens ordered by id. The command line passes it to the model."""
        return token_list(self.spelling.tokenizer)

    @property
    def reads_own_text(self) -> bool:
        """Whether the heads learn the text that the model decodes, instead of transcripts.

        Only then may long recordings be cut into parts, which have no transcripts.
        """
        trainer: Any = self.trainer
        module = getattr(trainer, "lightning_module", None)
        return getattr(getattr(module, "options", None), "labels", "own") == "own"

    def model(self) -> WhisperForConditionalGeneration:
        """Return a copy of the Whisper, which the caller may change."""
        return copy.deepcopy(self.whisper.model)

    def prepare_data(self) -> None:
        """Measure the durations of all recordings and store them. Lightning calls this in one process only."""
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        for split in self.rows:
            self.seconds(split)

    def setup(self, stage: str) -> None:
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        for split in self.rows:
            longest, durations = (SECONDS - self.composition.pause[1]) / 1.12, self.seconds(split)
            rows, seconds = self.rows[split], durations
            if self.reads_own_text:
                rows, seconds = split_long(rows, durations, longest)
            self.cut[split] = rows
            fitting = {row for row, length in enumerate(seconds) if length <= longest}
            chapters = [[row for row in chapter if row in fitting] for chapter in chapters_of(rows)]
            chapters = [chapter for chapter in chapters if chapter]
            if not chapters:
                raise InputError(
                    f"`corpus` must hold utterances of up to 25 s, but '{self.corpus}' has none for {split}. "
                    "Cut longer ones, or choose another split."
                )
            used, total = sum(seconds[row] for row in fitting), sum(length for length in durations if length > 0)
            rank_zero_info(
                f"{split}: {len(fitting)} utterances, {len(rows) - len(fitting)} left out as bad or too long; "
                f"{used:.0f} of {total:.0f} s of sound"
            )
            self.plans[split] = chapters, seconds

    def train_dataloader(self) -> DataLoader[HeadBatch]:
        assert self.trainer is not None
        epoch, world = self.trainer.current_epoch, self.trainer.world_size
        plan = epoch % self.options.repeat_after if self.options.repeat_after else epoch
        draw = np.random.default_rng([*TRAIN_SEED, self.options.seed, plan, 0])
        together = self._batches("train", draw, self.options.steps_per_epoch, world)
        batches = rows_of(together, self.trainer.global_rank, world)
        order = (
            np.random.default_rng([*ORDER_SEED, self.options.seed, epoch]).permutation(len(batches))
            if self.options.repeat_after
            else range(len(batches))
        )
        return self._loader("train", self.composition, [batches[number] for number in order])

    def val_dataloader(self) -> DataLoader[HeadBatch]:
        """Load the same windows at each validation.

        They have no added noise; timestamps and previous text are as frequent as in training.
        """
        assert self.trainer is not None
        batches = self._batches("dev", np.random.default_rng([*DEV_SEED, self.options.seed]), self.options.dev_batches)
        mine = batches[self.trainer.global_rank :: self.trainer.world_size]
        kinds = ("timestamps", "cut", "previous", "pause")
        return self._loader("dev", replace(PLAIN, **{name: getattr(self.composition, name) for name in kinds}), mine)

    def _batches(self, split: str, draw: np.random.Generator, count: int, world: int = 1) -> list[list[WindowPlan]]:
        chapters, seconds = self.plans[split]
        size, pause = world * self.options.batch_size * SECONDS, self.composition.pause
        shortest = min(MIN_WINDOW_SECONDS, self.options.longest)
        return [
            plan_windows(chapters, seconds, draw, size, draw.uniform(shortest, self.options.longest), SECONDS, pause)
            for _ in range(count)
        ]

    def _loader(self, split: str, composition: Composition, batches: list[list[WindowPlan]]) -> DataLoader[HeadBatch]:
        mels = self.whisper.model.config.num_mel_bins
        composition = composition if self.spelling.recalls else replace(composition, previous=0.0)
        dataset = HeadWindows(self.cut[split], self.spelling, composition, mels, batches, self.stored)
        return DataLoader(dataset, batch_size=None, num_workers=min(self.options.workers, os.cpu_count() or 1))
