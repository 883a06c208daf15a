"""Drafts from another text change no output, whatever the text is: recordings together, in windows and in pieces,
sampled, with words; audio language models; language and vision-language models."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdec
from mmdec.pretrained.audio_lm import load_audio_lm
from mmdec.pretrained.language_model import load_language_model
from mmdec.pretrained.vlm import load_vlm
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.conftest import RATE, buzz
from tests.support import live_sound, tiny_text_folder, tiny_vlm_folder
from tests.support.audio_lm_folders import write as write_audio_lm
from tests.support.grid import slow_but
from tests.support.live_sound import talk
from tests.support.tiny_whisper import write

DRAWS = 40 if os.environ.get("MMDEC_ALL") else 6
STRANGE = [
    "",
    "\x00\x1b[2J\u200b\n\r",
    "\ud800 half a character",
    "<|endoftext|> <|0.00|>",
    "語" * 50,
    "déjà " * 30,
    "'",
]


def hypothesis_of(rng: random.Random, text: str, others: Sequence[str]) -> str:
    """Change a text: its words, case, marks and place, or take another text."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice([*STRANGE, *others])
    if kind == 1:
        return " ".join([*others, text, *others])
    if kind == 2:
        return rng.choice([text, text.lower(), text.upper(), "".join(filter(lambda c: c.isalnum() or c == " ", text))])
    words = text.split() or ["none"]
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(words) + 1)
        words[at : at + rng.randrange(3)] = [rng.choice(words or ["a"]) for _ in range(rng.randrange(3))]
    return " ".join(words)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    """Windows of one second, so that recordings have several."""
    return load_whisper(write(tmp_path_factory.mktemp("models") / "tiny", with_heads=False), "cpu")


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("number", slow_but(range(DRAWS), slice(3)))
def test_transcripts_are_the_models_own(whisper: LoadedWhisper, number: int) -> None:
    rng = random.Random(number)
    options: dict[str, Any] = {
        "model": whisper,
        "sample_rate": RATE,
        "timestamps": rng.choice([None, "segment", "word"]),
        "language": rng.choice([None, "en"]),
        "seed": 3,
        "max_new_tokens": rng.choice([8, 24]),
        "condition_on_prev_tokens": rng.random() < 0.4,
        "cut_at_pauses": rng.random() < 0.4,
    }
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.7, (0.0, 0.5, 0.9)]), "logprob_threshold": -1.8}
    sounds: Any = [buzz(rng.choice([0.4, 0.9, 1.7, 2.6]), rng.randrange(99)) for _ in range(4)]
    expected = mmdec.transcribe(sounds, drafter=None, **options)
    own = [transcript.text for transcript in expected]
    texts = [hypothesis_of(rng, text, own) for text in own]
    nodes = rng.choice([None, 5, 31, (12, 3)])
    drafter = mmdec.hypothesis(rng.choice([texts, texts[0]]))
    found = mmdec.transcribe(
        sounds, drafter=drafter, num_speculative_tokens=nodes, batch_size=rng.choice([1, 3]), **options
    )
    assert [transcript.tokens for transcript in found] == [transcript.tokens for transcript in expected]
    assert [transcript.segments for transcript in found] == [transcript.segments for transcript in expected]


@pytest.fixture(scope="module")
def spoken() -> tuple[dict[str, Any], mmdec.Transcript]:
    """Speech in several windows, and its transcript by the shipped Whisper."""
    options: dict[str, Any] = {"model": load_whisper("whisper-tiny.en", "cpu"), "sample_rate": live_sound.RATE}
    sound = talk([0.3, ("austen", None), 0.5, ("two_cities", 24.0), 0.5, ("president", None)], 1e-4)
    options["audio"] = sound
    return options, mmdec.transcribe(drafter=None, **options)


