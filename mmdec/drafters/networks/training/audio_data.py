"""Training data for drafters of audio language models: recordings, with transcripts that the target generates."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from mmdec.drafters.networks.training.data import DraftData
from mmdec.drafters.networks.training.samples import SUBSET_SEED, Inputs, Sample
from mmdec.pretrained.audio_lm import LoadedAudioLm, load_audio_lm
from mmdec.training.corpora.librispeech import Utterance, read_utterances


class AudioPromptBuilder:
    """Makes the target's input tensors for a recording, as `mmdec.transcribe` does. It holds the target's processor."""

    def __init__(self, audio_lm: LoadedAudioLm) -> None:
        self.audio_lm, self.tokenizer = audio_lm, audio_lm.tokenizer

    def __call__(self, sample: Sample) -> Inputs:
        """Return the input tensors of one recording, with batch size 1.

        Raises:
            InputError: If the recording is longer than the processor accepts.
        """
        assert sample.sound is not None
        samples = sample.sound.samples()
        self.audio_lm.check(samples)
        return self.audio_lm.inputs([samples])


class AudioData(DraftData):
    """A data module: recordings, with transcripts that the target generates.

    These replace the corpus's own transcripts.

    Args:
        base: Folder or Hugging Face id of the target, an audio language model.
        corpus: A folder of audio files and transcripts as in LibriSpeech, or a manifest file, as `read_utterances`
            reads it.
        options: Fields of `DraftDataOptions`; `frames`, `history`, `images` and `ramp` have no effect here.
    """

    @cached_property
    def audio_lm(self) -> LoadedAudioLm:
        return load_audio_lm(self.base, "cpu", self.base_dtype)

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.audio_lm.model

    @cached_property
    def prompting(self) -> Any:
        return AudioPromptBuilder(self.audio_lm)

    def read_split(self, split: str, count: int | None) -> list[Sample]:
        rows = read_utterances(self.corpus, split, self.admission)
        order = np.random.default_rng([SUBSET_SEED, self.seed]).permutation(len(rows)).tolist()
        chosen = rows if count is None else [rows[number] for number in order[:count]]
        return [Sample(_name(row), row.text, words=len(row.text.split()), place=row.place, sound=row) for row in chosen]


def _name(row: Utterance) -> str:
    path = Path(row.path)
    size = path.stat().st_size if path.is_file() else 0
    return hashlib.blake2b(f"{row.chapter}/{path.name} {size} {row.part}".encode(), digest_size=12).hexdigest()
