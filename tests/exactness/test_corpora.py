"""Drafts from a corpus change no output: recordings, language and vision-language models, with sampling and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmdec
from mmdec.pretrained.language_model import load_language_model
from mmdec.pretrained.vlm import load_vlm
from mmdec.whisper.checkpoint import load_whisper
from tests.conftest import RATE, buzz
from tests.support import tiny_text_folder, tiny_vlm_folder
from tests.support.tiny_whisper import write

NOISE = ["<|endoftext|> <|0.00|>\x00", "déjà 語 " * 30]


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("sampled", [False, True])
def test_transcripts_are_the_models_own(tmp_path: Path, sampled: bool) -> None:
    whisper = load_whisper(write(tmp_path / "tiny", with_heads=False), "cpu")
    options: dict[str, Any] = {"model": whisper, "sample_rate": RATE, "language": "en", "max_new_tokens": 24, "seed": 1}
    options |= {"temperature": 0.8} if sampled else {"timestamps": "segment"}
    sounds: Any = [buzz(seconds, seed) for seed, seconds in enumerate((0.4, 1.7, 2.6))]
    expected = mmdec.transcribe(sounds, drafter=None, **options)
    texts = [transcript.text for transcript in expected]
    for corpus in ([*texts, "other"], NOISE):
        results = mmdec.transcribe(sounds, drafter=mmdec.corpus(corpus), **options)
        assert [result.text for result in results] == texts


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("rule", ["greedy", "sampled", "residual", "traversal"])
def test_answers_are_the_models_own(tmp_path: Path, rule: str) -> None:
    loaded = load_language_model(tiny_text_folder.write(tmp_path / "model", tiny_text_folder.OTHER, 1), "cpu")
    prompts = [loaded.text_inputs(text) for text in ("Once upon", "Would you like some tea", "Nobody")]
    options: dict[str, Any] = {"max_new_tokens": 24, "rule": rule, "seed": 2}
    expected = [generation.sequences.tolist() for generation in mmdec.generate(loaded.model, prompts, None, **options)]
    drafter = mmdec.corpus([*(loaded.tokenizer.decode(text[0]) for text in expected), *NOISE])
    found = [
        mmdec.generate(loaded.model, prompts, drafter, num_speculative_tokens=(8, 4), batch_size=size, **options)
        for size in (1, 3)
    ]
    texts = [[generation.sequences.tolist() for generation in each] for each in found]
    assert texts[0] == texts[1]
    # the rules that weigh drafts draw other numbers with a drafter than without
    assert rule in ("residual", "traversal") or texts[0] == expected
    assert all(sum(sum(round_.drafted) for round_ in each.rounds) for each in found[0])


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_descriptions_are_the_models_own(tmp_path: Path) -> None:
    vlm = load_vlm(tiny_vlm_folder.write(tmp_path / "model"), "cpu")
    pictures = [torch.randint(255, (40, 40, 3), dtype=torch.uint8).numpy() for _ in range(3)]
    options: dict[str, Any] = {"model": vlm, "max_new_tokens": 16, "batch_size": 2}
    expected = [answer.text for answer in mmdec.describe(pictures, drafter=None, **options)]
    for texts in (expected, NOISE):
        drafter = mmdec.corpus([*texts, "x"])
        assert [answer.text for answer in mmdec.describe(pictures, drafter=drafter, **options)] == expected
