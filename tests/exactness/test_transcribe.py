"""Tests that `mmdec.transcribe` gives the tokens of `model.generate` with the same arguments: for short and long
recordings, alone and in batches, with every kind of timestamp and every drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import mmdec
from mmdec.drafters.medusa.checkpoint import load_heads
from mmdec.kernels import float16_linear
from mmdec.whisper import output_layer
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.conftest import RATE, buzz
from tests.support.grid import sample, slow_but
from tests.support.tiny_whisper import network, write

PROMPT = "The train leaves"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    return load_whisper(write(tmp_path_factory.mktemp("transcriber") / "tiny"), "cpu")


@lru_cache
def sound(seconds: float, seed: int = 0) -> np.ndarray:
    return buzz(seconds, seed)


SHORT, LONG = (0.7,), (2.6,)
BATCH, LONG_BATCH, MIXED = (0.9, 0.31, 0.7), (2.6, 1.37, 2.2), (0.7, 1.9, 0.5, 0.9)
DRAFTERS = ("medusa", "lookup", None)


@dataclass(frozen=True)
class Way:
    """One way to call both."""

    seconds: tuple[float, ...]
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] | None = None  # where it is called otherwise

    @property
    def stock(self) -> dict[str, Any]:
        return self.ours if self.theirs is None else self.theirs


SEGMENTS: dict[str, Any] = {"timestamps": "segment"}
WORDS: dict[str, Any] = {"timestamps": "word"}
TIMED: dict[str, Any] = {"return_timestamps": True}
TIMED_WORDS: dict[str, Any] = {"return_timestamps": True, "return_token_timestamps": True}
THRESHOLDS: dict[str, Any] = {
    "temperature": (0.0,),
    "logprob_threshold": -0.3,
    "compression_ratio_threshold": 1.1,
    "no_speech_threshold": 1e-4,
}
CONDITIONED: dict[str, Any] = {"condition_on_prev_tokens": True, "temperature": 0.0}
WAYS = {
    "short": Way(SHORT, {"language": "en"}),
    "detected": Way(BATCH),
    "batch": Way(BATCH, {"language": "en", "repetition_penalty": 1.3, "max_new_tokens": 12}),
    "long": Way(LONG),
    "long batch": Way(LONG_BATCH, {"language": "german"}),
    "mixed": Way(MIXED, {"batch_size": 2}, {}),
    "segments": Way(BATCH, SEGMENTS, TIMED),
    "long segments": Way(LONG_BATCH, SEGMENTS, TIMED),
    "words": Way(BATCH, WORDS, TIMED_WORDS),
    "long words": Way(LONG_BATCH, WORDS, TIMED_WORDS),
    "translated": Way(SHORT, {"language": "de", "task": "translate"}),
    "prompted": Way(BATCH, {"prompt": PROMPT}, {"prompt_ids": PROMPT}),
    "long prompted": Way(LONG_BATCH, {"prompt": PROMPT, **CONDITIONED}, {"prompt_ids": PROMPT, **CONDITIONED}),
    "everywhere prompted": Way(
        LONG,
        {"prompt": PROMPT, "prompt_condition_type": "all-segments", **CONDITIONED, **WORDS},
        {"prompt_ids": PROMPT, "prompt_condition_type": "all-segments", **CONDITIONED, **TIMED_WORDS},
    ),
    "thresholds": Way(LONG_BATCH, {**THRESHOLDS, **SEGMENTS}, {**THRESHOLDS, **TIMED}),
}


def features(whisper: LoadedWhisper, recordings: list[np.ndarray]) -> dict[str, Tensor]:
    """Process each recording separately, and stack the features."""
    long = len(recordings[0]) // 160 > 100
    more: dict[str, Any] = {"padding": "longest", "truncation": False} if long else {}
    alone = [
        whisper.processor(recording, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt", **more)
        for recording in recordings
    ]
    width = max(features.input_features.shape[-1] for features in alone)
    return {
        name: torch.cat([pad(features[name], (0, width - features[name].shape[-1])) for features in alone])
        for name in ("input_features", "attention_mask")
    }


def batches(way: Way) -> list[list[int]]:
    """Batch as `transcribe` documents it: recordings of one window separately, in order."""
    size = way.ours.get("batch_size", 8)
    kinds = [[place for place, seconds in enumerate(way.seconds) if (seconds > 1.0) == long] for long in (False, True)]
    return [places[at : at + size] for places in kinds for at in range(0, len(places), size)]


_stock: dict[str, dict[int, list[dict[str, Any]]]] = {}


def stock(whisper: LoadedWhisper, name: str) -> dict[int, list[dict[str, Any]]]:
    """Return each recording's segments by transformers' own loop."""
    way = WAYS[name]
    if name not in _stock:
        _stock[name] = {}
        options = {"task": "transcribe", "return_timestamps": False, **way.stock}
        if "prompt_ids" in options:
            options["prompt_ids"] = whisper.processor.get_prompt_ids(options["prompt_ids"], return_tensors="pt")
        for places in batches(way):
            recordings = [sound(way.seconds[place], place) for place in places]
            timed = {"return_timestamps": options["return_timestamps"] or way.seconds[places[0]] > 1.0}
            out: Any = whisper.model.generate(
                **features(whisper, recordings), **{**options, **timed}, return_segments=True
            )
            _stock[name] |= zip(places, out["segments"], strict=True)
            rows = [torch.cat([segment["tokens"] for segment in row]).tolist() for row in out["segments"]]
            ends = whisper.model.generation_config.pad_token_id
            for row, sequence in zip(rows, out["sequences"].tolist(), strict=True):
                assert row == sequence[: len(row)]  # segments are the whole of it
                assert set(sequence[len(row) :]) <= {ends}
    return _stock[name]


STOCK = [(name, DRAFTERS[place % 3]) for place, name in enumerate(WAYS)]


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # transformers' own call
@pytest.mark.parametrize(("name", "drafter"), slow_but(STOCK, slice(None, None, 2)))
def test_equals_stock(whisper: LoadedWhisper, name: str, drafter: str | None) -> None:
    way, before = WAYS[name], whisper.model.config._attn_implementation
    wanted = stock(whisper, name)
    whisper.model.set_attn_implementation(before or "sdpa")  # word timestamps leave the model otherwise
    recordings = [sound(seconds, place) for place, seconds in enumerate(way.seconds)]
    audio: Any = recordings if len(recordings) > 1 else recordings[0]
    found: Any = mmdec.transcribe(audio, sample_rate=RATE, model=whisper, drafter=drafter, **way.ours)
    tokenizer = whisper.tokenizer
    assert whisper.model.config._attn_implementation == before
    for place, transcript in enumerate(found if isinstance(found, list) else [found]):
        tokens = [token for segment in wanted[place] for token in segment["tokens"].tolist()]
        assert transcript.tokens == tokens
        assert transcript.text == tokenizer.decode(tokens, skip_special_tokens=True).strip()
        if not way.ours.get("timestamps"):
            assert transcript.segments == []
            continue
        assert len(transcript.segments) == len(wanted[place])
        for segment, theirs in zip(transcript.segments, wanted[place], strict=True):
            assert segment.tokens == theirs["tokens"].tolist()
            if way.ours["timestamps"] == "segment" or not segment.words:
                assert segment.start == pytest.approx(min(float(theirs["start"]), transcript.seconds), abs=1e-3)
                assert segment.end == pytest.approx(min(float(theirs["end"]), transcript.seconds), abs=1e-3)
            else:
                assert (segment.start, segment.end) == (segment.words[0].start, segment.words[-1].end)
            if way.ours["timestamps"] == "word":
                assert segment.words is not None
                times = [time for word in segment.words for time in (word.start, word.end)]
                assert times == sorted(times)
                assert all(time <= transcript.seconds for time in times)  # nothing is said behind the sound
                spoken = "".join(word.text for word in segment.words)
                assert spoken.strip() == segment.text or "\ufffd" in spoken


def test_the_grid_covers_windows_segments_and_drafts(whisper: LoadedWhisper) -> None:
    """Otherwise the grid would prove nothing: several windows, texts that end, segments, drafts of several kinds."""
    windows = [{float(segment["start"]) // 1 for segment in row} for row in stock(whisper, "long segments").values()]
    assert max(map(len, windows)) >= 3
    assert any(len(row) > 1 for row in stock(whisper, "segments").values())
    assert stock(whisper, "short") != stock(whisper, "translated")


def test_a_list_is_as_one_by_one(whisper: LoadedWhisper) -> None:
    recordings = [sound(seconds, place) for place, seconds in enumerate(MIXED)]
    together = mmdec.transcribe(recordings, sample_rate=RATE, model=whisper, timestamps="segment")
    for transcript, recording in zip(together, recordings, strict=True):
        alone = mmdec.transcribe(recording, sample_rate=RATE, model=whisper, timestamps="segment", drafter=None)
        assert (transcript.text, transcript.segments, transcript.language) == (
            alone.text,
            alone.segments,
            alone.language,
        )


def test_temperature_fallback_under_a_seed_equals_stock(whisper: LoadedWhisper) -> None:
    ladder: dict[str, Any] = {"temperature": (0.0, 0.7), "logprob_threshold": -0.2}
    torch.manual_seed(1)
    out: Any = whisper.model.generate(
        **features(whisper, [sound(2.6)]), **ladder, task="transcribe", return_timestamps=True, return_segments=True
    )
    for drafter in ("medusa", None):
        torch.manual_seed(1)
        found = mmdec.transcribe(sound(2.6), sample_rate=RATE, model=whisper, drafter=drafter, **ladder)
        assert found.tokens == out["sequences"][0].tolist()


def test_rows_that_fall_back_are_independent(whisper: LoadedWhisper) -> None:
    """Rounds of a batch where some rows are decoded again are those of each recording by itself."""
    ladder: dict[str, Any] = {"temperature": (0.0, 1e-4), "logprob_threshold": -1.5, "drafter": None}
    recordings = [sound(seconds, place) for place, seconds in enumerate((1.2, 1.4, 1.3))]
    alone = [mmdec.transcribe(recording, sample_rate=RATE, model=whisper, **ladder) for recording in recordings]
    once = [
        mmdec.transcribe(recording, sample_rate=RATE, model=whisper, drafter=None, temperature=0.0)
        for recording in recordings
    ]
    assert all(a.rounds < b.rounds < 2 * a.rounds for a, b in zip(once, alone, strict=True))  # some windows, not all
    assert len({transcript.rounds for transcript in alone}) > 1
    together = mmdec.transcribe(recordings, sample_rate=RATE, model=whisper, **ladder)
    assert [transcript.rounds for transcript in together] == [transcript.rounds for transcript in alone]


def test_rounds_are_passes_of_the_decoder(whisper: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def listen(*_: Any) -> None:
        nonlocal count
        count += 1

    hook = whisper.model.get_decoder().register_forward_hook(listen)
    try:
        plain = mmdec.transcribe(sound(2.6), sample_rate=RATE, model=whisper, drafter=None, language="en")
        assert plain.rounds == count
        assert plain.tokens_per_round == 1.0
        count = 0
        drafted = mmdec.transcribe(
            sound(2.6),
            sample_rate=RATE,
            model=whisper,
            drafter="lookup",
            num_speculative_tokens=4,  # a learned number depends on the clock
            language="en",
        )
    finally:
        hook.remove()
    assert drafted.rounds == count < plain.rounds
    assert drafted.tokens_per_round > 1


@pytest.mark.parametrize("name", slow_but(WAYS, ("detected", "mixed", "long", "long words", "thresholds")))
def test_a_window_is_encoded_once(whisper: LoadedWhisper, name: str) -> None:
    """For its language, for silence, for its text at each temperature, and by the same attention for words."""
    passes, kinds, encoder = list[int](), set[str](), whisper.model.get_encoder()

    def listen(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        passes.append(len(args[0] if args else kwargs["input_features"]))
        kinds.add(module.config._attn_implementation)

    hook = encoder.register_forward_hook(listen, with_kwargs=True)
    way = WAYS[name]
    recordings: list[Any] = [sound(seconds, place) for place, seconds in enumerate(way.seconds)]
    ways = dict(way.ours)
    if name == "thresholds":
        ways["temperature"] = (0.0, 1e-4)
    try:
        found = mmdec.transcribe(recordings, sample_rate=RATE, model=whisper, **ways)
    finally:
        hook.remove()
    assert sum(passes) <= sum(transcript.windows for transcript in found)
    if name == "thresholds":
        assert sum(passes) < sum(transcript.windows for transcript in found)  # some were decoded again
    assert kinds == {"sdpa"}


SMALLER = ("short", "batch", "long batch", "long words", "thresholds")


@pytest.mark.parametrize("name", slow_but(sample(SMALLER, ("batch", "long words", "thresholds")), ("long words",)))
def test_a_smaller_whisper_runs_its_own_encoder(whisper: LoadedWhisper, name: str) -> None:
    """One whose encoder has another size, as tiny for base: it hears each window itself, and drafts."""
    way = WAYS[name]
    recordings: list[Any] = [sound(seconds, place) for place, seconds in enumerate(way.seconds)]
    small = network(whisper.tokenizer, 5, d_model=16)
    heard: list[int] = []
    small.get_encoder().register_forward_hook(lambda *_: heard.append(1))
    options: dict[str, Any] = {"sample_rate": RATE, "model": whisper, "num_speculative_tokens": 3, **way.ours}
    found = mmdec.transcribe(recordings, drafter=small, **options)
    wanted = mmdec.transcribe(recordings, drafter=None, **options)
    assert heard
    assert [transcript.tokens for transcript in found] == [transcript.tokens for transcript in wanted]
    own = mmdec.transcribe(recordings, drafter=whisper.model, **options)  # the same states, whoever encodes
    assert [transcript.tokens for transcript in own] == [transcript.tokens for transcript in wanted]


def test_the_folder_of_a_smaller_whisper_drafts_without_changing_the_text(
    whisper: LoadedWhisper, tmp_path: Path
) -> None:
    """`--drafter FOLDER` takes one with its own encoder, and one of fewer decoder layers on the target's states."""
    wanted = mmdec.transcribe(sound(0.7), sample_rate=RATE, model=whisper, drafter=None)
    for name, sizes in (("own", {"d_model": 16}), ("fewer", {"decoder_layers": 1})):
        network(whisper.tokenizer, 5, **sizes).save_pretrained(tmp_path / name)
        found = mmdec.transcribe(
            sound(0.7), sample_rate=RATE, model=whisper, drafter=str(tmp_path / name), num_speculative_tokens=3
        )
        assert found.tokens == wanted.tokens
        assert found.rounds