@pytest.mark.parametrize(
    ("change", "least"),
    slow_but(
        [
            (lambda text: text, 5.0),
            (str.upper, 4.0),
            (lambda text: re.sub(r"[^\w\s']", "", text).lower(), 2.5),
            (lambda text: " ".join(text.split()[15:]), 2.5),  # the beginning is missing
            (lambda text: " ".join(["and now for something else"] * 60 + [text]), 2.5),
            (lambda text: " ".join(word if at % 10 else "banana" for at, word in enumerate(text.split())), 2.0),
        ],
        slice(2, 4),
    ),
)
def test_a_text_that_resembles_the_answer_saves_passes(
    spoken: tuple[dict[str, Any], mmdec.Transcript], change: Callable[[str], str], least: float
) -> None:
    options, plain = spoken
    drafter = mmdec.hypothesis([change(plain.text)])
    found = mmdec.transcribe(drafter=drafter, num_speculative_tokens=31, **options)
    assert found.windows > 1
    assert found.tokens == plain.tokens
    assert found.tokens_per_round > least


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize(
    ("family", "sampled"),
    slow_but(itertools.product(("Qwen2Audio", "Qwen3ASR"), (False, True)), [("Qwen2Audio", True), ("Qwen3ASR", False)]),
)
def test_audio_language_models_write_their_own_text(family: str, sampled: bool, tmp_path: Path) -> None:
    loaded = load_audio_lm(write_audio_lm(family, tmp_path / "model"), "cpu")
    rng = random.Random(family)
    options: dict[str, Any] = {"model": loaded, "sample_rate": RATE, "max_new_tokens": 20, "seed": 5, "batch_size": 2}
    options |= {"do_sample": True, "temperature": 0.9} if sampled else {}
    sounds: Any = [buzz(0.6, 1), buzz(1.1, 2), buzz(0.8, 3)]
    expected = mmdec.transcribe(sounds, drafter=None, **options)
    own = [transcript.text for transcript in expected]
    for _ in range(3):
        texts = [hypothesis_of(rng, text, own) for text in own]
        found = mmdec.transcribe(sounds, drafter=mmdec.hypothesis(texts), num_speculative_tokens=9, **options)
        assert [transcript.tokens for transcript in found] == [transcript.tokens for transcript in expected]


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("rule", ["greedy", "sampled", "residual"])
def test_language_models_write_their_own_text(rule: str, tmp_path: Path) -> None:
    loaded = load_language_model(tiny_text_folder.write(tmp_path / "model", tiny_text_folder.OTHER, 1), "cpu")
    rng = random.Random(rule)
    prompts = [loaded.text_inputs(text) for text in ("Once upon", "Would you like some tea", "Nobody")]
    options: dict[str, Any] = {"max_new_tokens": 24, "rule": rule, "seed": 2}

    def texts(results: Sequence[mmdec.Generation]) -> list[list[int]]:
        return [result.sequences[0].tolist() for result in results]

    # `residual` draws other numbers with a drafter than without: it is compared with itself in another batch
    expected = mmdec.generate(loaded.model, prompts, drafter=None, **options)
    own = [loaded.tokenizer.decode(row, skip_special_tokens=True) for row in texts(expected)]
    for _ in range(4):
        drafter = mmdec.hypothesis([hypothesis_of(rng, text, own) for text in own])
        found = [
            mmdec.generate(loaded.model, prompts, drafter, num_speculative_tokens=7, batch_size=size, **options)
            for size in (1, 3)
        ]
        assert texts(found[0]) == texts(found[1])
        assert rule == "residual" or texts(found[0]) == texts(expected)


def test_descriptions_are_the_models_own(tmp_path: Path) -> None:
    vlm = load_vlm(tiny_vlm_folder.write(tmp_path / "model"), "cpu")
    pictures = [torch.randint(255, (40, 40, 3), dtype=torch.uint8).numpy() for _ in range(3)]
    options: dict[str, Any] = {"model": vlm, "max_new_tokens": 16}
    expected = mmdec.describe(pictures, drafter=None, **options)
    drafter = mmdec.hypothesis([transcript.text for transcript in expected])
    found = mmdec.describe(pictures, drafter=drafter, num_speculative_tokens=9, batch_size=2, **options)
    assert [transcript.tokens for transcript in found] == [transcript.tokens for transcript in expected]
    assert sum(transcript.accepted for transcript in found) > 0
