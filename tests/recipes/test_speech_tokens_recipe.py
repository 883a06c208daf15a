"""Tests the recipe of speech tokens: prompts, repetition-aware sampling, measures, and the script on little data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig

import mmdec
from mmdec.errors import InputError
from recipes.speech_tokens import train
from recipes.speech_tokens.speech import (
    RepetitionAware,
    SpeechTokens,
    codebook_of,
    edit_distance,
    frames_of,
    warped_distance,
)
from tests.support.lightning_warnings import FITTING
from tests.support.tiny_text import VOCABULARY, language_model, prompts

pytestmark = FITTING
TOKENIZER = train.tokenizer_of(8)
MARKS = SpeechTokens.of(TOKENIZER)


def test_a_prompt_has_cosyvoices_order() -> None:
    text = MARKS.prompt("two", "one ", [3, 0])
    assert text == "<|sos|>one two<|task_id|><|s_3|><|s_0|>"
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(ids) == ["<|sos|>", *"one two", "<|task_id|>", "<|s_3|>", "<|s_0|>"]
    assert MARKS.codes_of([*ids[-2:], MARKS.end, 0]) == [3, 0]
    assert MARKS.prompt("two") == "<|sos|>two<|task_id|>"


def test_a_saved_tokenizer_keeps_its_letters(tmp_path: Path) -> None:
    """transformers reads the tokenizer of some kinds of models by a class of its own, which drops spaces."""
    LlamaConfig(vocab_size=len(TOKENIZER)).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    text = MARKS.prompt("one two")
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == TOKENIZER(text)["input_ids"]


@pytest.mark.parametrize(
    ("codes", "text", "match"),
    [
        ([3, 8], "a", "`prompt_codes` must be codes from 0 to 7, but hold 8. Give codes of this model's codebook"),
        ([-1], "a", "but hold -1"),
        ([1], "", "`prompt_text` must come with `prompt_codes`"),
        ([], "a", "`prompt_text` must come with `prompt_codes`"),
    ],
)
def test_codes_outside_of_the_codebook_are_refused(codes: list[int], text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        MARKS.prompt("two", text, codes)


def test_what_is_no_code_is_refused() -> None:
    with pytest.raises(InputError, match="`tokens` must be codes, but hold the token 0"):
        MARKS.codes_of([MARKS.first_code, 0])
    with pytest.raises(InputError, match="`tokenizer` must have"):
        SpeechTokens.of(type("Letters", (), {"get_vocab": lambda self: {"a": 0}})())


@pytest.mark.parametrize("new", [[], [4], [4, 2, 2], [1, 0, 0, 4]])
def test_repetition_aware_sampling_has_the_law_of_its_two_draws(new: list[int]) -> None:
    scores = torch.randn(1, 6, generator=torch.Generator().manual_seed(3)).double() * 2
    processor = RepetitionAware(2, top_p=0.7, top_k=3, window=3)
    full = scores[0].softmax(-1)
    nucleus, mass = torch.zeros(6, dtype=torch.double), 0.0
    for token in full.argsort(descending=True)[:3].tolist():
        if mass < 0.7:
            nucleus[token], mass = full[token], mass + float(full[token])
    nucleus /= nucleus.sum()
    expected = torch.zeros(6, dtype=torch.double)
    for first in range(6):
        if first in new[-3:]:
            expected += nucleus[first] * full
        else:
            expected[first] += nucleus[first]
    ids = torch.tensor([[0, 1, *new]])  # the prompt's tokens do not count
    torch.testing.assert_close(processor(ids, scores)[0].exp(), expected)


def test_repetition_aware_sampling_is_drafted_losslessly() -> None:
    model, inputs = language_model(num_hidden_layers=2), prompts(2)
    options: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 24, "top_k": 0}
    plain, drafted = (
        mmdec.generate(
            model,
            inputs,
            drafter,
            num_speculative_tokens=4,
            logits_processor=[RepetitionAware(inputs["input_ids"].shape[1])],
            **options,
        )
        for drafter in (None, "recycling")
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.lossless
    without = mmdec.generate(model, inputs, None, **options)
    assert not torch.equal(plain.sequences, without.sequences)
    assert VOCABULARY > 25  # the nucleus leaves tokens out


def test_codes_are_the_nearest_means() -> None:
    mel = torch.arange(7.0)[:, None].expand(7, 80)
    assert frames_of(mel)[:, 0].tolist() == [1.0, 4.0, 6.0]
    rng = torch.Generator().manual_seed(0)
    points = torch.cat([torch.randn(20, 80, generator=rng) * 0.01 + at for at in (0.0, 5.0, 9.0)])
    means = codebook_of(points, 6, seed=1)
    apart = torch.cdist(points, means).min(1).values
    assert apart.mean() < 0.5  # of points that lie 36 and more from those of other kinds


def test_distances_count_edits_and_ignore_tempo() -> None:
    one = torch.tensor([[0.0], [1.0], [5.0]])
    slow: Tensor = one.repeat_interleave(3, 0)
    assert warped_distance(one, slow) == 0.0
    assert warped_distance(one, one + 1) > 0.0
    assert edit_distance([1, 2, 3], [1, 2, 3]) == 0
    assert edit_distance([1, 2, 3], [2, 3, 4, 5]) == 3
    assert edit_distance([], [1, 2]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
@pytest.mark.filterwarnings("ignore:drafter .* brought:UserWarning")
def test_the_script_trains_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It ends, and compares the codes of lossless ways itself."""
    monkeypatch.setattr(train, "TURNS", 1)
    fitting = train.fit
    small = ["--trainer.max_epochs=1", "--data.init_args.steps_per_epoch=2", "--data.init_args.dev_samples=2"]
    monkeypatch.setattr(train, "fit", lambda arguments: fitting([*arguments, *small]))
    sizes = ["--pairs=24", "--held=2", "--codes=16", "--steps=2", "--prompts=8"]
    train.main([f"--output={tmp_path}", *sizes])
    rows = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    named = {row["way"]: {name: value[0] for name, value in row.items() if name != "way"} for row in rows}
    assert named["greedy"]["tokens per round"] == 1.0
    assert named["greedy, lookup"]["changed"] == 0.0
    residual, relaxed = (named[f"sampled, dspark, {way}"] for way in ("tolerance 0.0", "tolerance 0.5"))
    assert relaxed["tokens per round"] > residual["tokens per round"]
    # unchanged: groups of one code each
    for name in ("tokens per round", "changed", "mel"):
        assert named["sampled, dspark, groups of 1"][name] == residual[name]