def test_a_smaller_whisper_of_another_vocabulary_is_refused(whisper: LoadedWhisper) -> None:
    small = network(whisper.tokenizer, 5, d_model=16, vocab_size=len(whisper.tokenizer) + 1)
    with pytest.raises(mmdec.InputError, match=r"`drafter` must have at most the target's .* tokenizer"):
        mmdec.transcribe(sound(0.7), sample_rate=RATE, model=whisper, drafter=small)


def test_heads_by_folder_or_object_give_the_models_own_text(whisper: LoadedWhisper) -> None:
    assert whisper.directory is not None
    folder: Path = whisper.directory / "medusa"
    for drafter in (folder, str(folder), load_heads(folder, whisper.model)):
        found = mmdec.transcribe(sound(0.7), sample_rate=RATE, model=whisper, drafter=drafter, language="en")
        assert found.tokens == [token for segment in stock(whisper, "short")[0] for token in segment["tokens"].tolist()]


HALVED = [(name, DRAFTERS[(place + 1) % 3]) for place, name in enumerate(WAYS)]


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize(("name", "drafter"), sample(HALVED, slice(None, None, 4)))
def test_equals_stock_by_half_precision_copies(
    whisper: LoadedWhisper, name: str, drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "MIN_COPIED_VOCABULARY", 1)
    monkeypatch.setattr(float16_linear, "MIN_PASSES_BEFORE_COPY", 1)
    test_equals_stock(whisper, name, drafter)
    assert any(copy._copies is not None for copy in float16_linear._copies.values())
