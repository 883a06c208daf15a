"""Tests the counts of `mmdec.transcribe`: rounds, windows, and each recording's seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmdec
from mmdec.core.scheduler import Scheduler
from mmdec.tasks.usage import Usage
from mmdec.types import Round
from mmdec.whisper.checkpoint import LoadedWhisper
from mmdec.whisper.decoder import FastDecoder
from mmdec.whisper.long_form import RecordingPart, prepare_recording, transcribe_windows
from mmdec.whisper.options import TranscribeOptions
from mmdec.whisper.request import TranscriptionRequest
from tests.conftest import buzz
from tests.unit.whisper.short_transcripts import transcribe


def test_reported_seconds_add_up(whisper: LoadedWhisper, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves in the encoder's and the decoder's passes alone."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def moving(seconds: float) -> Any:
        def move(*_: Any) -> None:
            nonlocal now
            now += seconds

        return move

    hooks = [
        whisper.model.get_encoder().register_forward_hook(moving(100.0), prepend=True),
        whisper.model.get_decoder().register_forward_hook(moving(1.0), prepend=True),
    ]
    try:
        transcript = transcribe(model=whisper, language="en")
        assert transcript.timings == {
            "features": 0,
            "encoder": 100,
            "decoder": transcript.rounds,
            "drafter": 0,
            "total": 100 + transcript.rounds,
        }
        detected = transcribe(model=whisper)  # transformers asks twice for the window's states
        assert (detected.timings["encoder"], detected.timings["decoder"]) == (100, detected.rounds + 1)
        silent = transcribe(model=whisper, language="en", no_speech_threshold=1.0, logprob_threshold=-100.0)
        assert silent.timings["encoder"] == 100
        before = now
        batch = transcribe([buzz(0.5), buzz(1.6), buzz(2.7, 1)], model=whisper, language="en", timestamps="word")
        assert sum(transcript.timings["total"] for transcript in batch) == pytest.approx(now - before)
        assert sum(transcript.timings["encoder"] for transcript in batch) % 100 == pytest.approx(0)
        assert batch[1].timings["encoder"] < batch[2].timings["encoder"]  # fewer windows
        hooks.pop().remove()  # else passes are not shared: nothing would call the hook
        passes, run_shares = list[int](), FastDecoder.run_shares

        def shared(decoder: FastDecoder, shares: Any) -> torch.Tensor:
            passes.append(len(shares))
            moving(1.0)()
            return run_shares(decoder, shares)

        monkeypatch.setattr(FastDecoder, "run_shares", shared)
        some = transcribe([buzz(0.5, seed) for seed in range(6)], model=whisper, language="en", max_new_tokens=60)
        assert max(passes) > 1
        assert sum(transcript.timings["decoder"] for transcript in some) == pytest.approx(len(passes))
        assert all(transcript.timings["decoder"] < transcript.rounds for transcript in some)
    finally:
        for hook in hooks:
            hook.remove()
    assert not whisper.model.get_encoder()._forward_hooks
    assert not whisper.model.get_decoder()._forward_pre_hooks


def test_usage_is_counted_by_the_loop_itself(whisper: LoadedWhisper) -> None:
    """The `custom_generate` reports its rounds: nothing listens to the decoder."""
    network, hooks = whisper.model.get_decoder(), list[int]()
    transcribe(model=whisper, language="en", progress=lambda *_: hooks.append(len(network._forward_hooks)))
    assert hooks
    assert set(hooks) == {0}
    speculation = mmdec.speculate("lookup", num_speculative_tokens=3)
    call = TranscriptionRequest.from_options(whisper, TranscribeOptions(language="en"), 2, speculation)
    usages = list[Usage]()
    for index, seconds in enumerate((1.7, 2.9)):
        scheduler = Scheduler()
        recording = prepare_recording(call, RecordingPart(index, torch.from_numpy(buzz(seconds))))
        task = scheduler.add(transcribe_windows(recording))
        scheduler.run()
        assert task.error is None
        usage = task.result.usage
        assert 1 < usage.prompts < usage.rounds
        assert usage.tokens_per_round == usage.tokens_after_prompts / (usage.rounds - usage.prompts) > 1
        assert usage.tokens_after_prompts + usage.prompts >= sum(
            len(segment.tokens) for segment in task.result.segments
        )
        assert min(usage.seconds[stage] for stage in ("encoder", "decoder", "drafter")) > 0
        usages.append(usage)
    assert usages[0].prompts < usages[1].prompts


def test_equal_recordings_that_fall_back_have_equal_usage(whisper: LoadedWhisper) -> None:
    """Rows that are decoded again are known by their features, in their order: equal ones must not be mistaken."""
    ladder: dict[str, Any] = {"temperature": (0.0, 1e-4), "logprob_threshold": -1.5, "max_new_tokens": None}
    same, other = buzz(1.2), buzz(1.4, 1)
    wanted = [transcribe(sound, model=whisper, **ladder) for sound in (same, other)]
    first, second, third = transcribe([same, other, same], model=whisper, **ladder)
    assert [first.rounds, second.rounds, third.rounds] == [wanted[number].rounds for number in (0, 1, 0)]
    assert [first.windows, second.windows, third.windows] == [wanted[number].windows for number in (0, 1, 0)]
    assert any(transcript.windows > 2 for transcript in wanted)  # else nothing was decoded again


def test_equal_recordings_that_were_sampled_count_their_own_texts(whisper: LoadedWhisper) -> None:
    """One of them is decoded again and the other is not, though their features are the same: no seed is given."""
    texts: list[list[list[int]]] = [[], []]  # the tokens of each decoding of each recording

    def hear(round_: Round) -> None:
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            if not round_.index:
                texts[row].append([])
            texts[row][-1] += tokens

    ladder: dict[str, Any] = {"temperature": (0.7, 0.8, 0.9), "logprob_threshold": -2.1, "max_new_tokens": None}
    torch.manual_seed(3)
    both = transcribe([buzz(1.2)] * 2, model=whisper, on_round=hear, **ladder)
    assert [transcript.windows for transcript in both] == [len(each) for each in texts]
    assert both[0].windows != both[1].windows
    for transcript, decodings in zip(both, texts, strict=True):
        assert str(transcript.tokens[-3:])[1:-1] in str(decodings[-1])
