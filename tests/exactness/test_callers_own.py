"""Tests users' logits processors, stopping criteria and functions in batches: the tokens equal those of `generate`.

There are twelve kinds. A processor may look at other rows, unless it has `mmdec_row_wise = True`. Without this mark,
batches are decoded by transformers' loop, with a warning; with it, they are drafted. 24 batches; 300 with MMDEC_ALL=1
(`make test-all`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

import mmdec
from mmdec.generation.hf_bridge import function_fallback_reasons
from mmdec.types import Round
from mmdec.whisper.checkpoint import load_whisper
from tests.conftest import buzz
from tests.exactness.user_processors import (
    COUPLED,
    KINDS,
    ROW_WISE,
    Counting,
    Endings,
    Grammar,
    Patience,
    Shared,
    allowed,
    declared,
    distinct,
    options_of,
)
from tests.support.grid import WHOLE
from tests.support.tiny_text import language_model, prompts
from tests.support.tiny_vlm import Picture, batch_of, vision_model
from tests.support.tiny_whisper import write
from tests.support.whisper_calls import MODELS, MODES, assert_same, call

MODEL: Any = language_model("llama")
BATCHES = 25 if WHOLE else 2
LONG = MODES["long"]
WARNING = "falling back to transformers' generate without drafts"


def test_traversal_calls_ahead_and_leaves_undeclared_processors_to_the_stock_loop() -> None:
    counting = Counting()
    with pytest.warns(RuntimeWarning, match="Counting") as caught:
        result = mmdec.generate(
            MODEL, prompts(1), MODEL, rule="traversal", max_new_tokens=9, logits_processor=[counting]
        )
    assert caught[0].filename == __file__  # not a file of mmdec, torch or transformers
    assert counting.calls == result.sequences.shape[1] - prompts(1)["input_ids"].shape[1]


def decode_both_ways(
    given: dict[str, Tensor], entry_point: str, options: dict[str, Any], drafter: Any = MODEL
) -> tuple[Tensor, float]:
    """Return the sequences, and the tokens for each row and round after the prompt's."""
    rounds: list[Round] = []
    if entry_point == "generate":
        result = mmdec.generate(MODEL, given, drafter, num_speculative_tokens=6, **options)
        sequences, rounds = result.sequences, result.rounds
    else:
        plug = mmdec.speculate(drafter, num_speculative_tokens=6, on_round=rounds.append)
        out = MODEL.generate(**given, **options, custom_generate=plug)
        sequences = out if isinstance(out, Tensor) else out.sequences
    passes = sum(len(round_.rows) for round_ in rounds[1:])
    return sequences, sum(len(tokens) for round_ in rounds[1:] for tokens in round_.tokens) / max(passes, 1)


def stock(given: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    out = MODEL.generate(**given, **options)
    return out if isinstance(out, Tensor) else out.sequences


@pytest.mark.parametrize("index", range(BATCHES))
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_generates_own(kind: str, index: int) -> None:
    rows, entry_point = 2 + index % 3, ("generate", "speculate")[index % 2]
    common: dict[str, Any] = {"max_new_tokens": 24, "do_sample": kind in COUPLED and index % 5 == 1}
    given = prompts(rows, index)
    torch.manual_seed(index)
    expected = stock(given, {**common, **options_of(kind, rows)})
    torch.manual_seed(index)
    with nullcontext() if kind in ROW_WISE else pytest.warns(RuntimeWarning, match=WARNING):
        result, rate = decode_both_ways(given, entry_point, {**common, **options_of(kind, rows, declared)})
    assert torch.equal(result, expected)
    assert rate > 1 if kind in ROW_WISE else rate <= 1


@pytest.mark.parametrize("kind", ROW_WISE)
def test_processors_not_marked_row_wise_go_to_the_stock_loop(kind: str) -> None:
    common, given = {"max_new_tokens": 12, "do_sample": False}, prompts(2, 3)
    expected = stock(given, {**common, **options_of(kind, 2)})
    with pytest.warns(RuntimeWarning, match="mmdec_row_wise = True"):
        result, rate = decode_both_ways(given, "generate", {**common, **options_of(kind, 2)})
    assert torch.equal(result, expected)
    assert rate <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_row_is_drafted_with_any_processor(kind: str) -> None:
    """The walk visits each position once, in order, as the stock loop does."""
    common, given = {"max_new_tokens": 24, "do_sample": False}, prompts(1, 4)
    result, rate = decode_both_ways(given, "speculate", {**common, **options_of(kind, 1)})
    assert torch.equal(result, stock(given, {**common, **options_of(kind, 1)}))
    assert rate > 1


def test_one_warning_serves_many_runs() -> None:
    plug = mmdec.speculate("lookup")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "custom_generate": plug}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            MODEL.generate(**prompts(2, seed), **options, logits_processor=[Grammar()])
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"{WARNING}: Grammar may read other rows")


def test_the_output_object_is_the_stock_loops() -> None:
    options = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, **options_of("unsure", 3)}
    expected = MODEL.generate(**prompts(3), **options)
    with pytest.warns(RuntimeWarning, match="Unsure"):
        result = MODEL.generate(**prompts(3), **options, custom_generate=mmdec.speculate("lookup"))
    for name in ("scores", "logits"):
        assert all(map(torch.equal, result[name], expected[name]))


@pytest.mark.parametrize("sampled", [False, True])
def test_rounds_of_the_stock_loop_are_its_steps(sampled: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": sampled, "logits_processor": [Grammar()]}
    with pytest.warns(RuntimeWarning, match="Grammar"):
        result = mmdec.generate(MODEL, prompts(3), seed=5, **options)
    with pytest.warns(RuntimeWarning, match="Grammar"):
        rounds = list(mmdec.stream(MODEL, prompts(3), seed=5, **options))
    texts: list[list[int]] = [[], [], []]
    for round_ in rounds:
        assert round_.logprobs is not None
        assert round_.logprobs.shape == (len(round_.rows), 1)
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            texts[row] += tokens
    for row, text in enumerate(texts):
        assert result.sequences[row, 14:].tolist() == text + [0] * (result.sequences.shape[1] - 14 - len(text))
    assert sum(map(sum, (round_.done for round_ in rounds))) == 3


def test_without_an_end_token_rows_go_on_after_a_criterion() -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    own = {**options, **options_of("occurrences", 2, declared)}
    with pytest.warns(RuntimeWarning, match="`eos_token_id` is None"):
        result = mmdec.generate(MODEL, prompts(2, 1), **own)
    assert torch.equal(result.sequences, stock(prompts(2, 1), {**options, **options_of("occurrences", 2)}))
    assert [len(round_.rows) for round_ in result.rounds] == [2] * len(result.rounds)


@pytest.mark.parametrize(
    ("make", "batch", "drafted"),
    [
        (lambda: {"logits_processor": [declared(Grammar())]}, 3, True),
        (lambda: {"stopping_criteria": [declared(Endings())]}, 3, True),
        (lambda: {"prefix_allowed_tokens_fn": declared(lambda row, text: [row + 5, row + 6, 60, 75, 80])}, 3, True),
        *((partial(options_of, kind, 3), 3, False) for kind in ("distinct", "first row", "patience", "all rows")),
        *((partial(options_of, kind, 1), 1, True) for kind in ("grammar", "counting", "patience")),
    ],
)
def test_whisper_is_generates_own(make: Callable[[], dict[str, Any]], batch: int, drafted: bool) -> None:
    rounds: list[Round] = []
    expected = call(MODELS[80], LONG, batch, **make())
    plug = mmdec.speculate("recycling", num_speculative_tokens=(12, 4), on_round=rounds.append)
    with nullcontext() if drafted else pytest.warns(RuntimeWarning, match=WARNING):
        result = call(MODELS[80], LONG, batch, **make(), custom_generate=plug)
    assert_same(result, expected)
    assert any(sum(round_.drafted) for round_ in rounds) == drafted


def test_a_list_of_recordings_is_transcribed_as_generate_does(tmp_path: Path) -> None:
    """A criterion that counts its calls sees one recording after the other, as in calls of their own."""
    whisper = load_whisper(write(tmp_path / "tiny"), "cpu")
    sounds = [buzz(0.9), buzz(0.9, 1)]
    options: dict[str, Any] = {"model": whisper, "sample_rate": 16_000, "max_new_tokens": 9, "drafter": "lookup"}
    patience = Patience()
    plain = [mmdec.transcribe(sound, stopping_criteria=[patience], **options) for sound in sounds]
    result = mmdec.transcribe(sounds, stopping_criteria=[Patience()], **options)
    assert [transcript.tokens for transcript in result] == [transcript.tokens for transcript in plain]
    assert [transcript.evidence for transcript in result] == [
        pytest.approx(transcript.evidence, rel=1e-4) for transcript in plain
    ]


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_the_stock_loop_gets_images_unchanged(kind: str) -> None:
    model = vision_model(kind)
    inputs = batch_of(kind, [[[8, 9, 8], Picture.random(1), [8, 9]], [[8, 10], Picture.random(2), [11]]])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **options, logits_processor=[Grammar()])
    with pytest.warns(RuntimeWarning, match=WARNING) as caught:
        result = mmdec.generate(model, inputs, **options, logits_processor=[Grammar()])
    assert len(caught) == 1
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize(
    ("given", "drafted"),
    [
        (TemperatureLogitsWarper(0.5), True),
        (MaxTimeCriteria(9.0), True),
        (ConfidenceCriteria(0.5), False),  # asks about the first row, for all
        (Shared(1.2), False),
        (declared(Shared(1.2)), True),
        (LogitsProcessorList([Grammar()]), False),
        (PrefixConstrainedLogitsProcessor(allowed(), 1), False),
        (PrefixConstrainedLogitsProcessor(declared(allowed()), 1), True),
        (declared(partial(distinct)), True),
        (distinct, False),
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_known_processors_and_criteria_are_drafted(given: Any, drafted: bool) -> None:
    criterion = isinstance(given, StoppingCriteria)
    ending = EosTokenCriteria(2)
    reasons = function_fallback_reasons([] if criterion else [given], [ending, given] if criterion else [ending], 2)
    assert (reasons == []) == drafted
